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
    parts, odd = [], []
    at = 0
    for low, count in (runs := _runs(i.tolist())):
        own = i[at : at + count] if len(runs) > 1 else i
        made, spoiled = _scores(problem, b * problem.heads + h, low, int(own[-1]) + 1, first, stop)
        whole = made.shape[1] == count
        parts.append(made[0] if whole else made[0, own - low])
        odd.append(spoiled[0] if whole else spoiled[0, own - low])
        at += count
    result, spoiled = (parts[0], odd[0]) if len(parts) == 1 else (torch.cat(parts), torch.cat(odd))
    if bool(spoiled.any()):  # which keys such a row sees its scores do not say
        result[spoiled] = portable.row_weights(problem, b, h, i[spoiled])[:, first:stop]
    return result


def dense(problem: Problem) -> Tensor:
    """All of A, `[batch, heads, queries, keys]`."""
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    made, odd = _scores(problem, None, 0, problem.queries, 0, problem.keys)
    made, odd = made.reshape(shape), odd.reshape(shape[:-1])
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


def _scores(
    problem: Problem, plane: int | None, low: int, high: int, first: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Weights of queries low … high on keys first … stop, of one plane or of all, `[planes, rows, keys]`.

    And which rows are NaN, `[planes, rows]`: which of their keys are there must be found out otherwise.
    """
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
    top, norm = stats[..., :1], stats[..., 1:2]
    # An empty row has no largest score, and its weights are 0 whatever is subtracted.
    top = top.masked_fill(top == -math.inf, 0.0).to(dtype)
    return made.sub_(top).exp_().mul_(norm.reciprocal().to(dtype)), norm[..., 0].isnan()
