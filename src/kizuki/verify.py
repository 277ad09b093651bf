"""`A.verify`: what must hold of A whatever computed it, checked at sampled places."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import portable
from .errors import OptionError
from .observation import is_whole
from .problem import Problem, in_dtype

if TYPE_CHECKING:
    from .operator import AttentionMatrix

BESIDE = 16  # rows on either side of a sampled one that say how far the plain formula errs
PIXELS = 32  # of the coarser picture, at most, on a side


@dataclass(frozen=True)
class Check:
    """One thing that must hold: how many places were looked at, the largest error, the largest allowed."""

    what: str
    places: int
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "WRONG"
        return f"{verdict:5} {self.what}: {self.places:,} places, error {self.error:.2g}, allowed {self.allowed:.2g}"


@dataclass(frozen=True)
class Verified:
    """The result of `A.verify`; prints as one line a check.

    >>> import torch, kizuki
    >>> x = torch.randn(2, 50, 8)
    >>> proved = kizuki.attend(x, x).verify()
    >>> proved.ok, all(check.error <= check.allowed for check in proved.checks)
    (True, True)
    """

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def __str__(self) -> str:
        return "\n".join(str(check) for check in self.checks)


def verify(matrix: AttentionMatrix, rows: int, cells: int, seed: int) -> Verified:
    """The checks. What a row may err by is measured, twice the plain formula's error at the same rows plus rounding
    (the rule of `kizuki.check`); sums over rows may err by as much for each of their rows.
    """
    for name, count in (("rows", rows), ("cells", cells)):
        if not is_whole(count) or count < 1:
            raise OptionError(f"A.verify: {name} is {count!r} but must be a whole number >= 1")
    if not is_whole(seed):
        raise OptionError(f"A.verify: seed is {seed!r} but must be a whole number")
    with torch.no_grad():
        return _verify(matrix, rows, cells, seed)


def _verify(matrix: AttentionMatrix, rows: int, cells: int, seed: int) -> Verified:
    problem = matrix.problem
    live, keys, planes = (
        problem.queries * problem.batch * problem.heads,
        problem.keys,
        problem.batch * problem.heads,
    )
    if not live or not keys:
        return Verified(())
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(live, (rows,), generator=generator).sort().values
    truth_problem = _wider(problem)
    eps = torch.finfo(problem.accumulate_dtype).eps
    top_weights, top_keys = (t.reshape(live, -1) for t in matrix.topk(min(8, keys)))
    whole = _row_sums(matrix)
    cell_error = cell_plain = row_error = row_plain = top_error = 0.0
    seen_cells = 0
    for at in drawn.tolist():
        plane, i = at // problem.queries, torch.tensor([at % problem.queries], device=problem.device)
        b, h = plane // problem.heads, plane % problem.heads
        # The plain formula is a product of matrices: one row alone is summed by another, luckier routine.
        low = max(0, int(i) - BESIDE)
        beside = torch.arange(low, min(problem.queries, low + 2 * BESIDE), device=problem.device)
        truths = portable.row_weights(truth_problem, b, h, beside).to(torch.float64)
        plains = portable.row_weights(problem, b, h, beside).to(torch.float64)
        truth, plain = truths[int(i) - low], plains[int(i) - low]
        got = matrix.backend.rows(problem, b, h, i, 0, keys)[0].to(torch.float64)
        if bool(truth.isnan().any()):
            row_error = row_error if bool((got.isnan() == truth.isnan()).all()) else float("inf")
            continue
        columns = torch.randint(keys, (-(-cells // rows),), generator=generator).to(problem.device)
        seen_cells += len(columns)
        cell_error = max(cell_error, _most(got[columns] - truth[columns]))
        cell_plain = max(cell_plain, _most((plains - truths).nan_to_num(0.0)), eps * _most(truth))
        wanted = whole.reshape(-1)[at]
        row_error = max(row_error, abs(float(got.sum() - wanted)))
        row_plain = max(row_plain, abs(float(plain.sum() - wanted)))
        best = truth.sort(descending=True).values[: top_weights.shape[-1]]
        if int(top_keys[at].max()) >= keys:
            top_error = float("inf")
            continue
        named = got[top_keys[at].clamp(min=0)].masked_fill(top_keys[at] < 0, 0.0)
        top_error = max(top_error, _most(top_weights[at] - best), _most(top_weights[at] - named))
    # A row of n weights, each of the right rounding, may sum to something off by that of its sum.
    per_row = 2 * row_plain + 8 * eps
    per_cell = 2 * cell_plain + eps
    checks = [
        Check("sampled rows sum to 1 less the sink's share", rows, row_error, per_row),
        Check("received sums to what the rows hold", planes, *_received(matrix, whole, per_row)),
        Check("top 8 against full rows", rows, top_error, per_cell),
        Check("sampled cells against float64", seen_cells, cell_error, per_cell),
    ]
    pixels = [min(PIXELS, n // 2) for n in (problem.queries, keys)]
    if min(pixels) >= 1:
        checks.insert(3, Check("pooled mass against its children", *_pooled(matrix, pixels, per_row)))
    return Verified(tuple(checks))


def _most(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _wider(problem: Problem) -> Problem:
    """The same in float64."""
    wide = torch.float64 if problem.device.type != "mps" else torch.float32
    bias = None if problem.bias is None else in_dtype(problem.bias, wide)
    sinks = None if problem.sinks is None else in_dtype(problem.sinks, wide)
    return replace(problem, query=problem.query.to(wide), key=problem.key.to(wide), bias=bias, sinks=sinks)


def _row_sums(matrix: AttentionMatrix) -> Tensor:
    """What each row must sum to in float64, `[batch, heads, queries]`: 1 less its sink's share, 0 if it is empty."""
    problem, lse = matrix.problem, matrix._flat_lse()
    share = torch.zeros_like(lse)
    if problem.sinks is not None:
        share = torch.exp(in_dtype(problem.sinks, lse.dtype).view(1, -1, 1) - lse)
    return (1 - share).masked_fill(lse == portable.NEG_INF, 0.0).masked_fill(lse.isnan(), torch.nan)


def _received(matrix: AttentionMatrix, whole: Tensor, per_row: float) -> tuple[float, float]:
    rows = whole.nan_to_num(0.0).sum(-1)
    total = matrix.received().to(torch.float64).reshape(*whole.shape[:2], -1).sum(-1)
    odd = whole.isnan().any(-1)
    return _most((total - rows)[~odd]), per_row * whole.shape[-1]


def _pooled(matrix: AttentionMatrix, pixels: list[int], per_row: float) -> tuple[int, float, float]:
    problem, (rows, cols) = matrix.problem, pixels
    mass = []
    for factor in (1, 2):
        picture = matrix.pool(factor * rows, factor * cols).to(torch.float64)
        row_of = torch.arange(problem.queries, device=problem.device) * (factor * rows) // problem.queries
        mass.append(picture * torch.bincount(row_of, minlength=factor * rows).view(-1, 1))
    parent, children = mass
    sums = children.unflatten(-1, (cols, 2)).sum(-1).unflatten(-2, (rows, 2)).sum(-2)
    there = ~(parent.isnan() | sums.isnan())
    return parent.numel(), _most((parent - sums)[there]), per_row * -(-problem.queries // rows)


__all__ = ["Check", "Verified", "verify"]
