"""Compiling a user's function: a mask's fn(b, h, i, j), or a score's fn(score, b, h, i, j).

The function as it was written is compiled by Numba and inlined into two loops: one along a row of a kernel's scores
(`row`), one over a grid of indices (`grid`), for everything that is not a kernel. Scores are float64 in it, indices
int64.

What it refers to: numbers become part of the code; arrays and tensors are read where they lie, through a table of
addresses that is filled in before each run, so that a change to them is seen and a new tensor of the same kind
needs no compiling. A table serves one run at a time, hence `Lease`.
"""

from __future__ import annotations

import math
import operator
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import errors
from numba.core.ccallback import CFunc
from numba.core.extending import models, overload, register_model
from numba.core.imputils import lower_constant
from numba.core.typing.typeof import typeof_impl
from numba.extending import intrinsic
from torch import Tensor

from ..errors import OptionError
from ..functions import ARGUMENTS, DTYPES, Node, Survey, Unfit, named
from . import launch, torchlike
from .kernels.real import I8, I64
from .kernels.scalar import access, load_f64, load_i64, store_f64, store_i64, store_u8

KEPT = 256  # compiled functions kept; the one not used for longest goes first
HEADS, FAILURES, FIRST = 0, 1, 2  # of a table: query heads; how often the function raised; its arrays
STEP = 2.0**-17.4  # of the central difference: near the cube root of the spacing of float64

# What Numba raises of a function that it cannot compile. Bytecode it does not know has a class of its own, no
# NumbaError, in newer versions only.
REFUSED = (
    errors.NumbaError,
    getattr(errors, "UnsupportedBytecodeError", errors.UnsupportedError),
    NotImplementedError,
)

torchlike.teach()  # what `torch.where` and its like mean for one number


# -- arrays, read through the table ------------------------------------------------------------------


class Captured:
    """Stands for an array inside a compiled function: where its entry of the table lies, and what it holds."""

    def __init__(self, entry: int, dtype: np.dtype[Any], ndim: int) -> None:
        self.entry, self.dtype, self.ndim = entry, dtype, ndim


class CapturedType(types.Type):  # type: ignore[misc]
    """Numba's type of a `Captured`; everything about it is known when compiling."""

    def __init__(self, entry: int, dtype: np.dtype[Any], ndim: int) -> None:
        self.entry, self.dtype, self.ndim = entry, dtype, ndim
        super().__init__(name=f"captured({entry}, {dtype.str}, {ndim})")


register_model(CapturedType)(models.OpaqueModel)


@typeof_impl.register(Captured)
def _typeof(value: Captured, _: Any) -> CapturedType:
    return CapturedType(value.entry, value.dtype, value.ndim)


