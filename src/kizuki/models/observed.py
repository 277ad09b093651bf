"""What a recording keeps of its readings: of all layers side by side, the keys of the largest weights in few bits.

Of all heads of a long text those keys are the largest part. And small pieces that stay, taken between large ones that
come and go with every layer, leave memory in holes: twice as much was resident as was held.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kizuki import Observation

KEYS = (torch.int16, torch.int32, torch.int64)
Kind = tuple[str, torch.Size, torch.dtype, torch.device]


class Shelf:
    """Room for one reading of each kind of each of `places` layers; a place that is taken begins another room."""

    def __init__(self, places: int) -> None:
        self.places = max(1, places)
        self.rooms: dict[Kind, tuple[Tensor, int]] = {}

    def put(self, seen: Observation) -> Observation:
        """The same readings, held here; keys in the smallest of 16, 32 and 64 bits that holds them all."""
        made: dict[str, Any] = {}
        for name in (field.name for field in fields(seen)):
            value = getattr(seen, name)
            if isinstance(value, Tensor):
                made[name] = self._hold(name, value)
        if seen.topk is not None:
            weights, keys = seen.topk
            largest = int(keys.max()) if keys.numel() else 0
            held = next(kind for kind in KEYS if largest <= torch.iinfo(kind).max)
            made["topk"] = self._hold("weights", weights), self._hold("keys", keys.to(held))
        return replace(seen, **made)

    def _hold(self, name: str, value: Tensor) -> Tensor:
        kind = name, value.shape, value.dtype, value.device
        room, used = self.rooms.get(kind, (None, self.places))
        if room is None or used == self.places:
            room, used = value.new_empty(self.places, *value.shape), 0
        room[used] = value.detach()
        self.rooms[kind] = room, used + 1
        return room[used]


def widened(seen: Observation) -> Observation:
    """As `A.observe` returns them: keys in 64 bits."""
    if seen.topk is None or seen.topk[1].dtype is torch.int64:
        return seen
    weights, keys = seen.topk
    return replace(seen, topk=(weights, keys.to(torch.int64)))
