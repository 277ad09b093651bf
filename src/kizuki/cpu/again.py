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

from . import launch
from .block import Block

KEPT = 32  # kinds a thread remembers; the one not used for longest goes first
LARGEST = 1 << 18  # bytes of tables of a kind that is remembered; larger calls take long enough
PLAIN = (Tensor, torch.nn.Parameter)
NUMBERS = (type(None), float, int)

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
    if type(scale) not in NUMBERS or type(softcap) not in NUMBERS or type(window) not in (type(None), tuple):
        return None
    for t in (query, key, value):
        if type(t) not in PLAIN or not t.is_cpu or t.layout is not torch.strided or t.is_neg():
            return None
    lead = query.shape[:-3]
    if (
        query.dim() < 3
        or key.shape[:-3] != lead
        or value.shape[:-3] != lead
        or key.shape[-3] != value.shape[-3]
    ):
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return None
    tensors = [(t.shape, t.stride(), t.dtype) for t in (query, key, value)]
    return (*tensors, causal is True, window, scale, softcap, backend, launch.threads())


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
    return np.frombuffer(block.alive[name], dtype=np.int64)  # type: ignore[call-overload]


def _bytes(kept: Any) -> Any:
    return kept.numpy() if isinstance(kept, Tensor) else kept


def attention(like: Hashable, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """The output of a call of a known kind; None where the kind is not known."""
    known: Known | None = _kinds().get(like)
    if known is None or known.busy:  # busy: a signal's handler, in the middle of such a call
        return None
    _kinds().move_to_end(like)
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
