"""Twins of how a user's function reads its arrays (cpu/custom.py): through a table of addresses."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import memory
from .registry import Twin, needs, twin


def _entry(captured: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Where the array lies now, its lengths, its strides in bytes."""
    entry = [int(x) for x in memory.numbers(captured.entry, np.int64, 1 + 2 * captured.ndim)]
    return entry[0], tuple(entry[1 : 1 + captured.ndim]), tuple(entry[1 + captured.ndim :])


@twin("custom._wide")
def wide() -> Twin:
    def _wide(index: Any) -> tuple[int, ...]:
        return tuple(int(at) for at in index)

    return _wide


@twin("custom._inside")
def inside() -> Twin:
    def _inside(captured: Any, index: Any) -> bool:
        _, lengths, _ = _entry(captured)
        return all(-length <= at < length for at, length in zip(index, lengths, strict=True))

    return _inside


@twin("custom._element")
def element() -> Twin:
    def _element(captured: Any, index: Any) -> Any:
        start, lengths, steps = _entry(captured)
        needs(all(-n <= at < n for at, n in zip(index, lengths, strict=True)), "every index lies in its axis")
        place = start + sum(at % n * step for at, n, step in zip(index, lengths, steps, strict=True))
        found = memory.numbers(place, captured.dtype, 1)[0]
        return {"f": np.float64, "b": bool}.get(captured.dtype.kind, int)(found)

    return _element
