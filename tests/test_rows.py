"""Single rows, read one after another in any order, are the rows of `dense()` to the bit; so are the k best."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import INF, randn

import kizuki
from kizuki import masks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def options(name: str, heads: int, n: int) -> dict[str, Any]:
    seen = torch.rand(heads, n, n, generator=torch.Generator().manual_seed(3)) < 0.6
    seen[:, 5] = False
    return {
        "bare": {},
        "causal": {"causal": True},
        "window": {"window": (9, 2)},
        "mask with an empty row": {"mask": seen},
        "bias": {"bias": randn(heads, n, n, seed=7).masked_fill(~seen, -INF)},
        "sinks and softcap": {"sinks": randn(heads, seed=5), "softcap": 3.0, "causal": True},
        "documents": {"mask": masks.documents([n - 40, 0, 40])},
    }[name]


NAMES = ["bare", "causal", "window", "mask with an empty row", "bias", "sinks and softcap", "documents"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_heads_in_any_order(name: str, dtype: torch.dtype, threads: None) -> None:
    n, heads = 203, 4
    query, key = randn(2, heads, n, 16).to(dtype), randn(2, 2, n, 16, seed=1).to(dtype)
    given = options(name, heads, n)
    for option in ("bias", "sinks"):
        if option in given:
            given[option] = given[option].to(torch.float64 if dtype is torch.float64 else torch.float32)
    A = kizuki.attend(query, key, **given)
    whole = A.dense()
    order = random.Random(0)
    for turn in range(40):
        torch.set_num_threads(1 + turn % 2)  # what was prepared for one thread is not used with two
        b, h, i = order.randrange(2), order.randrange(heads), order.randrange(n)
        assert torch.equal(A[b, h, i], whole[b, h, i]), (b, h, i)


def test_a_row_of_nan_is_told_from_the_rows_around_it() -> None:
    query, key = randn(1, 2, 150, 16), randn(1, 2, 150, 16, seed=1)
    query[0, 1, 7] = torch.nan
    A = kizuki.attend(query, key, causal=True)
    whole = A.dense()
    for i in (6, 7, 8, 7):
        assert torch.equal(A[0, 1, i].isnan(), whole[0, 1, i].isnan())
        assert torch.equal(A[0, 1, i].nan_to_num(9.0), whole[0, 1, i].nan_to_num(9.0))
    assert A[0, 1, 7, :8].isnan().all()
    assert A[0, 1, 7, 8:].eq(0).all()


def test_rows_of_a_matrix_whose_memory_another_one_took() -> None:
    """A new problem may lie where a forgotten one lay: nothing of the old one may be read."""
    for seed in range(6):
        A = kizuki.attend(randn(1, 1, 140, 16, seed=seed), randn(1, 1, 140, 16, seed=seed + 50))
        assert torch.equal(A[0, 0, 3], A[0, 0, 2:5][1])
        del A
        gc.collect()


def test_rows_with_a_bias_whose_sign_is_a_bit_beside_it() -> None:
    query, key, bias = randn(1, 2, 90, 16), randn(1, 2, 90, 16, seed=1), randn(2, 90, 90, seed=2)
    negative = torch.complex(bias, -bias).conj().imag
    assert negative.is_neg()
    A, want = kizuki.attend(query, key, bias=negative), kizuki.attend(query, key, bias=bias).dense()
    for i in (3, 80, 4):
        junk = [
            torch.full((2, 90, 90), torch.nan) for _ in range(4)
        ]  # where a copy that is gone may have lain
        assert torch.equal(A[0, 1, i], want[0, 1, i])
        del junk


def test_two_matrices_in_turn_and_two_threads_at_once() -> None:
    made = [kizuki.attend(randn(1, 2, 300, 16, seed=s), randn(1, 2, 300, 16, seed=s + 9)) for s in (0, 1)]
    whole = [A.dense() for A in made]
    wrong: list[tuple[int, int]] = []

    def read(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(60):
            which, h, i = order.randrange(2), order.randrange(2), order.randrange(300)
            if not torch.equal(made[which][0, h, i], whole[which][0, h, i]):
                wrong.append((which, i))

    workers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize("keys", [1, 7, 8, 119, 120, 121, 127, 128, 129, 135, 136, 255, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_at_the_edges_of_a_block(keys: int, dtype: torch.dtype) -> None:
    """Keys that lie one after the other are read in squares, and none past the last."""
    query, key = randn(1, 1, 3, 64).to(dtype), randn(1, 1, keys, 64, seed=1).to(dtype)
    value = randn(1, 1, keys, 64, seed=2).to(dtype)
    beyond = torch.full((1, 1, keys + 64, 64), torch.nan, dtype=dtype)
    beyond[:, :, :keys] = key
    apart = torch.zeros(1, 1, keys, 128, dtype=dtype)
    apart[..., :64] = key
    want = kizuki.attention(query, key, value)
    assert torch.equal(kizuki.attention(query, beyond[:, :, :keys], value), want)
    assert torch.equal(kizuki.attention(query, apart[..., :64], value), want)
    for row in range(3):
        assert torch.equal(
            kizuki.attention(query[:, :, row : row + 1], key, value), want[:, :, row : row + 1]
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("k", [1, 2, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_k_best_are_those_of_the_dense_row_ties_and_all(dtype: torch.dtype, k: int, causal: bool) -> None:
    n = 333
    query, key = randn(1, 2, n, 16).to(dtype), randn(1, 2, n, 16, seed=1).to(dtype)
    key[0, 0, 50:200] = key[0, 0, 3]  # equal scores, across blocks and across those that wait together
    key[0, 1] *= torch.linspace(0, 4, n).to(dtype)[:, None]  # ever larger ones: every block has newcomers
    A = kizuki.attend(query, key, causal=causal)
    weights, places = A.topk(k)
    dense = A.dense()
    if causal:
        dense = dense.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -1.0)
    want = torch.sort(dense, dim=-1, descending=True, stable=True)
    none = want.values[..., :k] < 0
    assert torch.equal(weights, want.values[..., :k].masked_fill(none, 0.0))
    assert torch.equal(places, want.indices[..., :k].masked_fill(none, -1))
