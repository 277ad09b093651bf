"""Twins of single numbers in memory: loads, stores, tickets, the multiply-add of one number, a call."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kizuki.cpu.sizes import BFLOAT16

from . import memory, rounding
from .registry import Twin, twin

PLACES: dict[str, Any] = {
    "int64": ctypes.c_int64,
    "float64": ctypes.c_double,
    "float32": ctypes.c_float,
    "int32": ctypes.c_int32,
    "uint16": ctypes.c_uint16,
    "uint8": ctypes.c_uint8,
}
FLOATS: dict[str, Any] = {"float32": np.float32, "float64": np.float64}


@twin("scalar._scalar_load.load")
def load(numba_type: Any) -> Twin:
    name = str(numba_type)
    place = PLACES[name]
    size, made = ctypes.sizeof(place), FLOATS.get(name, int)

    def load(address: int) -> Any:
        memory.look(address, size)
        return made(place.from_address(address).value)

    return load


@twin("scalar._scalar_store.store")
def store(numba_type: Any) -> Twin:
    name = str(numba_type)
    place = PLACES[name]
    size, given = ctypes.sizeof(place), float if name in FLOATS else int

    def store(address: int, value: Any) -> None:
        memory.look(address, size)
        place.from_address(address).value = given(value)

    return store


@twin("scalar.load_narrow")
def load_narrow() -> Twin:
    def load_narrow(address: int, kind: int) -> Any:
        if kind == BFLOAT16:
            return rounding.from_bfloat16(memory.numbers(address, np.uint16, 1))[0]
        return np.float32(memory.numbers(address, np.float16, 1)[0])

    return load_narrow


@twin("scalar.store_narrow")
def store_narrow() -> Twin:
    def store_narrow(address: int, value: Any, kind: int) -> None:
        with np.errstate(over="ignore"):
            memory.put(np.array([value], np.float32), address, kind)

    return store_narrow


def _next(address: int) -> int:
    place = memory.numbers(address, np.int64, 1)
    place += 1
    return int(place[0]) - 1


@twin("scalar.take_ticket")
def take_ticket() -> Twin:
    def take_ticket(address: int) -> int:
        return _next(address)

    return take_ticket


@twin("scalar.take_last")
def take_last() -> Twin:
    def take_last(address: int) -> int:
        return _next(address)

    return take_last


@twin("scalar.prefetch")
def prefetch() -> Twin:
    def prefetch(address: int) -> None:
        """Any address is allowed, and nothing is read."""

    return prefetch


@twin("scalar.fma_one")
def fma_one() -> Twin:
    def fma_one(x: Any, y: Any, z: Any) -> Any:
        return rounding.fma(x, y, z)[0]

    return fma_one


@twin("scalar.call_row")
def call_row() -> Twin:
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)

    def call_row(
        function: int, row: int, plane: int, query: int, key: int, first: int, stop: int, slope: int
    ) -> None:
        kind(function)(row, plane, query, key, first, stop, slope)

    return call_row
