"""Does a KV cache give what the keys in one piece give, however they lie, and never move them?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import brute, plains
from tolerance import assert_accurate
from torch import Tensor

import kizuki
from kizuki import masks
from kizuki.nn import KVCache, paged_attend, paged_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
PAGES = [1, 16, 48, 128, 1000]
RIGHT = masks.causal("lower_right")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def three(keys: int, queries: int, dim: int = 16, batch: int = 1, heads: int = 2) -> tuple[Tensor, ...]:
    """Key and value of one head, and a query."""
    return (
        randn(batch, 1, keys, dim, seed=1),
        randn(batch, 1, keys, dim, seed=2),
        randn(batch, heads, queries, dim, seed=3),
    )


def shuffled(key: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """The keys `[batch, kv_heads, n, d]` in pages out of order, NaN wherever there is none, and their table."""
    batch, heads, n, dim = key.shape
    count = -(-n // page)
    order = torch.randperm(batch * count + 3, generator=torch.Generator().manual_seed(page))
    table = order[: batch * count].reshape(batch, count)
    pool = torch.full((batch * count + 3, heads, page, dim), float("nan"), dtype=key.dtype)
    padded = torch.cat([key, pool.new_full((batch, heads, count * page - n, dim), float("nan"))], 2)
    pool[table] = padded.reshape(batch, heads, count, page, dim).transpose(1, 2)
    return pool, table


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_give_the_bits_of_keys_in_one_piece(dtype: torch.dtype, page: int) -> None:
    n = 1100 if dtype is torch.float32 else 300
    key, value = randn(2, 2, n, 32, seed=1, dtype=dtype), randn(2, 2, n, 16, seed=2, dtype=dtype)
    (key_pages, table), (value_pages, _) = shuffled(key, page), shuffled(value, page)
    lengths = torch.tensor([n, n])
    for queries in (1, 4, 37):  # the decoder's, and those keys are packed for
        query = randn(2, 6, queries, 32, seed=3, dtype=dtype)
        for options in ({}, {"softcap": 3.0, "sinks": randn(6, seed=4, dtype=dtype)}):
            want = kizuki.attention(query, key, value, mask=RIGHT, **options)
            got = paged_attention(query, key_pages, value_pages, table, lengths, **options)
            assert torch.equal(got, want)


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize(
    ("dim", "value_dim"), [(16, 16), (7, 5), (24, 40)], ids=["vectors", "odd", "half vectors"]
)
def test_pages_of_any_layout_with_masks_and_biases(queries: int, dim: int, value_dim: int) -> None:
    key, value = randn(1, 2, 210, dim, seed=1), randn(1, 2, 210, value_dim, seed=2)
    value[0, 0, 5], value[0, 1, 100, 2] = float("inf"), float("nan")
    query = randn(1, 4, queries, dim, seed=3)
    seen = torch.rand(210, generator=torch.Generator().manual_seed(4)) < 0.7
    seen[5], seen[100] = False, False
    several: list[dict[str, Any]] = [
        {"mask": masks.keys(seen), "bias": randn(4, queries, 210, seed=5)},
        {"mask": seen.expand(4, queries, 210)},
        {"mask": masks.where(lambda b, h, i, j: (j + h) % 3 != 0) & masks.keys(seen)},
    ]
    for options in several:
        rule = {**options, "mask": options["mask"] & RIGHT}
        want = kizuki.attention(query, key, value, **rule)
        assert not want.isnan().any()
        for page in (16, 13):
            (key_pages, table), (value_pages, _) = shuffled(key, page), shuffled(value, page)
            # Every layout an engine may keep: heads last, and every second of the columns.
            apart = key_pages.transpose(1, 2).contiguous().transpose(1, 2)
            wide = torch.stack([value_pages, value_pages], -1).flatten(-2)[..., ::2]
            for pages in ((key_pages, value_pages), (apart, wide)):
                got = paged_attention(query, *pages, table, torch.tensor([210]), **options)
                assert torch.equal(got, want)


def test_ragged_sequences_and_a_window_are_those_alone() -> None:
    key, value, _ = three(300, 1, batch=3)
    (key_pages, table), (value_pages, _) = shuffled(key, 32), shuffled(value, 32)
    lengths = [20, 150, 300]
    for queries in (2, 20):
        query = randn(3, 2, queries, 16, seed=3)
        for window in (None, 40):
            got = paged_attention(query, key_pages, value_pages, table, torch.tensor(lengths), window=window)
            A = paged_attend(query, key_pages, table, torch.tensor(lengths, dtype=torch.int32), window=window)
            for b, n in enumerate(lengths):
                rule = RIGHT if window is None else RIGHT & masks.window(window - 1, 0, align="lower_right")
                alone = kizuki.attend(query[b], key[b, :, :n], mask=rule)
                assert torch.equal(got[b], alone @ value[b, :, :n])
                assert torch.equal(A.topk(3)[1][b], alone.topk(3)[1]), (
                    "keys are counted from the sequence's first"
                )


@pytest.mark.parametrize("queries", [1, 17, 40])
def test_what_stands_past_a_sequences_end_is_not_followed(queries: int) -> None:
    """Sequence 0 uses two pages of a table made for ten."""
    key, value, _ = three(600, 1, batch=2)
    (key_pages, table), (value_pages, _) = shuffled(key, 64), shuffled(value, 64)
    query, lengths = randn(2, 2, queries, 16, seed=3), torch.tensor([70, 600])
    want = paged_attention(query, key_pages, value_pages, table, lengths)
    for anything in (-1, 10**9, 2**31 - 1):
        ragged = table.clone()
        ragged[0, 2:] = anything
        assert torch.equal(paged_attention(query, key_pages, value_pages, ragged, lengths), want)
        A = paged_attend(query, key_pages, ragged, lengths)
        assert torch.equal(A.topk(3)[1], paged_attend(query, key_pages, table, lengths).topk(3)[1])
        assert (ragged[0, 2:] == anything).all(), "the caller's table was written to"


@pytest.mark.parametrize(
    "form", [{"capacity": 200}, {"capacity": 200, "page": 24}], ids=["one piece", "pages"]
)
def test_one_by_one_is_all_at_once(form: dict[str, Any]) -> None:
    key, value = randn(2, 2, 150, 16, seed=1), randn(2, 2, 150, 16, seed=2)
    query = randn(2, 4, 150, 16, seed=3)
    cache = KVCache(2, 2, 16, **form)
    places = set()
    rows = []
    for i in range(150):
        cache.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
        places.add(cache.key.data_ptr())
        rows.append(cache.attention(query[:, :, i : i + 1]))
    want = kizuki.attention(query, key, value, causal=True)
    assert torch.equal(torch.cat(rows, 2), want)
    if "page" not in form:  # whose keys are gathered to be shown
        assert len(places) == 1, "the cache moved"
    assert torch.equal(cache.key, key)
    assert torch.equal(cache.value, value)
    whole = KVCache(2, 2, 16, **form)
    whole.append(key, value)
    assert torch.equal(whole.attention(query), want)
    A = whole.attend(query[:, :, -7:])
    assert torch.equal(A @ whole.value, want[:, :, -7:])
    assert torch.equal(A.topk(2)[1], kizuki.attend(query, key, causal=True).topk(2)[1][:, :, -7:])


@pytest.mark.parametrize(
    "form", [{"capacity": 99}, {"capacity": 99, "page": 8}, {"window": 200, "page": 8}], ids=str
)
def test_ragged_appends(form: dict[str, Any]) -> None:
    """Few and many keys at a time, none among them, each sequence at its own place."""
    cache = KVCache(5, 3, 16, value_dim=8, **form)
    held: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(5)]
    for step, counts in enumerate([[1, 0, 1, 1, 0], [2, 3, 0, 1, 3], [1, 1, 1, 1, 1], [30, 2, 40, 0, 17]]):
        key, value = randn(5, 3, 40, 16, seed=step), randn(5, 3, 40, 8, seed=10 + step)
        key, value = key[:, :, : max(counts)], value[:, :, : max(counts)]
        cache.append(key, value, lengths=torch.tensor(counts))
        for b, n in enumerate(counts):
            held[b].append((key[b, :, :n], value[b, :, :n]))
    for b, parts in enumerate(held):
        keys, values = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        n = int(cache.lengths[b])
        assert n == keys.shape[1]
        assert torch.equal(cache.key[b, :, :n], keys)
        assert torch.equal(cache.value[b, :, :n], values)


def test_a_window_uses_its_pages_again() -> None:
    key, value, query = three(700, 700)
    cache = KVCache(1, 1, 16, window=100, page=32)
    pages = cache.pages
    assert pages * 32 < 200
    at, rows, best = 0, [], []
    for n in [1] * 40 + [5] * 20 + [1] * 300 + [13] * 20:
        cache.append(key[:, :, at : at + n], value[:, :, at : at + n])
        rows.append(cache.attention(query[:, :, at : at + n]))
        best.append(cache.attend(query[:, :, at : at + n]).topk(1)[1] + cache.first)
        at += n
    assert at == len(cache) == 700
    assert cache.pages == pages, "the window grew"
    i, j = np.arange(700)[:, None], np.arange(700)
    visible = (j <= i) & (j > i - 100)
    truth = brute(query, key, value, visible=visible)
    assert_accurate(torch.cat(rows, 2), truth.output, plains(query, key, value, visible=visible)[2])
    assert torch.equal(torch.cat(best, 2)[..., 0], truth.weights.argmax(-1)), (
        "positions, once `first` is added"
    )
    with pytest.raises(ValueError, match="gone"):
        cache.attention(query[:, :, :200])
    with pytest.raises(ValueError, match="gone"):
        cache.truncate(3)


def test_a_window_is_cut_only_to_where_the_next_query_can_see() -> None:
    cache = KVCache(1, 1, 4, window=2, page=3)
    for _ in range(6):
        cache.append(torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4))
    with pytest.raises(
        ValueError, match="length is 3 but sequence 0 starts at 3, and the next query sees back to key 2"
    ):
        cache.truncate(3)
    cache.truncate(4)
    cache.append(torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4))
    assert cache.attention(torch.randn(1, 1, 1, 4)).isfinite().all()


def test_a_prefill_longer_than_the_window() -> None:
    key, value, query = three(400, 400)
    cache = KVCache(1, 1, 16, window=64, page=16)
    cache.append(key, value)
    want = kizuki.attention(query, key, value, causal=True, window=(63, None))
    assert torch.equal(cache.attention(query), want)
    pages = cache.pages
    for i in range(100):
        cache.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
    assert cache.pages == pages
    assert cache.free_pages >= pages - 6, "pages that no query can see are free"


def test_forks_share_pages_until_one_writes() -> None:
    cache = KVCache(3, 1, 8, page=16, pages=12)
    key, value = randn(3, 1, 40, 8, seed=1), randn(3, 1, 40, 8, seed=2)
    cache.append(key, value, lengths=[40, 0, 0])
    assert cache.free_pages == 9
    cache.fork(0, 1)
    assert cache.free_pages == 9, "a fork takes no page"
    more = randn(3, 1, 1, 8, seed=3)
    cache.append(more, more)
    assert cache.lengths.tolist() == [41, 41, 1]
    assert torch.equal(cache.key[0, :, :40], key[0])
    assert torch.equal(cache.key[1, :, :40], key[0])
    assert torch.equal(cache.key[0, :, 40], more[0, :, 0])
    assert torch.equal(cache.key[1, :, 40], more[1, :, 0])
    cache.reorder([1, 1, 2])
    assert torch.equal(cache.key[0, :, 40], more[1, :, 0])
    cache.truncate(3)
    assert cache.lengths.tolist() == [3, 3, 1]
    cache.reset()
    assert cache.free_pages == cache.pages == 12, "a page was lost"


def test_the_last_reader_of_a_page_writes_to_it() -> None:
    cache = KVCache(3, 1, 8, page=16, pages=3)
    first, more = randn(3, 1, 3, 8, seed=1), randn(3, 1, 1, 8, seed=2)
    cache.append(first, first, lengths=[3, 0, 0])
    cache.reorder([0, 0, 0])
    cache.append(more, more)  # two copies are enough for three
    for b in range(3):
        assert torch.equal(cache.key[b], torch.cat([first[0], more[b]], 1))
    assert cache.free_pages == 0
    before = cache.key.clone()
    with pytest.raises(ValueError, match="3 pages of 16 keys are missing"):
        cache.append(randn(3, 1, 13, 8), randn(3, 1, 13, 8))
    assert torch.equal(cache.key, before), "what fails changes nothing"


@pytest.mark.parametrize("form", [{"capacity": 50}, {"capacity": 50, "page": 16}], ids=["one piece", "pages"])
def test_sequences_change_places(form: dict[str, Any]) -> None:
    key, value = randn(4, 1, 20, 8, seed=1), randn(4, 1, 20, 8, seed=2)
    cache, lengths = KVCache(4, 1, 8, **form), [20, 5, 0, 13]
    cache.append(key, value, lengths=lengths)
    where = cache.key.data_ptr()
    for order in ([3, 0, 1, 1], torch.tensor([1, 0, -1, 2])):
        key, value = key[order], value[order]
        lengths = [lengths[n] for n in order]
        cache.reorder(order)
    cache.fork(0, 3)
    key[3], value[3], lengths[3] = key[0], value[0], lengths[0]
    cache.reset(1)
    lengths[1] = 0
    cache.truncate(9, sequence=0)
    lengths[0] = min(lengths[0], 9)
    assert cache.lengths.tolist() == lengths
    if "page" not in form:
        assert cache.key.data_ptr() == where, "the cache moved"
    for b, n in enumerate(lengths):
        assert torch.equal(cache.key[b, :, :n], key[b, :, :n])
        assert torch.equal(cache.value[b, :, :n], value[b, :, :n])


@pytest.mark.parametrize("form", [{}, {"page": 128}], ids=["one piece", "pages"])
def test_a_step_takes_no_memory_that_grows_with_the_cache(form: dict[str, Any]) -> None:
    cache = KVCache(1, 1, 64, capacity=32768 + 9, dtype=torch.bfloat16, **form)
    key = randn(1, 1, 32768, 64, dtype=torch.bfloat16)
    cache.append(key, key)
    query = randn(1, 4, 1, 64, dtype=torch.bfloat16)
    cache.attention(query)
    with torch.profiler.profile(profile_memory=True) as seen:
        cache.append(key[:, :, :1], key[:, :, :1])
        cache.attention(query)
    taken = sum(max(0, event.self_cpu_memory_usage) for event in seen.events())
    assert taken < 1 << 17, f"{taken} bytes for one step on a cache of 8 MB"


def test_other_backends_and_derivatives_gather() -> None:
    key, value, query = three(50, 2, dim=16)
    (key_pages, table), (value_pages, _) = shuffled(key, 16), shuffled(value, 16)
    lengths = torch.tensor([50])
    want = kizuki.attention(query, key, value, mask=RIGHT, backend="portable")
    got = paged_attention(query, key_pages, value_pages, table, lengths, backend="portable")
    assert torch.equal(got, want)
    inputs = [t.clone().requires_grad_() for t in (query, key_pages, value_pages, torch.tensor(0.2))]
    alone = [t.clone().requires_grad_() for t in (query, key, value, torch.tensor(0.2))]
    paged_attention(*inputs[:3], table, lengths, scale=inputs[3]).sum().backward()
    kizuki.attention(*alone[:3], mask=RIGHT, scale=alone[3]).sum().backward()
    assert torch.equal(inputs[0].grad, alone[0].grad)
    assert torch.equal(inputs[3].grad, alone[3].grad)
    for got, want in zip(inputs[1:3], alone[1:3], strict=True):
        assert torch.equal(got.grad[table].transpose(1, 2).reshape(1, 1, 64, 16)[:, :, :50], want.grad)
    with torch.autograd.forward_ad.dual_level():
        moving = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
        got = paged_attention(moving, key_pages, value_pages, table, lengths)
        assert torch.autograd.forward_ad.unpack_dual(got).tangent is not None


def test_views_that_keep_a_sign_beside_them() -> None:
    key, value, query = three(50, 1)
    (key_pages, table), (value_pages, _) = shuffled(key, 16), shuffled(value, 16)
    lengths = torch.tensor([50])
    want = paged_attention(-query, -key_pages, -value_pages, table, lengths)
    got = paged_attention(*(torch._neg_view(t) for t in (query, key_pages, value_pages)), table, lengths)
    assert torch.equal(got, want)


def test_nothing_at_all() -> None:
    pool = torch.zeros(4, 1, 16, 8)
    no_lengths = torch.zeros(0, dtype=torch.int64)
    got = paged_attention(
        torch.zeros(0, 2, 1, 8), pool, pool, torch.zeros(0, 3, dtype=torch.int64), no_lengths
    )
    assert got.shape == (0, 2, 1, 8)
    got = paged_attention(
        torch.zeros(1, 2, 0, 8), pool[:0], pool[:0], torch.zeros(1, 0, dtype=torch.int64), torch.tensor([0])
    )
    assert got.shape == (1, 2, 0, 8)
    assert KVCache(2, 1, 8, capacity=4).attention(torch.zeros(2, 1, 0, 8)).shape == (2, 1, 0, 8)


def test_inference_mode_on_either_side() -> None:
    one = torch.ones(1, 1, 1, 8)
    for form in ({"capacity": 4}, {"window": 1, "page": 1}):
        with torch.inference_mode():
            cache = KVCache(1, 1, 8, **form)
            cache.append(one, one)
            inside = cache.attention(one)
        cache.append(one, one)
        assert torch.equal(cache.attention(one), inside)


POOL, TABLE, ONE = torch.zeros(4, 1, 16, 8), torch.tensor([[0, 1]]), torch.zeros(1, 1, 1, 8)
NINE = torch.tensor([9])


def small(**form: Any) -> KVCache:
    cache = KVCache(2, 1, 8, capacity=4, **form)
    cache.append(torch.zeros(2, 1, 2, 8), torch.zeros(2, 1, 2, 8))
    return cache


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: paged_attention(ONE, POOL, POOL, torch.tensor([[0, 4]]), torch.tensor([20])), ["page 4", "0 … 3"]),
        (lambda: paged_attention(ONE, POOL, POOL, torch.tensor([[-1, 1]]), torch.tensor([20])), ["page -1"]),
        (lambda: paged_attention(ONE, POOL, POOL, TABLE, torch.tensor([33])), ["33", "32"]),
        (lambda: paged_attention(ONE, POOL, POOL, TABLE, torch.tensor([0])), ["0 keys", "1 queries"]),
        (lambda: paged_attention(ONE, POOL, POOL, TABLE, torch.tensor([-5])), ["-5 keys"]),
        (lambda: paged_attention(ONE[:, :, :0], POOL, POOL, TABLE, torch.tensor([-5])), ["-5 keys"]),
        (lambda: paged_attention(ONE, POOL, POOL, TABLE.float(), NINE), ["table", "integer"]),
        (lambda: paged_attention(ONE, POOL, POOL[:, :, :8], TABLE, NINE), ["value_pages", "equal"]),
        (lambda: paged_attention(ONE, POOL, POOL.double(), TABLE, NINE), ["value_pages", "float64", "float32"]),
        (lambda: paged_attention(ONE, POOL.half(), POOL, TABLE, NINE), ["key_pages", "float16", "float32"]),
        (lambda: paged_attention(ONE, POOL.to("meta"), POOL, TABLE, NINE), ["key_pages", "meta", "cpu"]),
        (lambda: paged_attention(ONE, POOL, POOL, TABLE, torch.tensor([9, 9])), ["lengths", "[1]"]),
        (lambda: paged_attention(ONE, POOL, POOL, TABLE, NINE, window=0), ["window", ">= 1"]),
        (lambda: paged_attention(ONE, POOL, POOL, TABLE, NINE, causal=True), ["causal", "own position"]),
        (lambda: paged_attention(ONE, POOL, POOL, TABLE, NINE, dropout=0.1), ["dropout", "sinks"]),
        (lambda: paged_attention(ONE[..., :4], POOL, POOL, TABLE, NINE), ["key_pages has head_dim 8", "query has 4"]),
        (lambda: paged_attend(ONE[..., :4], POOL, TABLE, NINE), ["key_pages has head_dim 8", "query has 4"]),
        (lambda: paged_attention(ONE.expand(1, 3, 1, 8), POOL.repeat(1, 2, 1, 1), POOL.repeat(1, 2, 1, 1), TABLE,
                                 NINE), ["key_pages and value_pages have 2 heads", "3"]),
        (lambda: paged_attention(ONE, POOL[:, :0], POOL[:, :0], TABLE, NINE), ["value_pages have 0 heads", "has 1"]),
        (lambda: paged_attention(ONE, POOL[:0], POOL[:0], TABLE, NINE), ["0 pages; give it the pages in use"]),
        (lambda: torch.vmap(lambda q: paged_attention(q, POOL, POOL, TABLE, NINE))(ONE[None]), ["torch.func"]),
        (lambda: small().append(torch.zeros(2, 1, 3, 8), torch.zeros(2, 1, 3, 8)), ["capacity=4", "window"]),
        (lambda: small().append(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4)), ["key", "[2, 1, 1, 4]"]),
        (lambda: small().append(torch.zeros(2, 1, 1, 8).half(), torch.zeros(2, 1, 1, 8)), ["float16", "float32"]),
        (lambda: small().append(*[torch.zeros(2, 1, 1, 8)] * 2, lengths=[1.5, 1]), ["1.5", "whole"]),
        (lambda: small().append(*[torch.zeros(2, 1, 1, 8)] * 2, lengths=[2, 0]), ["lengths", "0 … 1"]),
        (lambda: small().append(torch.zeros(2, 1, 1, 8, requires_grad=True), torch.zeros(2, 1, 1, 8)),
         ["key", "gradient", "no_grad"]),
        (lambda: small().attention(torch.zeros(2, 1, 3, 8)), ["2 keys", "3 queries"]),
        (lambda: small(page=2).attention(torch.zeros(2, 1, 1, 8), window=(1, 0)), ["window", "(1, 0)"]),
        (lambda: small().attend(torch.zeros(2, 1, 2, 8), causal=True), ["causal"]),
        (lambda: small().reset(2), ["sequence is 2"]),
        (lambda: small().truncate(0.5), ["0.5", "whole"]),
        (lambda: small().reorder([0]), ["1 entries", "2"]),
        (lambda: small().reorder([0.0, 1.0]), ["order", "whole"]),
        (lambda: small().reorder([0, 2]), ["order", "2"]),
        (lambda: small().fork(0, 5), ["target", "5"]),
        (lambda: KVCache(1, 1, 8), ["capacity"]),
        (lambda: KVCache(1, 1, 8, capacity=8, window=4), ["capacity", "window"]),
        (lambda: KVCache(1, 1, 8, pages=8), ["pages", "page"]),
        (lambda: KVCache(1, 1, 8, capacity=4, dtype=torch.int32), ["int32", "bfloat16"]),
        (lambda: KVCache(1, 1, 0, capacity=2), ["head_dim", ">= 1"]),
    ],
)  # fmt: skip
def test_what_could_read_past_the_memory_is_refused(call: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
