"""Readings on the cpu backend: which the kernel folds in, and what is left for a pass in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import portable
from ..problem import Problem
from ..statistics import Distance, Entropy, MaxScore, MaxWeight, Pool, Received, Statistic, TopK
from . import call
from .watch import LARGEST, SUM, Watch

ROWS = (Entropy, Distance, MaxWeight, MaxScore, TopK)
MOST_KEYS = 2**31 - 1  # the kernel counts keys in 32 bits beside scores of 32
TOGETHER = 1 << 22  # scores of rows that are NaN computed at once


@dataclass(frozen=True)
class Found:
    """The k best of each row as the kernel found them, standing in for a running selection."""

    weights: Tensor
    keys: Tensor

    def take(self, block: portable.Tile, weights: Tensor) -> None:
        raise RuntimeError("the kernel has already seen every tile")

    def join(self, other: object) -> None:
        raise RuntimeError("the kernel has already seen every tile")

    def result(self) -> tuple[Tensor, Tensor]:
        return self.weights, self.keys


def observe(
    problem: Problem, value: Tensor, out_dtype: torch.dtype, statistics: Sequence[Statistic]
) -> tuple[Tensor, Tensor]:
    """`call.forward` with statistics folded in: in the same pass those the kernel knows, then one in torch for others.

    A statistic over columns takes a pass of its own where bfloat16 is taken in pairs (the weights are rounded there
    before they meet the values), and so does one over the last queries only, which is short.
    """
    passes: list[list[Statistic]] = [[]]
    others: list[Statistic] = []
    paired = call.mixing_target(problem, value).pairs
    for statistic in statistics:
        if isinstance(statistic, ROWS) and not (isinstance(statistic, TopK) and problem.keys > MOST_KEYS):
            passes[0].append(statistic)
        elif isinstance(statistic, Pool | Received) and not _counts_pairs(problem, statistic):
            alone = paired or (isinstance(statistic, Received) and statistic.last is not None)
            twice = isinstance(statistic, Pool) and any(isinstance(s, Pool) for s in passes[0])
            passes.append([statistic]) if alone or twice else passes[0].append(statistic)
        else:
            others.append(statistic)
    watch = _watch(problem, passes[0])
    output, lse = call.forward(problem, value, out_dtype, watch=watch)
    _hand_over(problem, watch, lse, passes[0])
    for only in passes[1:]:
        # No value, in a dtype that is never taken in pairs.
        nothing = torch.zeros(problem.keys, 0, dtype=problem.accumulate_dtype)
        watch = _watch(problem, only)
        _hand_over(problem, watch, call.forward(problem, nothing, out_dtype, watch=watch)[1], only)
    if others:
        # Scores computed again in torch go with torch's own log-sum-exp.
        portable.fold(problem, portable.lse(problem), others)
    return output, lse


def _watch(problem: Problem, statistics: Sequence[Statistic]) -> Watch:
    pool = next((s for s in statistics if isinstance(s, Pool)), None)
    received = [s for s in statistics if isinstance(s, Received)]
    return Watch(
        problem,
        max((s.rank for s in statistics if isinstance(s, TopK)), default=0),
        bool(received),
        None if pool is None else (*pool.picture.shape[-2:], SUM if pool.reduce == "mass" else LARGEST),
        received[0].last if received else None,
        any(isinstance(s, Entropy) for s in statistics),
        any(isinstance(s, Distance) for s in statistics),
    )


def _counts_pairs(problem: Problem, statistic: Statistic) -> bool:
    """Whether it must count visible pairs that no range of keys describes."""
    counts = isinstance(statistic, Received) and statistic.seen is not None
    unranged = problem.residual is not None or problem.bias is not None or problem.score is not None
    return counts and unranged


def _hand_over(problem: Problem, watch: Watch, lse: Tensor, statistics: Sequence[Statistic]) -> None:
    dtype, stats = problem.accumulate_dtype, watch.stats
    for statistic in statistics:
        if isinstance(statistic, Entropy):
            statistic.total = stats[..., 2].to(dtype)
        elif isinstance(statistic, Distance):
            statistic.total = stats[..., 3].to(dtype)
        elif isinstance(statistic, MaxWeight):
            statistic.peak = (1.0 / stats[..., 1]).to(dtype)
        elif isinstance(statistic, MaxScore) and problem.queries:
            statistic.peak = stats[..., 0].amax(-1).to(dtype)
        elif isinstance(statistic, TopK):
            keys = watch.keys[..., : statistic.rank].to(torch.int64)
            weights = watch.best[..., : statistic.rank]
            statistic.best = Found(weights.masked_fill(keys < 0, 0.0), keys)
        elif isinstance(statistic, Received):
            statistic.total = watch.column_sums()
            if statistic.seen is not None:
                statistic.seen = _seen(problem, watch.first)
        elif isinstance(statistic, Pool):
            statistic.picture = watch.picture().to(dtype)
    odd = lse.isnan()
    if bool(odd.any()):
        _spoil(problem, odd, statistics)


def _spoil(problem: Problem, odd: Tensor, statistics: Sequence[Statistic]) -> None:
    """What rows that are NaN do to the readings: found from which keys they see, rows of one head at a time.

    A NaN is no largest score and orders nothing, so the kernel passes it over; their row sums are NaN already.
    """
    step = max(1, TOGETHER // max(1, problem.keys))
    for b, h in odd.any(-1).nonzero().tolist():
        for i in odd[b, h].nonzero().squeeze(-1).split(step):
            scores, seen = portable.row_scores(problem, b, h, i)
            for statistic in statistics:
                if isinstance(statistic, MaxScore):
                    statistic.peak[b, h] = torch.maximum(statistic.peak[b, h], scores.amax())
                elif isinstance(statistic, TopK):
                    weights, keys = statistic.best.result()
                    order = (~seen).to(torch.uint8).argsort(dim=-1, stable=True)[:, : statistic.rank]
                    there = seen.gather(-1, order)
                    weights[b, h, i] = torch.where(there, torch.nan, 0.0).to(weights.dtype)
                    keys[b, h, i] = order.where(there, -1)
                elif isinstance(statistic, Received):
                    own = seen[i >= statistic.first]
                    statistic.total[b, h, own.any(0)] = torch.nan
                elif isinstance(statistic, Pool):
                    row, key = seen.nonzero().unbind(-1)
                    statistic.picture[b, h, statistic.row_of[i[row]], statistic.col_of[key]] = torch.nan


def _seen(problem: Problem, from_query: int) -> Tensor:
    """How many queries see each key, from the ranges: +1 where one starts, −1 where it stops, summed along."""
    if problem.bounds is None:
        return torch.full((1, 1, problem.keys), problem.queries - from_query)
    bounds = problem.bounds
    first, stop = (edge.expand(*edge.shape[:2], problem.queries) for edge in (bounds.first, bounds.stop))
    first, stop = first[..., from_query:], stop[..., from_query:]
    live = (stop > first).to(torch.int64)
    change = torch.zeros(*first.shape[:2], problem.keys + 1, dtype=torch.int64)
    change.scatter_add_(-1, first, live).scatter_add_(-1, stop, -live)
    return change.cumsum(-1)[..., :-1]
