"""The rule of a mask that a model used: read off its n × n tensor once, row by row, exactly, and kept in O(n).

A model hands its attention function a tensor, or nothing and an `is_causal` flag. For every row three
numbers are read from it (first visible key, last visible key, how many are visible), and for every key
whether any row sees it. They are enough to prove that a rule shows the same keys: what a row sees lies
among the seen keys between its first and last key, so equal counts mean equal rows. A mask that no rule
describes is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..mask import Mask

Rows = Callable[[int, int], Tensor]  # (start, stop) -> visible, bool [1|batch, 1|heads, stop - start, keys]

BLOCK = 2**22  # elements of the mask that are looked at together
ABSENT = -1e4  # models write absence as -inf, finfo.min or, long ago, -10000


class RecordError(ValueError):
    """A model's attention cannot be recorded, or a recording does not hold what was asked for."""


@dataclass(frozen=True, eq=False)
class Rule:
    """Which keys each query sees: `own − left <= j <= own + right`, among `keys`, inside one document.

    `own` is the query's position when the last query stands at the last key (lower right). `keys` is
    bool `[batch, keys]`, `documents` int64 `[batch, keys]`, and only the first `stop` keys exist at all
    (a preallocated cache has room behind them).
    """

    stop: int
    left: int | None = None
    right: int | None = None
    keys: Tensor | None = None
    documents: Tensor | None = None

    def mask(self, queries: int) -> Mask | None:
        """The rule as a `kizuki.masks` mask, None when everything is visible."""
        from kizuki import masks

        parts: list[Mask] = []
        if self.right == 0:
            parts.append(masks.causal("lower_right"))
        if self.left is not None or self.right not in (None, 0):
            parts.append(masks.window(self.left, self.right, align="lower_right"))
        if self.keys is not None:
            parts.append(masks.keys(self.keys))
        if self.documents is not None:
            own = self.documents[:, self.stop - queries :]
            parts.append(masks.documents(ids=own, key_ids=self.documents))
        if not parts:
            return None
        mask = parts[0]
        for part in parts[1:]:
            mask = mask & part
        return mask

    def __str__(self) -> str:
        parts = []
        if self.right == 0:
            parts.append("causal")
        if self.left is not None or self.right not in (None, 0):
            parts.append(f"window({self.left}, {self.right})")
        if self.keys is not None:
            parts.append("keys")
        if self.documents is not None:
            parts.append("documents")
        return " & ".join(parts) or "all keys"


def from_tensor(
    mask: Tensor,
    batch: int,
    queries: int,
    keys: int,
    *,
    numbers: bool = False,
    causal: bool = False,
    trim: bool = True,
) -> Rule:
    """The rule of a 4-D mask, bool (True = visible) or float (0 = visible, a large negative number = absent).

    `numbers`: a float mask may hold others, which leave a key visible (`bias_in` keeps them). `causal`: keys behind
    the query's own are absent besides. `trim`: keys behind the last one any row sees do not count.
    """
    if mask.dim() == 3:
        mask = mask[:, None]
    shape = "[" + ", ".join(str(n) for n in mask.shape) + "]"
    if mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[2] not in (1, queries):
        raise RecordError(f"the mask has shape {shape}, which is not [batch, heads, {queries}, {keys}]")
    if mask.shape[3] > keys:  # models cut a mask made for a longer cache
        mask = mask[..., :keys]
    if mask.shape[3] not in (1, keys):
        raise RecordError(f"the mask has shape {shape} but there are {keys} keys")
    mask = mask.expand(-1, -1, queries, keys)

    def rows(start: int, stop: int) -> Tensor:
        part = mask[:, :, start:stop]
        if part.dtype is torch.bool:
            return part
        if not part.dtype.is_floating_point:
            raise RecordError(f"the mask is {part.dtype}, which says neither what is visible nor what to add")
        absent = part <= ABSENT
        if not numbers and not bool(((part == 0) | absent).all()):
            raise RecordError("the mask adds numbers to the scores (a bias, as ALiBi does)")
        return ~absent

    def rows_before(start: int, stop: int) -> Tensor:
        j = torch.arange(keys, device=mask.device)
        own = torch.arange(start, stop, device=mask.device)[:, None] + keys - queries
        return rows(start, stop) & (j <= own)

    return derive(rows_before if causal else rows, queries, keys, trim=trim)


