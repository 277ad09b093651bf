"""This machine's ceilings, measured: multiply-adds a second on all threads, and bytes read a second.

The first comes from chains of vector multiply-adds that live in registers, the second from summing arrays far
larger than the caches. Every share of a peak is a share of these, from the same run.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..cpu.kernels.simd import BFloat
from ..cpu.target import emits, features

CHAINS = 12  # independent sums, enough to hide the latency of a multiply-add on two pipes
ROUNDS = 8
SPIN = 1.0  # seconds of rounds of chains
COUNT = 4_000_000
READ = 1 << 26  # float32 a thread: 256 MB
F32, I64 = ir.FloatType(), ir.IntType(64)


@dataclass(frozen=True)
class Peak:
    """The best of some methods, and which one it was."""

    value: float  # GFLOP/s or GB/s
    method: str


def lanes() -> int:
    """float32 lanes of this processor's vectors."""
    found = features()
    return 16 if "avx512f" in found else 8 if "avx" in found else 4


def emit(builder: ir.IRBuilder, kind: str, width: int, count: ir.Value, address: ir.Value) -> int:
    """Write `count` rounds of multiply-adds in chains; returns the operations of one round.

    `kind` is "f32", "f64" or "bf16" (pairs of products added to a float32 sum). `width` is in float32 lanes. The
    factors come from memory at `address`, so that nothing is folded while compiling; the sums are stored behind.
    """
    element = ir.DoubleType() if kind == "f64" else F32
    vector = ir.VectorType(element, width // 2 if kind == "f64" else width)

    def pointer(at: int, to: ir.Type) -> ir.Value:
        return builder.inttoptr(builder.add(address, ir.Constant(I64, at)), to.as_pointer())

    def load(at: int, what: ir.Type) -> ir.Value:
        value = builder.load(pointer(at, what))
        value.align = 4
        return value

    if kind == "bf16":
        factor: ir.Type = ir.VectorType(BFloat(), width * 2)
        name, order = f"llvm.x86.avx512bf16.dpbf16ps.{32 * width}", (2, 0, 1)
    else:
        factor = vector
        name, order = f"llvm.fma.v{vector.count}f{64 if kind == 'f64' else 32}", (0, 1, 2)
    signature = (factor, factor, vector)
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(vector, [signature[i] for i in order]), name
    )
    x, y = load(0, factor), load(64, factor)

    def step(total: ir.Value) -> ir.Value:
        # A float chain multiplies its own sum, which LLVM cannot turn into anything shorter.
        operands = (x, y, total) if kind == "bf16" else (total, x, y)
        return builder.call(function, [operands[i] for i in order])

    start = [load(128 + 8 * n, vector) for n in range(CHAINS)]
    before, body, after = (builder.append_basic_block(part) for part in ("before", "body", "after"))
    builder.branch(before)
    builder.position_at_end(before)
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), before)
    sums = [builder.phi(vector) for _ in range(CHAINS)]
    for phi, value in zip(sums, start, strict=True):
        phi.add_incoming(value, before)
    new = [step(total) for total in sums]
    following = builder.add(index, ir.Constant(I64, 1))
    index.add_incoming(following, body)
    for phi, value in zip(sums, new, strict=True):
        phi.add_incoming(value, body)
    builder.cbranch(builder.icmp_signed("<", following, count), body, after)
    builder.position_at_end(after)
    for n, value in enumerate(new):
        builder.store(value, pointer(256 + 64 * n, vector)).align = 4
    return CHAINS * int(vector.count) * (4 if kind == "bf16" else 2)


def _together(run: Callable[[int], None], threads: int) -> float:
    """Wall time of `run(thread)` on every thread at once."""
    gate = threading.Barrier(threads + 1)

    def enter(thread: int) -> None:
        gate.wait()
        run(thread)

    workers = [threading.Thread(target=enter, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    gate.wait()
    begun = time.perf_counter()
    for worker in workers:
        worker.join()
    return time.perf_counter() - begun


def chains(kind: str, threads: int) -> float:
    """GFLOP/s of multiply-adds in registers, the best round of a second; a multiply-add counts as two."""
    operations = 0

    @intrinsic
    def spin(typingctx: Any, count: Any, place: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            nonlocal operations
            operations = emit(builder, kind, lanes(), args[0], args[1])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    @numba.njit(nogil=True)
    def run(count: int, place: int) -> None:
        spin(count, place)

    # 0.5 as a factor and a summand keeps every sum at 1; as bfloat16 pairs these bits are 0 and 0.5.
    rooms = [np.full(1024, 0.5, np.float64 if kind == "f64" else np.float32) for _ in range(threads)]
    run(1, rooms[0].ctypes.data)
    best, until = math.inf, time.perf_counter() + SPIN
    while time.perf_counter() < until:  # long enough that a neighbour on the machine does not lower the peak
        best = min(best, _together(lambda n: run(COUNT, rooms[n].ctypes.data), threads))
    return threads * COUNT * operations / best / 1e9


def products(dtype: torch.dtype) -> float:
    """GFLOP/s of torch's product of two large matrices: what matrix units give that no vector chain shows."""
    n = 2048
    x, y = torch.randn(2, n, n).to(dtype).unbind(0)
    x @ y
    return 2 * n**3 / min(_timed(lambda: x @ y) for _ in range(ROUNDS)) / 1e9


def multiply_adds(kind: str, threads: int) -> Peak:
    """The peak of "f32", "f64" or "bf16" operations in GFLOP/s; the best method is the peak.

    Without bfloat16 instructions its ceiling is float32's: products are widened.
    """
    if kind != "bf16":
        return Peak(chains(kind, threads), f"{kind} multiply-adds in registers")
    found = [Peak(chains("f32", threads), "f32 multiply-adds in registers (widened)")]
    if "avx512bf16" in features() and emits("avx512bf16"):
        found.append(Peak(chains("bf16", threads), "bf16 dot products in registers"))
    if any(name in features() for name in ("avx512bf16", "amx-bf16", "bf16")):
        found.append(Peak(products(torch.bfloat16), "bf16 matrix product of torch"))
    return max(found, key=lambda peak: peak.value)


def read(threads: int) -> Peak:
    """GB read from memory a second, the best of several ways to read and eight rounds of each."""

    @numba.njit(nogil=True, fastmath=True)
    def total(x: Any) -> Any:
        s = np.float32(0)
        for i in range(x.size):
            s += x[i]
        return s

    whole = torch.ones(threads * READ)
    parts = [part.numpy() for part in whole.chunk(threads)]
    matrix, vector = whole.view(-1, 4096), torch.ones(4096)
    total(parts[0][:1000])
    ways = {
        "sum on each thread": lambda: _together(lambda n: total(parts[n]), threads),
        "torch sum": lambda: _timed(whole.sum),
        "torch matrix by vector": lambda: _timed(lambda: matrix @ vector),
    }
    size = whole.numel() * 4 / 1e9
    found = [Peak(size / min(way() for _ in range(ROUNDS)), name) for name, way in ways.items()]
    return max(found, key=lambda peak: peak.value)


def _timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


class Peaks:
    """The peaks a run needs, each measured once, when it is first asked for."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.found: dict[str, Peak] = {}

    def of(self, kind: str) -> Peak:
        """ "f32", "f64", "bf16", or "read"."""
        if kind not in self.found:
            self.found[kind] = read(self.threads) if kind == "read" else multiply_adds(kind, self.threads)
        return self.found[kind]
