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
    Where,
    Window,
    check_align,
    dense_mask,
)

__all__ = ["Bounds", "Mask", "causal", "dense", "documents", "keys", "lengths", "where", "window"]


def causal(align: Align | None = None) -> Mask:
    """Query i sees the keys up to its own position: `j <= i` (upper_left) or `j <= i + keys − queries` (lower_right).

    With as many queries as keys the two agree and `align` may be left out; otherwise it must be named:
    "lower_right" is what a KV cache means. Raises OptionError at `attend` when it is missing.
    """
    check_align("causal", align)
    return Causal(align)


def window(left: int | None, right: int | None, align: Align | None = None) -> Mask:
    """Query i at position p sees the keys `p − left <= j <= p + right`; None = unlimited on that side.

    `left` and `right` count the keys beyond the query's own: `window(3, 0)` shows 4 keys.
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
    """
    if sum(given is not None for given in (lengths, ids, offsets)) != 1:
        raise OptionError(
            "kizuki.masks.documents: give one of lengths, ids= and offsets=, not several and not none"
        )
    if key_offsets is not None and (offsets is None or key_ids is not None):
        raise OptionError("kizuki.masks.documents: key_offsets= goes with offsets= alone")
    if offsets is not None:
        lengths = _between("offsets", offsets)
        if key_offsets is not None:
            counts = _between("key_offsets", key_offsets)
            if counts.numel() != lengths.numel():
                raise ShapeError(
                    f"kizuki.masks.documents: key_offsets has {counts.numel()} documents but offsets "
                    f"{lengths.numel()}; give every document both, empty ones too"
                )
            key_ids = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    if lengths is not None:
        counts = torch.as_tensor(lengths)
        if counts.numel() == 0:
            counts = counts.to(torch.int64)
        if counts.dim() != 1 or counts.dtype.is_floating_point or counts.dtype is torch.bool:
            raise KizukiTypeError(
                "kizuki.masks.documents: lengths must be a list of whole numbers, one a document"
            )
        if counts.numel() and int(counts.min()) < 0:
            raise OptionError(
                f"kizuki.masks.documents: lengths holds {int(counts.min())} but a length must be >= 0"
            )
        ids = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    made: list[Tensor] = []
    for name, given in (("ids", ids), ("key_ids", ids if key_ids is None else key_ids)):
        if (
            not isinstance(given, Tensor)
            or given.dtype.is_floating_point
            or given.dtype is torch.bool
            or given.dim() < 1
        ):
            raise KizukiTypeError(
                f"kizuki.masks.documents: {name} must be an integer tensor, [length] or [batch, length]"
            )
        made.append(given.to(torch.int64, copy=True))  # what is written into it later changes nothing
    return Documents(made[0], made[1])


def _between(name: str, offsets: Sequence[int] | Tensor) -> Tensor:
    """The lengths between offsets that begin at 0 and never go back."""
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
    if int(places[0]) != 0:
        raise OptionError(
            f"kizuki.masks.documents: {name} begins with {int(places[0])} but must begin with 0"
        )
    counts = places.to(torch.int64).diff()
    if counts.numel() and int(counts.min()) < 0:
        at = int(counts.argmin())
        raise OptionError(
            f"kizuki.masks.documents: {name} goes back from {int(places[at])} to {int(places[at + 1])}; documents must "
            "not overlap, so no offset may be below the one before"
        )
    return counts


def keys(seen: Tensor) -> Mask:
    """The same visible keys for every query: `seen` is boolean, `[keys]` or `[batch, keys]`, True = visible."""
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
    """A boolean tensor that broadcasts to `[..., heads, queries, keys]`, True = visible; stride 0 is kept."""
    return dense_mask(tensor, "kizuki.masks.dense")


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
