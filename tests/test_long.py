"""Lengths beyond what int32 counts, beyond what A could be built for, and beyond one call: still the right numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from oracle import BACKENDS, brute, plains, randn
from tolerance import assert_accurate

import kizuki
from kizuki import masks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ["query", "key", "mask", "bias"])
def test_strides_that_reach_past_two_to_the_31(which: str, backend: str) -> None:
    """Views whose offsets are above 2^31 elements and 2^33 bytes, of memory that is one small tensor.

    Rows lie 2^27 numbers apart in memory that is never touched (the system gives no page for it): of 24 rows the last
    begins 3·10^9 numbers, 12 GB, behind the first. The mask's rows are as far apart in bytes.
    """
    rows, apart, dim = 24, 1 << 27, 8
    item = torch.bool if which == "mask" else torch.float32
    width = rows if which in ("mask", "bias") else dim
    room = torch.empty(0, dtype=item)
    try:
        room = torch.empty((rows - 1) * apart + width, dtype=item)
    except RuntimeError:
        pytest.skip("this system does not hand out 12 GB of addresses")
    far = room.as_strided((rows, width), (apart, 1))
    q, k, v = (randn(rows, dim, seed=s) for s in range(3))
    given = {
        "query": q,
        "key": k,
        "mask": randn(rows, rows, seed=3) > -0.5,
        "bias": randn(rows, rows, seed=4),
    }[which]
    far.copy_(given)
    options = {which: far} if which in ("mask", "bias") else {}
    near = {which: given} if which in ("mask", "bias") else {}
    q2, k2 = far if which == "query" else q, far if which == "key" else k
    got = kizuki.attention(q2, k2, v, backend=backend, **options)
    assert torch.equal(got, kizuki.attention(q, k, v, backend=backend, **near))
    matrix = kizuki.attend(q2, k2, backend=backend, **options)
    assert torch.equal(matrix.dense(), kizuki.attend(q, k, backend=backend, **near).dense())
    if which in ("query", "key"):
        leaf = far.detach().requires_grad_()
        a, b = (leaf, k) if which == "query" else (q, leaf)
        (grad,) = torch.autograd.grad(kizuki.attention(a, b, v, backend=backend).sum(), leaf)
        leaf = given.clone().requires_grad_()
        a, b = (leaf, k) if which == "query" else (q, leaf)
        (want,) = torch.autograd.grad(kizuki.attention(a, b, v, backend=backend).sum(), leaf)
        assert torch.equal(grad, want)


def test_a_batch_whose_elements_are_more_than_int32_counts() -> None:
    """2.2·10^9 numbers of key, expanded: readings of places at both ends are those of one alone."""
    q, k = randn(1, 1, 2, 8), randn(1, 1, 65, 8, seed=1)
    batch = 1 << 22
    matrix = kizuki.attend(q.expand(batch, 1, 2, 8), k.expand(batch, 1, 65, 8), causal=False)
    assert matrix.shape.numel() > 2**29
    one = kizuki.attend(q, k)
    for b in (0, batch // 2, batch - 1):
        assert torch.equal(matrix[b, 0, 1], one[0, 0, 1])
    last = matrix[-1]
    assert torch.equal(last[0], one[0, 0])


@pytest.mark.parametrize("tokens", [65_537, 131_073])
def test_sampled_rows_of_long_texts(tokens: int) -> None:
    """A window keeps the pass short; rows at the ends, at powers of two, and in between, against float64."""
    q, k, v = (randn(1, 1, tokens, 4, seed=s) for s in range(3))
    left = 100
    output, seen = kizuki.attention(
        q, k, v, causal=True, window=(left, 0), backend="cpu", observe=kizuki.Observe(topk=2, received=True)
    )
    matrix = kizuki.attend(q, k, causal=True, window=(left, 0), backend="cpu")
    for i in (0, 1, left, 32_767, 32_768, 65_535, 65_536, tokens - 1):
        first = max(0, i - left)
        part = (q[:, :, i : i + 1], k[:, :, first : i + 1], v[:, :, first : i + 1])
        truth, (weights, _, plain) = brute(*part), plains(*part)
        assert_accurate(output[:, :, i : i + 1], truth.output, plain, f"row {i}")
        row = matrix[0, 0, i, first : i + 1]
        assert_accurate(row, truth.weights.flatten(), [w.flatten() for w in weights], f"A[{i}]")
        assert int(seen.topk[1][0, 0, i, 0]) == first + int(truth.weights.flatten().argmax())
    total = seen.received.sum().double()
    assert abs(total / tokens - 1) < 1e-5, "every row's weights add up to 1"


def test_full_rows_of_131073_keys() -> None:
    """Rows that see everything: 16 queries on 131,073 keys, forward and the gradient of the values."""
    q, k, v = randn(1, 1, 16, 8), randn(1, 1, 131_073, 8, seed=1), randn(1, 1, 131_073, 8, seed=2)
    truth, (weights, lse, plain) = brute(q, k, v), plains(q, k, v)
    matrix = kizuki.attend(q, k, backend="cpu")
    assert_accurate(matrix @ v, truth.output, plain, "output")
    assert_accurate(matrix.lse, truth.lse, lse, "lse")
    y = randn(1, 1, 16, 2, seed=3)
    wide = truth.weights.transpose(-1, -2) @ y.double()
    assert_accurate(matrix.T @ y, wide, [w.transpose(-1, -2) @ y for w in weights], "transposed")


@pytest.mark.parametrize("heads", [1, 4])
def test_a_million_keys_in_decoding(heads: int) -> None:
    q, k, v = randn(1, heads, 1, 8), randn(1, 1, 1_000_000, 8, seed=1), randn(1, 1, 1_000_000, 8, seed=2)
    truth, (_, lse, plain) = brute(q, k, v), plains(q, k, v)
    matrix = kizuki.attend(q, k, mask=masks.causal("lower_right"), backend="cpu")
    assert_accurate(matrix @ v, truth.output, plain, "output")
    assert_accurate(matrix.lse, truth.lse, lse, "lse")
    want = truth.weights[0, :, 0].topk(3)
    assert torch.equal(matrix.topk(3)[1][0, :, 0], want.indices)


FLAT = """
import resource, torch, kizuki
torch.set_num_threads(1)
q, k, v = torch.randn(3, 1, 2, 33, 8).unbind(0)
seen = torch.rand(33, 33) < 0.8
page = resource.getpagesize()

def calls(count):
    for at in range(count):
        n = 1 + at % 33
        kizuki.attention(q, k, v, causal=True)
        kizuki.attention(q[:, :, :n], k, v, mask=seen[:n])
        A = kizuki.attend(q, k[:, :, :n])
        A.topk(min(2, n)), A[0, 1, 3], A.T @ v
        leaf = q.clone().requires_grad_()
        kizuki.attention(leaf, k, v, softcap=2.0).sum().backward()

def used():
    return int(open("/proc/self/statm").read().split()[1]) * page

calls(300)
before = used()
calls(2000)  # five calls each
print(used() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_stays_flat_over_ten_thousand_calls() -> None:
    done = subprocess.run([sys.executable, "-c", FLAT], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 4 << 20, "400 bytes a call would be 4 MB"
