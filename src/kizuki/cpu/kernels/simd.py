"""Vector code for Numba: a thin layer over the LLVM IR builder.

An `Emit` writes straight-line vector code and counted loops at one place of a function. Everything
works on addresses (int64 bytes), so that one compiled kernel serves every layout.

No fast-math flag is used: −inf and NaN keep their meaning, and the order of every sum is the one
written here, which is what makes results the same bits on one thread or many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from ..sizes import FLOAT16, PLAIN
from ..target import Target
from .real import F16, I8, I16, I32, I64, LOG2E, real


def ask_for(b: ir.IRBuilder, address: ir.Value) -> None:
    """Write a prefetch of the cache line at a byte address."""
    byte, name = I8.as_pointer(), "llvm.prefetch.p0i8"
    known = b.module.globals.get(name)
    if known is None:
        known = ir.Function(b.module, ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]), name)
    how = [ir.Constant(I32, n) for n in (0, 3, 1)]  # to read, into every level, data
    b.call(known, [b.inttoptr(address, byte), *how])


def rounded_bfloat16(
    b: ir.IRBuilder, x: ir.Value, word: ir.Type, half: ir.Type, const: Callable[[int], ir.Constant]
) -> ir.Value:
    """The bits of float32 numbers rounded to bfloat16, to nearest, ties to even; `word` and `half` their int types."""
    bits = b.bitcast(x, word)
    odd = b.and_(b.lshr(bits, const(16)), const(1))
    up = b.add(bits, b.add(odd, const(0x7FFF)))
    # A NaN must not round into an infinity: it keeps its sign and becomes the quiet one.
    up = b.select(b.fcmp_unordered("uno", x, x), b.or_(bits, const(0x400000)), up)
    return b.trunc(b.lshr(up, const(16)), half)


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


DOTS = {  # by the processor's feature, for the vectors of its target
    "avx512bf16": "llvm.x86.avx512bf16.dpbf16ps.512",
    "bf16": "llvm.aarch64.neon.bfdot.v4f32.v8bf16",
}


class Emit:
    """Writes vector instructions of a target's lanes with an LLVM IR builder."""

    def __init__(self, builder: ir.IRBuilder, t: Target) -> None:
        self.b, self.lanes, self.real = builder, t.lanes, real(t.size)
        self.masked_load = t.name.startswith("avx2")
        self.scalar = self.real.ir
        self.vec = ir.VectorType(self.scalar, self.lanes)
        self.ints = ir.VectorType(self.real.bits, self.lanes)
        self.order = ir.VectorType(I32, self.lanes)  # what a shuffle is told by

    def pointer(self, address: ir.Value) -> ir.Value:
        return self.b.inttoptr(address, self.scalar.as_pointer())

    def const(self, x: float) -> ir.Constant:
        return ir.Constant(self.vec, [float(x)] * self.lanes)

    def const_int(self, x: int) -> ir.Constant:
        return ir.Constant(self.ints, [x] * self.lanes)

    def splat(self, scalar: ir.Value) -> ir.Value:
        first = self.b.insert_element(ir.Constant(self.vec, ir.Undefined), scalar, ir.Constant(I32, 0))
        none = ir.Constant(self.order, [0] * self.lanes)
        return self.b.shuffle_vector(first, ir.Constant(self.vec, ir.Undefined), none)

    def at(self, pointer: ir.Value, index: ir.Value | int) -> ir.Value:
        if isinstance(index, int):
            index = ir.Constant(I64, index)
        return self.b.gep(pointer, [index])

    def load(self, pointer: ir.Value, index: ir.Value | int = 0) -> ir.Value:
        value = self.b.load(self.b.bitcast(self.at(pointer, index), self.vec.as_pointer()))
        value.align = self.real.size
        return value

    def load_kind(self, address: ir.Value, kind: int) -> ir.Value:
        """A vector at a byte address: of this type (kind 0), or bfloat16 (1) or float16 (2) widened."""
        if kind == PLAIN:
            return self.load(self.pointer(address))
        half = ir.VectorType(F16 if kind == FLOAT16 else I16, self.lanes)
        narrow = self.b.load(self.b.inttoptr(address, half.as_pointer()))
        narrow.align = 2
        if kind == FLOAT16:
            return self.b.fpext(narrow, self.vec)
        return self.b.bitcast(self.b.shl(self.b.zext(narrow, self.ints), self.const_int(16)), self.vec)

    def store_kind(self, value: ir.Value, address: ir.Value, kind: int) -> None:
        """Write a vector, rounded to nearest, ties to even, where the memory is 16-bit."""
        b = self.b
        if kind == PLAIN:
            self.store(value, self.pointer(address))
            return
        half = ir.VectorType(F16 if kind == FLOAT16 else I16, self.lanes)
        if kind == FLOAT16:
            narrow = b.fptrunc(value, half)
        else:
            narrow = rounded_bfloat16(b, value, self.ints, half, self.const_int)
        done = b.store(narrow, b.inttoptr(address, half.as_pointer()))
        done.align = 2

    def store(self, value: ir.Value, pointer: ir.Value, index: ir.Value | int = 0) -> None:
        done = self.b.store(value, self.b.bitcast(self.at(pointer, index), self.vec.as_pointer()))
        done.align = self.real.size

    def prefetch(self, address: ir.Value) -> None:
        """Ask for the cache line at a byte address; never faults."""
        ask_for(self.b, address)

    def broadcast(self, pointer: ir.Value, index: ir.Value | int) -> ir.Value:
        scalar = self.b.load(self.at(pointer, index))
        scalar.align = self.real.size
        return self.splat(scalar)

    def call(self, name: str, *args: ir.Value) -> ir.Value:
        full = f"llvm.{name}.v{self.lanes}f{8 * self.real.size}"
        known = self.b.module.globals.get(full)
        if known is None:
            known = ir.Function(self.b.module, ir.FunctionType(self.vec, [self.vec] * len(args)), full)
        return self.b.call(known, args)

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return self.call("fma", x, y, z)

    def keep(self, pointer: ir.Value, index: ir.Value, there: ir.Value, other: float) -> None:
        """Write `other` where `there` is false.

        A select of what was loaded becomes a masked store, which takes AMD's processors with AVX2 twenty cycles; a
        masked load does not.
        """
        b = self.b
        if not self.masked_load:
            self.store(b.select(there, self.load(pointer, index), self.const(other)), pointer, index)
            return
        name, kind = (
            f"llvm.masked.load.v{self.lanes}f{8 * self.real.size}.p0v{self.lanes}f{8 * self.real.size}",
            self.vec,
        )
        place, flags = kind.as_pointer(), ir.VectorType(ir.IntType(1), self.lanes)
        known = b.module.globals.get(name)
        if known is None:
            known = ir.Function(b.module, ir.FunctionType(kind, [place, I32, flags, kind]), name)
        where = b.bitcast(self.at(pointer, index), place)
        align = ir.Constant(I32, self.real.size)
        self.store(b.call(known, [where, align, there, self.const(other)]), pointer, index)

    def words(self, pointer: ir.Value, index: ir.Value | int = 0) -> ir.Value:
        """A vector of 32-bit words, each a pair of bfloat16 numbers, the first in its low half."""
        return self.b.bitcast(self.load(pointer, index), self.ints)

    def weave(self, first: ir.Value, second: ir.Value) -> ir.Value:
        """Words of the 16-bit numbers at two byte addresses: the first's in the low halves."""
        b, half = self.b, ir.VectorType(I16, self.lanes)
        low, high = (b.load(b.inttoptr(place, half.as_pointer())) for place in (first, second))
        low.align = high.align = 2
        return b.or_(b.zext(low, self.ints), b.shl(b.zext(high, self.ints), self.const_int(16)))

    def dot(self, x: ir.Value, y: ir.Value, total: ir.Value, how: str) -> ir.Value:
        """total + the products of each pair of x and y, by the instruction that `how` names."""
        b = self.b
        if how in DOTS:
            name, pairs = DOTS[how], ir.VectorType(BFloat(), 2 * self.lanes)
            known = b.module.globals.get(name)
            if known is None:
                known = ir.Function(b.module, ir.FunctionType(self.vec, [self.vec, pairs, pairs]), name)
            return b.call(known, [total, b.bitcast(x, pairs), b.bitcast(y, pairs)])
        low, high = (
            [b.bitcast(change(v), self.vec) for v in (x, y)]
            for change in (
                lambda v: b.shl(v, self.const_int(16)),
                lambda v: b.and_(v, self.const_int(0xFFFF0000)),
            )
        )
        return self.fma(high[0], high[1], self.fma(low[0], low[1], total))

    def larger(self, best: ir.Value, x: ir.Value) -> ir.Value:
        """max that keeps `best` where x is NaN: one instruction, and the NaN shows in the sum instead."""
        return self.b.select(self.b.fcmp_ordered(">", x, best), x, best)

    def exp(self, x: ir.Value) -> ir.Value:
        """e^x to the type's rounding; exactly 0 below `lowest`, NaN for NaN. x <= 0 is what softmax needs."""
        b, real = self.b, self.real
        magic = self.fma(x, self.const(LOG2E), self.const(real.magic))
        whole = b.fsub(magic, self.const(real.magic))
        part = self.fma(x, self.const(LOG2E), b.fneg(whole))
        p = self.const(real.exp2[-1])
        for c in reversed(real.exp2[:-1]):
            p = self.fma(p, part, self.const(c))
        power = b.bitcast(b.shl(b.bitcast(magic, self.ints), self.const_int(real.mantissa)), self.vec)
        y = b.fmul(p, power)  # a product, so that NaN stays NaN
        return b.select(b.fcmp_ordered("<", x, self.const(real.lowest)), self.const(0.0), y)

    def tanh(self, x: ir.Value) -> ir.Value:
        """tanh to the type's rounding: a polynomial near 0, where (1 − e^−2x)/(1 + e^−2x) would cancel."""
        b, real = self.b, self.real
        square = b.fmul(x, x)
        p = self.const(real.tanh[-1])
        for c in reversed(real.tanh[:-1]):
            p = self.fma(p, square, self.const(c))
        near = self.fma(b.fmul(p, square), x, x)
        size = self.call("fabs", x)
        fall = self.exp(b.fmul(size, self.const(-2.0)))
        one = self.const(1.0)
        far = self.call("copysign", b.fdiv(b.fsub(one, fall), b.fadd(one, fall)), x)
        return b.select(b.fcmp_ordered("<", size, self.const(0.625)), near, far)

    def fold(self, value: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Combine the lanes pairwise, always in the same order; the scalar result."""
        width = self.lanes
        while width > 1:
            width //= 2
            order = [i + width if i < width else i for i in range(self.lanes)]
            moved = self.b.shuffle_vector(value, value, ir.Constant(self.order, order))
            value = combine(value, moved)
        return self.b.extract_element(value, ir.Constant(I32, 0))

    def transpose(self, rows: list[ir.Value], width: int = 0) -> list[ir.Value]:
        """A square of vectors transposed, or the blocks of `width` lanes in it.

        Pairwise exchanges of blocks twice as wide each round (Eklundh 1972). The first two rounds together are what
        processors have an instruction for: interleaving by one, then by two, four rows at a time.
        """
        width, done = width or self.lanes, 1
        if width >= 4 and self.real.size == 4:
            rows, done = self._quads(rows), 4
        while done < width:
            high = [bool(c & done) for c in range(self.lanes)]
            # Lanes 0 … n−1 of a shuffle name its first operand, n … 2n−1 its second.
            first = [self.lanes + c - done if up else c for c, up in enumerate(high)]
            second = [self.lanes + c if up else c + done for c, up in enumerate(high)]
            new = list(rows)
            for i in range(self.lanes):
                if not i & done:
                    new[i] = self._picked(rows[i], rows[i + done], first)
                    new[i + done] = self._picked(rows[i], rows[i + done], second)
            rows, done = new, done * 2
        return rows

    def _picked(self, a: ir.Value, c: ir.Value, lanes: list[int]) -> ir.Value:
        return self.b.shuffle_vector(a, c, ir.Constant(self.order, lanes))

    def _quads(self, rows: list[ir.Value]) -> list[ir.Value]:
        """The blocks of four lanes of a square of vectors transposed."""
        n, starts = self.lanes, range(0, self.lanes, 4)
        one = [[start + up + c // 2 + n * (c % 2) for start in starts for c in range(4)] for up in (0, 2)]
        two = [[start + up + c % 2 + n * (c // 2) for start in starts for c in range(4)] for up in (0, 2)]
        new = []
        for i in range(0, n, 4):
            a, c = ([self._picked(rows[at], rows[at + 1], way) for way in one] for at in (i, i + 2))
            new += [self._picked(a[half], c[half], way) for half in (0, 1) for way in two]
        return new

    def transposed(self, addresses: list[ir.Value]) -> list[ir.Value]:
        """The square of vectors at byte addresses, transposed; a word aligned as little as its 16-bit halves.

        The widest exchange is made by loading halves of two rows into one vector, which takes no shuffle.
        """
        half = self.lanes // 2
        if half < 4 or self.real.size != 4:
            rows = [self.load(self.pointer(address)) for address in addresses]
            for row in rows:
                row.align = 2
            return self.transpose(rows)
        kind, rows = ir.VectorType(self.scalar, half), []
        both = ir.Constant(self.order, list(range(self.lanes)))
        for shift in (0, half):
            for i in range(half):
                parts = []
                for address in (addresses[i], addresses[i + half]):
                    place = self.b.add(address, ir.Constant(I64, shift * self.real.size))
                    part = self.b.load(self.b.inttoptr(place, kind.as_pointer()))
                    part.align = 2
                    parts.append(part)
                rows.append(self.b.shuffle_vector(*parts, both))
        return self.transpose(rows, half)

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

    def when(
        self,
        condition: ir.Value,
        values: Sequence[ir.Value],
        change: Callable[[Sequence[ir.Value]], Sequence[ir.Value]],
    ) -> list[ir.Value]:
        """The values, changed where the condition holds."""
        b = self.b
        entry, then, end = b.block, b.append_basic_block("then"), b.append_basic_block("after")
        b.cbranch(condition, then, end)
        b.position_at_end(then)
        changed, last = change(values), b.block
        b.branch(end)
        b.position_at_end(end)
        joined = []
        for old, new in zip(values, changed, strict=True):
            phi = b.phi(old.type)
            phi.add_incoming(old, entry)
            phi.add_incoming(new, last)
            joined.append(phi)
        return joined
