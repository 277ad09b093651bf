"""The forward kernel: online softmax over key blocks, one query block a task.

For a block of queries: scores of a key block into scratch (scores.py), one softmax step a row
(running_max, running_sum), then the weights times the values into the accumulator.
A row's arithmetic depends on its own data and on the key blocks, which start at multiples of block_k:
the same bits come out alone or in a batch, on one thread or many.
"""

from __future__ import annotations

import math
from typing import Any

import numba

from . import scores as shared
from . import tile
from .layout import SLOT
from .scores import NEG_INF, ZERO
from .simd import load_f32, load_i64, load_u8, store_f32, store_f64, store_u8, take_ticket
from .target import Target

S = SLOT
NEXT_TASK, NEXT_SLOT, TASKS = S["NEXT_TASK"], S["NEXT_SLOT"], S["TASKS"]
SCRATCH, SCRATCH_BYTES = S["SCRATCH"], S["SCRATCH_BYTES"]
QUERIES, KEYS, HEAD_DIM, VALUE_DIM = S["QUERIES"], S["KEYS"], S["HEAD_DIM"], S["VALUE_DIM"]
KEY_BLOCKS, KEY_WIDTH, VALUE_PANELS = S["KEY_BLOCKS"], S["KEY_WIDTH"], S["VALUE_PANELS"]
VALUE_TABLE, VALUE_PACKED, VALUE_ODD = S["VALUE_TABLE"], S["VALUE_PACKED"], S["VALUE_ODD"]
VALUE_SOURCE, VALUE_ROW, VALUE_COL = S["VALUE_SOURCE"], S["VALUE_ROW"], S["VALUE_COL"]
SINK_TABLE, OUTPUT_TABLE, LSE_TABLE = S["SINK_TABLE"], S["OUTPUT_TABLE"], S["LSE_TABLE"]


