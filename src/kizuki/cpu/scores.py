"""Scores of a key block for a block of queries, masked: what the forward and the reading kernel share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba

from .layout import SLOT
from .simd import load_f32, load_f64, load_i64, load_u8, store_f32
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

NEG_INF = numba.float32(-math.inf)
ZERO = numba.float32(0.0)


class Scores(NamedTuple):
    """Inlined pieces, callable from a kernel."""

    pack_query: Any
    ranges: Any
    score_block: Any


def build(t: Target, bodies: Bodies) -> Scores:
    """The pieces for a target."""
    scores, finish_row = bodies.scores, bodies.finish_row
    mr, nr, lanes, block_q, block_k = t.mr, t.nr, t.lanes, t.block_q, t.block_k

    @numba.njit(inline="always")  # type: ignore[untyped-decorator]
    def pack_query(args: int, plane: int, start: int, rows: int, padded: int, out: int) -> None:
        """Queries × scale (÷ softcap), head_dim floats a row; rows past the end are 0."""
        softcap = load_f64(args + SOFTCAP)
        factor = numba.float32(load_f64(args + SCALE) / softcap if softcap > 0 else load_f64(args + SCALE))
        dim, row, col = load_i64(args + HEAD_DIM), 4 * load_i64(args + QUERY_ROW), 4 * load_i64(args + QUERY_COL)
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

    @numba.njit(inline="always")  # type: ignore[untyped-decorator]
    def cap_and_bias(args: int, plane: int, query: int, key: int, count: int, row: int, softcap: float) -> None:
        """softcap, then bias, on one row of scores; a bias of −inf makes the score −inf whatever it was."""
        if softcap > 0:
            for c in range(count):
                store_f32(row + c * 4, numba.float32(softcap * math.tanh(load_f32(row + c * 4))))
        table = load_i64(args + BIAS_TABLE)
        if table != 0:
            step = 4 * load_i64(args + BIAS_COL)
            bias = load_i64(table + 8 * plane) + 4 * query * load_i64(args + BIAS_ROW) + key * step
            for c in range(count):
                x = load_f32(bias + c * step)
                store_f32(row + c * 4, NEG_INF if x == NEG_INF else load_f32(row + c * 4) + x)

    @numba.njit(inline="always")  # type: ignore[untyped-decorator]
    def hide(args: int, plane: int, query: int, key: int, count: int, row: int) -> None:
        """The boolean mask on one row of scores."""
        step = load_i64(args + MASK_COL)
        seen = load_i64(load_i64(args + MASK_TABLE) + 8 * plane) + query * load_i64(args + MASK_ROW) + key * step
        for c in range(count):
            if load_u8(seen + c * step) == 0:
                store_f32(row + c * 4, NEG_INF)

    @numba.njit(inline="always")  # type: ignore[untyped-decorator]
    def ranges(args: int, plane: int, start: int, rows: int) -> tuple[int, int, int, int]:
        """[low, high) holds every visible key of these rows; [whole_low, whole_high) is seen by all of them."""
        keys = load_i64(args + KEYS)
        low, high, whole_low, whole_high = 0, keys, 0, keys
        if load_i64(args + FIRST_TABLE) != 0:
            firsts = load_i64(load_i64(args + FIRST_TABLE) + 8 * plane) + 8 * start
            stops = load_i64(load_i64(args + STOP_TABLE) + 8 * plane) + 8 * start
            low, high = keys, 0
            for r in range(rows):
                a, z = load_i64(firsts + 8 * r), load_i64(stops + 8 * r)
                whole_low, whole_high = max(whole_low, a), min(whole_high, z)
                if z > a:
                    low, high = min(low, a), max(high, z)
        return low, high, whole_low, whole_high

    @numba.njit(inline="always")  # type: ignore[untyped-decorator]
    def score_block(
        args: int, plane: int, start: int, rows: int, padded: int, packed: int, block: int, whole_low: int, whole_high: int, grid: int
    ) -> int:
        """Masked scores of key block `block` into `grid`; returns how many columns of each row are defined.

        Columns past the last key are −inf, up to a multiple of four vectors.
        """
        dim, full_width = load_i64(args + HEAD_DIM), load_i64(args + KEY_WIDTH)
        key = block * block_k
        count = min(block_k, load_i64(args + KEYS) - key)
        width = min(full_width, (count + nr - 1) // nr * nr)
        step = (count + 4 * lanes - 1) // (4 * lanes) * (4 * lanes)
        key_plane = load_i64(load_i64(args + KEY_TABLE) + 8 * plane)
        panel = load_i64(args + KEY_PACKED) + (key_plane * load_i64(args + KEY_BLOCKS) + block) * full_width * dim * 4
        for c in range(0, width, nr):
            for r in range(0, padded, mr):
                scores(packed + r * dim * 4, panel + c * dim * 4, dim, grid + (r * block_k + c) * 4)
        softcap = load_f64(args + SOFTCAP)
        shaped = softcap > 0 or load_i64(args + BIAS_TABLE) != 0
        masked = load_i64(args + MASK_TABLE) != 0
        cut = load_i64(args + FIRST_TABLE) != 0 and (key < whole_low or key + count > whole_high)
        if not (shaped or masked or cut or count < step):
            return step
        firsts, stops = 0, 0
        if cut:
            firsts = load_i64(load_i64(args + FIRST_TABLE) + 8 * plane) + 8 * start
            stops = load_i64(load_i64(args + STOP_TABLE) + 8 * plane) + 8 * start
        for r in range(rows):
            row = grid + r * block_k * 4
            if shaped:
                cap_and_bias(args, plane, start + r, key, count, row, softcap)
            if masked:
                hide(args, plane, start + r, key, count, row)
            if cut:
                a, z = load_i64(firsts + 8 * r) - key, load_i64(stops + 8 * r) - key
                for c in range(min(max(a, 0), count)):
                    store_f32(row + c * 4, NEG_INF)
                for c in range(max(z, 0), count):
                    store_f32(row + c * 4, NEG_INF)
            for c in range(count, step):
                store_f32(row + c * 4, NEG_INF)
        return step

    return Scores(pack_query, ranges, score_block)
