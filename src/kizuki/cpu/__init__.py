"""The cpu backend: kernels written in Python, compiled by Numba/LLVM for the processor at hand.

target.py   which processor, which tile shapes    sizes.py     memory a kernel works in, how operands lie
layout.py   the argument block's slots            block.py     the argument block of a call
call.py     from a Problem to an argument block   equip.py     its rarer slots: functions, dropout
launch.py   threads                               cache.py     object code on disk      warmup.py  all of it now
watch.py     readings in the forward pass           readings.py  and to the statistics that asked
rows.py      rows of A for indexing
gradients.py results to who asked                   paged.py     keys and values in pages
custom.py   functions of the user's, compiled     torchlike.py their words
kernels/    what Numba compiles, imported only where the cache has no object code yet
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import backends, functions, memory, portable
from ..problem import Problem
from ..statistics import Statistic


@memory.tells
class Cpu:
    """Compiled kernels for CPU tensors: float32 and float64; 16-bit floats are widened as they are read."""

    name = "cpu"

    def refuses(self, problem: Problem) -> str | None:
        if problem.query.device.type != "cpu":
            return f"the tensors are on {problem.device}"
        if problem.score is not None:
            why = functions.refusal(problem.score.fn, "score")
            if why is not None:
                return f"score {functions.named(problem.score.fn)} {why}"
        return None

    def plan(self, problem: Problem) -> backends.Plan:
        from . import launch

        t = launch.target(problem.accumulate_dtype)
        wide, kind = (str(d).removeprefix("torch.") for d in (problem.accumulate_dtype, problem.dtype))
        kernel = f"online softmax, {wide}, {t.name} tiles {t.mr}×{t.nr}, blocks {t.block_q}×{t.block_k}"
        given = kind if kind == wide else f"{kind} widened to {wide}"
        if t.dot and problem.dtype is torch.bfloat16:
            given = f"bfloat16 in pairs ({t.dot})"
        return backends.Plan(self.name, kernel, f"CPU {given}, {launch.threads()} threads, {launch.layer()}")

    def forward(self, problem: Problem, value: Tensor) -> tuple[Tensor, Tensor]:
        from . import call

        return call.forward(_plain(problem), value.resolve_neg(), problem.dtype)

    def backward(
        self,
        problem: Problem,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        grad: Tensor,
        needs: backends.Needs,
        own: portable.Own | None = None,
    ) -> portable.Gradients:
        from . import gradients

        given, back = value.resolve_neg(), grad.resolve_neg()
        return gradients.backward(_plain(problem), given, output, lse, back, needs, own)

    def transposed(self, problem: Problem, lse: Tensor, y: Tensor) -> Tensor:
        from . import gradients

        return gradients.transposed(_plain(problem), lse, y.resolve_neg())

    def lse(self, problem: Problem) -> Tensor:
        return self.forward(problem, problem.key.new_zeros(problem.keys, 0))[1]

    def rows(self, problem: Problem, b: int, h: int, i: Tensor, first: int, stop: int) -> Tensor:
        from . import rows

        return rows.weights(_plain(problem), b, h, i, first, stop)

    def dense(self, problem: Problem) -> Tensor:
        from . import rows

        return rows.dense(_plain(problem))

    def observe(
        self,
        problem: Problem,
        value: Tensor | None,
        statistics: Sequence[Statistic],
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        from . import readings

        given = problem.key.new_zeros(problem.keys, 0) if value is None else value.resolve_neg()
        return readings.observe(_plain(problem), given, problem.dtype, statistics)


def _plain(problem: Problem) -> Problem:
    """The problem with operands whose memory can be read as it lies: no sign bit kept beside it."""
    query, key = problem.query, problem.key
    if not (query.is_neg() or key.is_neg()):
        return problem
    return replace(problem, query=query.resolve_neg(), key=key.resolve_neg())
