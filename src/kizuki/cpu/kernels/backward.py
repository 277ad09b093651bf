"""The backward kernel: the gradients of query, key and value, one unit and one group of key blocks a task.

A unit is the planes that share their keys and values. For a key block, every query block of the unit passes
by: scores and weights are computed again from the lse, then (Dao et al. 2022, section 3.1)

    dV += Pᵀ dO    dP = dO Vᵀ    dS = P ∘ (dP − rowsum(dO ∘ O))    dK += dSᵀ Q    dQ += dS K

Five products where the forward has two. Each sum is taken in one order, by one thread: the groups of key
blocks depend on the number of keys alone, and each keeps its own dQ.
"""

from __future__ import annotations

import math
from typing import Any

import numba

from ..layout import SLOT
from ..sizes import key_rows
from ..target import Target
from . import rows as row_bodies
from . import scores as shared
from . import softmax, tile
from .scalar import access, load_f64, load_i64, piece, take_ticket

S = SLOT
NEXT_TASK, NEXT_SLOT, TASKS = S["NEXT_TASK"], S["NEXT_SLOT"], S["TASKS"]
SCRATCH, SCRATCH_BYTES = S["SCRATCH"], S["SCRATCH_BYTES"]
QUERIES, KEYS, HEAD_DIM, VALUE_DIM = S["QUERIES"], S["KEYS"], S["HEAD_DIM"], S["VALUE_DIM"]
KEY_BLOCKS, KEY_WIDTH, VALUE_PANELS = S["KEY_BLOCKS"], S["KEY_WIDTH"], S["VALUE_PANELS"]
KEY_TABLE, KEY_COLUMNS, VALUE_TABLE, VALUE_KEYS = (
    S["KEY_TABLE"],
    S["KEY_COLUMNS"],
    S["VALUE_TABLE"],
    S["VALUE_KEYS"],
)
GROUP, KEY_GROUPS, QUERY_BLOCKS = S["GROUP"], S["KEY_GROUPS"], S["QUERY_BLOCKS"]
QUERY_ROWS, QUERY_COLUMNS = S["QUERY_ROWS"], S["QUERY_COLUMNS"]
GRAD_ROWS, GRAD_COLUMNS = S["GRAD_ROWS"], S["GRAD_COLUMNS"]
LSE_TABLE, DELTA_TABLE = S["LSE_TABLE"], S["DELTA_TABLE"]
UNITS, TOGETHER = S["UNITS"], S["TOGETHER"]
D_BIAS_TABLE, D_BIAS_ROW, D_BIAS_COL = S["D_BIAS_TABLE"], S["D_BIAS_ROW"], S["D_BIAS_COL"]
D_QUERY, D_KEY, D_VALUE = S["D_QUERY"], S["D_KEY"], S["D_VALUE"]
SCALE, SOFTCAP, SCORE_FN, DROPOUT = S["SCALE"], S["SOFTCAP"], S["SCORE_FN"], S["DROPOUT"]


