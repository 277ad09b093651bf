"""Exact indexing of A: the weights at any rows, columns or entries, each row normalised over all its keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import SizeError

if TYPE_CHECKING:
    from .operator import AttentionMatrix

ROWS = 1 << 20  # weights held at once while rows are computed


def weights(matrix: AttentionMatrix, index: Any, limit: int) -> Tensor:
    """`matrix.dense()[index]` without the dense matrix.

    Where the key axis is read by an int or a slice, whole rows are computed and cut; otherwise the wanted
    entries are gathered from their rows. Every row touched costs one read of the keys it belongs to.
    """
    if (
        isinstance(index, tuple)
        and len(index) == len(matrix.shape) - 1
        and all(type(p) is int for p in index)
    ):
        return _row(matrix, index)
    # To torch an integer tensor without axes is an int.
    parts = tuple(int(p) if _is_scalar(p) else p for p in (index if isinstance(index, tuple) else (index,)))
    split = _split(parts, len(matrix.shape))
    with torch.no_grad():
        if split is None:
            return _entries(matrix, parts, limit)
        return _rows(matrix, *split, limit)


def _row(matrix: AttentionMatrix, index: tuple[int, ...]) -> Tensor:
    """One whole row: what people read most, and short enough for the bookkeeping of the general case to show."""
    flat, shape = 0, matrix.shape
    for at, length in zip(index, shape, strict=False):
        if not -length <= at < length:
            raise IndexError(
                f"A[...]: index {at} is out of range for an axis of {length} (A is {list(shape)})"
            )
        flat = flat * length + at % length
    problem = matrix.problem
    with torch.no_grad():
        return matrix.backend.row(problem, *divmod(flat, problem.queries))


def _is_scalar(part: Any) -> bool:
    whole = isinstance(part, Tensor) and not part.dtype.is_floating_point and not part.dtype.is_complex
    return whole and part.dim() == 0 and part.dtype not in (torch.bool, torch.uint8)


def _split(parts: tuple[Any, ...], rank: int) -> tuple[tuple[Any, ...], int | slice] | None:
    """`(index of the rows, index of the keys)` when the two are independent, else None.

    They are when the key axis is read by an int or a slice, which torch applies before index tensors.
    """
    consumed = 0
    for part in parts:
        if isinstance(part, bool) or not (part is Ellipsis or isinstance(part, (int, slice, Tensor))):
            return None
        if isinstance(part, Tensor):
            if part.dim() == 0 or part.dtype is torch.uint8:
                return None
            consumed += part.dim() if part.dtype is torch.bool else 1
        elif part is not Ellipsis:
            consumed += 1
    dots = [at for at, part in enumerate(parts) if part is Ellipsis]
    if consumed > rank or len(dots) > 1:
        return None
    if consumed < rank and (not dots or dots[0] == len(parts) - 1):
        return parts, slice(None)
    last = parts[-1]
    return (parts[:-1], last) if isinstance(last, (int, slice)) else None


def _rows(matrix: AttentionMatrix, index: tuple[Any, ...], cut: int | slice, limit: int) -> Tensor:
    problem = matrix.problem
    shape = matrix.shape
    numbers = torch.arange(math.prod(shape[:-1]), device=matrix.device).view(shape[:-1])
    wanted = numbers[index]
    columns = _number(cut, problem.keys) if isinstance(cut, int) else range(problem.keys)[cut]
    if columns.step < 0:
        raise ValueError(
            "A[...]: a slice of the keys has a negative step; use a positive one, and flip the result"
        )
    tail = () if isinstance(cut, int) else (len(columns),)
    _refuse_above(limit, wanted.numel() * len(columns))
    rows, order = wanted.flatten(), None
    if rows.numel() > 1 and not bool((rows[1:] >= rows[:-1]).all()):
        rows, order = torch.sort(rows, stable=True)
    parts = [torch.zeros(0, len(columns), dtype=problem.accumulate_dtype, device=matrix.device)]
    step = max(1, ROWS // max(1, problem.keys))
    for b, h, low, high in _planes(rows, matrix) if len(columns) else ():
        for start in range(low, high, step):
            part = rows[start : min(start + step, high)] % problem.queries
            parts.append(_weights(matrix, b, h, part, columns[0], columns[-1] + 1)[:, :: columns.step])
    result = parts[1] if len(parts) == 2 else torch.cat(parts)
    if not len(columns):
        result = result.new_zeros(rows.numel(), 0)
    if order is not None:
        result = torch.empty_like(result).index_copy_(0, order, result)
    return result.reshape(wanted.shape + tail)


def _number(cut: int, keys: int) -> range:
    """The one key an int means, as a range; raises as torch does."""
    if not -keys <= cut < keys:
        raise IndexError(f"index {cut} is out of bounds for dimension with size {keys}")
    return range(cut % keys, cut % keys + 1)


def _weights(matrix: AttentionMatrix, b: int, h: int, i: Tensor, first: int, stop: int) -> Tensor:
    """Rows `i` (ascending, perhaps repeated) of one head on keys first … stop."""
    distinct, place = torch.unique_consecutive(i, return_inverse=True)
    made = matrix.backend.rows(matrix.problem, b, h, distinct, first, stop)
    return made if len(distinct) == len(i) else made[place]


def _planes(rows: Tensor, matrix: AttentionMatrix) -> list[tuple[int, int, int, int]]:
    """Sorted row numbers as runs of one head: `(batch, head, first, stop)`."""
    problem = matrix.problem
    if not rows.numel():
        return []
    plane = torch.div(rows, problem.queries, rounding_mode="floor")
    known, counts = torch.unique_consecutive(plane, return_counts=True)
    stops = torch.cumsum(counts, 0)
    runs = zip(known.tolist(), (stops - counts).tolist(), stops.tolist(), strict=True)
    return [(p // problem.heads, p % problem.heads, low, high) for p, low, high in runs]


def _entries(matrix: AttentionMatrix, index: tuple[Any, ...], limit: int) -> Tensor:
    problem = matrix.problem
    row_axes = math.prod(matrix.shape[:-1])
    # Stride-0 grids of A's shape: torch's own indexing rules and errors, at no memory.
    numbers = torch.arange(row_axes, device=matrix.device).view(*matrix.shape[:-1], 1).expand(matrix.shape)
    _refuse_above(limit, _count(matrix, index))
    wanted = numbers[index]
    keys = torch.arange(problem.keys, device=matrix.device).expand(matrix.shape)[index]
    result = torch.zeros(wanted.numel(), dtype=problem.accumulate_dtype, device=matrix.device)
    rows, order = torch.sort(wanted.flatten(), stable=True)
    columns = keys.flatten()[order]
    distinct, counts = torch.unique_consecutive(rows, return_counts=True)
    ends = torch.cumsum(counts, 0)
    step = max(1, ROWS // max(1, problem.keys))
    for b, h, low, high in _planes(distinct, matrix):
        for start in range(low, high, step):
            stop = min(start + step, high)
            at = slice(int(ends[start] - counts[start]), int(ends[stop - 1]))
            first, last = int(columns[at].min()), int(columns[at].max())
            i = distinct[start:stop] % problem.queries
            full = _weights(matrix, b, h, i, first, last + 1)
            local = torch.repeat_interleave(
                torch.arange(stop - start, device=rows.device), counts[start:stop]
            )
            result[order[at]] = full[local, columns[at] - first]
    return result.view(wanted.shape)


def _count(matrix: AttentionMatrix, index: tuple[Any, ...]) -> int:
    """How many weights an index asks for, from the shapes alone; a mask counts as the indices of its True."""
    meta: list[Any] = []
    for part in index:
        if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) and part.dim():
            meta += [where.to("meta") for where in part.nonzero(as_tuple=True)]
        else:
            meta.append(part.to("meta") if isinstance(part, Tensor) else part)
    probe = torch.empty((), dtype=torch.bool, device="meta").expand(matrix.shape)
    return math.prod(probe[tuple(meta)].shape)


def _refuse_above(limit: int, count: int) -> None:
    if count > limit:
        raise SizeError(
            f"A[...]: this index asks for {count:,} weights, above {limit:,}; read fewer rows, or "
            "A.dense(limit=...), or a picture with A.pool(rows, cols)"
        )