def bias_in(mask: Tensor, queries: int, keys: int) -> Tensor | None:
    """What a float mask adds to the scores of the keys it leaves visible, None for nothing but zeros.

    `[1|batch, 1|heads, 1, keys]` where all rows add the same to a key, else the mask itself.
    """
    if not mask.dtype.is_floating_point:
        return None
    mask = mask[..., :keys]
    top, some = None, False
    step = max(1, BLOCK // max(keys * mask.shape[0] * mask.shape[1], 1))
    for start in range(0, mask.shape[2], step):
        part = mask[:, :, start : start + step]
        seen = part > ABSENT
        some = some or bool((part.masked_fill(~seen, 0) != 0).any())
        highest = part.masked_fill(~seen, -torch.inf).amax(2, keepdim=True)
        top = highest if top is None else torch.maximum(top, highest)
    if top is None or not some:
        return None
    for start in range(0, mask.shape[2], step):
        part = mask[:, :, start : start + step]
        if not bool(((part == top) | (part <= ABSENT)).all()):
            return mask
    return top.masked_fill(top == -torch.inf, 0)


def from_function(fn: Callable[..., Tensor], batch: int, queries: int, keys: int, device: Any) -> Rule:
    """The rule of a `mask_mod(b, h, q, k)`, as flex attention's BlockMask carries it; head 0 speaks for all."""
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    h = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    j = torch.arange(keys, device=device).view(1, 1, 1, -1)

    def rows(start: int, stop: int) -> Tensor:
        i = torch.arange(start, stop, device=device).view(1, 1, -1, 1)
        return fn(b, h, i, j).expand(batch, 1, stop - start, keys)

    return derive(rows, queries, keys)


def from_padding(mask: Tensor, rule: Rule) -> Rule:
    """`rule` with the keys of a 2-D attention mask `[batch, length]`, of which the last `stop` count."""
    seen = mask[:, -rule.stop :].to(torch.bool)
    if seen.shape[1] != rule.stop:
        raise RecordError(f"the padding mask covers {seen.shape[1]} keys but there are {rule.stop}")
    return Rule(rule.stop, rule.left, rule.right, None if bool(seen.all()) else seen, rule.documents)


def derive(rows: Rows, queries: int, keys: int, *, trim: bool = True) -> Rule:
    """The rule that shows exactly the keys `rows` shows. Reads every row once; O(batch · keys) memory."""
    lines = _read(rows, queries, keys)
    if lines is None:
        return Rule(keys)
    if trim and queries < keys:  # room behind the last key of a preallocated cache is not a key
        stop = max(int(lines.last.max()) + 1, queries)
        if stop < keys:
            lines = Lines(lines.first, lines.last, lines.count, lines.seen[:, :stop])
            keys = stop
    return fit(lines, keys)


def fit(lines: Lines, keys: int) -> Rule:
    """The rule that shows exactly what `lines` say, or RecordError."""
    rule = _fit(lines, keys) or _fit_documents(lines, keys)
    if rule is None:
        raise RecordError(
            "the mask is none of causal, window, padding, documents or a chunk, alone or causal with them; "
            "no rule shows the same keys"
        )
    return rule


@dataclass(frozen=True)
class Lines:
    """What one reading of the mask leaves: per row its first and last key and their number, per key whether seen."""

    first: Tensor  # int64 [batch, queries]; 0 in an empty row
    last: Tensor  # int64 [batch, queries]; -1 in an empty row
    count: Tensor  # int64 [batch, queries]
    seen: Tensor  # bool [batch, keys]


def lines_of(rule: Rule, batch: int, queries: int, device: torch.device) -> Lines:
    """What a rule shows, as one reading of its mask would leave it. O(batch · (queries + keys))."""
    keys = rule.stop
    own = (torch.arange(queries, device=device) + keys - queries).expand(batch, queries)
    low = torch.zeros_like(own) if rule.left is None else (own - rule.left).clamp(0, keys)
    high = torch.full_like(own, keys - 1) if rule.right is None else (own + rule.right).clamp(-1, keys - 1)
    seen = torch.ones(batch, keys, dtype=torch.bool, device=device)
    if rule.keys is not None:
        seen = rule.keys.expand(batch, keys)
    if rule.documents is not None:
        ids = rule.documents.expand(batch, keys)
        mine = ids.gather(1, own)
        here = torch.arange(keys, device=device).expand(batch, keys)
        size = int(ids.max()) + 1
        firsts = ids.new_full((batch, size), keys).scatter_reduce(1, ids, here, "amin").gather(1, mine)
        lasts = ids.new_full((batch, size), -1).scatter_reduce(1, ids, here, "amax").gather(1, mine)
        low, high = torch.maximum(low, firsts), torch.minimum(high, lasts)
    before = _counts(seen)
    count = (before.gather(1, high + 1) - before.gather(1, low)).clamp(min=0)
    # The first and the last seen key inside the bounds, by the number of seen keys before them.
    places = torch.arange(keys, device=device).expand(batch, keys)
    after = places.masked_fill(~seen, keys).flip(1).cummin(1).values.flip(1)  # the next seen key from here on
    until = places.masked_fill(~seen, -1).cummax(1).values  # the last seen key up to here
    first = torch.where(count > 0, after.gather(1, low.clamp(max=keys - 1)), 0)
    last = torch.where(count > 0, until.gather(1, high.clamp(min=0)), -1)
    return Lines(first, last, count, seen)


def _read(rows: Rows, queries: int, keys: int) -> Lines | None:
    first, last, count, seen = [], [], [], None
    step = max(1, BLOCK // max(keys, 1))
    for start in range(0, queries, step):
        part = rows(start, min(start + step, queries))  # [batch, heads, step, keys]
        if part.shape[1] > 1 and part.stride(1) != 0 and not bool((part == part[:, :1]).all()):
            raise RecordError("the mask differs from head to head")
        line = part[:, 0]
        n = line.sum(-1)
        as_bytes = line.to(torch.uint8)  # argmax has no bool kernel; the first of equal values wins
        first.append(as_bytes.argmax(-1))
        last.append(torch.where(n > 0, keys - 1 - as_bytes.flip(-1).argmax(-1), -1))
        count.append(n)
        seen = line.any(1) if seen is None else seen | line.any(1)
    if seen is None or keys == 0:
        return None
    return Lines(torch.cat(first, 1), torch.cat(last, 1), torch.cat(count, 1), seen)


def _counts(seen: Tensor) -> Tensor:
    """How many keys are seen before each position, `[batch, keys + 1]`."""
    return torch.nn.functional.pad(seen.cumsum(-1), (1, 0))


def _same(lines: Lines, low: Tensor, high: Tensor) -> bool:
    """Whether every row sees exactly the seen keys in `low <= j <= high`."""
    keys = lines.seen.shape[-1]
    low, high = low.expand_as(lines.first).clamp(0, keys), high.expand_as(lines.first).clamp(-1, keys - 1)
    before = _counts(lines.seen)
    expected = (before.gather(1, high + 1) - before.gather(1, low)).clamp(min=0)
    empty = lines.count == 0
    inside = empty | ((lines.first >= low) & (lines.last <= high))
    return bool((inside & (expected == lines.count)).all())


def _fit(lines: Lines, keys: int) -> Rule | None:
    queries = lines.first.shape[1]
    own = (torch.arange(queries, device=lines.first.device) + keys - queries)[None]  # [1, queries]
    live = lines.count > 0
    seen = None if bool(lines.seen.all()) else lines.seen
    left = right = 0
    if bool(live.any()):
        left, right = int((own - lines.first)[live].max()), int((lines.last - own)[live].max())
    for sides in ((None, None), (None, 0), (left, 0), (left, right), (left, None), (None, right)):
        a, c = sides
        if (a is not None and a < 0) or (c is not None and c < 0):
            continue
        low = torch.zeros_like(own) if a is None else own - a
        high = torch.full_like(own, keys - 1) if c is None else own + c
        if _same(lines, low, high):
            return Rule(keys, a, c, seen)
    return None


def _fit_documents(lines: Lines, keys: int) -> Rule | None:
    """Packed documents and chunks: a row starts where its document starts."""
    queries = lines.first.shape[1]
    own = torch.arange(queries, device=lines.first.device) + keys - queries  # [queries]
    starts = torch.zeros_like(lines.seen, dtype=torch.int64)
    live = lines.count > 0
    # A row that sees nothing (padding) opens a document of its own, so that it is not counted to its neighbour's.
    starts.scatter_add_(1, torch.where(live, lines.first, own), torch.ones_like(lines.first))
    ids = (starts > 0).cumsum(-1)  # [batch, keys], 0 … keys
    here = torch.arange(keys, device=ids.device).expand_as(ids)
    none = ids.new_full((ids.shape[0], keys + 1), keys)
    low_of = none.scatter_reduce(1, ids, here, "amin")  # id -> first key
    high_of = (none - keys - 1).scatter_reduce(1, ids, here, "amax")  # id -> last key
    mine = ids[:, own]
    low, end = low_of.gather(1, mine), high_of.gather(1, mine)
    seen = None if bool(lines.seen.all()) else lines.seen
    for right, high in ((0, own[None].expand_as(low)), (None, end)):
        if _same(lines, low, high):
            return Rule(keys, None, right, seen, ids)
    return None
