"""The largest weight of a row and the largest score of a head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .frame import Frame

if TYPE_CHECKING:
    from ..portable import Tile


class MaxWeight:
    """The largest weight of each row, 0 for an empty row."""

    def __init__(self, frame: Frame) -> None:
        self.peak = frame.full(frame.queries)

    def update(self, block: Tile, weights: Tensor) -> None:
        self.peak[:, :, block.rows] = torch.maximum(self.peak[:, :, block.rows], weights.amax(-1))

    def merge(self, other: MaxWeight) -> None:
        self.peak = torch.maximum(self.peak, other.peak)

    def finalize(self) -> Tensor:
        return self.peak


class MaxScore:
    """The largest score of each head, `[batch, heads]`, −inf when it sees nothing."""

    def __init__(self, frame: Frame) -> None:
        self.peak = frame.full(fill=float("-inf"))

    def update(self, block: Tile, weights: Tensor) -> None:
        self.peak = torch.maximum(self.peak, block.scores.amax((-1, -2)))

    def merge(self, other: MaxScore) -> None:
        self.peak = torch.maximum(self.peak, other.peak)

    def finalize(self) -> Tensor:
        return self.peak
