"""Contract 9 and 10: the same bits on one thread and on two, alone and in a batch, observed and not, and elsewhere."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import randn
from torch import Tensor

import kizuki
from kizuki import masks

EVERYTHING = kizuki.Observe(
    topk=3,
    entropy=True,
    received=True,
    max_score=True,
    distance=True,
    groups=torch.arange(150) % 3,
    pool=(1, 4),
)
# name: dtype, queries, keys, options. 150 keys and 130 queries are more than one block of the kernels.
CASES: dict[str, tuple[torch.dtype, int, int, dict[str, Any]]] = {
    "float32": (torch.float32, 130, 150, {}),
    "float64": (torch.float64, 130, 150, {"softcap": 3.0}),
    "bfloat16": (torch.bfloat16, 130, 150, {}),
    "causal": (torch.float32, 150, 150, {"causal": True}),
    "window and keys": (
        torch.float32,
        150,
        150,
        {"window": (40, 3), "mask": masks.keys(torch.arange(150) % 7 > 0)},
    ),
    "bias and sinks": (
        torch.float32,
        130,
        150,
        {"bias": randn(4, 1, 150, seed=7), "sinks": randn(4, seed=8)},
    ),
    "one query": (torch.float32, 1, 150, {}),
}


def operands(name: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    dtype, queries, keys, options = CASES[name]
    shapes = ((3, 4, queries, 16), (3, 2, keys, 16), (3, 2, keys, 16))
    return *(randn(*shape, seed=s, dtype=dtype) for s, shape in enumerate(shapes)), dict(options)  # type: ignore[return-value]


def everything(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs, readings and gradients, each a tensor whose first axis is the batch."""
    A = kizuki.attend(q, k, backend="cpu", **options)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    output = kizuki.attention(*leaves, backend="cpu", **options)
    up = torch.linspace(-1, 1, output[0].numel(), dtype=torch.float64).view(output[0].shape).to(output.dtype)
    gradients = torch.autograd.grad(output, leaves, up.expand(output.shape))
    found = {"output": output.detach(), "lse": A.lse, "entropy": A.entropy(), "received": A.received()}
    found |= {"weights of topk": A.topk(3)[0], "keys of topk": A.topk(3)[1], "row": A[:, 1, q.shape[-2] // 2]}
    found |= {"transposed": A.T @ output.detach(), "dense": A.dense(), "pool": A.pool(min(3, q.shape[-2]), 5)}
    return found | dict(zip(("query", "key", "value"), gradients, strict=True))


def assert_same(
    found: dict[str, Tensor], want: dict[str, Tensor], at: Callable[[Tensor], Tensor] = lambda t: t
) -> None:
    different = [name for name, t in found.items() if not torch.equal(t, at(want[name]))]
    assert not different


@pytest.mark.parametrize("name", CASES)
def test_threads_and_batches(name: str) -> None:
    """Every output, reading and gradient: on one thread, on two, a second time, and each batch entry alone."""
    q, k, v, options = operands(name)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = everything(q, k, v, options)
        assert_same(everything(q, k, v, options), two)
        torch.set_num_threads(1)
        assert_same(everything(q, k, v, options), two)
    finally:
        torch.set_num_threads(before)
    for b in range(3):
        alone = everything(*(t[b : b + 1] for t in (q, k, v)), options)
        assert_same(alone, two, lambda t, b=b: t[b : b + 1])  # type: ignore[misc]


@pytest.mark.parametrize("name", CASES)
def test_asking_to_see_changes_no_bit(name: str) -> None:
    """Observed in passing, read before, read after, with and without a gradient."""
    q, k, v, options = operands(name)
    want = kizuki.attention(q, k, v, backend="cpu", **options)
    seen, readings = kizuki.attention(q, k, v, backend="cpu", observe=EVERYTHING, **options)
    assert torch.equal(seen, want)
    A = kizuki.attend(q, k, backend="cpu", **options)
    again = A.observe(EVERYTHING)
    assert torch.equal(A @ v, want)
    for name in ("topk", "entropy", "received", "max_score", "distance", "pool"):
        one, other = getattr(readings, name), getattr(again, name)
        pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
        assert all(torch.equal(a, b) for a, b in pairs), name
    grown = [t.clone().requires_grad_() for t in (q, k, v)]
    assert torch.equal(kizuki.attention(*grown, backend="cpu", **options), want)


def digest() -> str:
    """A hash of everything that all cases give."""
    made = hashlib.sha256()
    for name in CASES:
        for t in everything(*operands(name)).values():
            made.update(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def test_other_processes() -> None:
    """A process that has just begun gives the bits of one that has computed a great deal."""
    folder = str(Path(__file__).parent)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_same_bits; print(test_same_bits.digest())"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == digest()
