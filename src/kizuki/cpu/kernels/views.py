"""What an observed row of scores or weights goes through, emitted for one target; `watch.py` calls it."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..target import Target
from .simd import I64, NEG_INF, Emit, real


class Views(NamedTuple):
    """The emitted intrinsics, callable from Numba code."""

    those_above: Any
    lowest_bit: Any
    insert_best: Any
    watch_row: Any
    shift_moment: Any
    sum_columns: Any
    peak_columns: Any
    add_line: Any
    factor_rows: Any


def emit(t: Target) -> Views:
    """Write the bodies for a target."""
    number = real(t.size).numba

    @intrinsic
    def those_above(typingctx: Any, row: Any, threshold: Any) -> Any:
        """Which of the next 4 vectors of a row are above `threshold`, one bit a number, the first the lowest."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b, pointer = builder, e.pointer(args[0])
            bar, bits = e.splat(args[1]), ir.IntType(t.lanes)
            above = [b.fcmp_ordered(">", e.load(pointer, n * t.lanes), bar) for n in range(4)]
            some = b.or_(b.or_(above[0], above[1]), b.or_(above[2], above[3]))
            before = b.block
            # Mostly none is, and whether any is takes one move of a mask instead of four.
            with b.if_then(b.icmp_unsigned("!=", b.bitcast(some, bits), ir.Constant(bits, 0)), likely=False):
                found: ir.Value = ir.Constant(I64, 0)
                for n, mask in enumerate(above):
                    wide = b.zext(b.bitcast(mask, bits), I64)
                    found = b.or_(found, b.shl(wide, ir.Constant(I64, n * t.lanes)))
                inside = b.block
            result = b.phi(I64)
            result.add_incoming(ir.Constant(I64, 0), before)
            result.add_incoming(found, inside)
            return result

        return types.int64(types.int64, number), codegen

    @intrinsic
    def lowest_bit(typingctx: Any, bits: Any) -> Any:
        """The number of the lowest bit that is set; there is one."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

        return types.int64(types.int64), codegen

    @intrinsic
    def insert_best(typingctx: Any, best: Any, keys: Any, x: Any, key: Any, chunks: Any) -> Any:
        """Insert x into `chunks` vectors of numbers that fall, behind its equals, and its key beside it; one falls out.

        In registers: numbers that are shifted along one by one, each a load behind a store, took seven times as long.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b, lanes = builder, t.lanes
            flag, wide = ir.VectorType(ir.IntType(1), lanes), ir.VectorType(I64, lanes)
            last = ir.Constant(ir.IntType(32), lanes - 1)
            along = ir.Constant(e.order, [0, *range(lanes - 1)])
            first = ir.Constant(flag, [True] + [False] * (lanes - 1))

            def all_of(value: ir.Value, kind: ir.Type) -> ir.Value:
                one = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
                none = ir.Constant(e.order, [0] * lanes)
                return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), none)

            def shifted(value: ir.Value, kind: ir.Type) -> ir.Value:
                return b.shuffle_vector(value, ir.Constant(kind, ir.Undefined), along)

            def body(c: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                x, key, searching = carried
                at = b.mul(c, ir.Constant(I64, lanes))
                here = e.at(e.pointer(args[0]), at)
                there = b.inttoptr(b.add(args[1], b.mul(at, ir.Constant(I64, 8))), wide.as_pointer())
                numbers = e.load(here)
                places = b.load(there)
                places.align = 8
                # Where x has been inserted before, what fell out of there goes to the front of the next vector.
                before = b.and_(b.fcmp_ordered(">=", numbers, e.splat(x)), all_of(searching, flag))
                begins = b.and_(b.or_(shifted(before, flag), first), b.not_(before))
                moved = b.select(begins, e.splat(x), shifted(numbers, e.vec))
                e.store(b.select(before, numbers, moved), here)
                moved = b.select(begins, all_of(key, wide), shifted(places, wide))
                done = b.store(b.select(before, places, moved), there)
                done.align = 8
                still = b.extract_element(before, last)
                x = b.select(still, x, b.extract_element(numbers, last))
                key = b.select(still, key, b.extract_element(places, last))
                return [x, key, b.and_(still, searching)]

            e.loop(args[4], 1, [args[2], args[3], ir.Constant(ir.IntType(1), 1)], body)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, number, types.int64, types.int64), codegen

    @intrinsic
    def watch_row(
        typingctx: Any,
        row: Any,
        width: Any,
        running_max: Any,
        totals: Any,
        moments: Any,
        reaches: Any,
        own: Any,
    ) -> Any:
        """`raise_row`, the same bits, and beside it two more sums, lane by lane:

        y = exp(row − running_max) in place; totals += y; moments += y·(row − running_max);
        reaches += y·|own − j|, j counted from the first column. width is a multiple of 4 vectors.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b, pointer = builder, e.pointer(args[0])
            totals, moments, reaches = (e.pointer(a) for a in args[3:6])
            none = b.fcmp_ordered("==", args[2], ir.Constant(e.scalar, NEG_INF))
            shift = e.splat(b.select(none, ir.Constant(e.scalar, 0.0), args[2]))
            lanes = ir.Constant(e.vec, [float(c) for c in range(t.lanes)])
            ahead = b.fsub(e.splat(args[6]), lanes)

            def body(i: ir.Value, acc: list[ir.Value]) -> list[ir.Value]:
                here, new = e.at(pointer, i), []
                *sums, moment, reach, ahead = acc
                for n, a in enumerate(sums):
                    x = b.fsub(e.load(here, n * t.lanes), shift)
                    y = e.exp(x)
                    e.store(y, here, n * t.lanes)
                    new.append(b.fadd(a, y))
                    # Of an absent key y is 0 and x −inf, and 0 · −inf would be NaN.
                    moment = e.fma(y, e.larger(e.const(e.real.lowest), x), moment)
                    reach = e.fma(y, e.call("fabs", ahead), reach)
                    ahead = b.fsub(ahead, e.const(float(t.lanes)))
                return [*new, moment, reach, ahead]

            start = [e.const(0.0)] * 4 + [e.load(moments), e.load(reaches), ahead]
            done = e.loop(args[1], 4 * t.lanes, start, body)
            total = b.fadd(b.fadd(done[0], done[1]), b.fadd(done[2], done[3]))
            e.store(b.fadd(e.load(totals), total), totals)
            e.store(done[4], moments)
            e.store(done[5], reaches)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, number, *[types.int64] * 3, number), codegen

    @intrinsic
    def shift_moment(typingctx: Any, moments: Any, totals: Any, gap: Any, factor: Any) -> Any:
        """moments ← (moments + gap · totals) · factor, one vector: a moment about another maximum."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            moments, totals = e.pointer(args[0]), e.pointer(args[1])
            moved = e.fma(e.splat(args[2]), e.load(totals), e.load(moments))
            e.store(builder.fmul(moved, e.splat(args[3])), moments)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, number, number), codegen

    def over_rows(combine: str) -> Any:
        @intrinsic
        def columns(typingctx: Any, grid: Any, rows: Any, factors: Any, out: Any, width: Any) -> Any:
            """out[c] ← out[c] + Σ_r grid[r, c] · factors[r], or the largest of them; rows block_k numbers apart.

            width is a multiple of 4 vectors.
            """

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                e = Emit(builder, t)
                b, grid, factors, out = builder, e.pointer(args[0]), e.pointer(args[2]), e.pointer(args[3])

                def along(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                    def down(r: ir.Value, acc: list[ir.Value]) -> list[ir.Value]:
                        here = e.at(grid, b.add(b.mul(r, ir.Constant(I64, t.block_k)), i))
                        factor = e.broadcast(factors, r)
                        loaded = [e.load(here, n * t.lanes) for n in range(4)]
                        if combine == "sum":
                            return [e.fma(x, factor, a) for x, a in zip(loaded, acc, strict=True)]
                        return [e.larger(a, b.fmul(x, factor)) for x, a in zip(loaded, acc, strict=True)]

                    place = e.at(out, i)
                    start = [e.load(place, n * t.lanes) for n in range(4)]
                    for n, total in enumerate(e.loop(args[1], 1, start, down)):
                        e.store(total, place, n * t.lanes)
                    return []

                e.loop(args[4], 4 * t.lanes, [], along)
                return context.get_dummy_value()

            return types.void(*[types.int64] * 5), codegen

        return columns

    @intrinsic
    def add_line(typingctx: Any, line: Any, out: Any, width: Any) -> Any:
        """out += line, width a multiple of 4 vectors."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            line, out = e.pointer(args[0]), e.pointer(args[1])

            def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                e.store(builder.fadd(e.load(out, i), e.load(line, i)), out, i)
                return []

            e.loop(args[2], t.lanes, [], body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    @intrinsic
    def factor_rows(typingctx: Any, marks: Any, tops: Any, inverses: Any, out: Any, count: Any) -> Any:
        """out ← exp(marks − tops) · inverses, 0 where a mark is −inf or an inverse 0: weights of e^(score − mark).

        `count` numbers, rounded up to whole vectors.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b = builder
            marks, tops, inverses, out = (e.pointer(a) for a in args[:4])

            def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                mark, inverse = e.load(marks, i), e.load(inverses, i)
                share = b.fmul(e.exp(b.fsub(mark, e.load(tops, i))), inverse)
                none = b.or_(
                    b.fcmp_ordered("==", mark, e.const(NEG_INF)), b.fcmp_ordered("==", inverse, e.const(0.0))
                )
                e.store(b.select(none, e.const(0.0), share), out, i)
                return []

            e.loop(args[4], t.lanes, [], body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return Views(
        those_above,
        lowest_bit,
        insert_best,
        watch_row,
        shift_moment,
        over_rows("sum"),
        over_rows("largest"),
        add_line,
        factor_rows,
    )
