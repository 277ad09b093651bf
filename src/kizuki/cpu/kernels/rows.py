"""What is done to a row of scores or weights, or to a row of an accumulator, emitted for one target."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..sizes import BFLOAT16, FLOAT16, PLAIN
from ..target import Target
from .real import I8, I32, I64, NEG_INF, real
from .simd import Emit


class Rows(NamedTuple):
    """The emitted intrinsics, callable from Numba code."""

    add_bias: Any
    hide: Any
    weigh_row: Any
    bend_row: Any
    row_max: Any
    raise_row: Any
    settle_row: Any
    fold_total: Any
    scale_vector: Any
    exp_one: Any
    scale_row: Any
    scale_panel: Any  # for each kind of memory read; PLAIN written
    finish_panel: Any  # PLAIN read; for each kind of memory written
    cap_row: Any
    drop_row: Any
    merge_row: Any
    narrow_row: Any


def emit(t: Target) -> Rows:
    """Write the bodies for a target."""
    number = real(t.size).numba
    kinds = (PLAIN, BFLOAT16, FLOAT16) if t.size == 4 else (PLAIN,) * 3  # float64 is never narrower in memory

    @intrinsic
    def add_bias(typingctx: Any, row: Any, bias: Any, count: Any) -> Any:
        """row += bias on `count` whole vectors; a bias of −inf makes the score −inf whatever it was."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b, row, bias = builder, e.pointer(args[0]), e.pointer(args[1])

            def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                x, at = e.load(bias, b.mul(i, ir.Constant(I64, t.lanes))), b.mul(i, ir.Constant(I64, t.lanes))
                absent = b.fcmp_ordered("==", x, e.const(NEG_INF))
                e.store(b.select(absent, e.const(NEG_INF), b.fadd(e.load(row, at), x)), row, at)
                return []

            e.loop(args[2], 1, [], body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    @intrinsic
    def hide(typingctx: Any, row: Any, seen: Any, count: Any) -> Any:
        """row ← −inf where the byte at `seen` is 0, on `count` whole vectors."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b, row = builder, e.pointer(args[0])
            flags = ir.VectorType(I8, t.lanes)

            def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                at = b.mul(i, ir.Constant(I64, t.lanes))
                seen = b.load(b.inttoptr(b.add(args[1], at), flags.as_pointer()))
                seen.align = 1
                there = b.icmp_unsigned("!=", seen, ir.Constant(flags, [0] * t.lanes))
                e.keep(row, at, there, NEG_INF)
                return []

            e.loop(args[2], 1, [], body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    @intrinsic
    def weigh_row(typingctx: Any, row: Any, width: Any, lse: Any, rest: Any, delta: Any, grad: Any) -> Any:
        """Scores and dP of a row to weights and dS, in place, width a multiple of 4 vectors:

        row ← P = exp((row − lse) − rest); grad ← P · (grad − delta); both 0 where the score is −inf.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b, pointer, grad = builder, e.pointer(args[0]), e.pointer(args[5])
            shift, rest, delta = e.splat(args[2]), e.splat(args[3]), e.splat(args[4])

            def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                here, there = e.at(pointer, i), e.at(grad, i)
                for n in range(2):
                    s = e.load(here, n * t.lanes)
                    hidden = b.fcmp_ordered("==", s, e.const(NEG_INF))
                    p = e.exp(b.fsub(b.fsub(s, shift), rest))
                    p = b.select(hidden, e.const(0.0), p)
                    e.store(p, here, n * t.lanes)
                    ds = b.fmul(p, b.fsub(e.load(there, n * t.lanes), delta))
                    e.store(b.select(hidden, e.const(0.0), ds), there, n * t.lanes)
                return []

            e.loop(args[1], 2 * t.lanes, [], body)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, number, number, number, types.int64), codegen

    @intrinsic
    def bend_row(typingctx: Any, grad: Any, width: Any, slope: Any) -> Any:
        """grad ← grad · slope, width a multiple of 4 vectors; 0 stays 0, whatever the slope is there."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b, grad, side = builder, e.pointer(args[0]), e.pointer(args[2])

            def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                ds = e.load(grad, i)
                zero = b.fcmp_ordered("==", ds, e.const(0.0))
                e.store(b.select(zero, ds, b.fmul(ds, e.load(side, i))), grad, i)
                return []

            e.loop(args[1], t.lanes, [], body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    @intrinsic
    def row_max(typingctx: Any, row: Any, width: Any, running_max: Any) -> Any:
        """max(running_max, row), NaN passed over. width is a multiple of 4 vectors."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b, pointer = builder, e.pointer(args[0])

            def peak(i: ir.Value, acc: list[ir.Value]) -> list[ir.Value]:
                here = e.at(pointer, i)
                return [e.larger(a, e.load(here, n * t.lanes)) for n, a in enumerate(acc)]

            # Starting from the running maximum, a row that does not exceed it (most rows, after the first
            # key blocks) needs no fold over the lanes: one comparison and a branch that is predicted.
            old = e.splat(args[2])
            tops = e.loop(args[1], 4 * t.lanes, [old] * 4, peak)
            top = e.larger(e.larger(tops[0], tops[1]), e.larger(tops[2], tops[3]))
            above = b.fcmp_ordered(">", top, old)
            some = b.icmp_unsigned(
                "!=", b.bitcast(above, ir.IntType(t.lanes)), ir.Constant(ir.IntType(t.lanes), 0)
            )
            before = b.block
            with b.if_then(some, likely=False):
                best = e.fold(top, e.larger)
                inside = b.block
            result = b.phi(best.type)
            result.add_incoming(args[2], before)
            result.add_incoming(best, inside)
            return result

        return number(types.int64, types.int64, number), codegen

    @intrinsic
    def raise_row(typingctx: Any, row: Any, width: Any, running_max: Any, totals: Any) -> Any:
        """row ← exp(row − running_max) in place, and its sum added to the one vector at `totals`."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b, pointer, totals = builder, e.pointer(args[0]), e.pointer(args[3])
            # An empty row so far: subtract 0 instead of −inf, whose difference would be NaN.
            none = b.fcmp_ordered("==", args[2], ir.Constant(e.scalar, NEG_INF))
            shift = e.splat(b.select(none, ir.Constant(e.scalar, 0.0), args[2]))

            def body(i: ir.Value, acc: list[ir.Value]) -> list[ir.Value]:
                here, new = e.at(pointer, i), []
                for n, a in enumerate(acc):
                    y = e.exp(b.fsub(e.load(here, n * t.lanes), shift))
                    e.store(y, here, n * t.lanes)
                    new.append(b.fadd(a, y))
                return new

            sums = e.loop(args[1], 4 * t.lanes, [e.const(0.0)] * 4, body)
            total = b.fadd(b.fadd(sums[0], sums[1]), b.fadd(sums[2], sums[3]))
            e.store(b.fadd(e.load(totals), total), totals)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, number, types.int64), codegen

    @intrinsic
    def settle_row(typingctx: Any, row: Any, vectors: Any, peak: Any, inverse: Any) -> Any:
        """row ← exp(row − peak) · inverse in place, on `vectors` whole vectors, at least one."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b, pointer = builder, e.pointer(args[0])
            peak, inverse = e.splat(args[2]), e.splat(args[3])

            def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                at = b.mul(i, ir.Constant(I64, t.lanes))
                e.store(b.fmul(e.exp(b.fsub(e.load(pointer, at), peak)), inverse), pointer, at)
                return []

            e.loop(args[1], 1, [], body)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, number, number), codegen

    @intrinsic
    def fold_total(typingctx: Any, totals: Any) -> Any:
        """The sum of one vector, lanes always in the same order."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            return e.fold(e.load(e.pointer(args[0])), builder.fadd)

        return number(types.int64), codegen

    @intrinsic
    def scale_vector(typingctx: Any, place: Any, factor: Any) -> Any:
        """Multiply one vector in memory by `factor`."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            place = e.pointer(args[0])
            e.store(builder.fmul(e.load(place), e.splat(args[1])), place)
            return context.get_dummy_value()

        return types.void(types.int64, number), codegen

    @intrinsic
    def exp_one(typingctx: Any, x: Any) -> Any:
        """e^x of one number by the vector exp: ten times as fast as a call into the C library."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            return builder.extract_element(e.exp(e.splat(args[0])), ir.Constant(ir.IntType(32), 0))

        return number(number), codegen

    @intrinsic
    def scale_row(typingctx: Any, row: Any, panels: Any, panel_bytes: Any, factor: Any) -> Any:
        """Multiply one row of the accumulator, nr floats in each panel, by `factor`."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            factor = e.splat(args[3])

            def body(p: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                here = e.pointer(builder.add(args[0], builder.mul(p, args[2])))
                for v in range(t.nv):
                    e.store(builder.fmul(e.load(here, v * t.lanes), factor), here, v * t.lanes)
                return []

            e.loop(args[1], 1, [], body)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, number), codegen

    @intrinsic
    def cap_row(typingctx: Any, row: Any, width: Any, cap: Any, slope: Any) -> Any:
        """row ← cap · tanh(row), width a multiple of 4 vectors; 1 − tanh² into the row at `slope` unless it is 0."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            pointer, cap, side = e.pointer(args[0]), e.splat(args[2]), e.pointer(args[3])
            wanted = builder.icmp_signed("!=", args[3], ir.Constant(I64, 0))

            def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                y = e.tanh(e.load(pointer, i))
                e.store(builder.fmul(cap, y), pointer, i)
                with builder.if_then(wanted):
                    # (1 − y)(1 + y), not 1 − y²: where y is near 1 the square would cancel.
                    one = e.const(1.0)
                    e.store(builder.fmul(builder.fsub(one, y), builder.fadd(one, y)), side, i)
                return []

            e.loop(args[1], t.lanes, [], body)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, number, types.int64), codegen

    def scaled(source_kind: int, out_kind: int) -> Any:
        @intrinsic
        def scale_panel(typingctx: Any, source: Any, out: Any, factor: Any) -> Any:
            """out[nr] = source[nr] · factor, for one whole panel; one of the two may be 16-bit."""

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                e = Emit(builder, t)
                factor = e.splat(args[2])

                def place(address: ir.Value, v: int, kind: int) -> ir.Value:
                    step = v * t.lanes * (t.size if kind == PLAIN else 2)
                    return builder.add(address, ir.Constant(I64, step))

                for v in range(t.nv):
                    x = e.load_kind(place(args[0], v, source_kind), source_kind)
                    e.store_kind(builder.fmul(x, factor), place(args[1], v, out_kind), out_kind)
                return context.get_dummy_value()

            return types.void(types.int64, types.int64, number), codegen

        return scale_panel

    @intrinsic
    def drop_row(typingctx: Any, row: Any, width: Any, key: Any, word: Any, below: Any, factor: Any) -> Any:
        """Dropout on a row of weights, width a multiple of 4 vectors: 0, or × factor.

        The number of the weight on key j is a hash of j and the row's 64 random bits (two rounds of multiply
        and xor-shift); below `below` of 2^32 the weight is dropped.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b, pointer, factor = builder, e.pointer(args[0]), e.splat(args[5])
            words = ir.VectorType(I32, t.lanes)

            def every(x: ir.Value) -> ir.Value:
                first = b.insert_element(ir.Constant(words, ir.Undefined), x, ir.Constant(I32, 0))
                return b.shuffle_vector(
                    first, ir.Constant(words, ir.Undefined), ir.Constant(e.order, [0] * t.lanes)
                )

            def const(x: int) -> ir.Constant:
                return ir.Constant(words, [x] * t.lanes)

            low = every(b.trunc(args[3], I32))
            high = every(b.trunc(b.lshr(args[3], ir.Constant(I64, 32)), I32))
            bar = every(b.trunc(args[4], I32))
            here = ir.Constant(words, list(range(t.lanes)))

            def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                x = b.add(every(b.trunc(b.add(args[2], i), I32)), here)
                x = b.xor(b.mul(x, const(0x9E3779B1)), low)
                x = b.mul(b.xor(x, b.lshr(x, const(16))), const(0x7FEB352D))
                x = b.xor(x, high)
                x = b.mul(b.xor(x, b.lshr(x, const(15))), const(0x846CA68B))
                x = b.xor(x, b.lshr(x, const(16)))
                kept = b.icmp_unsigned(">=", x, bar)
                e.store(b.select(kept, b.fmul(e.load(pointer, i), factor), e.const(0.0)), pointer, i)
                return []

            e.loop(args[1], t.lanes, [], body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5, number), codegen

    @intrinsic
    def merge_row(
        typingctx: Any, sums: Any, more: Any, panels: Any, step: Any, factor: Any, share: Any
    ) -> Any:
        """sums ← sums · factor + more · share, one row of two accumulators, nr numbers in each panel."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            factor, share = e.splat(args[4]), e.splat(args[5])

            def body(p: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                off = builder.mul(p, args[3])
                here, there = (e.pointer(builder.add(a, off)) for a in args[:2])
                for v in range(t.nv):
                    old = builder.fmul(e.load(here, v * t.lanes), factor)
                    e.store(e.fma(e.load(there, v * t.lanes), share, old), here, v * t.lanes)
                return []

            e.loop(args[2], 1, [], body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4, number, number), codegen

    @intrinsic
    def narrow_row(typingctx: Any, row: Any, left: Any, width: Any) -> Any:
        """Columns left … left + width of a row rounded to bfloat16, in place: column c becomes the c-th of the row.

        width is a multiple of 4 vectors. A number moves towards the beginning, over numbers that have moved already.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b = builder
            source = e.at(e.pointer(args[0]), args[1])
            out = b.add(args[0], b.mul(args[1], ir.Constant(I64, 2)))

            def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                wide = [e.load(e.at(source, i), n * t.lanes) for n in range(4)]
                for n, x in enumerate(wide):
                    place = b.add(b.mul(i, ir.Constant(I64, 2)), ir.Constant(I64, 2 * n * t.lanes))
                    e.store_kind(x, b.add(out, place), BFLOAT16)
                return []

            e.loop(args[2], 4 * t.lanes, [], body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return Rows(
        add_bias,
        hide,
        weigh_row,
        bend_row,
        row_max,
        raise_row,
        settle_row,
        fold_total,
        scale_vector,
        exp_one,
        scale_row,
        tuple(scaled(kind, PLAIN) for kind in kinds),
        tuple(scaled(PLAIN, kind) for kind in kinds),
        cap_row,
        drop_row,
        merge_row,
        narrow_row,
    )
