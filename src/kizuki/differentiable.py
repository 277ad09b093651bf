"""Derivatives of attention of any order, in blocks of queries: the plain formula in torch, never queries × keys of it.

A `Program` is a function of one block of queries, and says for each operand and result which axis runs along
queries or keys. Its derivatives are programs again (`pullback`, `pushforward`), so that second and third
derivatives, forward mode and vmap are one loop: run the block, add its results where they belong.

The kernels compute what training needs, the output and the first gradients; this computes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import functions, portable
from .backends import Backend
from .dropout import dropped
from .errors import OptionError
from .problem import Problem, in_dtype, read_scale
from .rules import replace_tensors

BLOCK = 1 << 20  # scores of a block over batch and heads; a second derivative holds about ten times as many
Run = Callable[..., tuple[Tensor, ...]]  # (block, *its part of each operand) -> its part of each result


def apply(function: Any, *args: Any) -> Any:
    """`function.apply(*args)`; outside transforms without its reading of the signature, 0.1 ms a call."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)


@dataclass(frozen=True, eq=False)
class Recipe:
    """A problem whose tensors are given anew at each use, and the backend that runs it.

    `carried`: the tensors of its mask are given too (a transform may have batched them).
    """

    problem: Problem
    backend: Backend
    carried: bool = False

    def over(
        self,
        query: Tensor,
        key: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        scale: Tensor | None,
        masks: Sequence[Tensor],
    ) -> Problem:
        """The problem over these tensors, its mask checked where it could not be before."""
        old = self.problem
        if not self.carried and query is old.query and key is old.key and bias is old.bias:
            return old
        made = replace(old, query=query, key=key, bias=bias, sinks=sinks)
        if not self.carried:
            for known in ("bounds", "residual"):  # they depend on the mask alone
                if known in old.__dict__:
                    made.__dict__[known] = old.__dict__[known]
            return made
        if scale is not None:  # a transform may hide its number until here
            object.__setattr__(made, "scale", read_scale("kizuki.attention", scale, made.dtype))
        if old.mask is not None:
            mask = replace_tensors(old.mask, masks)
            mask.check(made, "kizuki.attention")
            object.__setattr__(made, "mask", mask)
        return made


@dataclass(frozen=True)
class Cut:
    """Which axis of a tensor, counted from the end, runs along queries and which along keys; 0 is none."""

    queries: int = 0
    keys: int = 0

    def view(self, tensor: Tensor, rows: slice, cols: slice) -> Tensor:
        """The part of `tensor` that one block reads or writes."""
        for axis, part in ((self.queries, rows), (self.keys, cols)):
            if axis:
                tensor = tensor.narrow(axis, part.start, part.stop - part.start)
        return tensor

    def full(self, part: Tensor, problem: Problem) -> list[int]:
        """The shape of the whole that `part` is a block of."""
        shape = list(part.shape)
        for axis, length in ((self.queries, problem.queries), (self.keys, problem.keys)):
            if axis:
                shape[axis] = length
        return shape


@dataclass(frozen=True, eq=False)
class Block:
    """One block of queries: which queries and keys, and which of the keys its mask shows (None: all)."""

    rows: slice
    cols: slice
    seen: Tensor | None


