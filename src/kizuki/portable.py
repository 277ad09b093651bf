"""The portable backend: the formula tile by tile in plain torch, on any device PyTorch has.

It is the slower of the two backends and the simpler: online softmax over key tiles forward, and the
same tiles again, given the log-sum-exp, for gradients and readings. Nothing it holds grows as
queries × keys; a tile has at most `TILE` scores over all heads.

What it promises about bits: the same call gives the same bits again on the same machine. Another number
of threads, or the same row in another batch, may round differently, because torch's matrix product does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from . import functions
from .dropout import dropped
from .problem import Problem, in_dtype
from .statistics import Statistic

TILE = 1 << 19  # scores held at once, over batch and heads: 2 MB in float32, with as much again for each step
NEG_INF = float("-inf")

P = ParamSpec("P")
R = TypeVar("R")


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function(problem, ...)` outside autocast, which would quietly multiply float32 in a lower precision."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        problem = args[0]
        kind = problem.device.type if isinstance(problem, Problem) else "cpu"
        if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
            return function(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return function(*args, **kwargs)

    return run


@dataclass(frozen=True)
class Tile:
    """One block of A: `scores` `[batch, heads, rows, cols]`, −inf where absent.

    `seen` broadcasts to it and is True where visible (None = everywhere).
    """

    rows: slice
    cols: slice
    scores: Tensor
    seen: Tensor | None
    slope: Tensor | None  # d(score)/d(scaled product), where a softcap or a score function bends it

    def weights(self, norm: Tensor) -> Tensor:
        """exp(scores − lse), 0 where absent, given `split` of the problem's lse, `[2, batch, heads, queries]`."""
        weights = torch.exp(self.logs(norm))
        # In a row that is NaN the absent keys are still absent: columns must not catch its NaN there.
        return weights if self.seen is None else torch.where(self.seen, weights, 0.0)

    def logs(self, norm: Tensor) -> Tensor:
        """scores − lse, the logarithms of the weights; −inf where absent."""
        whole, rest = norm[:, :, :, self.rows].unsqueeze(-1)
        return (self.scores - whole) - rest


