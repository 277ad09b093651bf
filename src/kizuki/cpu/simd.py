"""Vector code for Numba: a thin layer over the LLVM IR builder, and scalar loads, stores and atomics.

An `Emit` writes straight-line vector code and counted loops at one place of a function. Everything
works on addresses (int64 bytes), so that one compiled kernel serves every layout.

No fast-math flag is used: −inf and NaN keep their meaning, and the order of every sum is the one
written here, which is what makes results the same bits on one thread or many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

F32, I8, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)

LOG2E = 1.4426950408889634
# 2^f on [-0.5, 0.5] in degree 6: weighted least squares on Chebyshev nodes, relative error 2e-9. The constant
# term is exactly 1, so that the largest weight of a row is e^0 = 1 without rounding.
EXP2 = (
    1.0,
    0.6931472057372412,
    0.24022646890575755,
    0.055503287770067467,
    0.009618488963429359,
    0.0013399931205895048,
    0.00015345810305502153,
)
MAGIC = (
    12582912.0 + 127.0
)  # 1.5·2^23 + bias: adding it rounds to an integer and leaves n + 127 in the low bits
LOWEST = (
    -87.33654
)  # exp of less than this is below the smallest normal float32: it becomes 0, as exp(−inf) must


class Emit:
    """Writes vector instructions of `lanes` float32 with an LLVM IR builder."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.b, self.lanes = builder, lanes
        self.vec, self.ints = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)

    def pointer(self, address: ir.Value) -> ir.Value:
        return self.b.inttoptr(address, F32.as_pointer())

    def const(self, x: float) -> ir.Constant:
        return ir.Constant(self.vec, [float(x)] * self.lanes)

    def const_int(self, x: int) -> ir.Constant:
        return ir.Constant(self.ints, [x] * self.lanes)

    def splat(self, scalar: ir.Value) -> ir.Value:
        first = self.b.insert_element(ir.Constant(self.vec, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, ir.Constant(self.vec, ir.Undefined), self.const_int(0))

    def at(self, pointer: ir.Value, index: ir.Value | int) -> ir.Value:
        if isinstance(index, int):
            index = ir.Constant(I64, index)
        return self.b.gep(pointer, [index])

    def load(self, pointer: ir.Value, index: ir.Value | int = 0) -> ir.Value:
        value = self.b.load(self.b.bitcast(self.at(pointer, index), self.vec.as_pointer()))
        value.align = 4
        return value

    def store(self, value: ir.Value, pointer: ir.Value, index: ir.Value | int = 0) -> None:
        done = self.b.store(value, self.b.bitcast(self.at(pointer, index), self.vec.as_pointer()))
        done.align = 4

    def broadcast(self, pointer: ir.Value, index: ir.Value | int) -> ir.Value:
        scalar = self.b.load(self.at(pointer, index))
        scalar.align = 4
        return self.splat(scalar)

    def call(self, name: str, *args: ir.Value) -> ir.Value:
        full = f"llvm.{name}.v{self.lanes}f32"
        known = self.b.module.globals.get(full)
        if known is None:
            known = ir.Function(self.b.module, ir.FunctionType(self.vec, [self.vec] * len(args)), full)
        return self.b.call(known, args)

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return self.call("fma", x, y, z)

    def larger(self, best: ir.Value, x: ir.Value) -> ir.Value:
        """max that keeps `best` where x is NaN: one instruction, and the NaN shows in the sum instead."""
        return self.b.select(self.b.fcmp_ordered(">", x, best), x, best)

    def exp(self, x: ir.Value) -> ir.Value:
        """e^x to float32 rounding; exactly 0 below `LOWEST`, NaN for NaN. x <= 0 is what softmax needs."""
        b = self.b
        magic = self.fma(x, self.const(LOG2E), self.const(MAGIC))
        whole = b.fsub(magic, self.const(MAGIC))
        part = self.fma(x, self.const(LOG2E), b.fneg(whole))
        p = self.const(EXP2[-1])
        for c in reversed(EXP2[:-1]):
            p = self.fma(p, part, self.const(c))
        power = b.bitcast(b.shl(b.bitcast(magic, self.ints), self.const_int(23)), self.vec)
        y = b.fmul(p, power)  # a product, so that NaN stays NaN
        return b.select(b.fcmp_ordered("<", x, self.const(LOWEST)), self.const(0.0), y)

    def fold(self, value: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Combine the lanes pairwise, always in the same order; the scalar result."""
        width = self.lanes
        while width > 1:
            width //= 2
            order = [i + width if i < width else i for i in range(self.lanes)]
            moved = self.b.shuffle_vector(value, value, ir.Constant(self.ints, order))
            value = combine(value, moved)
        return self.b.extract_element(value, ir.Constant(I32, 0))

    def transpose(self, rows: list[ir.Value]) -> list[ir.Value]:
        """A square of vectors transposed: log2(lanes) rounds of pairwise exchanges (Eklundh 1972)."""
        width = 1
        while width < self.lanes:
            high = [bool(c & width) for c in range(self.lanes)]
            # Lanes 0 … n−1 of a shuffle name its first operand, n … 2n−1 its second.
            first = [self.lanes + c - width if up else c for c, up in enumerate(high)]
            second = [self.lanes + c if up else c + width for c, up in enumerate(high)]
            new = list(rows)
            for i in range(self.lanes):
                if not i & width:
                    a, c = rows[i], rows[i + width]
                    new[i] = self.b.shuffle_vector(a, c, ir.Constant(self.ints, first))
                    new[i + width] = self.b.shuffle_vector(a, c, ir.Constant(self.ints, second))
            rows, width = new, width * 2
        return rows

    def loop(
        self,
        stop: ir.Value,
        step: int,
        start_values: Sequence[ir.Value],
        body: Callable[[ir.Value, list[ir.Value]], Sequence[ir.Value]],
    ) -> list[ir.Value]:
        """`for i in range(0, stop, step)` carrying values; runs at least once, so callers pass stop >= 1."""
        b = self.b
        entry, head, end = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        i.add_incoming(ir.Constant(I64, 0), entry)
        carried = []
        for value in start_values:
            phi = b.phi(value.type)
            phi.add_incoming(value, entry)
            carried.append(phi)
        new = list(body(i, carried))
        following = b.add(i, ir.Constant(I64, step))
        last = b.block
        i.add_incoming(following, last)
        for phi, value in zip(carried, new, strict=True):
            phi.add_incoming(value, last)
        b.cbranch(b.icmp_signed("<", following, stop), head, end)
        b.position_at_end(end)
        return new


def _scalar_load(ir_type: ir.Type, numba_type: types.Type, align: int) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(builder.inttoptr(args[0], ir_type.as_pointer()))
            value.align = align
            return value

        return numba_type(types.int64), codegen

    return load


def _scalar_store(ir_type: ir.Type, numba_type: types.Type, align: int) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            done = builder.store(args[1], builder.inttoptr(args[0], ir_type.as_pointer()))
            done.align = align
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return store


load_i64 = _scalar_load(I64, types.int64, 8)
store_i64 = _scalar_store(I64, types.int64, 8)
load_f64 = _scalar_load(ir.DoubleType(), types.float64, 8)
store_f64 = _scalar_store(ir.DoubleType(), types.float64, 8)
load_f32 = _scalar_load(F32, types.float32, 4)
store_f32 = _scalar_store(F32, types.float32, 4)
load_u8 = _scalar_load(I8, types.uint8, 1)
store_u8 = _scalar_store(I8, types.uint8, 1)


@intrinsic
def take_ticket(typingctx: Any, address: Any) -> Any:
    """Add 1 to the int64 at `address` and return what it was, atomically: the next task or scratch slot."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "monotonic")

    return types.int64(types.int64), codegen


NEG_INF = -math.inf
