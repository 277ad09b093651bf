"""Gradients of `A @ value`: the forward of the chosen backend, the backward tile by tile given the lse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .backends import Backend
from .errors import OptionError
from .problem import Problem


class Attend(torch.autograd.Function):
    """`(output, lse)` of one problem, differentiable in query, key, value, bias and sinks. Memory O(n)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        problem: Problem,
        backend: Backend,
    ) -> tuple[Tensor, Tensor]:
        # The problem's own tensors are the differentiable inputs; inside they are plain data.
        problem = replace(problem, query=query, key=key, bias=bias, sinks=sinks)
        output, lse = backend.forward(problem, value)
        # The mask's tensors are saved so that torch notices when one is written to before backward.
        masks = [] if problem.mask is None else problem.mask.tensors()
        ctx.save_for_backward(query, key, value, output, lse, bias, sinks, *masks)
        ctx.problem = problem
        ctx.backend = backend
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            made = Attend._gradients(ctx, grad)
        if not torch.is_grad_enabled():
            return made
        # create_graph=True: what is returned must not pass for a constant in what is differentiated next.
        inputs = [t for t in (grad, *ctx.saved_tensors) if t is not None]
        return tuple(None if t is None else Refuse.apply(t, *inputs) for t in made)

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, bias, sinks, *_ = ctx.saved_tensors
        problem = replace(ctx.problem, query=query, key=key, bias=bias, sinks=sinks)
        sums = ctx.backend.backward(problem, value, output, lse, grad, ctx.needs_input_grad[:5])
        return (
            _unbroadcast(problem, sums.query, query),
            _unbroadcast(problem, sums.key, key),
            _unbroadcast(problem, sums.value, value),
            None if sums.bias is None else sums.bias.to(bias.dtype),
            None if sums.sinks is None else sums.sinks.to(sinks.dtype),
            None,
            None,
        )


class Refuse(torch.autograd.Function):
    """A gradient that may be read but not differentiated again: a second derivative is an error, never a zero."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, *inputs: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise OptionError(
            "kizuki.attention: a second derivative was asked for, but only first ones are implemented; use the plain "
            "formula on A.dense()-sized problems where create_graph=True is needed"
        )


def _unbroadcast(problem: Problem, total: Tensor | None, like: Tensor) -> Tensor | None:
    """`total` `[batch, heads, ...]` summed over the axes that `like` broadcasts, in its shape and dtype."""
    if total is None:
        return None
    total = total.reshape(*problem.lead, *total.shape[1:])
    extra = total.dim() - like.dim()
    if extra > 0:
        total = total.sum(tuple(range(extra)))
    return total.sum_to_size(like.shape).to(like.dtype)
