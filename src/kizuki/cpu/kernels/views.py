"""What an observed row of scores or weights goes through, emitted for one target; `watch.py` calls it."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..target import Target
from .real import I64, NEG_INF, real
from .simd import Emit


class Views(NamedTuple):
    """The emitted intrinsics, callable from Numba code."""

    watch_moment: Any
    watch_both: Any
    shift_moment: Any
    sum_columns: Any
    peak_columns: Any
    add_line: Any
    factor_rows: Any


def emit(t: Target) -> Views:
    """Write the bodies for a target."""
    number = real(t.size).numba

    def watch(reach_too: bool) -> Any:
        """`raise_row`, the same bits, with the moment beside the sum, or the moment and the reach."""

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
            """y = exp(row − running_max) in place; totals += y; moments += y·(row − running_max), lane by lane;

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
                    *sums, moment, reach, ahead = acc if reach_too else (*acc, None, None)
                    for n, a in enumerate(sums):
                        x = b.fsub(e.load(here, n * t.lanes), shift)
                        y = e.exp(x)
                        e.store(y, here, n * t.lanes)
                        new.append(b.fadd(a, y))
                        # Of an absent key y is 0 and x −inf, and 0 · −inf would be NaN.
                        moment = e.fma(y, e.larger(e.const(e.real.lowest), x), moment)
                        if reach_too:
                            reach = e.fma(y, e.call("fabs", ahead), reach)
                            ahead = b.fsub(ahead, e.const(float(t.lanes)))
                    return [*new, moment, reach, ahead] if reach_too else [*new, moment]

                start = [e.const(0.0)] * 4 + [e.load(moments)]
                start += [e.load(reaches), ahead] if reach_too else []
                done = e.loop(args[1], 4 * t.lanes, start, body)
                total = b.fadd(b.fadd(done[0], done[1]), b.fadd(done[2], done[3]))
                e.store(b.fadd(e.load(totals), total), totals)
                e.store(done[4], moments)
                if reach_too:
                    e.store(done[5], reaches)
                return context.get_dummy_value()

            return types.void(types.int64, types.int64, number, *[types.int64] * 3, number), codegen

        return watch_row

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
        watch(False),
        watch(True),
        shift_moment,
        over_rows("sum"),
        over_rows("largest"),
        add_line,
        factor_rows,
    )
