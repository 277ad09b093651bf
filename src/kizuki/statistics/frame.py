"""What a statistic is made of and what it promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..portable import Tile
    from ..problem import Problem


@dataclass(frozen=True)
class Frame:
    """The A that is read: `[batch, heads, queries, keys]`, and where and in which dtype readings are kept."""

    batch: int
    heads: int
    queries: int
    keys: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, problem: Problem, dtype: torch.dtype | None = None) -> Frame:
        """The frame of a problem; readings in its accumulation dtype unless another is given."""
        kept = problem.accumulate_dtype if dtype is None else dtype
        return cls(problem.batch, problem.heads, problem.queries, problem.keys, kept, problem.device)

    def full(self, *axes: int, fill: float = 0.0) -> Tensor:
        """`[batch, heads, *axes]` of one number."""
        return torch.full((self.batch, self.heads, *axes), fill, dtype=self.dtype, device=self.device)


class Statistic(Protocol):
    """One reading of A in the making; made of a frame and the reading's own arguments."""

    def __init__(self, frame: Frame, *arguments: Any) -> None: ...

    def update(self, block: Tile, weights: Tensor) -> None:
        """Take in one tile: its scores and its exact weights, `[batch, heads, rows, cols]`."""

    def merge(self, other: Self) -> None:
        """Take in what `other`, of the same frame and arguments, has seen of other tiles of the same A."""

    def finalize(self) -> Tensor | tuple[Tensor, Tensor]:
        """The reading, `[batch, heads, ...]`."""
