"""Memory in which a body and its twin are run side by side, each on its own copy.

Arrays lie between stretches of a known pattern, aligned to their numbers and to nothing more. Afterwards the whole of
both is compared: a number, or a byte that nobody should have written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PATTERN, BETWEEN, SIZE = 0xA5, 128, 1 << 19


@dataclass(frozen=True)
class Region:
    """An array in the arena, and how alike both must be: rel · |x| + least, or the same bits (0)."""

    start: int
    dtype: np.dtype[Any]
    count: int
    rel: Any  # one number, or one for each of the array
    least: float
    table: bool


class Arena:
    def __init__(self) -> None:
        whole = np.full(SIZE + 64, PATTERN, np.uint8)
        shift = -whole.ctypes.data % 64
        self.bytes = whole[shift : shift + SIZE]
        self.regions: list[Region] = []
        self.end = BETWEEN

    def put(self, values: Any, rel: Any = 0.0, least: float = 0.0, table: bool = False) -> int:
        """Lay an array down; its address."""
        array = np.ascontiguousarray(values)
        start = -(-self.end // 64) * 64 + array.itemsize  # one number past where vectors like to begin
        stop = start + array.nbytes
        if stop + BETWEEN > SIZE:
            raise ValueError(f"the arena is too small: {stop + BETWEEN} bytes")
        self.bytes[start:stop] = array.reshape(-1).view(np.uint8)
        self.regions.append(Region(start, array.dtype, array.size, rel, least, table))
        self.end = stop + BETWEEN
        return int(self.bytes.ctypes.data) + start

    def table(self, addresses: list[int]) -> int:
        """A table of addresses within this arena."""
        return self.put(np.array(addresses, np.int64), table=True)

    def array(self, region: Region) -> Array:
        size = region.count * region.dtype.itemsize
        return self.bytes[region.start : region.start + size].view(region.dtype)

    def at(self, number: int) -> Array:
        """What the n-th array that was laid down holds now."""
        return self.array(self.regions[number])


def alike(a: Array, c: Array, rel: Any, least: float) -> Array:
    """Where two arrays agree. A NaN is a NaN; which one it is no contract says."""
    if a.dtype.kind != "f":
        return a == c
    nan = np.isnan(a) & np.isnan(c)
    if np.ndim(rel) == 0 and rel == 0 and least == 0:
        bits = f"u{a.itemsize}"
        return nan | (a.view(bits) == c.view(bits))
    with np.errstate(all="ignore"):
        near = abs(a.astype(np.longdouble) - c) <= rel * abs(c.astype(np.longdouble)) + least
    return nan | (a == c) | near


def differences(mine: Arena, yours: Arena) -> list[str]:
    """What differs between two arenas that were laid out alike."""
    said, outside = [], np.ones(SIZE, bool)
    for number, region in enumerate(mine.regions):
        stop = region.start + region.count * region.dtype.itemsize
        outside[region.start : stop] = False
        a, c = mine.array(region), yours.array(region)
        if region.table:
            a, c = a - mine.bytes.ctypes.data, c - yours.bytes.ctypes.data
        wrong = np.nonzero(~alike(a, c, region.rel, region.least))[0]
        if len(wrong):
            at = wrong[0]
            said.append(
                f"array {number} at {at} of {region.count} ({len(wrong)} wrong): {a[at]!r}, {c[at]!r}"
            )
    for name, arena in (("compiled", mine), ("twin", yours)):
        stray = np.nonzero(outside & (arena.bytes != PATTERN))[0]
        if len(stray):
            said.append(f"the {name} wrote outside: byte {stray[0]}, {len(stray)} in all")
    return said
