"""What each key receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .frame import Frame

if TYPE_CHECKING:
    from ..portable import Tile


class Received:
    """Σ_i a_ij for each key; the mean form divides by the number of queries that see the key (0 where none).

    `last`: only over the last so many queries (None = all).
    """

    def __init__(self, frame: Frame, reduce: str = "sum", last: int | None = None) -> None:
        self.total = frame.full(frame.keys)
        self.seen = self.total.to(torch.int64) if reduce == "mean" else None
        self.last = last
        self.first = 0 if last is None else max(0, frame.queries - last)

    def update(self, block: Tile, weights: Tensor) -> None:
        skip = max(0, self.first - block.rows.start)
        if skip >= block.rows.stop - block.rows.start:
            return
        self.total[:, :, block.cols] += weights[:, :, skip:].sum(-2)
        if self.seen is not None:
            count: Tensor | int = weights.shape[-2] - skip
            if block.seen is not None:
                count = block.seen.expand(weights.shape)[:, :, skip:].sum(-2)
            self.seen[:, :, block.cols] += count

    def merge(self, other: Received) -> None:
        self.total += other.total
        if self.seen is not None and other.seen is not None:
            self.seen += other.seen

    def finalize(self) -> Tensor:
        return self.total if self.seen is None else self.total / self.seen.clamp(min=1)
