"""What a model does: each measure against loops over the model's own eager weights, and on heads built by hand."""

from __future__ import annotations

import math

import pytest
import torch
import transformers as tf
from made import made
from test_families import BLOOM
from tiny import FAMILIES, GROUPED, TOKENS, build, padding, some_ids, tiny

import kizuki
from kizuki.models import RecordError, measures

CASES = {
    "causal, grouped": ("llama", "none"),
    "padding left": ("llama", "left"),
    "padding right": ("llama", "right"),
    "window": ("mistral", "left"),
    "softcap and windows": ("gemma2", "none"),
    "sinks": ("gpt_oss", "none"),
    "all keys": ("bert", "right"),
    "bias": ("bloom", "left"),
}
KINDS = FAMILIES | {
    "bloom": (BLOOM, tf.BloomForCausalLM, lambda i, j, _: j <= i)
}  # ALiBi: a bias on every key
IDS = some_ids() % 7  # so that tokens occur several times


def recorded(family: str, side: str = "none", ids: torch.Tensor = IDS):
    """A recording, and what it is compared with: weights, visible pairs, and which rows are text."""
    config, cls, sees = KINDS[family]
    model = build(cls, config)
    real = padding(side)
    with torch.no_grad(), kizuki.record(model) as recording:
        out = model(input_ids=ids, attention_mask=real, output_attentions=True)
    weights = torch.stack(list(out.attentions), 1).double()  # [batch, layers, heads, queries, keys]
    seen = torch.zeros(3, weights.shape[1], TOKENS, TOKENS, dtype=torch.bool)
    for layer in range(weights.shape[1]):
        for i in range(TOKENS):
            for j in range(TOKENS):
                seen[:, layer, i, j] = bool(sees(i, j, layer)) & real[:, j].bool()
    return recording, weights, seen, real.bool()


def by_rows(weights, seen, real, row):
    """Means over rows of `row(line, visible, i, first)`, `[batch, layers, heads]`; None leaves a row out."""
    found = torch.empty(weights.shape[:3], dtype=torch.float64)
    for b in range(weights.shape[0]):
        first = int(real[b].nonzero()[0])
        for layer in range(weights.shape[1]):
            for h in range(weights.shape[2]):
                rows = [i for i in range(TOKENS) if real[b, i]]
                numbers = [row(weights[b, layer, h, i], seen[b, layer, i], i, first) for i in rows]
                numbers = [float(n) for n in numbers if n is not None]
                found[b, layer, h] = sum(numbers) / len(numbers) if numbers else math.nan
    return found


ROWS = {
    "previous": lambda a, seen, i, first: a[i - 1] if i and seen[i - 1] else None,
    "first_key": lambda a, seen, i, first: a[first],
    "entropy": lambda a, seen, i, first: -sum(x * math.log(x) for x in a.tolist() if x > 0),
    "effective_keys": lambda a, seen, i, first: math.exp(-sum(x * math.log(x) for x in a.tolist() if x > 0)),
    "distance": lambda a, seen, i, first: sum(x * abs(i - j) for j, x in enumerate(a.tolist())),
}


