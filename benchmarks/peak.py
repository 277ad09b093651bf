"""This machine's ceilings, measured: multiply-adds a second on all threads, and bytes read a second.

    python benchmarks/peak.py

The first comes from chains of vector multiply-adds that live in registers, the second from summing an
array far larger than the caches. Every share of peak in the benchmarks is a share of these, from the same run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kizuki.cpu import launch
from kizuki.cpu.simd import I64, Emit

CHAINS = 12  # independent sums, enough to hide the latency of a multiply-add on two pipes


def _chains(lanes: int) -> Any:
    @intrinsic
    def chains(typingctx: Any, count: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, lanes)
            # The factors come from memory, so that nothing is folded while compiling.
            x, y = e.broadcast(e.pointer(args[1]), 0), e.broadcast(e.pointer(args[1]), 1)
            start = [e.fma(x, e.const(float(n)), y) for n in range(CHAINS)]
            sums = e.loop(args[0], 1, start, lambda _, acc: [e.fma(a, x, y) for a in acc])
            total = sums[0]
            for other in sums[1:]:
                total = builder.fadd(total, other)
            e.store(total, e.pointer(builder.add(args[1], ir.Constant(I64, 64))))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return chains


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


def fma_gflops(threads: int | None = None) -> float:
    """The best of five: float32 operations a second in GFLOP/s, a multiply-add counted as two."""
    threads = threads or torch.get_num_threads()
    lanes = launch.target().lanes
    chains = _chains(lanes)
    count = 8_000_000

    @numba.njit(nogil=True)
    def spin(place: int) -> None:
        chains(count, place)

    rooms = [np.full(48, 0.5, np.float32) for _ in range(threads)]
    spin(rooms[0].ctypes.data)
    best = min(_together(lambda n: spin(rooms[n].ctypes.data), threads) for _ in range(5))
    return threads * count * CHAINS * lanes * 2 / best / 1e9


def read_gbs(threads: int | None = None) -> float:
    """The best of five: GB read from memory a second."""
    threads = threads or torch.get_num_threads()
    size = 1 << 26  # 256 MB of float32 a thread

    @numba.njit(nogil=True, fastmath=True)
    def total(x: Any) -> float:
        s = np.float32(0)
        for i in range(x.size):
            s += x[i]
        return s

    parts = [np.ones(size, np.float32) for _ in range(threads)]
    total(parts[0][:1000])
    best = min(_together(lambda n: total(parts[n]), threads) for _ in range(5))
    return threads * size * 4 / best / 1e9


if __name__ == "__main__":
    print(f"{launch.target().name}, {torch.get_num_threads()} threads")
    print(f"float32 multiply-adds  {fma_gflops():7.1f} GFLOP/s")
    print(f"memory read            {read_gbs():7.1f} GB/s")
