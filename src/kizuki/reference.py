"""The formula in float64 NumPy, line by line: the specification every backend is compared with.

It builds A, which is what everything else here avoids; it is for small sizes and for truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .dropout import dropped
from .functions import places
from .portable import Tile
from .problem import Problem
from .statistics import Statistic

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reference:
    """Scores, weights, lse and output in float64: `[batch, heads, queries, keys | value_dim]`."""

    scores: Array
    weights: Array
    lse: Array
    output: Array | None
    visible: npt.NDArray[np.bool_]


def _numpy(tensor: Tensor) -> Array:
    return tensor.detach().to("cpu", torch.float64).numpy()


def evaluate(problem: Problem, value: Tensor | None = None) -> Reference:
    """Evaluate the contract literally on one problem.

    scores = scale·(q·k) → cap·tanh(s/cap) → score function → + bias → mask; weights = softmax over the visible
    keys with the sink one more logit in the denominator; output = (weights ∘ dropout) · value over the visible keys.
    Time and memory: queries × keys × head_dim, queries × keys.
    """
    group = problem.heads // problem.kv_heads
    query = _numpy(problem.flat_query())
    key = np.repeat(_numpy(problem.flat_key()), group, axis=1)
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    every = slice(None)

    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scores = problem.scale * np.einsum("bhid,bhjd->bhij", query, key)
        if problem.softcap is not None:
            scores = problem.softcap * np.tanh(scores / problem.softcap)
        if problem.score is not None:
            at = places(problem, slice(0, problem.queries), slice(0, problem.keys))
            scores = _numpy(problem.score.apply(torch.from_numpy(scores).to(problem.device), at))
        visible = np.ones(shape, dtype=bool)
        if problem.bias is not None:
            bias = np.broadcast_to(_numpy(problem.pairs(problem.bias, every, every)), shape)
            visible = visible & (bias != -np.inf)
            scores = scores + bias
        if problem.score is not None:
            visible = visible & (scores != -np.inf)
        if problem.mask is not None:
            seen = problem.mask.tile(problem, slice(0, problem.queries), slice(0, problem.keys))
            visible = visible & np.broadcast_to(seen.cpu().numpy(), shape)
        scores = np.where(visible, scores, -np.inf)

        sinks = np.full((1, problem.heads, 1), -np.inf)
        if problem.sinks is not None:
            sinks = _numpy(problem.sinks).reshape(1, -1, 1)
        live = visible.any(-1)
        peak = np.maximum(scores.max(-1, initial=-np.inf), sinks)
        peak = np.where(live & (peak != -np.inf), peak, 0.0)
        # A visible row takes part even when NaN; an absent key contributes exactly nothing.
        raised = np.where(visible, np.exp(scores - peak[..., None]), 0.0)
        total = raised.sum(-1) + np.exp(sinks - peak)
        # A row that sees only scores of −inf has no softmax: 0/0. Only a row that sees nothing is 0.
        lse = np.where(live, np.where(total == 0, np.nan, peak + np.log(total)), -np.inf)
        weights = np.where(visible, raised / total[..., None], 0.0)
        output = None
        if value is not None:
            ones = torch.ones(shape, dtype=torch.float64, device=problem.device)
            stay = dropped(problem, ones, slice(0, problem.queries), slice(0, problem.keys))
            output = _mix(weights * _numpy(stay), visible, value, problem)
    return Reference(scores, weights, lse, output, visible)


def read(problem: Problem, statistics: Sequence[Statistic]) -> None:
    """Update statistics made for a float64 frame (`Frame.of(problem, torch.float64)`) with all of A as one tile."""
    truth = evaluate(problem)
    scores, weights, visible = (torch.from_numpy(a) for a in (truth.scores, truth.weights, truth.visible))
    if scores.numel():
        tile = Tile(slice(0, problem.queries), slice(0, problem.keys), scores, visible, None)
        for statistic in statistics:
            statistic.update(tile, weights)


def _mix(weights: Array, visible: npt.NDArray[np.bool_], value: Tensor, problem: Problem) -> Array:
    flat = _numpy(problem.flat(value))
    flat = np.repeat(flat, problem.heads // flat.shape[1], axis=1)
    finite = np.isfinite(flat)
    output = np.einsum("bhij,bhjd->bhid", weights, np.where(finite, flat, 0.0))
    for j in np.nonzero(~finite.all((0, 1, 3)))[0]:
        column = np.where(finite[:, :, j], 0.0, flat[:, :, j])[:, :, None, :]
        output = output + np.where(visible[..., j, None], weights[..., j, None] * column, 0.0)
    return output
