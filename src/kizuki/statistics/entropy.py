"""How spread out a row is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .frame import Frame

if TYPE_CHECKING:
    from ..portable import Tile


class Entropy:
    """−Σ_j a_ij ln a_ij in nats, 0 for an empty row."""

    def __init__(self, frame: Frame) -> None:
        self.total = frame.full(frame.queries)

    def update(self, block: Tile, weights: Tensor) -> None:
        self.total[:, :, block.rows] += torch.special.entr(weights).sum(-1)

    def merge(self, other: Entropy) -> None:
        self.total += other.total

    def finalize(self) -> Tensor:
        return self.total
