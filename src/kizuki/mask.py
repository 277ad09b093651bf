"""What a mask is: small frozen rules that say which keys a query can see; masks.py builds them.

A backend asks a rule for its `bounds` (per query, the range of keys outside which nothing is visible: O(n)), and
evaluates what the bounds do not say (`residual`) on one tile at a time. None is ever expanded to queries × keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from . import functions
from .errors import KizukiTypeError, OptionError, ShapeError, show

if TYPE_CHECKING:
    from .problem import Problem

Align = Literal["lower_right", "upper_left"]
FAR = 1 << 62


@dataclass(frozen=True, eq=False)
class Bounds:
    """Per query, the keys `first <= j < stop` outside which nothing is visible.

    `first` and `stop` are int64, `[1|batch, 1|heads, queries]`. `exact` says that every key inside is
    visible, so that nothing remains to be evaluated.

    >>> import torch, kizuki
    >>> A = kizuki.attend(torch.zeros(4, 2), torch.zeros(4, 2))
    >>> kizuki.masks.causal().bounds(A.problem).stop.tolist()  # of one batch, one head, four queries
    [[[1, 2, 3, 4]]]
    """

    first: Tensor
    stop: Tensor
    exact: bool

    def clamp(self, keys: int) -> Bounds:
        """The same range within `0 … keys`, an empty one written as (0, 0)."""
        first, stop = self.first.clamp(0, keys), self.stop.clamp(0, keys)
        empty = first >= stop
        return Bounds(first.masked_fill(empty, 0), stop.masked_fill(empty, 0), self.exact)


class Mask:
    """A rule saying which keys each query can see. Build one with the functions of masks.py.

    >>> import torch, kizuki
    >>> rule = kizuki.masks.causal() & ~kizuki.masks.keys(torch.tensor([True, False, False, False]))
    >>> kizuki.attend(torch.zeros(4, 2), torch.zeros(4, 2), mask=rule)[3]  # all before it but the first
    tensor([0.0000, 0.3333, 0.3333, 0.3333])
    """

    sign: object = None  # what calls of a mask that never changes are known by; None = it may change

    def __and__(self, other: Mask | Tensor) -> Mask:
        return And(self, as_mask(other, "mask & other"))

    def __rand__(self, other: Mask | Tensor) -> Mask:
        return And(as_mask(other, "other & mask"), self)

    def __or__(self, other: Mask | Tensor) -> Mask:
        return Or(self, as_mask(other, "mask | other"))

    def __ror__(self, other: Mask | Tensor) -> Mask:
        return Or(as_mask(other, "other | mask"), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise KizukiTypeError(
            "kizuki.masks: a mask has no truth value; combine masks with &, | and ~, not and/or/not"
        )

    def check(self, problem: Problem, caller: str, values: bool = True) -> None:
        """Raise unless this mask fits the problem; without `values`, as far as shapes say."""

    def visible(self, problem: Problem, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Whether query i of batch b, head h sees key j, elementwise over int64 index tensors that broadcast."""
        raise NotImplementedError

    def tile(self, problem: Problem, rows: slice, cols: slice) -> Tensor:
        """The same on one tile of A, `[1|batch, 1|heads, 1|rows, 1|cols]`."""
        return self.visible(problem, *functions.places(problem, rows, cols))

    def bounds(self, problem: Problem) -> Bounds:
        """The range of keys outside which nothing is visible to each query."""
        first = torch.zeros(1, 1, problem.queries, dtype=torch.int64, device=problem.device)
        return Bounds(first, first + problem.keys, exact=False)

    def tensors(self) -> list[Tensor]:
        """The caller's tensors this mask reads: a change to one of them changes A."""
        return []

    def residual(self, problem: Problem) -> Mask | None:
        """The part of this mask that its bounds do not say already."""
        return None if self.bounds(problem).exact else self


def readable(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor are there to be read: not for a tracer, a transform, a fake or meta tensor."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or tensor.is_meta
        or type(tensor) not in (Tensor, torch.nn.Parameter)
    )


