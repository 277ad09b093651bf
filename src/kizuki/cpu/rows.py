"""Rows of A from the kernels, which write the scores down as they pass and make weights of them when a row ends.

The same scores and the same normaliser as in every reading, so that `A[i]` holds the very numbers that `topk` names.
"""

from __future__ import annotations

import math
import threading
import weakref
from array import array
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import portable
from ..mask import Dense, functions_of, split
from ..problem import Problem
from . import equip, launch
from .block import Block, rows_of
from .call import FEW_ROWS, chunks, decodes, describe, mixing_target, pack, point, scratch, share_keys
from .sizes import forward_scratch, watch_scratch
from .target import Target


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
        scratch(block, threads, plain + watch_scratch(target, 0, target.block_q, False))
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
    return made, stats[..., 1].isnan()


@dataclass(frozen=True)
class _Prepared:
    """An argument block aimed at one row of a problem: any other row is a few additions away."""

    problem: weakref.ref[Problem]  # while it lives, so does the memory that the block's addresses mean
    block: Block
    target: Target
    tasks: int
    threads: int
    planes: list[list[int]]  # for each entry of `entries`, what it holds for query 0 of each plane
    entries: list[array[int]]  # tables of one entry
    steps: list[int]  # bytes from query to query
    stats: array[float]
    scores: array[int]
    finished: array[int]
    sinks: int  # the address of the first sink, 0 = none


_last = threading.local()  # the problem that a thread read a row of last


def row(problem: Problem, plane: int, i: int) -> Tensor:
    """The weights of query `i` of one plane `[batch, heads]`, `[keys]`.

    What people read most, one after another: the block is kept for the next one, and nothing is asked of torch but
    the memory of the result.
    """
    known: _Prepared | None = _last.__dict__.pop("row", None)
    if known is None or known.problem() is not problem or known.threads != launch.threads():
        known = _prepare(problem)
    if known is None:
        return weights(problem, *divmod(plane, problem.heads), torch.tensor([i]), 0, problem.keys)[0]
    block, stats = known.block, known.stats
    fresh = torch.empty if problem.mask is None else _absent
    made = fresh(problem.keys, dtype=problem.accumulate_dtype)
    for entry, starts, step in zip(known.entries, known.planes, known.steps, strict=True):
        entry[0] = starts[plane] + i * step
    known.scores[0], known.finished[0] = made.data_ptr(), 0
    block["FIRST_QUERY"] = i
    if known.sinks:
        block["SINK_TABLE"] = known.sinks + plane * known.target.size
    block.enter("decode", known.target, known.tasks, known.threads)
    _last.row = known
    if stats[1] != stats[1]:  # NaN: which keys such a row sees its scores do not say
        return portable.row_weights(problem, *divmod(plane, problem.heads), torch.tensor([i]))[0]
    return made


def _absent(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count,), -math.inf, dtype=dtype)


ROW_TABLES = {
    "QUERY_TABLE": "QUERY_ROW",
    "FIRST_TABLE": "",
    "STOP_TABLE": "",
    "MASK_TABLE": "MASK_ROW",
    "BIAS_TABLE": "BIAS_ROW",
}


def _prepare(problem: Problem) -> _Prepared | None:
    """The block of a problem; None where its rows need more than addresses: no decoder, a mask or bias to evaluate."""
    nothing = problem.key.new_zeros(problem.keys, 0)
    rest = split(problem.residual)[1]
    plain = (rest is None or isinstance(rest, Dense)) and problem.score is None and problem.keys > 0
    if not plain or functions_of(problem.mask) or not decodes(problem, nothing):
        return None
    bias = problem.bias
    if bias is not None and (
        bias.dtype is not problem.accumulate_dtype or bias.is_neg()
    ):  # a copy would be read
        return None
    target = mixing_target(problem, nothing)
    block, sizes = describe(problem, nothing, target)
    point(block, problem, 0, 1)
    sources = block.entries("KEY_SOURCE")
    found = [[int(sources[at]) for at in block.entries("KEY_TABLE")]]
    names, steps = ["KEY_SOURCE"], [0]
    for name, step in ROW_TABLES.items():
        if block.get(name):
            names.append(name)
            found.append([int(address) for address in block.entries(name)])
            steps.append(block.get(step) if step else 8)
    sinks = block.get("SINK_TABLE")
    block.only_operands(0, target.size)
    block.only_rows(0)
    block["GROUP"] = 1
    stats = array("d", [0.0] * 4)
    block.fill({"SCORES_ROW": problem.keys * target.size, "SCORES_FROM": 0, "SCORES_TO": problem.keys})
    block.table("OUTPUT_TABLE", [0])  # of values that are 0 wide: nothing is written
    block.table("SCORES_TABLE", [0])
    block.table("STATS_TABLE", [stats.buffer_info()[0]])
    tasks = share_keys(block, target, replace(sizes, key_planes=1), (problem.head_dim, 0), 1, 1)
    for kept in ("operands", "mask", "bias"):  # the problem's, which must not be kept alive from here
        block.alive.pop(kept, None)
    return _Prepared(
        weakref.ref(problem),
        block,
        target,
        tasks,
        launch.threads(),
        found,
        [block.single(name) for name in names],
        steps,
        stats,
        block.single("SCORES_TABLE"),
        block.single("FINISHED"),
        sinks,
    )
