"""The compiled kernels as plain Python: every loop a line that can be followed, counted, and caught reading astray.

Run as a program it computes a few problems through every kernel, compares them with a float64 evaluation, and prints
as JSON which lines of the kernels' loops no problem ran through:

    python tests/interpreted.py [PROBLEM ...]

Numba is switched off: the loops run as Python does them, and what they are made of, the emitted bodies, are their
NumPy twins (`tests/twins/`). Each access to memory, of a loop or of a body, is checked against the memory that the
process owns: an address outside every tensor, array and argument block is an error here, and a wrong number or a crash
in compiled code. (`NUMBA_BOUNDSCHECK` checks arrays, and the kernels have none.)
"""

from __future__ import annotations

import ast
import ctypes
import gc
import json
import os
import sys
from array import array
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ["KIZUKI_TARGET"] = "generic"
os.environ["NUMBA_DISABLE_JIT"] = "1"  # before numba is imported: then nothing can be compiled

import numba
import numba.extending
import numpy as np
import torch
import twins

checked = 0  # accesses to memory


class Memory:
    """Address ranges of everything alive that a kernel may be pointed at."""

    def __init__(self) -> None:
        ranges = []
        for thing in gc.get_objects():  # those made since the program began to compute
            kind = type(thing)  # asking the thing itself would ask objects that only pretend to be of a class
            if (
                issubclass(kind, torch.Tensor)
                and thing.device.type == "cpu"
                and thing.layout is torch.strided
            ):
                store = thing.untyped_storage()
                ranges.append((store.data_ptr(), store.nbytes()))
            elif issubclass(kind, np.ndarray):
                ranges.append((thing.__array_interface__["data"][0], thing.nbytes))
            elif issubclass(kind, rows._Prepared):  # arrays the collector does not know
                for own in (thing.stats, thing.scores, thing.finished, *thing.entries):
                    at, count = own.buffer_info()
                    ranges.append((at, count * own.itemsize))
            elif issubclass(kind, custom.Code):
                ranges.append((thing.table.ctypes.data, thing.table.nbytes))
            elif issubclass(kind, custom.Lease):
                ranges += [(a.ctypes.data, a.nbytes) for a in thing.alive if isinstance(a, np.ndarray)]
        for block in blocks:
            kept = [block.slots, *block.alive.values()]
            for thing in kept:
                if isinstance(thing, array):
                    at, count = thing.buffer_info()
                    ranges.append((at, count * thing.itemsize))
                elif isinstance(thing, torch.Tensor):
                    ranges.append((thing.data_ptr(), thing.untyped_storage().nbytes()))
                elif isinstance(thing, np.ndarray):
                    ranges.append((thing.__array_interface__["data"][0], thing.nbytes))
            for thing in block.borrowed.values():
                ranges.append((thing.data_ptr(), thing.numel()))
        ranges = sorted((a, a + n) for a, n in ranges if n)
        merged: list[list[int]] = []
        for first, stop in ranges:
            if merged and first <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], stop)
            else:
                merged.append([first, stop])
        self.first, self.stop = [a for a, _ in merged], [b for _, b in merged]

    def holds(self, address: int, size: int) -> bool:
        at = bisect_right(self.first, address) - 1
        return at >= 0 and address + size <= self.stop[at]


blocks: list[Any] = []  # the argument blocks of the call that runs
memory: Memory | None = None


def look(address: int, size: int) -> None:
    """Refuse an access to nobody's memory."""
    global checked
    if memory is None:  # no kernel runs
        return
    checked += 1
    if not memory.holds(int(address), size):
        raise IndexError(f"{size} bytes at {address:#x}, which is nobody's memory")


def python(function: Any = None, **_: Any) -> Any:
    """`numba.njit` that compiles nothing."""
    return function if function is not None else python


def bodies(function: Any) -> Any:
    """What stands for an emitted body: its twin."""
    return twins.twin_of(function, sys._getframe(1).f_locals)


numba.njit, numba.extending.intrinsic = python, bodies
from kizuki.cpu import custom, launch, rows, target  # noqa: E402
from kizuki.cpu.block import Block  # noqa: E402
from kizuki.cpu.kernels import scalar  # noqa: E402

twins.memory.guard = look

from kizuki.cpu import kernels  # noqa: E402

