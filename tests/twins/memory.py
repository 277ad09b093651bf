"""Memory at an address as NumPy arrays: what an emitted body's pointers are to its twin.

Each access is told to `guard` first, if there is one, with its address and its bytes: the interpreted kernels look
there whether it lies in somebody's memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kizuki.cpu.sizes import BFLOAT16, PLAIN
from kizuki.cpu.target import Target

from . import rounding

Array = NDArray[Any]

guard: Callable[[int, int], None] | None = None


@cache
def _bytes(size: int) -> Any:
    return ctypes.c_char * size


def real(t: Target) -> type[np.floating[Any]]:
    """The floating type that a target computes in."""
    return np.float32 if t.size == 4 else np.float64


def look(address: int, size: int) -> None:
    """Tell of an access."""
    if guard is not None:
        guard(address, size)


def numbers(address: int, dtype: DTypeLike, count: int) -> Array:
    """`count` numbers, one after the other; writing to them writes to memory."""
    kind, address, count = np.dtype(dtype), int(address), int(count)
    look(address, count * kind.itemsize)
    return np.frombuffer(_bytes(count * kind.itemsize).from_address(address), kind)


def grid(address: int, dtype: DTypeLike, rows: int, step: int, columns: int) -> Array:
    """`[rows, columns]`, the rows `step` bytes apart."""
    kind, address, step = np.dtype(dtype), int(address), int(step)
    for row in range(rows):
        look(address + row * step, columns * kind.itemsize)
    whole = (rows - 1) * step + columns * kind.itemsize
    return np.ndarray((rows, columns), kind, _bytes(whole).from_address(address), 0, (step, kind.itemsize))


def widened(address: int, t: Target, kind: int, count: int) -> Array:
    """`count` numbers in the target's type, of memory that may be 16-bit; a copy."""
    if kind == PLAIN:
        return numbers(address, real(t), count).copy()
    if kind == BFLOAT16:
        return rounding.from_bfloat16(numbers(address, np.uint16, count))
    return numbers(address, np.float16, count).astype(np.float32)


def put(values: Array, address: int, kind: int) -> None:
    """Write numbers to memory that may be 16-bit, rounded to nearest, ties to even."""
    if kind == PLAIN:
        numbers(address, values.dtype, values.size)[:] = values
    elif kind == BFLOAT16:
        numbers(address, np.uint16, values.size)[:] = rounding.to_bfloat16(values)
    else:
        numbers(address, np.float16, values.size)[:] = values.astype(np.float16)
