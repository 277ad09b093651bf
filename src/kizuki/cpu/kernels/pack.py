"""Packing: keys into panels of nr keys, values into panels of nr columns.

Panels make every offset of the inner loops a constant and every load a contiguous one, whatever the
strides of the tensors; 16-bit operands are widened on the way. The price is one pass over each operand,
O(n · d) beside O(n² · d).
"""

from __future__ import annotations

import math
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..layout import SLOT
from ..sizes import BFLOAT16, PLAIN
from ..target import Target
from .real import I64
from .scalar import access, load_i64, load_u16, piece, steps_for, store_u8, store_u16, take_ticket
from .simd import Emit

S = SLOT
NEXT_TASK, TASKS, KIND, VALUE_KIND = S["NEXT_TASK"], S["TASKS"], S["KIND"], S["VALUE_KIND"]
KEYS, KEY_BLOCKS, KEY_WIDTH = S["KEYS"], S["KEY_BLOCKS"], S["KEY_WIDTH"]
HEAD_DIM, VALUE_DIM, VALUE_PANELS = S["HEAD_DIM"], S["VALUE_DIM"], S["VALUE_PANELS"]
KEY_PLANES, KEY_SOURCE, KEY_ROW, KEY_COL = S["KEY_PLANES"], S["KEY_SOURCE"], S["KEY_ROW"], S["KEY_COL"]
VALUE_SOURCE, VALUE_ROW, VALUE_COL = S["VALUE_SOURCE"], S["VALUE_ROW"], S["VALUE_COL"]
KEY_PACKED, VALUE_PACKED, VALUE_ODD = S["KEY_PACKED"], S["VALUE_PACKED"], S["VALUE_ODD"]
PAGES_TABLE, PAGE_KEYS = S["PAGES_TABLE"], S["PAGE_KEYS"]
KEY_PAGE, VALUE_PAGE = S["KEY_PAGE"], S["VALUE_PAGE"]
ALL_ONES = 0x7F80  # the exponent of a bfloat16 that is NaN or infinite


