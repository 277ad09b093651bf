"""Does a KV cache give what the keys in one piece give, however they lie, and never move them?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kizuki
from kizuki import masks
from kizuki.nn import KVCache, paged_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
PAGES = [1, 16, 48, 128, 1000]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shuffled(key: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """The keys `[batch, kv_heads, n, d]` in pages out of order, and the table that finds them."""
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
    key, value = randn(2, 2, 1100, 32, seed=1, dtype=dtype), randn(2, 2, 1100, 16, seed=2, dtype=dtype)
    (key_pages, table), (value_pages, _) = shuffled(key, page), shuffled(value, page)
    lengths = torch.tensor([1100, 1100])
    for queries in (1, 3, 9):
        query = randn(2, 6, queries, 32, seed=3, dtype=dtype)
        for options in ({}, {"softcap": 3.0, "sinks": randn(6, seed=4, dtype=dtype)}):
            want = kizuki.attention(query, key, value, mask=masks.causal("lower_right"), **options)
            got = paged_attention(query, key_pages, value_pages, table, lengths, **options)
            assert torch.equal(got, want)


def test_ragged_sequences_and_a_window_are_those_alone() -> None:
    key, value, query = randn(3, 1, 300, 16, seed=1), randn(3, 1, 300, 16, seed=2), randn(3, 2, 2, 16, seed=3)
    (key_pages, table), (value_pages, _) = shuffled(key, 32), shuffled(value, 32)
    lengths = [2, 150, 300]
    for window in (None, 40):
        got = paged_attention(query, key_pages, value_pages, table, torch.tensor(lengths), window=window)
        for b, n in enumerate(lengths):
            rule = masks.causal("lower_right")
            if window is not None:
                rule = rule & masks.window(window - 1, 0, align="lower_right")
            want = kizuki.attention(query[b], key[b, :, :n], value[b, :, :n], mask=rule)
            assert torch.equal(got[b], want)


@pytest.mark.parametrize(
    "form", [{"capacity": 200}, {"capacity": 200, "page": 24}], ids=["one piece", "pages"]
)
def test_one_by_one_is_all_at_once(form: dict[str, Any]) -> None:
    key, value, query = (
        randn(2, 2, 150, 16, seed=1),
        randn(2, 2, 150, 16, seed=2),
        randn(2, 4, 150, 16, seed=3),
    )
    cache = KVCache(2, 2, 16, **form)
    where = cache._key.data_ptr()
    rows = []
    for i in range(150):
        cache.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
        rows.append(cache.attention(query[:, :, i : i + 1]))
    assert torch.equal(torch.cat(rows, 2), kizuki.attention(query, key, value, causal=True))
    assert cache._key.data_ptr() == where, "the cache moved"
    assert torch.equal(cache.key, key)
    assert torch.equal(cache.value, value)
    whole = KVCache(2, 2, 16, **form)
    whole.append(key, value)
    assert torch.equal(whole.attention(query[:, :, -7:]), torch.cat(rows[-7:], 2))
    A = whole.attend(query[:, :, -7:])
    assert torch.equal(A @ whole.value, torch.cat(rows[-7:], 2))
    assert torch.allclose(A.received().sum(-1), torch.tensor(7.0))


def test_a_window_uses_its_pages_again() -> None:
    key, value, query = (
        randn(1, 1, 900, 16, seed=1),
        randn(1, 1, 900, 16, seed=2),
        randn(1, 2, 900, 16, seed=3),
    )
    cache = KVCache(1, 1, 16, window=100, page=32)
    where, pages = cache._key.data_ptr(), cache._key.shape[0]
    assert pages * 32 < 200
    at, worst = 0, 0.0
    want = kizuki.attention(query, key, value, causal=True, window=(99, None))
    for n in [1] * 40 + [5] * 20 + [1] * 400 + [13] * 20:
        cache.append(key[:, :, at : at + n], value[:, :, at : at + n])
        got = cache.attention(query[:, :, at : at + n])
        worst = max(worst, float((got - want[:, :, at : at + n]).abs().max()))
        at += n
    assert worst < 2e-6  # sums start at another key block; the contract's tolerance is checked next
    assert (cache._key.data_ptr(), cache._key.shape[0]) == (where, pages), "the window grew or moved"
    assert cache.lengths.tolist() == [at]
    report = kizuki.check(
        query[:, :, at - 1 : at], cache.key[:, :, -100:], cache.value[:, :, -100:], backend="cpu"
    )
    assert report.ok
    with pytest.raises(ValueError, match="gone"):
        cache.attention(query[:, :, :200])


def test_a_prefill_longer_than_the_window() -> None:
    key, value, query = (
        randn(1, 1, 400, 16, seed=1),
        randn(1, 1, 400, 16, seed=2),
        randn(1, 1, 400, 16, seed=3),
    )
    cache = KVCache(1, 1, 16, window=64, page=16)
    cache.append(key, value)
    want = kizuki.attention(query, key, value, causal=True, window=(63, None))
    assert torch.equal(cache.attention(query), want)


def test_forks_share_pages_until_one_writes() -> None:
    cache = KVCache(3, 1, 8, page=16, pages=12)
    key, value = randn(3, 1, 40, 8, seed=1), randn(3, 1, 40, 8, seed=2)
    cache.append(key, value, lengths=[40, 0, 0])
    assert len(cache._free) == 9
    cache.fork(0, 1)
    assert len(cache._free) == 9, "a fork takes no page"
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
    assert len(cache._free) == 12, "a page was lost"


def test_a_step_takes_no_memory_that_grows_with_the_cache() -> None:
    cache = KVCache(1, 1, 64, capacity=65536, page=128)
    cache.append(randn(1, 1, 65536, 64), randn(1, 1, 65536, 64))
    query = randn(1, 4, 1, 64)
    cache.attention(query)
    with torch.profiler.profile(profile_memory=True) as seen:
        cache.attention(query)
    taken = sum(max(0, event.self_cpu_memory_usage) for event in seen.events())
    assert taken < 1 << 20, f"{taken} bytes for one step on a cache of 32 MB"


def test_other_backends_and_gradients_gather() -> None:
    key, value, query = randn(1, 1, 50, 8, seed=1), randn(1, 1, 50, 8, seed=2), randn(1, 2, 2, 8, seed=3)
    (key_pages, table), (value_pages, _) = shuffled(key, 16), shuffled(value, 16)
    lengths = torch.tensor([50])
    want = kizuki.attention(query, key, value, mask=masks.causal("lower_right"), backend="portable")
    got = paged_attention(query, key_pages, value_pages, table, lengths, backend="portable")
    assert torch.allclose(got, want, atol=1e-6)
    learned = query.clone().requires_grad_()
    paged_attention(
        learned, key_pages.nan_to_num(), value_pages.nan_to_num(), table, lengths
    ).sum().backward()
    assert learned.grad is not None
    assert learned.grad.any()


POOL, TABLE, ONE = torch.zeros(4, 1, 16, 8), torch.tensor([[0, 1]]), torch.zeros(1, 1, 1, 8)


def small() -> KVCache:
    cache = KVCache(2, 1, 8, capacity=4)
    cache.append(torch.zeros(2, 1, 2, 8), torch.zeros(2, 1, 2, 8))
    return cache


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: paged_attention(ONE, POOL, POOL, torch.tensor([[0, 4]]), torch.tensor([20])), ["page 4", "3"]),
        (lambda: paged_attention(ONE, POOL, POOL, torch.tensor([[-1, 1]]), torch.tensor([20])), ["page -1"]),
        (lambda: paged_attention(ONE, POOL, POOL, TABLE, torch.tensor([33])), ["33", "32"]),
        (lambda: paged_attention(ONE, POOL, POOL, TABLE, torch.tensor([0])), ["0 keys", "1 queries"]),
        (lambda: paged_attention(ONE, POOL, POOL, TABLE, torch.tensor([-5])), ["-5 keys"]),
        (lambda: paged_attention(ONE, POOL, POOL, TABLE.float(), torch.tensor([9])), ["table", "integer"]),
        (lambda: paged_attention(ONE, POOL, POOL[:, :, :8], TABLE, torch.tensor([9])), ["value_pages", "equal"]),
        (lambda: paged_attention(ONE, POOL, POOL, TABLE, torch.tensor([9, 9])), ["lengths", "[1]"]),
        (lambda: paged_attention(ONE, POOL, POOL, TABLE, torch.tensor([9]), window=0), ["window", ">= 1"]),
        (lambda: paged_attention(ONE[..., :4], POOL, POOL, TABLE, torch.tensor([9])), ["head_dim"]),
        (lambda: paged_attention(ONE.expand(1, 3, 1, 8), POOL.repeat(1, 2, 1, 1), POOL.repeat(1, 2, 1, 1), TABLE,
                                 torch.tensor([9])), ["2 heads", "3"]),
        (lambda: small().append(torch.zeros(2, 1, 3, 8), torch.zeros(2, 1, 3, 8)), ["capacity=4", "window"]),
        (lambda: small().append(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4)), ["key", "[2, 1, 1, 4]"]),
        (lambda: small().append(torch.zeros(2, 1, 1, 8).half(), torch.zeros(2, 1, 1, 8)), ["float16", "float32"]),
        (lambda: small().attention(torch.zeros(2, 1, 3, 8)), ["2 keys", "3 queries"]),
        (lambda: small().reset(2), ["sequence is 2"]),
        (lambda: KVCache(1, 1, 8), ["capacity"]),
        (lambda: KVCache(1, 1, 0, capacity=2), ["head_dim", ">= 1"]),
    ],
)  # fmt: skip
def test_what_could_read_past_the_memory_is_refused(call: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
