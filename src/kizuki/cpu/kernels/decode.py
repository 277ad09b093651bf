"""The decoder: few queries, many keys, so that reading the keys and values once is the whole cost.

Nothing is packed. Keys and values are read where they lie, 16-bit ones as they are, once for all the
query rows that share them (the heads of a group). A square of keys is transposed in registers, so that
a row's score is the same sum in the same order as in the forward kernel: the same bits.
Tasks are the splits of the keys; the thread that finishes a unit's last split joins them in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..layout import SLOT
from ..sizes import BFLOAT16, PLAIN, step_of
from ..target import SPLIT, Target
from . import rows as row_bodies
from . import scores as shared
from . import softmax, tile
from .pack import ALL_ONES
from .simd import (
    I64,
    Emit,
    access,
    fma_one,
    load_i64,
    load_u8,
    load_u16,
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


def _entry(e: Emit, table: ir.Value, index: ir.Value) -> ir.Value:
    """An address out of a table."""
    address = e.b.load(e.b.gep(table, [index]))
    address.align = 8
    return address


def _pairs(e: Emit, keys: list[ir.Value]) -> list[ir.Value]:
    """The next pairs of bfloat16 dimensions of a square of keys, a vector of words over the keys for each."""
    rows = [e.load(e.pointer(k)) for k in keys]
    for row in rows:
        row.align = 2  # what a bfloat16 is aligned to
    return [e.b.bitcast(pair, e.ints) for pair in e.transpose(rows)]


def _columns(e: Emit, keys: list[ir.Value], kind: int) -> list[ir.Value]:
    """The next dimensions of a square of keys, a vector over the keys for each.

    bfloat16 pairs are turned as whole 32-bit words and taken apart afterwards: half the exchanges.
    """
    if kind != BFLOAT16:
        return e.transpose([e.load_kind(k, kind) for k in keys])
    b, columns = e.b, []
    for bits in _pairs(e, keys):
        columns.append(b.bitcast(b.shl(bits, e.const_int(16)), e.vec))
        columns.append(b.bitcast(b.and_(bits, e.const_int(0xFFFF0000)), e.vec))
    return columns


def _bodies(t: Target) -> Any:
    def dots_for(kind: int, rows: int, squares: int) -> Any:
        """Scores of `rows` queries on `squares` squares of `lanes` keys each."""
        size = t.size if kind == PLAIN else 2

        @intrinsic
        def dots(
            typingctx: Any,
            addresses: Any,
            queries: Any,
            dim: Any,
            out: Any,
            ahead: Any,
            dense: Any,
            factor: Any,
        ) -> Any:
            """out[rows][squares·lanes] = queries · keys, the keys at the addresses in a table; dim ≡ 0 mod step_of.

            `factor` multiplies the products of pairs; else the queries have it in them.
            Meanwhile what is at the addresses in the table `ahead` is asked for, a few lines a step: a processor drops
            prefetches that come faster than memory. Where those rows are `dense`, one after the other, in the
            order of memory, which its own prefetcher then follows.
            """

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                e = Emit(builder, t)
                table = builder.inttoptr(args[0], I64.as_pointer())
                keys = [_entry(e, table, ir.Constant(I64, n)) for n in range(squares * t.lanes)]
                later = builder.inttoptr(args[4], I64.as_pointer())
                dense = builder.icmp_signed("!=", args[5], ir.Constant(I64, 0))
                q, out = e.pointer(args[1]), e.pointer(args[3])
                lines = [e.at(q, builder.mul(args[2], ir.Constant(I64, r))) for r in range(rows)]
                factor = e.splat(args[6]) if t.pairs else None

                def body(d: ir.Value, acc: list[ir.Value]) -> list[ir.Value]:
                    step = builder.mul(d, ir.Constant(I64, size))
                    acc, columns = list(acc), []
                    for n in range(0, squares * t.lanes * step_of(t, kind) * size, 64):
                        far = builder.add(
                            builder.mul(step, ir.Constant(I64, squares * t.lanes)), ir.Constant(I64, n)
                        )
                        straight = builder.add(_entry(e, later, ir.Constant(I64, 0)), far)
                        own = ir.Constant(I64, n // 64 % (squares * t.lanes))
                        apart = builder.add(_entry(e, later, own), step)
                        e.prefetch(builder.select(dense, straight, apart))
                    for n in range(squares):
                        own = keys[n * t.lanes : (n + 1) * t.lanes]
                        own = [builder.add(k, step) for k in own]
                        columns.append(_pairs(e, own) if t.pairs else _columns(e, own, kind))
                    place = builder.lshr(d, ir.Constant(I64, 1)) if t.pairs else d
                    for c in range(len(columns[0])):
                        for r in range(rows):
                            x = e.broadcast(e.at(lines[r], place), c)
                            for n in range(squares):
                                at = r * squares + n
                                if t.pairs:
                                    acc[at] = e.dot(builder.bitcast(x, e.ints), columns[n][c], acc[at], t.dot)
                                else:
                                    acc[at] = e.fma(x, columns[n][c], acc[at])
                    return acc

                sums = e.loop(args[2], step_of(t, kind), [e.const(0.0)] * (rows * squares), body)
                for r in range(rows):
                    for n in range(squares):
                        total = sums[r * squares + n]
                        total = total if factor is None else builder.fmul(total, factor)
                        e.store(total, out, r * t.block_k + n * t.lanes)
                return context.get_dummy_value()

            return types.void(*[types.int64] * 6, types.float32), codegen

        return dots

    def mix_for(kind: int, rows: int, vectors: int) -> Any:
        """`vectors` vectors of value columns into the accumulators of `rows` rows."""
        size = t.size if kind == PLAIN else 2

        @intrinsic
        def mix(
            typingctx: Any,
            addresses: Any,
            weights: Any,
            count: Any,
            column: Any,
            out: Any,
            row: Any,
            ahead: Any,
            dense: Any,
        ) -> Any:
            """out[r] += Σ_j weights[r][j] · values[j][column …], keys in order; rows of `out` `row` numbers apart."""

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                e = Emit(builder, t)
                table = builder.inttoptr(args[0], I64.as_pointer())
                ahead = builder.inttoptr(args[6], I64.as_pointer())
                dense = builder.icmp_signed("!=", args[7], ir.Constant(I64, 0))
                p, out = e.pointer(args[1]), e.at(e.pointer(args[4]), args[3])
                step = builder.mul(args[3], ir.Constant(I64, size))
                lines = [e.at(out, builder.mul(args[5], ir.Constant(I64, r))) for r in range(rows)]

                def ask(j: ir.Value) -> None:
                    wide = vectors * t.lanes * size
                    far = builder.add(builder.mul(args[2], step), builder.mul(j, ir.Constant(I64, wide)))
                    for line in range(0, wide, 64):
                        straight = builder.add(_entry(e, ahead, ir.Constant(I64, 0)), far)
                        apart = builder.add(_entry(e, ahead, j), step)
                        place = builder.select(dense, straight, apart)
                        e.prefetch(builder.add(place, ir.Constant(I64, line)))

                def body(j: ir.Value, acc: list[ir.Value]) -> list[ir.Value]:
                    start = builder.add(_entry(e, table, j), step)
                    ask(j)
                    columns = [
                        e.load_kind(builder.add(start, ir.Constant(I64, v * t.lanes * size)), kind)
                        for v in range(vectors)
                    ]
                    new = []
                    for r in range(rows):
                        x = e.broadcast(e.at(p, j), r * t.block_k)
                        new += [e.fma(x, columns[v], acc[r * vectors + v]) for v in range(vectors)]
                    return new

                def two(j: ir.Value, acc: Sequence[ir.Value], alone: bool = False) -> list[ir.Value]:
                    """Keys 2j and 2j + 1, or the last key and nothing."""
                    first = builder.shl(j, ir.Constant(I64, 1))
                    second = first if alone else builder.add(first, ir.Constant(I64, 1))
                    starts = [builder.add(_entry(e, table, at), step) for at in (first, second)]
                    ask(first)
                    if not alone:
                        ask(second)
                    new, columns = [], []
                    for v in range(vectors):
                        places = [
                            builder.add(start, ir.Constant(I64, v * t.lanes * size)) for start in starts
                        ]
                        word = e.weave(*places)
                        columns.append(builder.and_(word, e.const_int(0xFFFF)) if alone else word)
                    for r in range(rows):
                        x = builder.bitcast(e.broadcast(e.at(p, j), r * t.block_k), e.ints)
                        new += [e.dot(x, columns[v], acc[r * vectors + v], t.dot) for v in range(vectors)]
                    return new

                start = [e.load(line, v * t.lanes) for line in lines for v in range(vectors)]
                if t.pairs:
                    half, zero = builder.lshr(args[2], ir.Constant(I64, 1)), ir.Constant(I64, 0)
                    some = builder.icmp_signed(">", half, zero)
                    done = e.when(some, start, lambda acc: e.loop(half, 1, acc, two))
                    left = builder.icmp_signed("!=", builder.and_(args[2], ir.Constant(I64, 1)), zero)
                    done = e.when(left, done, lambda acc: two(half, acc, alone=True))
                else:
                    done = e.loop(args[2], 1, start, body)
                for r in range(rows):
                    for v in range(vectors):
                        e.store(done[r * vectors + v], lines[r], v * t.lanes)
                return context.get_dummy_value()

            return types.void(*[types.int64] * 8), codegen

        return mix

    lanes, few, block_k = t.lanes, t.few, t.block_k
    size = t.size
    wide = 2  # vectors of values beside `few` rows: few · 2 sums stay in registers

    def for_kind(kind: int) -> tuple[Any, Any]:
        dots_few, dots_one, dots_two = dots_for(kind, few, 1), dots_for(kind, 1, 1), dots_for(kind, 1, 2)
        mix_few, mix_few_one = mix_for(kind, few, wide), mix_for(kind, few, 1)
        mix_one, mix_one_one = mix_for(kind, 1, 4), mix_for(kind, 1, 1)

        @numba.njit(error_model="numpy")
        def dots(
            addresses: int,
            packed: int,
            rows: int,
            dim: int,
            columns: int,
            grid: int,
            ahead: int,
            dense: int,
            factor: float,
        ) -> None:
            if rows == 1:
                c = 0
                while c + 2 * lanes <= columns:
                    dots_two(addresses + c * 8, packed, dim, grid + c * size, ahead + c * 8, dense, factor)
                    c += 2 * lanes
                if c < columns:
                    dots_one(addresses + c * 8, packed, dim, grid + c * size, ahead + c * 8, dense, factor)
            else:
                for c in range(0, columns, lanes):
                    for r in range(0, rows, few):
                        out = grid + (r * block_k + c) * size
                        dots_few(
                            addresses + c * 8, packed + r * dim * size, dim, out, ahead + c * 8, dense, factor
                        )

        @numba.njit(error_model="numpy")
        def mix(
            addresses: int,
            grid: int,
            rows: int,
            count: int,
            dim: int,
            sums: int,
            row: int,
            ahead: int,
            dense: int,
        ) -> None:
            if rows == 1:
                c = 0
                while c + 4 * lanes <= dim:
                    mix_one(addresses, grid, count, c, sums, row, ahead, dense)
                    c += 4 * lanes
                while c < dim:
                    mix_one_one(addresses, grid, count, c, sums, row, ahead, dense)
                    c += lanes
            else:
                for r in range(0, rows, few):
                    here, out = grid + r * block_k * size, sums + r * row * size
                    c = 0
                    while c + wide * lanes <= dim:
                        mix_few(addresses, here, count, c, out, row, ahead, dense)
                        c += wide * lanes
                    while c < dim:
                        mix_few_one(addresses, here, count, c, out, row, ahead, dense)
                        c += lanes

        return dots, mix

    if t.pairs:
        made = [for_kind(BFLOAT16)] * 3
    else:
        made = [for_kind(kind) for kind in range(3)] if t.size == 4 else [for_kind(PLAIN)] * 3
    (dots_0, mix_0), (dots_1, mix_1), (dots_2, mix_2) = made

    @numba.njit(error_model="numpy")
    def dots(kind: int, *args: Any) -> None:
        if kind == PLAIN:
            dots_0(*args)
        elif kind == BFLOAT16:
            dots_1(*args)
        else:
            dots_2(*args)

    @numba.njit(error_model="numpy")
    def mix(kind: int, *args: int) -> None:
        if kind == PLAIN:
            mix_0(*args)
        elif kind == BFLOAT16:
            mix_1(*args)
        else:
            mix_2(*args)

    return dots, mix


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
    row_max, raise_row, fold_total = rows.row_max, rows.raise_row, rows.fold_total
    scale_row, scale_vector, exp_one = rows.scale_row, rows.scale_vector, rows.exp_one
    dots, mix = _bodies(t)
    load, store, load_kind, _, real, size = access(t)
    nr, lanes, block_k, few = t.nr, t.lanes, t.block_k, t.few
    stride, pairs = 4 * lanes, t.pairs
    neg_inf, zero = real(-math.inf), real(0.0)

    @numba.njit(error_model="numpy")
    def end_of(count: int) -> int:
        """`count` columns rounded up to what the row bodies step by."""
        return (count + stride - 1) // stride * stride

    @numba.njit(error_model="numpy")
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

    @numba.njit(error_model="numpy")
    def straight(addresses: int, count: int, row: int) -> bool:
        """Whether a block's rows lie one after the other, `row` bytes apart."""
        return load_i64(addresses + (count - 1) * 8) - load_i64(addresses) == (count - 1) * row

    @numba.njit(error_model="numpy")
    def any_odd(addresses: int, count: int, dim: int, kind: int, width: int) -> bool:
        """Whether a value of the block is NaN or infinite."""
        total = zero
        for c in range(count):
            here = load_i64(addresses + c * 8)
            for d in range(dim):
                x = load_kind(here + d * width, kind)
                total += x - x
        return total != total

    @numba.njit(error_model="numpy")
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

    @numba.njit(error_model="numpy")
    def clean(addresses: int, count: int, dim: int, table: int) -> None:
        """A copy of a block's values with 0 for NaN and infinite ones, and the addresses of its rows at `table`."""
        copy = table + block_k * 8
        for c in range(count):
            here, there = load_i64(addresses + c * 8), copy + c * dim * 2
            store_i64(table + c * 8, there)
            for d in range(dim):
                bits = load_u16(here + d * 2)
                store_u16(there + d * 2, bits if bits & ALL_ONES != ALL_ONES else numba.uint16(0))

    @numba.njit(error_model="numpy")
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
        firsts = load_i64(args + FIRST_TABLE)
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
                locate(args, lead, value_source, value_row, load_i64(args + VALUE_PAGE), key, count, value_at)
                # While keys are in the arithmetic, their values are on the way, and with the values the next keys.
                columns = (count + lanes - 1) // lanes * lanes
                values_dense = 1 if value_rows_touch and straight(value_at, count, value_row) else 0
                keys_dense = 1 if key_rows_touch and (after <= 0 or straight(next_at, after, key_row)) else 0
                dots(
                    kind,
                    key_at,
                    packed,
                    whole,
                    dim,
                    columns,
                    grid,
                    value_at,
                    values_dense,
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
                    if pairs:
                        source = value_at
                        if odd:
                            source = seen + whole * block_k
                            clean(value_at, count, value_dim, source)
                            add_odd(value_at, grid, seen, rows, count, value_dim, sums, row_size)
                        for r in range(whole):
                            narrow_row(grid + r * block_k * size, 0, end_of(count))
                        ahead = next_at if after > 0 else key_at
                        mix(
                            value_kind,
                            source,
                            grid,
                            whole,
                            count,
                            value_dim,
                            sums,
                            row_size,
                            ahead,
                            keys_dense,
                        )
                    elif odd:
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
                        ahead = next_at if after > 0 else key_at
                        mix(
                            value_kind,
                            value_at,
                            grid,
                            whole,
                            count,
                            value_dim,
                            sums,
                            row_size,
                            ahead,
                            keys_dense,
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
                lse = load_i64(load_i64(args + LSE_TABLE) + 8 * plane) + query * 8
                finish(args, plane, top, total, empty, here, nr * size, out, lse)

    return decode
