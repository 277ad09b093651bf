"""Attention on keys and values that lie in pages, found through a block table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from .. import autograd
from ..errors import KizukiTypeError, OptionError, ShapeError, show
from ..mask import FAR, Bounds, Mask, as_mask
from ..operator import AttentionMatrix, make
from ..problem import DTYPES, Problem, check_value

# What may go along; causal= and window= may not: where a query stands is known.
OPTIONS = ("bias", "scale", "softcap", "sinks", "score", "backend")


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
    first = torch.zeros_like(stop) if window is None else (stop - min(window, FAR)).clamp(min=0)
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
    **options: Any,
) -> Tensor:
    """Attention of the newest queries on a cache in pages: `[batch, heads, queries, value_dim]`.

    Key j of sequence b lies at `key_pages[table[b, j // page], :, j % page]`. Query i of n stands at position
    lengths[b] − n + i and sees every key up to its own position, with `window=w` the last w of them.

    Arguments:
        query: `[batch, heads, queries, head_dim]`, the last positions of every sequence.
        key_pages, value_pages: `[pages, kv_heads, page, head_dim | value_dim]`, shared by all sequences, any strides.
        table: integer `[batch, most_pages]`, the pages of each sequence in order; entries past a sequence's
            length stand for nothing and may be anything.
        lengths: integer `[batch]`, the keys of each sequence, the queries' own among them.
        window, mask, bias, scale, softcap, sinks, score, backend: as `kizuki.attention`; a mask or bias counts
            keys from 0 to the longest sequence's length.

    On a CPU pages are read where they lie: by few queries (16 rows that share a key head) as they are, by more
    through one pass of packing, as keys in one piece are; the bits are those of the same keys in one piece.
    Elsewhere, and where a derivative is asked for, keys and values are gathered first: O(keys) memory.

    Raises ShapeError, OptionError or KizukiTypeError in one line before anything is read: a page out of range, a
    length past the table, more queries than keys, other dtypes or devices.

    Time: that of `kizuki.attention` on the visible keys, and O(table) to check it. Source: Kwon et al. 2023
    (PagedAttention), section 4.

        >>> import torch
        >>> from kizuki.nn import paged_attention
        >>> pages = torch.randn(3, 1, 2, 8)  # 3 pages of 2 keys
        >>> table = torch.tensor([[2, 0]])
        >>> paged_attention(torch.randn(1, 1, 1, 8), pages, pages, table, torch.tensor([3])).shape
        torch.Size([1, 1, 1, 8])
    """
    if torch.compiler.is_compiling():  # addresses have no place in a graph: one break around the call
        here = torch.compiler.disable(paged_attention)
        return cast(
            Tensor,
            here(query, key_pages, value_pages, table, lengths, window=window, mask=mask, **options),
        )
    caller = "kizuki.nn.paged_attention"
    table, lengths, longest = check(query, key_pages, value_pages, table, lengths, window, caller)
    rule = rule_of(lengths, query.shape[-2], window, mask, caller)
    return mix(caller, query, key_pages, value_pages, table, longest, rule, options)


def paged_attend(
    query: Tensor,
    key_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    window: int | None = None,
    mask: Mask | Tensor | None = None,
    **options: Any,
) -> AttentionMatrix:
    """The weights of `paged_attention` as a matrix to look at, `[batch, heads, queries, longest length]`.

    Arguments and errors are those of `paged_attention`. The keys are gathered: O(keys) memory. Key j of A is
    position j of its sequence.

        >>> import torch
        >>> from kizuki.nn import paged_attend
        >>> pages = torch.zeros(3, 1, 2, 8)
        >>> A = paged_attend(torch.zeros(1, 1, 1, 8), pages, torch.tensor([[2, 0]]), torch.tensor([4]))
        >>> A[0, 0, 0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    caller = "kizuki.nn.paged_attend"
    table, lengths, longest = check(query, key_pages, key_pages, table, lengths, window, caller)
    rule = rule_of(lengths, query.shape[-2], window, mask, caller)
    check_options(caller, options)
    return make(caller, query, gather(key_pages, table, longest), mask=rule, **options)


def rule_of(
    lengths: Tensor, queries: int, window: int | None, mask: Mask | Tensor | None, caller: str
) -> Mask:
    """What the newest queries see, and of that what `mask` leaves."""
    rule = newest(lengths, queries, window)
    return rule if mask is None else rule & as_mask(mask, caller)


def mix(
    caller: str,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    table: Tensor,
    longest: int,
    rule: Mask,
    options: dict[str, Any],
) -> Tensor:
    """`paged_attention` once table and lengths are known to be right."""
    check_options(caller, options)
    pools = (key_pages, value_pages)
    if not longest:
        key, value = (gather(pages, table, 0) for pages in pools)
        return cast(Tensor, make(caller, query, key, mask=rule, **options) @ value)
    # Keys of the right shape that are one key over and over: only where they lie is different.
    key, value = (pages[:1, :, :1].expand(query.shape[0], -1, longest, -1) for pages in pools)
    A = make(caller, query, key, mask=rule, **options)
    check_value(A.problem, value, "value_pages", caller)
    if A.backend.name == "cpu" and not autograd.wanted(A.problem, value):
        from ..cpu import paged

        return paged.forward(A.problem, key_pages.resolve_neg(), value_pages.resolve_neg(), table)
    key, value = (gather(pages, table, longest) for pages in pools)
    return cast(Tensor, AttentionMatrix(replace(A.problem, key=key), A.backend) @ value)


def check_options(caller: str, options: dict[str, Any]) -> None:
    """Raise where an option is none that fits the newest queries of a cache."""
    for name in options:
        if name in ("causal", "window"):
            raise OptionError(
                f"{caller}: {name} is {options[name]!r} but each query already sees the keys up to its own position; "
                "leave it out (a window is what the cache is made with)"
            )
        if name not in OPTIONS:
            raise OptionError(f"{caller}: there is no option {name!r}; there are mask, {', '.join(OPTIONS)}")


def gather(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """The keys of every sequence in one piece, `[batch, kv_heads, length, width]`; past a sequence's end, anything."""
    page = pages.shape[2]
    count = -(-length // page) if page else 0
    found = pages[table[:, :count]]  # [batch, count, kv_heads, page, width]
    shape = (table.shape[0], pages.shape[1], count * page, pages.shape[-1])
    return found.transpose(1, 2).reshape(shape)[:, :, :length]


def check(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    window: int | None,
    caller: str,
) -> tuple[Tensor, Tensor, int]:
    """Everything a raw address could be led astray by; the table and the lengths as int64, and the longest.

    Every page of that table is in the pool, also where no sequence uses it.
    """
    if torch._C._are_functorch_transforms_active():
        raise OptionError(
            f"{caller}: a transform of torch.func cannot follow a block table; call it outside, or give keys in one "
            "piece to kizuki.attention"
        )
    for name, t, axes in (
        ("query", query, "[batch, heads, queries, head_dim]"),
        ("key_pages", key_pages, "[pages, kv_heads, page, head_dim]"),
        ("value_pages", value_pages, "[pages, kv_heads, page, value_dim]"),
    ):
        if not isinstance(t, Tensor):
            raise KizukiTypeError(f"{caller}: {name} is a {type(t).__name__} but must be a tensor {axes}")
        if t.dim() != 4:
            raise ShapeError(f"{caller}: {name} has shape {show(t)} but must be {axes}")
        if t.dtype not in DTYPES or t.dtype is not query.dtype:
            want = "float16, bfloat16, float32 or float64" if t is query else f"that of query, {query.dtype}"
            raise KizukiTypeError(f"{caller}: {name} has dtype {t.dtype} but must have {want}; convert it")
        if t.device != query.device:
            raise KizukiTypeError(
                f"{caller}: {name} is on {t.device} but query is on {query.device}; move one of them"
            )
    if key_pages.shape[:3] != value_pages.shape[:3]:
        raise ShapeError(
            f"{caller}: value_pages has shape {show(value_pages)} but key_pages {show(key_pages)}; pages, kv_heads and "
            "page must be equal"
        )
    heads, kv_heads = query.shape[1], key_pages.shape[1]
    if query.shape[3] != key_pages.shape[3]:
        raise ShapeError(
            f"{caller}: key_pages has head_dim {key_pages.shape[3]} but query has {query.shape[3]}; give both the same "
            f"last axis (query {show(query)}, key_pages {show(key_pages)})"
        )
    shared = heads == 1 and kv_heads > 1  # one query head for all of them
    if heads != kv_heads and not shared and (not kv_heads or heads % kv_heads):
        raise ShapeError(
            f"{caller}: key_pages and value_pages have {kv_heads} heads but query has {heads}; their number must "
            f"divide it (query {show(query)}, key_pages {show(key_pages)})"
        )
    batch = query.shape[0]
    made = []
    for name, t, dims in (("table", table, 2), ("lengths", lengths, 1)):
        whole = isinstance(t, Tensor) and not (t.is_floating_point() or t.is_complex())
        if not whole or t.dtype is torch.bool:
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
        return table, lengths, 0
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
    outside = (table < 0) | (table >= pages)
    if bool(outside.any()):
        wrong = outside & (torch.arange(table.shape[1], device=table.device) * page < lengths[:, None])
        if bool(wrong.any()):
            raise OptionError(
                f"{caller}: table holds page {int(table[wrong][0])} but key_pages has {pages} pages; "
                + (
                    f"entries that are used must lie in 0 … {pages - 1}"
                    if pages
                    else "give it the pages in use"
                )
            )
        # What stands past a sequence's end is masked, but the kernels follow it where another sequence is longer.
        table = table.masked_fill(outside, 0)
    return table, lengths, high
