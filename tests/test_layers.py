"""`kizuki.nn`: do the layers give the numbers that the formula, torch's layers and others' code give?"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracle import grid
from tolerance import assert_accurate
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama import modeling_llama as llama

import kizuki
from kizuki.nn import KVCache, MultiheadAttention, SelfAttention
from kizuki.nn.positions import rotary, slopes

N = 11


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(*args: Any, **options: Any) -> SelfAttention:
    torch.manual_seed(0)
    layer = SelfAttention(*args, **options)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0, 0.4)  # A is not flat
    return layer.eval()


# -- SelfAttention ---------------------------------------------------------------------------------


def turned(x: Tensor, at: Tensor, base: float) -> Tensor:
    """Rotary positions as multiplication of complex numbers."""
    real, imaginary = (part.contiguous() for part in x.chunk(2, -1))
    half = real.shape[-1]
    angle = at[..., None].to(x.dtype) * base ** (-torch.arange(half).to(x.dtype) / half)
    z = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def written_out(
    layer: SelfAttention, x: Tensor, seen: Tensor | None = None, at: Tensor | None = None
) -> Tensor:
    """The layer as the articles write it, every matrix built, in the dtype of x."""
    heads, group = layer.heads, layer.heads // layer.kv_heads
    at = torch.arange(x.shape[1]).expand(x.shape[:2]) if at is None else at
    output = []
    for h in range(heads):
        rows = [slice(n * layer.head_dim, (n + 1) * layer.head_dim) for n in (h, h // group)]
        Q, K, V = (
            x @ W.weight.to(x.dtype)[row].T + (0 if W.bias is None else W.bias.to(x.dtype)[row])
            for W, row in ((layer.W_Q, rows[0]), (layer.W_K, rows[1]), (layer.W_V, rows[1]))
        )
        if layer.rotary is not None:
            Q, K = turned(Q, at, layer.rotary), turned(K, at, layer.rotary)
        S = Q @ K.mT / math.sqrt(layer.head_dim)
        if layer.slopes is not None:
            S = S - layer.slopes[h].to(x.dtype) * (at[:, :, None] - at[:, None, :]).abs()
        if seen is not None:
            S = S.masked_fill(~seen, -math.inf)
        output.append(S.softmax(-1) @ V)
    bias = 0 if layer.W_O.bias is None else layer.W_O.bias.to(x.dtype)
    return torch.cat(output, -1) @ layer.W_O.weight.to(x.dtype).T + bias


def told(seen: Any) -> Tensor:
    return torch.as_tensor(grid(N, N, seen))


LAYERS = {
    "plain": ({}, None),
    "bias": ({"bias": True}, None),
    "causal": ({"causal": True}, told(lambda i, j: j <= i)),
    "grouped, rotary": (
        {"causal": True, "kv_heads": 2, "rotary": 10_000.0},
        told(lambda i, j: j <= i),
    ),
    "one key head, ALiBi": ({"causal": True, "kv_heads": 1, "alibi": True}, told(lambda i, j: j <= i)),
    "ALiBi on both sides": ({"alibi": True}, None),
    "window": ({"causal": True, "window": (3, 0), "rotary": 100.0}, told(lambda i, j: i - 3 <= j <= i)),
    "head_dim of its own": ({"head_dim": 10, "window": (2, 1)}, told(lambda i, j: i - 2 <= j <= i + 1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_formula_written_out(name):
    options, seen = LAYERS[name]
    layer, x = made(24, 4, **options), some(2, N, 24)
    with torch.no_grad():
        assert_accurate(layer(x), written_out(layer, x.double(), seen), written_out(layer, x, seen), name)
        assert torch.allclose(layer(x[1]), layer(x)[1], atol=1e-5)  # without a batch


@pytest.mark.parametrize("name", ["causal", "grouped, rotary", "one key head, ALiBi"])
def test_its_matrix_is_the_one_it_uses(name):
    layer, x = made(24, 4, **LAYERS[name][0]), some(2, N, 24)
    with torch.no_grad():
        A = layer.matrix(x)
        value = layer.W_V(x).unflatten(-1, (layer.kv_heads, -1)).transpose(1, 2)
        output = layer.W_O((A @ value).transpose(1, 2).flatten(2))
        assert torch.equal(output, layer(x))
        assert A.shape == (2, 4, N, N)
        assert torch.allclose(A.dense().sum(-1), torch.ones(2, 4, N), atol=1e-6)


@pytest.mark.parametrize("options", [{"rotary": 100.0}, {"alibi": True}])
def test_packed_documents_give_what_each_gives_alone(options):
    layer, x = made(24, 4, causal=True, **options), some(1, N, 24)
    places = torch.cat([torch.arange(4), torch.arange(7)])
    with torch.no_grad():
        both = layer(x, mask=kizuki.masks.documents([4, 7]), positions=places)
        assert torch.allclose(both[:, :4], layer(x[:, :4]), atol=1e-6)
        assert torch.allclose(both[:, 4:], layer(x[:, 4:]), atol=1e-6)
        moved = layer(x, positions=torch.arange(N)[None] + 1000)  # only differences count
        assert torch.allclose(moved, layer(x), atol=1e-3)


@pytest.mark.parametrize("paged", [{"capacity": 20}, {"capacity": 20, "page": 4}])
@pytest.mark.parametrize("options", [{"rotary": 100.0, "kv_heads": 2}, {"alibi": True}, {}])
def test_tokens_one_by_one_with_a_cache_give_the_whole_text(options, paged):
    layer, x = made(24, 4, causal=True, **options), some(2, N, 24)
    with torch.no_grad():
        cache = KVCache(2, layer.kv_heads, layer.head_dim, **paged)
        parts = [layer(x[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 9), (9, 11))]
        whole = layer(x)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)


@pytest.mark.parametrize("options", [{"rotary": 100.0}, {"alibi": True}])
def test_a_window_with_a_sliding_cache(options):
    layer, x = made(24, 4, causal=True, window=(3, 0), **options), some(1, N, 24)
    with torch.no_grad():
        cache = KVCache(1, 4, 6, window=4, page=2)
        parts = [layer(x[:, i : i + 1], cache=cache) for i in range(N)]
        assert torch.allclose(torch.cat(parts, 1), layer(x), atol=1e-5)


@pytest.mark.parametrize("name", ["bias", "grouped, rotary", "one key head, ALiBi"])
def test_it_trains_as_the_formula_does(name):
    options, seen = LAYERS[name]
    layer, x, aim = made(24, 4, **options), some(2, N, 24), some(2, N, 24, seed=1)
    grads = []
    for run in (lambda: layer(x), lambda: written_out(layer, x, seen)):
        layer.zero_grad()
        (run() * aim).sum().backward()
        grads.append({key: p.grad.clone() for key, p in layer.named_parameters()})
    for key, grad in grads[0].items():
        assert torch.allclose(grad, grads[1][key], rtol=1e-4, atol=1e-4), key


def test_dropout_follows_training():
    layer, x = made(24, 4, dropout=0.5), some(2, N, 24)
    still = layer(x)
    assert torch.equal(layer(x), still)
    layer.train()
    torch.manual_seed(3)
    first = layer(x)
    assert not torch.equal(first, still)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)


def test_rotary_is_llama_s():
    config = LlamaConfig(hidden_size=24, num_attention_heads=3, head_dim=8)
    places = torch.tensor([[0, 1, 2, 5, 9]])
    x = some(1, 3, 5, 8)
    cos, sin = llama.LlamaRotaryEmbedding(config)(x, places)
    theirs = llama.apply_rotary_pos_emb(x, x, cos, sin)[0]
    assert torch.allclose(rotary(x, places, 10_000.0), theirs, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 16])
def test_slopes_are_bloom_s(heads):
    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(slopes(heads), theirs, rtol=1e-6)


def test_a_saved_layer_loads_and_says_what_it_is():
    layer = made(24, 4, kv_heads=2, causal=True, alibi=True)
    other = SelfAttention(24, 4, kv_heads=2, causal=True, alibi=True)
    assert set(layer.state_dict()) == {"W_Q.weight", "W_K.weight", "W_V.weight", "W_O.weight"}
    other.load_state_dict(layer.state_dict())
    x = some(2, N, 24)
    assert torch.equal(layer(x), other(x))
    assert "kv_heads=2" in repr(layer)
    assert "alibi" in repr(layer)


@pytest.mark.parametrize("options", [{"kv_heads": 2, "rotary": 100.0}, {"alibi": True}])
def test_compiled(options):
    layer, x = made(24, 4, causal=True, **options), some(2, N, 24)
    one_graph = "alibi" not in options  # a function of scores is not traced
    with torch.no_grad():
        graph = torch.compile(layer, backend="eager", fullgraph=one_graph)
        assert torch.allclose(graph(x), layer(x), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"heads": 0}, "heads is 0"),
        ({"heads": 5}, "width is 24 but must be a multiple of heads, 5"),
        ({"kv_heads": 3}, "kv_heads is 3 but must divide heads, 4"),
        ({"head_dim": 5, "rotary": 100.0}, "head_dim must be even"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_a_layer_that_cannot_be_is_said(options, says):
    with pytest.raises(kizuki.OptionError, match=says):
        SelfAttention(**{"width": 24, "heads": 4, **options})


def test_an_input_that_does_not_fit_is_said():
    layer, x = made(24, 4, causal=True, window=(3, 0)), some(2, N, 24)
    with pytest.raises(kizuki.ShapeError, match=r"x has shape \[2, 11, 23\]"):
        layer(x[..., :23])
    with pytest.raises(kizuki.ShapeError, match=r"positions has shape \[4\]"):
        layer(x, positions=torch.arange(4))
    with pytest.raises(kizuki.OptionError, match=r"positions is torch.float32"):
        layer(x, positions=torch.rand(N))
    with torch.no_grad():
        with pytest.raises(kizuki.OptionError, match="window=left"):
            layer(x, cache=KVCache(2, 4, 6, capacity=20))
        with pytest.raises(kizuki.OptionError, match="the layer none"):
            made(24, 4, causal=True)(x, cache=KVCache(2, 4, 6, window=4))
        with pytest.raises(kizuki.OptionError, match="causal=True"):
            made(24, 4)(x, cache=KVCache(2, 4, 6, capacity=20))
        with pytest.raises(kizuki.ShapeError, match="with a cache"):
            layer(x[0], cache=KVCache(2, 4, 6, window=4))


# -- MultiheadAttention ----------------------------------------------------------------------------


def twins(*args: Any, **options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """torch's layer and ours with its state."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(*args, **options)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.normal_(0, 0.4)
    ours = MultiheadAttention(*args, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs.eval(), ours.eval()


HIDDEN = some(5, 7) > 0.5
HIDDEN[:, 0] = False
EACH = some(12, 5, 7) > 0.5
EACH[:, :, 0] = False
PADDED = torch.tensor([[False] * 7, [False] * 4 + [True] * 3, [False] * 2 + [True] * 2 + [False] * 3])


def added(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, -math.inf)


CALLS = {
    "plain": ({}, {}),
    "no bias": ({"bias": False}, {}),
    "other widths": ({"kdim": 10, "vdim": 6}, {}),
    "other widths, no bias": ({"kdim": 10, "vdim": 6, "bias": False}, {}),
    "mask": ({}, {"attn_mask": HIDDEN}),
    "mask, added": ({}, {"attn_mask": added(HIDDEN) + some(5, 7)}),
    "mask of each head": ({}, {"attn_mask": EACH}),
    "mask of each head, added": ({}, {"attn_mask": added(EACH)}),
    "padding": ({}, {"key_padding_mask": PADDED}),
    "padding, added": ({}, {"key_padding_mask": added(PADDED)}),
    "padding and mask": ({}, {"key_padding_mask": PADDED, "attn_mask": HIDDEN}),
    "padding and mask, added": ({}, {"key_padding_mask": added(PADDED), "attn_mask": some(5, 7)}),
    "more keys": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    "more keys, masks": (
        {"add_bias_kv": True, "add_zero_attn": True},
        {"key_padding_mask": PADDED, "attn_mask": EACH},
    ),
    "a zero key, added": ({"add_zero_attn": True}, {"attn_mask": some(5, 7)}),
    "weights of each head": ({}, {"average_attn_weights": False, "attn_mask": HIDDEN}),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_the_numbers_are_torch_s(name, batch_first):
    options, call = CALLS[name]
    theirs, ours = twins(24, 4, batch_first=batch_first, **options)
    query, key, value = some(3, 5, 24), some(3, 7, theirs.kdim, seed=1), some(3, 7, theirs.vdim, seed=2)
    given = [t if batch_first else t.transpose(0, 1) for t in (query, key, value)]
    with torch.no_grad():
        output, weights = theirs(*given, **call)
        truth, truths = theirs.double()(
            *(t.double() for t in given),
            **{
                k: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t
                for k, t in call.items()
            },
        )
        got, gots = ours(*given, **call)
        assert got.shape == output.shape
        assert gots.shape == weights.shape
        assert_accurate(got, truth, output, "output")
        assert_accurate(gots, truths, weights, "weights")
        without, none = ours(*given, need_weights=False, **call)
        assert torch.equal(without, got)
        assert none is None


@pytest.mark.parametrize("name", ["plain", "mask of each head", "padding", "more keys"])
def test_without_a_batch(name):
    options, call = CALLS[name]
    theirs, ours = twins(24, 4, **options)
    query, key, value = some(5, 24), some(7, 24, seed=1), some(7, 24, seed=2)
    alone = {"attn_mask": EACH[:4], "key_padding_mask": PADDED[2]}
    call = {key: alone[key] for key in call}
    with torch.no_grad():
        for need in (True, False):
            pair = [layer(query, key, value, need_weights=need, **call) for layer in (theirs, ours)]
            assert pair[0][0].shape == pair[1][0].shape
            assert torch.allclose(*(p[0] for p in pair), atol=1e-5)
            if need:
                assert pair[0][1].shape == pair[1][1].shape
                assert torch.allclose(*(p[1] for p in pair), atol=1e-6)


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_is_causal_with_and_without_the_mask_it_is_a_hint_about(extra):
    theirs, ours = twins(24, 4, batch_first=True, **extra)
    x = some(3, N, 24)
    later = torch.ones(N, N, dtype=torch.bool).triu(1)
    with torch.no_grad():
        truth, weights = theirs(x, x, x, attn_mask=later)
        for mask in (later, added(later), None):
            got, gots = ours(x, x, x, attn_mask=mask, is_causal=True)
            assert torch.allclose(got, truth, atol=1e-5)
            assert torch.allclose(gots, weights, atol=1e-6)
        with pytest.raises(kizuki.OptionError, match="shows a query a later key"):
            ours(x, x, x, attn_mask=later & (torch.arange(N) < N - 1), is_causal=True)


def test_a_query_that_sees_nothing_gives_zero_with_and_without_weights():
    _, ours = twins(24, 4, batch_first=True)
    x = some(2, N, 24)
    hidden = torch.zeros(N, N, dtype=torch.bool)
    hidden[3] = True
    padded = torch.zeros(2, N, dtype=torch.bool)
    padded[1] = True
    x[1] = math.nan  # what is hidden is not read
    with torch.no_grad():
        output, weights = ours(some(2, N, 24), x, x, attn_mask=hidden, key_padding_mask=padded)
    assert torch.equal(output[0, 3], ours.out_proj.bias)
    assert torch.equal(output[1], ours.out_proj.bias.expand(N, 24))
    assert not weights[0, 3].any()
    assert not weights[1].any()


@pytest.mark.parametrize("need_weights", [True, False])
def test_it_trains_as_torch_s_does_through_weights_too(need_weights):
    theirs, ours = twins(24, 4, batch_first=True, dropout=0.0)
    query, key, call = (
        some(3, 5, 24),
        some(3, 7, 24, seed=1),
        {"key_padding_mask": PADDED, "attn_mask": HIDDEN},
    )
    found = []
    for layer in (theirs.train(), ours.train()):
        q = query.clone().requires_grad_()
        output, weights = layer(q, key, key, need_weights=need_weights, **call)
        loss = (output * some(3, 5, 24, seed=3)).sum()
        loss = loss if weights is None else loss + (weights * some(3, 5, 7, seed=4)).sum()
        loss.backward()
        found.append([q.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_weights_are_before_dropout_and_the_output_does_not_change_with_them():
    _, ours = twins(24, 4, batch_first=True, dropout=0.5)
    x = some(3, N, 24)
    with torch.no_grad():
        truth = ours(x, x, x)[1]
        ours.train()
        torch.manual_seed(0)
        output, weights = ours(x, x, x)
        torch.manual_seed(0)
        without, _ = ours(x, x, x, need_weights=False)
    assert torch.equal(weights, truth)
    assert torch.equal(output, without)
    assert not torch.equal(output, ours.eval()(x, x, x)[0])


def test_inside_torch_s_encoder_layer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=True)
    x = some(3, 7, 24)
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    truth = layer(x, src_mask=later, src_key_padding_mask=PADDED, is_causal=True)
    ours = MultiheadAttention(24, 4, batch_first=True, dropout=0.0)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    assert torch.allclose(
        layer(x, src_mask=later, src_key_padding_mask=PADDED, is_causal=True), truth, atol=1e-5
    )


def test_its_matrix_has_the_weights():
    _, ours = twins(24, 4, batch_first=True)
    x = some(3, 7, 24)
    with torch.no_grad():
        _, weights = ours(x, x, x, key_padding_mask=PADDED, average_attn_weights=False)
        assert torch.equal(ours.matrix(x, x, key_padding_mask=PADDED).dense(), weights)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"query": some(3, 5, 23)}, r"query has shape \[3, 5, 23\]"),
        ({"query": some(5, 24)}, r"key has shape \[3, 7, 24\]"),
        ({"value": some(3, 6, 24)}, r"value has shape \[3, 6, 24\]"),
        ({"query": some(2, 5, 24)}, "give both the same batch"),
        ({"attn_mask": HIDDEN[:4]}, r"attn_mask has shape \[4, 7\]"),
        ({"attn_mask": HIDDEN.int()}, "attn_mask is torch.int32"),
        ({"key_padding_mask": PADDED[:2]}, r"key_padding_mask has shape \[2, 7\]"),
        ({"key_padding_mask": PADDED.int()}, "key_padding_mask is torch.int32"),
        (
            {"query": torch.nested.nested_tensor([some(2, 24), some(3, 24)], layout=torch.jagged)},
            "nested tensor",
        ),
        ({"is_causal": True}, "as many queries as keys"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(call, says):
    _, ours = twins(24, 4, batch_first=True)
    given = {"query": some(3, 5, 24), "key": some(3, 7, 24), "value": some(3, 7, 24), **call}
    with pytest.raises((ValueError, TypeError), match=says) as error:
        ours(**given)
    assert "\n" not in str(error.value)
