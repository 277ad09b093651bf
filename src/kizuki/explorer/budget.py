"""What fits into a page of a given size: which layers with q, k and L, and what of the others.

Sizes are known from the shapes alone, so this is decided before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

ROWS = ("entropy", "max", "distance", "other_distance", "first_key", "previous")
BASIC = ("entropy", "max")

# What the layers that do not fit keep, from rich to poor: row statistics, largest weights a row, pixels a side.
CHOICES: tuple[tuple[tuple[str, ...], int, int], ...] = (
    (ROWS, 8, 64),
    (ROWS, 4, 64),
    (BASIC, 4, 64),
    (BASIC, 2, 64),
    (BASIC, 1, 64),
    (("entropy",), 1, 32),
    (("entropy",), 0, 32),
    ((), 0, 16),
)
LIGHT_SHARE = 0.6  # of the page at most for what every layer has, so that some layers fit in full


class BudgetError(ValueError):
    """Not even the smallest page keeps within the limit."""


@dataclass(frozen=True)
class LayerSize:
    """The lengths that decide how large one layer is in the file."""

    layer: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    drawable: bool  # whether the page can recompute it at all

    def full(self) -> int:
        """Bytes of q, k and L, in base64."""
        numbers = self.heads * self.queries * (self.dim + 1) + self.kv_heads * self.keys * self.dim
        return encoded(4 * numbers)

    def light(self, rows: int, top: int, side: int) -> int:
        """Bytes of the readings that need no q and k, in base64."""
        picture = min(side, self.queries) * min(side, self.keys)
        numbers = rows * self.queries + self.keys + picture
        pair = 6 if self.keys < 65535 else 8  # a weight and the key it lies on
        return encoded(self.heads * (4 * numbers + pair * top * self.queries))


@dataclass(frozen=True)
class Plan:
    """What the page will hold."""

    full: tuple[int, ...]  # layers with q, k and L
    rows: tuple[str, ...]  # row statistics of the other layers
    top: int  # largest weights a row of the other layers
    side: int  # pixels of the pooled pictures
    bytes: int


def encoded(size: int) -> int:
    """Bytes as base64 text."""
    return 4 * -(-size // 3)


def plan(sizes: Sequence[LayerSize], limit: int, fixed: int, first: Sequence[int] = ()) -> Plan:
    """Choose what fits into `limit` bytes beside `fixed` bytes that are there anyway.

    All drawable layers in full if they fit; else the richest light readings within `LIGHT_SHARE` of the
    page, and as many layers in full as the rest holds: those of `first`, then evenly spaced ones.
    """
    everything = tuple(size.layer for size in sizes if size.drawable)

    def total(full: Sequence[int], rows: tuple[str, ...], top: int, side: int) -> int:
        bytes_ = fixed
        for size in sizes:
            whole = size.layer in full
            bytes_ += (
                size.light(len(ROWS), 0, side) + size.full() if whole else size.light(len(rows), top, side)
            )
        return bytes_

    rows, top, side = CHOICES[0]
    size = total(everything, rows, top, side)
    if size <= limit:
        return Plan(everything, rows, top if len(everything) < len(sizes) else 0, side, size)
    for share in (LIGHT_SHARE, 1.0):
        for choice in CHOICES:
            if total((), *choice) <= limit * share:
                full = _most(
                    everything, first, partial(total, rows=choice[0], top=choice[1], side=choice[2]), limit
                )
                return Plan(full, *choice, total(full, *choice))
    least = total((), *CHOICES[-1])
    raise BudgetError(
        f"limit_mb is {limit / 1e6:g} but the smallest page of these {len(sizes)} layers takes {least / 1e6:.1f} MB; "
        "look at fewer layers or heads, or raise limit_mb"
    )


def _most(
    layers: tuple[int, ...], first: Sequence[int], size: Callable[[Sequence[int]], int], limit: int
) -> tuple[int, ...]:
    """The largest choice of layers that fits: the wanted ones first, the others evenly spaced."""
    wanted = [layer for layer in dict.fromkeys(first) if layer in layers]
    for count in range(len(wanted), 0, -1):
        if size(wanted[:count]) <= limit:
            wanted = wanted[:count]
            break
    else:
        if wanted:
            return ()
    rest = [layer for layer in layers if layer not in wanted]
    for count in range(len(rest), 0, -1):
        chosen = tuple(sorted([*wanted, *spaced(rest, count)]))
        if size(chosen) <= limit:
            return chosen
    return tuple(sorted(wanted))


def spaced(layers: Sequence[int], count: int) -> list[int]:
    """`count` of the layers, evenly spaced, the first and the last among them; the middle one when count is 1."""
    if count == 1:
        return [layers[len(layers) // 2]]
    return [layers[round(at * (len(layers) - 1) / (count - 1))] for at in range(count)]
