"""The readings that the `observe` kernel folds into a forward pass: their memory, and what they come to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..problem import Problem
from . import launch
from .block import Block, rows_of
from .sizes import watch_scratch
from .target import Target

GROUPS = (
    16  # tasks a plane, at most: each sums its own columns, so that the order of the sum is not the threads'
)
SUMS = 1 << 22  # bytes of such sums of a plane
STRIP = 1 << 23  # bytes of weights a thread keeps until their rows are finished
SUM, LARGEST = 1, 2

Steps = list[tuple[int, int]]


class Watch:
    """What is to be read of one problem, and, when the kernel has run, the readings.

    `k`: how many of the largest scores of each row; `received`: column sums; `pool`: `(rows, cols, SUM | LARGEST)`, a
    picture; `last`: only of the last so many queries (None = all); `entropy`, `distance`: of each row.
    """

    def __init__(
        self,
        problem: Problem,
        k: int = 0,
        received: bool = False,
        pool: tuple[int, int, int] | None = None,
        last: int | None = None,
        entropy: bool = False,
        distance: bool = False,
    ) -> None:
        self.problem, self.k, self.columns = problem, k, received or pool is not None
        self.entropy, self.distance = entropy, distance
        self.first = 0 if last is None else max(0, problem.queries - last)
        self.pool = (1, 1, 0) if pool is None else pool
        self.shape = (problem.batch, problem.heads, problem.queries)
        self.count, dtype = problem.batch * problem.heads, problem.accumulate_dtype
        self.stats = torch.zeros(*self.shape, 4, dtype=torch.float64)
        self.stats[..., 0], self.stats[..., 1] = -math.inf, math.inf
        lanes = launch.target(dtype).lanes
        self.room = -(-k // lanes) * lanes  # what falls out of the k best lies behind them
        self.best = torch.full((*self.shape, self.room), -math.inf, dtype=dtype)
        whole = torch.int32 if dtype is torch.float32 else torch.int64
        self.keys = torch.full((*self.shape, self.room), -1, dtype=whole)
        self.received, self.step, self.groups = received, 0, 1
        self.sums = torch.zeros(self.count, 1, problem.keys if received else 0, dtype=dtype)
        self.lines = torch.zeros(0)
        self.stretches: Steps = []  # of queries, each summed by one thread

    def begin(
        self, block: Block, target: Target, blocks: int, scratch: int, steps: Steps
    ) -> tuple[int, Steps]:
        """Memory for a call over `steps` of queries whose keys make `blocks` blocks.

        Returns what it adds to the scratch of `scratch` bytes a thread, and the steps that are to be run.
        """
        line = blocks * target.block_k
        self.step = target.block_q
        if self.columns:
            fit = STRIP // max(1, line * target.size)
            self.step = min(target.block_q, max(target.mr, fit // target.mr * target.mr))
        steps = [(max(start, self.first), stop) for start, stop in steps if stop > self.first]
        most = max((self._blocks(start, stop) for start, stop in steps), default=0)
        self.groups = max(1, min(GROUPS, most // 2, SUMS // max(1, line * target.size)))
        rows, cols, kind = self.pool
        stretches = 2 * self.groups * len(steps)
        self.sums = torch.zeros(self.count, self.groups, line if self.received else 0, dtype=self.best.dtype)
        self.lines = torch.zeros(
            self.count, rows + stretches if kind else 0, cols if kind else 0, dtype=torch.float64
        )
        block.fill(
            {
                "STEP": self.step,
                "WATCH_AT": scratch,
                "TOP_COUNT": self.k,
                "MOMENTS": int(self.entropy),
                "REACHES": int(self.distance),
                "COLUMNS": int(self.columns),
                "RECEIVED": self.sums.data_ptr() if self.received else 0,
                "POOL": self.lines.data_ptr(),
                "POOL_KIND": kind,
                "POOL_ROWS": rows,
                "POOL_COLS": cols,
                "POOL_LINES": self.lines.shape[1],
                "ALL_QUERIES": self.problem.queries,
            }
        )
        return watch_scratch(target, blocks if self.columns else 0, self.step, self.k > 0), steps

    def _blocks(self, start: int, stop: int) -> int:
        return -(-(stop - start) // self.step)

    def point(self, block: Block, start: int, stop: int) -> int:
        """Aim at queries start … stop; returns how many tasks a plane has."""
        queries, k, size, blocks = (
            self.problem.queries,
            self.room,
            self.best.element_size(),
            self._blocks(start, stop),
        )
        # A query's own position is counted from the right end when there are fewer queries than keys.
        block["ROW_OFFSET"] = start + max(0, self.problem.keys - queries)
        block["POOL_SHIFT"] = len(self.stretches)
        block.table("STATS_TABLE", rows_of(self.stats, self.count, queries * 32, start * 32))
        block.table("TOP_SCORES_TABLE", rows_of(self.best, self.count, queries * k * size, start * k * size))
        block.table("TOP_KEYS_TABLE", rows_of(self.keys, self.count, queries * k * size, start * k * size))
        each = -(-blocks // (2 * self.groups))
        for stretch in reversed(range(2 * self.groups)):  # as the kernel counts them, from the first query
            last = start + max(0, blocks - stretch * each) * self.step
            first = start + max(0, blocks - (stretch + 1) * each) * self.step
            self.stretches.append((first, min(stop, last)))
        return self.groups if self.columns else blocks

    def picture(self) -> Tensor:
        """The lines of the stretches put together: sums, or largest weights, `[batch, heads, rows, cols]`."""
        rows, cols, kind = self.pool
        made = torch.zeros(self.count, rows, cols, dtype=torch.float64)
        # The n-th stretch has the lines from its first pixel row + n on, and shares a row with its neighbours only.
        for n, (begin, end) in enumerate(self.stretches):
            if end <= begin:
                continue
            first, last = begin * rows // self.problem.queries, (end - 1) * rows // self.problem.queries
            own = self.lines[:, first + n : last + n + 1]
            there = made[:, first : last + 1]
            there.copy_(torch.maximum(there, own)) if kind == LARGEST else there.add_(own)
        return made.reshape(*self.shape[:2], rows, cols)

    def column_sums(self) -> Tensor:
        """Σ_i a_ij, `[batch, heads, keys]`."""
        keys = self.problem.keys
        return self.sums.sum(1)[:, :keys].reshape(*self.shape[:2], keys)
