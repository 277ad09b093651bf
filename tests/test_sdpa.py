"""`kizuki.scaled_dot_product_attention` beside PyTorch's: the same arguments, the same answer, the same refusals."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from oracle import INF, NAN, plains, randn
from tolerance import assert_accurate
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as theirs

import kizuki

mine = kizuki.scaled_dot_product_attention


def operands(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def assert_same(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
    """Ours errs against PyTorch in float64 at most twice as much as PyTorch in the same dtype, plus rounding."""
    wide = dict(options)
    mask = wide.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        wide["attn_mask"] = mask.double()
    truth = theirs(query.double(), key.double(), value.double(), **wide)
    got, plain = mine(query, key, value, **options), theirs(query, key, value, **options)
    assert got.shape == plain.shape
    assert got.dtype is plain.dtype
    # The keys in another order are another evaluation: one of them may be lucky.
    order = torch.arange(key.shape[-2]).flip(0)
    moved = dict(options)
    if mask is not None and mask.dim() and mask.shape[-1] > 1:
        moved["attn_mask"] = mask[..., order]
    several = [plain]
    if not options.get("is_causal"):
        several.append(theirs(query, key[..., order, :], value[..., order, :], **moved))
    assert_accurate(got, truth, several)


SHAPES = {
    "square": ((2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "more keys": ((2, 3, 5, 8), (2, 3, 9, 8), (2, 3, 9, 6)),
    "more queries": ((2, 3, 9, 8), (2, 3, 5, 8), (2, 3, 5, 11)),
    "rank 2": ((5, 8), (7, 8), (7, 3)),
    "rank 3": ((4, 5, 8), (4, 7, 8), (4, 7, 8)),
    "rank 5": ((2, 1, 2, 5, 8), (1, 3, 2, 7, 8), (2, 3, 2, 7, 4)),
    "one head of the query": ((1, 1, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)),
    "one head of key and value": ((1, 4, 5, 8), (1, 1, 7, 8), (1, 1, 7, 8)),
    "batches of the value alone": ((1, 2, 5, 8), (1, 2, 7, 8), (3, 2, 7, 8)),
    "ranks differ": ((5, 8), (2, 7, 8), (2, 7, 8)),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, is_causal: bool) -> None:
    assert_same(*operands(*SHAPES[name]), is_causal=is_causal)
    # PyTorch's CPU kernel gives NaN for a negative scale together with is_causal.
    assert_same(*operands(*SHAPES[name]), is_causal=is_causal, scale=0.4 if is_causal else -0.4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32, None])
def test_masks_of_every_dtype(dtype: torch.dtype, kind: torch.dtype | None) -> None:
    """Boolean, float32, or the query's own dtype; a row of no key is 0 for both kinds, as in PyTorch."""
    query, key, value = operands((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), dtype=dtype)
    seen = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.6
    seen[..., 0] = True
    seen[:, :, 3] = False
    if kind is torch.bool:
        mask = seen
    else:
        mask = randn(2, 1, 5, 7, seed=9).to(dtype if kind is None else kind).masked_fill(~seen, -INF)
    assert_same(query, key, value, attn_mask=mask)
    assert not mine(query, key, value, attn_mask=mask)[:, :, 3].any()


