"""The decoder's products: few rows of queries with keys and values read where they lie, by tables of addresses.

A square of keys is transposed in registers, so that a row's score is the same sum in the same order as in the
forward kernel. Whoever reads memory here also asks for what is read next: a processor foresees neither the rows of a
square, which are read side by side, nor the columns of values, which lie a row apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..sizes import BFLOAT16, PLAIN, step_of
from ..target import Target
from .real import I64
from .scalar import load_i64, piece
from .simd import Emit

CHUNK = 16  # keys whose values are in the cache at once while columns pass over them; even, for pairs


def _entry(e: Emit, table: ir.Value, index: ir.Value) -> ir.Value:
    """An address out of a table."""
    address = e.b.load(e.b.gep(table, [index]))
    address.align = 8
    return address


def _pairs(e: Emit, keys: list[ir.Value]) -> list[ir.Value]:
    """The next pairs of bfloat16 dimensions of a square of keys, a vector of words over the keys for each."""
    return [e.b.bitcast(pair, e.ints) for pair in e.transposed(keys)]


def _columns(e: Emit, keys: list[ir.Value], kind: int) -> list[ir.Value]:
    """The next dimensions of a square of keys, a vector over the keys for each.

    bfloat16 pairs are turned as whole 32-bit words and taken apart afterwards: half the exchanges.
    """
    if kind == PLAIN:
        return e.transposed(keys)
    if kind != BFLOAT16:
        return e.transpose([e.load_kind(k, kind) for k in keys])
    b, columns = e.b, []
    for bits in _pairs(e, keys):
        columns.append(b.bitcast(b.shl(bits, e.const_int(16)), e.vec))
        columns.append(b.bitcast(b.and_(bits, e.const_int(0xFFFF0000)), e.vec))
    return columns


def build(t: Target) -> Any:
    """`(dots, mix)`: scores of a block of keys, and a block of values into the accumulators."""

    def dots_for(kind: int, rows: int, squares: int, apart: bool, known: int = 0) -> Any:
        """Scores of `rows` queries on `squares` squares of `lanes` keys each.

        `apart`: keys lie anywhere; `known`: their head_dim, where it is compiled in (0 = it is not).
        """
        size = t.size if kind == PLAIN else 2
        count = squares * t.lanes

        def sums_of(e: Emit, args: Sequence[ir.Value], keys_at: Any, ask: Any) -> None:
            """The loop over dimensions: `keys_at(step)` are the addresses of the keys there, `ask` prefetches."""
            queries, dim, out, factor = args
            b, q, out = e.b, e.pointer(queries), e.pointer(out)
            lines = [e.at(q, b.mul(dim, ir.Constant(I64, r))) for r in range(rows)]

            def body(d: ir.Value, acc: list[ir.Value]) -> list[ir.Value]:
                step = b.mul(d, ir.Constant(I64, size))
                ask(step)
                acc, here = list(acc), keys_at(step)
                place = b.lshr(d, ir.Constant(I64, 1)) if t.pairs else d
                for n in range(squares):  # one after another: the columns of two would not fit the registers
                    own = here[n * t.lanes : (n + 1) * t.lanes]
                    columns = _pairs(e, own) if t.pairs else _columns(e, own, kind)
                    for c, column in enumerate(columns):
                        for r in range(rows):
                            x, at = e.broadcast(e.at(lines[r], place), c), r * squares + n
                            if t.pairs:
                                acc[at] = e.dot(b.bitcast(x, e.ints), column, acc[at], t.dot)
                            else:
                                acc[at] = e.fma(x, column, acc[at])
                return acc

            sums = e.loop(dim, step_of(t, kind), [e.const(0.0)] * (rows * squares), body)
            for r in range(rows):
                for n in range(squares):
                    total = sums[r * squares + n]
                    total = b.fmul(total, e.splat(factor)) if t.pairs else total
                    e.store(total, out, r * t.block_k + n * t.lanes)

        asked = range(
            0, count * step_of(t, kind) * size, 64
        )  # bytes of the keys ahead that one step asks for

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
            prefetches that come faster than memory, and does not foresee many rows read side by side. Where those
            rows are `dense`, one after the other, in the order of memory.
            """

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                e = Emit(builder, t)
                table = builder.inttoptr(args[0], I64.as_pointer())
                keys = [_entry(e, table, ir.Constant(I64, n)) for n in range(count)]
                later = builder.inttoptr(args[4], I64.as_pointer())
                dense = builder.icmp_signed("!=", args[5], ir.Constant(I64, 0))

                def ask(step: ir.Value) -> None:
                    for n in asked:
                        far = builder.add(builder.mul(step, ir.Constant(I64, count)), ir.Constant(I64, n))
                        straight = builder.add(_entry(e, later, ir.Constant(I64, 0)), far)
                        own = ir.Constant(I64, n // 64 % count)
                        e.prefetch(builder.select(dense, straight, builder.add(_entry(e, later, own), step)))

                def keys_at(step: ir.Value) -> list[ir.Value]:
                    return [builder.add(k, step) for k in keys]

                sums_of(e, (*args[1:4], args[6]), keys_at, ask)
                return context.get_dummy_value()

            return types.void(*[types.int64] * 6, types.float32), codegen

        @intrinsic
        def dots_dense(
            typingctx: Any, keys: Any, queries: Any, dim: Any, out: Any, ahead: Any, factor: Any
        ) -> Any:
            """The same of keys that lie one after the other from an address on, and of what is dense `ahead`.

            No table of addresses, which come to more than there are registers; with a known head_dim they are one
            register and a constant each.
            """

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                e = Emit(builder, t)
                dim = ir.Constant(I64, known) if known else args[2]
                row = builder.mul(dim, ir.Constant(I64, size))

                def ask(step: ir.Value) -> None:
                    far = builder.add(args[4], builder.mul(step, ir.Constant(I64, count)))
                    for n in asked:
                        e.prefetch(builder.add(far, ir.Constant(I64, n)))

                def keys_at(step: ir.Value) -> list[ir.Value]:
                    first = builder.add(args[0], step)
                    return [builder.add(first, builder.mul(row, ir.Constant(I64, n))) for n in range(count)]

                sums_of(e, (args[1], dim, args[3], args[5]), keys_at, ask)
                return context.get_dummy_value()

            return types.void(*[types.int64] * 5, types.float32), codegen

        return dots if apart else dots_dense

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
    weight_size = 2 if t.pairs else size
    wide = 2  # vectors of values beside `few` rows: few · 2 sums stay in registers

    @piece
    def soon(addresses: int, dense: int, at: int, stop: int, later: int, later_dense: int) -> tuple[int, int]:
        """Where to ask for memory: from row `at` of a block on, or past its end in the table of what comes later."""
        return (addresses + at * 8, dense) if at < stop else (later, later_dense)

    def for_kind(kind: int) -> tuple[Any, Any]:
        dots_few, few_dense = dots_for(kind, few, 1, True), dots_for(kind, few, 1, False)
        dots_one, dots_two = dots_for(kind, 1, 1, True), dots_for(kind, 1, 2, True)
        one_dense = dots_for(kind, 1, 2, False)
        one_64, one_128 = (dots_for(kind, 1, 2, False, dim) for dim in (64, 128))
        width = size if kind == PLAIN else 2
        mix_few, mix_few_one = mix_for(kind, few, wide), mix_for(kind, few, 1)
        mix_one, mix_one_one = mix_for(kind, 1, 4), mix_for(kind, 1, 1)

        @piece
        def dots(
            addresses: int,
            packed: int,
            rows: int,
            dim: int,
            columns: int,
            grid: int,
            dense: int,
            later: int,
            later_dense: int,
            factor: float,
        ) -> None:
            wide = 2 * lanes if rows == 1 else lanes
            if dense != 0 and columns == block_k:
                base, bytes_ = load_i64(addresses), dim * width
                known = rows == 1 and (dim == 64 or dim == 128)
                wide, beyond = 2 * lanes if rows == 1 else lanes, 2 * lanes
                for c in range(0, columns, wide):
                    here, out = base + c * bytes_, grid + c * size
                    ahead = here + beyond * bytes_ if c + beyond < columns else load_i64(later)
                    if known and dim == 64:
                        one_64(here, packed, dim, out, ahead, factor)
                    elif known:
                        one_128(here, packed, dim, out, ahead, factor)
                    elif rows == 1:
                        one_dense(here, packed, dim, out, ahead, factor)
                    else:
                        for r in range(0, rows, few):
                            left = packed + r * dim * size
                            few_dense(here, left, dim, out + r * block_k * size, ahead, factor)
                return
            for c in range(0, columns, wide):
                here, out = addresses + c * 8, grid + c * size
                ahead, touch = soon(addresses, dense, c + 2 * lanes, columns, later, later_dense)
                if rows == 1:
                    if c + wide <= columns:
                        dots_two(here, packed, dim, out, ahead, touch, factor)
                    else:
                        dots_one(here, packed, dim, out, ahead, touch, factor)
                else:
                    for r in range(0, rows, few):
                        left = packed + r * dim * size
                        dots_few(here, left, dim, out + r * block_k * size, ahead, touch, factor)

        @piece
        def mix(
            addresses: int,
            grid: int,
            rows: int,
            count: int,
            dim: int,
            sums: int,
            row: int,
            dense: int,
            later: int,
            later_dense: int,
        ) -> None:
            for j in range(0, count, CHUNK):
                here, weights, n = (
                    addresses + j * 8,
                    grid + j * weight_size,
                    min(CHUNK, count - j),
                )
                ahead, touch = soon(addresses, dense, j + CHUNK, count, later, later_dense)
                for r in range(0, rows, few):
                    left, out = weights + r * block_k * size, sums + r * row * size
                    c = 0
                    if rows == 1:
                        while c + 4 * lanes <= dim:
                            mix_one(here, left, n, c, out, row, ahead, touch)
                            c += 4 * lanes
                        while c < dim:
                            mix_one_one(here, left, n, c, out, row, ahead, touch)
                            c += lanes
                    else:
                        while c + wide * lanes <= dim:
                            mix_few(here, left, n, c, out, row, ahead, touch)
                            c += wide * lanes
                        while c < dim:
                            mix_few_one(here, left, n, c, out, row, ahead, touch)
                            c += lanes

        return dots, mix

    if t.pairs:
        made = [for_kind(BFLOAT16)] * 3
    else:
        made = [for_kind(kind) for kind in range(3)] if t.size == 4 else [for_kind(PLAIN)] * 3
    (dots_0, mix_0), (dots_1, mix_1), (dots_2, mix_2) = made

    @piece
    def dots(kind: int, *args: Any) -> None:
        if kind == PLAIN:
            dots_0(*args)
        elif kind == BFLOAT16:
            dots_1(*args)
        else:
            dots_2(*args)

    @piece
    def mix(kind: int, *args: int) -> None:
        if kind == PLAIN:
            mix_0(*args)
        elif kind == BFLOAT16:
            mix_1(*args)
        else:
            mix_2(*args)

    return dots, mix
