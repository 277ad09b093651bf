"""A recording of a model that decodes through a `KVCache`: each step heard, and kept when the cache goes on."""

import oracle
import pytest
import torch
from oracle import causal, window
from tolerance import assert_accurate
from torch import nn

import kizuki
from kizuki.models import RecordError
from kizuki.nn import KVCache, SelfAttention

WIDTH, HEADS, KV_HEADS, SEQUENCES = 16, 4, 2, 2
FORMS = {
    "contiguous": {"capacity": 12},
    "paged": {"capacity": 12, "page": 4},
    "window": {"window": 4, "page": 2},
}


class Decoder(nn.Module):
    def __init__(self, window: int | None = None, **options: object) -> None:
        super().__init__()
        span = None if window is None else (window - 1, 0)
        made = (
            SelfAttention(WIDTH, HEADS, kv_heads=KV_HEADS, causal=True, window=span, **options)
            for _ in range(2)
        )
        self.layers = nn.ModuleList(made)

    def forward(self, x, caches):
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer(x, cache=cache)
        return x


def caches(form):
    return [KVCache(SEQUENCES, KV_HEADS, WIDTH // HEADS, **FORMS[form]) for _ in range(2)]


def decoder(form, **options):
    torch.manual_seed(0)
    return Decoder(FORMS[form].get("window"), **options).eval()


def steps(model, form, x, prompt):
    """Outputs of the prompt and of the tokens after it, one by one."""
    held = caches(form)
    return [model(x[:, :prompt], held), *(model(x[:, t : t + 1], held) for t in range(prompt, x.shape[1]))]


def truth(model, form, x, dtype):
    """The weights of both layers over the whole sequence, without any cache."""
    made, x = [], x.to(dtype)
    span = FORMS[form].get("window")
    n = x.shape[1]
    seen = causal(n, n) if span is None else window(n, n, span - 1, 0)
    for layer in model.layers:
        q, k, v = (
            nn.functional.linear(x, w.weight.to(dtype), None if w.bias is None else w.bias.to(dtype))
            .unflatten(-1, (-1, WIDTH // HEADS))
            .transpose(1, 2)
            for w in (layer.W_Q, layer.W_K, layer.W_V)
        )
        weights, _, z = oracle.plain(q, k, v, visible=seen, dtype=dtype)
        made.append(weights)
        out = layer.W_O
        x = x + nn.functional.linear(
            z.transpose(1, 2).flatten(2),
            out.weight.to(dtype),
            None if out.bias is None else out.bias.to(dtype),
        )
    return made


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_every_step_is_heard_and_stays(form):
    model, x, prompt = decoder(form), oracle.randn(SEQUENCES, 9, WIDTH), 4
    alone = steps(model, form, x, prompt)
    with kizuki.record(model, keep="all") as recording:
        recorded = steps(model, form, x, prompt)
    assert all(torch.equal(a, b) for a, b in zip(alone, recorded, strict=True))
    assert recording.passes == 6
    assert recording.layers == (0, 1)
    exact, plain = (truth(model, form, x, dtype) for dtype in (torch.float64, torch.float32))
    for number in range(6):
        one, end = recording.pass_(number), prompt + number
        rows = slice(0, prompt) if not number else slice(end - 1, end)
        for layer in (0, 1):
            got = one[layer].dense()
            first = end - got.shape[-1]  # a window's cache has let go of what came before
            assert one.checked(layer)
            want, rough = (t[layer][:, :, rows, first:end] for t in (exact, plain))
            assert_accurate(got, want, rough, f"pass {number}, layer {layer}")


class Reads(nn.Module):
    """A model of one line, its own code around the cache."""

    def forward(self, query, cache):
        return cache.attention(query)


@torch.no_grad()
def test_sequences_of_unequal_length_see_their_own_keys():
    cache = KVCache(SEQUENCES, KV_HEADS, WIDTH // HEADS, capacity=8)
    key = oracle.randn(SEQUENCES, KV_HEADS, 6, WIDTH // HEADS)
    cache.append(key, key, lengths=[6, 3])
    with kizuki.record(model := Reads()) as recording:
        model(oracle.randn(SEQUENCES, HEADS, 1, WIDTH // HEADS), cache)
    (layer,) = recording.layers
    weights = recording[layer].dense()
    assert recording.checked(layer)
    assert bool((weights[0] > 0).all())
    assert bool((weights[1, ..., :3] > 0).all())
    assert not bool(weights[1, ..., 3:].any())


@torch.no_grad()
def test_there_is_no_view_over_all_steps_and_the_line_says_where_they_are():
    model, x = decoder("contiguous"), oracle.randn(SEQUENCES, 5, WIDTH)
    with kizuki.record(model) as recording:
        steps(model, "contiguous", x, 4)
    says = r"of its own \(KVCache\), each pass stands alone: recording.pass_"
    with pytest.raises(kizuki.models.RecordError, match=says):
        recording.generation(torch.tensor([[1, 2, 3, 4, 5]]))


@torch.no_grad()
def test_what_goes_through_a_function_is_refused_by_name():
    model, x = decoder("contiguous", alibi=True), oracle.randn(SEQUENCES, 5, WIDTH)
    with kizuki.record(model) as recording:
        steps(model, "contiguous", x, 4)
    with pytest.raises(RecordError, match="scores go through a function of their own"):
        recording[0]
