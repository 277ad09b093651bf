"""What a row reads of keys that come after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .distance import positions
from .frame import Frame

if TYPE_CHECKING:
    from ..portable import Tile


class Future:
    """Σ of a_ij over the keys j after the query's own position; 0, to the bit, where nothing leaks."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.total = frame, frame.full(frame.queries)

    def update(self, block: Tile, weights: Tensor) -> None:
        own = positions(self.frame, block.rows)
        if int(own[0]) >= block.cols.stop - 1:
            return
        after = torch.arange(block.cols.start, block.cols.stop, device=weights.device) > own
        # A select: 0 · NaN would say that a row which is NaN reads the future.
        self.total[:, :, block.rows] += torch.where(after, weights, 0.0).sum(-1)

    def merge(self, other: Future) -> None:
        self.total += other.total

    def finalize(self) -> Tensor:
        return self.total
