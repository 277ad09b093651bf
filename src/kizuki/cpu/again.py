"""A call like one before: the same shapes, strides and options, other memory.

Describing a small problem takes longer than computing it. The second call of a kind leaves its argument block here,
and those that follow write down where their memory is and run: no checks, because whatever would be refused was
refused then. Only calls whose masks are rules without tensors, and that want no gradient, are of a kind at all.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..memory import told
from . import launch
from .block import Block

KEPT = 32  # kinds a thread remembers; the one not used for longest goes first
LARGEST = 1 << 18  # bytes of tables of a kind that is remembered; larger calls take long enough
PLAIN = (Tensor, torch.nn.Parameter)
NUMBERS = (type(None), float, int)
WINDOWS = (type(None), tuple)

_mine = threading.local()  # an argument block serves one call at a time


def kind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: Any,
    window: Any,
    scale: Any,
    softcap: Any,
    backend: Any,
) -> Hashable | None:
    """What calls must share to be alike, or None for a call that is described anew each time."""
    if type(scale) not in NUMBERS or type(softcap) not in NUMBERS or type(window) not in WINDOWS:
        return None
    if backend == "portable" or torch.is_autocast_enabled("cpu") or torch._C._len_torch_dispatch_stack():
        return None
    differentiates = torch.is_grad_enabled()
    found: list[Any] = []
    for t in (query, key, value):
        if type(t) not in PLAIN or not t.is_cpu or t.layout is not torch.strided or t.is_neg():
            return None
        if differentiates and t.requires_grad:
            return None
        found += [t.shape, t.stride(), t.dtype]
    lead = found[0][:-3]
    if len(found[0]) < 3 or len(found[3]) != len(found[0]) or len(found[6]) != len(found[0]):
        return None
    if found[3][:-3] != lead or found[6][:-3] != lead or found[3][-3] != found[6][-3]:
        return None
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return None
    return (*found, causal is True, window, scale, softcap, backend, launch.threads())


class Known:
    """The argument block of a kind of call, and what must be written into it for the next one."""

    def __init__(self, block: Block, operands: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        names = ("QUERY_TABLE", "KEY_SOURCE", "VALUE_SOURCE", "OUTPUT_TABLE")
        self.tables = []
        for name, tensor in zip(names, (*operands, output), strict=True):
            table = _view(block, name)
            self.tables.append((table, table - tensor.data_ptr()))
        self.finished = _view(block, "FINISHED") if "FINISHED" in block.alive else None
        self.shape, self.dtype = (*operands[0].shape[:-1], operands[2].shape[-1]), output.dtype
        self.rooms, self.runs, self.busy = dict(block.asked), list(block.runs), False
        self.block = block

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty(self.shape, dtype=self.dtype)
        block = self.block
        for (table, offsets), tensor in zip(self.tables, (query, key, value, output), strict=True):
            np.add(offsets, tensor.data_ptr(), out=table)
        if self.finished is not None:
            self.finished[:] = 0
        for name, size in self.rooms.items():
            block.room(name, size)
        for name, target, tasks, threads in self.runs:
            block.enter(name, target, tasks, threads)
        block.release()
        return output


def _view(block: Block, name: str) -> Any:
    """A table of addresses as an array over its own memory."""
    table: Any = block.alive[name]
    return np.frombuffer(table, dtype=np.int64)


def _bytes(kept: Any) -> Any:
    return kept.numpy() if isinstance(kept, Tensor) else kept


@told
def attention(like: Hashable, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """The output of a call of a known kind; None where the kind is not known."""
    kinds = _kinds()
    known = kinds.get(like)
    if known is None or known.busy:  # busy: a signal's handler, in the middle of such a call
        return None
    kinds.move_to_end(like)
    known.busy = True
    try:
        return known.run(query, key, value)
    finally:
        known.busy = False


def remember(like: Hashable, block: Block, operands: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    """Keep the block of a call that has just run, if its kind was seen before."""
    seen: set[Hashable] = _mine.__dict__.setdefault("seen", set())
    if like not in seen:
        if len(seen) >= 16 * KEPT:
            seen.clear()
        seen.add(like)
        return
    del block.alive["operands"]
    if sum(memoryview(_bytes(kept)).nbytes for kept in block.alive.values()) > LARGEST:
        return
    kinds = _kinds()
    kinds[like] = Known(block, operands, output)
    while len(kinds) > KEPT:
        kinds.popitem(last=False)


def _kinds() -> OrderedDict[Hashable, Known]:
    made: OrderedDict[Hashable, Known] = _mine.__dict__.setdefault("kinds", OrderedDict())
    return made
