"""Gradients of A @ value: gradcheck in float64, and float32 against float64 autograd of the plain formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracle import BACKENDS, INF, NAN, causal, orders, plain, randn
from tolerance import assert_accurate
from torch import Tensor

import kizuki
from kizuki import masks

F64 = torch.float64


def leaves(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def assert_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    backend: str,
    options: dict[str, Any] | None = None,
    visible: np.ndarray | Tensor | None = None,
    upstream: Tensor,
) -> dict[str, Tensor]:
    """Each gradient against float64 autograd of the plain formula, by the rule of accuracy; returns ours.

    Taken for `upstream` and for it rolled along the queries, five in all: the largest error of a gradient
    that is one number (a scalar bias) would else be one draw of luck.
    """
    options = options or {}
    named = {"query": query, "key": key, "value": value}
    named |= {n: options[n] for n in ("bias", "sinks") if options.get(n) is not None}
    numbers = {n: options.get(n) for n in ("scale", "softcap")}
    rules = {n: v for n, v in options.items() if n not in named}
    ups = [upstream, *(upstream.roll(shift, -2) * (1 + shift) for shift in range(1, 5))]

    def formula(dtype: torch.dtype, order: Tensor | None = None) -> dict[str, Tensor]:
        made = {n: t.detach().to(dtype).requires_grad_() for n, t in named.items()}
        return derive(made, plain(**made, visible=visible, dtype=dtype, order=order, **numbers)[2], ups)

    mine = {n: t.detach().requires_grad_() for n, t in named.items()}
    got = derive(mine, kizuki.attention(**mine, **rules, backend=backend), ups)
    truth = formula(F64)
    same = [formula(query.dtype, order) for order in orders(key.shape[-2])]
    for name, gradient in got.items():
        assert gradient.shape[1:] == named[name].shape
        assert gradient.dtype is named[name].dtype
        plains = [each[name].to(gradient.dtype) for each in same]
        assert_accurate(gradient, truth[name], plains, f"gradient of {name}")
    return {name: gradient[0] for name, gradient in got.items()}


def derive(leaf: dict[str, Tensor], output: Tensor, ups: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of `output` for every leaf, stacked over the incoming gradients."""
    rows = [
        torch.autograd.grad(output, list(leaf.values()), up.to(output.dtype), retain_graph=True) for up in ups
    ]
    return {name: torch.stack(parts) for name, parts in zip(leaf, zip(*rows, strict=True), strict=True)}


SHAPES = {
    "primes": ((2, 3, 13, 7), (2, 3, 29, 7), (2, 3, 29, 11)),
    "grouped": ((2, 6, 9, 8), (2, 2, 11, 8), (2, 3, 11, 5)),
    "one head for all": ((1, 4, 5, 8), (1, 1, 9, 8), (1, 1, 9, 8)),
    "one query head": ((2, 1, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)),
    "broadcast batch": ((1, 2, 5, 8), (3, 2, 7, 8), (3, 1, 7, 8)),
    "no batch": ((5, 8), (2, 2, 7, 8), (7, 3)),
    "rank 2": ((5, 8), (7, 8), (7, 3)),
    "rank 5": ((2, 1, 2, 5, 8), (1, 3, 2, 7, 8), (2, 3, 2, 7, 4)),
    "more batches of value": ((1, 2, 5, 8), (1, 2, 7, 8), (4, 2, 7, 3)),
    "one row": ((1, 1, 1, 8), (1, 1, 700, 8), (1, 1, 700, 8)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, backend: str) -> None:
    query, key, value = (randn(*shape, seed=s) for s, shape in enumerate(SHAPES[name]))
    output = kizuki.attention(query, key, value, backend=backend)
    assert_gradients(query, key, value, backend=backend, upstream=randn(*output.shape, seed=9))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "shape",
    [
        (),
        (1,),
        (9,),
        (7, 1),
        (7, 9),
        (3, 1, 1),
        (1, 3, 1, 9),
        (1, 1, 7, 9),
        (2, 1, 1, 9),
        (2, 3, 7, 9),
        (1, 1, 1, 1),
    ],
    ids=str,
)
def test_every_broadcast_shape_of_bias(shape: tuple[int, ...], backend: str) -> None:
    """FA#242, FA#332, PT#148476, PT#145869: exact, and summed into the shape the bias has."""
    query, key, value = randn(2, 3, 7, 8), randn(2, 3, 9, 8, seed=1), randn(2, 3, 9, 5, seed=2)
    options = {"bias": randn(*shape, seed=4)}
    assert_gradients(query, key, value, backend=backend, options=options, upstream=randn(2, 3, 7, 5, seed=5))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 1, 1, 7, 9), (1, 3, 2, 1, 9), (3, 1, 7, 1), (2, 3, 1, 1, 1)], ids=str)
