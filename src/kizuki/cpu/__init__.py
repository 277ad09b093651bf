"""The cpu backend: kernels written in Python, compiled by Numba/LLVM for the processor at hand.

target.py   which processor, which tile shapes        simd.py     vector code over the LLVM IR builder
tile.py     the emitted inner bodies                  pack.py     operands into panels
scores.py   masked scores of a block                  layout.py   the argument block's slots
forward.py  the online softmax                        read.py     statistics given the lse
call.py     from a Problem to an argument block       readings.py results to who asked
launch.py   threads                                   cache.py    kernels on disk
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import backends, observe, portable
from ..problem import Problem

WIDENED = (torch.float16, torch.bfloat16)  # computed in float32, which is what they accumulate in anyway


class Cpu:
    """Compiled kernels for CPU tensors: float32, and 16-bit floats widened to it (a copy, O(n))."""

    name = "cpu"

    def refuses(self, problem: Problem) -> str | None:
        if problem.device.type != "cpu":
            return f"the tensors are on {problem.device}"
        if problem.dtype is not torch.float32 and problem.dtype not in WIDENED:
            return f"its kernels are float32 and the query is {str(problem.dtype).removeprefix('torch.')}"
        return None

    def plan(self, problem: Problem) -> backends.Plan:
        from . import launch

        t = launch.target()
        kernel = f"online softmax, float32, {t.name} tiles {t.mr}×{t.nr}, blocks {t.block_q}×{t.block_k}"
        kind = str(problem.dtype).removeprefix("torch.")
        given = kind if problem.dtype is torch.float32 else f"{kind} widened to float32"
        return backends.Plan(self.name, kernel, f"CPU {given}, {launch.threads()} threads, {launch.layer()}")

    def forward(self, problem: Problem, value: Tensor) -> tuple[Tensor, Tensor]:
        from . import call

        output, lse = call.forward(_plain(problem), value.to(torch.float32).resolve_neg())
        return output.to(problem.dtype), lse

    def backward(
        self,
        problem: Problem,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        grad: Tensor,
        needs: backends.Needs,
    ) -> portable.Gradients:
        # The weights are recomputed in torch, so the lse they are normalised by and the output they must sum
        # to are torch's too; a kernel's differ in the last digits, and dP − rowsum(dO ∘ O) would not cancel.
        output, lse = portable.forward(problem, value)
        return portable.backward(problem, problem.flat(value), output, lse, grad, needs)

    def lse(self, problem: Problem) -> Tensor:
        return self.forward(problem, problem.key.new_zeros(problem.keys, 0))[1]

    def fold(self, problem: Problem, lse: Tensor, statistics: Sequence[observe.Statistic]) -> None:
        from . import readings

        readings.fold(_plain(problem), lse, statistics)


def _plain(problem: Problem) -> Problem:
    """The problem with operands whose memory can be read as it lies: float32, and no sign bit kept beside it."""
    query, key = (t.to(torch.float32).resolve_neg() for t in (problem.query, problem.key))
    if query is problem.query and key is problem.key:
        return problem
    return replace(problem, query=query, key=key)
