"""`A.steps`: every number on the way from a query and a key to their weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import functions, portable
from .errors import OptionError
from .observation import is_whole
from .portable import NEG_INF
from .problem import in_dtype

if TYPE_CHECKING:
    from .operator import AttentionMatrix
    from .problem import Problem


@dataclass(frozen=True)
class Steps:
    """One entry of A in every head, in the order of the formula; each tensor `[..., heads]`, float32 (or float64).

    dot = Σ products; scaled = scale · dot; capped = softcap · tanh(scaled / softcap); bent = the score function's;
    score = bent + bias, −inf where the key is absent; weight = exp(score − lse). What a call has not, is None.
    """

    query: Tensor  # [..., heads, head_dim]
    key: Tensor  # [..., heads, head_dim], that of the head's group
    products: Tensor  # [..., heads, head_dim], query · key dimension by dimension
    dot: Tensor
    scale: float
    scaled: Tensor
    capped: Tensor | None
    bent: Tensor | None
    bias: Tensor | None
    visible: Tensor  # bool
    score: Tensor
    lse: Tensor  # of the query's row
    weight: Tensor


def steps(matrix: AttentionMatrix, query: int, key: int) -> Steps:
    """The entry of `query` and `key`, counted from 0, or from the end where negative."""
    problem = matrix.problem
    i, j = (
        _place(name, at, length)
        for name, at, length in (("query", query, problem.queries), ("key", key, problem.keys))
    )
    dtype, rows, cols = problem.accumulate_dtype, slice(i, i + 1), slice(j, j + 1)
    every = (problem.batch, problem.heads)
    with torch.no_grad():
        q = problem.flat_query()[:, :, i].to(dtype).expand(*every, -1)
        k = problem.flat_key()[:, :, j].to(dtype).repeat_interleave(problem.heads // problem.kv_heads, 1)
        products = q * k
        dot = products.sum(-1)
        scaled = score = dot * problem.scale
        capped = bent = bias = None
        if problem.softcap is not None:
            capped = score = problem.softcap * torch.tanh(scaled / problem.softcap)
        if problem.score is not None:
            at = functions.places(problem, rows, cols)
            bent = score = problem.score.apply(score[:, :, None, None], at)[:, :, 0, 0]
        visible = torch.ones(every, dtype=torch.bool, device=problem.device)
        if problem.bias is not None:
            bias = in_dtype(problem.pairs(problem.bias, rows, cols)[:, :, 0, 0], dtype).expand(every)
            score = score + bias
            visible = visible & (bias != NEG_INF)
        if problem.score is not None:
            visible = visible & (score != NEG_INF)
        seen = problem.visible(rows, cols)
        if seen is not None:
            visible = visible & seen[:, :, 0, 0]
        score = torch.where(visible, score, NEG_INF)
        lse = _lse(problem, i)
        weight = torch.where(visible, torch.exp(score - lse), 0.0).to(dtype)

    def shaped(tensor: Tensor) -> Tensor:
        return tensor.reshape(problem.result_shape(*tensor.shape[2:]))

    def kept(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else shaped(tensor)

    return Steps(
        query=shaped(q),
        key=shaped(k),
        products=shaped(products),
        dot=shaped(dot),
        scale=problem.scale,
        scaled=shaped(scaled),
        capped=kept(capped),
        bent=kept(bent),
        bias=kept(bias),
        visible=shaped(visible),
        score=shaped(score),
        lse=shaped(lse.to(dtype)),
        weight=shaped(weight),
    )


def _lse(problem: Problem, i: int) -> Tensor:
    """The log-sum-exp of one query in each head, in float64, `[batch, heads]`."""
    row, made = torch.tensor([i], device=problem.device), []
    for plane in range(problem.batch * problem.heads):
        b, h = plane // problem.heads, plane % problem.heads
        scores, _ = portable.row_scores(problem, b, h, row)
        logits = scores[0].to(portable.lse_dtype(problem))
        if problem.sinks is not None and bool(logits.isneginf().logical_not().any()):
            logits = torch.cat([logits, problem.sinks[h].reshape(1).to(logits.dtype)])
        made.append(logits.logsumexp(-1))
    return torch.stack(made).view(problem.batch, problem.heads)


def _place(name: str, at: int, length: int) -> int:
    if not is_whole(at) or not -length <= at < length:
        raise OptionError(f"A.steps: {name} is {at!r} but must be a whole number in {-length} … {length - 1}")
    return at % length


__all__ = ["Steps", "steps"]
