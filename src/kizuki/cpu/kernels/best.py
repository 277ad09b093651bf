"""The k best scores of a row, kept while key blocks pass.

A score above the least of the k best waits beside a few others, and a vector of them is sorted and merged with the
list at once (bitonic networks: Batcher 1968): no branch depends on the scores but the one that finds them. Inserted
one by one, each waits for the list that the one before it left in memory, and took three times as long.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..sizes import WAITING
from ..target import Target
from .real import I64, real
from .scalar import access, load_i64, piece, store_i32, store_i64
from .simd import Emit

Pair = tuple[ir.Value, ir.Value]  # scores, and their keys: whole numbers as wide as a score


class Best(NamedTuple):
    """Inlined pieces, callable from the forward kernel."""

    keep_best: Any
    settle: Any


def _exchange(e: Emit, mine: Pair, distance: int, early: list[bool]) -> Pair:
    """Compare lanes `distance` apart; where `early`, a lane keeps of the two what comes first, elsewhere the other.

    The larger score comes first, and of equal ones the earlier key.
    """
    order = ir.Constant(e.order, [lane ^ distance for lane in range(e.lanes)])
    theirs = tuple(e.b.shuffle_vector(value, value, order) for value in mine)
    flags = ir.VectorType(ir.IntType(1), e.lanes)
    keep = e.b.xor(_before(e, mine, theirs), ir.Constant(flags, [not lane for lane in early]))
    score, key = (e.b.select(keep, a, c) for a, c in zip(mine, theirs, strict=True))
    return score, key


def _before(e: Emit, a: Pair, c: Pair) -> ir.Value:
    earlier = e.b.and_(e.b.fcmp_ordered("==", a[0], c[0]), e.b.icmp_signed("<", a[1], c[1]))
    return e.b.or_(e.b.fcmp_ordered(">", a[0], c[0]), earlier)


def _merged(e: Emit, pair: Pair) -> Pair:
    """A bitonic vector in order."""
    distance = e.lanes // 2
    while distance:
        pair = _exchange(e, pair, distance, [not lane & distance for lane in range(e.lanes)])
        distance //= 2
    return pair


def _sorted(e: Emit, pair: Pair) -> Pair:
    """Any vector in order."""
    length = 2
    while length < e.lanes:
        distance = length // 2
        while distance:
            early = [(not lane & distance) == (not lane & length) for lane in range(e.lanes)]
            pair = _exchange(e, pair, distance, early)
            distance //= 2
        length *= 2
    return _merged(e, pair)


def emit(t: Target) -> tuple[Any, Any, Any]:
    """`(those_above, lowest_bit, merge)` for a target."""
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
    def merge(typingctx: Any, best: Any, keys: Any, more: Any, more_keys: Any, chunks: Any) -> Any:
        """Merge one vector of scores and keys, in any order, into `chunks` vectors that are in order; some fall out."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b, last = builder, e.lanes - 1
            turned = ir.Constant(e.order, [last - lane for lane in range(e.lanes)])

            def whole(address: ir.Value) -> ir.Value:
                return b.bitcast(e.load(e.pointer(address)), e.ints)

            def body(c: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                at = b.mul(c, ir.Constant(I64, t.lanes * t.size))
                here, there = b.add(args[0], at), b.add(args[1], at)
                old = e.load(e.pointer(here)), whole(there)
                new = tuple(b.shuffle_vector(value, value, turned) for value in carried)
                first = _before(e, old, new)
                high = tuple(b.select(first, a, c) for a, c in zip(old, new, strict=True))
                low = tuple(b.select(first, c, a) for a, c in zip(old, new, strict=True))
                score, key = _merged(e, high)
                e.store(score, e.pointer(here))
                e.store(b.bitcast(key, e.vec), e.pointer(there))
                return list(_merged(e, low))

            start = _sorted(e, (e.load(e.pointer(args[2])), whole(args[3])))
            e.loop(args[4], 1, list(start), body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return those_above, lowest_bit, merge


def build(t: Target) -> Best:
    """The pieces for a target."""
    those_above, lowest_bit, merge = emit(t)
    load, store, _, _, real_of, size = access(t)
    lanes = t.lanes
    stride, waiting = 4 * lanes, WAITING * lanes
    neg_inf = real_of(-math.inf)
    number = numba.int32 if size == 4 else numba.int64  # readings.py sees to it that keys fit
    store_key = store_i32 if size == 4 else store_i64

    @piece
    def settle(best: int, keys: int, chunks: int, pending: int, count: int) -> None:
        """Merge `count` scores and their keys that wait at `pending` into the k best."""
        places = pending + waiting * size
        for c in range(count, (count + lanes - 1) // lanes * lanes):
            store(pending + c * size, neg_inf)
            store_key(places + c * size, number(-1))
        for c in range(0, count, lanes):
            merge(best, keys, pending + c * size, places + c * size, chunks)

    @piece
    def keep_best(
        row: int, width: int, key: int, best: int, keys: int, k: int, pending: int, counter: int
    ) -> None:
        """Let the scores of a row that belong to its k best wait at `pending`, or settle a vector of them.

        `counter`: how many wait, an int64. An equal score stays behind the earlier key.
        """
        chunks, places = (k + lanes - 1) // lanes, pending + waiting * size
        count = load_i64(counter)
        for c in range(0, width, stride):
            bits = those_above(row + c * size, load(best + (k - 1) * size))
            if bits != 0:
                while bits != 0:
                    j = c + lowest_bit(bits)
                    bits &= bits - 1
                    store(pending + count * size, load(row + j * size))
                    store_key(places + count * size, number(key + j))
                    count += 1
                if count >= lanes:
                    settle(best, keys, chunks, pending, count)
                    count = 0
        store_i64(counter, count)

    return Best(keep_best, settle)
