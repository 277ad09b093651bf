"""The reading kernel: statistics of A given its log-sum-exp, one pass over the scores, nothing stored.

A task is one plane and one group of query blocks; blocks go to groups round robin, so that a causal
mask loads them evenly, and every group sums its columns in a fixed order whatever the threads do.
"""

from __future__ import annotations

import math
from typing import Any

import numba

from ..layout import SLOT
from ..target import Target
from . import rows as row_bodies
from . import scores as shared
from . import tile
from .simd import access, load_f64, load_i64, piece, store_i64, take_ticket

S = SLOT
NEXT_TASK, NEXT_SLOT, TASKS = S["NEXT_TASK"], S["NEXT_SLOT"], S["TASKS"]
SCRATCH, SCRATCH_BYTES = S["SCRATCH"], S["SCRATCH_BYTES"]
QUERIES, KEYS, HEAD_DIM = S["QUERIES"], S["KEYS"], S["HEAD_DIM"]
KEY_BLOCKS, KEY_TABLE = S["KEY_BLOCKS"], S["KEY_TABLE"]
LSE_TABLE, GROUPS = S["LSE_TABLE"], S["GROUPS"]
ROW_OFFSET, STATS_TABLE, RECEIVED = S["ROW_OFFSET"], S["STATS_TABLE"], S["RECEIVED"]
TOP_COUNT, TOP_SCORES_TABLE, TOP_KEYS_TABLE = S["TOP_COUNT"], S["TOP_SCORES_TABLE"], S["TOP_KEYS_TABLE"]


def build(t: Target) -> Any:
    """The reading kernel for a target."""
    rows = row_bodies.emit(t)
    pieces = shared.build(t, tile.emit(t), rows)
    pack_query, ranges, span, score_block = pieces.pack_query, pieces.ranges, pieces.span, pieces.score_block
    any_above, read_row, add_columns = rows.any_above, rows.read_row, rows.add_columns
    fold_total, fold_largest = rows.fold_total, rows.fold_largest
    mr, lanes, block_q, block_k = t.mr, t.lanes, t.block_q, t.block_k
    load, store, _, _, real, size = access(t)
    stride = 4 * lanes
    neg_inf, zero = real(-math.inf), real(0.0)

    @piece
    def keep_best(row: int, width: int, key: int, best: int, keys: int, k: int) -> None:
        """Insert the scores of a row into its k best, largest first; an equal score stays behind the earlier key."""
        for c in range(0, width, 4 * lanes):
            if any_above(row + c * size, load(best + (k - 1) * size)) == 0:
                continue
            for j in range(c, c + 4 * lanes):
                x = load(row + j * size)
                if x > load(best + (k - 1) * size):
                    at = k - 1
                    while at > 0 and x > load(best + (at - 1) * size):
                        store(best + at * size, load(best + (at - 1) * size))
                        store_i64(keys + at * 8, load_i64(keys + (at - 1) * 8))
                        at -= 1
                    store(best + at * size, x)
                    store_i64(keys + at * 8, key + j)

    def read(args: int) -> None:
        tasks, queries, keys = load_i64(args + TASKS), load_i64(args + QUERIES), load_i64(args + KEYS)
        dim, k, groups = load_i64(args + HEAD_DIM), load_i64(args + TOP_COUNT), load_i64(args + GROUPS)
        received, offset = load_i64(args + RECEIVED), load_i64(args + ROW_OFFSET)
        line = load_i64(args + KEY_BLOCKS) * block_k  # floats of one group's column sums
        query_blocks = (queries + block_q - 1) // block_q

        slot = take_ticket(args + NEXT_SLOT)
        packed = load_i64(args + SCRATCH) + slot * load_i64(args + SCRATCH_BYTES)
        grid = packed + block_q * dim * size
        stats = grid + block_q * block_k * size
        spans = stats + block_q * 4 * lanes * size

        while True:
            task = take_ticket(args + NEXT_TASK)
            if task >= tasks:
                break
            plane, group = task // groups, task % groups
            key_plane = load_i64(load_i64(args + KEY_TABLE) + 8 * plane)
            for query_block in range(group, query_blocks, groups):
                start = query_block * block_q
                rows = min(block_q, queries - start)
                row_panels = (rows + mr - 1) // mr
                low, high = ranges(args, plane, start, rows, spans)
                pack_query(args, plane, start, rows, row_panels * mr, packed)
                for r in range(rows):
                    for c in range(2 * lanes):
                        store(stats + (r * 4 * lanes + c) * size, zero)
                    for c in range(lanes):
                        store(stats + (r * 4 * lanes + 2 * lanes + c) * size, zero)
                        store(stats + (r * 4 * lanes + 3 * lanes + c) * size, neg_inf)
                lse = load_i64(load_i64(args + LSE_TABLE) + 8 * plane) + start * 8
                best, best_keys = 0, 0
                if k > 0:
                    best = load_i64(load_i64(args + TOP_SCORES_TABLE) + 8 * plane) + start * k * size
                    best_keys = load_i64(load_i64(args + TOP_KEYS_TABLE) + 8 * plane) + start * k * 8
                block = low // block_k
                while block * block_k < high:
                    key = block * block_k
                    count = min(block_k, keys - key)
                    score_block(args, plane, start, rows, packed, block, spans, grid, 0, key_plane)
                    for p in range(row_panels):
                        first, stop = span(args, spans, p, key, count)
                        if stop == 0:
                            continue
                        left = first // stride * stride
                        width = (stop + stride - 1) // stride * stride - left
                        after = min(rows, (p + 1) * mr)
                        for r in range(p * mr, after):
                            row = grid + (r * block_k + left) * size
                            if k > 0:
                                keep_best(
                                    row, width, key + left, best + r * k * size, best_keys + r * k * 8, k
                                )
                            own = real(offset + start + r - key - left)
                            # In two parts: rounded to float32 alone, the lse would cost every weight its last digits.
                            exact = load_f64(lse + r * 8)
                            whole = real(exact)
                            rest = real(exact - numba.float64(whole)) if exact != -math.inf else zero
                            read_row(row, width, whole, rest, own, stats + r * 4 * lanes * size)
                        if received != 0:
                            out = received + ((plane * groups + group) * line + key + left) * size
                            for c in range(0, width, stride):
                                here = grid + (p * mr * block_k + left + c) * size
                                add_columns(here, after - p * mr, out + c * size)
                    block += 1
                out = load_i64(load_i64(args + STATS_TABLE) + 8 * plane) + start * 4 * size
                for r in range(rows):
                    here = stats + r * 4 * lanes * size
                    store(out + r * 4 * size, fold_total(here))
                    store(out + (r * 4 + 1) * size, fold_total(here + lanes * size))
                    store(out + (r * 4 + 2) * size, fold_largest(here + 2 * lanes * size))
                    store(out + (r * 4 + 3) * size, fold_largest(here + 3 * lanes * size))

    return read
