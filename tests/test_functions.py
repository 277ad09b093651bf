"""Are `score=fn` and `masks.where(fn)` exact, differentiable and honest, compiled and not?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import NAN, brute, causal, plains
from tolerance import assert_accurate
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


def plain(
    fn: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """softmax of fn over every entry, one by one."""
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(2, 1), v.to(dtype).repeat_interleave(2, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in scores.shape)).tolist():
        scores[b, h, i, j] = fn(float(scores[b, h, i, j]), b, h, i, j)
    return scores.softmax(-1) @ v


def close(got: Tensor, fn: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> None:
    """`got` is as near to float64 as the plain formula in its own dtype is."""
    assert_accurate(got, plain(fn, q, k, v), plain(fn, q, k, v, q.dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fn", [bent, branched])
def test_a_score_function_is_applied_to_every_score(fn: Callable[..., Any], backend: str) -> None:
    q, k, v = operands(length=40)
    close(kizuki.attention(q, k, v, score=fn, backend=backend), fn, q, k, v)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        cast = [t.to(dtype) for t in operands(dtype)]
        report = kizuki.check(*cast, score=fn, softcap=3.0, sinks=torch.ones(4, dtype=dtype), backend=backend)
        assert report.ok, str(report)


@pytest.mark.parametrize("fn", [bent, lambda s, b, h, i, j: s * s * 0.1 + s])
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_through_a_score_function(fn: Callable[..., Any], backend: str) -> None:
    leaves = [t[:1, :, :5, :6].double().requires_grad_() for t in operands()]
    assert torch.autograd.gradcheck(
        lambda q, k, v: kizuki.attention(q, k, v, score=fn, softcap=2.0, backend=backend), leaves
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_through_a_function_that_only_compiles(backend: str) -> None:
    """Against autograd of the same rule written as a bias."""
    i, j = torch.arange(150)[:, None], torch.arange(150)

    def gradients(run: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(dtype).requires_grad_() for t in operands()]
        return torch.autograd.grad(run(*leaves).square().sum(), leaves)

    def as_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + (0.1 * j).to(q.dtype)
        return scores.masked_fill(j > i, -torch.inf).softmax(-1) @ v

    got = gradients(lambda q, k, v: kizuki.attention(q, k, v, score=branched, backend=backend), torch.float32)
    truth, same = gradients(as_bias, torch.float64), gradients(as_bias, torch.float32)
    for one, exact, like in zip(got, truth, same, strict=True):
        assert_accurate(one, exact, like)


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
    q, k, v = operands(length=50)
    table = torch.randn(4, 99, generator=torch.Generator().manual_seed(1))

    def relative(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h, i - j + 49]

    for _ in range(2):
        close(kizuki.attention(q, k, v, score=relative), relative, q, k, v)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_that_is_too_short_is_an_error_of_every_read(backend: str) -> None:
    """The kernel must not read past it, and what it had computed by then is worth nothing."""
    q, k, v = operands(length=70)
    table = torch.zeros(60)
    matrix = kizuki.attend(q, k, score=lambda s, b, h, i, j: s + table[j], backend=backend)
    reads: list[Callable[[], Any]] = [
        lambda: matrix @ v,
        lambda: matrix.entropy(),
        lambda: matrix[0, 0, 3],
        lambda: matrix.dense(),
    ]
    for read in reads:
        with pytest.raises(ValueError, match="past the end"):
            read()
    table.resize_(70).zero_()
    assert torch.equal(matrix @ v, kizuki.attend(q, k, backend=backend) @ v)


@pytest.mark.parametrize("short", [(0.0,) * 60, np.zeros(60, dtype=np.float32)], ids=["tuple", "array"])
def test_whatever_a_function_reads_past_its_end_is_an_error(short: Any) -> None:
    q, k, v = operands(length=70)
    with pytest.raises(ValueError, match="past the end"):
        kizuki.attention(q, k, v, score=lambda s, b, h, i, j: s + short[j], backend="cpu")


def test_a_function_that_imports_is_run_by_torch() -> None:
    q, k, v = operands(length=20)

    def halved(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        from math import pi

        return s * pi / (2 * pi)

    A = kizuki.attend(q, k, score=halved)
    assert A.plan().backend == "portable"
    assert torch.allclose(A @ v, kizuki.attention(q, k, v, scale=q.shape[-1] ** -0.5 / 2), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_absent_what_is_low_and_what_is_nan(backend: str) -> None:
    """−inf is absence, −1e300 is a finite score, and NaN stays in its row."""
    q, k, v = operands(length=30)

    def fn(s: float, b: int, h: int, i: int, j: int) -> float:
        if i < 3 or j % 5 == 1:
            return -float("inf")
        if i == 10:
            return -1e300
        return NAN if i == 20 and j == 2 else s

    v[:, :, 11] = NAN  # behind a score of −inf
    matrix = kizuki.attend(q, k, score=fn, backend=backend)
    output = matrix @ v
    assert not output[:, :, :3].any()
    assert (matrix.lse[:, :, :3] == -float("inf")).all()
    assert output.isnan().any(-1).any(0).any(0).nonzero().flatten().tolist() == [20]
    even = (torch.arange(30) % 5 != 1) / 24
    for weights in (matrix[1, 3, 10], matrix.dense()[1, 3, 10]):
        assert torch.allclose(weights, even)
    keys = matrix.topk(30)[1]
    assert (keys[:, :, :3] == -1).all()
    assert ((keys[:, :, 4] >= 0).sum(-1) == 24).all()
    received = matrix.received("mean")[..., [1, 6]]
    assert not received.nan_to_num(1.0).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_functions_of_one_mask_and_one_that_is_not_compiled(backend: str) -> None:
    q, k, v = operands(length=50)
    i, j = torch.arange(50)[:, None], torch.arange(50)
    listed = [7, 0]
    rule = (
        masks.where(lambda b, h, i, j: j % 2 == 0)
        & masks.where(lambda b, h, i, j: j % 3 != 0 and j <= i)
        & masks.where(lambda b, h, i, j: i > listed[0])
        & masks.where(lambda b, h, i, j: ~(j == 4))
    )
    seen = (j % 2 == 0) & (j % 3 != 0) & (j <= i) & (i > 7) & (j != 4)
    matrix, want = (kizuki.attend(q, k, mask=m, backend=backend) for m in (rule, seen))
    assert torch.equal(matrix @ v, want @ v)
    assert torch.equal(matrix.received("mean"), want.received("mean"))
    assert torch.equal(matrix.dense(), want.dense())
    # Single rows of a matrix with functions are torch's: a compiled one is told its plane among all planes.
    assert torch.allclose(matrix[1, :, 3:9], want[1, :, 3:9], rtol=1e-5, atol=1e-7)
    plan = str(matrix.plan())
    assert plan.count("compiled") == 3
    assert "listed, a list" in plan


def test_two_threads_may_use_one_function_with_different_tables() -> None:
    q, k, v = operands(length=70)
    tables = [torch.full((70,), float(n)) * torch.arange(70) / 70 for n in range(3)]
    want = [kizuki.attention(q, k, v, bias=table, backend="cpu") for table in tables]
    wrong: list[float] = []

    def run(table: Tensor, expected: Tensor) -> None:
        for _ in range(20):
            got = kizuki.attention(q, k, v, score=lambda s, b, h, i, j: s + table[j], backend="cpu")
            wrong.append(float((got - expected).abs().max()))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(tables, want, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 60
    assert max(wrong) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reading_is_never_older_than_what_the_function_refers_to(backend: str) -> None:
    q, k, _ = operands(length=20)
    array, number, listed = np.ones(20, dtype=np.float32), 1.0, [1.0]
    matrices = [
        kizuki.attend(q, k, score=lambda s, b, h, i, j: s * array[j], backend=backend),
        kizuki.attend(q, k, score=lambda s, b, h, i, j: s * number, backend=backend),
        kizuki.attend(q, k, score=lambda s, b, h, i, j: s * listed[0], backend="portable"),
    ]
    before = [matrix.entropy() for matrix in matrices]
    array[:], number, listed[0] = 0, 0.0, 0.0
    for matrix, old in zip(matrices, before, strict=True):
        assert not torch.allclose(matrix.entropy(), old)
        assert torch.allclose(matrix.entropy(), torch.tensor(20.0).log(), atol=1e-5)


def test_defaults_helpers_and_torchs_elementwise_functions_compile() -> None:
    q, k, v = operands(length=20)
    table = torch.arange(20.0)

    def helper(x: Any) -> Any:
        return torch.tanh(x) * 2

    def fn(s: Any, b: Any, h: Any, i: Any, j: Any, factor: float = 0.5) -> Any:
        return torch.where(j <= i, helper(s / 2) * factor * 2 + table[i], -torch.inf)

    matrix = kizuki.attend(q, k, score=fn, backend="cpu")  # which refuses what is not compiled
    options = {"softcap": 2.0, "bias": table[:, None].expand(20, 20)}
    grouped = [t.repeat_interleave(2, 1) for t in (k, v)]
    truth = brute(q, *grouped, visible=causal(20, 20), **options).output
    assert_accurate(matrix @ v, truth, plains(q, *grouped, visible=causal(20, 20), **options)[2])