def scratch_bytes(t: Target, head_dim: int, value_panels: int) -> int:
    """Scratch of one thread: packed queries, scores, accumulator, running sum and max, spans, which scores are seen."""
    floats = t.block_q * (head_dim + t.block_k + value_panels * t.nr + t.lanes + 1)
    spans = t.block_q // t.mr * shared.SPAN_BYTES
    return -(-(floats * 4 + spans + t.block_q * t.block_k) // 64) * 64


def build(t: Target) -> Any:
    """The forward kernel for a target."""
    bodies = tile.emit(t)
    pieces = shared.build(t, bodies)
    pack_query, ranges, span, score_block = pieces.pack_query, pieces.ranges, pieces.span, pieces.score_block
    sees = pieces.sees
    mix, row_max, raise_row = bodies.mix, bodies.row_max, bodies.raise_row
    fold_total, scale_vector, exp_one = bodies.fold_total, bodies.scale_vector, bodies.exp_one
    scale_row, finish_row = bodies.scale_row, bodies.finish_row
    mr, nr, lanes, block_q, block_k = t.mr, t.nr, t.lanes, t.block_q, t.block_k
    stride = 4 * lanes  # what row_max and raise_row step by

    @numba.njit(error_model="numpy")
    def note_seen(row: int, seen: int, first: int, stop: int) -> None:
        """One byte a column: does the row see it?"""
        for c in range(block_k):
            inside = first <= c < stop
            store_u8(seen + c, numba.uint8(inside and load_f32(row + c * 4) != NEG_INF))

    @numba.njit(error_model="numpy")
    def add_odd(args: int, plane: int, key: int, weights: int, seen: int, sums: int, rows: int) -> None:
        """Add weight · value for the NaN and infinite values of a key block, only to the rows that see the key."""
        dim, row, col = (
            load_i64(args + VALUE_DIM),
            4 * load_i64(args + VALUE_ROW),
            4 * load_i64(args + VALUE_COL),
        )
        source = load_i64(
            load_i64(args + VALUE_SOURCE) + 8 * load_i64(load_i64(args + VALUE_TABLE) + 8 * plane)
        )
        for c in range(min(block_k, load_i64(args + KEYS) - key)):
            for d in range(dim):
                x = load_f32(source + (key + c) * row + d * col)
                if not math.fabs(x) < numba.float32(math.inf):
                    for r in range(rows):
                        if load_u8(seen + r * block_k + c) != 0:
                            at = sums + ((d // nr) * block_q * nr + r * nr + d % nr) * 4
                            store_f32(at, load_f32(at) + load_f32(weights + (r * block_k + c) * 4) * x)

    def forward(args: int) -> None:
        tasks, queries, keys = load_i64(args + TASKS), load_i64(args + QUERIES), load_i64(args + KEYS)
        dim, value_dim, panels = (
            load_i64(args + HEAD_DIM),
            load_i64(args + VALUE_DIM),
            load_i64(args + VALUE_PANELS),
        )
        blocks, full_width = load_i64(args + KEY_BLOCKS), load_i64(args + KEY_WIDTH)
        query_blocks = (queries + block_q - 1) // block_q

        slot = take_ticket(args + NEXT_SLOT)
        packed = load_i64(args + SCRATCH) + slot * load_i64(args + SCRATCH_BYTES)
        grid = packed + block_q * dim * 4  # scores, then weights
        sums = grid + block_q * block_k * 4  # the accumulator
        totals = sums + block_q * panels * nr * 4  # running_sum, one vector a row, folded at the end
        tops = totals + block_q * lanes * 4  # running_max
        spans = tops + block_q * 4  # the keys each panel of rows sees
        seen = (
            spans + block_q // mr * shared.SPAN_BYTES
        )  # bytes, only for key blocks with NaN or infinite values

        while True:
            task = take_ticket(args + NEXT_TASK)
            if task >= tasks:
                break
            plane = task // query_blocks
            # The last queries see the most keys under a causal mask: they go first.
            start = (query_blocks - 1 - task % query_blocks) * block_q
            rows = min(block_q, queries - start)
            row_panels = (rows + mr - 1) // mr
            padded = row_panels * mr
            low, high = ranges(args, plane, start, rows, spans)
            pack_query(args, plane, start, rows, padded, packed)
            for r in range(padded):
                store_f32(tops + r * 4, NEG_INF)
                for c in range(lanes):
                    store_f32(totals + (r * lanes + c) * 4, ZERO)
                for p in range(panels):
                    for c in range(nr):
                        store_f32(sums + ((p * block_q + r) * nr + c) * 4, ZERO)
            value_plane = load_i64(load_i64(args + VALUE_TABLE) + 8 * plane)
            block = low // block_k
            while block * block_k < high:
                key = block * block_k
                count = min(block_k, keys - key)
                score_block(args, plane, start, rows, packed, block, spans, grid)
                odd = load_u8(load_i64(args + VALUE_ODD) + value_plane * blocks + block) != 0
                for p in range(row_panels):
                    first, stop = span(args, spans, p, key, count)
                    left = first // stride * stride
                    width = (stop + stride - 1) // stride * stride - left
                    for r in range(p * mr, min(rows, (p + 1) * mr)):
                        row = grid + r * block_k * 4
                        if odd:
                            note_seen(row, seen + r * block_k, first, stop)
                        if stop == 0:
                            continue
                        row += left * 4
                        old = load_f32(tops + r * 4)
                        new = row_max(row, width, old)
                        if new != old:
                            store_f32(tops + r * 4, new)
                            if old != NEG_INF:  # else there is nothing yet to rescale
                                decay = exp_one(old - new)
                                if panels > 0:
                                    scale_row(sums + r * nr * 4, panels, block_q * nr * 4, decay)
                                scale_vector(totals + r * lanes * 4, decay)
                        raise_row(row, width, new, totals + r * lanes * 4)
                value_panel = (
                    load_i64(args + VALUE_PACKED)
                    + (value_plane * blocks + block) * full_width * panels * nr * 4
                )
                for v in range(panels):
                    here = value_panel + v * full_width * nr * 4
                    for p in range(row_panels):
                        first, stop = span(args, spans, p, key, count)
                        if stop > 0:
                            at = (grid + (p * mr * block_k + first) * 4, here + first * nr * 4)
                            mix(at[0], at[1], stop - first, sums + (v * block_q + p * mr) * nr * 4)
                if odd:
                    add_odd(args, plane, key, grid, seen, sums, rows)
                block += 1

            output = load_i64(load_i64(args + OUTPUT_TABLE) + 8 * plane) + start * value_dim * 4
            lse = load_i64(load_i64(args + LSE_TABLE) + 8 * plane) + start * 8
            sink = NEG_INF
            if load_i64(args + SINK_TABLE) != 0:
                sink = load_f32(load_i64(args + SINK_TABLE) + 4 * plane)
            for r in range(rows):
                top, total = load_f32(tops + r * 4), fold_total(totals + r * lanes * 4)
                empty = top == NEG_INF and total == ZERO and not sees(args, plane, start + r)
                factor_row, natural = ZERO, -math.inf
                if not empty:
                    peak = numba.float64(top)
                    mass = numba.float64(total)
                    decay = 1.0
                    if sink != NEG_INF:
                        peak = max(peak, numba.float64(sink)) if sink == sink else math.nan
                        decay = math.exp(numba.float64(top) - peak)
                        mass = mass * decay + math.exp(numba.float64(sink) - peak)
                    factor_row = numba.float32(decay / mass)
                    # All scores −inf, yet seen: 0/0. A total of NaN stays NaN.
                    natural = (
                        math.nan if mass == 0.0 else math.log(mass) + (0.0 if peak == -math.inf else peak)
                    )
                store_f64(lse + r * 8, natural)
                for p in range(panels):
                    here = sums + (p * block_q + r) * nr * 4
                    out = output + (r * value_dim + p * nr) * 4
                    if empty:
                        for c in range(min(nr, value_dim - p * nr)):
                            store_f32(out + c * 4, ZERO)
                    elif (p + 1) * nr <= value_dim:
                        finish_row(here, out, factor_row)
                    else:
                        for c in range(value_dim - p * nr):
                            store_f32(out + c * 4, load_f32(here + c * 4) * factor_row)

    return forward
