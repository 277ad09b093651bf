"""Readings folded into the forward pass: what the `observe` kernel does beside the online softmax.

Of a row, beside running_max and running_sum: its moment Σ e^{s−m}(s−m) and its reach Σ e^{s−m}·|own − j|, which
follow the running maximum m as the sum does, and its k best scores. With Z = Σ e^{s−m} (a sink's share in it),
entropy = ln Z · (Σ e^{s−m} / Z) − moment / Z, all terms of one sign: nothing cancels, however large the scores.

Sums over columns need the final normaliser. Each key block of a query block keeps the weights where the softmax left
them (a strip of `STEP` queries × keys), and its running maxima; when the rows are done, a factor
exp(m_block − m) / Z a row makes exact weights of them, and no product is computed twice.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba

from ..layout import SLOT
from ..target import Target
from . import views
from .rows import Rows
from .scalar import access, load_f64, load_i64, piece, store_f64
from .scores import Scores

S = SLOT
KEYS, FIRST_QUERY = S["KEYS"], S["FIRST_QUERY"]
KEY_BLOCKS, GROUPS, RECEIVED = S["KEY_BLOCKS"], S["GROUPS"], S["RECEIVED"]
POOL, POOL_KIND, POOL_ROWS, POOL_COLS = S["POOL"], S["POOL_KIND"], S["POOL_ROWS"], S["POOL_COLS"]
POOL_LINES, POOL_SHIFT, ALL_QUERIES = S["POOL_LINES"], S["POOL_SHIFT"], S["ALL_QUERIES"]


class Watching(NamedTuple):
    """Inlined pieces, callable from the forward kernel."""

    watch_moment: Any
    watch_both: Any
    shift_moment: Any
    join_moments: Any
    conclude: Any
    silence: Any
    columns: Any


def build(t: Target, rows: Rows, scores: Scores) -> Watching:
    """The pieces for a target."""
    seen = views.emit(t)
    add_line, factor_rows = seen.add_line, seen.factor_rows
    sum_columns, peak_columns = seen.sum_columns, seen.peak_columns
    exp_one, span = rows.exp_one, scores.span
    load, store, _, _, real, size = access(t)
    mr, lanes, block_k = t.mr, t.lanes, t.block_k
    stride = 4 * lanes
    neg_inf, zero = real(-math.inf), real(0.0)

    @piece
    def join_moments(state: int, more: int, sums: int, more_sums: int) -> None:
        """Join a later split's (moment, reach) to those so far, before `softmax.join` joins (maximum, total)."""
        old, top = load(state), load(more)
        if top == neg_inf:
            return
        peak = top if top > old else old
        factor, share = exp_one(old - peak), exp_one(top - peak)
        moment = (load(more_sums) + (top - peak) * load(more + size)) * share
        if old != neg_inf:
            moment += (load(sums) + (old - peak) * load(state + size)) * factor
        store(sums, moment)
        store(sums + size, load(sums + size) * factor + load(more_sums + size) * share)

    @piece
    def conclude(top: float, total: float, norm: float, sums: int, out: int) -> float:
        """Largest score, normaliser, entropy and distance of a row, four float64 at `out`; returns 1 / normaliser."""
        entropy, distance, inverse = 0.0, 0.0, 0.0
        if norm != math.inf:  # else it is empty, or its sink has all of it
            inverse = 1.0 / norm
            share = numba.float64(total) * inverse
            entropy = math.log(norm) * share - numba.float64(load(sums)) * inverse
            distance = numba.float64(load(sums + size)) * inverse
        store_f64(out, numba.float64(top))
        store_f64(out + 8, norm)
        store_f64(out + 16, entropy)
        store_f64(out + 24, distance)
        return real(inverse)

    @piece
    def silence(strip: int, strip_bytes: int, blocks: int, row: int) -> None:
        """Write 0 over the weights of a row that is NaN: which columns that spoils is found out elsewhere."""
        for b in range(blocks):
            here = strip + b * strip_bytes + row * block_k * size
            for c in range(block_k):
                store(here + c * size, zero)

    @piece
    def pool_line(args: int, line: int, key: int, first: int, stop: int, out: int) -> None:
        """Add the columns first … stop of one line of sums (or largest weights) to the pixels at `out`, float64."""
        keys, cols, largest = (
            load_i64(args + KEYS),
            load_i64(args + POOL_COLS),
            load_i64(args + POOL_KIND) == 2,
        )
        at, last = key + first, key + stop
        col = at * cols // keys
        while at < last:
            end = min(last, ((col + 1) * keys + cols - 1) // cols)
            if largest:
                best = load_f64(out + col * 8)
                for j in range(at, end):
                    best = max(best, numba.float64(load(line + (j - key) * size)))
                store_f64(out + col * 8, best)
            else:
                a, b, c, d = zero, zero, zero, zero
                j = at
                while j + 4 <= end:
                    here = line + (j - key) * size
                    a, b = a + load(here), b + load(here + size)
                    c, d = c + load(here + 2 * size), d + load(here + 3 * size)
                    j += 4
                while j < end:
                    a += load(line + (j - key) * size)
                    j += 1
                store_f64(out + col * 8, load_f64(out + col * 8) + numba.float64((a + b) + (c + d)))
            at, col = end, col + 1

    @piece
    def sum_rows(
        args: int,
        spans: int,
        begin: int,
        end: int,
        key: int,
        count: int,
        grid: int,
        factors: int,
        line: int,
        largest: bool,
    ) -> tuple[int, int]:
        """Sums (or largest) of the weights of rows begin … end of a key block into `line`; the columns there are."""
        left, right = block_k, 0
        for p in range(begin // mr, (end + mr - 1) // mr):
            first, stop = span(args, spans, p, key, count)
            if stop > 0:
                left, right = min(left, first // stride * stride), max(right, stop)
        right = (right + stride - 1) // stride * stride
        for c in range(left, right):
            store(line + c * size, zero)
        for p in range(begin // mr, (end + mr - 1) // mr):
            first, stop = span(args, spans, p, key, count)
            if stop > 0:
                at = first // stride * stride
                width = (stop + stride - 1) // stride * stride - at
                a, z = max(begin, p * mr), min(end, (p + 1) * mr)
                here, there = grid + (a * block_k + at) * size, line + at * size
                if largest:
                    peak_columns(here, z - a, factors + a * size, there, width)
                else:
                    sum_columns(here, z - a, factors + a * size, there, width)
        return left, right

    @piece
    def columns(
        args: int,
        plane: int,
        group: int,
        stretch: int,
        start: int,
        rows: int,
        low: int,
        high: int,
        spans: int,
        strip: int,
        strip_bytes: int,
        marks: int,
        step: int,
        tops: int,
        inverses: int,
        factors: int,
        line: int,
    ) -> None:
        """The finished rows of a query block into the column sums of its group and into its lines of the picture.

        Of a key block all rows are summed for the one, and the rows of each pixel for the other. `tops`: their largest
        scores; `inverses`: 1 / normaliser; `factors`, `line`: room for as many numbers, and for a row of the grid.
        """
        keys, pictured = load_i64(args + KEYS), load_i64(args + POOL_KIND)
        pixels, queries, first_query = (
            load_i64(args + POOL_ROWS),
            load_i64(args + ALL_QUERIES),
            load_i64(args + FIRST_QUERY) + start,
        )
        length = load_i64(args + KEY_BLOCKS) * block_k
        received = load_i64(args + RECEIVED)
        if received != 0:
            received += (plane * load_i64(args + GROUPS) + group) * length * size
        block, place = low // block_k, 0
        while block * block_k < high:
            key, grid = block * block_k, strip + place * strip_bytes
            count = min(block_k, keys - key)
            factor_rows(marks + place * step * size, tops, inverses, factors, rows)
            if received != 0:
                left, right = sum_rows(args, spans, 0, rows, key, count, grid, factors, line, False)
                if right > left:
                    add_line(line + left * size, received + (key + left) * size, right - left)
            begin = 0
            while begin < rows and pictured != 0:
                pixel = (first_query + begin) * pixels // queries
                end = min(rows, ((pixel + 1) * queries + pixels - 1) // pixels - first_query)
                lines = plane * load_i64(args + POOL_LINES) + pixel + load_i64(args + POOL_SHIFT) + stretch
                out = load_i64(args + POOL) + lines * load_i64(args + POOL_COLS) * 8
                left, right = sum_rows(
                    args, spans, begin, end, key, count, grid, factors, line, pictured == 2
                )
                if right > left:
                    pool_line(args, line, key, left, min(right, count), out)
                begin = end
            block, place = block + 1, place + 1

    return Watching(
        seen.watch_moment,
        seen.watch_both,
        seen.shift_moment,
        join_moments,
        conclude,
        silence,
        columns,
    )
