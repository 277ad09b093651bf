"""What a figure draws: the weights of one head, cell by cell, or pooled where there are more than fit.

Nothing here grows as queries × keys: a whole head is pooled by `A.pool`, a part of it a few rows at a time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from kizuki import AttentionMatrix
    from kizuki.models import Words

Floats = NDArray[np.float32]
Pool = Literal["mass", "peak"]
Span = tuple[int, int]

HALVES = re.compile("[\ud800-\udfff]")  # of surrogate pairs, which no file can hold: their number is written
BLOCK = 2**22  # weights held at once where a part of a head is pooled


class FigureError(ValueError):
    """A figure cannot be made or written; the message is one line."""


@dataclass(frozen=True, eq=False)
class Axis:
    """One side of the picture: which tokens each cell covers, and what they are called.

    Attributes:
        starts: the first token of each cell, and behind the last cell the end, `[cells + 1]`.
        total: how many queries (or keys) the head has.
        labels: a name for each token of the head, or None where nobody said them.
        names: a name for each cell, where tokens were joined into words.

    Example:
        >>> import torch
        >>> from kizuki import attend
        >>> from kizuki.explorer.figures import figure
        >>> made = figure(attend(torch.zeros(6, 2), torch.zeros(6, 2)), pixels=3)
        >>> rows = made.cells.rows
        >>> rows.starts.tolist(), len(rows), rows.total, rows.exact
        ([0, 2, 4, 6], 3, 6, False)
    """

    starts: NDArray[np.int64]
    total: int
    labels: Sequence[str] | None = None
    names: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def named(self) -> bool:
        """Whether each cell has a name: it is one token whose name is known, or one word."""
        return self.names is not None or (self.exact and self.labels is not None)

    @property
    def exact(self) -> bool:
        """Whether each cell is one token."""
        return int(self.starts[-1] - self.starts[0]) == len(self)

    @property
    def one(self) -> bool:
        """Whether it shows one token alone."""
        return bool(self.starts[-1] == self.starts[0] + 1)

    @property
    def cut(self) -> bool:
        """Whether tokens lie outside the picture."""
        return bool(self.starts[0] > 0 or self.starts[-1] < self.total)

    def span(self, cell: int) -> Span:
        """The tokens of a cell, `(first, end)`."""
        return int(self.starts[cell]), int(self.starts[cell + 1])

    def label(self, cell: int) -> str:
        """The name of a cell's token; of its first and last where it holds several, "" where names are not known."""
        first, end = self.span(cell)
        if self.names is not None:
            name = self.names[cell]
        elif self.labels is not None:
            name = (
                self.labels[first] if end == first + 1 else f"{self.labels[first]} … {self.labels[end - 1]}"
            )
        else:
            return ""
        return HALVES.sub(lambda found: f"U+{ord(found[0]):04X}", name)

    def sizes(self) -> str:
        """How many tokens a cell has: "1", "8", or "7–8"."""
        size = np.diff(self.starts)
        low, high = int(size.min()), int(size.max())
        return f"{low}" if low == high else f"{low}–{high}"


@dataclass(frozen=True, eq=False)
class Cells:
    """The numbers of a figure.

    Attributes:
        values: float32 `[rows, cols]`: weights; pooled, the mean over a cell's queries of their sum over its keys
            ("mass"), or the largest weight in it ("peak").
        rows, cols: the queries and the keys.
        pool: "mass" or "peak"; None where every cell is one weight.
        joined: whether cells are words: "mass" over their tokens.
        shown: how much of the weight of the shown queries lies on the shown keys, their mean; None where nothing
            is cut off.
        about: where it came from.

    Example:
        >>> import torch
        >>> from kizuki import attend
        >>> from kizuki.explorer.figures import figure
        >>> made = figure(attend(torch.zeros(6, 2), torch.zeros(6, 2)), pixels=3)
        >>> made.cells.pool, [round(float(x), 4) for x in made.cells.values[0]]
        ('mass', [0.3333, 0.3333, 0.3333])
    """

    values: Floats
    rows: Axis
    cols: Axis
    pool: Pool | None
    shown: float | None
    about: dict[str, Any] = field(default_factory=dict)
    joined: bool = False


