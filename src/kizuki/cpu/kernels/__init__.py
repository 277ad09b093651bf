"""What Numba compiles: imported only where the cache has no object code yet.

real.py     types, and polynomials of exp and tanh    simd.py     vector code over the LLVM IR builder
scalar.py   loads, stores and atomics of a number     tile.py     the emitted inner products
rows.py     the emitted bodies of a row of scores     pack.py     operands into panels
scores.py   masked scores of a block                  softmax.py  the end of a row: joining splits, dividing
forward.py  the online softmax                        decode.py   the same for few queries, nothing packed
backward.py gradients given the lse                   prepare.py  operands packed for them
watch.py    readings folded into the forward pass     views.py    its bodies
few.py      the products of decode.py                 best.py     the k largest weights of a row

A kernel is `void kernel(int64 args)`, args the address of the argument block (`layout.py`). It raises nothing,
allocates nothing and calls nothing but libm, so its object code needs neither Numba nor Python to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import compiler, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from ..target import Target
from . import backward, decode, forward, pack, prepare

BUILDERS: dict[str, Callable[[Target], Any]] = {
    "pack": pack.build,
    "forward": forward.build,
    "observe": forward.build_observed,
    "decode": decode.build,
    "prepare": prepare.build,
    "backward": backward.build,
}


class _Source(JITCodeLibrary):  # type: ignore[misc]
    """Code that is linked into a kernel as it is.

    Numba would optimise each helper by itself, and again in each function that calls it, and make machine code of all
    of them; here the kernel is optimised once, when it is whole.
    """

    def _optimize_functions(self, ll_module: llvm.ModuleRef) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0  # there is no machine code to call

    def optimise(self) -> llvm.ModuleRef:
        super()._optimize_functions(self._final_module)
        super()._optimize_final_module()
        return self._final_module


def module(name: str, target: Target, symbol: str) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    """A kernel as optimised LLVM code with one entry, `symbol`, and the machine it was optimised for."""
    flags = compiler.Flags()
    flags.no_cpython_wrapper, flags.no_cfunc_wrapper, flags.no_rewrites = True, True, True
    flags.error_model = "numpy"
    typing, context = cpu_target.typing_context, cpu_target.target_context
    function, codegen = BUILDERS[name](target), context.codegen()
    with global_compiler_lock:  # nobody else compiles while the libraries are of our kind
        usual = codegen._library_class
        codegen._library_class = _Source
        codegen.set_env = lambda name, env: None  # would write into machine code
        try:
            made = compiler.compile_extra(typing, context, function, (types.int64,), types.void, flags, {})
            made.library._final_module.link_in(
                _entry(made.library._final_module, made.fndesc.llvm_func_name, symbol)
            )
            return made.library.optimise(), codegen._tm
        finally:
            codegen._library_class = usual
            del codegen.set_env


def _entry(code: llvm.ModuleRef, native: str, symbol: str) -> llvm.ModuleRef:
    """`void symbol(int64)` around Numba's own convention, which has room for a result and an exception."""
    made = ir.Module()
    made.triple, made.data_layout = code.triple, code.data_layout
    number, byte = ir.IntType(64), ir.IntType(8).as_pointer()
    room = byte.as_pointer()
    inner = ir.Function(made, ir.FunctionType(ir.IntType(32), [room, room, number]), native)
    outer = ir.Function(made, ir.FunctionType(ir.VoidType(), [number]), symbol)
    builder = ir.IRBuilder(outer.append_basic_block("entry"))
    builder.call(inner, [builder.alloca(byte), builder.alloca(byte), outer.args[0]])
    builder.ret_void()
    return llvm.parse_assembly(str(made))


def compiled(name: str, target: Target, symbol: str) -> bytes:
    """A kernel's object code for this processor."""
    code, machine = module(name, target, symbol)
    return bytes(machine.emit_object(code))
