"""`KVCache`: the keys and values of sequences that grow, written in place and read where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import KizukiTypeError, OptionError, ShapeError, show
from ..mask import Mask, as_mask
from ..operator import AttentionMatrix, make
from ..problem import DTYPES
from .pages import check_options, gather, mix, newest

PAGE = 128  # keys a page of a sliding window, where none is said: a key block of the kernels
Run = tuple[int, int, int, int, int]  # page, place in it, sequence, first of its new keys, how many


class KVCache:
    """Keys and values of `batch` growing sequences.

    Three forms, one interface:

    - contiguous (the default): room for `capacity` keys a sequence; `.key` and `.value` are views.
    - paged (`page=`): a pool of `pages` pages that all sequences share, found through a block table; a
      sequence that leaves gives its pages back, `fork` shares them until they are written to.
    - sliding window (`window=w`): a query sees the last w keys up to its own. Pages that no query can see any
      more are used again, so that memory stays the same however long the sequence grows.

    Nothing held is moved, repeated or repacked: `append` writes in place, and attention reads 16-bit keys as they
    are, once for all the heads of a group. There is no growing: what does not fit is refused, with one exception.
    All the queries appended at once need their keys, so a window takes more pages where more are appended than it
    has room for, and keeps them; append a long prompt in pieces to keep it small.

    Contiguous and paged give the same bits. A window agrees with the full cache and
    `masks.window(w − 1, 0, "lower_right")` within rounding: its key blocks are counted from its oldest page.

    Arguments: `batch`, `kv_heads`, `head_dim`; `value_dim` (None: head_dim); `capacity`, keys a sequence (not for
    a window); `page`, keys a page; `pages`, the pool's size (None: enough for `capacity`, or for appending to the
    window one by one); `window`; `dtype` (that of query, key and value), `device`. It keeps no gradient: append
    under `torch.no_grad()`. Errors are OptionError, ShapeError or KizukiTypeError, and leave it as it was.

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
            if size is not None and not (_is_whole(size) and size >= 1):
                raise OptionError(f"KVCache: {name} is {size!r} but must be a whole number >= 1")
        if dtype not in DTYPES:
            raise KizukiTypeError(
                f"KVCache: dtype is {dtype} but must be float16, bfloat16, float32 or float64"
            )
        if window is None and capacity is None and pages is None:
            raise OptionError("KVCache: capacity is None; say for how many keys a sequence, or give window=")
        if window is not None and capacity is not None:
            raise OptionError(
                f"KVCache: capacity is {capacity} and window is {window}; a window keeps what it needs, give one"
            )
        if pages is not None and page is None:
            raise OptionError(f"KVCache: pages is {pages} but page is None; say how many keys a page holds")
        self.batch, self.kv_heads, self.window, self.capacity = batch, kv_heads, window, capacity
        self._paged = page is not None or window is not None
        # One piece is a page a sequence, which is its own for good.
        self._page = page or (PAGE if window is not None else cast(int, capacity))
        if not self._paged:
            pages = batch
        elif pages is None:
            pages = batch * (-(-(capacity or window or 1) // self._page) + (window is not None))
        # Not a tensor of inference mode, which could never be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._key = torch.zeros(pages, kv_heads, self._page, head_dim, dtype=dtype, device=device)
            self._value = torch.zeros(pages, kv_heads, self._page, value_dim, dtype=dtype, device=device)
        self._lengths = [0] * batch
        self._free = list(range(pages))[::-1]
        self._shares = [0] * pages  # sequences a page belongs to
        self._table: list[list[int]] = [[] for _ in range(batch)]
        self._gone = [0] * batch  # pages of a window that have been given back
        self._known_table: Tensor | None = None  # the table as a tensor, until it changes

    # -- what it holds ---------------------------------------------------------------------------

    @property
    def lengths(self) -> Tensor:
        """The keys each sequence has seen, int64 `[batch]`; a window holds the last of them."""
        return torch.tensor(self._lengths, device=self._key.device)

    @property
    def first(self) -> Tensor:
        """The position of key 0 of `.key` in each sequence, int64 `[batch]`: 0 but in a window that has moved on."""
        return torch.tensor([gone * self._page for gone in self._gone], device=self._key.device)

    @property
    def pages(self) -> int:
        """The pages of the pool; 0 for a cache in one piece."""
        return len(self._shares) if self._paged else 0

    @property
    def free_pages(self) -> int:
        """How many of them no sequence uses: what can be appended before the pool is full."""
        return len(self._free) if self._paged else 0

    def __len__(self) -> int:
        """The keys of the longest sequence."""
        return max(self._lengths, default=0)

    @property
    def key(self) -> Tensor:
        """The keys, `[batch, kv_heads, longest, head_dim]`: a view, or gathered where the cache is paged.

        In a window they begin at position `first`. Past the end of a shorter sequence there is anything.
        """
        return self._whole(self._key)

    @property
    def value(self) -> Tensor:
        """The values, `[batch, kv_heads, longest, value_dim]`, as `.key`."""
        return self._whole(self._value)

    def _whole(self, pool: Tensor) -> Tensor:
        longest = max(self._held(), default=0)
        return gather(pool, self._block_table(), longest) if self._paged else pool[:, :, :longest]

    def _held(self) -> list[int]:
        """The keys in the live pages of each sequence, counted from the first live page."""
        return [n - gone * self._page for n, gone in zip(self._lengths, self._gone, strict=True)]

    def _block_table(self) -> Tensor:
        if self._known_table is None:
            wide = max((len(row) for row in self._table), default=0)
            rows = [row + [0] * (wide - len(row)) for row in self._table]
            with torch.inference_mode(False):
                made = torch.tensor(rows, dtype=torch.int64, device=self._key.device)
            self._known_table = made.reshape(self.batch, wide)
        return self._known_table

    # -- writing ---------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor, *, lengths: Sequence[int] | Tensor | None = None) -> None:
        """Write the next keys and values of every sequence, `[batch, kv_heads, n, head_dim | value_dim]`.

        lengths: how many of the n are real in each sequence (the first ones); None: all. Raises OptionError, and
        writes nothing, where there is no room; KizukiTypeError for what requires a gradient. Cost: O(new keys).
        """
        counts = self._check(key, value, lengths)
        for b, n in enumerate(counts):
            if self.capacity is not None and self._lengths[b] + n > self.capacity:
                raise OptionError(
                    f"KVCache.append: sequence {b} has {self._lengths[b]} keys and {n} more do not fit into "
                    f"capacity={self.capacity}; make the cache larger, or give it window="
                )
        if self._paged:
            self._make_room(counts)
        runs: list[Run] = []
        for b, n in enumerate(counts):
            done = 0
            while done < n:
                at = self._lengths[b] + done
                slot = at % self._page
                page = self._table[b][at // self._page - self._gone[b]] if self._paged else b
                some = min(n - done, self._page - slot) if self._paged else n
                runs.append((page, slot if self._paged else at, b, done, some))
                done += some
        self._write(runs, key, value)
        self._lengths = [at + n for at, n in zip(self._lengths, counts, strict=True)]

    @torch.no_grad()
    def _write(self, runs: list[Run], key: Tensor, value: Tensor) -> None:
        """Put stretches of new keys and values where they belong: one by one, or all at once where short."""
        tokens = sum(run[-1] for run in runs)
        pairs = ((self._key, key), (self._value, value))
        if not self._paged and len(runs) == self.batch and len({(run[1], run[-1]) for run in runs}) == 1:
            _, at, _, _, n = runs[0]  # every sequence at the same place
            for pool, new in pairs:
                pool[:, :, at : at + n] = new[:, :, :n]
        elif len(runs) > 2 and tokens < 16 * len(runs):
            # Many short stretches: rows of one long table, one write for all of them.
            heads, page_keys, device = self.kv_heads, self._page, self._key.device
            rows = [page * heads * page_keys + slot + i for page, slot, _, _, n in runs for i in range(n)]
            index = (
                torch.tensor(rows, device=device)[:, None] + torch.arange(heads, device=device) * page_keys
            )
            given = [b * key.shape[2] + start + i for _, _, b, start, n in runs for i in range(n)]
            for pool, new in pairs:
                lines = new.transpose(1, 2).reshape(-1, heads, new.shape[-1])
                if tokens < lines.shape[0]:
                    lines = lines[torch.tensor(given, device=device)]
                pool.view(-1, pool.shape[-1]).index_copy_(
                    0, index.flatten(), lines.reshape(-1, pool.shape[-1])
                )
        else:
            for page_, slot_, b_, start, n in runs:
                for pool, new in pairs:
                    pool[page_, :, slot_ : slot_ + n] = new[b_, :, start : start + n]

    def _check(self, key: Tensor, value: Tensor, lengths: Sequence[int] | Tensor | None) -> list[int]:
        for name, given, pool in (("key", key, self._key), ("value", value, self._value)):
            if not isinstance(given, Tensor) or given.dtype is not pool.dtype:
                kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
                raise KizukiTypeError(
                    f"KVCache.append: {name} is {kind} but the cache holds {pool.dtype}; convert it"
                )
            if given.device != pool.device:
                raise KizukiTypeError(
                    f"KVCache.append: {name} is on {given.device} but the cache on {pool.device}; move it"
                )
            if given.requires_grad and torch.is_grad_enabled():
                raise KizukiTypeError(
                    f"KVCache.append: {name} requires a gradient, which a cache does not keep; append under "
                    "torch.no_grad(), or detach it"
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
        counts = _whole_numbers("append", "lengths", lengths)
        if len(counts) != self.batch or any(not 0 <= n <= new for n in counts):
            raise OptionError(
                f"KVCache.append: lengths is {counts} but must be {self.batch} whole numbers in 0 … {new}"
            )
        return counts

    def _make_room(self, counts: list[int]) -> None:
        """Pages for the next keys: first those that no query can see any more, then free ones, then, for a window
        that is given more at once than it holds, new ones. Nothing changes where it fails."""
        page = self._page
        if self.window is not None:
            for b, n in enumerate(counts):
                # The first of the new queries is the one that sees furthest back.
                while n and (self._gone[b] + 1) * page <= self._lengths[b] + 1 - self.window:
                    self._give_back(self._table[b].pop(0))
                    self._gone[b] += 1
                    self._known_table = None
        wanted: list[tuple[int, bool]] = []
        readers: dict[int, int] = {}  # of pages that are shared and about to be written to
        for b, n in enumerate(counts):
            more = -(-(self._lengths[b] + n) // page) - self._gone[b] - len(self._table[b])
            copy = False
            if n and self._lengths[b] % page:
                last = self._table[b][-1]
                left = readers.setdefault(last, self._shares[last])
                copy = left > 1  # the last of its readers may write to it
                readers[last] = left - copy
            wanted.append((max(more, 0), copy))
        missing = sum(more + copy for more, copy in wanted) - len(self._free)
        if missing > 0 and self.window is None:
            raise OptionError(
                f"KVCache.append: {missing} pages of {page} keys are missing, all {len(self._shares)} in use; "
                "make the pool larger (pages=) or reset a sequence"
            )
        if missing > 0:
            self._grow(missing)
        for b, (more, copy) in enumerate(wanted):
            if copy:  # another sequence reads this page too: write to a copy
                old, new = self._table[b][-1], self._take()
                with torch.no_grad():
                    self._key[new], self._value[new] = self._key[old], self._value[old]
                self._give_back(old)
                self._table[b][-1] = new
            self._table[b] += [self._take() for _ in range(more)]
            if copy or more:
                self._known_table = None

    def _grow(self, count: int) -> None:
        """More pages: only while a window sees more keys at once than ever before."""
        start = self._key.shape[0]
        with torch.inference_mode(False), torch.no_grad():
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
        to its own, in a window the last w of them. `mask`, and as options bias, scale, softcap, sinks, score and
        backend, are those of `kizuki.attention`; a mask or bias counts the keys of `.key`.
        """
        caller = "KVCache.attention"
        if not self._paged:
            return cast(Tensor, self._attend(caller, query, mask, options) @ self.value)
        rule, table = self._rule(caller, query, mask), self._block_table()
        longest = max(self._held(), default=0)
        return mix(caller, query, self._key, self._value, table, longest, rule, options)

    def attend(self, query: Tensor, *, mask: Mask | Tensor | None = None, **options: Any) -> AttentionMatrix:
        """The same as a matrix to look at, `[batch, heads, n, keys]`, its keys those of `.key`.

        A contiguous cache is not copied, so read what you want before you append again; a paged one is gathered,
        O(keys). Keys are counted from position `first`, in what is read (`topk`) and in what is given (`mask`).
        """
        return self._attend("KVCache.attend", query, mask, options)

    def _attend(
        self, caller: str, query: Tensor, mask: Mask | Tensor | None, options: dict[str, Any]
    ) -> AttentionMatrix:
        rule = self._rule(caller, query, mask)
        check_options(caller, options)
        return make(caller, query, self.key, mask=rule, **options)

    def _rule(self, caller: str, query: Tensor, mask: Mask | Tensor | None) -> Mask:
        """What the newest queries see, once it is certain that the cache still holds it."""
        if not isinstance(query, Tensor) or query.dim() != 4 or query.shape[0] != self.batch:
            given = show(query) if isinstance(query, Tensor) else type(query).__name__
            raise ShapeError(
                f"{caller}: query has shape {given} but must be [{self.batch}, heads, n, head_dim]"
            )
        if torch._C._are_functorch_transforms_active():
            raise OptionError(
                f"{caller}: a transform of torch.func cannot follow a cache; call it outside, or give .key and .value "
                "to kizuki.attention"
            )
        rule = self._newest(query.shape[2], caller)
        return rule if mask is None else rule & as_mask(mask, caller)

    def mask(self, queries: int) -> Mask:
        """What the newest `queries` positions see of `.key`: a rule like those of `kizuki.masks`, of this moment.

        `attention` and `attend` go by it. With it the cache's tensors mean the same anywhere else. Raises OptionError
        where a sequence has fewer keys, or where a window has let go of keys that they would see. Cost: O(queries).

            >>> import torch, kizuki
            >>> from kizuki.nn import KVCache
            >>> cache = KVCache(2, 1, 4, capacity=8)
            >>> cache.append(torch.randn(2, 1, 5, 4), torch.randn(2, 1, 5, 4), lengths=[5, 3])
            >>> query = torch.randn(2, 1, 2, 4)
            >>> z = kizuki.attention(query, cache.key, cache.value, mask=cache.mask(2))
            >>> torch.allclose(z, cache.attention(query), atol=1e-6)
            True
        """
        caller = "KVCache.mask"
        if not _is_whole(queries) or queries < 0:
            raise OptionError(f"{caller}: queries is {queries!r} but must be a whole number >= 0")
        return self._newest(queries, caller)

    def _newest(self, n: int, caller: str) -> Mask:
        for b, length in enumerate(self._lengths):
            if length < n:
                raise OptionError(
                    f"{caller}: sequence {b} has {length} keys but there are {n} queries; append "
                    "the queries' own keys first"
                )
            if self.window is not None and self._gone[b] * self._page > max(0, length - n - self.window + 1):
                raise OptionError(
                    f"{caller}: {n} queries of sequence {b} see back to key {max(0, length - n - self.window + 1)} but "
                    f"keys before {self._gone[b] * self._page} are gone; ask for as many queries as were appended last"
                )
        held = torch.tensor(self._held(), device=self._key.device)
        return newest(held, n, self.window)

    # -- sequences -------------------------------------------------------------------------------

    def reset(self, sequence: int | None = None) -> None:
        """Forget one sequence, or all of them; their pages are free."""
        for b in self._chosen("reset", sequence):
            self._lengths[b] = 0
            for page in self._table[b]:
                self._give_back(page)
            self._table[b], self._gone[b] = [], 0
        self._known_table = None

    def truncate(self, length: int, sequence: int | None = None) -> None:
        """Forget what comes after the first `length` keys (a rejected draft); shorter sequences stay as they are.

        Raises OptionError for a length that a window has passed.
        """
        if not _is_whole(length) or length < 0:
            raise OptionError(f"KVCache.truncate: length is {length!r} but must be a whole number >= 0")
        cut = [b for b in self._chosen("truncate", sequence) if self._lengths[b] > length]
        for b in cut:
            first = self._gone[b] * self._page
            if self.window is not None and first > max(0, length - self.window + 1):
                raise OptionError(
                    f"KVCache.truncate: length is {length} but sequence {b} starts at {first}, and the next query sees "
                    f"back to key {max(0, length - self.window + 1)}; what a window has passed is gone"
                )
        for b in cut:
            self._lengths[b] = length
            while len(self._table[b]) + self._gone[b] > -(-length // self._page):
                self._give_back(self._table[b].pop())
        self._known_table = None

    def fork(self, source: int, target: int) -> None:
        """Make sequence `target` a continuation of `source`: pages are shared until one of the two writes to them.

        A contiguous cache copies the keys.
        """
        source, target = self._index("fork", "source", source), self._index("fork", "target", target)
        if source != target:
            order = list(range(self.batch))
            order[target] = source
            self.reorder(order)

    @torch.no_grad()
    def reorder(self, order: Sequence[int] | Tensor) -> None:
        """Sequence b becomes what sequence `order[b]` was (beam search).

        Pages are shared, so that no key moves; a contiguous cache copies the keys of sequences that change.
        """
        places = [self._index("reorder", "order", n) for n in _whole_numbers("reorder", "order", order)]
        if len(places) != self.batch:
            raise ShapeError(
                f"KVCache.reorder: order has {len(places)} entries but there are {self.batch} sequences"
            )
        if self._paged:
            tables = [list(self._table[n]) for n in places]
            for page in (page for row in tables for page in row):
                self._shares[page] += 1
            for page in (page for row in self._table for page in row):
                self._give_back(page)
            self._table, self._gone = tables, [self._gone[n] for n in places]
            self._known_table = None
        else:
            moved = [b for b, n in enumerate(places) if b != n]
            n = max((self._lengths[places[b]] for b in moved), default=0)
            here, there = (
                torch.tensor(index, dtype=torch.int64, device=self._key.device)
                for index in (moved, [places[b] for b in moved])
            )
            for pool in (self._key, self._value):
                pool[here, :, :n] = pool[there, :, :n]
        self._lengths = [self._lengths[n] for n in places]

    def _chosen(self, name: str, sequence: int | None) -> list[int]:
        return list(range(self.batch)) if sequence is None else [self._index(name, "sequence", sequence)]

    def _index(self, name: str, argument: str, sequence: int) -> int:
        if not _is_whole(sequence) or not -self.batch <= sequence < self.batch:
            raise OptionError(
                f"KVCache.{name}: {argument} is {sequence!r} but there are {self.batch} sequences, from 0 on"
            )
        return sequence % self.batch


def _is_whole(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool)


def _whole_numbers(name: str, argument: str, given: Sequence[int] | Tensor) -> list[int]:
    """A list of ints, from a list or a tensor; nothing is rounded."""
    many: Any = given.tolist() if isinstance(given, Tensor) else given
    if not isinstance(many, (list, tuple)) or not all(_is_whole(n) for n in many):
        raise KizukiTypeError(
            f"KVCache.{name}: {argument} is {many!r} but must be whole numbers, one a sequence"
        )
    return list(many)