@pytest.mark.parametrize("case", CASES)
def test_measures_are_their_definitions(case):
    family, side = CASES[case]
    recording, weights, seen, real = recorded(family, side)
    equal = (seen / seen.sum(-1, keepdim=True).clamp(min=1)).double()[:, :, None].expand_as(weights)
    for name, row in ROWS.items():
        got = getattr(measures, name)(recording)
        torch.testing.assert_close(got.value, by_rows(weights, seen, real, row), rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(got.control, by_rows(equal, seen, real, row), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", ["padding left", "sinks", "all keys"])
def test_distance_without_the_first_key(case):
    family, side = CASES[case]
    recording, weights, seen, real = recorded(family, side)
    got = measures.distance_rest(recording)
    equal = (seen / seen.sum(-1, keepdim=True).clamp(min=1)).double()[:, :, None].expand_as(weights)
    for given, found in ((weights, got.value), (equal, got.control)):
        far = by_rows(
            given,
            seen,
            real,
            lambda a, s, i, first: sum(
                x * abs(i - j) for j, x in enumerate(a.tolist()) if j != first and s[j]
            ),
        )
        rest = by_rows(
            given,
            seen,
            real,
            lambda a, s, i, first: sum(x for j, x in enumerate(a.tolist()) if j != first and s[j]),
        )
        torch.testing.assert_close(found, far / rest, rtol=5e-5, atol=5e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("after", [0, 1], ids=["duplicate", "induction"])
def test_same_tokens_by_loops(case, after):
    family, side = CASES[case]
    recording, weights, seen, real = recorded(family, side)
    got = measures.induction(recording, IDS) if after else measures.duplicate(recording, IDS)
    for b in range(3):
        ids = IDS[b].tolist()

        def row(a, s, i, first, ids=ids):
            places = [j for j in range(i + after) if j - after >= 0 and s[j] and ids[j - after] == ids[i]]
            return a[places].sum() if places else None

        expected = by_rows(weights[b : b + 1], seen[b : b + 1], real[b : b + 1], row)
        torch.testing.assert_close(got.value[b : b + 1], expected, rtol=5e-5, atol=5e-6, equal_nan=True)


def test_the_shuffled_control_reads_other_places_of_the_same_matrix():
    recording, *_ = recorded("llama", "left")
    one, other = measures.induction(recording, IDS, seed=1), measures.induction(recording, IDS, seed=2)
    assert torch.equal(one.value, other.value)
    assert not torch.equal(one.control, other.control)
    assert not torch.equal(one.control, one.value)


# -- heads built by hand -----------------------------------------------------------------------------


def test_built_heads_are_told_apart():
    found = measures.repeats(made(), length=8, batch=3, start=0)
    expected = {  # layer 0: the token before, key 0; layer 1: induction, same tokens
        "previous": [[1, 0], [0, 0]],
        "duplicate": [[0, 0], [0, 0.5]],  # half of it is on itself
        "induction": [[0, 0], [1, 0]],
    }
    for name, numbers in expected.items():
        got = getattr(found, name)
        assert torch.allclose(got.value, torch.tensor(numbers, dtype=torch.float64), atol=1e-4), name
    assert float(found.induction.control[:, 1, 0].max()) < 0.3
    assert found.induction.top(1)[0][:2] == (1, 0)
    assert found.previous.top(1)[0][:2] == (0, 0)
    assert found.duplicate.top(1)[0][:2] == (1, 1)


def test_repeats_are_repeats_and_their_controls_are_not():
    found = measures.repeats(made(), length=8, batch=3, seed=5, start=0)
    first, second = found.ids[:, 1:9], found.ids[:, 9:]
    assert torch.equal(first, second)
    assert torch.equal(found.shuffled[:, 1:9], first)
    assert not bool((found.shuffled[:, 9:] == first).any())
    assert torch.equal(found.shuffled[:, 9:].sort().values, first.sort().values)
    assert all(len(set(line)) == 8 for line in first.tolist())


def test_a_head_by_place_alone_is_in_its_control_too():
    """A head that reads 7 tokens back scores as an induction head on repeats of 8, and its control says why."""
    model = made()
    with torch.no_grad():
        attention = model.transformer.h[0].attn
        block = attention.c_attn.weight[12:44, 96 : 96 + 32]
        block.zero_()
        for p in range(32 - 7):
            block[p, p + 7] = 30.0
    found = measures.repeats(model, length=8, batch=2, start=0)
    assert float(found.induction.value[:, 0, 0].min()) > 0.99
    assert float(found.induction.control[:, 0, 0].min()) > 0.99
    assert measures.repeats(model, length=7, batch=2, start=0).induction.value[:, 0, 0].max() < 0.01


def test_a_head_on_key_0_is_a_sink():
    ids = torch.randperm(11, generator=torch.Generator().manual_seed(3))[None] + 1
    model = made()
    with torch.no_grad(), kizuki.record(model) as recording:
        model(ids)
    mass = measures.first_key(recording)
    assert torch.allclose(mass.value[0, 0], torch.tensor([2 / 11, 1.0], dtype=torch.float64), atol=1e-5)
    assert float(mass.control[0, 0, 0]) == pytest.approx(sum(1 / n for n in range(1, 12)) / 11)
    rate = measures.sink_rate(recording, 0.6)
    assert float(rate.by_layer[0, 0]) == 0.5
    assert float(rate.control[0]) == 0.0
    assert measures.sink_rate(recording, 0.2).control[0] == 1.0  # a short text exceeds it by its mask alone
    assert math.isnan(measures.distance_rest(recording).value[0, 0, 1])  # it reads nothing else
    assert float(measures.effective_keys(recording).value[0, 0, 1]) == pytest.approx(1.0, abs=1e-4)


# -- norms, rollout, segments ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "bert", "gemma2", "gpt_oss", "modernbert", "qwen3", "bloom"]
)
def test_contributions_by_loops(family):
    recording, weights, _, _ = recorded(family)
    model = build(KINDS[family][1], KINDS[family][0])
    W = measures.output_weights(model)
    for layer in recording:
        found = measures.contributions(recording, layer, model)
        value = recording.value(layer).double()
        heads, dim = weights.shape[2], value.shape[-1]
        value = value.repeat_interleave(heads // value.shape[1], 1)
        norms = torch.empty(3, heads, TOKENS, dtype=torch.float64)
        for h in range(heads):
            norms[:, h] = (value[:, h] @ W[layer][:, h * dim : (h + 1) * dim].double().T).norm(dim=-1)
        expected = weights[:, layer] * norms[:, :, None]
        torch.testing.assert_close(found.norms, norms, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.total(), expected.sum(-1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.received(), expected.sum(-2), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.row(1, 5), expected[1, :, 5], rtol=1e-4, atol=1e-5)
        shares = expected / expected.sum(-1, keepdim=True)
        torch.testing.assert_close(found.shares[...].double(), shares, rtol=1e-3, atol=1e-5)
    mean = measures.contribution(recording, model)
    torch.testing.assert_close(mean.value[:, -1], expected.sum(-1).mean(-1), rtol=1e-4, atol=1e-5)


def test_w_o_is_the_models_own():
    """The heads' outputs times W_O are what the attention module returns."""
    model, ids = tiny("llama"), some_ids()
    attention, taken = model.model.layers[1].self_attn, []
    with torch.no_grad(), kizuki.record(model) as recording:
        hook = attention.register_forward_hook(lambda m, a, out: taken.append(out[0]))
        model(ids)
        hook.remove()
    mixed = (recording[1] @ recording.value(1)).transpose(1, 2).flatten(2)
    W = measures.output_weights(model)[1]
    torch.testing.assert_close(mixed @ W.T, taken[0], rtol=1e-4, atol=1e-5)


def test_a_head_without_values_contributes_nothing():
    model = made()
    with torch.no_grad(), kizuki.record(model) as recording:
        model(torch.tensor([[1, 2, 3, 1]]))
    found = measures.contributions(recording, 0, model)
    assert float(found.norms[0, 1].max()) == 0.0  # the head on key 0 has no value
    assert float(found.total()[0, 1].max()) == 0.0
    assert float(recording[0][0, 1, :, 0].min()) > 0.99
    assert float(found.total()[0, 0].min()) > 1.0


def test_a_norm_before_w_o_is_refused():
    model = tiny("llama")
    attention = model.model.layers[0].self_attn
    inner = attention.o_proj
    attention.o_proj = torch.nn.Linear(24, 24, bias=False)
    attention.o_proj.weight = inner.weight
    attention.o_proj.register_forward_pre_hook(
        lambda m, args: (torch.nn.functional.layer_norm(args[0], (24,)),)
    )
    with pytest.raises(RecordError, match="between its heads and its W_O"):
        measures.output_weights(model)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bert", "bloom"])
def test_rollout_is_the_product_of_matrices(family):
    recording, weights, seen, _ = recorded(family)
    through = torch.eye(TOKENS, dtype=torch.float64).expand(3, -1, -1)
    plain = through
    for layer in range(weights.shape[1]):
        mean = weights[:, layer].mean(1)
        through = (0.5 * torch.eye(TOKENS, dtype=torch.float64) + 0.5 * mean) @ through
        equal = seen[:, layer] / seen[:, layer].sum(-1, keepdim=True).double()
        plain = (0.5 * torch.eye(TOKENS, dtype=torch.float64) + 0.5 * equal) @ plain
    found = measures.rollout(recording, [-1, 4])
    torch.testing.assert_close(found.weights.double(), through[:, [TOKENS - 1, 4]], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        found.control.double(), plain[:, [TOKENS - 1, 4]].double(), rtol=1e-4, atol=1e-6
    )
    assert found.tokens == (TOKENS - 1, 4)
    if family != "gpt_oss":
        assert torch.allclose(found.weights.sum(-1), torch.ones(3, 2), atol=1e-5)


def test_rollout_of_known_heads():
    """Through a head on the token before alone, a token's rollout over two layers is binomial."""
    query = torch.eye(6)
    key = torch.cat([torch.eye(6)[1:], torch.zeros(1, 6)])  # key j answers query j + 1
    key[0, 0] = 1.0
    from kizuki.models.recording import Capture, Recording
    from kizuki.models.rule import Rule

    recording = Recording("by hand", [0, 1], None)
    for layer in (0, 1):
        recording._captures[layer] = Capture(
            path=f"layer {layer}",
            query=query[None, None],
            key=key[None, None],
            value=query[None, None],
            scale=100.0,
            softcap=None,
            sinks=None,
            rules=[Rule(6, right=0)],
            rows=[],
            sample=None,
        )
    found = measures.rollout(recording, 5).weights[0, 0]
    assert torch.allclose(found, torch.tensor([0, 0, 0, 0.25, 0.5, 0.25]), atol=1e-6)


@pytest.mark.parametrize("case", ["padding left", "padding right", "sinks"])
def test_segment_tables_by_loops(case):
    family, side = CASES[case]
    recording, weights, seen, real = recorded(family, side)
    parts = {"system": (0, 5), "question": (5, 8), "answer": (10, TOKENS)}
    table = measures.segments(recording, parts)
    assert table.names == ("system", "question", "answer", "rest")
    members = [range(5), range(5, 8), range(10, TOKENS), range(8, 10)]
    equal = (seen / seen.sum(-1, keepdim=True).clamp(min=1)).double()[:, :, None].expand_as(weights)
    for s, rows in enumerate(members):
        for t, keys in enumerate(members):
            for given, got in ((weights, table.mass), (equal, table.control)):

                def row(a, v, i, first, rows=rows, keys=keys):
                    return a[list(keys)].sum() if i in rows else None

                expected = by_rows(given, seen, real, row).nan_to_num(0.0)
                torch.testing.assert_close(got[..., s, t], expected, rtol=2e-5, atol=2e-6)
    value, control = table.of("answer", "question")
    assert torch.equal(value, table.mass[..., 2, 1])
    assert torch.equal(control, table.control[..., 2, 1])


def test_half_precision_is_widened():
    model = build(tf.LlamaForCausalLM, tf.LlamaConfig(**GROUPED)).to(torch.bfloat16)
    with torch.no_grad(), kizuki.record(model) as recording:
        model(IDS)
    assert measures.rollout(recording, -1).weights.dtype is torch.float32
    assert torch.allclose(measures.rollout(recording, -1).weights.sum(-1), torch.ones(3, 1), atol=1e-5)
    assert torch.allclose(
        measures.segments(recording, {"all": (0, TOKENS)}).mass, torch.ones(1).double(), atol=1e-5
    )
    found = measures.contributions(recording, 1, model)
    assert torch.allclose(found.shares[...].sum(-1), torch.ones(1), atol=1e-5)


def test_chosen_heads_keep_their_numbers():
    model, ids = tiny("llama"), some_ids()
    with torch.no_grad(), kizuki.record(model) as whole:
        model(ids)
    with torch.no_grad(), kizuki.record(model, heads=[1, 3], layers=[2, 0]) as some:
        model(ids)
    for name in ("first_key", "previous", "distance"):
        one, other = getattr(measures, name)(whole), getattr(measures, name)(some)
        assert other.heads == (1, 3)
        assert other.layers == (0, 2)
        torch.testing.assert_close(other.value, one.value[:, [0, 2]][:, :, [1, 3]], rtol=1e-6, atol=1e-7)
    norms = measures.contributions(some, 2, model).norms
    torch.testing.assert_close(norms, measures.contributions(whole, 2, model).norms[:, [1, 3]])


# -- refusals ----------------------------------------------------------------------------------------


BAD = {
    "no recording": (lambda r, m: measures.entropy(m), "recording is a LlamaForCausalLM"),
    "no ids": (lambda r, m: measures.duplicate(r), "ids is None and the recording holds no tokens"),
    "other ids": (
        lambda r, m: measures.duplicate(r, IDS[:, :5]),
        r"ids is \[3, 5\] but layer 0 has \[3, 13\]",
    ),
    "another batch": (lambda r, m: measures.duplicate(r, IDS[:2]), r"ids is \[2, 13\] but"),
    "float ids": (lambda r, m: measures.induction(r, IDS.float()), "must be an integer tensor"),
    "threshold": (lambda r, m: measures.sink_rate(r, 3), "threshold is 3 but"),
    "position": (lambda r, m: measures.rollout(r, [2, 13]), "tokens holds 13"),
    "no position": (lambda r, m: measures.rollout(r, []), "tokens is empty"),
    "residual": (lambda r, m: measures.rollout(r, 2, residual=2), "residual is 2"),
    "no parts": (lambda r, m: measures.segments(r, {}), "parts is {} but"),
    "overlap": (
        lambda r, m: measures.segments(r, {"a": (0, 5), "b": (4, 6)}),
        r"b \(4, 6\) overlaps a \(0, 5\)",
    ),
    "outside": (lambda r, m: measures.segments(r, {"a": (0, 14)}), r"a is \(0, 14\) but must have"),
    "rest": (lambda r, m: measures.segments(r, {"rest": (0, 4)}), "in no segment"),
    "no pair": (lambda r, m: measures.segments(r, {"a": 3}), r"a is 3 but must be \(start, stop\)"),
    "no such segment": (lambda r, m: measures.segments(r, {"a": (0, 13)}).of("a", "b"), "no segment 'b'"),
    "weight": (lambda r, m: measures.contributions(r, 0, torch.ones(24, 23)), r"weight is \[24, 23\] but"),
    "training": (lambda r, m: measures.output_weights(tiny("llama").train()), "is in training mode"),
    "too long": (lambda r, m: measures.repeats(m, length=40), "reads at most 64"),
    "too few tokens": (lambda r, m: measures.repeats(m, length=98), "97 tokens to draw from"),
    "no length": (lambda r, m: measures.repeats(m, length=1), "length is 1 but"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line(name):
    call, expected = BAD[name]
    recording, *_ = recorded("llama")
    with pytest.raises((ValueError, TypeError), match=expected) as error:
        call(recording, tiny("llama"))
    assert "\n" not in str(error.value)
    assert type(error.value).__module__.startswith("kizuki")


# -- a real model ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_has_sinks_and_induction_heads(sample_text):
    from kizuki.models import run, sources

    source = sources.load("smollm2")
    recording = run(source, sample_text[:800], k=0).recording
    rate = measures.sink_rate(recording)
    middle = rate.by_layer[0, 10:25].mean()
    assert float(middle) > 0.5
    assert float(middle) > float(rate.by_layer[0, 0])
    assert float(rate.control[0]) == 0.0
    found = measures.repeats(source, length=32, batch=2)
    for measure in (found.induction, found.duplicate, found.previous):
        (_, _, value, control), *_ = measure.top(1)
        assert value > 0.5
        assert value > 3 * control
    assert found.induction.top(1)[0][0] >= 2  # it takes a head below that marks the token before
    assert source.tokenizer.bos_token_id in found.ids[:, 0]
