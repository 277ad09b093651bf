"""`KVCache`: the keys and values of sequences that grow, written in place and read where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import KizukiTypeError, OptionError, ShapeError, show
from ..mask import Mask, as_mask
from ..operator import AttentionMatrix, attend
from .pages import gather, newest, paged_attention

PAGE = 128  # keys a page of a sliding window, where none is said: a key block of the kernels


class KVCache:
    """Keys and values of `batch` growing sequences.

    Three forms, one interface:
        contiguous (the default): room for `capacity` keys a sequence; `.key` and `.value` are views.
        paged (`page=`): a pool of `pages` pages that all sequences share, found through a block table; a
            sequence that leaves gives its pages back, `fork` shares them until they are written to.
        sliding window (`window=w`): a query sees the last w keys up to its own. Pages that no query can see any
            more are used again, so that memory stays the same however long the sequence grows.

    Nothing is ever moved or repeated: `append` writes in place, and attention reads 16-bit keys as they are, once
    for all the heads of a group. All three give the same output; contiguous and paged to the bit.

    Arguments: `batch`, `kv_heads`, `head_dim`; `value_dim` (None: head_dim); `capacity`, keys a sequence (not for
    a window); `page`, keys a page; `pages`, the pool's size (None: enough for `capacity`); `window`; dtype, device.

        >>> import torch
        >>> from kizuki.nn import KVCache
        >>> cache = KVCache(1, 2, 16, capacity=8)
        >>> cache.append(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16))
        >>> cache.attention(torch.randn(1, 4, 1, 16)).shape, cache.lengths.tolist()
        (torch.Size([1, 4, 1, 16]), [5])
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        capacity: int | None = None,
        page: int | None = None,
        pages: int | None = None,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {
            "batch": batch,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "value_dim": value_dim,
            "capacity": capacity,
            "page": page,
            "pages": pages,
            "window": window,
        }
        for name, size in sizes.items():
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise OptionError(f"KVCache: {name} is {size!r} but must be a whole number >= 1")
        if window is None and capacity is None and pages is None:
            raise OptionError("KVCache: capacity is None; say for how many keys a sequence, or give window=")
        if window is not None and capacity is not None:
            raise OptionError(
                f"KVCache: capacity is {capacity} and window is {window}; a window keeps what it needs, give one"
            )
        if pages is not None and page is None:
            raise OptionError(f"KVCache: pages is {pages} but page is None; say how many keys a page holds")
        self.batch, self.kv_heads, self.window = batch, kv_heads, window
        self._lengths = [0] * batch
        self._paged = page is not None or window is not None
        if not self._paged:
            assert capacity is not None  # noqa: S101 - checked above; for the type checker
            self.capacity: int | None = capacity
            self._key = torch.zeros(batch, kv_heads, capacity, head_dim, dtype=dtype, device=device)
            self._value = torch.zeros(batch, kv_heads, capacity, value_dim, dtype=dtype, device=device)
            return
        self.capacity = capacity
        self._page = page or PAGE
        if pages is None:
            pages = batch * -(-(capacity or window or 1) // self._page) + (batch if window is not None else 0)
        self._key = torch.zeros(pages, kv_heads, self._page, head_dim, dtype=dtype, device=device)
        self._value = torch.zeros(pages, kv_heads, self._page, value_dim, dtype=dtype, device=device)
        self._free = list(range(pages))[::-1]
        self._shares = [0] * pages  # sequences a page belongs to
        self._table: list[list[int]] = [[] for _ in range(batch)]
        self._gone = [0] * batch  # pages of a window that have been given back

    # -- what it holds ---------------------------------------------------------------------------

    @property
    def lengths(self) -> Tensor:
        """The keys each sequence has seen, int64 `[batch]`; a window holds the last of them."""
        return torch.tensor(self._lengths, device=self._key.device)

    def __len__(self) -> int:
        """The keys of the longest sequence."""
        return max(self._lengths, default=0)

    @property
    def key(self) -> Tensor:
        """The keys, `[batch, kv_heads, longest, head_dim]`: a view, or gathered where the cache is paged."""
        return self._whole(self._key)

    @property
    def value(self) -> Tensor:
        """The values, `[batch, kv_heads, longest, value_dim]`: a view, or gathered where the cache is paged."""
        return self._whole(self._value)

    def _whole(self, pool: Tensor) -> Tensor:
        if not self._paged:
            return pool[:, :, : len(self)]
        held = self._held()
        return gather(pool, self._block_table(), max(held, default=0))

    def _held(self) -> list[int]:
        """The keys in the live pages of each sequence, counted from the first live page."""
        if not self._paged:
            return self._lengths
        return [n - gone * self._page for n, gone in zip(self._lengths, self._gone, strict=True)]

    def _block_table(self) -> Tensor:
        wide = max((len(row) for row in self._table), default=0)
        rows = [row + [0] * (wide - len(row)) for row in self._table]
        return torch.tensor(rows, dtype=torch.int64, device=self._key.device).reshape(self.batch, wide)

    # -- writing ---------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor, *, lengths: Sequence[int] | Tensor | None = None) -> None:
        """Write the next keys and values of every sequence, `[batch, kv_heads, n, head_dim | value_dim]`.

        lengths: how many of the n are real in each sequence (the first ones); None: all. Raises OptionError, and
        writes nothing, where there is no room.
        """
        counts = self._check(key, value, lengths)
        if not self._paged:
            assert self.capacity is not None  # noqa: S101 - for the type checker
            for b, n in enumerate(counts):
                if self._lengths[b] + n > self.capacity:
                    raise OptionError(
                        f"KVCache.append: sequence {b} has {self._lengths[b]} keys and {n} more do not fit into "
                        f"capacity={self.capacity}; make the cache larger, or give it window= or page="
                    )
            if len({*counts}) == len({*self._lengths}) == 1:  # all at the same place: one write
                at, n = self._lengths[0], counts[0]
                self._key[:, :, at : at + n] = key[:, :, :n]
                self._value[:, :, at : at + n] = value[:, :, :n]
                self._lengths = [at + n] * self.batch
                return
            for b, n in enumerate(counts):
                at = self._lengths[b]
                self._key[b, :, at : at + n] = key[b, :, :n]
                self._value[b, :, at : at + n] = value[b, :, :n]
                self._lengths[b] += n
            return
        self._make_room(counts)
        for b, n in enumerate(counts):
            done = 0
            while done < n:
                at = self._lengths[b] + done
                slot, page = at % self._page, self._table[b][at // self._page - self._gone[b]]
                some = min(n - done, self._page - slot)
                self._key[page, :, slot : slot + some] = key[b, :, done : done + some]
                self._value[page, :, slot : slot + some] = value[b, :, done : done + some]
                done += some
            self._lengths[b] += n

    def _check(self, key: Tensor, value: Tensor, lengths: Sequence[int] | Tensor | None) -> list[int]:
        for name, given, pool in (("key", key, self._key), ("value", value, self._value)):
            if not isinstance(given, Tensor) or given.dtype is not pool.dtype:
                kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
                raise KizukiTypeError(
                    f"KVCache.append: {name} is {kind} but the cache holds {pool.dtype}; convert it"
                )
            shape = (self.batch, self.kv_heads, key.shape[-2] if key.dim() > 1 else 0, pool.shape[-1])
            if tuple(given.shape) != shape:
                want = f"[{self.batch}, {self.kv_heads}, n, {pool.shape[-1]}]"
                raise ShapeError(
                    f"KVCache.append: {name} has shape {show(given)} but must be {want}, n as in key"
                )
        new = key.shape[-2]
        if lengths is None:
            return [new] * self.batch
        counts = [int(n) for n in lengths]
        if len(counts) != self.batch or any(not 0 <= n <= new for n in counts):
            raise OptionError(
                f"KVCache.append: lengths is {counts} but must be {self.batch} whole numbers in 0 … {new}"
            )
        return counts

    def _make_room(self, counts: list[int]) -> None:
        """Pages for the next keys: first those that no query can see any more, then free ones, then, for a window
        that is given more at once than it holds, new ones. Nothing changes where it fails."""
        for b, n in enumerate(counts):
            if self.capacity is not None and self._lengths[b] + n > self.capacity:
                raise OptionError(
                    f"KVCache.append: sequence {b} has {self._lengths[b]} keys and {n} more do not fit into "
                    f"capacity={self.capacity}; make the cache larger"
                )
        if self.window is not None:
            for b, n in enumerate(counts):
                # The first of the new queries is the one that sees furthest back.
                while n and (self._gone[b] + 1) * self._page <= self._lengths[b] + 1 - self.window:
                    self._give_back(self._table[b].pop(0))
                    self._gone[b] += 1
        wanted = []
        for b, n in enumerate(counts):
            more = -(-(self._lengths[b] + n) // self._page) - self._gone[b] - len(self._table[b])
            shared = bool(n and self._lengths[b] % self._page and self._shares[self._table[b][-1]] > 1)
            wanted.append((more, shared))
        missing = sum(more + shared for more, shared in wanted) - len(self._free)
        if missing > 0 and self.window is None:
            raise OptionError(
                f"KVCache.append: {missing} pages of {self._page} keys are missing, all {len(self._shares)} in use; "
                "make the pool larger (pages=) or reset a sequence"
            )
        if missing > 0:
            self._grow(missing)
        for b, (more, shared) in enumerate(wanted):
            if shared:  # another sequence reads this page too: write to a copy
                old, new = self._table[b][-1], self._take()
                self._key[new], self._value[new] = self._key[old], self._value[old]
                self._give_back(old)
                self._table[b][-1] = new
            self._table[b] += [self._take() for _ in range(more)]

    def _grow(self, count: int) -> None:
        """More pages: only while a window sees more keys at once than ever before."""
        start = self._key.shape[0]
        self._key, self._value = (
            torch.cat([pool, pool.new_zeros(count, *pool.shape[1:])]) for pool in (self._key, self._value)
        )
        self._free += range(start, start + count)
        self._shares += [0] * count

    def _take(self) -> int:
        page = self._free.pop()
        self._shares[page] = 1
        return page

    def _give_back(self, page: int) -> None:
        self._shares[page] -= 1
        if not self._shares[page]:
            self._free.append(page)

    # -- reading ---------------------------------------------------------------------------------

    def attention(self, query: Tensor, *, mask: Mask | Tensor | None = None, **options: Any) -> Tensor:
        """Attention of the newest positions, `[batch, heads, n, value_dim]`; their own keys have been appended.

        query: `[batch, heads, n, head_dim]`. Query i of n stands at position lengths − n + i and sees the keys up
        to its own, in a window the last w of them. Options are those of `kizuki.attention`; a mask or bias counts
        the keys of `.key`.
        """
        self._check_query(query, "attention")
        if not self._paged:
            return cast(Tensor, self.attend(query, mask=mask, **options) @ self.value)
        held = torch.tensor(self._held(), device=self._key.device)
        return paged_attention(
            query, self._key, self._value, self._block_table(), held, window=self.window, mask=mask, **options
        )

    def attend(self, query: Tensor, *, mask: Mask | Tensor | None = None, **options: Any) -> AttentionMatrix:
        """The same as a matrix to look at, `[batch, heads, n, keys]`, its keys those of `.key`.

        A contiguous cache is not copied; a paged one is gathered, O(keys). In a window key 0 is the first of the
        oldest page still there.
        """
        self._check_query(query, "attend")
        held = torch.tensor(self._held(), device=self._key.device)
        rule: Mask = newest(held, query.shape[2], self.window)
        if mask is not None:
            rule = rule & as_mask(mask, "KVCache.attend")
        return attend(query, self.key, mask=rule, **options)

    def _check_query(self, query: Tensor, name: str) -> None:
        if not isinstance(query, Tensor) or query.dim() != 4 or query.shape[0] != self.batch:
            given = show(query) if isinstance(query, Tensor) else type(query).__name__
            raise ShapeError(
                f"KVCache.{name}: query has shape {given} but must be [{self.batch}, heads, n, head_dim]"
            )
        n = query.shape[2]
        for b, length in enumerate(self._lengths):
            if length < n:
                raise OptionError(
                    f"KVCache.{name}: sequence {b} has {length} keys but there are {n} queries; append "
                    "the queries' own keys first"
                )
            if self.window is not None and self._gone[b] * self._page > max(0, length - n - self.window + 1):
                raise OptionError(
                    f"KVCache.{name}: {n} queries of sequence {b} see back to key {length - n - self.window + 1} but "
                    f"keys before {self._gone[b] * self._page} are gone; ask for as many queries as were appended last"
                )

    # -- sequences -------------------------------------------------------------------------------

    def reset(self, sequence: int | None = None) -> None:
        """Forget one sequence, or all of them."""
        for b in range(self.batch) if sequence is None else [self._index(sequence, "reset")]:
            self._lengths[b] = 0
            if self._paged:
                for page in self._table[b]:
                    self._give_back(page)
                self._table[b], self._gone[b] = [], 0

    def truncate(self, length: int, sequence: int | None = None) -> None:
        """Forget what comes after the first `length` keys (a rejected draft); shorter sequences stay as they are."""
        for b in range(self.batch) if sequence is None else [self._index(sequence, "truncate")]:
            if self._lengths[b] <= length:
                continue
            if length < 0 or (self._paged and length < self._gone[b] * self._page):
                raise OptionError(
                    f"KVCache.truncate: length is {length} but sequence {b} starts at "
                    f"{self._gone[b] * self._page if self._paged else 0}; what a window has passed is gone"
                )
            self._lengths[b] = length
            if self._paged:
                while len(self._table[b]) + self._gone[b] > -(-length // self._page):
                    self._give_back(self._table[b].pop())

    def fork(self, source: int, target: int) -> None:
        """Make sequence `target` a continuation of `source`: pages are shared until one of the two writes to them.

        A contiguous cache copies the keys.
        """
        source, target = self._index(source, "fork"), self._index(target, "fork")
        if source == target:
            return
        self.reset(target)
        self._lengths[target] = self._lengths[source]
        if self._paged:
            self._table[target], self._gone[target] = list(self._table[source]), self._gone[source]
            for page in self._table[target]:
                self._shares[page] += 1
        else:
            n = self._lengths[source]
            self._key[target, :, :n] = self._key[source, :, :n]
            self._value[target, :, :n] = self._value[source, :, :n]

    def reorder(self, order: Sequence[int] | Tensor) -> None:
        """Sequence b becomes what sequence `order[b]` was (beam search); pages are shared, else copied."""
        places = [self._index(int(n), "reorder") for n in order]
        if len(places) != self.batch:
            raise ShapeError(
                f"KVCache.reorder: order has {len(places)} entries but there are {self.batch} sequences"
            )
        self._lengths = [self._lengths[n] for n in places]
        if self._paged:
            tables, gone = [list(self._table[n]) for n in places], [self._gone[n] for n in places]
            for page in (page for row in tables for page in row):
                self._shares[page] += 1
            for page in (page for row in self._table for page in row):
                self._give_back(page)
            self._table, self._gone = tables, gone
        else:
            index = torch.tensor(places, device=self._key.device)
            n = len(self)
            self._key[:, :, :n] = self._key[index, :, :n]
            self._value[:, :, :n] = self._value[index, :, :n]

    def _index(self, sequence: int, name: str) -> int:
        if not -self.batch <= sequence < self.batch:
            raise OptionError(f"KVCache.{name}: sequence is {sequence} but there are {self.batch}")
        return sequence % self.batch
