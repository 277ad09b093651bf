"""Contract 11: nothing but `.dense()` holds an array that grows as queries × keys.

At 1 × 1 head × 32,768 tokens A would be 4.3 GB. Each reading runs in a process of its own whose peak resident
memory is measured. A window of 512 keeps the time small; an array of all pairs would be as large with it.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from oracle import BACKENDS, randn
from tolerance import assert_agrees

import kizuki
from kizuki import portable

TOKENS = 32_768
ALLOWED_MB = 96

PROGRAM = """
import json, resource, sys, torch
import kizuki
torch.set_num_threads(2)
names, backend, tokens = sys.argv[1].split(","), sys.argv[2], int(sys.argv[3])

def peak():
    # Where Linux lets the high-water mark be reset, compiling kernels cannot hide what is measured afterwards.
    try:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def reset():
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass

def use(name, n):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8, generator=generator) for _ in range(3))
    A = kizuki.attend(q, k, window=(512, 0), backend=backend)
    if name == "forward":
        A @ v
    elif name == "where":
        rule = kizuki.masks.where(lambda b, h, i, j: i != j + 5)
        kizuki.attend(q, k, mask=rule, window=(512, 0), backend=backend) @ v
    elif name == "backward":
        q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        bias = torch.zeros(n, requires_grad=True)
        kizuki.attention(q, k, v, window=(512, 0), bias=bias, backend=backend).sum().backward()
    elif name == "readings":
        A.lse, A.observe(kizuki.Observe(topk=8, entropy=True, received="mean", max=True, distance=True, pool=(64, 64)))
    elif name == "rows":
        A[0, 0, -5:], A[0, 0, ::4096, 7], A[0, 0, torch.tensor([3, n - 1]), torch.tensor([1, 2])], A[..., -1, :]
    elif name == "transposed":
        A.T @ v
    elif name == "dense":
        A.dense(limit=1 << 40)

for name in names:
    use(name, 600)  # imports, thread pools, compiled kernels: paid before measuring
reset()
before, found = peak(), {}
for name in names:
    use(name, tokens)
    found[name] = peak() - before
print(json.dumps(found))
"""


def extra_mb(names: list[str], backend: str, tokens: int = TOKENS) -> dict[str, float]:
    """Peak resident memory beyond a small warm-up after each step, in MB. Peaks only rise: none can be missed."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(names), backend, str(tokens)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[str, float] = json.loads(ran.stdout)
    return found


@pytest.mark.posix
@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_does_not_grow_as_queries_times_keys(backend: str) -> None:
    found = extra_mb(["forward", "readings", "rows", "transposed", "where", "backward"], backend)
    assert max(found.values()) < ALLOWED_MB, found


@pytest.mark.posix
def test_the_measure_sees_a_dense_matrix() -> None:
    """The test of the test: 8,192 tokens built densely are 268 MB."""
    assert extra_mb(["dense"], "portable", 8192)["dense"] > 200


def test_many_planes_and_one_long_row_are_cut_sensibly() -> None:
    """Tiles stay near TILE scores and their operands small, whatever the shape."""
    for query, key in (
        ((64, 12, 128, 32), (64, 12, 128, 32)),
        ((1, 1, 1, 64), (1, 1, 1_000_000, 64)),
        ((1, 32, 1, 128), (1, 8, 100_000, 128)),
        ((1, 1, 1_000_000, 64), (1, 1, 1, 64)),
        ((5000, 8, 3, 4), (5000, 8, 3, 4)),
        ((1, 1, 4000, 512), (1, 1, 4000, 512)),
    ):
        problem = kizuki.attend(
            torch.empty(1).expand(query), torch.empty(1).expand(key), backend="portable"
        ).problem
        block_q, block_k = portable._blocks(problem)
        planes = problem.batch * problem.heads
        assert planes * block_q * block_k <= max(portable.TILE, planes)
        assert problem.batch * problem.kv_heads * block_k * problem.head_dim <= max(
            8 * portable.TILE, 16 * planes * problem.head_dim
        )
        count = -(-problem.queries // block_q) * -(-problem.keys // block_k)
        assert count <= 4 + 16 * planes * problem.queries * problem.keys / portable.TILE, (
            "far more tiles than scores"
        )
    q, k = randn(1, 1, 1, 8), randn(1, 1, 1_000_000, 8)
    assert_agrees(q, k, k, backend="portable")
