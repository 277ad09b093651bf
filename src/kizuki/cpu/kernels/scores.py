"""Scores of a key block for a block of queries, masked: what the forward, backward and reading kernels share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba

from ..layout import SLOT
from ..sizes import BFLOAT16, PLAIN
from ..target import Target
from .rows import Rows
from .scalar import (
    access,
    call_row,
    load_f64,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    piece,
    prefetch,
    steps_for,
    store_i32,
    store_i64,
    store_u16,
)
from .tile import Products

S = SLOT
KEYS, HEAD_DIM, KIND = S["KEYS"], S["HEAD_DIM"], S["KIND"]
KEY_BLOCKS, KEY_WIDTH = S["KEY_BLOCKS"], S["KEY_WIDTH"]
QUERY_TABLE, QUERY_ROW, QUERY_COL = S["QUERY_TABLE"], S["QUERY_ROW"], S["QUERY_COL"]
KEY_PACKED = S["KEY_PACKED"]
FIRST_TABLE, STOP_TABLE = S["FIRST_TABLE"], S["STOP_TABLE"]
MASK_TABLE, MASK_ROW, MASK_COL = S["MASK_TABLE"], S["MASK_ROW"], S["MASK_COL"]
BIAS_TABLE, BIAS_ROW, BIAS_COL = S["BIAS_TABLE"], S["BIAS_ROW"], S["BIAS_COL"]
SCALE, SOFTCAP = S["SCALE"], S["SOFTCAP"]
SCORE_FN, MASK_FN, FIRST_QUERY = S["SCORE_FN"], S["MASK_FN"], S["FIRST_QUERY"]


class Scores(NamedTuple):
    """Inlined pieces, callable from a kernel."""

    pack_query: Any
    factor_of: Any
    ranges: Any
    span: Any
    shape_row: Any
    shapes_rows: Any
    score_block: Any
    sees: Any


def build(t: Target, products: Products, rows: Rows) -> Scores:
    """The pieces for a target."""
    scores, cap_row = products.scores, rows.cap_row
    add_vectors, hide_vectors = rows.add_bias, rows.hide
    scale_plain, scale_bfloat16, scale_float16 = rows.scale_panel
    load, store, load_kind, _, real, size = access(t)
    mr, nr, lanes, block_k = t.mr, t.nr, t.lanes, t.block_k
    stride = 4 * lanes  # columns that the row bodies step by
    neg_inf, zero = real(-math.inf), real(0.0)
    steps_of = steps_for(t)

    @piece
    def factor_of(args: int) -> float:
        """Scale (÷ softcap): what a product of a query and a key is multiplied by."""
        softcap = load_f64(args + SOFTCAP)
        return real(load_f64(args + SCALE) / softcap if softcap > 0 else load_f64(args + SCALE))

    @piece
    def pack_pairs(args: int, plane: int, start: int, rows: int, padded: int, out: int) -> None:
        """Queries as they are, in pairs; an odd head_dim is filled up with 0, and so are rows past the end."""
        dim, row, col = load_i64(args + HEAD_DIM), load_i64(args + QUERY_ROW), load_i64(args + QUERY_COL)
        steps = steps_of(dim)
        source = load_i64(load_i64(args + QUERY_TABLE) + 8 * plane) + start * row
        for r in range(rows):
            here, there = out + r * steps * size, source + r * row
            if col == 2:
                for d in range(dim // 2):
                    store_i32(here + d * size, load_i32(there + d * size))
            else:
                for d in range(dim // 2 * 2):
                    store_u16(here + d * 2, load_u16(there + d * col))
            if dim % 2:
                store_u16(here + (dim - 1) * 2, load_u16(there + (dim - 1) * col))
                store_u16(here + dim * 2, numba.uint16(0))
        for at in range(rows * steps, padded * steps):
            store(out + at * size, zero)

    @piece
    def pack_numbers(args: int, plane: int, start: int, rows: int, padded: int, out: int) -> None:
        """Queries × scale (÷ softcap), head_dim numbers a row; rows past the end are 0."""
        factor, kind = factor_of(args), load_i64(args + KIND)
        dim, row, col = load_i64(args + HEAD_DIM), load_i64(args + QUERY_ROW), load_i64(args + QUERY_COL)
        source = load_i64(load_i64(args + QUERY_TABLE) + 8 * plane) + start * row
        width = size if kind == PLAIN else 2
        panels, count, long = dim // nr if col == width else 0, rows, dim
        if panels * nr == dim and row == dim * width:  # one after the other: as one long row
            long, panels, count = dim * rows, panels * rows, 1
        for r in range(count):
            here, there = out + r * long * size, source + r * row
            for p in range(panels):
                if kind == PLAIN:
                    scale_plain(there + p * nr * col, here + p * nr * size, factor)
                elif kind == BFLOAT16:
                    scale_bfloat16(there + p * nr * col, here + p * nr * size, factor)
                else:
                    scale_float16(there + p * nr * col, here + p * nr * size, factor)
            for d in range(panels * nr, long):
                store(here + d * size, load_kind(there + d * col, kind) * factor)
        for at in range(rows * dim, padded * dim):
            store(out + at * size, zero)

    pack_query = pack_pairs if t.pairs else pack_numbers

    if t.pairs:

        @piece
        def product(args: int, left: int, right: int, steps: int, out: int) -> None:
            scores(left, right, steps, out, factor_of(args))

    else:

        @piece
        def product(args: int, left: int, right: int, steps: int, out: int) -> None:
            scores(left, right, steps, out)

    @piece
    def add_bias(args: int, plane: int, query: int, key: int, first: int, stop: int, row: int) -> None:
        """The bias on columns first … stop of a row; a bias of −inf makes the score −inf whatever it was."""
        step = load_i64(args + BIAS_COL)
        bias = (
            load_i64(load_i64(args + BIAS_TABLE) + 8 * plane) + query * load_i64(args + BIAS_ROW) + key * step
        )
        at = first
        if step == size and stop - first >= lanes:
            add_vectors(row + first * size, bias + first * size, (stop - first) // lanes)
            at += (stop - first) // lanes * lanes
        for c in range(at, stop):
            x = load(bias + c * step)
            store(row + c * size, neg_inf if x == neg_inf else load(row + c * size) + x)

    @piece
    def hide(args: int, plane: int, query: int, key: int, first: int, stop: int, row: int) -> None:
        """The boolean mask on columns first … stop of a row."""
        step = load_i64(args + MASK_COL)
        seen = (
            load_i64(load_i64(args + MASK_TABLE) + 8 * plane) + query * load_i64(args + MASK_ROW) + key * step
        )
        at = first
        if step == 1 and stop - first >= lanes:
            hide_vectors(row + first * size, seen + first, (stop - first) // lanes)
            at += (stop - first) // lanes * lanes
        for c in range(at, stop):
            if load_u8(seen + c * step) == 0:
                store(row + c * size, neg_inf)

    @piece
    def sees(args: int, plane: int, query: int, spare: int) -> bool:
        """Whether a query sees any key. Asked only of rows whose scores are all −inf: absent, or overflown?

        A score function that says −inf means absence, as a bias does. `spare`: a row of the grid to write over.
        """
        if load_i64(args + SCORE_FN) != 0:
            return False
        first, stop = 0, load_i64(args + KEYS)
        if load_i64(args + FIRST_TABLE) != 0:
            first = load_i64(load_i64(load_i64(args + FIRST_TABLE) + 8 * plane) + 8 * query)
            stop = load_i64(load_i64(load_i64(args + STOP_TABLE) + 8 * plane) + 8 * query)
        masks, biases, rule = (
            load_i64(args + MASK_TABLE),
            load_i64(args + BIAS_TABLE),
            load_i64(args + MASK_FN),
        )
        for key in range(first // block_k * block_k, stop, block_k):
            a, z = max(0, first - key), min(block_k, stop - key)
            for c in range(a, z):
                store(spare + c * size, zero)
            if rule != 0:
                call_row(rule, spare, plane, load_i64(args + FIRST_QUERY) + query, key, a, z, 0)
            for j in range(key + a, key + z):
                there = load(spare + (j - key) * size) != neg_inf
                if masks != 0:
                    at = query * load_i64(args + MASK_ROW) + j * load_i64(args + MASK_COL)
                    there = there and load_u8(load_i64(masks + 8 * plane) + at) != 0
                if there and biases != 0:
                    at = query * load_i64(args + BIAS_ROW) + j * load_i64(args + BIAS_COL)
                    there = load(load_i64(biases + 8 * plane) + at) != neg_inf
                if there:
                    return True
        return False

    @piece
    def ranges(args: int, plane: int, start: int, rows: int, panels: int) -> tuple[int, int]:
        """[low, high): every key that is visible to one of these rows; and the same for each panel of mr rows."""
        keys = load_i64(args + KEYS)
        if load_i64(args + FIRST_TABLE) == 0:
            return 0, keys
        firsts = load_i64(load_i64(args + FIRST_TABLE) + 8 * plane) + 8 * start
        stops = load_i64(load_i64(args + STOP_TABLE) + 8 * plane) + 8 * start
        low, high = keys, 0
        for p in range((rows + mr - 1) // mr):
            panel_low, panel_high = keys, 0
            for r in range(p * mr, min(rows, (p + 1) * mr)):
                a, z = load_i64(firsts + 8 * r), load_i64(stops + 8 * r)
                if z > a:
                    panel_low, panel_high = min(panel_low, a), max(panel_high, z)
            store_i64(panels + p * 16, panel_low)
            store_i64(panels + p * 16 + 8, panel_high)
            low, high = min(low, panel_low), max(high, panel_high)
        return low, high

    @piece
    def span(args: int, panels: int, p: int, key: int, count: int) -> tuple[int, int]:
        """The columns first … stop of the block at `key` that some row of panel p sees; stop 0 when there are none."""
        if load_i64(args + FIRST_TABLE) == 0:
            return 0, count
        first = max(0, load_i64(panels + p * 16) - key)
        stop = min(count, load_i64(panels + p * 16 + 8) - key)
        return (first, stop) if stop > first else (0, 0)

    @piece
    def shapes_rows(args: int, count: int) -> bool:
        """Whether anything but the product is to be done to the scores of a block of `count` keys."""
        plain = (
            load_f64(args + SOFTCAP) == 0
            and load_i64(args + BIAS_TABLE) == 0
            and load_i64(args + MASK_TABLE) == 0
            and load_i64(args + FIRST_TABLE) == 0
            and load_i64(args + SCORE_FN) == 0
            and load_i64(args + MASK_FN) == 0
        )
        return not (plain and count % stride == 0)

    @piece
    def shape_row(
        args: int, plane: int, query: int, key: int, first: int, stop: int, row: int, slope: int
    ) -> None:
        """Cap, score function, bias and mask on columns first … stop of one row of scores.

        Around them, out to multiples of four vectors, the scores become −inf. `slope` is 0 or the address of
        a row for d score / d product, written where a cap or a score function bends it.
        """
        left, right = first // stride * stride, (stop + stride - 1) // stride * stride
        a, z = first, stop
        if load_i64(args + FIRST_TABLE) != 0:
            a = load_i64(load_i64(load_i64(args + FIRST_TABLE) + 8 * plane) + 8 * query) - key
            z = load_i64(load_i64(load_i64(args + STOP_TABLE) + 8 * plane) + 8 * query) - key
            a = min(max(a, left), stop)
            z = max(min(z, stop), a)
        softcap = load_f64(args + SOFTCAP)
        if softcap > 0:
            cap_row(row + left * size, right - left, real(softcap), slope + left * size if slope != 0 else 0)
        first_query = load_i64(args + FIRST_QUERY)
        if load_i64(args + SCORE_FN) != 0:
            call_row(load_i64(args + SCORE_FN), row, plane, first_query + query, key, a, z, slope)
        if load_i64(args + BIAS_TABLE) != 0:
            add_bias(args, plane, query, key, a, z, row)
        if load_i64(args + MASK_TABLE) != 0:
            hide(args, plane, query, key, a, z, row)
        if load_i64(args + MASK_FN) != 0:
            call_row(load_i64(args + MASK_FN), row, plane, first_query + query, key, a, z, 0)
        for c in range(left, a):
            store(row + c * size, neg_inf)
        for c in range(z, right):
            store(row + c * size, neg_inf)

    @piece
    def fetch_pairs(args: int, plane: int, query: int, key: int) -> None:
        """Ask for the mask and bias of the next tile, mr queries × nr keys, while its scores are computed.

        A row of theirs is far from the next one, which a processor does not foresee.
        """
        if load_i64(args + MASK_TABLE) != 0 and load_i64(args + MASK_COL) == 1 and key % 64 < nr:
            row = load_i64(args + MASK_ROW)
            here = load_i64(load_i64(args + MASK_TABLE) + 8 * plane) + query * row + key
            for r in range(mr):
                prefetch(here + r * row)
        if load_i64(args + BIAS_TABLE) != 0 and load_i64(args + BIAS_COL) == size:
            row = load_i64(args + BIAS_ROW)
            here = load_i64(load_i64(args + BIAS_TABLE) + 8 * plane) + query * row + key * size
            for r in range(mr):
                for at in range(0, nr * size, 64):
                    prefetch(here + r * row + at)

    @piece
    def score_block(
        args: int,
        plane: int,
        start: int,
        rows: int,
        packed: int,
        block: int,
        panels: int,
        grid: int,
        slopes: int,
        key_place: int,
    ) -> None:
        """Masked scores of key block `block` into `grid`.

        Of a panel of mr rows only the columns of its `span` are computed. Around them, out to multiples of
        four vectors, the scores are −inf; what lies further is undefined. `slopes`: 0, or a second grid. The keys
        are those packed at place `key_place`, counted in key blocks.
        """
        steps, full_width = steps_of(load_i64(args + HEAD_DIM)), load_i64(args + KEY_WIDTH)
        key = block * block_k
        count = min(block_k, load_i64(args + KEYS) - key)
        panel = load_i64(args + KEY_PACKED) + key_place * full_width * steps * size
        row_panels = (rows + mr - 1) // mr
        paired = load_i64(args + MASK_TABLE) != 0 or load_i64(args + BIAS_TABLE) != 0
        for c in range(0, min(full_width, count), nr):
            for p in range(row_panels):
                first, stop = span(args, panels, p, key, count)
                if first < c + nr and c < stop:
                    if paired:
                        fetch_pairs(args, plane, start + p * mr, key + c)
                    product(
                        args,
                        packed + p * mr * steps * size,
                        panel + c * steps * size,
                        steps,
                        grid + (p * mr * block_k + c) * size,
                    )
        if not shapes_rows(args, count):
            return
        for p in range(row_panels):
            first, stop = span(args, panels, p, key, count)
            if stop == 0:
                continue
            for r in range(p * mr, min(rows, (p + 1) * mr)):
                side = slopes + r * block_k * size if slopes != 0 else 0
                shape_row(args, plane, start + r, key, first, stop, grid + r * block_k * size, side)

    return Scores(pack_query, factor_of, ranges, span, shape_row, shapes_rows, score_block, sees)