def read(
    matrix: AttentionMatrix,
    head: int,
    batch: int,
    queries: Span | None,
    keys: Span | None,
    most: int,
    pool: Pool,
    labels: Sequence[str] | None,
    about: dict[str, Any],
) -> Cells:
    """The cells of one head, at most `most` a side. `labels` names the keys, and the queries where they are as many."""
    total = int(matrix.shape[-2]), int(matrix.shape[-1])
    row, col = (
        _span(name, span, n)
        for name, span, n in zip(("queries", "keys"), (queries, keys), total, strict=True)
    )
    at = tuple(
        (batch, head)[4 - len(matrix.shape) :]
    )  # a matrix may come without its batch, or without both axes
    for label in labels or ():
        if not isinstance(label, str):
            raise FigureError(f"figure: labels holds {label!r} but must hold a text for each token")
    if labels is not None and len(labels) != total[1]:
        raise FigureError(
            f"figure: there are {len(labels)} labels for {total[1]} keys; give one a token, or none"
        )
    block = -(-max(row[1] - row[0], col[1] - col[0]) // most)
    shape = -(-(row[1] - row[0]) // block), -(-(col[1] - col[0]) // block)
    rows = Axis(_starts(row, shape[0]), total[0], _own(labels, total))
    cols = Axis(_starts(col, shape[1]), total[1], labels)
    cut = rows.cut or cols.cut
    shown = None
    if block > 1 and not cut:
        values = matrix.pool(*shape, pool)[at]
        made: Floats = values.to("cpu").numpy().astype(np.float32)
    else:
        made, sums = _blocks(matrix, at, rows, cols, pool if block > 1 else "mass")
        shown = float(np.mean(sums)) if cols.cut else None
    return Cells(made, rows, cols, pool if block > 1 else None, shown, about)


def join(
    matrix: AttentionMatrix,
    head: int,
    batch: int,
    queries: Span | None,
    keys: Span | None,
    most: int,
    words: Words,
    about: dict[str, Any],
) -> Cells:
    """The cells of one head, each a word's queries and a word's keys; `queries` and `keys` count words."""
    tokens, count = len(words.groups), len(words)
    if tuple(matrix.shape[-2:]) != (tokens, tokens):
        raise FigureError(
            f"figure: words are of {tokens} tokens but A is {matrix.shape[-2]} × {matrix.shape[-1]}; give those of its "
            "text"
        )
    row, col = (_span(name, span, count) for name, span in (("queries", queries), ("keys", keys)))
    wide = max(row[1] - row[0], col[1] - col[0])
    if wide > most:
        raise FigureError(
            f"figure: {wide} words are more than pixels={most}; show some with queries= and keys=, or tokens, "
            "which are pooled"
        )
    starts = np.asarray([*words.starts, tokens], np.int64)
    rows, cols = (
        Axis(starts[first : end + 1], tokens, names=words.labels[first:end]) for first, end in (row, col)
    )

    def numbered(first: int, end: int) -> Tensor:
        return (words.groups - first).masked_fill((words.groups < first) | (words.groups >= end), -1)

    at = (batch, head)[4 - len(matrix.shape) :]
    values = matrix.mass(numbered(*col), rows=numbered(*row))[at].to("cpu").numpy().astype(np.float32)
    sums = values.astype(np.float64).sum(1)
    shown = float(np.average(sums, weights=np.diff(rows.starts))) if cols.cut else None
    return Cells(values, rows, cols, "mass", shown, about, joined=True)


def _own(labels: Sequence[str] | None, total: tuple[int, int]) -> Sequence[str] | None:
    """The queries' names: they are the last of the keys' (behind a cache there are fewer)."""
    return None if labels is None or total[0] > total[1] else labels[total[1] - total[0] :]


def _span(name: str, span: Span | None, total: int) -> Span:
    if span is None:
        span = 0, total
    try:
        first, end = (int(each) for each in span)
    except (TypeError, ValueError):
        raise FigureError(
            f"figure: {name} is {span!r} but must be (first, end), end exclusive, or None for all"
        ) from None
    if not 0 <= first < end <= total:
        raise FigureError(
            f"figure: {name} is ({first}, {end}) but must lie inside (0, {total}), first before end"
        )
    return first, end


def _starts(span: Span, cells: int) -> NDArray[np.int64]:
    """Where each cell begins: token i of n lies in cell ⌊i · cells / n⌋, as in `A.pool`."""
    n = span[1] - span[0]
    return np.asarray([span[0] - (-cell * n // cells) for cell in range(cells + 1)], np.int64)


def _blocks(
    matrix: AttentionMatrix, at: tuple[int, ...], rows: Axis, cols: Axis, pool: Pool
) -> tuple[Floats, NDArray[np.float64]]:
    """The cells of a part of a head, and how much of each query's weight lies in it, a few queries at a time."""
    made = np.zeros((len(rows), len(cols)), np.float32)
    sums: list[NDArray[np.float64]] = []
    width = int(cols.starts[-1] - cols.starts[0])
    edges = cols.starts[:-1] - cols.starts[0]
    most = max(1, BLOCK // width)
    for row in range(len(rows)):
        first, end = rows.span(row)
        for start in range(first, end, most):
            stop = min(start + most, end)
            found = matrix[(*at, slice(start, stop), slice(int(cols.starts[0]), int(cols.starts[-1])))]
            weights = found.to("cpu").numpy().astype(np.float64)  # [queries, keys]
            sums.append(weights.sum(1))
            if pool == "mass":
                made[row] += (np.add.reduceat(weights, edges, 1).sum(0) / (end - first)).astype(np.float32)
            else:
                made[row] = np.maximum(made[row], np.maximum.reduceat(weights, edges, 1).max(0))
    return made, np.concatenate(sums)