def _blocks(problem: Problem) -> tuple[int, int]:
    """`(block_q, block_k)`: together at most TILE scores, and either operand of a block at most 8 · TILE numbers."""
    planes = max(1, problem.batch * problem.heads)
    kv_planes = max(1, problem.batch * problem.kv_heads)
    queries, keys = max(1, problem.queries), max(1, problem.keys)
    budget, room = max(1, TILE // planes), 8 * TILE // problem.head_dim
    block_q = min(queries, max(1, budget // min(keys, 1024)), max(16, room // planes))
    return block_q, min(keys, max(1, budget // block_q), max(16, room // kv_planes))


def row_blocks(problem: Problem) -> Iterator[slice]:
    """The query blocks of A."""
    block_q, _ = _blocks(problem)
    for start in range(0, problem.queries, block_q):
        yield slice(start, min(start + block_q, problem.queries))


def col_blocks(problem: Problem, rows: slice) -> Iterator[slice]:
    """The key blocks that some query of `rows` can see; the others are never touched."""
    _, block_k = _blocks(problem)
    first, stop = 0, problem.keys
    if problem.bounds is not None:
        low, high = problem.bounds.first[..., rows], problem.bounds.stop[..., rows]
        live = high > low
        if not bool(live.any()):
            return
        first, stop = int(low[live].min()), int(high.max())
    for start in range(first - first % block_k, stop, block_k):
        yield slice(start, min(start + block_k, problem.keys))


def score_tile(
    problem: Problem, query: Tensor, key: Tensor, rows: slice, cols: slice, sloped: bool = False
) -> Tile:
    """scale·(q·k) → softcap → score function → + bias → mask, on one tile, in the accumulation dtype.

    `sloped`: the slope of a score function is wanted too.

    `query` `[batch, heads, queries, head_dim]`, `key` `[batch, kv_heads, keys, head_dim]`.
    """
    dtype = problem.accumulate_dtype
    q = query[:, :, rows].to(dtype) * problem.scale
    scores = grouped(q, key[:, :, cols].to(dtype).transpose(-1, -2))
    scores, slope = _capped(problem, scores)
    if problem.score is not None:
        at = functions.places(problem, rows, cols)
        if sloped:
            scores, own = problem.score.bend(scores, at)
            slope = own if slope is None else slope * own
        else:
            scores = problem.score.apply(scores, at)
    seen = problem.visible(rows, cols)
    if problem.bias is not None:
        bias = problem.pairs(problem.bias, rows, cols)
        there = bias != NEG_INF
        seen = there if seen is None else seen & there
        scores = scores + in_dtype(bias, dtype)
    if problem.score is not None:
        there = scores != NEG_INF  # what a score function calls −inf is absent, as behind a bias
        seen = there if seen is None else seen & there
    if seen is not None:
        # A select, not an addition: whatever stands behind a mask never reaches arithmetic.
        scores = torch.where(seen, scores, NEG_INF)
    return Tile(rows, cols, scores, seen, slope)


def _capped(problem: Problem, scores: Tensor) -> tuple[Tensor, Tensor | None]:
    if problem.softcap is None:
        return scores, None
    ratio = torch.tanh(scores / problem.softcap)
    return problem.softcap * ratio, 1 - ratio * ratio


def grouped(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` where `right` has fewer heads: `[b, H, m, x] @ [b, H/g, x, n]`, right never repeated."""
    batch, heads, m, _ = left.shape
    kv_heads = right.shape[1]
    if heads == kv_heads:
        return left @ right
    folded = left.reshape(batch, kv_heads, (heads // kv_heads) * m, left.shape[-1])
    return (folded @ right).view(batch, heads, m, right.shape[-1])


def mix(weights: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
    """`weights @ value`, where a value no weight sees is not read into arithmetic (0 · NaN would be NaN)."""
    if seen is None:
        return grouped(weights, value)
    finite = torch.isfinite(value)
    if bool(finite.all()):
        return grouped(weights, value)
    output = grouped(weights, torch.where(finite, value, 0.0))
    # The rest is what arithmetic on NaN and ±Inf gives, counted over the keys that are seen.
    dtype = value.dtype
    plus, minus = (weights > 0) & seen, (weights < 0) & seen
    other = (seen & ~plus & ~minus).to(dtype)  # weight 0, and 0 · Inf is NaN
    plus, minus = plus.to(dtype), minus.to(dtype)
    up, down = (value == float("inf")).to(dtype), (value == NEG_INF).to(dtype)
    none = grouped(seen.expand(weights.shape).to(dtype), torch.isnan(value).to(dtype)) + grouped(
        other, up + down
    )
    output = torch.where(grouped(plus, up) + grouped(minus, down) > 0, output + float("inf"), output)
    output = torch.where(grouped(plus, down) + grouped(minus, up) > 0, output - float("inf"), output)
    return output.masked_fill(none > 0, float("nan"))


def tame(tensor: Tensor) -> bool:
    """Whether no entry is NaN or Inf, for certain: a sum that is finite had no such term. One read of the tensor."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))))


@exact
def forward(problem: Problem, value: Tensor) -> tuple[Tensor, Tensor]:
    """`(A @ value, lse)`: `[batch, heads, queries, value_dim]` in the input dtype, `[batch, heads, queries]`.

    `value` comes as the user gave it, `[..., kv_heads, keys, value_dim]`.

    Online softmax: for each key block, running_max and running_sum are renewed and the accumulator rescaled.
    """
    dtype = problem.accumulate_dtype
    query, key, value = problem.flat_query(), problem.flat_key(), problem.flat(value)
    shape = (problem.batch, problem.heads, problem.queries)
    output = torch.zeros(*shape, value.shape[-1], dtype=problem.dtype, device=problem.device)
    lse = torch.full(shape, NEG_INF, dtype=lse_dtype(problem), device=problem.device)
    sinks = None if problem.sinks is None else in_dtype(problem.sinks, dtype).view(1, -1, 1)
    plain = tame(value)
    for rows in row_blocks(problem):
        size = (*shape[:2], rows.stop - rows.start)
        running_max = torch.full(size, NEG_INF, dtype=dtype, device=problem.device)
        running_sum = torch.zeros(size, dtype=dtype, device=problem.device)
        accumulator = torch.zeros(*size, value.shape[-1], dtype=dtype, device=problem.device)
        live = torch.zeros(size, dtype=torch.bool, device=problem.device)
        for cols in col_blocks(problem, rows):
            block = score_tile(problem, query, key, rows, cols)
            live |= True if block.seen is None else block.seen.any(-1)
            new_max = torch.maximum(running_max, block.scores.amax(-1))
            shift = new_max.masked_fill(new_max == NEG_INF, 0.0)  # −inf − −inf is NaN
            weights = torch.exp(block.scores - shift.unsqueeze(-1))
            decay = torch.exp(running_max - shift)
            running_sum = running_sum * decay + weights.sum(-1)
            staying = dropped(problem, weights, rows, cols)
            part = mix(staying, value[:, :, cols].to(dtype), None if plain else block.seen)
            accumulator = accumulator * decay.unsqueeze(-1) + part
            running_max = new_max
        if sinks is not None:
            new_max = torch.maximum(running_max, sinks)
            shift = new_max.masked_fill(new_max == NEG_INF, 0.0)
            decay = torch.exp(running_max - shift)
            running_sum = running_sum * decay + torch.exp(sinks - shift)
            accumulator = accumulator * decay.unsqueeze(-1)
            running_max = new_max
        # A row that sees keys, all of score −inf, has no softmax: 0/0, NaN. Only an empty row is 0.
        total = running_sum.masked_fill(~live, 1.0)
        log_sum = running_max.to(lse.dtype) + torch.log(total.to(lse.dtype))
        log_sum = log_sum.masked_fill(running_sum == 0, float("nan"))
        mixed = (accumulator / total.unsqueeze(-1)).masked_fill(~live.unsqueeze(-1), 0.0)
        output[:, :, rows] = mixed.to(problem.dtype)
        lse[:, :, rows] = log_sum.masked_fill(~live, NEG_INF)
    return output, lse


def lse_dtype(problem: Problem) -> torch.dtype:
    """What the log-sum-exp is kept in between passes: float64, where the device has it."""
    return torch.float32 if problem.device.type == "mps" else torch.float64


def lse(problem: Problem) -> Tensor:
    """The log-sum-exp alone, `[batch, heads, queries]`."""
    with torch.no_grad():
        return forward(problem, problem.key.new_zeros(problem.keys, 0))[1]


def tiles(problem: Problem, sloped: bool = False) -> Iterator[Tile]:
    """Every tile of A that holds a visible key, row block by row block."""
    query, key = problem.flat_query(), problem.flat_key()
    for rows in row_blocks(problem):
        for cols in col_blocks(problem, rows):
            yield score_tile(problem, query, key, rows, cols, sloped)


def far(problem: Problem, lse: Tensor) -> Tensor:
    """The rows whose lse has lost digits that weights need: beyond 2³⁰ in float64, beyond 16 where it is no wider.

    A row of biases finfo.min has the lse finfo.min + ln n, and no float holds the ln n.
    """
    limit = 2.0**30 if torch.finfo(lse.dtype).eps < torch.finfo(problem.accumulate_dtype).eps else 16.0
    return lse.isfinite() & (lse.abs() > limit)


@exact
def split(problem: Problem, lse: Tensor) -> Tensor:
    """The lse as two numbers of the accumulation dtype, subtracted one after the other: `[2, batch, heads, queries]`.

    Rounded to one float32, an lse of 10 would cost every weight 5e-7. Rows that are `far` get what is missing
    from one more pass over A; others cost nothing.
    """
    dtype = problem.accumulate_dtype
    lse = lse.masked_fill(lse == NEG_INF, 0.0)  # an empty row has no weight to take it from
    whole = lse.to(dtype)
    norm = torch.stack([whole, (lse - whole).to(dtype)])
    large = far(problem, lse)
    if bool(large.any()):
        total = torch.zeros_like(whole)
        for block in tiles(problem):
            total[:, :, block.rows] += block.weights(norm).sum(-1)
        if problem.sinks is not None:
            total += torch.exp(in_dtype(problem.sinks, dtype).view(1, -1, 1) - whole)
        norm[1] += torch.where(large, torch.log(total), 0.0)
    return norm


@exact
def fold(problem: Problem, lse: Tensor, statistics: Sequence[Statistic]) -> None:
    """One pass over the tiles of A, updating every statistic. Time one Q Kᵀ; extra memory one tile."""
    norm = split(problem, lse)
    for block in tiles(problem):
        weights = block.weights(norm)
        for statistic in statistics:
            statistic.update(block, weights)


@exact
def dense(problem: Problem, lse: Tensor) -> Tensor:
    """All of A, `[batch, heads, queries, keys]`."""
    norm = split(problem, lse)
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    result = torch.zeros(shape, dtype=problem.accumulate_dtype, device=problem.device)
    for block in tiles(problem):
        result[:, :, block.rows, block.cols] = block.weights(norm)
    return result


@exact
def transposed(problem: Problem, lse: Tensor, y: Tensor) -> Tensor:
    """`Aᵀ y`, `[batch, heads, keys, width]`, given `y` `[batch, heads, queries, width]`: the V-gradient kernel."""
    dtype, norm = problem.accumulate_dtype, split(problem, lse)
    shape = (problem.batch, problem.heads, problem.keys, y.shape[-1])
    result = torch.zeros(shape, dtype=dtype, device=problem.device)
    plain = tame(y)
    for block in tiles(problem):
        weights = block.weights(norm).transpose(-1, -2)
        seen = None if plain else _flip(block.seen)
        result[:, :, block.cols] += mix(weights, y[:, :, block.rows].to(dtype), seen)
    return result.to(problem.dtype)


def _flip(seen: Tensor | None) -> Tensor | None:
    return None if seen is None else seen.transpose(-1, -2)


@dataclass
class Gradients:
    """What `backward` returns; None where it was not asked for.

    query, key and value `[batch, their heads, length, width]`; bias and sinks in their own shapes.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Own:
    """The gradient of a reading that is not `A @ value`, told to `backward` by its dS = P ∘ (dP − delta).

    dP = dO Vᵀ, to which `tilt` adds tilt_i · ln a_ij. Both `[batch, heads, queries]`.
    """

    delta: Tensor
    tilt: Tensor | None = None


@exact
def backward(
    problem: Problem,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    grad: Tensor,
    needs: tuple[bool, bool, bool, bool, bool],
    own: Own | None = None,
) -> Gradients:
    """Gradients of `A @ value` for query, key, value, bias and sinks, one recomputed tile at a time.

    With P the weights and dP = dO Vᵀ: dV = Pᵀ dO, dS = P ∘ (dP − rowsum(dO ∘ O)), dQ = scale·dS K,
    dK = scale·dSᵀ Q, and the bias receives dS summed over its broadcast axes (FlashAttention, section 3.1).
    With dropout D, found again from its seed: dV = (P ∘ D)ᵀ dO and dP = D ∘ (dO Vᵀ). `own` takes the place of
    rowsum(dO ∘ O); then `output` is not read.
    """
    dtype, device, norm = problem.accumulate_dtype, problem.device, split(problem, lse)
    query, key = problem.flat_query(), problem.flat_key()
    dead = lse == NEG_INF
    grad = grad.to(dtype).masked_fill(dead.unsqueeze(-1), 0.0)
    if own is None:
        delta = (grad * output.to(dtype)).masked_fill(dead.unsqueeze(-1), 0.0).sum(-1)
    else:
        delta = own.delta.to(dtype).masked_fill(dead, 0.0)
    tilt = None if own is None or own.tilt is None else own.tilt.to(dtype)
    sums = Gradients()
    if needs[0]:
        sums.query = torch.zeros(query.shape, dtype=dtype, device=device)
    if needs[1]:
        sums.key = torch.zeros(key.shape, dtype=dtype, device=device)
    if needs[2]:
        sums.value = torch.zeros(value.shape, dtype=dtype, device=device)
    if needs[3] and problem.bias is not None:
        sums.bias = torch.zeros(problem.bias.shape, dtype=dtype, device=device)
    if needs[4] and problem.sinks is not None:
        logits = in_dtype(problem.sinks, dtype).view(1, -1, 1)
        share = torch.exp((logits - norm[0]) - norm[1]).masked_fill(dead, 0.0)
        sums.sinks = -(share * delta).sum((0, 2))
    plain_grad, plain_key, plain_query = tame(grad), tame(key), tame(query)
    for block in tiles(problem, sloped=needs[0] or needs[1]):
        rows, cols, seen = block.rows, block.cols, block.seen
        weights = block.weights(norm)
        if sums.value is not None:
            staying = dropped(problem, weights, rows, cols)
            part = mix(staying.transpose(-1, -2), grad[:, :, rows], None if plain_grad else _flip(seen))
            sums.value[:, :, cols] += fold_heads(part, value.shape[1])
        if sums.query is None and sums.key is None and sums.bias is None:
            continue
        d_weights = grouped(grad[:, :, rows], value[:, :, cols].to(dtype).transpose(-1, -2))
        d_weights = dropped(problem, d_weights, rows, cols)
        if tilt is not None:
            logs = block.logs(norm)
            d_weights = d_weights + torch.where(logs == NEG_INF, 0.0, tilt[:, :, rows].unsqueeze(-1) * logs)
        d_scores = _only(seen, weights * (d_weights - delta[:, :, rows].unsqueeze(-1)))
        if sums.bias is not None:
            problem.add_pairs(sums.bias, d_scores, rows, cols)
        if block.slope is not None:
            d_scores = _only(seen, d_scores * block.slope)
        if sums.query is not None:
            part = mix(d_scores, key[:, :, cols].to(dtype), None if plain_key else seen)
            sums.query[:, :, rows] += part * problem.scale
        if sums.key is not None:
            seen = None if plain_query else _flip(seen)
            part = mix(d_scores.transpose(-1, -2), query[:, :, rows].to(dtype), seen) * problem.scale
            sums.key[:, :, cols] += fold_heads(part, key.shape[1])
    return sums


def _only(seen: Tensor | None, tensor: Tensor) -> Tensor:
    """`tensor` where seen, 0 elsewhere, whatever stood there."""
    return tensor if seen is None else torch.where(seen, tensor, 0.0)


def fold_heads(tensor: Tensor, heads: int) -> Tensor:
    """Sum the query heads that share a key head: `[b, H, n, d]` → `[b, heads, n, d]`."""
    if tensor.shape[1] == heads:
        return tensor
    return tensor.view(tensor.shape[0], heads, tensor.shape[1] // heads, *tensor.shape[2:]).sum(2)


@exact
def row_scores(problem: Problem, b: int, h: int, i: Tensor) -> tuple[Tensor, Tensor]:
    """Whole rows: scores of queries `i` of one head, −inf where absent; which keys they see; `[len(i), keys]`."""
    dtype = problem.accumulate_dtype
    query, key = problem.flat_query(), problem.flat_key()
    keys = key[b, h // (problem.heads // key.shape[1])]
    scores, _ = _capped(
        problem, (query[b, h, i].to(dtype) * problem.scale) @ keys.to(dtype).transpose(-1, -2)
    )
    seen = torch.ones(1, 1, dtype=torch.bool, device=problem.device)
    at = (
        torch.tensor(b, device=i.device).view(1, 1, 1, 1),
        torch.tensor(h, device=i.device).view(1, 1, 1, 1),
        i.view(1, 1, -1, 1),
        torch.arange(problem.keys, device=i.device).view(1, 1, 1, -1),
    )
    if problem.score is not None:
        scores = problem.score.apply(scores[None, None], at)[0, 0]
    if problem.mask is not None:
        seen = seen & problem.mask.visible(problem, *at)[0, 0]
    if problem.bias is not None:
        bias = problem.pairs_at(problem.bias, *at)[0, 0]
        seen = seen & (bias != NEG_INF)
        scores = scores + in_dtype(bias, dtype)
    if problem.score is not None:
        seen = seen & (scores != NEG_INF)
    return torch.where(seen, scores, NEG_INF), seen.expand(scores.shape)


@exact
def row_weights(problem: Problem, b: int, h: int, i: Tensor) -> Tensor:
    """Whole rows of A: the weights of queries `i` of one head, `[len(i), keys]`, each normalised by itself."""
    scores, seen = row_scores(problem, b, h, i)
    peak = scores.amax(-1, keepdim=True) if problem.keys else scores.new_full((i.numel(), 1), NEG_INF)
    sink = None if problem.sinks is None else in_dtype(problem.sinks[h], problem.accumulate_dtype)
    if sink is not None:
        peak = torch.maximum(peak, sink)
    peak = peak.masked_fill(peak == NEG_INF, 0.0)
    raised = torch.where(seen, torch.exp(scores - peak), 0.0)
    total = raised.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - peak)
    return torch.where(seen, raised / total, 0.0)


__all__ = [
    "Gradients",
    "Tile",
    "backward",
    "dense",
    "fold",
    "forward",
    "row_scores",
    "row_weights",
    "score_tile",
    "tiles",
    "transposed",
]