def test_bias_over_several_batch_axes(shape: tuple[int, ...], backend: str) -> None:
    query, key, value = randn(2, 3, 2, 7, 8), randn(2, 3, 2, 9, 8, seed=1), randn(2, 3, 2, 9, 5, seed=2)
    options = {"bias": randn(*shape, seed=4)}
    assert_gradients(
        query, key, value, backend=backend, options=options, upstream=randn(2, 3, 2, 7, 5, seed=5)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("options", "visible"),
    [
        ({"scale": 0.7}, None),
        ({"softcap": 1.5}, None),
        ({"softcap": 0.3, "scale": 2.0, "bias": randn(3, 7, 7, seed=3)}, None),
        ({"sinks": torch.tensor([0.5, -2.0, 3.0])}, None),
        ({"causal": True, "sinks": torch.tensor([0.5, -INF, 60.0]), "softcap": 5.0}, causal(7, 7)),
        ({"window": (2, 1), "bias": randn(7, seed=3)}, None),
        ({"bias": torch.where(torch.from_numpy(causal(7, 7)), 0.0, -INF)}, causal(7, 7)),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_options(options: dict[str, Any], visible: np.ndarray | None, backend: str) -> None:
    if "window" in options:
        visible = np.abs(np.tri(7, 7, 1) - np.tri(7, 7, -3)) > 0
    query, key, value = (randn(2, 3, 7, 8, seed=s) for s in range(3))
    upstream = randn(2, 3, 7, 8, seed=5)
    assert_gradients(query, key, value, backend=backend, options=options, visible=visible, upstream=upstream)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores(backend: str) -> None:
    """Weights in the backward are taken from the log-sum-exp: it must not lose their digits when it is large."""
    query, key, value = (randn(1, 2, 9, 8, seed=s) for s in range(3))
    for shift in (-3000.0, 60.0, 3000.0, torch.finfo(torch.float32).min):
        options = {"bias": torch.full((9, 9), shift)}
        assert_gradients(
            query, key, value, backend=backend, options=options, upstream=randn(1, 2, 9, 8, seed=5)
        )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"softcap": 0.8, "scale": 1.1},
        {"mask": masks.window(1, 1) | masks.keys(torch.tensor([True, False, False, False]))},
        {"mask": masks.lengths(query=2, key=3)},
    ],
    ids=["bare", "causal", "softcap", "window or key", "lengths"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(options: dict[str, Any], backend: str) -> None:
    query, key, value = leaves(*(randn(1, h, 4, 3, seed=s, dtype=F64) for s, h in enumerate((2, 1, 2))))
    bias, sinks = leaves(randn(2, 1, 4, seed=7, dtype=F64), randn(2, seed=8, dtype=F64))

    def run(*t: Tensor) -> Tensor:
        return kizuki.attention(*t[:3], bias=t[3], sinks=t[4], **options, backend=backend)

    assert torch.autograd.gradcheck(run, (query, key, value, bias, sinks))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_behind_a_mask_touches_no_gradient(backend: str) -> None:
    """PT#101967, backward: hidden keys, values and dead queries hold NaN and Inf; their own gradient is 0."""
    query, key, value = (randn(2, 3, 7, 8, seed=s) for s in range(3))
    seen = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.7
    seen[..., 1] = False
    seen[..., 4, :] = False
    upstream = randn(2, 3, 7, 8, seed=5)

    def gradients() -> tuple[Tensor, ...]:
        q, k, v = leaves(query, key, value)
        output = kizuki.attention(q, k, v, mask=seen, softcap=9.0, backend=backend)
        return torch.autograd.grad(output, (q, k, v), upstream)

    clean = gradients()
    for bad in (NAN, INF):
        key[:, :, 1], value[:, :, 1], query[:, :, 4] = bad, -bad, bad
        upstream[:, :, 4] = bad
        for got, want in zip(gradients(), clean, strict=True):
            assert torch.equal(got, want)
    assert not clean[0][:, :, 4].any()
    assert not clean[1][:, :, 1].any()
    assert not clean[2][:, :, 1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_one_row_stays_out_of_keys_it_does_not_see(backend: str) -> None:
    query, key, value = (randn(1, 1, 8, 4, seed=s) for s in range(3))
    query[0, 0, 3, 0] = NAN
    q, k, v = leaves(query, key, value)
    kizuki.attention(q, k, v, causal=True, backend=backend).sum().backward()
    bad = torch.arange(8) <= 3
    assert torch.equal(k.grad[0, 0].isnan().any(-1), bad)
    assert torch.equal(v.grad[0, 0].isnan().any(-1), bad)
    assert torch.equal(q.grad[0, 0].isnan().any(-1), torch.arange(8) == 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", [0, 3, 6])
def test_empty_rows_have_no_gradient(row: int, backend: str) -> None:
    """Contract 4, backward: 0, never NaN, also through sinks and bias."""
    seen = torch.ones(7, 9, dtype=torch.bool)
    seen[row] = False
    query, key, value = randn(2, 3, 7, 8), randn(2, 3, 9, 8, seed=1), randn(2, 3, 9, 8, seed=2)
    options = {"mask": seen, "sinks": torch.tensor([0.5, -2.0, -INF]), "bias": randn(7, 1, seed=3)}
    got = assert_gradients(
        query, key, value, backend=backend, options=options, visible=seen, upstream=randn(2, 3, 7, 8, seed=5)
    )
    assert not got["query"][:, :, row].any()
    assert got["bias"][row] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["expanded scalar", "transposed", "sliced", "expanded width"])
def test_incoming_gradients_of_any_strides(layout: str, backend: str) -> None:
    """PT#112577 and the like: `output.sum().backward()` hands over a stride-0 gradient."""
    query, key, value = (randn(2, 3, 7, 8, seed=s).transpose(0, 1) for s in range(3))
    upstream = {
        "expanded scalar": torch.tensor(1.7).expand(3, 2, 7, 8),
        "transposed": randn(3, 2, 8, 7, seed=4).transpose(-1, -2),
        "sliced": randn(3, 2, 14, 16, seed=4)[:, :, ::2, ::2],
        "expanded width": randn(3, 2, 7, 1, seed=4).expand(-1, -1, -1, 8),
    }[layout]
    assert_gradients(query, key, value, backend=backend, upstream=upstream)
    q, k, v = leaves(query, key, value)
    output = kizuki.attention(q, k, v, backend=backend)
    got = torch.autograd.grad(output, (q, k, v), upstream, retain_graph=True)
    want = torch.autograd.grad(output, (q, k, v), upstream.clone(memory_format=torch.contiguous_format))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ["query", "key", "value", "bias", "sinks"])
def test_only_one_needs_a_gradient(which: str, backend: str) -> None:
    named = {"query": randn(2, 4, 7, 8), "key": randn(2, 2, 7, 8, seed=1), "value": randn(2, 2, 7, 8, seed=2)}
    named |= {"bias": randn(1, 4, 1, 7, seed=3), "sinks": randn(4, seed=4)}
    every = {n: t.clone().requires_grad_() for n, t in named.items()}
    upstream = randn(2, 4, 7, 8, seed=5)
    output = kizuki.attention(**every, causal=True, backend=backend)
    want = torch.autograd.grad(output, every[which], upstream)[0]
    named[which] = named[which].clone().requires_grad_()
    output = kizuki.attention(**named, causal=True, backend=backend)
    output.backward(upstream)
    assert torch.equal(named[which].grad, want)
    assert all(t.grad is None for n, t in named.items() if n != which)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_learned_scalar_and_a_table_reach_their_parameters(backend: str) -> None:
    """A 0-dim slope times distances, and a relative-position table by index: the usual ways a bias is learned."""
    query, key, value = (randn(1, 2, 6, 8, seed=s, dtype=torch.float32) for s in range(3))
    distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    upstream = randn(1, 2, 6, 8, seed=5)

    def both(run: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        slope = torch.tensor(-0.3, dtype=dtype, requires_grad=True)
        table = randn(2, 6, seed=6, dtype=dtype).requires_grad_()
        q, k, v = (t.to(dtype) for t in (query, key, value))
        output = run(q, k, v, slope * distance + table[:, distance])
        return torch.autograd.grad(output, (slope, table), upstream.to(dtype))

    got = both(lambda q, k, v, bias: kizuki.attention(q, k, v, bias=bias, backend=backend), torch.float32)
    truth = both(lambda q, k, v, bias: plain(q, k, v, bias=bias)[2], F64)
    same = both(lambda q, k, v, bias: plain(q, k, v, bias=bias)[2], torch.float32)
    for a, b, c in zip(got, truth, same, strict=True):
        assert_accurate(a, b, c)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, backend: str) -> None:
    query, key, value = (randn(2, 4, 17, 16, seed=s, dtype=dtype) for s in range(3))
    upstream = randn(2, 4, 17, 16, seed=5, dtype=dtype)
    options = {"causal": True, "bias": randn(4, 1, 17, seed=6, dtype=dtype)}
    assert_gradients(
        query, key, value, backend=backend, options=options, visible=causal(17, 17), upstream=upstream
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiny_tiles(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kizuki import portable

    monkeypatch.setattr(portable, "TILE", 100)
    query, key, value = randn(1, 4, 13, 8), randn(1, 2, 17, 8, seed=1), randn(1, 2, 17, 5, seed=2)
    options = {"mask": masks.causal("lower_right"), "bias": randn(4, 1, 17, seed=3)}
    visible = causal(13, 17, "lower_right")
    assert_gradients(
        query,
        key,
        value,
        backend=backend,
        options=options,
        visible=visible,
        upstream=randn(1, 4, 13, 5, seed=5),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_are_differentiable(backend: str) -> None:
    """(A2 @ A1) @ x is A2 @ (A1 @ x), gradients and all."""
    q1, k1, q2, k2, x = leaves(*(randn(1, 2, 5, 4, seed=s) for s in range(5)))
    a1, a2 = kizuki.attend(q1, k1, backend=backend), kizuki.attend(q2, k2, causal=True, backend=backend)
    got = torch.autograd.grad(((a2 @ a1) @ x).sum(), (q1, k1, q2, k2, x))
    want = torch.autograd.grad((a2 @ (a1 @ x)).sum(), (q1, k1, q2, k2, x))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_sized_axes(backend: str) -> None:
    for query, key in (
        ((2, 2, 0, 4), (2, 2, 7, 4)),
        ((2, 2, 5, 4), (2, 2, 0, 4)),
        ((0, 2, 5, 4), (0, 2, 7, 4)),
    ):
        q, k, v = leaves(randn(*query), randn(*key), randn(*key))
        kizuki.attention(q, k, v, backend=backend).sum().backward()
        assert not q.grad.any()
        assert not k.grad.any()
        assert not v.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_which_readings_carry_a_graph(backend: str) -> None:
    """Those that people train on (test_readgrad.py); the others are pictures of what is there."""
    q, k = leaves(randn(1, 2, 5, 4), randn(1, 2, 5, 4, seed=1))
    matrix = kizuki.attend(q, k, backend=backend)

    def trained() -> list[Tensor]:
        mass = matrix.mass(torch.tensor([0, 1, 0, 1, 1]))
        return [matrix @ k, matrix.T @ torch.ones(1, 2, 5, 1), matrix.lse, matrix.entropy(), mass]

    for reading in (matrix[0, 0], matrix.dense(), matrix.topk(2)[0], matrix.received(), matrix.max()):
        assert not reading.requires_grad
    assert all(reading.requires_grad for reading in trained())
    with torch.no_grad():
        assert not any(reading.requires_grad for reading in trained())


@pytest.mark.parametrize("backend", BACKENDS)
def test_thousands_of_queries_keep_their_digits(backend: str) -> None:
    """A key's gradient sums over all queries: one running sum of them would lose digits that blocks keep."""
    query, key, value = (randn(1, 2, 2048, 16, seed=s) for s in range(3))
    assert_gradients(query, key, value, backend=backend, upstream=randn(1, 2, 2048, 16, seed=5))
