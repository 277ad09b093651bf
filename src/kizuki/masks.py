"""The mask algebra: rules that say which keys a query can see. True means visible, everywhere.

A mask is a small frozen description, combined with `&`, `|` and `~`. It is never expanded to
queries × keys: a backend asks for its `bounds` (per query, the range of keys outside which nothing is
visible: O(n)), and evaluates what the bounds do not say (`residual`) on one tile at a time.

    >>> import torch, kizuki
    >>> q = k = torch.ones(1, 1, 4, 2)
    >>> kizuki.attend(q, k, mask=kizuki.masks.causal() & kizuki.masks.window(1, 0))[0, 0, 3]
    tensor([0.0000, 0.0000, 0.5000, 0.5000])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import KizukiTypeError, OptionError, ShapeError
from .mask import (
    FAR,
    Align,
    Bounds,
    Causal,
    Documents,
    Keys,
    Lengths,
    Mask,
    Not,
    Packed,
    Where,
    Window,
    as_mask,
    check_align,
    check_offsets,
    dense_mask,
    readable,
)

__all__ = ["Bounds", "Mask", "causal", "dense", "documents", "invert", "keys", "lengths", "where", "window"]


def causal(align: Align | None = None) -> Mask:
    """Query i sees the keys up to its own position: `j <= i` (upper_left) or `j <= i + keys − queries` (lower_right).

    With as many queries as keys the two agree and `align` may be left out; otherwise it must be named:
    "lower_right" is what a KV cache means. Raises OptionError at `attend` when it is missing.

    >>> import torch, kizuki
    >>> new, all_keys = torch.zeros(2, 1), torch.zeros(4, 1)  # two new queries behind two cached keys
    >>> kizuki.attend(new, all_keys, mask=kizuki.masks.causal("lower_right"))[0]
    tensor([0.3333, 0.3333, 0.3333, 0.0000])
    """
    check_align("causal", align)
    return Causal(align)


def window(left: int | None, right: int | None, align: Align | None = None) -> Mask:
    """Query i at position p sees the keys `p − left <= j <= p + right`; None = unlimited on that side.

    `left` and `right` count the keys beyond the query's own: `window(3, 0)` shows 4 keys.

    >>> import torch, kizuki
    >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
    >>> kizuki.attend(x, x, mask=kizuki.masks.window(1, 0))[3]
    tensor([0.0000, 0.0000, 0.5000, 0.5000])
    """
    check_align("window", align)
    for name, n in (("left", left), ("right", right)):
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
            raise OptionError(
                f"kizuki.masks.window: {name} is {n!r} but must be a whole number >= 0, the keys visible "
                "beyond the query's "
                "own; None means unlimited"
            )
    # Beyond any position there is; larger numbers would overflow when a position is added.
    left, right = (None if n is None else min(n, FAR) for n in (left, right))
    return Window(left, right, align)


def documents(
    lengths: Sequence[int] | Tensor | None = None,
    *,
    ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    offsets: Sequence[int] | Tensor | None = None,
    key_offsets: Sequence[int] | Tensor | None = None,
) -> Mask:
    """Packed documents: a query sees the keys of its own document only.

    `lengths` are the documents' lengths in order (empty ones allowed); or `offsets` where each begins and the
    last ends, `[0, 3, 3, 10]` for lengths 3, 0 and 7; or `ids` gives one integer a token, `[queries]` or
    `[batch, queries]`. `key_ids` and `key_offsets` say the same of the keys when they are not the queries.

    The numbers are checked here; inside torch.compile, torch.export and torch.func when attention runs.

    >>> import torch, kizuki
    >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
    >>> kizuki.attend(x, x, mask=kizuki.masks.documents([3, 1])).dense()
    tensor([[0.3333, 0.3333, 0.3333, 0.0000],
            [0.3333, 0.3333, 0.3333, 0.0000],
            [0.3333, 0.3333, 0.3333, 0.0000],
            [0.0000, 0.0000, 0.0000, 1.0000]])
    """
    if sum(given is not None for given in (lengths, ids, offsets)) != 1:
        raise OptionError(
            "kizuki.masks.documents: give one of lengths, ids= and offsets=, not several and not none"
        )
    if key_offsets is not None and (offsets is None or key_ids is not None):
        raise OptionError("kizuki.masks.documents: key_offsets= goes with offsets= alone")
    named = "lengths" if offsets is None else "offsets"
    places = None if ids is not None else _sums(lengths) if offsets is None else _places("offsets", offsets)
    key_places = None if key_offsets is None else _places("key_offsets", key_offsets)
    if places is not None and key_places is not None and key_places.numel() != places.numel():
        raise ShapeError(
            f"kizuki.masks.documents: key_offsets has {key_places.numel() - 1} documents but offsets "
            f"{places.numel() - 1}; give every document both, empty ones too"
        )
    if key_ids is not None:
        key_ids = _ids("key_ids", key_ids)
    if places is not None:
        own_keys = places if key_places is None else key_places
        if not (readable(places) and readable(own_keys)):
            return Packed(named, places, own_keys if key_ids is None else key_ids, key_ids is not None)
        check_offsets(named, places)
        ids = _numbers(places)
        if key_places is not None:
            check_offsets("key_offsets", key_places)
            key_ids = _numbers(key_places)
    ids = _ids("ids", ids)
    return Documents(ids, ids.clone() if key_ids is None else key_ids)


def _ids(name: str, ids: Any) -> Tensor:
    """One id a token, a copy: what is written into the given tensor later changes nothing."""
    if not isinstance(ids, Tensor) or ids.dtype.is_floating_point or ids.dtype is torch.bool or ids.dim() < 1:
        raise KizukiTypeError(
            f"kizuki.masks.documents: {name} must be an integer tensor, [length] or [batch, length]"
        )
    return ids.to(torch.int64, copy=True)


def _numbers(places: Tensor) -> Tensor:
    """The document of each token, counted from 0."""
    return torch.repeat_interleave(torch.arange(places.numel() - 1, device=places.device), places.diff())


def _sums(lengths: Any) -> Tensor:
    """Where documents of these lengths begin and the last ends."""
    counts = torch.as_tensor(lengths)
    if counts.numel() == 0:  # [] comes as float32
        counts = counts.to(torch.int64)
    if counts.dim() != 1 or counts.dtype.is_floating_point or counts.dtype is torch.bool:
        raise KizukiTypeError(
            "kizuki.masks.documents: lengths must be a list of whole numbers, one a document"
        )
    ends = counts.to(torch.int64).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])


def _places(name: str, offsets: Any) -> Tensor:
    """Offsets as int64, a copy."""
    places = torch.as_tensor(offsets)
    if (
        places.dim() != 1
        or not places.numel()
        or places.dtype.is_floating_point
        or places.dtype is torch.bool
    ):
        raise KizukiTypeError(
            f"kizuki.masks.documents: {name} must be whole numbers, [documents + 1], the first 0 and the last the end"
        )
    return places.to(torch.int64, copy=True)


def keys(seen: Tensor) -> Mask:
    """The same visible keys for every query: `seen` is boolean, `[keys]` or `[batch, keys]`, True = visible.

    >>> import torch, kizuki
    >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
    >>> kizuki.attend(x, x, mask=kizuki.masks.keys(torch.tensor([True, True, False, True])))[0]
    tensor([0.3333, 0.3333, 0.0000, 0.3333])
    """
    if not isinstance(seen, Tensor) or seen.dtype is not torch.bool or seen.dim() < 1:
        kind = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
        raise KizukiTypeError(
            f"kizuki.masks.keys: got {kind} but needs a boolean tensor [keys] or [batch, keys], True = "
            "visible; call .bool()"
        )
    return Keys(seen.clone())  # what is written into it later changes nothing


def lengths(
    query: int | Sequence[int] | Tensor | None = None, key: int | Sequence[int] | Tensor | None = None
) -> Mask:
    """Only the first `key` keys (and the first `query` queries) of each batch entry are real; the rest see nothing.

    Each is one whole number or `[batch]` of them.

    >>> import torch, kizuki
    >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
    >>> kizuki.attend(x, x, mask=kizuki.masks.lengths(key=2))[0]
    tensor([0.5000, 0.5000, 0.0000, 0.0000])
    """
    if query is None and key is None:
        raise OptionError("kizuki.masks.lengths: give query=, key= or both")
    made: list[Tensor | None] = []
    for name, given in (("query", query), ("key", key)):
        if given is None:
            made.append(None)
            continue
        tensor = torch.as_tensor(given)
        if tensor.numel() == 0:  # [] comes as float32
            tensor = tensor.to(torch.int64)
        if tensor.dtype.is_floating_point or tensor.dtype is torch.bool:
            raise KizukiTypeError(
                f"kizuki.masks.lengths: {name} is {tensor.dtype} but must hold whole numbers"
            )
        made.append(tensor.to(torch.int64, copy=True))
    return Lengths(made[0], made[1])


def dense(tensor: Tensor) -> Mask:
    """A boolean tensor that broadcasts to `[..., heads, queries, keys]`, True = visible; stride 0 is kept.

    >>> import torch, kizuki
    >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
    >>> kizuki.attend(x, x, mask=kizuki.masks.dense(torch.eye(4, dtype=torch.bool)))[2]
    tensor([0., 0., 1., 0.])
    """
    return dense_mask(tensor, "kizuki.masks.dense")


def invert(mask: Mask | Tensor) -> Mask:
    """`~mask`: a query sees what it did not. For inside torch.compile, whose tracer knows `&` and `|` but not `~`.

    >>> import torch, kizuki
    >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
    >>> kizuki.attend(x, x, mask=kizuki.masks.invert(kizuki.masks.causal()))[0]
    tensor([0.0000, 0.3333, 0.3333, 0.3333])
    """
    return Not(as_mask(mask, "kizuki.masks.invert"))


def where(fn: Callable[[Any, Any, Any, Any], Any]) -> Mask:
    """`fn(b, h, i, j)` says whether query i of batch b, head h sees key j.

    On CPU tensors a plain Python function is compiled into the kernel and called with whole numbers: it may use
    `if`, `math`, most of torch's elementwise functions, numbers, and tensors or arrays it indexes. One that
    cannot be compiled, and any on another device, is called with int64 tensors that broadcast against each other, on
    one tile at a time, and returns a boolean tensor. `A.plan()` says which. What it refers to is looked at
    whenever A is read.

        >>> import torch, kizuki
        >>> q = k = torch.ones(1, 1, 4, 2)
        >>> odd = kizuki.masks.where(lambda b, h, i, j: j % 2 == 1 and j <= i)
        >>> kizuki.attend(q, k, mask=odd)[0, 0, 3]
        tensor([0.0000, 0.5000, 0.0000, 0.5000])
    """
    if not callable(fn):
        raise KizukiTypeError(
            f"kizuki.masks.where: fn is a {type(fn).__name__} but must be callable as fn(b, h, i, j)"
        )
    return Where(fn)
