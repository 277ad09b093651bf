"""Scalars for Numba: loads, stores, prefetches and atomics at an address (int64 bytes)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..sizes import BFLOAT16, PLAIN
from ..target import Target
from .real import F16, F32, F64, I8, I16, I32, I64
from .simd import ask_for, rounded_bfloat16

# What a kernel is put together from: linked into it and called from nowhere else, so without wrappers of its own, and
# without Numba's rewriting of arrays, of which there are none.
piece = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, no_rewrites=True)


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
load_f64 = _scalar_load(F64, types.float64, 8)
store_f64 = _scalar_store(F64, types.float64, 8)
load_f32 = _scalar_load(F32, types.float32, 4)
store_f32 = _scalar_store(F32, types.float32, 4)
load_i32 = _scalar_load(I32, types.int32, 2)
store_i32 = _scalar_store(I32, types.int32, 4)
load_u16 = _scalar_load(I16, types.uint16, 2)
store_u16 = _scalar_store(I16, types.uint16, 2)
load_u8 = _scalar_load(I8, types.uint8, 1)
store_u8 = _scalar_store(I8, types.uint8, 1)


@intrinsic
def load_narrow(typingctx: Any, address: Any, kind: Any) -> Any:
    """A 16-bit number as float32: bfloat16 where `kind` is 1, float16 otherwise."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.load(builder.inttoptr(args[0], I16.as_pointer()))
        bits.align = 2
        high = builder.bitcast(builder.shl(builder.zext(bits, I32), ir.Constant(I32, 16)), F32)
        half = builder.fpext(builder.bitcast(bits, F16), F32)
        return builder.select(builder.icmp_signed("==", args[1], ir.Constant(I64, BFLOAT16)), high, half)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def store_narrow(typingctx: Any, address: Any, value: Any, kind: Any) -> Any:
    """A float32 rounded to 16 bits: bfloat16 where `kind` is 1, float16 otherwise."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, x = builder, args[1]
        high = rounded_bfloat16(b, x, I32, I16, lambda n: ir.Constant(I32, n))
        half = b.bitcast(b.fptrunc(x, F16), I16)
        chosen = b.select(b.icmp_signed("==", args[2], ir.Constant(I64, BFLOAT16)), high, half)
        done = b.store(chosen, b.inttoptr(args[0], I16.as_pointer()))
        done.align = 2
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), codegen


class Access(NamedTuple):
    """Scalar access in the type of a target, for Numba code."""

    load: Any
    store: Any
    load_kind: Any  # of memory that may be 16-bit
    store_kind: Any
    real: Any  # converts to the type
    size: int


def access(t: Target) -> Access:
    """Scalar access for a target."""
    if t.size == 8:

        @piece
        def load_double(address: int, kind: int) -> float:
            return load_f64(address)

        @piece
        def store_double(address: int, x: float, kind: int) -> None:
            store_f64(address, x)

        return Access(load_f64, store_f64, load_double, store_double, types.float64, 8)

    @piece
    def load_kind(address: int, kind: int) -> float:
        return load_f32(address) if kind == PLAIN else load_narrow(address, kind)

    @piece
    def store_kind(address: int, x: float, kind: int) -> None:
        if kind == PLAIN:
            store_f32(address, x)
        else:
            store_narrow(address, x, kind)

    return Access(load_f32, store_f32, load_kind, store_kind, types.float32, 4)


def steps_for(t: Target) -> Any:
    """`Target.steps` for Numba code."""
    if t.pairs:
        return piece(lambda dim: (dim + 1) // 2)
    return piece(lambda dim: dim)


@intrinsic
def take_last(typingctx: Any, address: Any) -> Any:
    """As `take_ticket`, and everything written before is seen by whoever takes a later ticket."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at a byte address; never faults."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ask_for(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def fma_one(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """x·y + z rounded once, for one number."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return z(x, y, z), codegen


@intrinsic
def call_row(
    typingctx: Any,
    function: Any,
    row: Any,
    plane: Any,
    query: Any,
    key: Any,
    first: Any,
    stop: Any,
    slope: Any,
) -> Any:
    """Call `void f(row, plane, query, key, first, stop, slope)`, all int64, at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 7)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@intrinsic
def take_ticket(typingctx: Any, address: Any) -> Any:
    """Add 1 to the int64 at `address` and return what it was, atomically: the next task or scratch slot."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "monotonic")

    return types.int64(types.int64), codegen
