"""The leak test of a model: 0 to the bit where its mask holds, and the place where one was lost."""

from __future__ import annotations

import pytest
import torch
from tiny import TOKENS, padding, some_ids, tiny
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import kizuki
from kizuki.models import leaks

DOCUMENTS = torch.tensor([0] * 5 + [1] * 8)
PACKED = torch.cat([torch.arange(5), torch.arange(8)])[None].expand(3, -1)


def recorded(model, **inputs):
    with torch.no_grad(), kizuki.record(model) as recording:
        model(some_ids(), use_cache=False, **inputs)
    return recording


@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "eager"), ("llama", "sdpa"), ("mistral", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")],
)
def test_a_causal_model_does_not_read_the_future(family, attention):
    found = leaks(recorded(tiny(family, attention)))
    assert found.none
    assert found.future.shape == (3, 3, 4)
    assert not found.future.any()
    assert found.documents is None
    assert str(found) == "future: none"
    assert found.where() == []


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_read(side):
    real = padding(side)
    recording = recorded(tiny("llama", "sdpa"), attention_mask=real)
    found = leaks(recording, padding=real == 0)
    assert found.padding.shape == (3, 3, 4)
    assert found.none
    wrong = leaks(recording, padding=real == 1)  # asked the other way round, the same numbers are not 0
    assert bool((wrong.padding > 0).all())


def test_packed_documents_do_not_leak_and_unpacked_ones_do():
    model = tiny("llama", "sdpa")
    assert leaks(recorded(model, position_ids=PACKED), documents=DOCUMENTS).none
    recording = recorded(model)
    found = leaks(recording, documents=DOCUMENTS)
    assert not found.none
    assert not found.future.any()
    for layer in recording:  # the most of any row, by the dense matrix
        other = (DOCUMENTS[:, None] != DOCUMENTS) * recording[layer][...]
        torch.testing.assert_close(found.documents[:, layer], other.sum(-1).amax(-1))
    assert len(found.where()) == 3 * 3 * 4
    assert found.where()[0][:4] == ("documents", 0, 0, 0)
    assert "documents: LEAK in 36 of 36 heads, layers 0, 1, 2, up to" in str(found)


@pytest.fixture
def unmasked():
    """An attention function that is registered without its mask function, and so runs unmasked."""

    def attention(module, query, key, value, mask, **options):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, None, **options | {"is_causal": False}
        )

    AttentionInterface.register("kz_unmasked", attention)
    yield "kz_unmasked"
    del AttentionInterface._global_mapping["kz_unmasked"]


def test_an_attention_without_its_mask_is_found(unmasked):
    model = tiny("llama", "sdpa")
    model.set_attn_implementation(unmasked)
    recording = recorded(model)
    found = leaks(recording)
    assert not found.none
    after = torch.ones(TOKENS, TOKENS).triu(1)
    for layer in recording:
        torch.testing.assert_close(found.future[:, layer], (recording[layer][...] * after).sum(-1).amax(-1))


def test_an_encoder_is_asked_about_padding_alone():
    real = padding("right")
    model = tiny("bert", "sdpa")
    with torch.no_grad(), kizuki.record(model, layers=[1], heads=[2, 3]) as recording:
        model(some_ids(), attention_mask=real)
    found = leaks(recording, padding=real == 0, future=False)
    assert found.none
    assert found.future is None
    seen = leaks(recording)
    assert not seen.none
    assert {place[2:4] for place in seen.where()} == {(1, 2), (1, 3)}


def test_nothing_asked_for_is_refused():
    recording = recorded(tiny("llama", "sdpa"))
    with pytest.raises(kizuki.OptionError, match="nothing is asked for"):
        leaks(recording, future=False)
    with pytest.raises(kizuki.KizukiTypeError, match="recording is a LlamaForCausalLM"):
        leaks(tiny("llama"))
    with pytest.raises(ValueError, match="documents has shape"):
        leaks(recording, documents=torch.zeros(4, dtype=torch.int64))
