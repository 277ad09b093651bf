"""Does the decoder give a row the same bits as the forward kernel, whatever the shape, dtype and mask?"""

from __future__ import annotations

import pytest
import torch

import kizuki
from kizuki import masks
from kizuki.cpu import call

SHAPES = [  # batch, heads, kv_heads, queries, keys, head_dim, value_dim
    (1, 4, 1, 1, 3000, 64, 64),
    (2, 4, 4, 1, 1100, 32, 128),
    (1, 8, 2, 2, 2100, 128, 64),
    (1, 1, 1, 3, 17, 16, 16),
    (2, 6, 2, 1, 1, 64, 64),
    (1, 1, 1, 16, 1500, 80, 8),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
OPTIONS = {
    "plain": lambda q, k: {},
    "causal": lambda q, k: {"mask": masks.causal("lower_right")},
    "window": lambda q, k: {"mask": masks.window(700, 0, align="lower_right")},
    "softcap, sinks": lambda q, k: {"softcap": 5.0, "sinks": torch.randn(q.shape[1]).to(q.dtype)},
    "bias": lambda q, k: {"bias": torch.randn(q.shape[1], q.shape[2], k.shape[2]).to(q.dtype)},
    "dense": lambda q, k: {"mask": torch.rand(q.shape[0], 1, q.shape[2], k.shape[2]) > 0.4},
}


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    batch, heads, kv_heads, queries, keys, dim, value_dim = shape
    torch.manual_seed(0)
    q = torch.randn(batch, heads, queries, dim).to(dtype)
    k = torch.randn(batch, kv_heads, keys, dim).to(dtype)
    return q, k, torch.randn(batch, kv_heads, keys, value_dim).to(dtype)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_kernels_give_the_same_bits(
    shape: tuple[int, ...], dtype: torch.dtype, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = operands(shape, dtype)
    made = OPTIONS[option](q, k)
    A = kizuki.attend(q, k, backend="cpu", **made)
    assert call.shared_rows(A.problem, v) > 0, "this shape does not reach the decoder"
    decoded, decoded_lse = A @ v, A.lse
    monkeypatch.setattr(call, "FEW_ROWS", 0)
    B = kizuki.attend(q, k, backend="cpu", **made)
    assert torch.equal(decoded, B @ v)
    assert torch.equal(decoded_lse, B.lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_value_that_is_not_seen_changes_nothing(dtype: torch.dtype) -> None:
    q, k, v = operands((1, 4, 2, 2, 300, 32, 32), dtype)
    seen = torch.ones(2, 300, dtype=torch.bool)
    seen[:, 150] = False
    want = kizuki.attention(q, k, v, mask=seen)
    for bad in (float("nan"), float("inf")):
        spoilt = v.clone()
        spoilt[:, :, 150] = bad
        assert torch.equal(kizuki.attention(q, k, spoilt, mask=seen), want)
        half = torch.ones(2, 300, dtype=torch.bool)
        half[0, 150] = False
        mixed = kizuki.attention(q, k, spoilt, mask=half)
        assert mixed[:, :, 0].isfinite().all()
        assert not mixed[:, :, 1].isfinite().any()


def test_the_last_row_of_many_is_the_row_alone() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 8, 200, 64)
    k, v = torch.randn(2, 1, 2, 2500, 64).unbind(0)
    rows = kizuki.attention(q, k, v, mask=masks.causal("lower_right"))
    assert torch.equal(rows[:, :, -1:], kizuki.attention(q[:, :, -1:], k, v))


def test_any_number_of_threads_gives_the_same_bits() -> None:
    q, k, v = operands((2, 8, 2, 1, 9000, 64, 64), torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = kizuki.attention(q, k, v)
        torch.set_num_threads(5)
        assert torch.equal(kizuki.attention(q, k, v), alone)
    finally:
        torch.set_num_threads(threads)


def test_the_decoder_keeps_the_contract() -> None:
    q, k, v = operands((1, 8, 2, 1, 4000, 128, 128), torch.bfloat16)
    report = kizuki.check(q, k, v, sinks=torch.randn(8).bfloat16(), softcap=20.0)
    assert report.ok, str(report)
