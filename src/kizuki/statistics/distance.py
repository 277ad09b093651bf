"""How far a row reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .frame import Frame

if TYPE_CHECKING:
    from ..portable import Tile


def positions(frame: Frame, rows: slice) -> Tensor:
    """The queries' own positions among the keys, counted from the right end when queries are fewer, `[rows, 1]`."""
    offset = max(0, frame.keys - frame.queries)
    return torch.arange(rows.start, rows.stop, device=frame.device).unsqueeze(-1) + offset


class Distance:
    """Σ_j a_ij · |p_i − j| of each row, p_i the query's own position: i + keys − queries when queries are fewer."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.total = frame, frame.full(frame.queries)

    def update(self, block: Tile, weights: Tensor) -> None:
        keys = torch.arange(block.cols.start, block.cols.stop, device=weights.device)
        far = (positions(self.frame, block.rows) - keys).abs()
        self.total[:, :, block.rows] += (weights * far).sum(-1)

    def merge(self, other: Distance) -> None:
        self.total += other.total

    def finalize(self) -> Tensor:
        return self.total
