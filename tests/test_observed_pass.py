"""keep=Observe under `attn_implementation="kizuki"`: read in the pass that computes, and the pass is left alone."""

from __future__ import annotations

import pytest
import torch
from test_implementation import models
from tiny import padding, some_ids

import kizuki


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "bert"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_recording_reads_in_the_pass_that_computes(name, mode, monkeypatch):
    """keep=Observe folds its readings into kizuki's own pass: the same numbers, and A is not read again."""
    _, model = models(name)
    model.eval()
    ids, what = some_ids(), kizuki.Observe(topk=3, entropy=True, received=True)
    given = {"attention_mask": padding("left")} if name != "gpt_oss" else {}
    with mode():
        plain = model(ids, **given)[0]
        with kizuki.record(model) as held:
            model(ids, **given)
        again = []
        monkeypatch.setattr(kizuki.AttentionMatrix, "observe", lambda *_: again.append(1))
        with kizuki.record(model, keep=what) as seen:
            assert torch.equal(model(ids, **given)[0], plain)
        monkeypatch.undo()
    assert not again
    for layer in held:
        read, matrix = seen.observation(layer), held[layer]
        weights, keys = matrix.topk(3)
        assert torch.equal(read.topk[0], weights)
        assert torch.equal(read.topk[1], keys)
        assert torch.equal(read.entropy, matrix.entropy())
        assert torch.equal(read.received, matrix.received())
        assert read.topk[1].dtype is torch.int64
        assert not any(t.requires_grad for t in (*read.topk, read.entropy, read.received, read.lse))


def test_what_cannot_be_read_leaves_the_pass_of_kizuki_alone():
    _, model = models("llama")
    with torch.no_grad(), kizuki.record(model, keep=kizuki.Observe(pool=(99, 99))) as recording:
        model(some_ids())
    with pytest.raises(kizuki.models.RecordError, match="rows is 99 but must be a whole number in 1 … 13"):
        recording.observation(0)


def test_of_readings_alone_no_file_is_made(tmp_path):
    _, model = models("llama")
    with torch.no_grad(), kizuki.record(model, keep=kizuki.Observe(entropy=True)) as recording:
        model(some_ids())
    with pytest.raises(
        kizuki.models.RecordError, match=r"there is no layer to save; keep=Observe.* keeps no q and k"
    ):
        recording.save(tmp_path / "a.safetensors")
    for wrong in (True, 9):
        with pytest.raises(kizuki.models.RecordError, match=rf"recording\[{wrong}\]: .*recorded are 0"):
            recording.observation(wrong)
