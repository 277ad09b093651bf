"""Gradients of `A @ value` from the backward kernel, in the form every backend returns them."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends, portable
from ..problem import Problem, in_dtype
from . import equip, launch
from .block import KINDS, Block, rows_of
from .call import chunks, describe, point, scratch, shared_heads
from .sizes import backward_scratch

KEY_GROUPS = 4  # of key blocks, at most: each has a dQ of its own


def backward(
    problem: Problem,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    grad: Tensor,
    needs: backends.Needs,
    own: portable.Own | None = None,
) -> portable.Gradients:
    """The kernel's gradients; an output gradient with a NaN or an infinity in a live row takes the torch pass.

    The kernel keeps such numbers out of its products, because 0 · NaN would spread to keys a row does not see.
    And where a log-sum-exp is so large that it has lost digits, only the torch pass knows how to find them again.
    """
    dtype = problem.accumulate_dtype
    if problem.batch * problem.heads * problem.queries * problem.keys and not bool(
        portable.far(problem, lse).any()
    ):
        dead = lse == portable.NEG_INF
        if own is None:
            grad = grad.contiguous()
            delta = (grad.to(dtype) * output.to(dtype)).sum(-1)
            sums = _run(problem, value, lse.contiguous(), delta, grad, needs)
        else:
            delta = own.delta
            sums = _run_own(problem, value, lse.masked_fill(dead, 0.0), grad, own, needs)
        if sums is not None:
            if needs[4] and problem.sinks is not None:
                logits = in_dtype(problem.sinks, dtype).view(1, -1, 1)
                share = torch.exp(logits - lse).to(dtype).masked_fill(dead, 0.0)
                sums.sinks = -(share * delta).masked_fill(dead, 0.0).sum((0, 2))
            return sums
    # The weights are computed again in torch, so the lse they are normalised by and the output they must sum to are
    # torch's too; a kernel's differ in the last digits, and dP − rowsum(dO ∘ O) would not cancel.
    output, lse = portable.forward(problem, value)
    return portable.backward(problem, problem.flat(value), output, lse, grad, needs, own)


def _run_own(
    problem: Problem,
    value: Tensor,
    lse: Tensor,
    grad: Tensor,
    own: portable.Own,
    needs: backends.Needs,
) -> portable.Gradients | None:
    """The kernel for what `own` says; None where it has no kernel.

    tilt · ln a = tilt · (scale · q·k − lse) is a product of tilt · scale · q and k, where nothing else makes a score.
    """
    dtype, delta = problem.accumulate_dtype, own.delta
    if own.tilt is not None:
        if problem.bias is not None or problem.softcap is not None or problem.score is not None:
            return None
        value, grad = problem.key, problem.flat_query().to(dtype) * (own.tilt * problem.scale).unsqueeze(-1)
        delta = (delta + own.tilt * lse).to(dtype)
    return _run(problem, value, lse.contiguous(), delta.contiguous(), grad.contiguous(), needs)


def transposed(problem: Problem, lse: Tensor, y: Tensor) -> Tensor:
    """`Aᵀ y`, `[batch, heads, keys, width]`, given y `[batch, heads, queries, width]`: the gradient for V."""
    width = y.shape[-1]
    y = y.expand(problem.batch, problem.heads, problem.queries, width)
    if y.numel() and problem.keys and not bool(portable.far(problem, lse).any()):
        value = y.new_zeros(1).expand(problem.heads, problem.keys, width)  # nothing reads it
        delta = torch.zeros(y.shape[:-1], dtype=problem.accumulate_dtype)
        sums = _run(
            problem, value, lse.contiguous(), delta, y.contiguous(), (False, False, True, False, False)
        )
        if sums is not None and sums.value is not None:
            return sums.value.to(problem.dtype)
    return portable.transposed(problem, portable.lse(problem), y)


def _run(
    problem: Problem, value: Tensor, lse: Tensor, delta: Tensor, grad: Tensor, needs: backends.Needs
) -> portable.Gradients | None:
    """The kernel over all queries; None where `grad` holds a NaN or an infinity in a live row."""
    batch, heads, queries, keys = problem.batch, problem.heads, problem.queries, problem.keys
    count, dtype, threads = batch * heads, problem.accumulate_dtype, launch.threads()
    target = launch.target(dtype)
    block, sizes = describe(problem, value, target)
    group = shared_heads(problem, value)
    units, groups = count // group, max(1, min(KEY_GROUPS, sizes.blocks // 8))
    head_dim, value_dim, nr, block_q = problem.head_dim, value.shape[-1], target.nr, target.block_q
    # A cap or a function of the score bends it, and needs one more grid for its slope.
    bent = problem.softcap is not None or problem.score is not None
    scratch(block, threads, backward_scratch(target, sizes.head_panels, sizes.value_panels, bent))
    odd = torch.zeros(1, dtype=torch.int64)
    block.fill(
        {
            "GROUP": group,
            "KEY_GROUPS": groups,
            "UNITS": units,
            "GRAD_ODD": odd.data_ptr(),
            "GRAD_KIND": KINDS[grad.dtype],
            "GRAD_ROW": value_dim * grad.element_size(),
            "GRAD_COL": grad.element_size(),
        }
    )
    wide = target.size * sizes.blocks * sizes.width
    block.room("KEY_PACKED", wide * sizes.key_planes * head_dim)
    block.room("KEY_COLUMNS", wide * sizes.key_planes * sizes.head_panels * nr)
    block.room("VALUE_KEYS", wide * sizes.value_planes * value_dim)
    bias = None
    if needs[3] and problem.bias is not None:
        bias = _BiasSum(block, problem, problem.bias, groups)
    query: list[Tensor] = []
    by_key: dict[str, Tensor] = {}
    for start, stop in chunks(problem):
        query_blocks = -(-(stop - start) // block_q)
        tall = target.size * count * query_blocks * block_q
        block["QUERY_BLOCKS"] = query_blocks
        block.room("QUERY_ROWS", tall * head_dim)
        block.room("QUERY_COLUMNS", tall * sizes.head_panels * nr)
        block.room("GRAD_ROWS", tall * value_dim)
        block.room("GRAD_COLUMNS", tall * sizes.value_panels * nr)
        made: dict[str, Tensor] = {}
        if needs[0]:
            shape = (count, groups, query_blocks, sizes.head_panels, block_q, nr)
            made["D_QUERY"] = torch.zeros(shape, dtype=dtype)
        for name, wanted, width in (("D_KEY", needs[1], head_dim), ("D_VALUE", needs[2], value_dim)):
            if wanted:
                made[name] = torch.empty(batch, heads // group, keys, width, dtype=dtype)
        block.fill({name: tensor.data_ptr() for name, tensor in made.items()})
        point(block, problem, start, stop)
        if bias is not None:
            bias.point(start)
        size = grad.element_size() * value_dim
        block.table("GRAD_TABLE", rows_of(grad, count, queries * size, start * size))
        block.table("LSE_TABLE", rows_of(lse, count, queries * 8, start * 8))
        block.table("DELTA_TABLE", rows_of(delta, count, queries * target.size, start * target.size))
        tasks = (sizes.key_planes + sizes.value_planes) * sizes.blocks + count * query_blocks
        block.run("prepare", target, tasks, threads)
        if int(odd):
            block.release()
            return None
        block.run("backward", target, groups * (1 if bias is not None and bias.together else units), threads)
        if "D_QUERY" in made:
            panels = made.pop("D_QUERY")
            total = panels.sum(1) if groups > 1 else panels[:, 0]
            flat = total.permute(0, 1, 3, 2, 4).reshape(count, query_blocks * block_q, -1)
            part = flat[:, : stop - start, :head_dim] * problem.scale
            query.append(part.reshape(batch, heads, stop - start, head_dim))
        by_key = {name: part + by_key[name] if name in by_key else part for name, part in made.items()}
    block.release()
    equip.check(block)
    own = value.shape[-3] if value.dim() > 2 else 1
    return portable.Gradients(
        query=torch.cat(query, 2) if query else None,
        key=portable.fold_heads(by_key["D_KEY"], problem.kv_heads) if needs[1] else None,
        value=portable.fold_heads(by_key["D_VALUE"], own) if needs[2] else None,
        bias=None if bias is None else bias.result(),
    )


class _BiasSum:
    """Where the gradient of a bias is summed.

    A bias with both axes of A has one sum, as large as itself; planes that share it are then taken by one task in
    order. A bias that broadcasts the queries or the keys is O(n): every plane and group of keys has a sum of its own.
    """

    def __init__(self, block: Block, problem: Problem, bias: Tensor, groups: int) -> None:
        self.block, self.given = block, bias.shape
        self.shape = (1,) * (len(problem.lead) + 3 - bias.dim()) + tuple(bias.shape)
        rows, cols = self.shape[-2:]
        count, dtype = problem.batch * problem.heads, problem.accumulate_dtype
        full = rows == problem.queries and cols == problem.keys
        if full:
            self.sum = torch.zeros(self.shape, dtype=dtype)
            place = torch.arange(self.sum.numel() // (rows * cols)).reshape(self.shape[:-2])
            planes = place.expand(*problem.lead, problem.heads).reshape(-1).repeat_interleave(groups)
            self.together = place.numel() < count
        else:
            self.sum = torch.zeros(*problem.lead, problem.heads, groups, rows, cols, dtype=dtype)
            planes, self.together = torch.arange(count * groups), False
        self.full = full
        self.row = cols * self.sum.element_size() if rows > 1 else 0
        self.places = self.sum.data_ptr() + planes * (rows * cols * self.sum.element_size())
        block.fill(
            {
                "TOGETHER": int(self.together),
                "D_BIAS_ROW": self.row,
                "D_BIAS_COL": self.sum.element_size() if cols > 1 else 0,
            }
        )

    def point(self, start: int) -> None:
        """Aim at the rows from query `start` on."""
        self.block.table("D_BIAS_TABLE", (self.places + start * self.row).numpy())

    def result(self) -> Tensor:
        """The gradient, in the shape of the bias."""
        total = self.sum if self.full else self.sum.sum(-3)
        return total.sum_to_size(self.shape).reshape(self.given)
