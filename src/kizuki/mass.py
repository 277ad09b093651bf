"""`A.mass`: how much of each row falls on each group of keys, and the table of segments on segments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import KizukiTypeError, OptionError, ShapeError, SizeError, show
from .observation import DENSE_LIMIT, is_whole

if TYPE_CHECKING:
    from .operator import AttentionMatrix
    from .problem import Problem

Segments = Mapping[str, Any]  # name -> (start, stop), range, slice, or indices; `A.mass` says more

TOGETHER = 64  # groups of keys in one forward pass


def mass(
    matrix: AttentionMatrix, groups: Tensor | Segments, rows: Tensor | Segments | Sequence[str] | None
) -> Tensor:
    """A times a one-hot matrix of the groups, then means over the groups of rows."""
    problem, device = matrix.problem, matrix.device
    belongs = _named(groups, rows, problem) if isinstance(rows, Sequence) else rows
    count = 0
    if isinstance(groups, Mapping):
        count = len(groups)
        groups = numbered("groups", groups, problem.keys, device)
    count = max(count, _check("groups", groups, problem.keys, "key", device))
    lines = problem.queries
    if belongs is not None:
        lines = 0
        if isinstance(belongs, Mapping):
            lines = len(belongs)
            belongs = numbered("rows", belongs, problem.queries, device)
        lines = max(lines, _check("rows", belongs, problem.queries, "query", device))
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
        parts.append(part if belongs is None else _means(part, belongs, lines))
    if len(parts) == 1:
        return parts[0]
    nothing = torch.zeros(*matrix.shape[:-2], lines, 0, dtype=wide.dtype, device=matrix.device)
    return torch.cat([nothing, *parts], -1)


def numbered(name: str, segments: Segments, length: int, device: torch.device) -> Tensor:
    """Named segments as a group number for each of `length` places, −1 outside of all."""
    made = torch.full((length,), -1, dtype=torch.int64, device=device)
    for at, (label, places) in enumerate(segments.items()):
        own = _places(name, label, places, length, device)
        taken = made[own]
        if bool((taken >= 0).any()):
            other = list(segments)[int(taken.max())]
            raise OptionError(f"A.mass: {name} {label!r} overlaps {other!r}; a place belongs to one segment")
        made[own] = at
    return made


def _places(name: str, label: str, places: Any, length: int, device: torch.device) -> Tensor:
    pair = isinstance(places, tuple) and len(places) == 2 and all(is_whole(at) for at in places)
    if pair:
        places = range(*places)
    if isinstance(places, slice):
        places = range(length)[places]
    if isinstance(places, range):
        places = torch.arange(places.start, max(places.start, places.stop), places.step, device=device)
    if not isinstance(places, Tensor) or places.dtype.is_floating_point or places.dim() != 1:
        raise KizukiTypeError(
            f"A.mass: {name} {label!r} is {places!r} but must be (start, stop), a slice, a range or an index tensor"
        )
    if places.dtype is torch.bool:
        if len(places) != length:
            raise ShapeError(f"A.mass: {name} {label!r} has shape {show(places)} but must be [{length}]")
        return places.nonzero().squeeze(-1)
    if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < length:
        raise OptionError(
            f"A.mass: {name} {label!r} reaches from {int(places.min())} to {int(places.max())} but must lie in "
            f"0 … {length - 1}"
        )
    return places.to(device)


def _named(groups: Tensor | Segments, names: Sequence[str], problem: Problem) -> Segments:
    """The segments of `groups` called `names`, as segments of queries: a query stands at its own position."""
    if isinstance(names, str):
        names = [names]
    if not isinstance(groups, Mapping):
        raise KizukiTypeError(
            "A.mass: rows are names but groups are not; give groups as a mapping from names to (start, stop)"
        )
    unknown = [name for name in names if name not in groups]
    if unknown:
        raise OptionError(
            f"A.mass: rows holds {unknown[0]!r} but groups are named {', '.join(map(repr, groups))}; name one of those"
        )
    offset = max(0, problem.keys - problem.queries)
    made = {}
    for name in names:
        own = _places("groups", name, groups[name], problem.keys, problem.device) - offset
        made[name] = own[(own >= 0) & (own < problem.queries)]
    return made


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


__all__ = ["Segments", "mass", "numbered"]
