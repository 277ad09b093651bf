"""Contract 5, 8 and 14: about forty named shapes, layouts and dtypes against the brute force in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import BACKENDS, brute, causal, plains, randn
from tolerance import assert_accurate, assert_agrees
from torch import Tensor

import kizuki

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# name: query, key, value shapes. `value_dim` differs from head_dim in many, and keys from queries in most.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "one of everything": ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
    "primes": ((2, 3, 13, 7), (2, 3, 29, 7), (2, 3, 29, 11)),
    "one query, many keys": ((2, 4, 1, 16), (2, 4, 257, 16), (2, 4, 257, 16)),
    "many queries, one key": ((2, 2, 131, 16), (2, 2, 1, 16), (2, 2, 1, 16)),
    "63 by 65": ((1, 2, 63, 16), (1, 2, 65, 16), (1, 2, 65, 16)),
    "64 by 64": ((1, 2, 64, 16), (1, 2, 64, 16), (1, 2, 64, 16)),
    "127 by 129": ((1, 1, 127, 16), (1, 1, 129, 16), (1, 1, 129, 16)),
    "block_k - 1": ((1, 1, 3, 8), (1, 1, 511, 8), (1, 1, 511, 8)),
    "block_k + 1": ((1, 1, 3, 8), (1, 1, 1025, 8), (1, 1, 1025, 8)),
    "block_q + 1": ((1, 1, 513, 8), (1, 1, 5, 8), (1, 1, 5, 8)),
    "rank 2": ((5, 8), (7, 8), (7, 3)),
    "rank 3": ((4, 5, 8), (2, 7, 8), (2, 7, 3)),
    "rank 5": ((2, 3, 4, 5, 8), (2, 3, 2, 7, 8), (2, 3, 2, 7, 8)),
    "rank 6": ((2, 1, 3, 4, 5, 8), (2, 1, 3, 4, 7, 8), (2, 1, 3, 4, 7, 8)),
    "batch axes broadcast, key": ((3, 2, 5, 8), (1, 2, 7, 8), (3, 2, 7, 8)),
    "batch axes broadcast, query": ((1, 2, 5, 8), (3, 2, 7, 8), (1, 2, 7, 8)),
    "batch axes broadcast, rank 5": ((2, 1, 4, 5, 8), (1, 3, 2, 7, 8), (2, 3, 1, 7, 8)),
    "key without batch": ((3, 4, 5, 8), (7, 8), (7, 8)),
    "query without batch": ((5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "9 query heads on 3": ((2, 9, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "many heads on one": ((2, 8, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "K 8 heads, V 4": ((1, 8, 5, 8), (1, 8, 7, 8), (1, 4, 7, 8)),
    "K 2 heads, V 4": ((1, 8, 5, 8), (1, 2, 7, 8), (1, 4, 7, 8)),
    "one query head for all": ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "more batches of value": ((1, 2, 5, 8), (1, 2, 7, 8), (3, 2, 7, 8)),
    "value in rank 5": ((2, 2, 5, 8), (2, 2, 7, 8), (3, 2, 2, 7, 6)),
    "value heads on a single head": ((2, 1, 5, 8), (2, 1, 7, 8), (2, 3, 7, 8)),
    "value_dim 1": ((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 1)),
    "head_dim 1": ((1, 2, 5, 1), (1, 2, 7, 1), (1, 2, 7, 1)),
    "head_dim 6": ((1, 2, 33, 6), (1, 2, 34, 6), (1, 2, 34, 6)),
    "head_dim 31": ((1, 2, 33, 31), (1, 2, 34, 31), (1, 2, 34, 31)),
    "head_dim 80": ((1, 2, 33, 80), (1, 2, 34, 80), (1, 2, 34, 80)),
    "head_dim 96": ((1, 2, 33, 96), (1, 2, 34, 96), (1, 2, 34, 96)),
    "head_dim 192, value_dim 128": ((1, 2, 33, 192), (1, 2, 34, 192), (1, 2, 34, 128)),
    "head_dim 256": ((1, 2, 33, 256), (1, 2, 34, 256), (1, 2, 34, 256)),
    "head_dim 512": ((1, 1, 17, 512), (1, 1, 18, 512), (1, 1, 18, 512)),
    "many planes": ((64, 12, 5, 4), (64, 12, 6, 4), (64, 12, 6, 4)),
}


def tensors(name: str, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(randn(*shape, seed=at, dtype=dtype) for at, shape in enumerate(SHAPES[name]))  # type: ignore[return-value]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, backend: str) -> None:
    query, key, value = tensors(name)
    matrix = kizuki.attend(query, key, backend=backend)
    weights, lse, output = plains(query, key, value)
    truth = brute(query, key, value)
    got = matrix @ value
    assert tuple(got.shape) == tuple(truth.output.shape)
    assert_accurate(got, truth.output, output, "output")
    shared = brute(query, key)  # A itself has no batch axes of value
    weights, lse, _ = plains(query, key)
    assert tuple(matrix.shape) == tuple(shared.weights.shape)
    assert_accurate(matrix.dense(), shared.weights, weights, "weights")
    assert_accurate(matrix.lse, shared.lse, lse, "lse")


def _qkv(make: Callable[[int], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return make(0), make(1), make(2)


LAYOUTS: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "view(B, L, H, D).transpose(1, 2)": lambda: _qkv(lambda s: randn(2, 19, 3, 8, seed=s).transpose(1, 2)),
    "one packed projection": lambda: randn(2, 19, 3, 3, 8).permute(2, 0, 3, 1, 4).unbind(0),
    "last two axes transposed": lambda: _qkv(lambda s: randn(2, 3, 8, 19, seed=s).transpose(-1, -2)),
    "sliced along length": lambda: _qkv(lambda s: randn(2, 3, 38, 8, seed=s)[:, :, ::2]),
    "last stride 2": lambda: _qkv(lambda s: randn(2, 3, 19, 16, seed=s)[..., ::2]),
    "an offset into a larger tensor": lambda: _qkv(lambda s: randn(4, 5, 25, 11, seed=s)[1:3, 2:, 5:24, 3:]),
    "expanded batch": lambda: _qkv(lambda s: randn(1, 3, 19, 8, seed=s).expand(2, -1, -1, -1)),
    "expanded heads": lambda: _qkv(lambda s: randn(2, 1, 19, 8, seed=s).expand(-1, 3, -1, -1)),
    "expanded length": lambda: _qkv(lambda s: randn(2, 3, 1, 8, seed=s).expand(-1, -1, 19, -1)),
    "expanded width": lambda: _qkv(lambda s: randn(2, 3, 19, 1, seed=s).expand(-1, -1, -1, 8)),
    "batch and heads swapped": lambda: _qkv(lambda s: randn(3, 2, 19, 8, seed=s).transpose(0, 1)),
    "all three one tensor": lambda: (x := randn(2, 3, 19, 8), x, x),
    "rank 5 with permuted batch axes": lambda: _qkv(
        lambda s: randn(3, 2, 2, 19, 8, seed=s).permute(1, 0, 2, 3, 4)
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, backend: str) -> None:
    query, key, value = LAYOUTS[name]()
    query = query[..., :17, :]  # queries ≠ keys, so that no layout is right by symmetry
    before = [x.clone() for x in (query, key, value)]
    assert_agrees(query, key, value, backend=backend)
    for x, was in zip((query, key, value), before, strict=True):
        assert torch.equal(x, was), "an input was written to"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "softcap": 4.0, "scale": 0.2}], ids=["bare", "options"]
)
def test_dtypes(dtype: torch.dtype, backend: str, options: dict[str, Any]) -> None:
    query, key, value = (randn(2, 6, 37, 24, seed=s, dtype=dtype) for s in range(3))
    options = dict(options)
    if options:
        options |= {"bias": randn(6, 37, 37, seed=9, dtype=dtype), "sinks": randn(6, seed=8, dtype=dtype)}
    visible = causal(37, 37) if options else None
    matrix = assert_agrees(query, key, value, backend=backend, visible=visible, options=options)
    assert matrix.dtype is dtype
    wide = F64 if dtype is F64 else F32
    assert matrix.lse.dtype is matrix.dense().dtype is matrix.entropy().dtype is matrix[..., 0].dtype is wide


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((0, 2, 5, 4), (0, 2, 7, 4)),
        ((2, 0, 5, 4), (2, 0, 7, 4)),
        ((2, 2, 0, 4), (2, 2, 7, 4)),
        ((2, 2, 5, 4), (2, 2, 0, 4)),
        ((2, 2, 0, 4), (2, 2, 0, 4)),
        ((0, 3, 2, 5, 4), (1, 3, 2, 7, 4)),
        ((0, 4), (7, 4)),
        ((5, 4), (0, 4)),
    ],
)
def test_zero_sized_axes(query: tuple[int, ...], key: tuple[int, ...], backend: str) -> None:
    q, k = randn(*query), randn(*key)
    matrix = kizuki.attend(q, k, backend=backend)
    output = matrix @ randn(*key[:-1], 3)
    assert tuple(output.shape) == (*matrix.shape[:-1], 3)
    assert not output.any()
    assert tuple(matrix.lse.shape) == tuple(matrix.shape[:-1])
    assert torch.isneginf(matrix.lse).all()
    assert matrix.dense().numel() == 0
    # every mask rule stands an empty axis too
    rule = kizuki.masks.causal("lower_right") & kizuki.masks.keys(torch.ones(k.shape[-2], dtype=torch.bool))
    rule = rule & kizuki.masks.lengths(key=0) & kizuki.masks.where(lambda b, h, i, j: i != j)
    ids = torch.zeros(q.shape[-2], dtype=torch.int64), torch.zeros(k.shape[-2], dtype=torch.int64)
    rule = rule | kizuki.masks.documents(ids=ids[0], key_ids=ids[1])
    masked = kizuki.attend(q, k, mask=rule, backend=backend)
    assert not (masked @ randn(*key[:-1], 3)).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_value_dim_zero(backend: str) -> None:
    matrix = kizuki.attend(randn(1, 2, 5, 4), randn(1, 2, 7, 4), backend=backend)
    assert (matrix @ torch.zeros(1, 2, 7, 0)).shape == (1, 2, 5, 0)


def test_a_product_with_more_batches_reads_a_once() -> None:
    """A @ value where value has batch axes A lacks is each of them by itself, in any position."""
    query, key = randn(2, 1, 3, 5, 8), randn(2, 1, 3, 7, 8)
    value = randn(4, 2, 6, 3, 7, 2)
    got = kizuki.attend(query, key, backend="portable") @ value
    assert got.shape == (4, 2, 6, 3, 5, 2)
    for a in range(4):
        for c in range(6):
            one = kizuki.attention(query, key, value[a][:, c : c + 1], backend="portable")
            want = brute(query, key, value[a][:, c : c + 1]).output
            assert_accurate(got[a][:, c : c + 1], want, one, f"batch {a}, {c}")


@pytest.mark.parametrize("name", ["primes", "9 query heads on 3", "many planes", "one query, many keys"])
def test_tiny_tiles_change_nothing_but_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable backend with tiles of a few scores: every seam between tiles is crossed."""
    from kizuki import portable

    monkeypatch.setattr(portable, "TILE", 64)
    query, key, value = tensors(name)
    assert_agrees(query, key, value, backend="portable")


