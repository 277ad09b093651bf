"""The decoder: few queries, many keys, so that reading the keys and values once is the whole cost.

Nothing is packed. Keys and values are read where they lie, 16-bit ones as they are, once for all the
query rows that share them (the heads of a group). A square of keys is transposed in registers, so that
a row's score is the same sum in the same order as in the forward kernel: the same bits.
Tasks are the splits of the keys; the thread that finishes a unit's last split joins them in order.
"""

from __future__ import annotations

import math
from typing import Any

import numba

from ..layout import SLOT
from ..sizes import BFLOAT16, PLAIN
from ..target import SPLIT, Target
from . import few as few_products
from . import rows as row_bodies
from . import scores as shared
from . import softmax, tile
from .pack import ALL_ONES
from .scalar import (
    access,
    fma_one,
    load_i64,
    load_u8,
    load_u16,
    piece,
    store_f64,
    store_i64,
    store_u16,
    take_last,
    take_ticket,
)

S = SLOT
NEXT_TASK, NEXT_SLOT, TASKS = S["NEXT_TASK"], S["NEXT_SLOT"], S["TASKS"]
SCRATCH, SCRATCH_BYTES = S["SCRATCH"], S["SCRATCH_BYTES"]
KIND, VALUE_KIND, OUT_KIND = S["KIND"], S["VALUE_KIND"], S["OUT_KIND"]
QUERIES, KEYS, HEAD_DIM, VALUE_DIM = S["QUERIES"], S["KEYS"], S["HEAD_DIM"], S["VALUE_DIM"]
VALUE_PANELS, GROUP, SPLITS = S["VALUE_PANELS"], S["GROUP"], S["SPLITS"]
PARTIAL, PARTIAL_BYTES, FINISHED = S["PARTIAL"], S["PARTIAL_BYTES"], S["FINISHED"]
KEY_TABLE, KEY_SOURCE, KEY_ROW, KEY_PAGE = S["KEY_TABLE"], S["KEY_SOURCE"], S["KEY_ROW"], S["KEY_PAGE"]
VALUE_TABLE, VALUE_SOURCE, VALUE_ROW = S["VALUE_TABLE"], S["VALUE_SOURCE"], S["VALUE_ROW"]
VALUE_PAGE, PAGES_TABLE, PAGE_KEYS = S["VALUE_PAGE"], S["PAGES_TABLE"], S["PAGE_KEYS"]
FIRST_TABLE, STOP_TABLE = S["FIRST_TABLE"], S["STOP_TABLE"]
MASK_TABLE, BIAS_TABLE, MASK_FN, SCORE_FN = S["MASK_TABLE"], S["BIAS_TABLE"], S["MASK_FN"], S["SCORE_FN"]
OUTPUT_TABLE, LSE_TABLE = S["OUTPUT_TABLE"], S["LSE_TABLE"]
STATS_TABLE, SCORES_TABLE = S["STATS_TABLE"], S["SCORES_TABLE"]


