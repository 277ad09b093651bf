"""The matrix products of attention, emitted for one target.

Operands are packed so that every offset in the inner loops is a constant:
    queries          [block_q][head_dim]        scaled
    right of both    [steps][nr]                a panel of nr keys (scores) or of nr value columns (mix)
    scores           [block_q][block_k]         one row a query
    accumulator      [panels][block_q][nr]      value columns in panels of nr

Where bfloat16 stays bfloat16 (`Target.pairs`), two steps of the left and of the right lie in one 32-bit word, the
weights of a row at its beginning, and the scale is multiplied in afterwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..target import Target
from .real import I64
from .simd import Emit


class Products(NamedTuple):
    """The emitted intrinsics, callable from Numba code."""

    scores: Any  # of pairs of bfloat16 it has a fifth argument, what the sums are multiplied by
    mix: Any
    mix_apart: Any
    mix_turned: Any


def _multiply(
    e: Emit, t: Target, rows: list[ir.Value], right: ir.Value, steps: ir.Value, sums: list[ir.Value]
) -> list[ir.Value]:
    """sums[r, v] += Σ_k rows[r][k] · right[k·nr + v·lanes]; where numbers go in pairs, k counts those."""

    def pairs(k: ir.Value, acc: list[ir.Value]) -> list[ir.Value]:
        c = e.at(right, e.b.mul(k, ir.Constant(I64, t.nr)))
        columns = [e.words(c, v * t.lanes) for v in range(t.nv)]
        new = []
        for r in range(t.mr):
            x = e.b.bitcast(e.broadcast(rows[r], k), e.ints)
            new += [e.dot(x, columns[v], acc[r * t.nv + v], t.dot) for v in range(t.nv)]
        return new

    def body(k: ir.Value, acc: list[ir.Value]) -> list[ir.Value]:
        c = e.at(right, e.b.mul(k, ir.Constant(I64, t.nr)))
        columns = [e.load(c, v * t.lanes) for v in range(t.nv)]
        new = []
        for r in range(t.mr):
            x = e.broadcast(rows[r], k)
            new += [e.fma(x, columns[v], acc[r * t.nv + v]) for v in range(t.nv)]
        return new

    return e.loop(steps, 1, sums, pairs if t.pairs else body)


def emit(t: Target) -> Products:
    """Write the products for a target."""

    @intrinsic
    def scores(typingctx: Any, left: Any, right: Any, steps: Any, out: Any) -> Any:
        """out[mr, nr] = left[mr, steps] · right[steps, nr], rows of `left` steps apart, of `out` block_k apart."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            left, right, out = e.pointer(args[0]), e.pointer(args[1]), e.pointer(args[3])
            rows = [e.at(left, builder.mul(args[2], ir.Constant(I64, r))) for r in range(t.mr)]
            sums = _multiply(e, t, rows, right, args[2], [e.const(0.0)] * (t.mr * t.nv))
            for r in range(t.mr):
                for v in range(t.nv):
                    e.store(sums[r * t.nv + v], out, r * t.block_k + v * t.lanes)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    @intrinsic
    def scores_of_pairs(typingctx: Any, left: Any, right: Any, steps: Any, out: Any, factor: Any) -> Any:
        """out[mr, nr] = factor · left[mr, steps] · right[steps, nr], as `scores`."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            left, right, out, factor = (
                e.pointer(args[0]),
                e.pointer(args[1]),
                e.pointer(args[3]),
                e.splat(args[4]),
            )
            rows = [e.at(left, builder.mul(args[2], ir.Constant(I64, r))) for r in range(t.mr)]
            sums = _multiply(e, t, rows, right, args[2], [e.const(0.0)] * (t.mr * t.nv))
            for r in range(t.mr):
                for v in range(t.nv):
                    e.store(builder.fmul(sums[r * t.nv + v], factor), out, r * t.block_k + v * t.lanes)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4, types.float32), codegen

    @intrinsic
    def mix(typingctx: Any, left: Any, right: Any, steps: Any, out: Any) -> Any:
        """out[mr, nr] += left[mr, steps] · right[steps, nr], rows of `left` block_k apart, of `out` nr apart."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            left, right, out = e.pointer(args[0]), e.pointer(args[1]), e.pointer(args[3])
            places = [(r * t.nv + v, r * t.nr + v * t.lanes) for r in range(t.mr) for v in range(t.nv)]
            rows = [e.at(left, r * t.block_k) for r in range(t.mr)]
            sums = _multiply(e, t, rows, right, args[2], [e.load(out, at) for _, at in places])
            for n, at in places:
                e.store(sums[n], out, at)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    @intrinsic
    def mix_apart(typingctx: Any, left: Any, right: Any, steps: Any, out: Any) -> Any:
        """As `mix`, but summed by itself first: of thousands of terms a sum of block sums keeps more digits."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            left, right, out = e.pointer(args[0]), e.pointer(args[1]), e.pointer(args[3])
            places = [(r * t.nv + v, r * t.nr + v * t.lanes) for r in range(t.mr) for v in range(t.nv)]
            rows = [e.at(left, r * t.block_k) for r in range(t.mr)]
            sums = _multiply(e, t, rows, right, args[2], [e.const(0.0)] * (t.mr * t.nv))
            for n, at in places:
                e.store(builder.fadd(e.load(out, at), sums[n]), out, at)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    @intrinsic
    def mix_turned(typingctx: Any, left: Any, right: Any, steps: Any, out: Any) -> Any:
        """out[mr, nr] += leftᵀ[mr, steps] · right[steps, nr]: the columns of a grid as rows; summed as in mix_apart."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            left, right, out = e.pointer(args[0]), e.pointer(args[1]), e.pointer(args[3])
            places = [(r * t.nv + v, r * t.nr + v * t.lanes) for r in range(t.mr) for v in range(t.nv)]

            def body(k: ir.Value, acc: list[ir.Value]) -> list[ir.Value]:
                c = e.at(right, builder.mul(k, ir.Constant(I64, t.nr)))
                row = e.at(left, builder.mul(k, ir.Constant(I64, t.block_k)))
                columns = [e.load(c, v * t.lanes) for v in range(t.nv)]
                new = []
                for r in range(t.mr):
                    x = e.broadcast(row, r)
                    new += [e.fma(x, columns[v], acc[r * t.nv + v]) for v in range(t.nv)]
                return new

            sums = e.loop(args[2], 1, [e.const(0.0)] * (t.mr * t.nv), body)
            for n, at in places:
                e.store(builder.fadd(e.load(out, at), sums[n]), out, at)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return Products(scores_of_pairs if t.pairs else scores, mix, mix_apart, mix_turned)
