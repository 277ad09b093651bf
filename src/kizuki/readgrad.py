"""Gradients of readings: of lse, entropy and `A.T @ y`, so that people can train on what a model attends to.

All of them are attention's own backward pass, dS = P ∘ (dP − delta), with other operands:

    lse        dP = 0                       delta = −g
    entropy    dP = −g · ln a               delta = g · (H + share of the sink)
    A.T @ y    dP = y Cᵀ, C the cotangent   delta = rowsum(y ∘ A C), and A C is the gradient of y

`A.mass` is `A @ one-hot`, and differentiable as that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import portable
from .autograd import TINY, shaped, slope_of
from .backends import Backend
from .differentiable import apply
from .errors import OptionError
from .problem import Problem, in_dtype

OPERANDS = 5  # query, key, bias, sinks, scale


@dataclass(frozen=True, eq=False)
class Reading:
    """One reading of one problem: "lse", "entropy" or "transposed"; its lse and what it came to."""

    name: str
    problem: Problem
    backend: Backend
    lse: Tensor
    result: Tensor


def wanted(problem: Problem, y: Tensor | None = None) -> bool:
    """Whether a gradient may be asked for. Under torch.func's transforms readings carry none."""
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return False
    tensors = (problem.query, problem.key, problem.bias, problem.sinks, problem.scale_tensor, y)
    return any(t is not None and t.requires_grad for t in tensors)


def carry(reading: Reading, y: Tensor | None = None) -> Tensor:
    """The result of a reading, with its gradient."""
    problem = reading.problem
    masks = () if problem.mask is None else problem.mask.tensors()
    operands = (problem.query, problem.key, problem.bias, problem.sinks, problem.scale_tensor)
    made: Tensor = apply(Read, reading, *operands, y, *masks)
    return made


class Read(torch.autograd.Function):
    """A reading in the flat shape a backend gives; differentiable once, in reverse."""

    @staticmethod
    def forward(ctx: Any, reading: Reading, *tensors: Tensor | None) -> Tensor:
        ctx.reading = reading
        ctx.save_for_backward(*tensors)  # so that torch notices when one is written to before backward
        return reading.result.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        reading, tensors = ctx.reading, ctx.saved_tensors
        needs, y = ctx.needs_input_grad[1 : 2 + OPERANDS], tensors[OPERANDS]
        scale = reading.problem.scale_tensor
        if needs[4] and abs(reading.problem.scale) < TINY:
            raise OptionError(
                f"A.{reading.name}: the gradient of scale {reading.problem.scale} is not known from that of the query; "
                "give a scale of at least 1e-18"
            )
        with torch.no_grad():
            sums, for_y = _sums(reading, grad, y, needs)
            slope = slope_of(reading.problem, sums, scale) if needs[4] and scale is not None else None
            made = (*shaped(reading.problem, sums, needs[0]), slope, for_y)
        given = tuple(g if need else None for g, need in zip(made, needs, strict=True))
        return (None, *given, *(None for _ in tensors[OPERANDS + 1 :]))


def _sums(
    reading: Reading, grad: Tensor, y: Tensor | None, needs: tuple[bool, ...]
) -> tuple[portable.Gradients, Tensor | None]:
    problem, backend, lse = reading.problem, reading.backend, reading.lse
    asked = (needs[0] or needs[4], needs[1], False, needs[2], needs[3])
    if y is not None:
        value = in_dtype(grad, problem.dtype).reshape(*problem.lead, *grad.shape[1:])
        output = backend.forward(problem, value)[0]
        shape, y = y.shape, y.expand(output.shape)
        if not any(needs[:OPERANDS]):
            return portable.Gradients(), output.sum_to_size(shape)
        sums = backend.backward(problem, value, output, lse, y, asked)
        return sums, output.sum_to_size(shape)
    dtype, dead = problem.accumulate_dtype, lse == portable.NEG_INF
    grad = grad.to(dtype).masked_fill(dead, 0.0)
    nothing = torch.zeros(problem.keys, 1, dtype=problem.dtype, device=problem.device)
    output = torch.zeros(*grad.shape, 1, dtype=problem.dtype, device=problem.device)
    if reading.name == "lse":
        return backend.backward(problem, nothing, output, lse, output, asked, portable.Own(-grad)), None
    share = torch.zeros_like(grad)
    if problem.sinks is not None:
        logits = in_dtype(problem.sinks, lse.dtype).view(1, -1, 1)
        share = torch.exp(logits - lse).masked_fill(dead, 0.0).to(dtype)
    own = portable.Own(grad * (reading.result + share), -grad)
    sums = backend.backward(problem, nothing, output, lse, output, (*asked[:4], False), own)
    if needs[3]:  # of the sink's own weight: −share · Σ_j a_j dA_j
        sums.sinks = -(share * grad * (reading.result + share - 1)).sum((0, 2))
    return sums, None
