"""Recording real models: is what is kept what the model read, and is the model left alone?"""

from __future__ import annotations

import copy
import threading

import numpy as np
import oracle
import pytest
import torch
from tiny import EAGER_ONLY, FAMILIES, TOKENS, padding, some_ids, tiny
from tolerance import assert_accurate
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama import modeling_llama as llama

import kizuki
from kizuki.models import RecordError, Source, load


def assert_weights(
    got: torch.Tensor, models_own: torch.Tensor, matrix: kizuki.AttentionMatrix, seen, **numbers
):
    """Both A and the model's own weights are the formula over the recorded q and k, seen from outside."""
    truth = oracle.plain(matrix.query, matrix.key, visible=seen, dtype=torch.float64, **numbers)[0]
    plain = oracle.plain(matrix.query, matrix.key, visible=seen, **numbers)[0]
    assert_accurate(models_own, truth, plain, "the model's own weights")
    assert_accurate(got, truth, plain, "A")


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_the_weights_that_the_eager_model_gives(name, side):
    model, real, sees = tiny(name), padding(side), FAMILIES[name][2]
    ids = some_ids()
    with torch.no_grad():
        plain = model(ids, attention_mask=real)[0]
        with kizuki.record(model) as recording:
            recorded = model(ids, attention_mask=real)[0]
        weights = model(ids, attention_mask=real, output_attentions=True).attentions
    assert torch.equal(recorded, plain)
    assert recording.layers == tuple(range(3))
    assert recording.passes == 1
    for layer, matrix in enumerate(map(recording.__getitem__, recording)):
        if sees is None:  # chunks of 5 from the first real token; every fourth layer has none
            start = real.argmax(-1).tolist()
            grid = np.stack(
                [
                    oracle.grid(TOKENS, TOKENS, lambda i, j, s=s: j <= i and (j - s) // 5 == (i - s) // 5)
                    for s in start
                ]
            )
        else:
            grid = oracle.grid(TOKENS, TOKENS, lambda i, j, at=layer: sees(i, j, at))[None]
        seen = grid[:, None] & real.bool().numpy()[:, None, None, :]
        live = torch.as_tensor(seen.any(-1)).expand(3, 4, TOKENS)[..., None]
        config = model.config
        numbers = {
            "scale": matrix.scale,
            "softcap": getattr(config, "attn_logit_softcapping", None),
            "sinks": model.model.layers[layer].self_attn.sinks.detach() if name == "gpt_oss" else None,
        }
        got = matrix[...]
        # A row of padding that sees nothing is 0; the model spreads it over its mask's large negative number.
        assert not got[~live.expand_as(got)].any()
        assert_weights(got, torch.where(live, weights[layer], 0), matrix, seen, **numbers)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in EAGER_ONLY])
def test_sdpa_models_record_the_mask_that_eager_models_do(name, side):
    ids, real = some_ids(), padding(side)
    found = []
    for attention in ("eager", "sdpa"):
        model = tiny(name, attention)
        with torch.no_grad():
            plain = model(ids, attention_mask=real)[0]
            with kizuki.record(model) as recording:
                recorded = model(ids, attention_mask=real)[0]
        assert torch.equal(recorded, plain)
        found.append(recording)
    eager, sdpa = found
    for layer in eager:
        assert eager.rule(layer) == sdpa.rule(layer)
        assert torch.equal(eager[layer][...] > 0, sdpa[layer][...] > 0)


def inputs_of(model, suffix):
    """Hooks that keep what enters the modules whose name ends so: the attention output, heads joined."""
    kept = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        for name, module in model.named_modules()
        if name.endswith(suffix)
    ]
    return kept, hooks


@pytest.fixture(scope="module")
def smollm2() -> Source:
    return load("smollm2")


@pytest.fixture(scope="module")
def minilm() -> Source:
    return load("minilm")


@pytest.mark.model
def test_smollm2_every_layer(smollm2, sample_text):
    model = smollm2.model
    ids = torch.tensor([smollm2.tokenize(sample_text).ids])
    ids = torch.cat([ids[:, :50], ids[:, -50:]], 1)  # English and Japanese
    kept, hooks = inputs_of(model, "o_proj")
    with torch.no_grad():
        with kizuki.record(model) as recording:
            recorded = model(ids).logits
        joined = list(kept)
        plain = model(ids).logits
    for hook in hooks:
        hook.remove()
    assert torch.equal(recorded, plain)
    assert recording.layers == tuple(range(30))
    assert {recording.rule(layer) for layer in recording} == {"causal"}
    seen = oracle.causal(100, 100)
    for layer in recording:
        matrix, value = recording[layer], recording.value(layer)
        assert (matrix.key.shape[1], value.shape[1]) == (3, 3)
        truth = oracle.plain(matrix.query, matrix.key, value, visible=seen, dtype=torch.float64)[2]
        own = joined[layer].view(1, 100, 9, 64).transpose(1, 2)
        assert_accurate(matrix @ value, truth, own, f"output of layer {layer}")


