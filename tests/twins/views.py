"""Twins of what an observed row goes through (views.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kizuki.cpu.target import Target

from .memory import grid, numbers, real
from .registry import Twin, needs, twin
from .rounding import LOWEST, exp, fma, larger
from .rows import above, quiet, stretch, summed_by_four, vectors


@twin("views.emit.watch.watch_row")
def watch_row(t: Target, reach_too: bool) -> Twin:
    @quiet
    def watch_row(
        row: int, width: int, running_max: Any, totals: int, moments: int, reaches: int, own: Any
    ) -> None:
        scores, total, moment = stretch(t, row, width), vectors(t, totals, 1), vectors(t, moments, 1)
        x = scores - above(t, running_max)
        y = exp(x)
        # Of an absent key y is 0 and x −inf, and their product is 0 here; so is NaN's, as the sum tells of it.
        lowest = real(t)(LOWEST[t.size])
        x = larger(lowest, x)
        scores[:] = y
        total[:] = summed_by_four(t, y, total)
        for at in range(0, width, t.lanes):
            moment[:] = fma(y[at : at + t.lanes], x[at : at + t.lanes], moment)
        if reach_too:
            reach = vectors(t, reaches, 1)
            for at in range(0, width, t.lanes):
                away = abs(real(t)(own) - np.arange(at, at + t.lanes, dtype=real(t)))
                reach[:] = fma(y[at : at + t.lanes], away, reach)

    return watch_row


@twin("views.emit.shift_moment")
def shift_moment(t: Target) -> Twin:
    @quiet
    def shift_moment(moments: int, totals: int, gap: Any, factor: Any) -> None:
        moment = vectors(t, moments, 1)
        moment[:] = fma(real(t)(gap), vectors(t, totals, 1), moment) * real(t)(factor)

    return shift_moment


@twin("views.emit.over_rows.columns")
def columns(t: Target, combine: str) -> Twin:
    @quiet
    def columns(grid_: int, rows: int, factors: int, out: int, width: int) -> None:
        needs(rows >= 1, "there is at least one row")
        found = stretch(t, out, width)
        lines = grid(grid_, real(t), rows, t.block_k * t.size, width)
        for line, factor in zip(lines, numbers(factors, real(t), rows), strict=True):
            found[:] = fma(line, factor, found) if combine == "sum" else larger(found, line * factor)

    return columns


@twin("views.emit.add_line")
def add_line(t: Target) -> Twin:
    @quiet
    def add_line(line: int, out: int, width: int) -> None:
        found = stretch(t, out, width)
        found += stretch(t, line, width)

    return add_line


@twin("views.emit.factor_rows")
def factor_rows(t: Target) -> Twin:
    @quiet
    def factor_rows(marks: int, tops: int, inverses: int, out: int, count: int) -> None:
        whole = -(-count // t.lanes)
        mark, top, inverse = (vectors(t, place, whole) for place in (marks, tops, inverses))
        share = exp(mark - top) * inverse
        vectors(t, out, whole)[:] = np.where((mark == -np.inf) | (inverse == 0), real(t)(0), share)

    return factor_rows
