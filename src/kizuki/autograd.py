"""Gradients of `A @ value`: the chosen backend computes output and first gradients, `differentiable` what lies beyond.

`Attend` is differentiable in query, key, value, bias, sinks and scale, in reverse and forward mode and any
number of times, and knows how `torch.func` transforms act on it. Memory grows with queries + keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import functions, portable
from .backends import Backend
from .differentiable import Program, Recipe, apply, evaluate, formula, one_by_one, pullback, pushforward
from .errors import OptionError
from .problem import Problem
from .rules import encode, for_copies, in_front, leaves, replace_tensors, spread

TINY = 2.0**-60  # a scale by which a gradient is not divided
INPUTS = 6  # query, key, value, bias, sinks, scale
Needs = tuple[bool, ...]  # which of them a gradient is asked for


def wanted(problem: Problem, value: Tensor) -> bool:
    """Whether a derivative may be asked for: something requires a gradient, or forward mode is on."""
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    tensors = (problem.query, problem.key, value, problem.bias, problem.sinks, problem.scale_tensor)
    return any(t is not None and t.requires_grad for t in tensors)


def attend(problem: Problem, value: Tensor, backend: Backend) -> tuple[Tensor, Tensor]:
    """`backend.forward(problem, value)` with its derivatives; value as `widened` leaves it."""
    carried = torch._C._are_functorch_transforms_active()
    learned = problem.scale_tensor
    if learned is not None and not carried and float(learned.detach()) != problem.scale:
        raise OptionError(
            f"A @ value: scale was {problem.scale} when A was made and is {float(learned.detach())} now; make A again "
            "after its scale has changed"
        )
    # The mask's tensors go along: torch notices when one is written to before backward, and transforms batch them.
    masks = leaves(problem.mask) if carried else () if problem.mask is None else problem.mask.tensors()
    operands = (problem.query, problem.key, value, problem.bias, problem.sinks, problem.scale_tensor)
    return apply(Attend, *operands, Recipe(problem, backend, carried), *masks)


class Attend(torch.autograd.Function):
    """`(output, lse)` of one problem, as a backend returns them; the lse carries no gradient."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        scale: Tensor | None,
        recipe: Recipe,
        *masks: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return recipe.backend.forward(recipe.over(query, key, bias, sinks, scale, masks), value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        operands, recipe, masks = inputs[:INPUTS], inputs[INPUTS], inputs[INPUTS + 1 :]
        ctx.recipe = recipe
        ctx.save_for_backward(*operands, *output, *masks)
        ctx.save_for_forward(*operands, *output, *masks)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        operands, (output, lse), masks = _apart(ctx.saved_tensors)
        needs = tuple(ctx.needs_input_grad[:INPUTS])
        args = (grad, *operands, output, lse, ctx.recipe, needs, *masks)
        again = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        made = iter(apply(AttendGrad, *args) if again else AttendGrad.forward(*args))
        return (*(next(made) if need else None for need in needs), None, *(None for _ in masks))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:
        operands, _, masks = _apart(ctx.saved_tensors)
        there = [t for t in operands if t is not None]
        moving = {
            at: t
            for at, t in enumerate(d for d, o in zip(tangents, operands, strict=False) if o is not None)
            if t is not None
        }
        program = pushforward(_formula(ctx.recipe, operands), tuple(moving))
        return program((*there, *moving.values()), masks)[0], None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        # sinks and scale are one for a whole problem; with dropout every copy drops the same weights.
        if in_dims[4] is not None or in_dims[5] is not None or args[INPUTS].problem.dropout is not None:
            return one_by_one(Attend.apply, in_dims, info.batch_size, args)
        operands, recipe, masks = args[:INPUTS], args[INPUTS], args[INPUTS + 1 :]
        stacked, made, tensors = stack(
            recipe, operands, in_dims, masks, in_dims[INPUTS + 1 :], info.batch_size
        )
        results = Attend.apply(*stacked, made, *tensors)
        count, batch = info.batch_size, recipe.problem.batch
        return tuple(t.reshape(count, batch, *t.shape[1:]) for t in results), (0, 0)


class AttendGrad(torch.autograd.Function):
    """The gradients of `Attend` for the inputs that `needs` names, in their order, shapes and dtypes."""

    @staticmethod
    def forward(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        scale: Tensor | None,
        output: Tensor,
        lse: Tensor,
        recipe: Recipe,
        needs: Needs,
        *masks: Tensor,
    ) -> tuple[Tensor, ...]:
        problem = recipe.over(query, key, bias, sinks, scale, masks)
        with torch.no_grad():
            made = gradients(problem, recipe.backend, value, scale, output, lse, grad, needs)
        return tuple(t for t in made if t is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.recipe, ctx.needs = inputs[9], inputs[10]
        ctx.save_for_backward(*inputs[:7], *inputs[11:])
        ctx.save_for_forward(*inputs[:7], *inputs[11:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first, masks = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
        program, places = first_gradients(ctx.recipe, first, ctx.needs)
        wanted = [at for at in range(7) if ctx.needs_input_grad[at]]
        operands = [first[at] for at in places]
        made = pullback(program, [places.index(at) for at in wanted])((*operands, *grads), masks)
        result: list[Tensor | None] = [None] * (11 + len(masks))
        for at, gradient in zip(wanted, made, strict=True):
            result[at] = gradient
        return tuple(result)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        first, masks = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
        program, places = first_gradients(ctx.recipe, first, ctx.needs)
        # The tangents of output and lse say nothing new: they are functions of the other inputs.
        moving = [(at, t) for at, t in enumerate(tangents[:7]) if t is not None]
        made = pushforward(program, [places.index(at) for at, _ in moving])
        return made([*(first[at] for at in places), *(t for _, t in moving)], masks)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        copies, recipe, needs, masks = info.batch_size, args[9], args[10], args[11:]
        # sinks and scale are one for a whole problem, and so are their gradients.
        one = needs[4] or needs[5] or recipe.problem.dropout is not None
        if one or in_dims[5] is not None or in_dims[6] is not None:
            return one_by_one(AttendGrad.apply, in_dims, copies, args)
        operands = args[1:7]
        stacked, made, tensors = stack(
            recipe, operands, in_dims[1:], masks, in_dims[11:], copies, expand=True
        )
        flat = [
            (t.unsqueeze(0) if d is None else t.movedim(d, 0)).expand(copies, *_less(t, d)).flatten(0, 1)
            for t, d in ((args[at], in_dims[at]) for at in (0, 7, 8))
        ]
        results = AttendGrad.apply(flat[0], *stacked, *flat[1:], made, needs, *tensors)
        shapes = [_less(t, d) for t, d, need in zip(operands, in_dims[1:7], needs, strict=True) if need]
        shaped = tuple(t.reshape(copies, *shape) for t, shape in zip(results, shapes, strict=True))
        return shaped, (0,) * len(shaped)


def _apart(saved: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    output, lse = saved[INPUTS : INPUTS + 2]
    return tuple(saved[:INPUTS]), (output, lse), tuple(saved[INPUTS + 2 :])


def _less(tensor: Tensor, dim: int | None) -> list[int]:
    """The shape without axis `dim`."""
    shape = list(tensor.shape)
    if dim is not None:
        del shape[dim]
    return shape


def _formula(recipe: Recipe, operands: Sequence[Any]) -> Program:
    _, _, value, bias, sinks, scale = operands
    return formula(recipe, value, bias, sinks is not None, scale is not None)


def first_gradients(recipe: Recipe, first: Sequence[Any], needs: Needs) -> tuple[Program, list[int]]:
    """The first gradients as a program, and which of (grad, *operands) it takes, in its order."""
    there = [at for at in range(1, 7) if first[at] is not None]
    wrt = [at for at, place in enumerate(there) if needs[place - 1]]
    return pullback(_formula(recipe, first[1:]), wrt), [*there, 0]


def gradients(
    problem: Problem,
    backend: Backend,
    value: Tensor,
    scale: Tensor | None,
    output: Tensor,
    lse: Tensor,
    grad: Tensor,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """Gradients for query, key, value, bias, sinks and scale in their shapes and dtypes; None where not needed.

    The scale s multiplies q·k, so that Σ q∘dq = s·Σ dS∘(QKᵀ) = s·ds: its gradient is Σ q∘dq / s, O(n). Where
    s is 0, or dq too small to be divided by it, it is taken from the plain formula block by block.
    """
    tiny = abs(problem.scale) < TINY
    asked = (needs[0] or (needs[5] and not tiny), needs[1], needs[2], needs[3], needs[4])
    sums = backend.backward(problem, value, output, lse, grad, asked)
    slope = None
    if needs[5] and scale is not None:
        slope = _slope(problem, backend, value, scale, grad) if tiny else slope_of(problem, sums, scale)
    query, key, *others = shaped(problem, sums, needs[0])
    return query, key, _unbroadcast(problem, sums.value, value), *others, slope


def slope_of(problem: Problem, sums: portable.Gradients, scale: Tensor) -> Tensor | None:
    """The gradient of the scale s from that of the query: Σ q∘dq / s."""
    if sums.query is None:
        return None
    change = sums.query.to(torch.float64)
    product = problem.flat_query().to(torch.float64) * change
    # A query nobody asked about may hold NaN; where dq is 0 it says nothing.
    return (torch.where(change != 0, product, 0.0).sum() / problem.scale).to(scale.dtype)


def shaped(
    problem: Problem, sums: portable.Gradients, query: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query (if it was asked for), key, bias and sinks in their shapes and dtypes."""
    bias, sinks = problem.bias, problem.sinks
    return (
        _unbroadcast(problem, sums.query, problem.query) if query else None,
        _unbroadcast(problem, sums.key, problem.key),
        None if sums.bias is None or bias is None else sums.bias.to(bias.dtype),
        None if sums.sinks is None or sinks is None else sums.sinks.to(sinks.dtype),
    )


def _slope(problem: Problem, backend: Backend, value: Tensor, scale: Tensor, grad: Tensor) -> Tensor:
    operands = (problem.query, problem.key, value, problem.bias, problem.sinks, scale)
    there = [t for t in operands if t is not None]
    program = _formula(Recipe(replace(problem, scale_tensor=scale), backend), operands)
    return evaluate(pullback(program, [len(there) - 1]), [*there, grad])[0]


def stack(
    recipe: Recipe,
    operands: Sequence[Any],
    dims: Sequence[int | None],
    masks: Sequence[Tensor],
    mask_dims: Sequence[int | None],
    copies: int,
    expand: bool = False,
) -> tuple[list[Any], Recipe, tuple[Tensor, ...]]:
    """The problem with `copies` of itself as one more batch axis in front, for vmap: operands, recipe, mask tensors.

    Operands that are the same for all copies stay one, of stride 0; with `expand` they have the axis too, so
    that each copy gets its own gradient. Neither sinks nor scale may be batched.
    """
    problem = recipe.problem
    rank = len(problem.lead) + 3
    stacked: list[Any] = []
    for tensor, dim in zip(operands[:4], dims[:4], strict=True):
        if tensor is None:
            stacked.append(None)
            continue
        front = in_front(tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0), rank)
        stacked.append(front.expand(copies, *front.shape[1:]) if expand else front)
    mask, tensors = problem.mask, tuple(masks)
    if mask is not None and recipe.carried:
        tensors, wrap = spread(encode(mask, lambda fn: 0), masks, mask_dims, copies, problem)
        mask = replace_tensors(mask, tensors, wrap)
    score, batch = problem.score, max(1, problem.batch)
    if score is not None:  # it goes on seeing the batch index it was written for
        score = functions.Score(for_copies(score.fn, batch, score=True))
    wider = replace(problem, lead=(copies, *problem.lead), has_heads=True, mask=mask, score=score)
    return [*stacked, *operands[4:]], replace(recipe, problem=wider), tensors


def _unbroadcast(problem: Problem, total: Tensor | None, like: Tensor) -> Tensor | None:
    """`total` `[batch, heads, ...]` summed over the axes that `like` broadcasts, in its shape and dtype."""
    if total is None:
        return None
    total = total.reshape(*problem.lead, *total.shape[1:])
    extra = total.dim() - like.dim()
    if extra > 0:
        total = total.sum(tuple(range(extra)))
    return total.sum_to_size(like.shape).to(like.dtype)
