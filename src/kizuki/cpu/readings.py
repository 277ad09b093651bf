"""Handing the results of the reading kernel to the statistics that asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import observe, portable
from ..problem import Problem
from . import call

POOLED = 1 << 24  # numbers of A · one-hot held at once
NATIVE = (
    observe.Entropy,
    observe.Distance,
    observe.MaxWeight,
    observe.MaxScore,
    observe.TopK,
    observe.Received,
)


@dataclass(frozen=True)
class Found:
    """The k best of each row as the kernel found them, standing in for a running selection."""

    weights: Tensor
    keys: Tensor

    def take(self, block: portable.Tile, weights: Tensor) -> None:
        raise RuntimeError("the kernel has already seen every tile")

    def result(self) -> tuple[Tensor, Tensor]:
        return self.weights, self.keys


def fold(problem: Problem, lse: Tensor, statistics: Sequence[observe.Statistic]) -> None:
    """One compiled pass for the statistics the kernel knows, one pass in torch for the others.

    A row with a NaN has no largest keys to find by comparison, so that such a problem takes the torch pass whole.
    """
    native = [s for s in statistics if isinstance(s, NATIVE) and not _counts_pairs(problem, s)]
    if native and not bool(lse.isnan().any()) and problem.keys:
        top = [s.rank for s in native if isinstance(s, observe.TopK)]
        received = any(isinstance(s, observe.Received) for s in native)
        readings = call.read(problem, lse, max(top, default=0), received)
        for statistic in native:
            _give(problem, lse, readings, statistic)
        statistics = [s for s in statistics if s not in native]
    pools = [s for s in statistics if isinstance(s, observe.Pool) and s.reduce == "mass"]
    for pool in pools:
        _pool_mass(problem, pool)
    statistics = [s for s in statistics if s not in pools]
    if statistics:
        # Scores computed again in torch go with torch's own log-sum-exp.
        observe.fold(problem, portable.lse(problem), statistics)


def _pool_mass(problem: Problem, statistic: observe.Pool) -> None:
    """A pooled picture is linear: A times the one-hot matrix of the columns, then sums over the rows of a pixel."""
    cols = statistic.picture.shape[-1]
    step = max(1, POOLED // max(1, problem.batch * problem.heads * problem.queries))
    for start in range(0, cols, step):
        wanted = torch.arange(start, min(start + step, cols))
        member = (statistic.col_of.unsqueeze(-1) == wanted).to(problem.accumulate_dtype)
        mass = call.forward(problem, member, problem.accumulate_dtype)[0]
        statistic.picture[..., start : start + len(wanted)].index_add_(-2, statistic.row_of, mass)


def _counts_pairs(problem: Problem, statistic: observe.Statistic) -> bool:
    """Whether it must count visible pairs that no range of keys describes."""
    counts = isinstance(statistic, observe.Received) and statistic.seen is not None
    unranged = problem.residual is not None or problem.bias is not None or problem.score is not None
    return counts and unranged


def _give(problem: Problem, lse: Tensor, readings: call.Readings, statistic: observe.Statistic) -> None:
    if isinstance(statistic, observe.Entropy):
        statistic.total = readings.entropy
    elif isinstance(statistic, observe.Distance):
        statistic.total = readings.distance
    elif isinstance(statistic, observe.MaxWeight):
        statistic.peak = readings.peak
    elif isinstance(statistic, observe.MaxScore):
        statistic.peak = readings.top_score.amax(-1) if problem.queries else statistic.peak
    elif isinstance(statistic, observe.TopK):
        keys = readings.best_keys[..., : statistic.rank]
        shift = lse.masked_fill(lse == portable.NEG_INF, 0.0).unsqueeze(-1)
        exact = torch.exp(readings.best_scores[..., : statistic.rank] - shift)  # in float64, as the lse is
        weights = exact.to(problem.accumulate_dtype).masked_fill(keys < 0, 0.0)
        statistic.best = Found(weights, keys)
    elif isinstance(statistic, observe.Received):
        statistic.total = readings.received
        if statistic.seen is not None:
            statistic.seen = _seen(problem)


def _seen(problem: Problem) -> Tensor:
    """How many queries see each key, from the ranges: +1 where one starts, −1 where it stops, summed along."""
    if problem.bounds is None:
        return torch.full((1, 1, problem.keys), problem.queries)
    first, stop = problem.bounds.first, problem.bounds.stop
    live = (stop > first).to(torch.int64)
    change = torch.zeros(*first.shape[:2], problem.keys + 1, dtype=torch.int64)
    change.scatter_add_(-1, first, live).scatter_add_(-1, stop, -live)
    return change.cumsum(-1)[..., :-1]