def as_mask(mask: Any, caller: str) -> Mask:
    """A `Mask` as it is; a boolean tensor as `dense`; anything else is an error."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return dense_mask(mask, caller)
    raise KizukiTypeError(
        f"{caller}: mask is a {type(mask).__name__} but must be a boolean tensor (True = visible) or a rule "
        "of kizuki.masks"
    )


def _offset(problem: Problem, align: Align | None) -> int:
    """How far a query's own key position lies to the right of its index."""
    return problem.keys - problem.queries if align == "lower_right" else 0


def check_align(name: str, align: str | None) -> None:
    if align not in (None, "lower_right", "upper_left"):
        raise OptionError(
            f'kizuki.masks.{name}: align is {align!r} but must be "lower_right" (the last query sees the '
            "last key, as "
            'with a KV cache) or "upper_left"'
        )


def _need_align(problem: Problem, align: str | None, caller: str, name: str, args: str) -> None:
    if align is None and problem.queries != problem.keys:
        raise OptionError(
            f"{caller}: {name} needs as many queries as keys, got {problem.queries} and {problem.keys}; name "
            "the alignment: "
            f'mask=kizuki.masks.{name}({args}"lower_right") (a KV cache) or "upper_left"'
        )


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    align: Align | None = None

    def check(self, problem: Problem, caller: str, values: bool = True) -> None:
        _need_align(problem, self.align, caller, "causal", "")

    def visible(self, problem: Problem, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + _offset(problem, self.align)

    def bounds(self, problem: Problem) -> Bounds:
        i = torch.arange(problem.queries, device=problem.device).view(1, 1, -1)
        return Bounds(torch.zeros_like(i), i + _offset(problem, self.align) + 1, exact=True)


@dataclass(frozen=True, eq=False)
class Window(Mask):
    left: int | None
    right: int | None
    align: Align | None = None

    def check(self, problem: Problem, caller: str, values: bool = True) -> None:
        _need_align(problem, self.align, caller, "window", f"{self.left}, {self.right}, align=")

    def visible(self, problem: Problem, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        own = i + _offset(problem, self.align)
        seen = torch.ones_like(own + j, dtype=torch.bool)
        if self.left is not None:
            seen = seen & (j >= own - self.left)
        if self.right is not None:
            seen = seen & (j <= own + self.right)
        return seen

    def bounds(self, problem: Problem) -> Bounds:
        own = torch.arange(problem.queries, device=problem.device).view(1, 1, -1) + _offset(
            problem, self.align
        )
        first = torch.zeros_like(own) if self.left is None else own - self.left
        stop = torch.full_like(own, problem.keys) if self.right is None else own + self.right + 1
        return Bounds(first, stop, exact=True)


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Query i sees key j when they carry the same id."""

    ids: Tensor
    key_ids: Tensor

    def check(self, problem: Problem, caller: str, values: bool = True) -> None:
        for name, ids, length, axis in (
            ("ids", self.ids, problem.queries, "queries"),
            ("key_ids", self.key_ids, problem.keys, "keys"),
        ):
            if ids.shape[-1] != length:
                raise _uncovered(caller, ids.shape[-1], axis, length)
            _check_batched(problem, ids, f"documents {name}", axis, caller, movable=True)

    def visible(self, problem: Problem, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return _pick(_per_batch(self.ids, problem), b, i) == _pick(_per_batch(self.key_ids, problem), b, j)

    def bounds(self, problem: Problem) -> Bounds:
        ids, key_ids = _pair(self.ids, self.key_ids, problem)
        rows = [_id_ranges(a, c) for a, c in zip(ids, key_ids, strict=True)]
        if not rows:
            nothing = torch.zeros(0, 1, problem.queries, dtype=torch.int64, device=problem.device)
            return Bounds(nothing, nothing, exact=True)
        first = torch.stack([r[0] for r in rows])[:, None]
        stop = torch.stack([r[1] for r in rows])[:, None]
        return Bounds(first, stop, exact=all(r[2] for r in rows))


def _uncovered(caller: str, covered: int, axis: str, length: int) -> ShapeError:
    return ShapeError(
        f"{caller}: documents covers {covered} {axis} but there are {length}; give one id for each of the {axis} or "
        f"lengths that sum to {length}"
    )


def _pair(ids: Tensor, key_ids: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    a, c = _per_batch(ids, problem), _per_batch(key_ids, problem)
    n = c.shape[0] if a.shape[0] == 1 else a.shape[0]
    return a.expand(n, -1), c.expand(n, -1)


def _id_ranges(ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor, bool]:
    """For each query the hull of the keys with its id, and whether every hull holds that id alone."""
    if not key_ids.numel():
        return torch.zeros_like(ids), torch.zeros_like(ids), True
    known, inverse, counts = torch.unique(key_ids, return_inverse=True, return_counts=True)
    position = torch.arange(key_ids.numel(), device=key_ids.device)
    low = torch.full_like(known, key_ids.numel()).scatter_reduce(0, inverse, position, "amin")
    high = torch.full_like(known, -1).scatter_reduce(0, inverse, position, "amax")
    slot = torch.searchsorted(known, ids).clamp(max=known.numel() - 1)
    found = known[slot] == ids
    first = torch.where(found, low[slot], 0)
    stop = torch.where(found, high[slot] + 1, 0)
    return first, stop, bool((high - low + 1 == counts).all())


@dataclass(frozen=True, eq=False)
class Packed(Mask):
    """`Documents` one after another, by where each begins and the last ends: for whoever has no numbers to number
    tokens by (a tracer, a transform). The numbers are checked when they are there.

    `offsets` are int64 `[documents + 1]` or `[batch, documents + 1]`, made from what `given` names; `keys` the same
    of the keys, or with `by_ids` one id a key.
    """

    given: str  # "lengths" or "offsets"
    offsets: Tensor
    keys: Tensor
    by_ids: bool = False

    def check(self, problem: Problem, caller: str, values: bool = True) -> None:
        sides = [(self.given, self.offsets, problem.queries, "queries")]
        if not self.by_ids:
            name = self.given if self.given == "lengths" else f"key_{self.given}"
            sides.append((name, self.keys, problem.keys, "keys"))
        elif self.keys.shape[-1] != problem.keys:
            raise _uncovered(caller, self.keys.shape[-1], "keys", problem.keys)
        else:
            _check_batched(problem, self.keys, "documents key_ids", "keys", caller, movable=True)
        for name, places, length, axis in sides:
            _check_batched(problem, places, f"documents {name}", "documents + 1", caller, movable=True)
            if values and places.numel():
                check_offsets(name, places)
                wrong = places[..., -1] != length
                if bool(wrong.any()):
                    raise _uncovered(caller, int(places[..., -1][wrong][0]), axis, length)

    def visible(self, problem: Problem, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        own = _document_at(_per_batch(self.offsets, problem), problem.queries, b, i)
        keys = _per_batch(self.keys, problem)
        return own == (_pick(keys, b, j) if self.by_ids else _document_at(keys, problem.keys, b, j))

    def bounds(self, problem: Problem) -> Bounds:
        ids = _numbered(_per_batch(self.offsets, problem), problem.queries)
        key_ids = self.keys if self.by_ids else _numbered(_per_batch(self.keys, problem), problem.keys)
        return Documents(ids, key_ids).bounds(problem)


def check_offsets(name: str, offsets: Tensor) -> None:
    """Raise unless offsets begin at 0 and never go back; for `lengths` they are the sums of those."""
    rows = offsets.reshape(-1, offsets.shape[-1])
    counts = rows.diff(dim=-1)
    if name == "lengths" and counts.numel() and int(counts.min()) < 0:
        raise OptionError(
            f"kizuki.masks.documents: lengths holds {int(counts.min())} but a length must be >= 0"
        )
    for row, step in zip(rows, counts, strict=True):
        if int(row[0]) != 0:
            raise OptionError(
                f"kizuki.masks.documents: {name} begins with {int(row[0])} but must begin with 0"
            )
        if step.numel() and int(step.min()) < 0:
            at = int(step.argmin())
            raise OptionError(
                f"kizuki.masks.documents: {name} goes back from {int(row[at])} to {int(row[at + 1])}; documents must "
                "not overlap, so no offset may be below the one before"
            )


def _numbered(offsets: Tensor, length: int) -> Tensor:
    """The document of each of `length` tokens, `[1|batch, length]`."""
    b = torch.arange(offsets.shape[0], device=offsets.device).view(-1, 1)
    return _document_at(offsets, length, b, torch.arange(length, device=offsets.device).view(1, -1))


def _document_at(offsets: Tensor, length: int, b: Tensor, at: Tensor) -> Tensor:
    """The document that token `at` of batch entry b lies in; offsets `[1|batch, documents + 1]` end with `length`."""
    if offsets.shape[0] == 1:
        return torch.searchsorted(offsets[0, 1:].contiguous(), at.contiguous(), right=True)
    # The rows one after another, each moved past the one before, are one sorted list to look in.
    step, count = length + 1, offsets.shape[1] - 1
    moved = offsets[:, 1:] + torch.arange(offsets.shape[0], device=offsets.device).view(-1, 1) * step
    return torch.searchsorted(moved.flatten(), at + b * step, right=True) - b * count


@dataclass(frozen=True, eq=False)
class Keys(Mask):
    """The same keys for every query: a padding mask."""

    seen: Tensor

    def check(self, problem: Problem, caller: str, values: bool = True) -> None:
        if self.seen.shape[-1] != problem.keys:
            raise ShapeError(
                f"{caller}: keys mask covers {self.seen.shape[-1]} keys but there are {problem.keys}; give [keys] or "
                "[batch, keys]"
            )
        _check_batched(problem, self.seen, "keys mask", "keys", caller)

    def visible(self, problem: Problem, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return _pick(_per_batch(self.seen, problem), b, j)

    def bounds(self, problem: Problem) -> Bounds:
        seen = _per_batch(self.seen, problem)  # [1|batch, keys]
        position = torch.arange(problem.keys, device=seen.device)
        stop = (
            torch.where(seen, position + 1, 0).amax(-1)
            if problem.keys
            else seen.new_zeros(seen.shape[0], dtype=torch.int64)
        )
        first = torch.where(seen, position, problem.keys).amin(-1) if problem.keys else stop
        exact = bool((seen.sum(-1) == (stop - first).clamp(min=0)).all())
        shape = (seen.shape[0], 1, problem.queries)
        return Bounds(first.view(-1, 1, 1).expand(shape), stop.view(-1, 1, 1).expand(shape), exact)


@dataclass(frozen=True, eq=False)
class Lengths(Mask):
    """Only the first `key` keys and the first `query` queries of each batch entry are real."""

    query: Tensor | None
    key: Tensor | None

    def check(self, problem: Problem, caller: str, values: bool = True) -> None:
        for name, given, limit, axis in (
            ("query", self.query, problem.queries, "queries"),
            ("key", self.key, problem.keys, "keys"),
        ):
            if given is None:
                continue
            if given.dim() > 1 or given.numel() not in (1, problem.batch):
                raise ShapeError(
                    f"{caller}: lengths {name} has shape {show(given)} but must be one number or "
                    f"[{problem.batch}], one for "
                    "each batch entry"
                )
            _check_device(problem, given, f"lengths {name}", caller, movable=True)
            if values and given.numel() and (int(given.min()) < 0 or int(given.max()) > limit):
                raise OptionError(
                    f"{caller}: lengths {name} spans {int(given.min())} to {int(given.max())} but must lie "
                    f"in 0 … {limit}, "
                    f"the number of {axis}"
                )

    def _limits(self, problem: Problem) -> tuple[Tensor, Tensor]:
        def column(given: Tensor | None, default: int) -> Tensor:
            if given is None:
                return torch.full((1, 1, 1), default, device=problem.device)
            return given.reshape(given.numel(), 1, 1).to(problem.device)

        return column(self.query, problem.queries), column(self.key, problem.keys)

    def visible(self, problem: Problem, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = (_pick(limit.flatten(), b) for limit in self._limits(problem))
        return (i < query) & (j < key)

    def bounds(self, problem: Problem) -> Bounds:
        query, key = self._limits(problem)
        live = torch.arange(problem.queries, device=problem.device).view(1, 1, -1) < query
        stop = torch.where(live, key, 0)
        return Bounds(torch.zeros_like(stop), stop, exact=True)


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean tensor that broadcasts to `[..., heads, queries, keys]`; broadcast axes are not expanded."""

    tensor: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.tensor]

    def check(self, problem: Problem, caller: str, values: bool = True) -> None:
        from .problem import check_pairs

        check_pairs(caller, "mask", self.tensor, problem)
        _check_device(problem, self.tensor, "mask", caller)

    def visible(self, problem: Problem, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return problem.pairs_at(self.tensor, b, h, i, j)

    def tile(self, problem: Problem, rows: slice, cols: slice) -> Tensor:
        return problem.pairs(self.tensor, rows, cols)


@dataclass(frozen=True, eq=False)
class Where(Mask):
    """What a user's function says, compiled where it can be (functions.py)."""

    fn: Callable[[Any, Any, Any, Any], Any]

    def tensors(self) -> list[Tensor]:
        return functions.tensors(self.fn)

    def check(self, problem: Problem, caller: str, values: bool = True) -> None:
        # A few entries are asked for at once, so that a wrong fn is an error of `attend` and not of a later read.
        if values and 0 not in problem.shape:
            self.tile(problem, slice(0, min(2, problem.queries)), slice(0, min(2, problem.keys)))

    def visible(self, problem: Problem, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        compiled = functions.see(self.fn, (b, h, i, j))
        if compiled is not None:
            return compiled
        # A user's function: whatever its type says, it is looked at.
        seen: Any = functions.called(self.fn, "mask", "kizuki.masks.where: fn", b, h, i, j)
        if isinstance(seen, bool):
            seen = torch.tensor(seen, device=problem.device)
        if not isinstance(seen, Tensor) or seen.dtype is not torch.bool:
            kind = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
            raise KizukiTypeError(
                f"kizuki.masks.where: fn returned {kind} but must return a boolean tensor, True = visible; "
                "compare its indices"
            )
        from .problem import broadcast

        full = broadcast(b.shape, h.shape, i.shape, j.shape)
        if seen.dim() > len(full) or any(
            n not in (1, m) for n, m in zip(reversed(seen.shape), reversed(full), strict=False)
        ):
            raise ShapeError(
                f"kizuki.masks.where: fn returned shape {show(seen)} but must broadcast to {list(full)}; use "
                "its arguments b, h, i, j elementwise"
            )
        return seen.reshape((1,) * (len(full) - seen.dim()) + tuple(seen.shape))


@dataclass(frozen=True, eq=False)
class And(Mask):
    left: Mask
    right: Mask

    def check(self, problem: Problem, caller: str, values: bool = True) -> None:
        self.left.check(problem, caller, values)
        self.right.check(problem, caller, values)

    def tensors(self) -> list[Tensor]:
        return self.left.tensors() + self.right.tensors()

    def visible(self, problem: Problem, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.left.visible(problem, b, h, i, j) & self.right.visible(problem, b, h, i, j)

    def tile(self, problem: Problem, rows: slice, cols: slice) -> Tensor:
        return self.left.tile(problem, rows, cols) & self.right.tile(problem, rows, cols)

    def bounds(self, problem: Problem) -> Bounds:
        a, c = self.left.bounds(problem), self.right.bounds(problem)
        return Bounds(torch.maximum(a.first, c.first), torch.minimum(a.stop, c.stop), a.exact and c.exact)

    def residual(self, problem: Problem) -> Mask | None:
        a, c = self.left.residual(problem), self.right.residual(problem)
        return c if a is None else a if c is None else And(a, c)


def functions_of(mask: Mask | None) -> list[Callable[..., Any]]:
    """The functions of every `where` in a mask."""
    if isinstance(mask, (And, Or)):
        return functions_of(mask.left) + functions_of(mask.right)
    if isinstance(mask, Not):
        return functions_of(mask.inner)
    return [mask.fn] if isinstance(mask, Where) else []


def split(mask: Mask | None) -> tuple[list[Callable[..., Any]], Mask | None]:
    """`(functions, rest)`: functions that can be compiled and the mask that is left, all of which must say visible."""
    if isinstance(mask, Where) and functions.refusal(mask.fn, "mask") is None:
        return [mask.fn], None
    if isinstance(mask, And):
        (a, left), (c, right) = split(mask.left), split(mask.right)
        return a + c, right if left is None else left if right is None else And(left, right)
    return [], mask


@dataclass(frozen=True, eq=False)
class Or(Mask):
    left: Mask
    right: Mask

    def check(self, problem: Problem, caller: str, values: bool = True) -> None:
        self.left.check(problem, caller, values)
        self.right.check(problem, caller, values)

    def tensors(self) -> list[Tensor]:
        return self.left.tensors() + self.right.tensors()

    def visible(self, problem: Problem, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.left.visible(problem, b, h, i, j) | self.right.visible(problem, b, h, i, j)

    def tile(self, problem: Problem, rows: slice, cols: slice) -> Tensor:
        return self.left.tile(problem, rows, cols) | self.right.tile(problem, rows, cols)

    def bounds(self, problem: Problem) -> Bounds:
        a, c = self.left.bounds(problem).clamp(problem.keys), self.right.bounds(problem).clamp(problem.keys)
        # An empty range must not widen the hull, so its ends are pushed out of the way.
        first = torch.minimum(
            a.first.masked_fill(a.stop == 0, problem.keys), c.first.masked_fill(c.stop == 0, problem.keys)
        )
        return Bounds(first, torch.maximum(a.stop, c.stop), exact=False)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    inner: Mask

    def check(self, problem: Problem, caller: str, values: bool = True) -> None:
        self.inner.check(problem, caller, values)

    def tensors(self) -> list[Tensor]:
        return self.inner.tensors()

    def visible(self, problem: Problem, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ~self.inner.visible(problem, b, h, i, j)

    def tile(self, problem: Problem, rows: slice, cols: slice) -> Tensor:
        return ~self.inner.tile(problem, rows, cols)


def _check_batched(
    problem: Problem, tensor: Tensor, name: str, axis: str, caller: str, movable: bool = False
) -> None:
    if tensor.dim() > 1 and tuple(tensor.shape[:-1]) not in ((1,), (problem.batch,), problem.lead):
        raise ShapeError(
            f"{caller}: {name} has shape {show(tensor)} but must be [{axis}] or [{problem.batch}, {axis}], "
            "one row for each "
            "batch entry"
        )
    _check_device(problem, tensor, name, caller, movable)


def _check_device(problem: Problem, tensor: Tensor, name: str, caller: str, movable: bool = False) -> None:
    # Lengths written as Python numbers lie on the CPU; they are small and move along.
    if tensor.device != problem.device and not (movable and tensor.device.type == "cpu"):
        raise KizukiTypeError(
            f"{caller}: {name} is on {tensor.device} but query is on {problem.device}; move one of them"
        )


def _per_batch(tensor: Tensor, problem: Problem) -> Tensor:
    """`[1|batch, length]` on the problem's device."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1]).to(problem.device)


def _pick(tensor: Tensor, *index: Tensor) -> Tensor:
    """`tensor` at broadcast indices; an axis of length 1 stays broadcast instead of being indexed."""
    zero = torch.zeros((1,) * index[0].dim(), dtype=torch.int64, device=tensor.device)
    return tensor[tuple(at if n != 1 else zero for n, at in zip(tensor.shape, index, strict=True))]


def dense_mask(tensor: Any, caller: str) -> Mask:
    if not isinstance(tensor, Tensor) or tensor.dtype is not torch.bool:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise KizukiTypeError(
            f"{caller}: mask is {kind} but must be boolean, True = visible; a float mask that is added goes "
            "into bias=, "
            "0/1 integers through .bool()"
        )
    return Dense(tensor)
