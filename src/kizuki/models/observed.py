"""What a recording keeps of its readings: the keys of the largest weights in half the memory, the same numbers.

Of all the heads of a long text they are the largest part: 8 keys a row in int64 are as much as everything else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kizuki import Observation


def narrowed(seen: Observation) -> Observation:
    """The readings with keys in 32 bits, where they fit."""
    if seen.topk is None or bool((seen.topk[1] >= 2**31).any()):
        return seen
    weights, keys = seen.topk
    return replace(seen, topk=(weights, keys.to(torch.int32)))


def widened(seen: Observation) -> Observation:
    """As `A.observe` returns them, keys in 64 bits."""
    if seen.topk is None or seen.topk[1].dtype is torch.int64:
        return seen
    weights, keys = seen.topk
    return replace(seen, topk=(weights, keys.to(torch.int64)))