@pytest.mark.parametrize(
    "shape", [(5, 7), (1, 7), (5, 1), (1, 1, 7), (3, 5, 7), (2, 3, 5, 7), (2, 1, 1, 7)], ids=str
)
def test_masks_of_every_shape(shape: tuple[int, ...]) -> None:
    query, key, value = operands((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    assert_same(query, key, value, attn_mask=randn(*shape, seed=4) > -0.8)
    assert_same(query, key, value, attn_mask=randn(*shape, seed=4))


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [((2, 6), (2, 2), (2, 2)), ((6,), (3,), (3,)), ((1, 4), (1, 2), (1, 1)), ((1, 2), (1, 2), (1, 2))],
)
def test_grouped_queries(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    made = operands((*q, 5, 8), (*k, 7, 8), (*v, 7, 4))
    assert_same(*made, enable_gqa=True)
    assert_same(*made, enable_gqa=True, attn_mask=randn(5, 7, seed=5) > 0)


def test_causal_is_upper_left_whatever_the_lengths() -> None:
    query, key, value = operands((1, 1, 3, 4), (1, 1, 6, 4), (1, 1, 6, 4))
    assert_accurate(
        mine(query, key, value, is_causal=True)[..., :1, :], value[..., :1, :].double(), value[..., :1, :]
    )
    visible = torch.ones(3, 6, dtype=torch.bool).tril()
    truth, plain = (
        plains(query.to(dtype), key.to(dtype), value.to(dtype), visible=visible)[2]
        for dtype in (torch.float64, torch.float32)
    )
    assert_accurate(mine(query, key, value, is_causal=True), truth[0], plain)


def test_zero_sized_axes() -> None:
    for q, k in (((1, 2, 0, 4), (1, 2, 5, 4)), ((1, 2, 3, 4), (1, 2, 0, 4)), ((0, 2, 3, 4), (0, 2, 5, 4))):
        query, key, value = operands(q, k, k)
        got, want = mine(query, key, value), theirs(query, key, value)
        assert got.shape == want.shape
        assert torch.equal(got, want)


WRONG = {
    "an integer mask": {"attn_mask": torch.ones(5, 7, dtype=torch.int32)},
    "a float64 mask": {"attn_mask": torch.ones(5, 7, dtype=torch.float64)},
    "a bfloat16 mask": {"attn_mask": torch.ones(5, 7, dtype=torch.bfloat16)},
    "a mask of another length": {"attn_mask": torch.ones(5, 6, dtype=torch.bool)},
    "a mask that enlarges": {"attn_mask": torch.ones(3, 1, 5, 7, dtype=torch.bool)},
    "a mask of more axes": {"attn_mask": torch.ones(2, 1, 1, 5, 7, dtype=torch.bool)},
    "key of another dtype": {"key": randn(1, 4, 7, 8).double()},
    "another head_dim": {"key": randn(1, 4, 7, 6)},
    "fewer heads without enable_gqa": {"key": randn(1, 2, 7, 8), "value": randn(1, 2, 7, 8)},
    "heads that do not divide": {"key": randn(1, 3, 7, 8), "value": randn(1, 3, 7, 8), "enable_gqa": True},
    "enable_gqa without heads": {
        "query": randn(5, 8),
        "key": randn(7, 8),
        "value": randn(7, 8),
        "enable_gqa": True,
    },
    "one axis": {"query": randn(8), "key": randn(8), "value": randn(8)},
    "no tensor": {"query": None},
    "integers": {n: torch.ones(1, 4, 5, 8, dtype=torch.int64) for n in ("query", "key", "value")},
    "a scale that is no number": {"scale": "a"},
    "dropout above 1": {"dropout_p": 1.5},
    "dropout below 0": {"dropout_p": -0.1},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_pytorch_refuses_is_refused(name: str) -> None:
    arguments = {"query": randn(1, 4, 5, 8), "key": randn(1, 4, 7, 8), "value": randn(1, 4, 7, 8)} | WRONG[
        name
    ]
    with pytest.raises((RuntimeError, TypeError, IndexError)) as want:
        theirs(**arguments)
    with pytest.raises((ValueError, TypeError), match=r"^kizuki.scaled_dot_product_attention: \w+") as got:
        mine(**arguments)
    assert "\n" not in str(got.value)
    if type(want.value) is not IndexError:
        assert isinstance(got.value, type(want.value))


@pytest.mark.parametrize(
    "arguments",
    [
        {"attn_mask": torch.ones(5, 7, dtype=torch.bool), "is_causal": True},
        {"value": randn(1, 4, 6, 8)},
        {"scale": NAN},
        {"is_causal": 1},
        {"enable_gqa": None},
        {"attn_mask": [[True]]},
    ],
    ids=str,
)
def test_what_pytorch_documents_as_wrong_or_reads_past_is_refused(arguments: dict[str, Any]) -> None:
    base = {"query": randn(1, 4, 5, 8), "key": randn(1, 4, 7, 8), "value": randn(1, 4, 7, 8)}
    with pytest.raises(RuntimeError, match=r"^kizuki.scaled_dot_product_attention: \w+"):
        mine(**(base | arguments))


def test_scale_is_keyword_only_and_the_rest_is_in_pytorchs_order() -> None:
    names = [*inspect.signature(mine).parameters]
    assert names == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    query, key, value = operands((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    assert torch.equal(mine(query, key, value, None, 0.0, True), mine(query, key, value, is_causal=True))
    with pytest.raises(TypeError):
        mine(query, key, value, None, 0.0, False, 2.0)


def test_gradients_reach_a_float_mask() -> None:
    query, key, value = operands((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    mask = randn(5, 7, seed=6).masked_fill(randn(5, 7, seed=7) > 0.8, -INF)
    up = randn(1, 2, 5, 8, seed=8)

    def run(function: Any, dtype: torch.dtype, order: Tensor | None = None) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (query, key, value, mask)]
        q, k, v, m = leaves
        if order is not None:
            k, v, m = k[..., order, :], v[..., order, :], m[..., order]
        return list(torch.autograd.grad(function(q, k, v, attn_mask=m), leaves, up.to(dtype)))

    truth = run(theirs, torch.float64)
    same = [run(theirs, torch.float32), run(theirs, torch.float32, torch.arange(7).flip(0))]
    for at, got in enumerate(run(mine, torch.float32)):
        assert_accurate(got, truth[at], [each[at] for each in same])


def test_dropout_keeps_the_mean_and_is_repeatable() -> None:
    query, key = operands((1, 2, 64, 8), (1, 2, 64, 8))
    value = torch.ones(1, 2, 64, 8)

    def run(p: float) -> Tensor:
        torch.manual_seed(0)
        return mine(query, key, value, dropout_p=p)

    assert torch.equal(run(0.3), run(0.3))
    assert not run(1.0).any()
    dropped = run(0.3)
    assert not torch.equal(dropped, run(0.0))
    assert 0.9 < dropped.mean() < 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast_casts_what_pytorch_casts(dtype: torch.dtype) -> None:
    query, key, value = operands((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8), dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mine(query, key, value).dtype is theirs(query, key, value).dtype
        mask = torch.zeros(5, 7)
        assert mine(query, key, value, attn_mask=mask).dtype is mine(query, key, value).dtype
