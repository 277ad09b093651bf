"""What a row reads where it must not: of keys that come after it, or of any pairs that a rule forbids."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .distance import positions
from .frame import Frame

if TYPE_CHECKING:
    from ..portable import Tile

# (rows, cols) of a tile -> bool that broadcasts to it, True = forbidden; None = nothing of this tile is
Forbidden = Callable[[slice, slice], Tensor | None]


class Outside:
    """Σ of a_ij over the keys that are forbidden to the query; 0, to the bit, where nothing leaks."""

    def __init__(self, frame: Frame, forbidden: Forbidden) -> None:
        self.forbidden, self.total = forbidden, frame.full(frame.queries)

    def update(self, block: Tile, weights: Tensor) -> None:
        there = self.forbidden(block.rows, block.cols)
        if there is not None:
            # A select: 0 · NaN would say that a row which is NaN reads what it must not.
            self.total[:, :, block.rows] += torch.where(there, weights, 0.0).sum(-1)

    def merge(self, other: Outside) -> None:
        self.total += other.total

    def finalize(self) -> Tensor:
        return self.total


class Future(Outside):
    """Σ of a_ij over the keys j after the query's own position."""

    def __init__(self, frame: Frame) -> None:
        def after(rows: slice, cols: slice) -> Tensor | None:
            own = positions(frame, rows)
            if int(own[0]) >= cols.stop - 1:
                return None
            return torch.arange(cols.start, cols.stop, device=frame.device) > own

        super().__init__(frame, after)
