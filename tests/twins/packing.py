"""Twins of packing (pack.py): a square turned, a panel copied, two rows woven into words."""

from __future__ import annotations

import numpy as np

from kizuki.cpu.target import Target

from .memory import grid, numbers, real, widened
from .registry import Twin, needs, twin


@twin("pack.bodies.for_kind.turn")
def turn(t: Target, kind: int) -> Twin:
    def turn(source: int, row: int, vectors: int, out: int) -> None:
        needs(vectors >= 1, "there is at least one vector")
        dim = vectors * t.lanes
        lines = np.stack([widened(source + r * row, t, kind, dim) for r in range(t.lanes)])
        grid(out, real(t), dim, t.nr * t.size, t.lanes)[:] = lines.T

    return turn


@twin("pack.bodies.for_kind.copy_panel")
def copy_panel(t: Target, kind: int) -> Twin:
    def copy_panel(source: int, out: int) -> int:
        panel = widened(source, t, kind, t.nr)
        numbers(out, real(t), t.nr)[:] = panel
        return int(not np.isfinite(panel).all())

    return copy_panel


@twin("pack.pairs.weave_panel")
def weave_panel(t: Target) -> Twin:
    def weave_panel(first: int, second: int, out: int) -> int:
        halves = np.stack([numbers(place, np.uint16, t.nr) for place in (first, second)], 1)
        numbers(out, np.uint16, 2 * t.nr).reshape(t.nr, 2)[:] = halves
        # NaN and Inf are what has all ones for its exponent.
        return int((halves & 0x7F80 == 0x7F80).any())

    return weave_panel
