"""Attention on keys and values that lie in pages, found through a block table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import KizukiTypeError, OptionError, ShapeError, show
from ..mask import Bounds, Mask, as_mask
from ..operator import AttentionMatrix, attend
from ..problem import Problem


@dataclass(frozen=True, eq=False)
class Ranges(Mask):
    """Query i of batch entry b sees the keys first[b, i] <= j < stop[b, i]."""

    first: Tensor
    stop: Tensor

    def visible(self, problem: Problem, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= self.first[b, i]) & (j < self.stop[b, i])

    def bounds(self, problem: Problem) -> Bounds:
        return Bounds(self.first[:, None], self.stop[:, None], exact=True)


def newest(lengths: Tensor, queries: int, window: int | None) -> Ranges:
    """The last `queries` positions of sequences of these lengths, each seeing itself and what is before it.

    With a window w, only the last w keys up to its own.
    """
    stop = lengths[:, None] - queries + torch.arange(queries, device=lengths.device) + 1
    first = torch.zeros_like(stop) if window is None else (stop - window).clamp(min=0)
    return Ranges(first, stop)


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    window: int | None = None,
    mask: Mask | Tensor | None = None,
    backend: str = "auto",
    **options: Any,
) -> Tensor:
    """Attention of the newest queries on a cache in pages: `[batch, heads, queries, value_dim]`.

    Key j of sequence b lies at `key_pages[table[b, j // page], :, j % page]`. Query i of n stands at position
    lengths[b] − n + i and sees every key up to its own position, with `window=w` the last w of them.

    Arguments:
        query: `[batch, heads, queries, head_dim]`, the last positions of every sequence.
        key_pages, value_pages: `[pages, kv_heads, page, head_dim | value_dim]`, shared by all sequences.
        table: integer `[batch, most_pages]`, the pages of each sequence in order; entries past a sequence's
            length are never read and may be anything.
        lengths: integer `[batch]`, the keys of each sequence, the queries' own among them.
        window, mask, scale, softcap, sinks, bias: as `kizuki.attention`; a mask or bias counts keys from 0 to
            the longest sequence's length.

    On a CPU the pages are read where they lie (few queries at a time: 16 rows that share a key head), nothing is
    gathered, and the bits are those of the same keys lying in one piece. Elsewhere, with head_dim not a multiple
    of the vector width, or where a gradient is wanted, keys and values are gathered first: O(keys) memory.

    Raises ShapeError, OptionError or KizukiTypeError in one line before anything is read: a page out of range, a
    length past the table, more queries than keys.

        >>> import torch
        >>> from kizuki.nn import paged_attention
        >>> pages = torch.randn(3, 1, 2, 8)  # 3 pages of 2 keys
        >>> table = torch.tensor([[2, 0]])
        >>> paged_attention(torch.randn(1, 1, 1, 8), pages, pages, table, torch.tensor([3])).shape
        torch.Size([1, 1, 1, 8])
    """
    table, lengths = check(query, key_pages, value_pages, table, lengths, window, "kizuki.nn.paged_attention")
    rule: Mask = newest(lengths, query.shape[-2], window)
    if mask is not None:
        rule = rule & as_mask(mask, "kizuki.nn.paged_attention")
    longest = int(lengths.max()) if lengths.numel() else 0
    # Keys of the right shape that are one key over and over: only where they lie is different.
    shape = (query.shape[0], key_pages.shape[1], longest)
    some = (key_pages[:1, :, :1], value_pages[:1, :, :1])
    if key_pages.shape[0] and key_pages.shape[2]:
        key, value = (t.expand(*shape, t.shape[-1]) for t in some)
        A = attend(query, key, mask=rule, backend=backend, **options)
        if _native(A, value, key_pages, value_pages):
            from ..cpu import paged

            return paged.forward(A.problem, key_pages, value_pages, table)
    key, value = (gather(pages, table, longest) for pages in (key_pages, value_pages))
    return cast(Tensor, attend(query, key, mask=rule, backend=backend, **options) @ value)


def _native(A: AttentionMatrix, value: Tensor, *pages: Tensor) -> bool:
    if A.backend.name != "cpu":
        return False
    tensors = (A.problem.query, A.problem.bias, A.problem.sinks, *pages)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return False
    from ..cpu import paged

    return paged.reads(A.problem, value)


def gather(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """The keys of every sequence in one piece, `[batch, kv_heads, length, width]`; past a sequence's end, anything."""
    page = pages.shape[2]
    count = -(-length // page) if page else 0
    found = pages[
        table[:, :count].clamp(0, max(0, pages.shape[0] - 1))
    ]  # [batch, count, kv_heads, page, width]
    whole = found.transpose(1, 2).reshape(table.shape[0], pages.shape[1], count * page, pages.shape[-1])
    return whole[:, :, :length]


def check(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    window: int | None,
    caller: str,
) -> tuple[Tensor, Tensor]:
    """Everything a raw address could be led astray by; the table and the lengths as int64."""
    for name, t, axes in (
        ("query", query, "[batch, heads, queries, head_dim]"),
        ("key_pages", key_pages, "[pages, kv_heads, page, head_dim]"),
        ("value_pages", value_pages, "[pages, kv_heads, page, value_dim]"),
    ):
        if not isinstance(t, Tensor):
            raise KizukiTypeError(f"{caller}: {name} is a {type(t).__name__} but must be a tensor {axes}")
        if t.dim() != 4:
            raise ShapeError(f"{caller}: {name} has shape {show(t)} but must be {axes}")
    if key_pages.shape[:3] != value_pages.shape[:3]:
        raise ShapeError(
            f"{caller}: value_pages has shape {show(value_pages)} but key_pages {show(key_pages)}; pages, kv_heads and "
            "page must be equal"
        )
    batch = query.shape[0]
    made = []
    for name, t, dims in (("table", table, 2), ("lengths", lengths, 1)):
        if not isinstance(t, Tensor) or t.dtype.is_floating_point or t.dtype is torch.bool:
            kind = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise KizukiTypeError(f"{caller}: {name} is {kind} but must be an integer tensor")
        if t.dim() != dims or t.shape[0] != batch:
            shape = f"[{batch}, most_pages]" if dims == 2 else f"[{batch}]"
            raise ShapeError(f"{caller}: {name} has shape {show(t)} but must be {shape}, one row a sequence")
        made.append(t.to(device=query.device, dtype=torch.int64).contiguous())
    table, lengths = made
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise OptionError(f"{caller}: window is {window!r} but must be a whole number >= 1, or None")
    if not batch:
        return table, lengths
    page, pages = key_pages.shape[2], key_pages.shape[0]
    low, high, room = int(lengths.min()), int(lengths.max()), table.shape[1] * page
    if low < query.shape[2]:
        raise OptionError(
            f"{caller}: a sequence has {low} keys but there are {query.shape[2]} queries; the queries' own keys come "
            "first into the cache"
        )
    if high > room:
        raise OptionError(
            f"{caller}: lengths goes up to {high} but table has {table.shape[1]} pages of {page} keys, {room}; give it "
            "more columns"
        )
    used = torch.arange(table.shape[1], device=table.device) * page < lengths[:, None]
    if bool((used & ((table < 0) | (table >= pages))).any()):
        wrong = int(table[used & ((table < 0) | (table >= pages))][0])
        raise OptionError(f"{caller}: table holds page {wrong} but there are pages 0 … {pages - 1}")
    return table, lengths
