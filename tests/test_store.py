"""Recordings on disk: is what comes back what was kept, a layer at a time, and is nothing half written?"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers as tf
from stored import assert_same, pieces, recorded, together
from tiny import FAMILIES, behind, some_ids, tiny

import kizuki
from kizuki.models import RecordError, Tokens
from kizuki.models import recording as recordings
from kizuki.models.store import check_target


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """One small recording, the bytes of its file, and the path."""
    recording = recorded("gpt_oss", "left")
    path = recording.save(tmp_path_factory.mktemp("kept") / "kept.safetensors")
    return recording, path.read_bytes(), path


# What comes back


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_comes_back_with_the_same_bits(name, tmp_path):
    recording = recorded(name, "left")
    again = kizuki.open(recording.save(tmp_path / "a.safetensors"))
    assert_same(again, recording)
    assert again.versions == {
        "kizuki": kizuki.__version__,
        "torch": torch.__version__,
        "transformers": tf.__version__,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("options", [{"layers": [0, 2], "heads": [1, 2]}, {"layers": 1, "heads": 3}])
def test_chosen_layers_and_heads(options, tmp_path):
    recording = recorded("gemma2", **options)
    assert_same(kizuki.open(recording.save(tmp_path / "a")), recording)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype_is_kept_as_it_is(dtype, tmp_path):
    model = tiny("llama", "sdpa").to(dtype)
    with torch.inference_mode(), kizuki.record(model) as recording:
        model(some_ids())
    again = kizuki.open(recording.save(tmp_path / "a"))
    assert again[0].dtype == again.value(0).dtype == dtype
    assert_same(again, recording)


def test_packed_documents_and_a_preallocated_cache(tmp_path):
    model, ids = tiny("llama", "sdpa"), some_ids(2, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6, 0, 1]])
    with torch.no_grad(), kizuki.record(model) as recording:
        model(ids, position_ids=positions, use_cache=False)
        packed = kizuki.open(recording.save(tmp_path / "packed"))
        assert packed.rule(0) == "causal & documents"
        assert_same(packed, recording)
        cache = tf.StaticCache(config=model.config, max_cache_len=64)
        model(ids, **behind(cache))
        model(ids[:, :1], **behind(cache))
    step = kizuki.open(recording.save(tmp_path / "step"))
    assert_same(step, recording)
    assert step[0].shape == (2, 4, 1, 10)
    held = safetensors.torch.load_file(tmp_path / "step")
    assert held["layers.0.key"].shape[2] == 10  # not the 64 that the cache has room for


def test_any_reader_of_safetensors_reads_the_tensors_and_a_mask_is_held_once(kept):
    recording, data, path = kept
    held = safetensors.torch.load_file(path)
    table = pieces(data)[1]
    for entry in table["layers"]:
        matrix = recording[entry["layer"]]
        assert torch.equal(held[entry["query"]], matrix.query)
        assert torch.equal(held[entry["key"]], matrix.key)
        assert torch.equal(held[entry["value"]], recording.value(entry["layer"]))
    assert table["layers"][1]["mask"] == "causal & keys"
    layers = [entry["rule"]["keys"] for entry in table["layers"]]
    assert sorted(name for name in held if name.endswith("keys")) == sorted(set(layers))
    assert len(data) < sum(t.numel() * t.element_size() for t in held.values()) + 8_000


def test_an_opened_recording_saves_to_the_same_bytes_even_over_itself(kept, tmp_path):
    _, data, path = kept
    again = kizuki.open(path)
    target = tmp_path / "b"
    assert again.save(target).read_bytes() == data
    over = kizuki.open(target)
    over.save(target)
    assert target.read_bytes() == data
    assert torch.equal(over[0][...], again[0][...])


def test_tokens_come_back(tmp_path):
    model = tiny("llama")
    text = '東京メトロ e\u0301 👩‍👧\n"x" \\'
    tokens = Tokens(text, [5, 6, 7], [(0, 5), (5, 8), (8, len(text))], ["東京メトロ", " é", "…"], [False] * 3)
    with torch.no_grad(), kizuki.record(model) as recording:
        model(torch.tensor([tokens.ids]))
        recording.tokens = tokens
        assert kizuki.open(recording.save(tmp_path / "a")).tokens == tokens
        model(torch.tensor([[1, 2, 3]]))
    assert recording.tokens is None  # they were another pass's
    assert kizuki.open(recording.save(tmp_path / "a")).tokens is None


@pytest.mark.model
def test_run_sets_the_tokens_of_real_models(tmp_path):
    from kizuki.models import load, run

    for name in ("smollm2", "minilm"):
        done = run(load(name), "東京メトロ, cafe\u0301 👍🏽!", layers=[0, 5], k=0)
        again = kizuki.open(done.recording.save(tmp_path / name))
        assert again.tokens == done.tokens
        assert_same(again, done.recording)


def test_a_layer_that_cannot_be_shown_comes_back_as_its_error(tmp_path):
    recording = recorded()
    recording._captures[1].sample.add_(1)  # as if the model did something else there
    recording._captures[2].key.add_(1)  # as a cache that is written over
    again = kizuki.open(recording.save(tmp_path / "a"))
    assert torch.equal(again[0][...], recording[0][...])
    with pytest.raises(RecordError, match=r"recording\[1\]: .*does not give this layer's own output"):
        again[1]
    with pytest.raises(RecordError, match=r"recording\[2\]: .*written over after the pass"):
        again[2]
    assert again.layers == (0, 1, 2)


# In parts


def test_a_layer_is_read_when_it_is_asked_for_and_without_the_others(kept, tmp_path):
    recording, data, _ = kept
    entries, table, _ = pieces(data)
    begin = len(data) - len(pieces(data)[2])
    broken = bytearray(data)
    for layer in (0, 2):
        at = begin + entries[table["layers"][layer]["value"]]["data_offsets"][0]
        broken[at + 5] ^= 1
    path = tmp_path / "a"
    path.write_bytes(broken)
    again = kizuki.open(path)  # reads nothing of them
    assert torch.equal(again[1][...], recording[1][...])
    for layer in (0, 2):
        with pytest.raises(
            RecordError, match=rf"layers\.{layer}\.value are damaged \(their checksum differs\)"
        ):
            again[layer]
    assert torch.equal(again[1][...], recording[1][...])


def test_open_holds_the_layers_that_are_named(kept):
    recording, _, path = kept
    again = kizuki.open(path, layers=[2, 0])
    assert again.layers == (0, 2)
    assert torch.equal(again[2][...], recording[2][...])
    assert kizuki.open(path, layers=1).layers == (1,)
    for wrong, says in (
        (3, "layer 3 is not in it; saved are 0, 1, 2"),
        ([], "layers is empty"),
        (1.5, "a float"),
    ):
        with pytest.raises(RecordError, match=says):
            kizuki.open(path, layers=wrong)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped pages")
def test_nothing_but_the_header_is_in_memory_after_opening(tmp_path):
    model = tiny("llama", "sdpa")
    with torch.no_grad(), kizuki.record(model) as recording:
        model(some_ids(1, 40).repeat(100, 1))
    path = recording.save(tmp_path / "a.safetensors").resolve()

    def resident() -> int:
        lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
        total = 0
        for line in lines:
            if line.endswith(str(path)):
                total += next(int(part.split()[1]) for part in lines if part.startswith("Rss:"))
        return total * 1024

    again = kizuki.open(path)
    layer = sum(t.numel() * 4 for t in (recording[0].query, recording[0].key, recording.value(0)))
    assert resident() < layer / 4
    assert torch.equal(again[1][...], recording[1][...])
    assert layer * 0.9 < resident() < layer * 1.5
    assert path.stat().st_size > 2.9 * layer


# What a Recording checks holds for an opened one


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 1.0},
        {"softcap": 1.0},
        {"mask": "keys", "rule": {"right": None}},
        {"mask": "causal & window(4, 0) & keys", "rule": {"left": 4}},
    ],
    ids=["scale", "softcap", "not causal", "a window"],
)
def test_a_layer_that_does_not_explain_its_output_is_not_handed_out(change, kept, tmp_path):
    entries, table, rest = pieces(kept[1])
    layer = table["layers"][1]
    layer.update({**change, "rule": layer["rule"] | change.get("rule", {})})
    path = tmp_path / "a"
    path.write_bytes(together(entries, table, rest))
    again = kizuki.open(path)
    with pytest.raises(RecordError, match=r"recording\[1\]: .*does not give this layer's own output"):
        again[1]
    assert torch.equal(again[0][...], kept[0][0][...])


# Writing


def test_what_is_not_saved_says_why(tmp_path, kept):
    with kizuki.record(tiny("llama")) as nothing:
        pass
    with pytest.raises(RecordError, match="no layer to save; no forward pass"):
        nothing.save(tmp_path / "a")
    recording = kizuki.open(kept[2])
    recording.tokens = Tokens("ab", [1, 2], [(0, 1), (1, 2)], ["a", "b"], [False, False])
    with pytest.raises(RecordError, match="is a batch of 3"):
        recording.save(tmp_path / "a")
    recording.tokens = "ab"
    with pytest.raises(RecordError, match=r"is a str but must be a kizuki\.models\.Tokens"):
        recording.save(tmp_path / "a")
    model = tiny("llama")
    with torch.no_grad(), kizuki.record(model) as recording:
        model(torch.tensor([[1, 2, 3]]))
    recording.tokens = Tokens("ab", [1, 2], [(0, 1), (1, 2)], ["a", "b"], [False, False])
    with pytest.raises(RecordError, match="2 tokens but there are 3 keys"):
        recording.save(tmp_path / "a")
    recording.tokens = Tokens("abc", [1, 2, 3], [(0, 1), (1, 2)], ["a", "b", "c"], [False] * 3)
    with pytest.raises(RecordError, match="of other lengths"):
        recording.save(tmp_path / "a")
    recording.tokens = Tokens("\ud800", [1, 2, 3], [(0, 1)] * 3, ["a", "b", "c"], [False] * 3)
    with pytest.raises(RecordError, match="half a surrogate pair"):
        recording.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_capture_with_something_new_in_it_is_not_saved_without_it(tmp_path):
    @dataclasses.dataclass(eq=False)
    class Wider(recordings.Capture):
        gate: torch.Tensor | None = None

    recording = recorded()
    fields = {
        f.name: getattr(recording._captures[0], f.name)
        for f in dataclasses.fields(recordings.Capture)
        if f.init
    }
    recording._captures[0] = Wider(**fields)
    assert torch.equal(kizuki.open(recording.save(tmp_path / "a"))[0][...], recording[0][...])
    recording._captures[0] = Wider(**fields, gate=torch.ones(1))
    with pytest.raises(
        RecordError, match=r"recording\.save: layer 0 has a gate, for which the file has no place"
    ):
        recording.save(tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_named_layers_and_biases_are_kept(tmp_path):
    """T5: two stacks, cross-attention, and a learned position bias in the scores."""
    config = tf.T5Config(
        vocab_size=13, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    model = tf.T5ForConditionalGeneration(config).eval()
    with kizuki.record(model) as recording, torch.no_grad():
        model(torch.tensor([[1, 2, 3, 4]]), decoder_input_ids=torch.tensor([[0, 5, 6]]))
    again = kizuki.open(recording.save(tmp_path / "t5"))
    assert list(again) == list(recording)
    assert "decoder.1.cross" in again
    for layer in recording:
        assert torch.equal(again[layer][...], recording[layer][...]), layer
        assert (again[layer].problem.bias is None) == (recording[layer].problem.bias is None)
    assert recording["encoder.0"].problem.bias is not None
    alone = kizuki.open(tmp_path / "t5", layers="decoder.0.self")
    assert list(alone) == ["decoder.0.self"]


@pytest.mark.posix
def test_places_that_cannot_be_written(tmp_path, kept):
    recording = kept[0]
    os.mkfifo(tmp_path / "pipe")
    for path, says in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "a", "there is no folder"),
        (tmp_path / "pipe", "not an ordinary file"),
        (tmp_path / ("a" * 300), "cannot be written"),
        ("/proc/a", "cannot be written" if Path("/proc").is_dir() else "there is no folder"),
    ):
        with pytest.raises(RecordError, match=says) as caught:
            recording.save(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(RecordError, match="path is a NoneType"):
        recording.save(None)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_full_disk_leaves_what_was_there(tmp_path, kept, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"before")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match=r"cannot be written \(No space left on device\)"):
        kept[0].save(path)
    assert path.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.posix
def test_a_killed_writer_leaves_no_half_file_under_the_name(tmp_path, kept):
    places = ("amid the data", "before the end", "before the name")
    for place in places:
        (tmp_path / place).mkdir()
        (tmp_path / place / "a").write_bytes(b"before")
    code = """
