"""The argument block of one call: slots filled in by name, tables of addresses, working memory.

Everything here is paid by every call, however small, so it is plain Python on ints where there are few planes.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..problem import Problem
from . import launch
from .layout import NAMES, SLOT
from .sizes import BFLOAT16, FLOAT16, PLAIN
from .target import Target

KEPT = 1 << 24  # bytes of working memory a thread keeps for each purpose
FEW = 64  # planes up to which lists are faster than NumPy

if TYPE_CHECKING:
    from .custom import Lease

Ints = npt.NDArray[np.int64]
Table = list[int] | Ints

KINDS = {
    torch.float32: PLAIN,
    torch.float64: PLAIN,
    torch.bfloat16: BFLOAT16,
    torch.float16: FLOAT16,
}

_kept = threading.local()
_PLACE = {name: at // 8 for name, at in SLOT.items()}
_EMPTY = [0] * len(NAMES)


def borrow(name: str, size: int) -> Tensor:
    """Memory that is kept from call to call, one a Python thread: fresh pages cost more than short kernels.

    While a call has it nobody else can: a mask's function may itself compute attention.
    """
    known: Tensor | None = _kept.__dict__.pop(name, None)
    if known is None or known.numel() < size:
        known = torch.empty(max(size, 4096), dtype=torch.uint8)
    return known


class Block:
    """The argument block of one call, and everything its addresses must keep alive."""

    def __init__(self) -> None:
        self.slots = array("q", _EMPTY)
        # By name, so that what one chunk of queries needed goes when the next chunk's takes its place.
        self.alive: dict[str, object] = {}
        self.borrowed: dict[str, Tensor] = {}
        self.asked: dict[str, int] = {}  # bytes of working memory
        self.runs: list[tuple[str, Target, int, int]] = []
        self.leases: list[Lease] = []  # of compiled functions

    def __setitem__(self, name: str, value: int | float) -> None:
        bits = struct.unpack("<q", struct.pack("<d", value))[0] if isinstance(value, float) else value
        self.slots[_PLACE[name]] = bits

    def fill(self, values: dict[str, int]) -> None:
        """Several slots at once."""
        for name, value in values.items():
            self.slots[_PLACE[name]] = value

    def table(self, name: str, addresses: Table) -> None:
        """Point slot `name` at an int64 array."""
        if isinstance(addresses, list):
            listed = array("q", addresses)
            self.alive[name], place = listed, listed.buffer_info()[0]
        else:
            wide = np.ascontiguousarray(addresses, dtype=np.int64)
            self.alive[name], place = wide, wide.ctypes.data
        self.slots[_PLACE[name]] = place

    def only_operands(self, plane: int, size: int) -> None:
        """Leave of the keys, the values and the sinks (of `size` bytes) those of one plane."""
        for name in ("KEY", "VALUE"):
            which = int(self.entries(f"{name}_TABLE")[plane])
            self.table(f"{name}_SOURCE", [int(self.entries(f"{name}_SOURCE")[which])])
            self.table(f"{name}_TABLE", [0])
        if self.slots[_PLACE["SINK_TABLE"]]:
            self.slots[_PLACE["SINK_TABLE"]] += plane * size
        self.fill({"PLANES": 1, "KEY_PLANES": 1, "VALUE_PLANES": 1})

    def only_rows(self, plane: int) -> None:
        """Leave of the queries and what hides keys from them those of one plane."""
        for name in ("QUERY_TABLE", "FIRST_TABLE", "STOP_TABLE", "MASK_TABLE", "BIAS_TABLE"):
            if self.slots[_PLACE[name]]:
                self.table(name, [int(self.entries(name)[plane])])

    def get(self, name: str) -> int:
        """What a slot holds, as bits."""
        return self.slots[_PLACE[name]]

    def single(self, name: str) -> array[int]:
        """A table of one address, to be changed in place."""
        return cast("array[int]", self.alive[name])

    def entries(self, name: str) -> Sequence[int]:
        """The addresses of a table."""
        return cast("Sequence[int]", self.alive[name])

    def room(self, name: str, size: int) -> None:
        """`size` bytes of uninitialised working memory for slot `name`, aligned to 64 bytes."""
        self.asked[name] = size
        made = self.borrowed.get(name)
        if made is None or made.numel() < size:
            made = self.borrowed[name] = borrow(name, size)
        self.slots[_PLACE[name]] = made.data_ptr()

    def release(self) -> None:
        """Put the working memory back for the next call, unless it is more than a thread should keep."""
        for name, room in self.borrowed.items():
            if room.numel() <= KEPT:
                setattr(_kept, name, room)
        self.borrowed.clear()

    def run(self, kernel: str, target: Target, tasks: int, threads: int) -> None:
        """Run a kernel over its tasks."""
        if tasks:
            self.runs.append((kernel, target, tasks, threads))
            self.enter(kernel, target, tasks, threads)

    def enter(self, kernel: str, target: Target, tasks: int, threads: int) -> None:
        slots = self.slots
        slots[_TASKS], slots[_NEXT_TASK], slots[_NEXT_SLOT] = tasks, 0, 0
        launch.run(launch.kernel(kernel, target), slots.buffer_info()[0], min(threads, tasks))


_TASKS, _NEXT_TASK, _NEXT_SLOT = _PLACE["TASKS"], _PLACE["NEXT_TASK"], _PLACE["NEXT_SLOT"]


def _axes(tensor: Tensor, problem: Problem, heads: int) -> list[tuple[int, int, int]]:
    """(length in the problem, own length, stride in bytes) of each batch axis and of the heads, outermost first."""
    lengths = (*problem.lead, heads)
    missing = len(lengths) + 2 - tensor.dim()
    shape, stride, size = tensor.shape, tensor.stride(), tensor.element_size()
    axes = []
    for at, length in enumerate(lengths):
        own = shape[at - missing] if at >= missing else 1
        step = stride[at - missing] * size if own > 1 else 0
        axes.append((length, own if step else min(own, 1), step))
    return axes


def planes(tensor: Tensor, problem: Problem, heads: int) -> Table:
    """The byte address of each plane `[batch, heads]` of a tensor with any rank and strides; nothing is copied.

    Grouped queries: head h reads head ⌊h·own/heads⌋.
    """
    start, count = tensor.data_ptr(), problem.batch * heads
    if count == 1:
        return [start]
    axes = _axes(tensor, problem, heads)
    if count <= FEW:
        places = [start]
        for length, own, step in axes:
            if length != 1:
                steps = [i * own // length * step for i in range(length)]
                places = [place + more for place in places for more in steps]
        return places
    offsets = np.full((1,), start, dtype=np.int64)
    for length, own, step in axes:
        steps_of = np.arange(length, dtype=np.int64) * own // max(1, length) * step
        offsets = (offsets[:, None] + steps_of[None, :]).reshape(-1)
    return offsets


def sources(tensor: Tensor, problem: Problem, heads: int) -> tuple[Table, Table]:
    """The planes of a tensor that are different memory, and for each plane `[batch, heads]` which of them it reads."""
    start = tensor.data_ptr()
    if problem.batch * heads == 1:
        return [start], [0]
    axes = _axes(tensor, problem, heads)
    if all(length == own for length, own, _ in axes):
        known = planes(tensor, problem, heads)
        return known, list(range(len(known))) if isinstance(known, list) else np.arange(len(known))
    if problem.batch * heads <= FEW:
        places, reads = [start], [0]
        for length, own, step in axes:
            places = [place + i * step for place in places for i in range(own)]
            reads = [n * own + i * own // length for n in reads for i in range(length)]
        return places, reads
    offsets, of = np.full((1,), start, dtype=np.int64), np.zeros((1,), dtype=np.int64)
    for length, own, step in axes:
        offsets = (offsets[:, None] + np.arange(own, dtype=np.int64) * step).reshape(-1)
        index = np.arange(length, dtype=np.int64) * own // max(1, length)
        of = (of[:, None] * own + index).reshape(-1)
    return offsets, of


def pair_planes(tensor: Tensor, problem: Problem) -> tuple[Table, int, int]:
    """Plane addresses and (row, col) byte strides of a mask or bias that broadcasts to A; broadcast axes have 0."""
    missing = max(0, 2 - tensor.dim())
    full = tensor[(None,) * missing] if missing else tensor
    size = full.element_size()
    row = full.stride(-2) * size if full.shape[-2] > 1 else 0
    col = full.stride(-1) * size if full.shape[-1] > 1 else 0
    return planes(full, problem, problem.heads), row, col


def shifted(table: Table, shift: int) -> Table:
    """The same addresses, `shift` bytes further on."""
    if isinstance(table, list):
        return [place + shift for place in table] if shift else table
    return table + shift


def rows_of(tensor: Tensor, count: int, step: int, shift: int) -> Table:
    """`count` addresses, `step` bytes apart, the first `shift` bytes into the tensor."""
    start = tensor.data_ptr() + shift
    if count <= FEW:
        return [start + n * step for n in range(count)]
    return start + np.arange(count, dtype=np.int64) * step
