"""A as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .frame import Frame

if TYPE_CHECKING:
    from ..portable import Tile


class Pool:
    """A reduced to a rows × cols picture: query i lies in pixel row ⌊i·rows/queries⌋, key j in column ⌊j·cols/keys⌋.

    "mass" sums over the keys and averages over the queries, so that rows still sum to 1; "peak" is the
    largest weight in the block.
    """

    def __init__(self, frame: Frame, rows: int, cols: int, reduce: str = "mass") -> None:
        self.picture = frame.full(rows, cols)
        self.reduce = reduce
        self.row_of = torch.arange(frame.queries, device=frame.device) * rows // max(1, frame.queries)
        self.col_of = torch.arange(frame.keys, device=frame.device) * cols // max(1, frame.keys)

    def update(self, block: Tile, weights: Tensor) -> None:
        rows, cols = self.row_of[block.rows], self.col_of[block.cols]
        # Rows first: they lie apart in memory, so that whole lines are added, and little is left for the columns.
        flat = _reduce(weights, -2, rows, self.reduce)
        small = _reduce(flat, -1, cols, self.reduce)
        target = self.picture[:, :, int(rows[0]) : int(rows[-1]) + 1, int(cols[0]) : int(cols[-1]) + 1]
        if self.reduce == "mass":
            target += small
        else:
            target.copy_(torch.maximum(target, small))

    def merge(self, other: Pool) -> None:
        if self.reduce == "mass":
            self.picture += other.picture
        else:
            self.picture = torch.maximum(self.picture, other.picture)

    def finalize(self) -> Tensor:
        if self.reduce == "peak":
            return self.picture
        count = torch.bincount(self.row_of, minlength=self.picture.shape[-2]).clamp(min=1)
        return self.picture / count.view(-1, 1)


def _reduce(tensor: Tensor, dim: int, pixel: Tensor, reduce: str) -> Tensor:
    """Sum or largest over runs of equal `pixel` along `dim`; pixels rise by at most one from place to place."""
    counts = torch.unique_consecutive(pixel, return_counts=True)[1].tolist()
    if len(counts) == tensor.shape[dim]:
        return tensor
    # Slices are summed pairwise by torch; index_add_ would add one by one and lose digits.
    parts = torch.split(tensor, counts, dim)
    return torch.stack([p.sum(dim) if reduce == "mass" else p.amax(dim) for p in parts], dim)
