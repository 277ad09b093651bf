"""What transformers says of a mask, read as a rule: for `attn_implementation="kizuki"`.

transformers describes a mask by a function of four indices, put together from a few known ones (causal, a window,
packed documents, chunks), by offsets, and by the padding. For sdpa and eager it is evaluated to n × n numbers; here it
is read as what it is, once a pass, and handed on in a tensor that has a mask's shape and no memory (`RuleMask`). A
function that is none of the known ones is evaluated, by transformers' own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import masks
from ..errors import OptionError
from ..masks import Bounds, Mask

Groups = Callable[[Tensor], Tensor]  # positions [n] -> the group of each, [batch, n]


@dataclass(frozen=True, eq=False)
class Terms:
    """What a mask function says: own − left <= key <= own + right, and both in the same of each of the groups.

    `positions` are those that left and right are counted in, where they are not the indices themselves.
    """

    left: int | None = None
    right: int | None = None
    groups: tuple[Groups, ...] = ()
    packed: Tensor | None = None  # the document of each token, [batch, length]
    positions: Tensor | None = None  # [batch, length]

    def __and__(self, other: Terms) -> Terms | None:
        if self.positions is not None and other.positions is not None:
            return None
        both = [[n for n in pair if n is not None] for pair in zip(_sides(self), _sides(other), strict=True)]
        left, right = (min(found) if found else None for found in both)
        packed = [t for t in (self.packed, other.packed) if t is not None]
        if len(packed) == 2:
            return None
        return Terms(
            left,
            right,
            self.groups + other.groups,
            packed[0] if packed else None,
            self.positions if self.positions is not None else other.positions,
        )

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        """The same of broadcasting indices, `[batch, queries, keys]`."""
        own, other = (i, j) if self.positions is None else (self.positions[:, i], self.positions[:, j])
        seen = torch.ones_like(own + other, dtype=torch.bool)
        if self.left is not None:
            seen = seen & (other >= own - self.left)
        if self.right is not None:
            seen = seen & (other <= own + self.right)
        for group in self.groups:
            seen = seen & (group(i.flatten())[:, :, None] == group(j.flatten())[:, None, :])
        return seen


def _sides(terms: Terms) -> tuple[int | None, int | None]:
    return terms.left, terms.right


class Reader:
    """Reads mask functions that were made by transformers' own factories, which are told by their code.

    What each means is asked of it here, on a few indices, and not assumed: one that a version of transformers
    changed is no longer known, and evaluated like any other function.
    """

    def __init__(self) -> None:
        from transformers import masking_utils as hf

        ids, places = torch.tensor([[0, 0, 0, 1, 1, 2, 2]]), torch.tensor([[0, 1, 2, 0, 1, 0, 1]])
        examples: dict[str, Any] = {
            "causal": hf.causal_mask_function,
            "all": hf.bidirectional_mask_function,
            "window": hf.sliding_window_overlay(3),
            "both sides": hf.sliding_window_bidirectional_overlay(2),
            "chunk": hf.chunked_overlay(3, torch.tensor([1])),
            "packed": hf.packed_sequence_mask_function(ids),
            "and": hf.and_masks(hf.causal_mask_function, hf.sliding_window_overlay(2)),
        }
        remap = getattr(hf, "remap_positions_for_packed_sequence", None)  # newer than transformers 5.21
        if remap is not None:
            examples["positions"] = remap(hf.causal_mask_function, places)
        self.names: dict[CodeType, str] = {fn.__code__: name for name, fn in examples.items()}
        b, i, j = torch.zeros(1, 1, 1, dtype=torch.int64), torch.arange(7)[:, None], torch.arange(7)
        for name, fn in examples.items():
            terms = self.read(fn)
            told = None if terms is None else terms.visible(i, j)
            if told is None or not torch.equal(told.expand(1, 7, 7), fn(b, b, i, j).expand(1, 7, 7)):
                self.names = {code: known for code, known in self.names.items() if known != name}

    def read(self, fn: Any) -> Terms | None:
        """What `fn` says, or None where it is not made of functions that are known."""
        code = getattr(fn, "__code__", None)
        name = self.names.get(code) if code is not None else None
        if name is None:
            return None
        cells = fn.__closure__ or ()
        held = dict(zip(fn.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
        if name == "causal":
            return Terms(right=0)
        if name == "window":
            return Terms(left=int(held["sliding_window"]) - 1)
        if name == "both sides":
            width = int(held["sliding_window"])
            return Terms(left=width, right=width)
        if name == "chunk":
            size, padding = int(held["chunk_size"]), held["left_padding"]
            return Terms(groups=(lambda at: (at[None] - padding[:, None]) // size,))
        if name == "packed":
            ids = held["packed_sequence_mask"]
            return Terms(groups=(lambda at: ids[:, at],), packed=ids)
        if name == "positions":
            inner = self.read(held["mask_function"])
            if inner is None or inner.groups or inner.positions is not None:
                return None  # groups of positions are not groups of indices
            return replace(inner, positions=held["position_ids"])
        found: Terms | None = Terms()
        for part in held["mask_functions"] if name == "and" else ():
            terms = self.read(part)
            found = None if found is None or terms is None else found & terms
        return found


def _steady(terms: Terms) -> bool:
    """Whether positions go up by one inside each document, so that left and right mean the same of indices."""
    if terms.positions is None:
        return True
    if terms.packed is None:
        return False
    ids, positions = terms.packed, terms.positions
    inside = ids.diff(dim=-1) == 0
    return bool((positions.diff(dim=-1) == 1)[inside].all()) and bool((ids.diff(dim=-1) >= 0).all())


@dataclass(frozen=True, eq=False)
class Scene:
    """Everything transformers says of one mask. Query i stands at `q_offset + i`, key j at `kv_offset + j`."""

    batch: int
    queries: int
    keys: int
    q_offset: int
    kv_offset: int
    function: Callable[..., Any]
    padding: Tensor | None  # bool [batch, length], True = a token
    use_vmap: bool
    device: Any

    def tile(self, rows: range, cols: range) -> Tensor:
        """The mask as transformers' sdpa gets it, `[batch, 1, rows, cols]`, of some rows and columns."""
        from transformers.masking_utils import sdpa_mask

        made = sdpa_mask(
            batch_size=self.batch,
            q_length=len(rows),
            kv_length=len(cols),
            q_offset=self.q_offset + rows.start,
            kv_offset=self.kv_offset + cols.start,
            mask_function=self.function,
            attention_mask=self.padding,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=self.use_vmap,
            device=self.device,
        )
        return cast(Tensor, made)  # None only where it may be skipped

    @cached_property
    def whole(self) -> Tensor:
        """All of it: queries × keys, once for all layers of a pass."""
        return self.tile(range(self.queries), range(self.keys))