def test_autocast_does_not_reach_in() -> None:
    """float32 stays float32 under autocast (contract 5): the same bits as without."""
    query, key, value = tensors("primes")
    query.requires_grad_()
    plain_matrix = kizuki.attend(query, key, backend="portable")
    want = plain_matrix @ value
    (gradient,) = torch.autograd.grad(want.sum(), query)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        matrix = kizuki.attend(query, key, backend="portable")
        got = matrix @ value
        assert torch.equal(matrix.dense(), plain_matrix.dense())
        assert torch.equal(matrix[0, 0], plain_matrix[0, 0])
        assert torch.equal(matrix.entropy(), plain_matrix.entropy())
        assert torch.equal(matrix.T @ randn(2, 3, 13, 2), plain_matrix.T @ randn(2, 3, 13, 2))
        assert torch.equal(torch.autograd.grad(got.sum(), query)[0], gradient)
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_written_to_is_read_again(backend: str) -> None:
    """A keeps its log-sum-exp between readings; writing into query makes it read anew."""
    query, key, _ = tensors("primes")
    matrix = kizuki.attend(query, key, backend=backend)
    matrix.entropy()
    query.mul_(2)
    fresh = kizuki.attend(query, key, backend=backend)
    assert torch.equal(matrix.lse, fresh.lse)
    assert torch.equal(matrix.dense(), fresh.dense())
    matrix.lse.zero_()  # and what it hands out is the reader's own
    assert torch.equal(matrix.lse, fresh.lse)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "portable"])
@pytest.mark.parametrize(
    "name", ["primes", "9 query heads on 3", "127 by 129", "head_dim 31", "one query, many keys"]
)
def test_same_bits_for_any_threads_alone_or_in_a_batch(name: str, backend: str) -> None:
    """Contract 10. The portable backend promises it only for the same threads and batch (see its docstring)."""
    query, key, value = tensors(name)
    mask = kizuki.masks.causal("lower_right")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = kizuki.attention(query, key, value, mask=mask, backend=backend)
        torch.set_num_threads(2)
        two = kizuki.attention(query, key, value, mask=mask, backend=backend)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, two)
    batch, heads, queries, keys = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    group, value_group = heads // key.shape[1], heads // value.shape[1]
    for b, h, i in ((0, 0, 0), (batch - 1, heads - 1, queries - 1), (0, heads - 1, queries // 2)):
        seen = kizuki.masks.keys(torch.arange(keys) <= i + keys - queries)
        row = kizuki.attention(
            query[b, h, i : i + 1], key[b, h // group], value[b, h // value_group], mask=seen, backend=backend
        )
        assert torch.equal(row[0], one[b, h, i]), f"row {b}, {h}, {i} alone"
