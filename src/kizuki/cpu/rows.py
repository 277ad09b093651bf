"""Rows of A from the kernels: the scores they write down, and the normaliser that makes weights of them.

The same scores and the same normaliser as in every reading, so that `A[i]` holds the very numbers that `topk` names.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .. import portable
from ..mask import functions_of
from ..problem import Problem
from . import equip, launch
from .block import rows_of
from .call import FEW_ROWS, chunks, decodes, describe, mixing_target, pack, point, scratch, share_keys
from .sizes import forward_scratch, watch_scratch


def weights(problem: Problem, b: int, h: int, i: Tensor, first: int, stop: int) -> Tensor:
    """The weights of queries `i` (ascending) of one head on keys first … stop, `[len(i), stop − first]`."""
    if problem.score is not None or functions_of(problem.mask) or not problem.keys:
        # A compiled function is told the number of its plane, which is not that of a plane alone.
        return portable.row_weights(problem, b, h, i)[:, first:stop]
    result = torch.empty(i.numel(), stop - first, dtype=problem.accumulate_dtype)
    at = 0
    for low, count in _runs(i.tolist()):
        own = i[at : at + count]
        made = _stretch(problem, b * problem.heads + h, low, int(own[-1]) + 1, first, stop)
        result[at : at + count] = made if len(made) == count else made[own - low]
        at += count
    odd = result.isnan().any(-1)
    if bool(odd.any()):  # which keys such a row sees its scores do not say
        result[odd] = portable.row_weights(problem, b, h, i[odd])[:, first:stop]
    return result


def dense(problem: Problem) -> Tensor:
    """All of A, `[batch, heads, queries, keys]`."""
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    made = _scores(problem, None, 0, problem.queries, 0, problem.keys).reshape(shape)
    odd = made.isnan().any(-1)
    if bool(odd.any()):
        for b, h in odd.any(-1).nonzero().tolist():
            own = odd[b, h].nonzero().squeeze(-1)
            made[b, h, own] = portable.row_weights(problem, b, h, own)
    return made


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """Ascending row numbers as stretches worth computing whole: the first, and how many of them are in it."""
    runs: list[tuple[int, int]] = []
    last = -1
    for row in rows:
        if runs and row - last <= FEW_ROWS:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((row, 1))
        last = row
    return runs


def _stretch(problem: Problem, plane: int, low: int, high: int, first: int, stop: int) -> Tensor:
    return _scores(problem, plane, low, high, first, stop)[0]


def _scores(problem: Problem, plane: int | None, low: int, high: int, first: int, stop: int) -> Tensor:
    """Weights of queries low … high on keys first … stop, of one plane or of all, `[planes, rows, keys]`."""
    dtype, threads = problem.accumulate_dtype, launch.threads()
    nothing = problem.key.new_zeros(problem.keys, 0)
    target = mixing_target(problem, nothing)
    block, sizes = describe(problem, nothing, target)
    planes, rows, width = problem.batch * problem.heads, high - low, stop - first
    if plane is not None:
        planes, sizes = 1, replace(sizes, key_planes=1, value_planes=1)
        block.only_operands(plane, target.size)
    made = torch.full((planes, rows, width), -math.inf, dtype=dtype)
    stats = torch.empty(planes, rows, 4, dtype=torch.float64)
    block.alive["rows"] = (made, stats)
    block.fill({"SCORES_ROW": width * target.size, "SCORES_FROM": first, "SCORES_TO": stop})
    block.table("OUTPUT_TABLE", [made.data_ptr()] * planes)  # of values that are 0 wide: nothing is written
    few = rows <= FEW_ROWS and decodes(problem, nothing)
    steps = [(low, high)]
    if few:
        block["GROUP"] = 1
        tasks = share_keys(block, target, sizes, (problem.head_dim, 0), planes, rows)
    else:
        steps = [(max(a, low), min(z, high)) for a, z in chunks(problem) if a < high and z > low]
        pack(block, target, sizes, problem.head_dim, threads)
        plain = forward_scratch(target, problem.head_dim, 0)
        block.fill({"STEP": target.block_q, "WATCH_AT": plain})
        scratch(block, threads, plain + watch_scratch(target, 0, target.block_q))
    for start, end in steps:
        point(block, problem, start, end)
        if plane is not None:
            block.only_rows(plane)
        line = width * target.size
        block.table("SCORES_TABLE", rows_of(made, planes, rows * line, (start - low) * line))
        block.table("STATS_TABLE", rows_of(stats, planes, rows * 32, (start - low) * 32))
        if few:
            block.run("decode", target, tasks, threads)
            continue
        lots = -(-(end - start) // target.block_q)
        block["GROUPS"] = lots
        block.run("observe", target, planes * lots, threads)
    block.release()
    equip.check(block)
    # An empty row has no largest score, and its weights are 0 whatever is subtracted.
    top = stats[..., :1].masked_fill(stats[..., :1] == -math.inf, 0.0)
    return (made - top.to(dtype)).exp_().mul_((1.0 / stats[..., 1:2]).to(dtype))
