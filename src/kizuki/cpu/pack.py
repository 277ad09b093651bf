"""Packing: keys into panels of nr keys, values into panels of nr columns.

Panels make every offset of the inner loops a constant and every load a contiguous one, whatever the
strides of the tensors; the price is one pass over each operand, O(n · d) beside O(n² · d).
"""

from __future__ import annotations

import math
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .layout import SLOT
from .simd import I64, Emit, load_f32, load_i64, store_f32, store_u8, take_ticket
from .target import Target

NEXT_TASK, TASKS = SLOT["NEXT_TASK"], SLOT["TASKS"]
KEYS, HEAD_DIM, VALUE_DIM = SLOT["KEYS"], SLOT["HEAD_DIM"], SLOT["VALUE_DIM"]
KEY_BLOCKS, KEY_WIDTH, VALUE_PANELS = SLOT["KEY_BLOCKS"], SLOT["KEY_WIDTH"], SLOT["VALUE_PANELS"]
KEY_PLANES, KEY_SOURCE, KEY_ROW, KEY_COL = (
    SLOT["KEY_PLANES"],
    SLOT["KEY_SOURCE"],
    SLOT["KEY_ROW"],
    SLOT["KEY_COL"],
)
KEY_PACKED, VALUE_PACKED, VALUE_ODD = SLOT["KEY_PACKED"], SLOT["VALUE_PACKED"], SLOT["VALUE_ODD"]
VALUE_SOURCE, VALUE_ROW, VALUE_COL = SLOT["VALUE_SOURCE"], SLOT["VALUE_ROW"], SLOT["VALUE_COL"]


def _bodies(t: Target) -> tuple[Any, Any]:
    @intrinsic
    def turn(typingctx: Any, source: Any, row: Any, vectors: Any, out: Any) -> Any:
        """`lanes` rows of vectors·lanes floats, `row` bytes apart, written as columns nr floats apart."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t.lanes)
            rows = [
                e.pointer(builder.add(args[0], builder.mul(args[1], ir.Constant(I64, r))))
                for r in range(t.lanes)
            ]
            out = e.pointer(args[3])

            def body(v: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                d = builder.mul(v, ir.Constant(I64, t.lanes))
                here = e.at(out, builder.mul(d, ir.Constant(I64, t.nr)))
                for c, column in enumerate(e.transpose([e.load(r, d) for r in rows])):
                    e.store(column, here, c * t.nr)
                return []

            e.loop(args[2], 1, [], body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    @intrinsic
    def copy_panel(typingctx: Any, source: Any, out: Any) -> Any:
        """Copy nr floats; returns 1 if one of them is NaN or infinite, else 0."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emit(builder, t.lanes)
            source, out = e.pointer(args[0]), e.pointer(args[1])
            odd = e.const(0.0)
            for v in range(t.nv):
                x = e.load(source, v * t.lanes)
                e.store(x, out, v * t.lanes)
                odd = builder.fadd(odd, builder.fsub(x, x))  # NaN unless x is finite
            mask = builder.bitcast(builder.fcmp_unordered("uno", odd, odd), ir.IntType(t.lanes))
            some = builder.icmp_unsigned("!=", mask, ir.Constant(ir.IntType(t.lanes), 0))
            return builder.zext(some, I64)

        return types.int64(types.int64, types.int64), codegen

    return turn, copy_panel


def build(t: Target) -> Any:
    """The packing kernel for a target: one task a key block of a key plane, then of a value plane."""
    turn, copy_panel = _bodies(t)
    nr, block_k, lanes = t.nr, t.block_k, t.lanes

    @numba.njit(error_model="numpy")
    def pack_keys(args: int, plane: int, block: int) -> None:
        dim, width = load_i64(args + HEAD_DIM), load_i64(args + KEY_WIDTH)
        row, col = 4 * load_i64(args + KEY_ROW), 4 * load_i64(args + KEY_COL)
        source = load_i64(load_i64(args + KEY_SOURCE) + 8 * plane) + block * block_k * row
        target = load_i64(args + KEY_PACKED) + (plane * load_i64(args + KEY_BLOCKS) + block) * width * dim * 4
        there = min(width, load_i64(args + KEYS) - block * block_k)
        vectors = dim // lanes if col == 4 else 0
        whole = there // lanes * lanes if vectors > 0 else 0
        for c in range(0, whole, lanes):
            turn(source + c * row, row, vectors, target + (c // nr) * nr * dim * 4 + (c % nr) * 4)
        for c in range(width):
            out = target + (c // nr) * nr * dim * 4 + (c % nr) * 4
            if c < whole:
                for d in range(vectors * lanes, dim):
                    store_f32(out + d * nr * 4, load_f32(source + c * row + d * col))
            elif c < there:
                for d in range(dim):
                    store_f32(out + d * nr * 4, load_f32(source + c * row + d * col))
            else:
                for d in range(dim):
                    store_f32(out + d * nr * 4, numba.float32(0.0))

    @numba.njit(error_model="numpy")
    def pack_values(args: int, plane: int, block: int) -> None:
        dim, panels, width = (
            load_i64(args + VALUE_DIM),
            load_i64(args + VALUE_PANELS),
            load_i64(args + KEY_WIDTH),
        )
        row, col = 4 * load_i64(args + VALUE_ROW), 4 * load_i64(args + VALUE_COL)
        source = load_i64(load_i64(args + VALUE_SOURCE) + 8 * plane) + block * block_k * row
        place = plane * load_i64(args + KEY_BLOCKS) + block
        target = load_i64(args + VALUE_PACKED) + place * panels * nr * width * 4
        there = min(width, load_i64(args + KEYS) - block * block_k)
        odd = 0
        for p in range(panels):
            full = min(nr, dim - p * nr)
            for j in range(there):
                out = target + (p * width + j) * nr * 4
                here = source + j * row + p * nr * col
                if full == nr and col == 4 and copy_panel(here, out) == 0:
                    continue
                for c in range(full):
                    x = load_f32(here + c * col)
                    # NaN and infinities are kept out of the products: 0 · NaN would spread to rows that
                    # do not see this key. The kernel adds them where they are seen.
                    if not math.fabs(x) < numba.float32(math.inf):
                        odd = 1
                        x = numba.float32(0.0)
                    store_f32(out + c * 4, x)
                for c in range(full, nr):
                    store_f32(out + c * 4, numba.float32(0.0))
        store_u8(load_i64(args + VALUE_ODD) + place, numba.uint8(odd))

    def pack(args: int) -> None:
        tasks, blocks = load_i64(args + TASKS), load_i64(args + KEY_BLOCKS)
        key_tasks = load_i64(args + KEY_PLANES) * blocks
        while True:
            task = take_ticket(args + NEXT_TASK)
            if task >= tasks:
                break
            if task < key_tasks:
                pack_keys(args, task // blocks, task % blocks)
            else:
                pack_values(args, (task - key_tasks) // blocks, (task - key_tasks) % blocks)

    return pack
