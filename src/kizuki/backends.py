"""The seam between the operator and the kernels: which backends exist, and which one a problem gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from . import memory, portable
from .errors import OptionError
from .problem import Problem
from .statistics import Statistic

Needs = tuple[bool, bool, bool, bool, bool]  # which gradients: query, key, value, bias, sinks


@dataclass(frozen=True)
class Plan:
    """Which kernel runs a problem, and why."""

    backend: str
    kernel: str
    why: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.kernel} ({self.why})"


class Backend(Protocol):
    """What a backend does. A value comes as the user gave it; results are `[batch, heads, length, width]`."""

    @property
    def name(self) -> str:
        """What `backend=` calls it."""

    def refuses(self, problem: Problem) -> str | None:
        """Why this backend cannot run the problem, or None."""

    def plan(self, problem: Problem) -> Plan:
        """Which kernel would run."""

    def forward(self, problem: Problem, value: Tensor) -> tuple[Tensor, Tensor]:
        """`(A @ value, lse)`, the lse in float64 (contract 13 rounds it when it is shown)."""

    def backward(
        self,
        problem: Problem,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        grad: Tensor,
        needs: Needs,
        own: portable.Own | None = None,
    ) -> portable.Gradients:
        """Gradients of `forward`'s output, given what it returned; `needs` and `own` as in `portable.backward`."""

    def transposed(self, problem: Problem, lse: Tensor, y: Tensor) -> Tensor:
        """`Aᵀ y`, `[batch, heads, keys, width]`, given y `[batch, heads, queries, width]`."""

    def lse(self, problem: Problem) -> Tensor:
        """The log-sum-exp alone, `[batch, heads, queries]`."""

    def rows(self, problem: Problem, b: int, h: int, i: Tensor, first: int, stop: int) -> Tensor:
        """The weights of queries `i` (ascending) of one head on keys first … stop, `[len(i), stop − first]`."""

    def dense(self, problem: Problem) -> Tensor:
        """All of A, `[batch, heads, queries, keys]`."""

    def observe(
        self,
        problem: Problem,
        value: Tensor | None,
        statistics: Sequence[Statistic],
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`forward`, to the bit, with every statistic updated; without a value the output is 0 wide.

        `lse`, where it is known already, may spare a backend a pass.
        """


@memory.tells
class Portable:
    """Plain torch, tile by tile; any device and dtype."""

    name = "portable"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def plan(self, problem: Problem) -> Plan:
        kind = str(problem.dtype).removeprefix("torch.")
        return Plan(self.name, f"online softmax over tiles, {kind}", f"plain torch on {problem.device}")

    def forward(self, problem: Problem, value: Tensor) -> tuple[Tensor, Tensor]:
        return portable.forward(problem, value)

    def backward(
        self,
        problem: Problem,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        grad: Tensor,
        needs: Needs,
        own: portable.Own | None = None,
    ) -> portable.Gradients:
        return portable.backward(problem, problem.flat(value), output, lse, grad, needs, own)

    def transposed(self, problem: Problem, lse: Tensor, y: Tensor) -> Tensor:
        return portable.transposed(problem, lse, y)

    def lse(self, problem: Problem) -> Tensor:
        return portable.lse(problem)

    def rows(self, problem: Problem, b: int, h: int, i: Tensor, first: int, stop: int) -> Tensor:
        return portable.row_weights(problem, b, h, i)[:, first:stop]

    def dense(self, problem: Problem) -> Tensor:
        return portable.dense(problem, portable.lse(problem))

    def observe(
        self,
        problem: Problem,
        value: Tensor | None,
        statistics: Sequence[Statistic],
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        output = problem.query.new_zeros(problem.batch, problem.heads, problem.queries, 0)
        if value is not None:
            output, lse = portable.forward(problem, value)
        known = portable.lse(problem) if lse is None else lse
        portable.fold(problem, known, statistics)
        return output, known


class Watching:
    """A backend whose forward pass also updates statistics: what `attention(observe=)` differentiates through."""

    def __init__(self, backend: Backend, statistics: Sequence[Statistic]) -> None:
        self.backend, self.statistics = backend, statistics

    def forward(self, problem: Problem, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.backend.observe(problem, value, self.statistics)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)  # all else is the backend's


def choose(problem: Problem, name: str, caller: str = "kizuki.attend") -> Backend:
    """The backend called `name`, or for "auto" the first that takes the problem: cpu, then portable."""
    if name == "portable":
        return Portable()
    if name not in ("auto", "cpu"):
        raise OptionError(f'{caller}: backend is {name!r} but must be "auto", "cpu" or "portable"')
    from .cpu import Cpu  # numba is loaded when the first problem asks for it, not at import

    cpu = Cpu()
    refusal = cpu.refuses(problem)
    if refusal is None:
        return cpu
    if name == "cpu":
        raise OptionError(f'{caller}: backend="cpu" cannot run this: {refusal}; use backend="auto"')
    return Portable()
