"""`A.leaks`: weight where there must be none. A mask that is absence gives 0 to the bit, so that 0 is the test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .errors import KizukiTypeError, ShapeError, show
from .statistics import Frame, Future, Outside, Statistic

if TYPE_CHECKING:
    from .operator import AttentionMatrix
    from .problem import Problem
    from .statistics.outside import Forbidden


@dataclass(frozen=True)
class Leaks:
    """The most that any row of each head gives to what it must not read, `[..., heads]`; None where not asked.

    >>> import torch, kizuki
    >>> x = torch.zeros(4, 2)
    >>> print(kizuki.attend(x, x, causal=True).leaks())
    future: none
    >>> print(kizuki.attend(x, x).leaks())
    future: LEAK in 1 of 1 heads, up to 0.75
    """

    future: Tensor | None = None
    documents: Tensor | None = None
    padding: Tensor | None = None

    @property
    def none(self) -> bool:
        """Whether all that was asked for is exactly 0. NaN is no proof."""
        return all(bool((tensor == 0).all()) for tensor in self._asked().values())

    def _asked(self) -> dict[str, Tensor]:
        named = {"future": self.future, "other documents": self.documents, "padding": self.padding}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def __str__(self) -> str:
        said = []
        for name, tensor in self._asked().items():
            wrong = int((tensor != 0).sum())
            said.append(
                f"{name}: none"
                if wrong == 0
                else f"{name}: LEAK in {wrong} of {tensor.numel()} heads, up to {float(tensor.max()):.3g}"
            )
        return "; ".join(said) or "nothing was asked for"


def leaks(matrix: AttentionMatrix, documents: Tensor | None, padding: Tensor | None, future: bool) -> Leaks:
    """One pass over the tiles of A that its mask leaves, in torch, whatever is asked; memory O(queries + keys)."""
    problem = matrix.problem
    if not isinstance(future, bool):
        raise KizukiTypeError(f"A.leaks: future is {future!r} but must be True or False")
    frame, wanted = Frame.of(problem), dict[str, Statistic]()
    if future:
        wanted["future"] = Future(frame)
    if documents is not None:
        wanted["documents"] = Outside(frame, _between(problem, documents))
    if padding is not None:
        wanted["padding"] = Outside(frame, _onto(problem, padding))
    with torch.no_grad():
        matrix.fold(wanted)
        return Leaks(**{name: _most(matrix, statistic) for name, statistic in wanted.items()})


def _most(matrix: AttentionMatrix, statistic: Statistic) -> Tensor:
    """The largest of each head's rows; 0 where there are none."""
    rows = cast(Tensor, statistic.finalize())
    most = rows.amax(-1) if rows.shape[-1] else rows.new_zeros(rows.shape[:-1])
    return most.reshape(matrix.shape[:-2])


def _onto(problem: Problem, padding: Tensor) -> Forbidden:
    keys = problem.keys
    if not isinstance(padding, Tensor) or padding.dtype is not torch.bool:
        kind = padding.dtype if isinstance(padding, Tensor) else type(padding).__name__
        raise KizukiTypeError(
            f"A.leaks: padding is {kind} but must be bool [{keys}], True where a key is padding"
        )
    if tuple(padding.shape) not in ((keys,), (problem.batch, keys)):
        raise ShapeError(
            f"A.leaks: padding has shape {show(padding)} but must be [{keys}] or [{problem.batch}, {keys}]"
        )
    padding = padding.to(problem.device).reshape(-1, 1, 1, keys)
    return lambda rows, cols: padding[..., cols]


def _between(problem: Problem, documents: Tensor) -> Forbidden:
    if (
        not isinstance(documents, Tensor)
        or documents.dtype.is_floating_point
        or documents.dtype is torch.bool
    ):
        kind = documents.dtype if isinstance(documents, Tensor) else type(documents).__name__
        raise KizukiTypeError(
            f"A.leaks: documents is {kind} but must be an integer tensor [{problem.keys}], one document a position"
        )
    if tuple(documents.shape) != (problem.keys,):
        raise ShapeError(f"A.leaks: documents has shape {show(documents)} but must be [{problem.keys}]")
    if problem.queries > problem.keys:
        raise ShapeError(
            f"A.leaks: {problem.queries} queries have no positions among {problem.keys} keys; documents need one each"
        )
    documents = documents.to(problem.device)
    own = documents[problem.keys - problem.queries :].unsqueeze(-1)
    return lambda rows, cols: own[rows] != documents[cols]


__all__ = ["Leaks", "leaks"]