@dataclass(frozen=True, eq=False)
class Program:
    """A function of one block of queries: what it takes and gives, and in which dtypes."""

    recipe: Recipe
    run: Run
    takes: tuple[Cut, ...]
    gives: tuple[Cut, ...]
    take_types: tuple[torch.dtype, ...]
    give_types: tuple[torch.dtype, ...]
    copies: int = 1  # of the problem, stacked by vmap

    def __call__(self, operands: Sequence[Tensor], masks: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results over all blocks, differentiable."""
        return apply(Blockwise, self, *operands, *masks)


def formula(recipe: Recipe, value: Tensor, bias: Tensor | None, sinks: bool, scale: bool) -> Program:
    """`A @ value` as a program of query, key, value and those of bias, sinks, scale that are there.

    It gives `[batch, heads, queries, value_dim]`. `value` and `bias` are read for shape and dtype only.
    """
    problem, biased = recipe.problem, bias is not None

    def run(block: Block, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> tuple[Tensor]:
        others = list(rest)
        own = replace(
            problem,
            query=query,
            key=key,
            bias=others.pop(0) if biased else None,
            sinks=others.pop(0) if sinks else None,
        )
        return (_plain(own, block, value, others.pop(0) if scale else problem.scale),)

    kinds = [Cut(queries=-2), Cut(keys=-2), Cut(keys=-2)]
    types = [problem.dtype, problem.dtype, value.dtype]
    if bias is not None:
        along = bias.dim() > 1 and bias.shape[-2] != 1, bias.dim() > 0 and bias.shape[-1] != 1
        kinds.append(Cut(queries=-2 if along[0] else 0, keys=-1 if along[1] else 0))
        types.append(bias.dtype)
    for there, tensor in ((sinks, problem.sinks), (scale, problem.scale_tensor)):
        if there and tensor is not None:
            kinds.append(Cut())
            types.append(tensor.dtype)
    return Program(recipe, run, tuple(kinds), (Cut(queries=-2),), tuple(types), (problem.dtype,))


def _plain(problem: Problem, block: Block, value: Tensor, scale: Tensor | float) -> Tensor:
    """The contract on one block, every operand in the accumulation dtype; differentiable any number of times."""
    query, key, value = problem.flat_query(), problem.flat_key(), problem.flat(value)
    bias, seen, every = None, block.seen, slice(None)
    if problem.bias is not None:
        bias = problem.pairs(problem.bias, every, every)
        there = bias != portable.NEG_INF
        seen = there if seen is None else seen & there
        bias = torch.where(there, bias, 0.0)
    if seen is not None:
        # What nobody sees is taken out before arithmetic, so that 0 · NaN reaches no gradient.
        query = torch.where(seen.any(-1, keepdim=True), query, 0.0)
        key = _used(seen, problem.heads, key)
    scores = portable.grouped(query * scale, key.transpose(-1, -2))
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if problem.score is not None:
        scores = _bent(problem.score, scores, functions.places(problem, block.rows, block.cols))
        there = scores != portable.NEG_INF
        seen = there if seen is None else seen & there
        scores = torch.where(there, scores, 0.0)
    if bias is not None:
        scores = scores + bias
    live = None
    if seen is not None:
        value = _used(seen, problem.heads, value)
        live = seen.expand(*seen.shape[:-1], key.shape[-2]).any(-1, keepdim=True)
        # A row of nothing but −inf has no softmax; it is filled, and its weights taken out again below.
        scores = torch.where(live, torch.where(seen, scores, portable.NEG_INF), 0.0)
    if problem.sinks is not None:
        logits = problem.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, logits], -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[-2]]
    if seen is not None and live is not None:
        weights = torch.where(seen & live, weights, 0.0)
    return portable.grouped(dropped(problem, weights, block.rows, block.cols), value)


def _bent(score: functions.Score, scores: Tensor, at: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """A user's score function by torch's operations, which can be differentiated again; a compiled one cannot."""
    try:
        made = score.fn(scores, *at)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise OptionError(
            f"kizuki.attention: score {functions.named(score.fn)} cannot be differentiated twice or forward: with "
            f"tensors it raised {type(error).__name__}: {error}; write it with torch's functions"
        ) from error
    return in_dtype(score._checked(made, scores, "kizuki.attention"), scores.dtype)


def _used(seen: Tensor, heads: int, tensor: Tensor) -> Tensor:
    """Keys or values `[batch, kv_heads, keys, width]`, 0 where no query of the block sees them."""
    used = seen.any(-2)  # [1|batch, 1|heads, 1|keys]
    if used.shape[1] == heads != tensor.shape[1]:
        used = used.reshape(used.shape[0], tensor.shape[1], -1, used.shape[-1]).any(2)
    return torch.where(used.unsqueeze(-1), tensor, 0.0)


def pullback(program: Program, wrt: Sequence[int]) -> Program:
    """The gradients of the operands `wrt`, as a program of the old operands and one cotangent a result."""
    count = len(program.takes)

    def run(block: Block, *tensors: Tensor) -> tuple[Tensor, ...]:
        partial = _of(program, block, tensors[:count], wrt)
        return torch.func.vjp(partial, *(tensors[at] for at in wrt))[1](tensors[count:])

    return replace(
        program,
        run=run,
        takes=program.takes + program.gives,
        take_types=program.take_types + program.give_types,
        gives=tuple(program.takes[at] for at in wrt),
        give_types=tuple(program.take_types[at] for at in wrt),
    )


def pushforward(program: Program, wrt: Sequence[int]) -> Program:
    """The tangents of the results, as a program of the old operands and one tangent for each of `wrt`.

    The gradient is linear in the cotangent, and its transpose is the tangent: two reverse passes, so that it
    also runs inside somebody else's forward mode, which torch does not nest.
    """
    count = len(program.takes)

    def run(block: Block, *tensors: Tensor) -> tuple[Tensor, ...]:
        partial = _of(program, block, tensors[:count], wrt)
        primals = [tensors[at] for at in wrt]

        def transpose(*cotangents: Tensor) -> tuple[Tensor, ...]:
            return torch.func.vjp(partial, *primals)[1](cotangents)

        zeros = [torch.zeros_like(t) for t in partial(*primals)]
        return torch.func.vjp(transpose, *zeros)[1](tensors[count:])

    return replace(
        program,
        run=run,
        takes=program.takes + tuple(program.takes[at] for at in wrt),
        take_types=program.take_types + tuple(program.take_types[at] for at in wrt),
    )


def _of(program: Program, block: Block, operands: Sequence[Tensor], wrt: Sequence[int]) -> Run:
    def partial(*chosen: Tensor) -> tuple[Tensor, ...]:
        full = list(operands)
        for at, tensor in zip(wrt, chosen, strict=True):
            full[at] = tensor
        return program.run(block, *full)

    return partial


def mapped(program: Program, batched: Sequence[bool], copies: int) -> Program:
    """The program over `copies` of the operands that are `batched`, which hold them in their first axis."""
    dims = tuple(0 if b else None for b in batched)

    def run(block: Block, *tensors: Tensor) -> tuple[Tensor, ...]:
        return torch.vmap(lambda *t: program.run(block, *t), in_dims=dims)(*tensors)

    return replace(program, run=run, copies=program.copies * copies)


class Blockwise(torch.autograd.Function):
    """A program over all its blocks: `(program, *operands, *tensors of the mask)` to its results."""

    @staticmethod
    def forward(program: Program, *tensors: Tensor) -> tuple[Tensor, ...]:
        return evaluate(program, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.program = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        program, tensors = ctx.program, ctx.saved_tensors
        count = len(program.takes)
        wrt = [at for at in range(count) if ctx.needs_input_grad[1 + at]]
        made = pullback(program, wrt)((*tensors[:count], *grads), tensors[count:])
        result: list[Tensor | None] = [None] * (1 + len(tensors))
        for at, gradient in zip(wrt, made, strict=True):
            result[1 + at] = gradient
        return tuple(result)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        program, tensors = ctx.program, ctx.saved_tensors
        count = len(program.takes)
        moving = {at: t for at, t in enumerate(tangents[:count]) if t is not None}
        made = pushforward(program, tuple(moving))
        return made((*tensors[:count], *moving.values()), tensors[count:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], program: Program, *tensors: Tensor) -> Any:
        count, copies = len(program.takes), info.batch_size
        dims = in_dims[1:]
        if any(dim is not None for dim in dims[count:]):
            return one_by_one(lambda *t: program(t[:count], t[count:]), dims, copies, tensors)
        front = [t if d is None else t.movedim(d, 0) for t, d in zip(tensors[:count], dims, strict=False)]
        made = mapped(program, [dim is not None for dim in dims[:count]], copies)
        result = made(front, tensors[count:])
        return result, (0,) * len(result)


def one_by_one(
    function: Callable[..., tuple[Tensor, ...]], dims: Sequence[int | None], copies: int, args: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """A vmap rule for what no kernel takes in one call: `function` on each copy, the results stacked."""
    rows = [
        function(*(a.select(d, at) if isinstance(d, int) else a for a, d in zip(args, dims, strict=True)))
        for at in range(copies)
    ]
    made = tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
    return made, (0,) * len(made)


@torch.no_grad()
def evaluate(program: Program, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The blocks one after the other; each result is summed in the accumulation dtype, then rounded once."""
    count = len(program.takes)
    recipe = program.recipe
    problem = recipe.problem
    if recipe.carried and problem.mask is not None:
        problem = replace(problem, mask=replace_tensors(problem.mask, tensors[count:]))
    wide = [in_dtype(t.detach(), problem.accumulate_dtype) for t in tensors[:count]]
    step = _rows(problem, program.copies)
    if not all(portable.tame(t) for t in wide):
        step = 1  # a NaN or Inf in a block would reach its other rows; alone it reaches what it must
    totals = _blocks(problem, program, wide, step)
    return tuple(total.to(dtype) for total, dtype in zip(totals, program.give_types, strict=True))


@portable.exact
def _blocks(problem: Problem, program: Program, wide: Sequence[Tensor], step: int) -> list[Tensor]:
    totals: list[Tensor] = []
    for start in range(0, max(1, problem.queries), step):
        rows = slice(start, min(start + step, problem.queries))
        cols = _visible(problem, rows)
        if totals and cols.start == cols.stop:
            continue
        seen = problem.visible(rows, cols) if problem.keys else None
        parts = program.run(
            Block(rows, cols, seen),
            *(cut.view(t, rows, cols) for cut, t in zip(program.takes, wide, strict=True)),
        )
        for at, (cut, part) in enumerate(zip(program.gives, parts, strict=True)):
            if len(totals) == at:
                totals.append(part.new_zeros(cut.full(part, problem)))
            view = cut.view(totals[at], rows, cols)
            view += part
    return totals


def _rows(problem: Problem, copies: int) -> int:
    """How many queries a block holds."""
    planes = max(1, problem.batch * problem.heads * problem.keys * copies)
    return max(1, min(max(1, problem.queries), BLOCK // planes))


def _visible(problem: Problem, rows: slice) -> slice:
    """The hull of the keys that some query of `rows` can see."""
    if problem.bounds is None:
        return slice(0, problem.keys)
    low, high = problem.bounds.first[..., rows], problem.bounds.stop[..., rows]
    live = high > low
    if not bool(live.any()):
        return slice(0, 0)
    return slice(int(low[live].min()), int(high.max()))