@pytest.mark.model
def test_smollm2_rows_equal_output_attentions(smollm2):
    model = smollm2.model
    ids = torch.tensor(
        [smollm2.tokenize("Mika saw that the bird had seen her first. 東京メトロに乗る。").ids]
    )
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad(), kizuki.record(model) as recording:
            weights = model(ids, output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    seen = oracle.causal(ids.shape[1], ids.shape[1])
    for layer in recording:
        matrix = recording[layer]
        rows = matrix[...]
        assert_weights(rows, weights[layer], matrix, seen)
        for h, i in ((0, 0), (4, 7), (8, ids.shape[1] - 1)):
            rows[0, h, i] = matrix[0, h, i]  # rows asked for one at a time
        assert_weights(rows, weights[layer], matrix, seen)


@pytest.mark.model
@pytest.mark.parametrize("side", ["left", "right"])
def test_minilm_padded_batch_rows_equal_output_attentions(minilm, side):
    model, tokenizer = minilm.model, copy.deepcopy(minilm.tokenizer)
    tokenizer.padding_side = side
    texts = [
        "A page holds hundreds of words.",
        "She knew.",
        "東京メトロ: a reader cannot hold them all at once",
    ]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert not bool(batch["attention_mask"].all())
    with torch.no_grad():
        plain = model(**batch).last_hidden_state
        with kizuki.record(model) as recording:
            recorded = model(**batch).last_hidden_state
        model.set_attn_implementation("eager")
        try:
            with kizuki.record(model) as eager:
                weights = model(**batch, output_attentions=True).attentions
        finally:
            model.set_attn_implementation("sdpa")
    assert torch.equal(recorded, plain)
    real = batch["attention_mask"].bool()[:, None, None, :].numpy()
    for layer in eager:
        assert recording.rule(layer) == eager.rule(layer) == "keys"
        assert_weights(eager[layer][...], weights[layer], eager[layer], real)
        assert not recording[layer][...][~torch.as_tensor(real).expand(*recording[layer].shape)].any()


@pytest.mark.model
def test_a_token_is_read_by_no_earlier_one_in_a_decoder_and_by_all_in_an_encoder(smollm2, minilm):
    for source, changes in ((smollm2, False), (minilm, True)):
        ids = torch.tensor([source.tokenize("one two three four five").ids])
        other = ids.clone()
        other[0, -2 if changes else -1] = int(ids[0, 1])
        found = []
        with torch.no_grad():
            for given in (ids, other):
                with kizuki.record(source.model) as recording:
                    source.model(given)
                found.append(recording)
        rows = slice(0, ids.shape[1] - 2)
        same = all(
            torch.equal(found[0][layer][:, :, rows], found[1][layer][:, :, rows]) for layer in found[0]
        )
        assert same is not changes


def state(model):
    """Everything a recording could leave behind."""
    hooks = [
        (
            name,
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            len(module._forward_hooks_always_called),
        )
        for name, module in model.named_modules()
    ]
    table = AttentionInterface.__dict__["get_interface"]
    entries = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS}
    return hooks, table, entries, model.config.to_dict(), [vars(m).keys() for m in model.modules()]


class Boom(RuntimeError):
    pass


@pytest.mark.parametrize("where", ["block", "forward", "head", "nowhere"])
def test_model_and_tables_are_as_they_were(where):
    model, ids = tiny("llama"), some_ids()
    before = state(model)

    def burst(*_):
        raise Boom

    if where in ("forward", "head"):  # in the middle of the layers, or behind them
        part = model.lm_head if where == "head" else model.model.layers[2].mlp
        handle = part.register_forward_pre_hook(burst)
        before = state(model)
    try:
        with kizuki.record(model) as recording, torch.no_grad():
            assert state(model) != before
            model(ids)
            if where == "block":
                raise Boom
    except Boom:
        assert where != "nowhere"
    assert state(model) == before
    if where in ("forward", "head"):
        with pytest.raises(RecordError, match="did not finish"):
            recording[0]
        handle.remove()
    else:
        assert recording[2].shape == (3, 4, TOKENS, TOKENS)
    with torch.no_grad(), kizuki.record(model) as again:  # and recording still works
        model(ids)
    assert again.passes == 1
    assert again[0].shape == (3, 4, TOKENS, TOKENS)


def test_other_models_in_the_block_are_not_recorded_and_get_their_own_function():
    mine, other, ids = tiny("llama"), tiny("llama"), some_ids()
    eager = llama.eager_attention_forward
    with torch.no_grad(), kizuki.record(mine) as recording:
        mine(ids)
        kept = recording[0]
        other(ids + 1)
        given = ALL_ATTENTION_FUNCTIONS.get_interface("eager", eager)
    assert recording.passes == 1
    assert recording[0] is kept
    assert given is eager


def test_nested_and_overlapping_recordings():
    a, b, ids = tiny("llama"), tiny("gpt2"), some_ids()
    with torch.no_grad(), kizuki.record(a, layers=1) as outer:
        with kizuki.record(a, layers=[0, 2]) as inner, kizuki.record(b) as second:
            a(ids)
            b(ids[:1])
        a(ids[:, :5])
    assert (outer.passes, inner.passes, second.passes) == (2, 1, 1)
    assert (outer[1].shape, inner[2].shape) == ((3, 4, 5, 5), (3, 4, TOKENS, TOKENS))
    assert second[2].shape == (1, 4, TOKENS, TOKENS)
    assert not getattr(AttentionInterface.get_interface, "_kizuki", False)


def test_two_threads_record_the_same_model_each_its_own_passes():
    model, ids, found = tiny("llama"), some_ids(), {}
    together = threading.Barrier(2, timeout=20)

    def work(tokens):
        with torch.no_grad(), kizuki.record(model) as recording:
            together.wait()
            for _ in range(20):
                model(ids[:, :tokens])
            together.wait()
        found[tokens] = (recording.passes, recording[2].shape[-1], recording[2][...].sum().item())

    threads = [threading.Thread(target=work, args=(n,)) for n in (5, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: found[n][:2] for n in found} == {5: (20, 5), 11: (20, 11)}
    assert found[11][2] == pytest.approx(3 * 4 * 11)
