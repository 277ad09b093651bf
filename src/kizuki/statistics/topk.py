"""The k largest weights of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .frame import Frame

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..portable import Tile


class Selection(Protocol):
    """The k best of each row so far, or as a kernel found them."""

    def take(self, block: Tile, weights: Tensor) -> None:
        """Let in one tile."""

    def join(self, other: Self) -> None:
        """Let in the best of other tiles."""

    def result(self) -> tuple[Tensor, Tensor]:
        """`(weights, keys)`, largest first; weight 0 and key −1 where there is none."""


class TopK:
    """The k largest weights of each row and their keys, ties to the lower key; padded with weight 0, key −1.

    A row that is NaN gives NaN and its lowest visible keys.
    """

    def __init__(self, frame: Frame, k: int) -> None:
        self.k, self.rank = k, min(k, frame.keys)
        shape = (frame.batch, frame.heads, frame.queries, self.rank)
        wide = frame.dtype is torch.float64 or frame.keys > _LOW
        self.best: Selection = _Sorted(shape, frame) if wide else _Packed(shape, frame)

    def update(self, block: Tile, weights: Tensor) -> None:
        self.best.take(block, weights)

    def merge(self, other: TopK) -> None:
        self.best.join(other.best)

    def finalize(self) -> tuple[Tensor, Tensor]:
        weights, keys = self.best.result()
        room = (0, self.k - self.rank)
        return torch.nn.functional.pad(weights, room), torch.nn.functional.pad(keys, room, value=-1)


_LOW = (1 << 32) - 1
_INF_BITS = 0x7F800000


class _Packed:
    """Top k of float32 weights as one integer each, the weight's bits above the reversed key.

    Bits of numbers >= 0 order as the numbers do, so the largest integers are the largest weights and among
    equals the lower keys: no sort has to be stable. Absent is −1, below all; NaN stands as Inf, above all.
    """

    def __init__(self, shape: tuple[int, ...], frame: Frame) -> None:
        self.codes = torch.full(shape, -1, dtype=torch.int64, device=frame.device)

    def take(self, block: Tile, weights: Tensor) -> None:
        rank = self.codes.shape[-1]
        bits = weights.masked_fill(weights.isnan(), float("inf")).view(torch.int32).to(torch.int64)
        keys = torch.arange(block.cols.start, block.cols.stop, device=weights.device)
        codes = (bits << 32) + (_LOW - keys)
        if block.seen is not None:
            codes = torch.where(block.seen, codes, -1)
        fresh = codes.topk(min(rank, codes.shape[-1])).values
        both = torch.cat([self.codes[:, :, block.rows], fresh], -1)
        self.codes[:, :, block.rows] = both.topk(rank).values

    def join(self, other: _Packed) -> None:
        self.codes = torch.cat([self.codes, other.codes], -1).topk(self.codes.shape[-1]).values

    def result(self) -> tuple[Tensor, Tensor]:
        absent = self.codes < 0
        keys = (_LOW - (self.codes & _LOW)).masked_fill(absent, -1)
        weights = (self.codes >> 32).masked_fill(absent, 0).to(torch.int32)
        return weights.view(torch.float32).masked_fill(weights == _INF_BITS, float("nan")), keys


class _Sorted:
    """The same for float64, whose bits leave no room for a key: a stable sort of each tile."""

    def __init__(self, shape: tuple[int, ...], frame: Frame) -> None:
        self.weights = torch.full(shape, -1.0, dtype=frame.dtype, device=frame.device)
        self.keys = torch.full(shape, -1, dtype=torch.int64, device=frame.device)

    def take(self, block: Tile, weights: Tensor) -> None:
        index = torch.arange(block.cols.start, block.cols.stop, device=weights.device).expand(weights.shape)
        if block.seen is not None:  # below every visible key, also one whose weight underflowed to 0
            weights = torch.where(block.seen, weights, -1.0)
            index = torch.where(block.seen, index, -1)
        best = self._best(self.weights[:, :, block.rows], self.keys[:, :, block.rows], weights, index)
        self.weights[:, :, block.rows], self.keys[:, :, block.rows] = best

    def join(self, other: _Sorted) -> None:
        # Either may hold the lower keys: first by key, then, stably, by weight.
        weights, keys = torch.cat([self.weights, other.weights], -1), torch.cat([self.keys, other.keys], -1)
        order = keys.argsort(-1)
        weights, keys = weights.gather(-1, order), keys.gather(-1, order)
        none = weights[..., :0], keys[..., :0]
        self.weights, self.keys = self._best(*none, weights, keys)

    def _best(self, weights: Tensor, keys: Tensor, more: Tensor, their: Tensor) -> tuple[Tensor, Tensor]:
        weights, keys = torch.cat([weights, more], -1), torch.cat([keys, their], -1)
        order = torch.argsort(weights, dim=-1, descending=True, stable=True)[..., : self.keys.shape[-1]]
        return weights.gather(-1, order), keys.gather(-1, order)

    def result(self) -> tuple[Tensor, Tensor]:
        return self.weights.masked_fill(self.keys < 0, 0.0), self.keys
