"""Twins of what keeps the k best scores of a row (best.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kizuki.cpu.target import Target

from .memory import numbers, real
from .registry import Twin, needs, twin


@twin("best.emit.those_above")
def those_above(t: Target) -> Twin:
    def those_above(row: int, threshold: Any) -> int:
        scores = numbers(row, real(t), 4 * t.lanes)
        with np.errstate(invalid="ignore"):
            flags = scores > real(t)(threshold)
        bits = sum(1 << int(at) for at in np.nonzero(flags)[0])
        return bits - (1 << 64) if bits >> 63 else bits  # an int64

    return those_above


@twin("best.emit.lowest_bit")
def lowest_bit() -> Twin:
    def lowest_bit(bits: int) -> int:
        needs(bits != 0, "there is a bit")
        return (bits & -bits).bit_length() - 1

    return lowest_bit


@twin("best.emit.merge")
def merge(t: Target) -> Twin:
    number = np.int32 if t.size == 4 else np.int64

    def merge(best: int, keys: int, more: int, more_keys: int, chunks: int) -> None:
        needs(chunks >= 1, "there is room for a vector")
        room = chunks * t.lanes
        scores, places = numbers(best, real(t), room), numbers(keys, number, room)
        every = np.concatenate([scores, numbers(more, real(t), t.lanes)])
        of = np.concatenate([places, numbers(more_keys, number, t.lanes)])
        order = np.lexsort((of, -every))[:room]  # the larger score first, of equal ones the earlier key
        scores[:], places[:] = every[order], of[order]

    return merge
