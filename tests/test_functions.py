"""Are `score=fn` and `masks.where(fn)` exact, differentiable and honest, compiled and not?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import NAN
from torch import Tensor

import kizuki
from kizuki import masks

BACKENDS = ("cpu", "portable")


def bent(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Works on numbers and on tensors."""
    return s * (1 + h * 0.1) - 0.05 * abs(i - j) + 0.01 * b


def branched(s: float, b: int, h: int, i: int, j: int) -> float:
    """Only compiles: a tensor has no truth value."""
    if j > i:
        return -float("inf")
    return s + 0.1 * j


def operands(dtype: torch.dtype = torch.float32, length: int = 150) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, length, 16), (2, 2, length, 16), (2, 2, length, 16))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def plain(fn: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax of fn over every entry, one by one, in float64."""
    q, k, v = q.double(), k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in scores.shape)).tolist():
        scores[b, h, i, j] = fn(float(scores[b, h, i, j]), b, h, i, j)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fn", [bent, branched])
def test_a_score_function_is_applied_to_every_score(fn: Callable[..., Any], backend: str) -> None:
    q, k, v = operands(length=40)
    got = kizuki.attention(q, k, v, score=fn, backend=backend)
    assert (got - plain(fn, q, k, v)).abs().max() < 5e-6
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        cast = [t.to(dtype) for t in operands(dtype)]
        report = kizuki.check(*cast, score=fn, softcap=3.0, sinks=torch.ones(4, dtype=dtype), backend=backend)
        assert report.ok, str(report)


@pytest.mark.parametrize("fn", [bent, lambda s, b, h, i, j: s * s * 0.1 + s])
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_through_a_score_function(fn: Callable[..., Any], backend: str) -> None:
    leaves = [t[:, :, :10].double().requires_grad_() for t in operands()]
    assert torch.autograd.gradcheck(
        lambda q, k, v: kizuki.attention(q, k, v, score=fn, softcap=2.0, backend=backend), leaves
    )


def test_both_backends_train_alike() -> None:
    made = []
    for backend in BACKENDS:
        leaves = [t.requires_grad_() for t in operands()]
        output = kizuki.attention(*leaves, score=branched, backend=backend)
        made.append(torch.autograd.grad(output.square().sum(), leaves))
    for one, other in zip(*made, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_the_decoder_and_the_forward_kernel_agree_to_the_bit() -> None:
    q, k, v = operands()
    whole = kizuki.attention(q, k, v, score=bent, mask=masks.where(lambda b, h, i, j: j % 3 != 1))
    alone = kizuki.attention(q[:, :, :1], k, v, score=bent, mask=masks.where(lambda b, h, i, j: j % 3 != 1))
    assert torch.equal(whole[:, :, :1], alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_mask_hides_what_it_says(backend: str) -> None:
    q, k, v = operands()
    rule = masks.where(lambda b, h, i, j: (i + j * h) % 3 != 0) & masks.causal()
    i, j = torch.arange(150)[:, None], torch.arange(150)
    seen = torch.stack([((i + j * h) % 3 != 0) & (j <= i) for h in range(4)])
    want = kizuki.attention(q, k, v, mask=seen, backend=backend)
    k[:, :, 149], v[:, :, 149] = NAN, NAN
    got = kizuki.attention(q, k, v, mask=rule, backend=backend)
    assert torch.equal(got[:, :, :149], want[:, :, :149])


def test_a_function_that_only_torch_can_run_is_run_by_torch() -> None:
    q, k, v = operands(length=20)

    def odd(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.special.expit(s) + 0 * i.sort().values

    A = kizuki.attend(q, k, score=odd)
    assert A.plan().backend == "portable"
    assert (A @ v).isfinite().all()
    with pytest.raises(ValueError, match="score"):
        kizuki.attend(q, k, score=odd, backend="cpu")


def test_a_captured_table_is_read_when_the_kernel_runs() -> None:
    q, k, v = operands()
    table = torch.randn(4, 299, generator=torch.Generator().manual_seed(1))

    def relative(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h, i - j + 149]

    place = torch.arange(150)[:, None] - torch.arange(150) + 149
    for _ in range(2):
        got = kizuki.attention(q, k, v, score=relative)
        want = kizuki.attention(q, k, v, bias=table[:, place])
        assert torch.allclose(got, want, atol=1e-6)
        table.mul_(-2)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda s: s, ["score", "1 argument"]),
        ("not a function", ["score", "str"]),
    ],
)
def test_a_wrong_function_is_said_in_one_line(fn: Any, words: list[str]) -> None:
    q, k, v = operands(length=8)
    with pytest.raises((ValueError, TypeError)) as caught:
        kizuki.attention(q, k, v, score=fn)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_captured_tensor_that_wants_a_gradient_is_refused() -> None:
    q, k, v = operands(length=8)
    weight = torch.ones(4, requires_grad=True)
    with pytest.raises((ValueError, TypeError), match="bias"):
        kizuki.attention(q, k, v, score=lambda s, b, h, i, j: s * weight[h])
