"""`A.mass`: how much of each row falls on each group of keys, and the table of segments on segments."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import KizukiTypeError, OptionError, ShapeError, SizeError, show
from .observation import DENSE_LIMIT

if TYPE_CHECKING:
    from .operator import AttentionMatrix

TOGETHER = 64  # groups of keys in one forward pass


def mass(matrix: AttentionMatrix, groups: Tensor, rows: Tensor | None) -> Tensor:
    """A times a one-hot matrix of the groups, then means over the groups of rows."""
    problem = matrix.problem
    count = _check("groups", groups, problem.keys, "key", matrix.device)
    lines = problem.queries if rows is None else _check("rows", rows, problem.queries, "query", matrix.device)
    size = math.prod(matrix.shape[:-2]) * lines * count
    if size > DENSE_LIMIT:
        raise SizeError(
            f"A.mass: {count:,} groups of {lines:,} rows are {size:,} numbers, above {DENSE_LIMIT:,}; number the "
            "groups from 0 without gaps, ask for fewer, or give rows="
        )
    wide = matrix._wide()
    parts = []
    for start in range(0, count, TOGETHER):
        wanted = torch.arange(start, min(start + TOGETHER, count), device=matrix.device)
        part = wide @ (groups.unsqueeze(-1) == wanted).to(wide.dtype)
        parts.append(part if rows is None else _means(part, rows, lines))
    if len(parts) == 1:
        return parts[0]
    nothing = torch.zeros(*matrix.shape[:-2], lines, 0, dtype=wide.dtype, device=matrix.device)
    return torch.cat([nothing, *parts], -1)


def _means(part: Tensor, rows: Tensor, count: int) -> Tensor:
    """The mean over the queries of each group of rows, `[..., count, width]`; 0 for a group of none."""
    own = rows >= 0
    sums = part.new_zeros(*part.shape[:-2], count, part.shape[-1]).index_add_(
        -2, rows[own], part[..., own, :]
    )
    return sums / torch.bincount(rows[own], minlength=count).clamp(min=1).unsqueeze(-1)


def _check(name: str, groups: Tensor, length: int, of: str, device: torch.device) -> int:
    """How many groups there are; raises unless they are whole numbers, one for each key or query."""
    if not isinstance(groups, Tensor) or groups.dtype.is_floating_point or groups.dtype is torch.bool:
        kind = groups.dtype if isinstance(groups, Tensor) else type(groups).__name__
        raise KizukiTypeError(
            f"A.mass: {name} is {kind} but must be an integer tensor [{length}], the group of each {of} from "
            "0, −1 for none"
        )
    if tuple(groups.shape) != (length,):
        raise ShapeError(f"A.mass: {name} has shape {show(groups)} but must be [{length}], one a {of}")
    if groups.device != device:
        raise KizukiTypeError(
            f"A.mass: {name} is on {groups.device} but query is on {device}; move one of them"
        )
    if groups.numel() and int(groups.min()) < -1:
        raise OptionError(
            f"A.mass: {name} holds {int(groups.min())} but must be >= 0, or −1 to leave a {of} out"
        )
    return int(groups.max()) + 1 if groups.numel() else 0


__all__ = ["mass"]