@dataclass(frozen=True, eq=False)
class Plan:
    """What `kizuki.attention` is told: only the keys `start … stop` count, and of those, what `mask` shows.

    A rule that can be told by numbers alone is told so (`causal`, `window`): such calls cost least. `known` is
    the mask as the layers of a pass share it.
    """

    start: int
    stop: int
    mask: Mask | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    known: Mask | None = None

    @classmethod
    def of_numbers(cls, numbers: Tensor, keys: int) -> Plan:
        """A mask that is no rule: booleans that broadcast to `[batch, heads, queries, keys]`, True = visible."""
        mask = masks.dense(numbers)
        return cls(0, keys, mask, known=mask)

    def options(self, shared: bool) -> dict[str, Any]:
        """The arguments of `kizuki.attention`; not `shared` where the call is traced or transformed."""
        return {
            "mask": self.known if shared else self.mask,
            "causal": self.causal,
            "window": self.window,
        }


class Known(Mask):
    """A rule whose key ranges are worked out by the first layer that asks, and kept for the others.

    Tracers and transforms do not know it: give them the rule itself.
    """

    def __init__(self, rule: Mask) -> None:
        self.rule, self.sign = rule, object()  # one pass's: what the rule was made of is not looked at again
        self._kept: dict[Any, Any] = {}

    def check(self, problem: Any, caller: str, values: bool = True) -> None:
        key = ("checked", *self._size(problem))
        if key not in self._kept:
            self.rule.check(problem, caller, values)
            self._kept[key] = True

    def visible(self, problem: Any, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.rule.visible(problem, b, h, i, j)

    def tile(self, problem: Any, rows: slice, cols: slice) -> Tensor:
        return self.rule.tile(problem, rows, cols)

    def tensors(self) -> list[Tensor]:
        return self.rule.tensors()

    def bounds(self, problem: Any) -> Bounds:
        key = ("bounds", *self._size(problem))
        if key not in self._kept:
            self._kept[key] = self.rule.bounds(problem).clamp(problem.keys)
        bounds: Bounds = self._kept[key]
        return bounds

    def residual(self, problem: Any) -> Mask | None:
        key = ("residual", *self._size(problem))
        if key not in self._kept:
            self._kept[key] = self.rule.residual(problem)
        rest: Mask | None = self._kept[key]
        return rest

    @staticmethod
    def _size(problem: Any) -> tuple[Any, ...]:
        return problem.lead, problem.queries, problem.keys, problem.device


def plan(scene: Scene, terms: Terms | None) -> Plan:
    """The plan of a scene: by its rule, or by its numbers where it has none."""
    made = None if terms is None or not _steady(terms) else _by_rule(scene, terms)
    return Plan.of_numbers(scene.whole, scene.keys) if made is None else made


def _by_rule(scene: Scene, terms: Terms) -> Plan | None:
    """The plan of `terms`; None where no rule of kizuki's says the same."""
    queries, left, right = scene.queries, terms.left, terms.right
    own = scene.q_offset - scene.kv_offset  # where query 0 stands among the keys
    end = own + queries
    start, stop = 0, scene.keys
    if right is not None:
        stop = min(stop, end + right)  # in a static cache there is room behind the last query
    if left is not None:
        start = max(start, own - left)
    seen = _seen(scene)
    if seen is not None and start < stop:
        some = seen[:, start:stop].any(0).nonzero()
        start = start + int(some[0]) if len(some) else stop
    if start >= stop:
        nothing = masks.keys(torch.zeros(scene.keys, dtype=torch.bool, device=scene.device))
        return Plan(0, scene.keys, nothing, known=nothing)
    # A side that cuts nothing off any query is none; most queries of a decoding model have neither.
    right = None if right is None or own + right >= stop - 1 else right
    left = None if left is None or end - 1 - left <= start else left
    if (left, right) != (None, None) and stop != end:
        return None
    rules: list[Mask] = []
    for group in terms.groups:
        ids = group(torch.arange(queries, device=scene.device) + scene.q_offset)
        key_ids = group(torch.arange(start, stop, device=scene.device) + scene.kv_offset)
        if not bool((ids == ids[:, :1]).all() & (key_ids == ids[:, :1]).all()):
            rules.append(masks.documents(ids=ids, key_ids=key_ids))
    if seen is not None and not bool(seen[:, start:stop].all()):
        rules.append(masks.keys(seen[:, start:stop]))
    causal, window = right == 0, None if left is None and right in (None, 0) else (left, right)
    if not rules and queries == stop - start:
        return Plan(start, stop, causal=causal, window=window)
    if causal:
        rules.append(masks.causal("lower_right"))
    if window is not None:
        rules.append(masks.window(*window, align="lower_right"))
    joined = rules[0] if rules else None
    for rule in rules[1:]:
        joined = rule if joined is None else joined & rule
    return Plan(start, stop, joined, known=None if joined is None else Known(joined))


def _seen(scene: Scene) -> Tensor | None:
    """Which keys are tokens, bool `[batch, keys]`: what lies behind the given padding is none."""
    padding = scene.padding
    if padding is None:
        return None
    padding = padding[:, scene.kv_offset : scene.kv_offset + scene.keys]
    return torch.nn.functional.pad(padding, (0, scene.keys - padding.shape[1]))


class RuleMask(Tensor):
    """A mask's shape, `[batch, 1, queries, keys]`, and the rule it stands for; no memory.

    Models hand their masks on and now and then slice them, which costs nothing and is still a rule. Other operations
    get the boolean numbers that sdpa would have been given, True = visible, computed when first asked for. A model
    that reads its mask as numbers to add, or as what to hide, does its attention by itself and would go wrong in
    silence: adding the mask, filling scores by it, making floats of it and writing into it are refused, also of
    what is left of it after other operations.
    """

    scene: Scene | None  # None where only numbers are left
    plan: Plan | None
    rows: range
    cols: range
    _numbers: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, scene: Scene, plan: Plan, rows: range | None = None, cols: range | None = None) -> RuleMask:
        """All of a scene, or some of its rows and columns."""
        rows = range(scene.queries) if rows is None else rows
        cols = range(scene.keys) if cols is None else cols
        made = cls._shaped((scene.batch, 1, len(rows), len(cols)), scene.device)
        made.scene, made.plan, made.rows, made.cols, made._numbers = scene, plan, rows, cols, None
        return made

    @classmethod
    def _of_numbers(cls, numbers: Tensor) -> RuleMask:
        made = cls._shaped(tuple(numbers.shape), numbers.device)
        made.scene, made.plan, made.rows, made.cols, made._numbers = None, None, range(0), range(0), numbers
        return made

    @classmethod
    def _shaped(cls, shape: tuple[int, ...], device: Any) -> RuleMask:
        made: RuleMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        return made

    def numbers(self) -> Tensor:
        """What it stands for, as a plain boolean tensor."""
        if self._numbers is None:
            scene = cast(Scene, self.scene)
            whole = (self.rows, self.cols) == (range(scene.queries), range(scene.keys))
            self._numbers = scene.whole if whole else scene.tile(self.rows, self.cols)
        return self._numbers

    def plan_for(self, keys: int) -> Plan | None:
        """The plan, where this is all rows of its scene and all the keys that can be seen; else None."""
        scene, plan = self.scene, self.plan
        if scene is None or plan is None:
            return None
        whole = self.rows == range(scene.queries) and self.cols == range(keys) and plan.stop <= keys
        return plan if whole else None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RuleMask({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, RuleMask):
            kept = _kept(func, first, args[1:])
            if kept is not None:
                return kept
        _refuse(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(RuleMask, RuleMask.numbers, (args, kwargs))
        made = func(*args, **kwargs)
        still = isinstance(made, Tensor) and made.dtype is torch.bool and func.overloadpacket not in _READS
        return RuleMask._of_numbers(made) if still else made


_aten = torch.ops.aten
_ADDS = {_aten.add, _aten.add_, _aten.sub, _aten.sub_, _aten.rsub, _aten.mul, _aten.mul_}
_FILLS = {_aten.masked_fill, _aten.masked_fill_}
_READS = {_aten.any, _aten.all}  # what a reduction gives is no mask any more


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for what a model does that takes its mask for something it is not."""
    packet = func.overloadpacket
    does = None
    if packet in _ADDS:
        does = "adds its mask to the scores"
    elif packet in _FILLS and isinstance(args[1], RuleMask):
        does = "fills its scores where its mask says visible"
    elif packet is _aten._to_copy and getattr(kwargs.get("dtype"), "is_floating_point", False):
        does = "makes numbers of its mask"
    elif func._schema.is_mutable and isinstance(args[0], RuleMask):
        does = "writes into its mask"
    if does is not None:
        raise OptionError(
            f"kizuki: the model {does} by itself, so its attention does not go through transformers' attention "
            'interface, where attn_implementation="kizuki" takes effect; load it with attn_implementation="eager"'
        )


def _kept(func: Any, mask: RuleMask, args: tuple[Any, ...]) -> RuleMask | None:
    """What is still a rule after an operation: a copy that shares it, or a slice of rows or columns."""
    scene, plan = mask.scene, mask.plan
    if scene is None or plan is None:
        return None
    rows, cols = mask.rows, mask.cols
    if func in (_aten.detach.default, _aten.alias.default):
        pass
    elif func is _aten.expand.default and len(args[0]) == 4:
        if any(n not in (-1, m) for n, m in zip(args[0], mask.shape, strict=True)):
            return None
    elif func is _aten.slice.Tensor:
        given: tuple[Any, ...] = (*args, *(0, None, None, 1)[len(args) :])
        dim, start, stop, step = given
        whole = range(mask.shape[dim])
        if step != 1 or (dim % 4 < 2 and whole[start:stop] != whole):
            return None  # but all of an axis is the same mask: `m[:, :, :, :n]` slices the first two in torch 2.6
        if dim % 4 == 2:
            rows = rows[start:stop]
        elif dim % 4 == 3:
            cols = cols[start:stop]
    else:
        return None
    return RuleMask.of(scene, plan, rows, cols)