def build(t: Target) -> Any:
    """The backward kernel for a target."""
    products, rows = tile.emit(t), row_bodies.emit(t)
    pieces, ends = shared.build(t, products, rows), softmax.build(t, rows)
    ranges, span, score_block, drop = pieces.ranges, pieces.span, pieces.score_block, ends.drop
    scores, mix_apart, mix_turned = products.scores, products.mix_apart, products.mix_turned
    weigh_row, bend_row = rows.weigh_row, rows.bend_row
    scale_panel = rows.scale_panel[0]
    load, store, _, _, real, size = access(t)
    mr, nr, lanes, block_q, block_k = t.mr, t.nr, t.lanes, t.block_q, t.block_k
    stride = 4 * lanes
    tall = key_rows(t)
    zero, one = real(0.0), real(1.0)

    @piece
    def clear(at: int, stop: int) -> None:
        for place in range(at, stop, size):
            store(place, zero)

    @piece
    def add_to_bias(args: int, bias: int, query: int, key: int, count: int, grad: int) -> None:
        """Add the dS of a row where its bias came from; an axis that the bias broadcasts has stride 0."""
        step = load_i64(args + D_BIAS_COL)
        out = bias + query * load_i64(args + D_BIAS_ROW) + key * step
        if step == 0:
            total = zero
            for c in range(count):
                total += load(grad + c * size)
            store(out, load(out) + total)
        elif step == size:
            for c in range(count):
                store(out + c * size, load(out + c * size) + load(grad + c * size))
        else:
            for c in range(count):
                store(out + c * step, load(out + c * step) + load(grad + c * size))

    @piece
    def weigh_block(
        args: int,
        plane: int,
        start: int,
        rows: int,
        key: int,
        count: int,
        spans: int,
        grid: int,
        grads: int,
        slopes: int,
        bias: int,
    ) -> None:
        """Scores and dP of a block to P (in `grid`) and dS (in `grads`), 0 wherever a row sees nothing."""
        lse = load_i64(load_i64(args + LSE_TABLE) + 8 * plane) + start * 8
        delta = load_i64(load_i64(args + DELTA_TABLE) + 8 * plane) + start * size
        dropped = load_i64(args + DROPOUT) != 0
        for p in range((rows + mr - 1) // mr):
            first, stop = span(args, spans, p, key, count)
            left = first // stride * stride
            width = (stop + stride - 1) // stride * stride - left
            for r in range(p * mr, min(rows, (p + 1) * mr)):
                row, grad = grid + r * block_k * size, grads + r * block_k * size
                for at in (row, grad):
                    clear(at, at + left * size)
                    clear(at + (left + width) * size, at + block_k * size)
                if width == 0:
                    continue
                # In two parts: rounded to float32 alone, the lse would cost every weight its last digits.
                exact = load_f64(lse + r * 8)
                if exact == -math.inf:
                    exact = 0.0  # a row that sees nothing: −inf − 0 stays absent
                whole = real(exact)
                rest = real(exact - numba.float64(whole))
                here, there = row + left * size, grad + left * size
                if dropped:
                    drop(args, plane, start + r, key + left, width, there)
                weigh_row(here, width, whole, rest, load(delta + r * size), there)
                if bias != 0:
                    add_to_bias(args, bias, start + r, key + left, min(width, count - left), there)
                if slopes != 0:
                    bend_row(there, width, slopes + (r * block_k + left) * size)
                if dropped:
                    drop(args, plane, start + r, key + left, width, here)

    @piece
    def rows_seeing(args: int, spans: int, rows: int, key: int, count: int, c: int) -> tuple[int, int]:
        """The query rows, in panels, of which some sees one of the keys c … c + mr of the block."""
        low, high = rows, 0
        for p in range((rows + mr - 1) // mr):
            first, stop = span(args, spans, p, key, count)
            if first < c + mr and c < stop:
                low, high = min(low, p * mr), min(rows, (p + 1) * mr)
        return low, high

    @piece
    def add_turned(left: int, right: int, steps: int, sums: int, panels: int) -> None:
        """mr keys of a block: the columns at `left` times a query block's columns, into every panel of `sums`."""
        for v in range(panels):
            mix_turned(left, right + v * block_q * nr * size, steps, sums + v * tall * nr * size)

    @piece
    def put(sums: int, panels: int, dim: int, count: int, factor: float, out: int) -> None:
        """`count` rows of an accumulator × factor to a contiguous `[count][dim]`."""
        for p in range(panels):
            full = min(nr, dim - p * nr)
            for c in range(count):
                here, there = sums + (p * tall + c) * nr * size, out + (c * dim + p * nr) * size
                if full == nr:
                    scale_panel(here, there, factor)
                else:
                    for d in range(full):
                        store(there + d * size, load(here + d * size) * factor)

    def backward(args: int) -> None:
        tasks, queries, keys = load_i64(args + TASKS), load_i64(args + QUERIES), load_i64(args + KEYS)
        dim, value_dim, value_panels = (
            load_i64(args + HEAD_DIM),
            load_i64(args + VALUE_DIM),
            load_i64(args + VALUE_PANELS),
        )
        panels = (dim + nr - 1) // nr
        blocks, full_width = load_i64(args + KEY_BLOCKS), load_i64(args + KEY_WIDTH)
        group, groups, query_blocks = (
            load_i64(args + GROUP),
            load_i64(args + KEY_GROUPS),
            load_i64(args + QUERY_BLOCKS),
        )
        d_query, d_key, d_value = load_i64(args + D_QUERY), load_i64(args + D_KEY), load_i64(args + D_VALUE)
        # Where only Pᵀ dO is wanted (A.T @ y), dP is not computed, and what stands in its grid is not read.
        sloped = d_query != 0 or d_key != 0 or load_i64(args + D_BIAS_TABLE) != 0
        bent = load_f64(args + SOFTCAP) > 0 or load_i64(args + SCORE_FN) != 0
        filled = load_i64(args + SCORE_FN) != 0 and not load_f64(args + SOFTCAP) > 0

        slot = take_ticket(args + NEXT_SLOT)
        grid = load_i64(args + SCRATCH) + slot * load_i64(args + SCRATCH_BYTES)
        grid_bytes = (block_q + 1) * block_k * size
        grads = grid + grid_bytes
        slopes = grads + grid_bytes if bent else 0
        key_sums = grads + (2 if bent else 1) * grid_bytes
        value_sums = key_sums + tall * panels * nr * size
        spans = value_sums + tall * value_panels * nr * size
        clear(grid, spans)

        while True:
            task = take_ticket(args + NEXT_TASK)
            if task >= tasks:
                break
            first_unit, own = task // groups, task % groups
            last_unit = first_unit + 1
            if load_i64(args + TOGETHER) != 0:
                first_unit, last_unit = 0, load_i64(args + UNITS)
            for unit in range(first_unit, last_unit):
                for block in range(own, blocks, groups):
                    key = block * block_k
                    count = min(block_k, keys - key)
                    clear(key_sums, spans)
                    for plane in range(unit * group, (unit + 1) * group):
                        key_plane = load_i64(load_i64(args + KEY_TABLE) + 8 * plane)
                        key_place = key_plane * blocks + block
                        value_place = load_i64(load_i64(args + VALUE_TABLE) + 8 * plane) * blocks + block
                        key_columns = (
                            load_i64(args + KEY_COLUMNS) + key_place * full_width * panels * nr * size
                        )
                        value_keys = load_i64(args + VALUE_KEYS) + value_place * full_width * value_dim * size
                        for query_block in range(query_blocks):
                            start = query_block * block_q
                            rows = min(block_q, queries - start)
                            row_panels = (rows + mr - 1) // mr
                            low, high = ranges(args, plane, start, rows, spans)
                            if low >= key + count or high <= key:
                                continue
                            place = plane * query_blocks + query_block
                            query_rows = load_i64(args + QUERY_ROWS) + place * block_q * dim * size
                            grad_rows = load_i64(args + GRAD_ROWS) + place * block_q * value_dim * size
                            bias = load_i64(args + D_BIAS_TABLE)
                            if bias != 0:
                                bias = load_i64(bias + 8 * (plane * groups + own))
                            if filled:
                                for at in range(rows * block_k):
                                    store(slopes + at * size, one)
                            score_block(
                                args, plane, start, rows, query_rows, block, spans, grid, slopes, key_place
                            )
                            for c in range(0, min(full_width, count) if sloped else 0, nr):
                                for p in range(row_panels):
                                    first, stop = span(args, spans, p, key, count)
                                    if first < c + nr and c < stop:
                                        scores(
                                            grad_rows + p * mr * value_dim * size,
                                            value_keys + c * value_dim * size,
                                            value_dim,
                                            grads + (p * mr * block_k + c) * size,
                                        )
                            weigh_block(
                                args, plane, start, rows, key, count, spans, grid, grads, slopes, bias
                            )
                            grad_columns = load_i64(args + GRAD_COLUMNS)
                            grad_columns += place * block_q * value_panels * nr * size
                            query_columns = (
                                load_i64(args + QUERY_COLUMNS) + place * block_q * panels * nr * size
                            )
                            for c in range(0, count, mr):
                                top, end = rows_seeing(args, spans, rows, key, count, c)
                                if end <= top:
                                    continue
                                at, steps = (top * block_k + c) * size, end - top
                                if d_value != 0:
                                    right = grad_columns + top * nr * size
                                    add_turned(
                                        grid + at, right, steps, value_sums + c * nr * size, value_panels
                                    )
                                if d_key != 0:
                                    right = query_columns + top * nr * size
                                    add_turned(grads + at, right, steps, key_sums + c * nr * size, panels)
                            if d_query != 0:
                                out = d_query + ((plane * groups + own) * query_blocks + query_block) * (
                                    panels * block_q * nr * size
                                )
                                for v in range(panels):
                                    for p in range(row_panels):
                                        first, stop = span(args, spans, p, key, count)
                                        if stop > 0:
                                            mix_apart(
                                                grads + (p * mr * block_k + first) * size,
                                                key_columns + (v * full_width + first) * nr * size,
                                                stop - first,
                                                out + (v * block_q + p * mr) * nr * size,
                                            )
                    if d_key != 0:
                        out = d_key + (unit * keys + key) * dim * size
                        put(key_sums, panels, dim, count, real(load_f64(args + SCALE)), out)
                    if d_value != 0:
                        out = d_value + (unit * keys + key) * value_dim * size
                        put(value_sums, value_panels, value_dim, count, one, out)

    return backward
