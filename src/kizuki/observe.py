"""Readings of A that are not linear: one small class a statistic, folded in tile by tile.

Each is `update(block, weights)` for every tile, then `finalize()`. They are told the weights exactly
(the tile's scores minus the final log-sum-exp), so a reading is exact and never holds queries × keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .portable import NEG_INF, Tile, exact, split, tiles
from .problem import Problem


class Statistic(Protocol):
    """One reading of A in the making."""

    def update(self, block: Tile, weights: Tensor) -> None:
        """Take in one tile: its scores and its exact weights, `[batch, heads, rows, cols]`."""

    def finalize(self) -> Tensor | tuple[Tensor, Tensor]:
        """The reading."""


@exact
def fold(problem: Problem, lse: Tensor, statistics: Sequence[Statistic]) -> None:
    """One pass over the tiles of A, updating every statistic. Time one Q Kᵀ; extra memory one tile."""
    norm = split(problem, lse)
    for block in tiles(problem):
        weights = block.weights(norm)
        for statistic in statistics:
            statistic.update(block, weights)


def _per_query(problem: Problem, fill: float) -> Tensor:
    shape = (problem.batch, problem.heads, problem.queries)
    return torch.full(shape, fill, dtype=problem.accumulate_dtype, device=problem.device)


class Entropy:
    """−Σ_j a_ij ln a_ij in nats, 0 for an empty row."""

    def __init__(self, problem: Problem, lse: Tensor) -> None:
        self.total = _per_query(problem, 0.0)

    def update(self, block: Tile, weights: Tensor) -> None:
        self.total[:, :, block.rows] += torch.special.entr(weights).sum(-1)

    def finalize(self) -> Tensor:
        return self.total


class MaxWeight:
    """The largest weight of each row, 0 for an empty row."""

    def __init__(self, problem: Problem, lse: Tensor) -> None:
        self.peak = _per_query(problem, 0.0)

    def update(self, block: Tile, weights: Tensor) -> None:
        self.peak[:, :, block.rows] = torch.maximum(self.peak[:, :, block.rows], weights.amax(-1))

    def finalize(self) -> Tensor:
        return self.peak


class MaxScore:
    """The largest score of each head, `[batch, heads]`, −inf when it sees nothing."""

    def __init__(self, problem: Problem, lse: Tensor) -> None:
        shape = (problem.batch, problem.heads)
        self.peak = torch.full(shape, NEG_INF, dtype=problem.accumulate_dtype, device=problem.device)

    def update(self, block: Tile, weights: Tensor) -> None:
        self.peak = torch.maximum(self.peak, block.scores.amax((-1, -2)))

    def finalize(self) -> Tensor:
        return self.peak


class Selection(Protocol):
    """The k best of each row so far, or as a kernel found them."""

    def take(self, block: Tile, weights: Tensor) -> None:
        """Let in one tile."""

    def result(self) -> tuple[Tensor, Tensor]:
        """`(weights, keys)`, largest first; weight 0 and key −1 where there is none."""


class TopK:
    """The k largest weights of each row and their keys, ties to the lower key; padded with weight 0, key −1.

    A row that is NaN gives NaN and its lowest visible keys.
    """

    def __init__(self, problem: Problem, lse: Tensor, k: int) -> None:
        self.k, self.rank = k, min(k, problem.keys)
        shape = (problem.batch, problem.heads, problem.queries, self.rank)
        wide = problem.accumulate_dtype is torch.float64 or problem.keys > _LOW
        self.best: Selection = _Sorted(shape, problem) if wide else _Packed(shape, problem)

    def update(self, block: Tile, weights: Tensor) -> None:
        self.best.take(block, weights)

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

    def __init__(self, shape: tuple[int, ...], problem: Problem) -> None:
        self.codes = torch.full(shape, -1, dtype=torch.int64, device=problem.device)

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

    def result(self) -> tuple[Tensor, Tensor]:
        absent = self.codes < 0
        keys = (_LOW - (self.codes & _LOW)).masked_fill(absent, -1)
        weights = (self.codes >> 32).masked_fill(absent, 0).to(torch.int32)
        return weights.view(torch.float32).masked_fill(weights == _INF_BITS, float("nan")), keys


class _Sorted:
    """The same for float64, whose bits leave no room for a key: a stable sort of each tile."""

    def __init__(self, shape: tuple[int, ...], problem: Problem) -> None:
        self.weights = torch.full(shape, -1.0, dtype=problem.accumulate_dtype, device=problem.device)
        self.keys = torch.full(shape, -1, dtype=torch.int64, device=problem.device)

    def take(self, block: Tile, weights: Tensor) -> None:
        index = torch.arange(block.cols.start, block.cols.stop, device=weights.device).expand(weights.shape)
        if block.seen is not None:  # below every visible key, also one whose weight underflowed to 0
            weights = torch.where(block.seen, weights, -1.0)
            index = torch.where(block.seen, index, -1)
        weights = torch.cat([self.weights[:, :, block.rows], weights], -1)
        index = torch.cat([self.keys[:, :, block.rows], index], -1)
        order = torch.argsort(weights, dim=-1, descending=True, stable=True)[..., : self.keys.shape[-1]]
        self.weights[:, :, block.rows] = weights.gather(-1, order)
        self.keys[:, :, block.rows] = index.gather(-1, order)

    def result(self) -> tuple[Tensor, Tensor]:
        return self.weights.masked_fill(self.keys < 0, 0.0), self.keys


class Received:
    """Σ_i a_ij for each key; the mean form divides by the number of queries that see the key (0 where none)."""

    def __init__(self, problem: Problem, lse: Tensor, reduce: str = "sum") -> None:
        shape = (problem.batch, problem.heads, problem.keys)
        self.total = torch.zeros(shape, dtype=problem.accumulate_dtype, device=problem.device)
        self.seen = torch.zeros(shape, dtype=torch.int64, device=problem.device) if reduce == "mean" else None

    def update(self, block: Tile, weights: Tensor) -> None:
        self.total[:, :, block.cols] += weights.sum(-2)
        if self.seen is not None:
            count = weights.shape[-2] if block.seen is None else block.seen.expand(weights.shape).sum(-2)
            self.seen[:, :, block.cols] += count

    def finalize(self) -> Tensor:
        return self.total if self.seen is None else self.total / self.seen.clamp(min=1)


class Pool:
    """A reduced to a rows × cols picture: block (r, c) covers queries ⌈r·Q/rows⌉ … and keys ⌈c·K/cols⌉ ….

    "mass" sums over the keys and averages over the queries, so that rows still sum to 1; "peak" is the
    largest weight in the block.
    """

    def __init__(self, problem: Problem, lse: Tensor, rows: int, cols: int, reduce: str = "mass") -> None:
        shape = (problem.batch, problem.heads, rows, cols)
        self.picture = torch.zeros(shape, dtype=problem.accumulate_dtype, device=problem.device)
        self.reduce = reduce
        self.row_of = torch.arange(problem.queries, device=problem.device) * rows // max(1, problem.queries)
        self.col_of = torch.arange(problem.keys, device=problem.device) * cols // max(1, problem.keys)

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


class Distance:
    """Σ_j a_ij · |p_i − j| of each row, p_i the query's own position: i + keys − queries when queries are fewer."""

    def __init__(self, problem: Problem, lse: Tensor) -> None:
        self.total = _per_query(problem, 0.0)
        self.offset = max(0, problem.keys - problem.queries)

    def update(self, block: Tile, weights: Tensor) -> None:
        own = (
            torch.arange(block.rows.start, block.rows.stop, device=weights.device).unsqueeze(-1) + self.offset
        )
        far = (own - torch.arange(block.cols.start, block.cols.stop, device=weights.device)).abs()
        self.total[:, :, block.rows] += (weights * far).sum(-1)

    def finalize(self) -> Tensor:
        return self.total


READINGS = {
    "topk": TopK,
    "entropy": Entropy,
    "max": MaxWeight,
    "max_score": MaxScore,
    "received": Received,
    "pool": Pool,
    "distance": Distance,
}