import os, signal, sys, kizuki
from kizuki.models import store
recording = kizuki.open(sys.argv[1])
def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)
def cut_short(file, tensor):
    file.write(b"x" * 99), file.flush(), kill()
deaths = (store, "_write", cut_short), (os, "fsync", kill), (os, "replace", kill)
for place, (where, name, dies) in zip(sys.argv[2:], deaths):
    child = os.fork()
    if child == 0:
        setattr(where, name, dies)
        recording.save(place + "/a")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    arguments = [str(kept[2]), *(str(tmp_path / place) for place in places)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [str(-signal.SIGKILL)] * 3, done.stderr
    for place in places:
        assert (tmp_path / place / "a").read_bytes() == b"before"
        left = sorted(path.name for path in (tmp_path / place).iterdir())
        assert len(left) == 2
        assert left[0].startswith(".a.")
        assert left[0].endswith(".part")
    half = next((tmp_path / "amid the data").glob(".a.*.part"))
    with pytest.raises(RecordError, match="damaged or no safetensors file"):
        kizuki.open(half)  # not even by its own name


@pytest.mark.posix
def test_the_file_behind_a_link_is_replaced_and_the_link_stays(tmp_path, kept):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert check_target(tmp_path / "link") == (tmp_path / "real").resolve()
    kept[0].save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == kept[1]


@pytest.mark.posix
def test_a_saved_file_has_the_mode_of_any_new_file(tmp_path, kept):
    before = os.umask(0o027)
    try:
        path = kept[0].save(tmp_path / "a")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