FLOATS = replace(target.TARGETS["generic"], block_q=8, block_k=32)
target.TARGETS["generic"] = FLOATS
ROUTINES: dict[tuple[str, str], Any] = {}


def enter(self: Block, kernel: str, chosen: target.Target, tasks: int, threads: int) -> None:
    """`Block.enter` on one thread, in Python."""
    global memory
    if (kernel, chosen.name) not in ROUTINES:
        ROUTINES[kernel, chosen.name] = kernels.BUILDERS[kernel](chosen)
    for slot, number in (("TASKS", tasks), ("NEXT_TASK", 0), ("NEXT_SLOT", 0)):
        self[slot] = number
    blocks[:] = [self]
    memory = Memory()
    ROUTINES[kernel, chosen.name](self.slots.buffer_info()[0])
    memory = None


Block.enter = enter  # type: ignore[method-assign]
launch.threads = lambda: 1
launch.switched_off = lambda: False
in_pairs = False  # whether bfloat16 is multiplied in pairs, by multiply-adds in the place of the instruction


def chosen(dtype: torch.dtype = torch.float32) -> target.Target:
    """`launch.target`."""
    return FLOATS.double if dtype is torch.float64 else replace(FLOATS, dot="emulated" if in_pairs else "")


launch.target = chosen


class Read(custom.Captured):
    """A user's array inside the loop along a row: read through its table, as compiled code reads it."""

    def __getitem__(self, index: Any) -> Any:
        at = custom._wide(index if isinstance(index, tuple) else (index,))
        if not custom._inside(self, at):
            raise IndexError("index out of range")
        return custom._element(self, at)


class Code(custom.Code):
    """A user's function that Python runs: the loop around it gets an address that compiled code could call."""

    def _typed(self, node: Any) -> Any:
        for entry in self._entries:
            entry.__class__ = Read
        return self._rebuilt(node)

    def _compiled(self, name: str, build: Any, arguments: int) -> Any:
        if name not in self._kept:
            loop = custom._guarded(build(), self.table.ctypes.data + 8 * custom.FAILURES, arguments)
            call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(loop)
            self._kept[name] = Called(call, ctypes.cast(call, ctypes.c_void_p).value or 0)
        return self._kept[name]


class Called(NamedTuple):
    """A function of Python's with an address."""

    function: Any
    address: int


custom.Code = Code  # type: ignore[misc]


from twins.problems import Wrong, answer, problems  # noqa: E402

gc.freeze()  # what was imported is not looked through again at each call


def compute(name: str) -> list[str]:
    """Run one problem; what is wrong with it."""
    global in_pairs
    problem = problems()[name]
    in_pairs = problem.paired
    try:
        answer(problem)
    except Wrong as wrong:
        return [f"{name}: {wrong}"]
    return []


def loops() -> dict[Path, set[int]]:
    """The lines inside the functions that Numba would compile, file by file."""
    found: dict[Path, set[int]] = {}
    for path in sorted(Path(kernels.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(
                "piece" in ast.unparse(d) for d in node.decorator_list
            ):
                lines = {n.lineno for inner in node.body for n in ast.walk(inner) if isinstance(n, ast.stmt)}
                first = node.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    lines.discard(first.lineno)
                found.setdefault(path, set()).update(lines)
    return found


def astray() -> str:
    """What is said of a load far behind the end of a tensor."""
    global memory
    x = torch.ones(4)
    memory = Memory()
    if float(scalar.load_f32(x.data_ptr() + 12)) != 1:
        return "the last number of a tensor is not read"
    try:
        scalar.load_f32(x.data_ptr() + (1 << 46))
    except IndexError as error:
        return str(error)
    return "it was read"


def main() -> None:
    met: dict[str, set[int]] = {}
    folder = str(Path(kernels.__file__).parent)

    def local(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            met.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return local

    def enters(frame: Any, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(folder) else None

    wrong: list[str] = []
    if sys.gettrace() is None:  # else it is run under coverage, which counts for itself
        sys.settrace(enters)
    for name in sys.argv[1:] or problems():
        wrong += compute(name)
    sys.settrace(None)
    missed = {path.name: sorted(lines - met.get(str(path), set())) for path, lines in loops().items()}
    lines = sum(map(len, loops().values()))
    print(
        json.dumps({"wrong": wrong, "missed": missed, "lines": lines, "checked": checked, "astray": astray()})
    )


if __name__ == "__main__":
    main()