@lower_constant(CapturedType)
def _constant(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.get_dummy_value()


def _slot(builder: Any, captured: CapturedType, number: int) -> Any:
    """One int64 of the array's entry: its address, then its lengths, then its strides in bytes."""
    place = ir.Constant(I64, captured.entry + 8 * number)
    loaded = builder.load(builder.inttoptr(place, I64.as_pointer()))
    loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
    return loaded


@intrinsic
def _inside(typingctx: Any, captured: Any, index: Any) -> Any:
    """Whether every index lies within its axis, counted from either end."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = ir.Constant(ir.IntType(1), 1)
        for axis in range(captured.ndim):
            at, length = builder.extract_value(args[1], axis), _slot(builder, captured, 1 + axis)
            low = builder.icmp_signed(">=", at, builder.neg(length))
            found = builder.and_(found, builder.and_(low, builder.icmp_signed("<", at, length)))
        return found

    return types.boolean(captured, index), codegen


@intrinsic
def _element(typingctx: Any, captured: Any, index: Any) -> Any:
    """The element at indices that are `_inside`, as float64, int64 or bool."""
    kind = captured.dtype.kind
    result = {"f": types.float64, "b": types.boolean}.get(kind, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _slot(builder, captured, 0)
        for axis in range(captured.ndim):
            at, length = builder.extract_value(args[1], axis), _slot(builder, captured, 1 + axis)
            behind = builder.icmp_signed("<", at, ir.Constant(I64, 0))
            at = builder.select(behind, builder.add(at, length), at)
            step = _slot(builder, captured, 1 + captured.ndim + axis)
            place = builder.add(place, builder.mul(at, step))
        wide = 8 * captured.dtype.itemsize
        if kind == "f":
            own = ir.DoubleType() if wide == 64 else ir.FloatType()
            x = builder.load(builder.inttoptr(place, own.as_pointer()))
        else:
            x = builder.load(builder.inttoptr(place, ir.IntType(wide).as_pointer()))
        # Nobody writes to it while a kernel runs; knowing that, a load leaves a loop it does not depend on.
        x.set_metadata("invariant.load", builder.module.add_metadata([]))
        if kind == "f":
            return x if wide == 64 else builder.fpext(x, ir.DoubleType())
        if kind == "b":
            return builder.icmp_unsigned("!=", x, ir.Constant(I8, 0))
        if wide == 64:
            return x
        return builder.zext(x, I64) if kind == "u" else builder.sext(x, I64)

    return result(captured, index), codegen


def _getitem(x: Any, index: Any) -> Any:
    if not isinstance(x, CapturedType):
        return None
    if isinstance(index, types.Integer) and x.ndim == 1:

        def one(x: Any, index: Any) -> Any:
            at = (numba.int64(index),)
            if not _inside(x, at):
                raise IndexError("index out of range")
            return _element(x, at)

        return one
    if (
        isinstance(index, types.BaseTuple)
        and len(index) == x.ndim
        and all(isinstance(each, types.Integer) for each in index)
    ):

        def several(x: Any, index: Any) -> Any:
            at = _wide(index)
            if not _inside(x, at):
                raise IndexError("index out of range")
            return _element(x, at)

        return several
    return None


@intrinsic
def _wide(typingctx: Any, index: Any) -> Any:
    """A tuple of integers of any size as a tuple of int64."""
    result = types.UniTuple(types.int64, len(index))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = [
            context.cast(builder, builder.extract_value(args[0], n), kind, types.int64)
            for n, kind in enumerate(index)
        ]
        return context.make_tuple(builder, result, parts)

    return result(index), codegen


overload(operator.getitem)(_getitem)


# -- one function ------------------------------------------------------------------------------------


class Code:
    """A compiled function and its table. `row` and `grid` are compiled when they are first asked for."""

    def __init__(self, found: Survey) -> None:
        self.kind = found.kind
        self.name = named(found.node.fn)
        self.leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self.table = np.zeros(FIRST + sum(1 + 2 * a.ndim for a in found.arrays), dtype=np.int64)
        self._entries: list[Captured] = []
        at = self.table.ctypes.data + 8 * FIRST
        for array in found.arrays:
            dtype = DTYPES[array.dtype] if isinstance(array, Tensor) else array.dtype
            self._entries.append(Captured(at, dtype, array.ndim))
            at += 8 * (1 + 2 * array.ndim)
        self._kept: dict[str, Any] = {}
        self._call = self._typed(found.node)

    def _typed(self, node: Node) -> Any:
        """The function for Numba, its types known to be right; Unfit where they are not."""
        call = _njit(self._rebuilt(node))
        if node.fn.__code__.co_argcount > len(ARGUMENTS[self.kind]):
            call = _without_defaults(call, self.kind)
        kinds = [types.float64] * (self.kind == "score") + [types.int64] * 4
        try:
            call.compile(tuple(kinds))
        except REFUSED as error:
            raise Unfit(f"cannot be compiled ({_short(error)})") from None
        result = call.overloads[tuple(kinds)].signature.return_type
        if self.kind == "mask":
            if not isinstance(result, types.Boolean):
                raise Unfit(f"returns {result}, not a bool")
        elif not isinstance(result, (types.Integer, types.Float)) or isinstance(result, types.Boolean):
            raise Unfit(f"returns {result}, not a number")
        return call

    def _rebuilt(self, node: Node) -> FunctionType:
        """The same code over what stands for the things it refers to."""
        fn = node.fn
        cells = tuple(_cell(self._given(spec)) for spec in node.cells)
        outside = {name: self._given(spec) for name, spec in node.globals.items()}
        outside["__builtins__"] = fn.__globals__.get("__builtins__", __builtins__)
        outside["__name__"] = fn.__globals__.get("__name__", "__main__")
        defaults = tuple(self._given(spec) for spec in node.defaults)
        return FunctionType(fn.__code__, outside, fn.__name__, defaults or None, cells)

    def _given(self, spec: tuple[str, Any]) -> Any:
        what, value = spec
        if what == "array":
            return self._entries[value]
        if what == "function":
            return _njit(self._rebuilt(value))
        return value

    def fill(self, found: Survey, heads: int) -> tuple[list[Any], np.ndarray]:
        """What the table must hold for these arrays, and what keeps its addresses valid."""
        alive: list[Any] = []
        content: list[int] = [heads]
        for array in found.arrays:
            if isinstance(array, Tensor):
                array = array.detach().resolve_neg()
                if array.dtype in (torch.float16, torch.bfloat16):
                    array = array.float()
                steps = [step * array.element_size() for step in array.stride()]
                content += [array.data_ptr(), *array.shape, *steps]
            else:
                content += [array.ctypes.data, *array.shape, *array.strides]
            alive.append(array)
        return alive, np.array(content, dtype=np.int64)

    def holds(self, content: np.ndarray) -> bool:
        return bool(self.table[HEADS] == content[0]) and np.array_equal(self.table[FIRST:], content[1:])

    def write(self, content: np.ndarray) -> None:
        self.table[HEADS], self.table[FIRST:] = content[0], content[1:]

    def row(self, dtype: torch.dtype) -> int:
        """The address of `void f(row, plane, query, key, first, stop, slope)` for scores of a dtype."""
        return int(self._compiled(f"row {dtype}", lambda: _row(self, dtype), 7).address)

    def grid(self) -> Any:
        """`f(header)` as `_header` lays it out, callable with an address."""
        kernel = self._compiled("grid", lambda: _grid(self), 1)
        return launch._call(int(kernel.address))

    def _compiled(self, name: str, build: Any, arguments: int) -> Any:
        known = self._kept.get(name)
        if known is None:
            options = {"nopython": True, "boundscheck": False, "error_model": "numpy"}
            # Always guarded: reading past a tuple or a list raises too, and nobody would hear of it.
            function = _guarded(build(), self.table.ctypes.data + 8 * FAILURES, arguments)
            known = CFunc(function, ((types.int64,) * arguments, types.void), {}, options)
            known.compile()
            self._kept[name] = known
        return known


class Lease:
    """The right to run a `Code` with the arrays its table now holds; ends when it is forgotten."""

    def __init__(self, code: Code, alive: Sequence[Any]) -> None:
        self.code, self.alive = code, alive
        self._failures = int(code.table[FAILURES])

    def check(self) -> None:
        """Raise if the function has raised since: then what was computed is worth nothing."""
        if int(self.code.table[FAILURES]) != self._failures:
            where = "masks.where" if self.code.kind == "mask" else "score"
            raise OptionError(
                f"kizuki: {where} function {self.code.name} raised, or read past the end of an array it "
                f"uses, at one of its indices ({', '.join(ARGUMENTS[self.code.kind])}); check the lengths it expects"
            )


def _cell(value: Any) -> Any:
    def closure() -> Any:
        return value

    return (closure.__closure__ or ())[0]


def _njit(function: Callable[..., Any]) -> Any:
    return numba.njit(function, error_model="numpy", boundscheck=True)


def _without_defaults(call: Any, kind: str) -> Any:
    """The same function of its five (or four) arguments alone; what it takes beyond them stands at its default."""
    if kind == "mask":
        return _njit(lambda b, h, i, j: call(b, h, i, j))
    return _njit(lambda s, b, h, i, j: call(s, b, h, i, j))


def _short(error: BaseException) -> str:
    """The line of Numba's message that says what was wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    starts = ("No implementation", "Unknown attribute", "Cannot unify", "Untyped", "Invalid use", "Failed at")
    told = [line for line in lines if line.startswith(starts)] or lines or ["no reason given"]
    return told[0][:160]


def _guarded(function: Any, failures: int, arguments: int) -> Any:
    inner = numba.njit(function, error_model="numpy")
    # Numba knows `except` bare or of Exception only; the exception is counted and reported by `Lease.check`.
    if arguments == 1:

        def one(header: int) -> None:
            try:
                inner(header)
            except:  # noqa: E722
                store_i64(failures, load_i64(failures) + 1)

        return one

    def row(row: int, plane: int, query: int, key: int, first: int, stop: int, slope: int) -> None:
        try:
            inner(row, plane, query, key, first, stop, slope)
        except:  # noqa: E722
            store_i64(failures, load_i64(failures) + 1)

    return row


def _difference(call: Any) -> Any:
    """d fn / d s by a central difference, one-sided beside a score of −inf, 0 where there is none."""

    @numba.njit(error_model="numpy")
    def difference(s: float, b: int, h: int, i: int, j: int) -> float:
        step = STEP * max(1.0, abs(s))
        high, low = s + step, s - step
        up, down = numba.float64(call(high, b, h, i, j)), numba.float64(call(low, b, h, i, j))
        if math.isfinite(up) and math.isfinite(down):
            return (up - down) / (high - low)
        here = numba.float64(call(s, b, h, i, j))
        if math.isfinite(here) and math.isfinite(up):
            return (up - here) / (high - s)
        if math.isfinite(here) and math.isfinite(down):
            return (here - down) / (s - low)
        return 0.0

    return difference


def _row(code: Code, dtype: torch.dtype) -> Any:
    """The loop along a row of a kernel's scores."""
    target = launch.target(dtype)
    load, store, _, _, real, size = access(target)
    call, heads_at = code._call, code.table.ctypes.data + 8 * HEADS
    lowest, highest = (real(x) for x in (torch.finfo(dtype).min, torch.finfo(dtype).max))
    below, above, none = float(lowest), float(highest), real(-math.inf)

    if code.kind == "mask":

        def hide(row: int, plane: int, query: int, key: int, first: int, stop: int, slope: int) -> None:
            heads = load_i64(heads_at)
            b, h = plane // heads, plane % heads
            for c in range(first, stop):
                s = load(row + c * size)
                store(row + c * size, s if call(b, h, query, key + c) else none)

        return hide

    difference = _difference(call)

    def bend(row: int, plane: int, query: int, key: int, first: int, stop: int, slope: int) -> None:
        heads = load_i64(heads_at)
        b, h = plane // heads, plane % heads
        if slope != 0:
            for c in range(first, stop):
                s = numba.float64(load(row + c * size))
                d = difference(s, b, h, query, key + c)
                store(slope + c * size, real(load(slope + c * size) * d))
        for c in range(first, stop):
            x = numba.float64(call(numba.float64(load(row + c * size)), b, h, query, key + c))
            # A finite number stays finite: a score of −1e300 is very low, and not absence.
            low = lowest if x < below and x != -math.inf else real(x)
            store(row + c * size, highest if x > above and x != math.inf else low)

    return bend


def _grid(code: Code) -> Any:
    """The loop over a grid of four axes; `_header` says what lies at `header`."""
    call = code._call
    if code.kind == "mask":

        def see(header: int) -> None:
            out = load_i64(header + 32)
            for k in range(load_i64(header)):
                for m in range(load_i64(header + 8)):
                    for r in range(load_i64(header + 16)):
                        b, h, i, j, step = _at(header, k, m, r)
                        count = load_i64(header + 24)
                        for c in range(count):
                            store_u8(out + c, numba.uint8(call(b, h, i, load_i64(j + c * step))))
                        out += count

        return see
    difference = _difference(call)

    def bend(header: int) -> None:
        out, slope = load_i64(header + 32), load_i64(header + 40)
        for k in range(load_i64(header)):
            for m in range(load_i64(header + 8)):
                for r in range(load_i64(header + 16)):
                    b, h, i, j, step = _at(header, k, m, r)
                    count = load_i64(header + 24)
                    if slope != 0:
                        for c in range(count):
                            s = load_f64(out + 8 * c)
                            store_f64(slope + 8 * c, difference(s, b, h, i, load_i64(j + c * step)))
                        slope += 8 * count
                    for c in range(count):
                        s = load_f64(out + 8 * c)
                        store_f64(out + 8 * c, numba.float64(call(s, b, h, i, load_i64(j + c * step))))
                    out += 8 * count

    return bend


@numba.njit(error_model="numpy")
def _at(header: int, k: int, m: int, r: int) -> tuple[int, int, int, int, int]:
    """b, h and i of a row of the grid; the address of its first j, and the step to the next in bytes."""
    b = header + 48
    h, i, j = b + 40, b + 80, b + 120
    return (
        load_i64(_place(b, k, m, r)),
        load_i64(_place(h, k, m, r)),
        load_i64(_place(i, k, m, r)),
        _place(j, k, m, r),
        load_i64(j + 32),
    )


@numba.njit(error_model="numpy")
def _place(entry: int, k: int, m: int, r: int) -> int:
    steps = k * load_i64(entry + 8) + m * load_i64(entry + 16) + r * load_i64(entry + 24)
    return load_i64(entry) + steps


def _header(shape: Sequence[int], out: Tensor, slope: Tensor | None, at: Sequence[Tensor]) -> np.ndarray:
    """Four lengths; the addresses of out and slope (0 = none); of b, h, i and j the address and four byte strides."""
    values = [*shape, out.data_ptr(), 0 if slope is None else slope.data_ptr()]
    for index in at:
        steps = [s * 8 if n > 1 else 0 for n, s in zip(index.shape, index.stride(), strict=True)]
        values += [index.data_ptr(), *steps]
    return np.array(values, dtype=np.int64)


# -- finding and lending -----------------------------------------------------------------------------

_known: OrderedDict[Hashable, list[Code] | str] = OrderedDict()
_lock = threading.RLock()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that held it in the parent does not exist here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _pool(found: Survey) -> list[Code]:
    if launch.switched_off():
        raise Unfit("cannot be compiled: Numba is switched off (NUMBA_DISABLE_JIT is set)")
    known = _known.get(found.key)
    if known is None:
        try:
            known = [Code(found)]
        except Unfit as unfit:
            known = str(unfit)
        _known[found.key] = known
        while len(_known) > KEPT:
            _known.popitem(last=False)
    _known.move_to_end(found.key)
    if isinstance(known, str):
        raise Unfit(known)
    return known


def code(found: Survey) -> Code:
    """The compiled function; Unfit where it cannot be compiled, for the same reason each time."""
    with _lock:
        return _pool(found)[0]


def lend(found: Survey, heads: int) -> Lease:
    """A function with its table filled; two runs at once with different arrays get a table, and so a code, each."""
    with _lock:
        pool = _pool(found)
        alive, content = pool[0].fill(found, heads)
        chosen = next((c for c in pool if c.leases and c.holds(content)), None)
        if chosen is None:
            chosen = next((c for c in pool if not c.leases), None)
            if chosen is None:
                chosen = Code(found)
                pool.append(chosen)
            chosen.write(content)
        lease = Lease(chosen, alive)
        chosen.leases.add(lease)
        return lease


def see(found: Survey, at: Sequence[Tensor]) -> Tensor:
    """`fn(b, h, i, j)` at broadcasting indices of four axes, boolean."""
    lease = lend(found, 1)
    shape = torch.broadcast_shapes(*(t.shape for t in at))
    out = torch.empty(shape, dtype=torch.bool)
    if out.numel():
        header = _header(shape, out, None, at)
        lease.code.grid()(header.ctypes.data)
        lease.check()
    return out


def score(found: Survey, scores: Tensor, at: Sequence[Tensor], sloped: bool) -> tuple[Tensor, Tensor | None]:
    """`fn(score, b, h, i, j)` over `[batch, heads, rows, cols]` in float64, and its derivative if asked for."""
    lease = lend(found, 1)
    out = scores.detach().to(torch.float64, memory_format=torch.contiguous_format, copy=True)
    slope = torch.empty_like(out) if sloped else None
    if out.numel():
        header = _header(out.shape, out, slope, at)
        lease.code.grid()(header.ctypes.data)
        lease.check()
    return out, slope
