"""The seam between the operator and the kernels: which backends exist, and which one a problem gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from . import observe, portable
from .errors import OptionError
from .problem import Problem

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

    name: str

    def refuses(self, problem: Problem) -> str | None:
        """Why this backend cannot run the problem, or None."""

    def plan(self, problem: Problem) -> Plan:
        """Which kernel would run."""

    def forward(self, problem: Problem, value: Tensor) -> tuple[Tensor, Tensor]:
        """`(A @ value, lse)`, the lse in float64 (contract 13 rounds it when it is shown)."""

    def backward(
        self, problem: Problem, value: Tensor, output: Tensor, lse: Tensor, grad: Tensor, needs: Needs
    ) -> portable.Gradients:
        """Gradients of `forward`'s output, given what it returned; `needs` as in `portable.backward`."""

    def lse(self, problem: Problem) -> Tensor:
        """The log-sum-exp alone, `[batch, heads, queries]`."""

    def fold(self, problem: Problem, lse: Tensor, statistics: Sequence[observe.Statistic]) -> None:
        """Update every statistic with every tile of A."""


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
        self, problem: Problem, value: Tensor, output: Tensor, lse: Tensor, grad: Tensor, needs: Needs
    ) -> portable.Gradients:
        return portable.backward(problem, problem.flat(value), output, lse, grad, needs)

    def lse(self, problem: Problem) -> Tensor:
        return portable.lse(problem)

    def fold(self, problem: Problem, lse: Tensor, statistics: Sequence[observe.Statistic]) -> None:
        observe.fold(problem, lse, statistics)


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
