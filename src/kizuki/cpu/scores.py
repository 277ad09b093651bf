"""Scores of a key block for a block of queries, masked: what the forward and the reading kernel share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba

from .layout import SLOT
from .simd import load_f32, load_f64, load_i64, load_u8, store_f32, store_i64
from .target import Target
from .tile import Bodies

S = SLOT
KEYS, HEAD_DIM = S["KEYS"], S["HEAD_DIM"]
KEY_BLOCKS, KEY_WIDTH = S["KEY_BLOCKS"], S["KEY_WIDTH"]
QUERY_TABLE, QUERY_ROW, QUERY_COL = S["QUERY_TABLE"], S["QUERY_ROW"], S["QUERY_COL"]
KEY_TABLE, KEY_PACKED = S["KEY_TABLE"], S["KEY_PACKED"]
FIRST_TABLE, STOP_TABLE = S["FIRST_TABLE"], S["STOP_TABLE"]
MASK_TABLE, MASK_ROW, MASK_COL = S["MASK_TABLE"], S["MASK_ROW"], S["MASK_COL"]
BIAS_TABLE, BIAS_ROW, BIAS_COL = S["BIAS_TABLE"], S["BIAS_ROW"], S["BIAS_COL"]
SCALE, SOFTCAP = S["SCALE"], S["SOFTCAP"]

SPAN_BYTES = 16  # of scratch for each panel of mr rows: the keys it sees

NEG_INF = numba.float32(-math.inf)
ZERO = numba.float32(0.0)


class Scores(NamedTuple):
    """Inlined pieces, callable from a kernel."""

    pack_query: Any
    ranges: Any
    span: Any
    score_block: Any
    sees: Any


def build(t: Target, bodies: Bodies) -> Scores:
    """The pieces for a target."""
    scores, finish_row = bodies.scores, bodies.finish_row
    mr, nr, lanes, block_k = t.mr, t.nr, t.lanes, t.block_k

    @numba.njit(error_model="numpy")
    def pack_query(args: int, plane: int, start: int, rows: int, padded: int, out: int) -> None:
        """Queries × scale (÷ softcap), head_dim floats a row; rows past the end are 0."""
        softcap = load_f64(args + SOFTCAP)
        factor = numba.float32(load_f64(args + SCALE) / softcap if softcap > 0 else load_f64(args + SCALE))
        dim, row, col = (
            load_i64(args + HEAD_DIM),
            4 * load_i64(args + QUERY_ROW),
            4 * load_i64(args + QUERY_COL),
        )
        source = load_i64(load_i64(args + QUERY_TABLE) + 8 * plane) + start * row
        panels = dim // nr if col == 4 else 0
        for r in range(rows):
            here, there = out + r * dim * 4, source + r * row
            for p in range(panels):
                finish_row(there + p * nr * 4, here + p * nr * 4, factor)
            for d in range(panels * nr, dim):
                store_f32(here + d * 4, load_f32(there + d * col) * factor)
        for at in range(rows * dim, padded * dim):
            store_f32(out + at * 4, ZERO)

    @numba.njit(error_model="numpy")
    def cap_and_bias(args: int, plane: int, query: int, key: int, first: int, stop: int, row: int) -> None:
        """softcap, then bias, on columns first … stop of a row; a bias of −inf makes the score −inf whatever it was."""
        softcap = load_f64(args + SOFTCAP)
        if softcap > 0:
            for c in range(first, stop):
                store_f32(row + c * 4, numba.float32(softcap * math.tanh(load_f32(row + c * 4))))
        table = load_i64(args + BIAS_TABLE)
        if table != 0:
            step = 4 * load_i64(args + BIAS_COL)
            bias = load_i64(table + 8 * plane) + 4 * query * load_i64(args + BIAS_ROW) + key * step
            for c in range(first, stop):
                x = load_f32(bias + c * step)
                store_f32(row + c * 4, NEG_INF if x == NEG_INF else load_f32(row + c * 4) + x)

    @numba.njit(error_model="numpy")
    def hide(args: int, plane: int, query: int, key: int, first: int, stop: int, row: int) -> None:
        """The boolean mask on columns first … stop of a row."""
        step = load_i64(args + MASK_COL)
        seen = (
            load_i64(load_i64(args + MASK_TABLE) + 8 * plane) + query * load_i64(args + MASK_ROW) + key * step
        )
        for c in range(first, stop):
            if load_u8(seen + c * step) == 0:
                store_f32(row + c * 4, NEG_INF)

    @numba.njit(error_model="numpy")
    def sees(args: int, plane: int, query: int) -> bool:
        """Whether a query sees any key. Asked only of rows whose scores are all −inf: absent, or overflown?"""
        first, stop = 0, load_i64(args + KEYS)
        if load_i64(args + FIRST_TABLE) != 0:
            first = load_i64(load_i64(load_i64(args + FIRST_TABLE) + 8 * plane) + 8 * query)
            stop = load_i64(load_i64(load_i64(args + STOP_TABLE) + 8 * plane) + 8 * query)
        masks, biases = load_i64(args + MASK_TABLE), load_i64(args + BIAS_TABLE)
        for j in range(first, stop):
            there = True
            if masks != 0:
                at = (
                    load_i64(masks + 8 * plane)
                    + query * load_i64(args + MASK_ROW)
                    + j * load_i64(args + MASK_COL)
                )
                there = load_u8(at) != 0
            if there and biases != 0:
                at = query * load_i64(args + BIAS_ROW) + j * load_i64(args + BIAS_COL)
                there = load_f32(load_i64(biases + 8 * plane) + 4 * at) != NEG_INF
            if there:
                return True
        return False

    @numba.njit(error_model="numpy")
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

    @numba.njit(error_model="numpy")
    def span(args: int, panels: int, p: int, key: int, count: int) -> tuple[int, int]:
        """The columns first … stop of the block at `key` that some row of panel p sees; stop 0 when there are none."""
        if load_i64(args + FIRST_TABLE) == 0:
            return 0, count
        first = max(0, load_i64(panels + p * 16) - key)
        stop = min(count, load_i64(panels + p * 16 + 8) - key)
        return (first, stop) if stop > first else (0, 0)

    @numba.njit(error_model="numpy")
    def score_block(
        args: int, plane: int, start: int, rows: int, packed: int, block: int, panels: int, grid: int
    ) -> None:
        """Masked scores of key block `block` into `grid`.

        Of a panel of mr rows only the columns of its `span` are computed. Around them, out to multiples of
        four vectors, the scores are −inf; what lies further is undefined.
        """
        dim, full_width = load_i64(args + HEAD_DIM), load_i64(args + KEY_WIDTH)
        key = block * block_k
        count = min(block_k, load_i64(args + KEYS) - key)
        key_plane = load_i64(load_i64(args + KEY_TABLE) + 8 * plane)
        panel = (
            load_i64(args + KEY_PACKED)
            + (key_plane * load_i64(args + KEY_BLOCKS) + block) * full_width * dim * 4
        )
        row_panels = (rows + mr - 1) // mr
        for c in range(0, min(full_width, count), nr):
            for p in range(row_panels):
                first, stop = span(args, panels, p, key, count)
                if first < c + nr and c < stop:
                    scores(
                        packed + p * mr * dim * 4, panel + c * dim * 4, dim, grid + (p * mr * block_k + c) * 4
                    )
        shaped = load_f64(args + SOFTCAP) > 0 or load_i64(args + BIAS_TABLE) != 0
        masked = load_i64(args + MASK_TABLE) != 0
        ranged = load_i64(args + FIRST_TABLE) != 0
        if not (shaped or masked or ranged or count % (4 * lanes) != 0):
            return
        firsts, stops = 0, 0
        if ranged:
            firsts = load_i64(load_i64(args + FIRST_TABLE) + 8 * plane) + 8 * start
            stops = load_i64(load_i64(args + STOP_TABLE) + 8 * plane) + 8 * start
        for p in range(row_panels):
            first, stop = span(args, panels, p, key, count)
            if stop == 0:
                continue
            left, right = (
                first // (4 * lanes) * (4 * lanes),
                (stop + 4 * lanes - 1) // (4 * lanes) * (4 * lanes),
            )
            for r in range(p * mr, min(rows, (p + 1) * mr)):
                row = grid + r * block_k * 4
                a, z = first, stop
                if ranged:
                    a = min(max(load_i64(firsts + 8 * r) - key, left), stop)
                    z = max(min(load_i64(stops + 8 * r) - key, stop), a)
                if shaped:
                    cap_and_bias(args, plane, start + r, key, a, z, row)
                if masked:
                    hide(args, plane, start + r, key, a, z, row)
                for c in range(left, a):
                    store_f32(row + c * 4, NEG_INF)
                for c in range(z, right):
                    store_f32(row + c * 4, NEG_INF)

    return Scores(pack_query, ranges, span, score_block, sees)