def bodies(t: Target) -> tuple[Any, Any]:
    """`(turn, copy_panel)`, each for memory of every kind."""

    def for_kind(kind: int) -> tuple[Any, Any]:
        size = t.size if kind == PLAIN else 2

        @intrinsic
        def turn(typingctx: Any, source: Any, row: Any, vectors: Any, out: Any) -> Any:
            """`lanes` rows of vectors·lanes numbers, `row` bytes apart, written as columns nr numbers apart."""

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                e = Emit(builder, t)
                starts = [
                    builder.add(args[0], builder.mul(args[1], ir.Constant(I64, r))) for r in range(t.lanes)
                ]
                out = e.pointer(args[3])

                def body(v: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                    d = builder.mul(v, ir.Constant(I64, t.lanes))
                    here = e.at(out, builder.mul(d, ir.Constant(I64, t.nr)))
                    step = builder.mul(d, ir.Constant(I64, size))
                    rows = [e.load_kind(builder.add(start, step), kind) for start in starts]
                    for c, column in enumerate(e.transpose(rows)):
                        e.store(column, here, c * t.nr)
                    return []

                e.loop(args[2], 1, [], body)
                return context.get_dummy_value()

            return types.void(*[types.int64] * 4), codegen

        @intrinsic
        def copy_panel(typingctx: Any, source: Any, out: Any) -> Any:
            """Copy nr numbers; returns 1 if one of them is NaN or infinite, else 0."""

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                e = Emit(builder, t)
                out = e.pointer(args[1])
                odd = e.const(0.0)
                for v in range(t.nv):
                    x = e.load_kind(builder.add(args[0], ir.Constant(I64, v * t.lanes * size)), kind)
                    e.store(x, out, v * t.lanes)
                    odd = builder.fadd(odd, builder.fsub(x, x))  # NaN unless x is finite
                mask = builder.bitcast(builder.fcmp_unordered("uno", odd, odd), ir.IntType(t.lanes))
                some = builder.icmp_unsigned("!=", mask, ir.Constant(ir.IntType(t.lanes), 0))
                return builder.zext(some, I64)

            return types.int64(types.int64, types.int64), codegen

        return turn, copy_panel

    made = [for_kind(kind if t.size == 4 else PLAIN) for kind in range(3)]
    turns, copies = (tuple(pair[n] for pair in made) for n in (0, 1))
    turn_plain, turn_bfloat16, turn_float16 = turns
    copy_plain, copy_bfloat16, copy_float16 = copies

    @piece
    def turn(source: int, row: int, vectors: int, out: int, kind: int) -> None:
        if kind == PLAIN:
            turn_plain(source, row, vectors, out)
        elif kind == BFLOAT16:
            turn_bfloat16(source, row, vectors, out)
        else:
            turn_float16(source, row, vectors, out)

    @piece
    def copy_panel(source: int, out: int, kind: int) -> int:
        if kind == PLAIN:
            return copy_plain(source, out)
        if kind == BFLOAT16:
            return copy_bfloat16(source, out)
        return copy_float16(source, out)

    return turn, copy_panel


def panels(t: Target) -> tuple[Any, Any]:
    """`(turned, straight)`: a stretch of rows into panels of nr rows, or into panels of nr columns.

    Both take source, row, col, kind, dim: the bytes from row to row and from number to number; there: how many rows;
    width: of the whole panels; target; first: what row of the panels the stretch begins with.
    """
    turn, copy_panel = bodies(t)
    _, store, load_kind, _, real, size = access(t)
    nr, lanes = t.nr, t.lanes
    infinity = real(math.inf)

    @piece
    def turned(
        source: int,
        row: int,
        col: int,
        kind: int,
        dim: int,
        there: int,
        width: int,
        target: int,
        first: int,
    ) -> None:
        """`there` rows of `dim` numbers into panels `[dim][nr]` of nr rows each, `width` rows in all, the rest 0."""
        # A vector of rows lies within one panel only where it starts at a multiple of its length.
        vectors = dim // lanes if col == (size if kind == PLAIN else 2) and first % lanes == 0 else 0
        whole = there // lanes * lanes if vectors > 0 else 0
        for c in range(0, whole, lanes):
            at = first + c
            turn(source + c * row, row, vectors, target + ((at // nr) * nr * dim + at % nr) * size, kind)
        for c in range(width - first):
            at = first + c
            out = target + ((at // nr) * nr * dim + at % nr) * size
            if c < there:
                for d in range(vectors * lanes if c < whole else 0, dim):
                    store(out + d * nr * size, load_kind(source + c * row + d * col, kind))
            else:
                for d in range(dim):
                    store(out + d * nr * size, real(0.0))

    @piece
    def straight(
        source: int,
        row: int,
        col: int,
        kind: int,
        dim: int,
        there: int,
        width: int,
        target: int,
        first: int,
    ) -> int:
        """`there` rows into panels `[width][nr]` of nr columns each; returns 1 if a number was NaN or infinite.

        Those are kept out of the products: 0 · NaN would spread to rows that do not see this one. Columns past
        `dim` are 0; rows past `there` are left as they are.
        """
        odd = 0
        for p in range((dim + nr - 1) // nr):
            full = min(nr, dim - p * nr)
            whole = full == nr and col == (size if kind == PLAIN else 2)
            for j in range(there):
                out = target + (p * width + first + j) * nr * size
                here = source + j * row + p * nr * col
                if whole and copy_panel(here, out, kind) == 0:
                    continue
                for c in range(full):
                    x = load_kind(here + c * col, kind)
                    if not math.fabs(x) < infinity:
                        odd = 1
                        x = real(0.0)
                    store(out + c * size, x)
                for c in range(full, nr):
                    store(out + c * size, real(0.0))
        return odd

    return (turned, straight) if not t.pairs else pairs(t, turned)


def pairs(t: Target, turn_words: Any) -> tuple[Any, Any]:
    """As `panels`, for bfloat16 that stays so: two dimensions of a key, or two values of a column, share a word.

    A word of a key moves as any number of 32 bits does: `turn_words`.
    """
    nr, size = t.nr, t.size

    @intrinsic
    def weave_panel(typingctx: Any, first: Any, second: Any, out: Any) -> Any:
        """Two rows of nr numbers into nr words; returns 1 if one of them is NaN or infinite, else 0."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t)
            b, out = builder, e.pointer(args[2])
            odd: Any = ir.Constant(ir.VectorType(ir.IntType(1), t.lanes), [0] * t.lanes)
            for v in range(t.nv):
                step = ir.Constant(I64, 2 * v * t.lanes)
                word = e.weave(b.add(args[0], step), b.add(args[1], step))
                e.store(b.bitcast(word, e.vec), out, v * t.lanes)
                for bits in (ALL_ONES, ALL_ONES << 16):
                    top = b.and_(word, e.const_int(bits))
                    odd = b.or_(odd, b.icmp_unsigned("==", top, e.const_int(bits)))
            mask = b.bitcast(odd, ir.IntType(t.lanes))
            some = b.icmp_unsigned("!=", mask, ir.Constant(ir.IntType(t.lanes), 0))
            return b.zext(some, I64)

        return types.int64(*[types.int64] * 3), codegen

    @piece
    def turned(
        source: int,
        row: int,
        col: int,
        kind: int,
        dim: int,
        there: int,
        width: int,
        target: int,
        first: int,
    ) -> None:
        steps = (dim + 1) // 2
        if col == 2 and dim % 2 == 0:
            turn_words(source, row, size, PLAIN, steps, there, width, target, first)
            return
        for c in range(width - first):
            at = first + c
            out = target + ((at // nr) * nr * steps + at % nr) * size
            for d in range(2 * steps):
                bits = load_u16(source + c * row + d * col) if c < there and d < dim else numba.uint16(0)
                store_u16(out + d // 2 * nr * size + d % 2 * 2, bits)

    @piece
    def straight(
        source: int,
        row: int,
        col: int,
        kind: int,
        dim: int,
        there: int,
        width: int,
        target: int,
        first: int,
    ) -> int:
        """Rows past the last are left as they are, but that its own word is whole."""
        odd = 0
        for p in range((dim + nr - 1) // nr):
            full = min(nr, dim - p * nr)
            j = 0
            while j < there:
                at = first + j
                out = target + (p * (width // 2) + at // 2) * nr * size
                here = source + j * row + p * nr * col
                both = at % 2 == 0 and j + 1 < there
                if both and full == nr and col == 2 and weave_panel(here, here + row, out) == 0:
                    j += 2
                    continue
                half = at % 2 * 2
                for c in range(nr):
                    bits = load_u16(here + c * col) if c < full else numba.uint16(0)
                    if bits & ALL_ONES == ALL_ONES:
                        odd, bits = 1, numba.uint16(0)
                    store_u16(out + c * size + half, bits)
                    if half == 0:  # the next row, if there is one, overwrites it
                        store_u16(out + c * size + 2, numba.uint16(0))
                j += 1
        return odd

    return turned, straight


def build(t: Target) -> Any:
    """The packing kernel for a target: one task a key block of a key plane, then of a value plane."""
    turned, straight = panels(t)
    nr, block_k, size = t.nr, t.block_k, t.size
    steps_of = steps_for(t)

    @piece
    def stretch(args: int, plane: int, key: int, left: int) -> tuple[int, int, int]:
        """From `key` on: its page, its place in it, and how many of the `left` next keys lie in that page."""
        pages, each = load_i64(load_i64(args + PAGES_TABLE) + 8 * plane), load_i64(args + PAGE_KEYS)
        return load_i64(pages + key // each * 8), key % each, min(each - key % each, left)

    def pack(args: int) -> None:
        tasks, blocks, keys = load_i64(args + TASKS), load_i64(args + KEY_BLOCKS), load_i64(args + KEYS)
        key_tasks, width = load_i64(args + KEY_PLANES) * blocks, load_i64(args + KEY_WIDTH)
        paged = load_i64(args + PAGES_TABLE) != 0
        while True:
            task = take_ticket(args + NEXT_TASK)
            if task >= tasks:
                break
            if task < key_tasks:
                plane, block = task // blocks, task % blocks
                row, dim = load_i64(args + KEY_ROW), load_i64(args + HEAD_DIM)
                source = load_i64(load_i64(args + KEY_SOURCE) + 8 * plane)
                col, kind = load_i64(args + KEY_COL), load_i64(args + KIND)
                there = min(width, keys - block * block_k)
                target = load_i64(args + KEY_PACKED) + task * width * steps_of(dim) * size
                if not paged:
                    turned(source + block * block_k * row, row, col, kind, dim, there, width, target, 0)
                else:
                    first = 0
                    while first < there:
                        page, at, run = stretch(args, plane, block * block_k + first, there - first)
                        here = source + page * load_i64(args + KEY_PAGE) + at * row
                        stop = width if first + run == there else first + run
                        turned(here, row, col, kind, dim, run, stop, target, first)
                        first += run
            else:
                place = task - key_tasks
                plane, block = place // blocks, place % blocks
                row, dim = load_i64(args + VALUE_ROW), load_i64(args + VALUE_DIM)
                source = load_i64(load_i64(args + VALUE_SOURCE) + 8 * plane)
                there = min(width, keys - block * block_k)
                target = (
                    load_i64(args + VALUE_PACKED)
                    + place * load_i64(args + VALUE_PANELS) * nr * steps_of(width) * size
                )
                col, kind = load_i64(args + VALUE_COL), load_i64(args + VALUE_KIND)
                odd = 0
                if not paged:
                    odd = straight(
                        source + block * block_k * row, row, col, kind, dim, there, width, target, 0
                    )
                else:
                    first = 0
                    while first < there:
                        page, at, run = stretch(args, plane, block * block_k + first, there - first)
                        here = source + page * load_i64(args + VALUE_PAGE) + at * row
                        odd |= straight(here, row, col, kind, dim, run, width, target, first)
                        first += run
                store_u8(load_i64(args + VALUE_ODD) + place, numba.uint8(odd))

    return pack