def build(t: Target) -> Any:
    """The decoding kernel for a target."""
    products, rows = tile.emit(t), row_bodies.emit(t)
    pieces, ends = shared.build(t, products, rows), softmax.build(t, rows)
    factor_of, narrow_row = pieces.factor_of, rows.narrow_row
    pack_query, shape_row, shapes_rows, sees = (
        pieces.pack_query,
        pieces.shape_row,
        pieces.shapes_rows,
        pieces.sees,
    )
    join, finish, drop, note_seen = ends.join, ends.finish, ends.drop, ends.note_seen
    normaliser, note_scores, weigh_noted = ends.normaliser, ends.note_scores, ends.weigh_noted
    row_max, raise_row, fold_total = rows.row_max, rows.raise_row, rows.fold_total
    scale_row, scale_vector, exp_one = rows.scale_row, rows.scale_vector, rows.exp_one
    dots, mix = few_products.build(t)
    load, store, load_kind, _, real, size = access(t)
    nr, lanes, block_k, few = t.nr, t.lanes, t.block_k, t.few
    stride, pairs = 4 * lanes, t.pairs
    neg_inf, zero = real(-math.inf), real(0.0)

    @piece
    def end_of(count: int) -> int:
        """`count` columns rounded up to what the row bodies step by."""
        return (count + stride - 1) // stride * stride

    @piece
    def locate(
        args: int, plane: int, source: int, row: int, page: int, key: int, count: int, out: int
    ) -> None:
        """The addresses of `count` keys from `key` on into a table of block_k; the rest repeat the first."""
        pages = load_i64(args + PAGES_TABLE)
        if pages == 0:
            for c in range(count):
                store_i64(out + c * 8, source + (key + c) * row)
        else:
            pages, each = load_i64(pages + 8 * plane), load_i64(args + PAGE_KEYS)
            for c in range(count):
                j = key + c
                store_i64(out + c * 8, source + load_i64(pages + j // each * 8) * page + j % each * row)
        first = load_i64(out)
        for c in range(count, block_k):
            store_i64(out + c * 8, first)

    @piece
    def straight(addresses: int, count: int, row: int) -> bool:
        """Whether a block's rows lie one after the other, `row` bytes apart."""
        return load_i64(addresses + (count - 1) * 8) - load_i64(addresses) == (count - 1) * row

    @piece
    def any_odd(addresses: int, count: int, dim: int, kind: int, width: int) -> bool:
        """Whether a value of the block is NaN or infinite."""
        total = zero
        for c in range(count):
            here = load_i64(addresses + c * 8)
            for d in range(dim):
                x = load_kind(here + d * width, kind)
                total += x - x
        return total != total

    @piece
    def mix_seen(
        addresses: int,
        grid: int,
        seen: int,
        rows: int,
        count: int,
        dim: int,
        kind: int,
        width: int,
        sums: int,
        row: int,
    ) -> None:
        """As `mix`, one number at a time, passing over values that the row does not see."""
        for r in range(rows):
            for c in range(count):
                if load_u8(seen + r * block_k + c) != 0:
                    here, weight = load_i64(addresses + c * 8), load(grid + (r * block_k + c) * size)
                    for d in range(dim):
                        at = sums + (r * row + d) * size
                        store(at, fma_one(weight, load_kind(here + d * width, kind), load(at)))

    @piece
    def clean(addresses: int, count: int, dim: int, table: int) -> None:
        """A copy of a block's values with 0 for NaN and infinite ones, and the addresses of its rows at `table`."""
        copy = table + block_k * 8
        for c in range(count):
            here, there = load_i64(addresses + c * 8), copy + c * dim * 2
            store_i64(table + c * 8, there)
            for d in range(dim):
                bits = load_u16(here + d * 2)
                store_u16(there + d * 2, bits if bits & ALL_ONES != ALL_ONES else numba.uint16(0))

    @piece
    def add_odd(
        addresses: int, grid: int, seen: int, rows: int, count: int, dim: int, sums: int, row: int
    ) -> None:
        """Weight · value for the values that `clean` left out, only to the rows that see the key."""
        for c in range(count):
            here = load_i64(addresses + c * 8)
            for d in range(dim):
                x = load_kind(here + d * 2, BFLOAT16)
                if x - x != zero:
                    for r in range(rows):
                        if load_u8(seen + r * block_k + c) != 0:
                            at = sums + (r * row + d) * size
                            store(at, load(at) + load(grid + (r * block_k + c) * size) * x)

    def decode(args: int) -> None:
        tasks, queries, keys = load_i64(args + TASKS), load_i64(args + QUERIES), load_i64(args + KEYS)
        dim, value_dim, panels = (
            load_i64(args + HEAD_DIM),
            load_i64(args + VALUE_DIM),
            load_i64(args + VALUE_PANELS),
        )
        group, splits, factor = load_i64(args + GROUP), load_i64(args + SPLITS), factor_of(args)
        kind, value_kind = load_i64(args + KIND), load_i64(args + VALUE_KIND)
        value_size = size if value_kind == PLAIN else 2
        out_size = size if load_i64(args + OUT_KIND) == PLAIN else 2
        key_row, value_row = load_i64(args + KEY_ROW), load_i64(args + VALUE_ROW)
        # Rows one after the other; of a cache in pages, those blocks that lie within one page.
        key_rows_touch = key_row == dim * (size if kind == PLAIN else 2)
        value_rows_touch = value_row == value_dim * value_size
        partial, partial_size = load_i64(args + PARTIAL), load_i64(args + PARTIAL_BYTES)
        rows = group * queries
        whole = rows if rows == 1 else (rows + few - 1) // few * few
        row_size = panels * nr  # numbers of a row of an accumulator
        firsts, noted = load_i64(args + FIRST_TABLE), load_i64(args + SCORES_TABLE) != 0
        shaped = (
            load_i64(args + MASK_TABLE) != 0
            or load_i64(args + BIAS_TABLE) != 0
            or load_i64(args + MASK_FN) != 0
            or load_i64(args + SCORE_FN) != 0
        )

        slot = take_ticket(args + NEXT_SLOT)
        packed = load_i64(args + SCRATCH) + slot * load_i64(args + SCRATCH_BYTES)
        grid = packed + whole * dim * size
        totals = grid + whole * block_k * size
        tops = totals + whole * lanes * size
        key_at = (
            (tops + whole * size + 7) // 8 * 8
        )  # addresses of this block's keys, the next one's, its values
        next_at = key_at + block_k * 8
        value_at = next_at + block_k * 8
        seen = value_at + block_k * 8

        while True:
            task = take_ticket(args + NEXT_TASK)
            if task >= tasks:
                break
            unit, split = task // splits, task % splits
            lead = unit * group  # the first plane
            states = partial + task * partial_size
            sums = states + 2 * whole * size
            for r in range(whole):
                store(tops + r * size, neg_inf)
                for c in range(lanes):
                    store(totals + (r * lanes + c) * size, zero)
                for c in range(row_size):
                    store(sums + (r * row_size + c) * size, zero)
            low, high = keys, 0
            for r in range(rows):
                plane, query = lead + r // queries, r % queries
                pack_query(args, plane, query, 1, 1, packed + r * dim * size)
                a, z = 0, keys
                if firsts != 0:
                    a = load_i64(load_i64(firsts + 8 * plane) + 8 * query)
                    z = load_i64(load_i64(load_i64(args + STOP_TABLE) + 8 * plane) + 8 * query)
                if z > a:
                    low, high = min(low, a), max(high, z)
            for at in range(rows * dim, whole * dim):
                store(packed + at * size, zero)
            key_source = load_i64(
                load_i64(args + KEY_SOURCE) + 8 * load_i64(load_i64(args + KEY_TABLE) + 8 * lead)
            )
            value_source = load_i64(
                load_i64(args + VALUE_SOURCE) + 8 * load_i64(load_i64(args + VALUE_TABLE) + 8 * lead)
            )
            key = max(split * SPLIT * block_k, low // block_k * block_k)
            end = min((split + 1) * SPLIT * block_k, high)
            if key < end:
                count = min(block_k, keys - key)
                locate(args, lead, key_source, key_row, load_i64(args + KEY_PAGE), key, count, key_at)
            while key < end:
                count = min(block_k, keys - key)
                after = min(block_k, end - key - block_k)
                if after > 0:
                    locate(
                        args,
                        lead,
                        key_source,
                        key_row,
                        load_i64(args + KEY_PAGE),
                        key + block_k,
                        after,
                        next_at,
                    )
                if panels > 0:
                    locate(
                        args, lead, value_source, value_row, load_i64(args + VALUE_PAGE), key, count, value_at
                    )
                columns = (count + lanes - 1) // lanes * lanes
                after_keys, values_dense = next_at, 0  # what to ask for when the keys come to an end
                if panels > 0:
                    after_keys = value_at
                    values_dense = 1 if value_rows_touch and straight(value_at, count, value_row) else 0
                whole_block = (
                    count == block_k
                )  # a step reads keys by squares, and must not read past the last
                keys_dense = 1 if key_rows_touch and whole_block and straight(key_at, count, key_row) else 0
                next_dense = 1 if key_rows_touch and after > 0 and straight(next_at, after, key_row) else 0
                dots(
                    kind,
                    key_at,
                    packed,
                    whole,
                    dim,
                    columns,
                    grid,
                    keys_dense,
                    after_keys,
                    values_dense if panels > 0 else next_dense,
                    numba.float32(factor),
                )
                hides = shaped
                if firsts != 0:
                    for r in range(rows):
                        plane, query = lead + r // queries, r % queries
                        hides = hides or load_i64(load_i64(firsts + 8 * plane) + 8 * query) > key
                        table = load_i64(args + STOP_TABLE)
                        hides = hides or load_i64(load_i64(table + 8 * plane) + 8 * query) < key + count
                for r in range(rows):
                    plane, query, row = lead + r // queries, r % queries, grid + r * block_k * size
                    first, stop = 0, count
                    if firsts != 0:
                        first = max(0, load_i64(load_i64(firsts + 8 * plane) + 8 * query) - key)
                        table = load_i64(args + STOP_TABLE)
                        stop = min(count, load_i64(load_i64(table + 8 * plane) + 8 * query) - key)
                        if stop <= first:
                            first, stop = 0, 0
                    left = first // stride * stride
                    width = (stop + stride - 1) // stride * stride - left
                    if stop > 0 and shapes_rows(args, count):
                        shape_row(args, plane, query, key, first, stop, row, 0)
                    if hides:
                        note_seen(row, seen + r * block_k, first, stop)
                    if noted and stop > 0:
                        note_scores(args, plane, query, key, first, stop, row)
                    if stop > 0:
                        old = load(tops + r * size)
                        new = row_max(row + left * size, width, old)
                        if new != old:
                            store(tops + r * size, new)
                            if old != neg_inf:
                                decay = exp_one(old - new)
                                if panels > 0:
                                    scale_row(sums + r * row_size * size, panels, nr * size, decay)
                                scale_vector(totals + r * lanes * size, decay)
                        raise_row(row + left * size, width, new, totals + r * lanes * size)
                        drop(args, plane, query, key + left, width, row + left * size)
                    for c in range(left):
                        store(row + c * size, zero)
                    for c in range(left + width, end_of(count) if pairs else count):
                        store(row + c * size, zero)
                if panels > 0:
                    odd = hides and any_odd(value_at, count, value_dim, value_kind, value_size)
                    source = value_at
                    if pairs:
                        if odd:
                            source = seen + whole * block_k
                            clean(value_at, count, value_dim, source)
                            add_odd(value_at, grid, seen, rows, count, value_dim, sums, row_size)
                        for r in range(whole):
                            narrow_row(grid + r * block_k * size, 0, end_of(count))
                    if odd and not pairs:
                        mix_seen(
                            value_at,
                            grid,
                            seen,
                            rows,
                            count,
                            value_dim,
                            value_kind,
                            value_size,
                            sums,
                            row_size,
                        )
                    else:
                        mix(
                            value_kind,
                            source,
                            grid,
                            whole,
                            count,
                            value_dim,
                            sums,
                            row_size,
                            values_dense,
                            next_at if after > 0 else key_at,
                            next_dense,
                        )
                key_at, next_at = next_at, key_at
                key += block_k
            for r in range(rows):
                store(states + 2 * r * size, load(tops + r * size))
                store(states + (2 * r + 1) * size, fold_total(totals + r * lanes * size))

            if take_last(load_i64(args + FINISHED) + 8 * unit) < splits - 1:
                continue
            # The last of the unit's splits: join them in order, whoever computed them.
            states = partial + unit * splits * partial_size
            sums = states + 2 * whole * size
            for r in range(rows):
                plane, query = lead + r // queries, r % queries
                state, here = states + 2 * r * size, sums + r * row_size * size
                for s in range(1, splits):
                    far = s * partial_size
                    join(state, state + far, here, here + far, panels, nr * size)
                top, total = load(state), load(state + size)
                empty = top == neg_inf and total == zero and not sees(args, plane, query, grid)
                out = load_i64(load_i64(args + OUTPUT_TABLE) + 8 * plane) + query * value_dim * out_size
                lses = load_i64(args + LSE_TABLE)
                lse = load_i64(lses + 8 * plane) + query * 8 if lses != 0 else 0
                finish(args, plane, top, total, empty, here, nr * size, out, lse)
                if noted:
                    stats = load_i64(load_i64(args + STATS_TABLE) + 8 * plane) + query * 32
                    store_f64(stats, numba.float64(top))
                    norm = normaliser(args, plane, top, total, empty)
                    store_f64(stats + 8, norm)
                    weigh_noted(args, plane, query, top, norm)

    return decode
