"""Seeing while computing: the output keeps its bits, readings are the same folded in or alone, statistics merge."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import fields
from typing import Any

import pytest
import torch
from oracle import BACKENDS, INF, NAN, brute, causal, randn
from tolerance import assert_accurate
from torch import Tensor

import kizuki
from kizuki import masks, portable, reference
from kizuki.problem import build
from kizuki.statistics import READINGS, Frame

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ALL = kizuki.Observe(
    topk=3, entropy=True, received="mean", max=True, max_score=True, distance=True, pool=(5, 7)
)
Q, K, N = 151, 301, 1  # more than one query block, more than one key block

ragged = torch.rand(2, 3, Q, K, generator=torch.Generator().manual_seed(1)) < 0.6
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask": masks.causal("lower_right")},
    "window": {"mask": masks.window(40, 3, align="lower_right")},
    "keys": {"mask": masks.keys(torch.arange(K) % 7 > 0)},
    "lengths": {"mask": masks.lengths(query=torch.tensor([150, 3]), key=torch.tensor([9, 301]))},
    "dense": {"mask": ragged},
    "where": {"mask": masks.where(lambda b, h, i, j: (i + j) % 3 > 0)},
    "bias": {"bias": torch.where(ragged[0], randn(3, Q, K, seed=4), -INF)},
    "softcap and sinks": {"softcap": 5.0, "sinks": torch.tensor([0.0, 2.0, -INF])},
    "score": {"score": lambda s, b, h, i, j: s - 0.01 * j},
    "nothing visible": {"mask": masks.keys(torch.zeros(K, dtype=torch.bool))},
}


def inputs(dtype: torch.dtype = F32) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 3, Q, 8), (2, 1, K, 8), (2, 1, K, 5))
    return tuple(randn(*shape, seed=at, dtype=dtype) for at, shape in enumerate(shapes))  # type: ignore[return-value]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(torch.nan_to_num(a, nan=7.0), torch.nan_to_num(b, nan=7.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("name", MASKS)
def test_looking_changes_nothing(name: str, dtype: torch.dtype, backend: str) -> None:
    """Contract 9; and a reading folded into the forward pass has the bits of the same reading asked for alone."""
    query, key, value = inputs(dtype)
    options = {**MASKS[name], "backend": backend}
    alone = kizuki.attention(query, key, value, **options)
    output, seen = kizuki.attention(query, key, value, observe=ALL, **options)
    assert output.dtype is dtype
    assert torch.equal(output, alone)
    matrix = kizuki.attend(query, key, **options)
    one_by_one = {
        "topk": matrix.topk(3),
        "entropy": matrix.entropy(),
        "received": matrix.received("mean"),
        "max": matrix.max(),
        "max_score": matrix.max_score(),
        "distance": matrix.distance(),
        "pool": matrix.pool(5, 7),
        "lse": matrix.lse,
    }
    for reading, wanted in one_by_one.items():
        assert same(getattr(seen, reading), wanted), reading
    again = kizuki.attend(query, key, **options).observe(ALL)
    for field in fields(seen):
        got = getattr(again, field.name)
        assert (got is None) == (getattr(seen, field.name) is None)
        assert got is None or same(got, getattr(seen, field.name)), field.name


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_flow_through_an_observed_output(backend: str) -> None:
    plain = [t.requires_grad_() for t in inputs()]
    kizuki.attention(*plain, backend=backend).square().sum().backward()
    watched = [t.requires_grad_() for t in inputs()]
    output, seen = kizuki.attention(*watched, backend=backend, observe=ALL)
    output.square().sum().backward()
    for a, b in zip(plain, watched, strict=True):
        assert torch.equal(a.grad, b.grad)
    assert seen.entropy is not None
    assert not seen.entropy.requires_grad


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "topk": (4,),
    "received": ("mean", 33),
    "pool": (4, 6, "peak"),
}


def made(frame: Frame) -> dict[str, Any]:
    return {name: kind(frame, *ARGUMENTS.get(name, ())) for name, kind in READINGS.items()}


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("split", ["rows", "cols", "alternating"])
def test_statistics_merge(split: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that each saw a part of the tiles, merged, know what one knows that saw all of them."""
    monkeypatch.setattr(portable, "TILE", 1 << 12)
    query, key, _ = inputs(dtype)
    problem = build(query, key, mask=ragged)
    norm = portable.split(problem, portable.lse(problem))
    whole, first, second = (made(Frame.of(problem)) for _ in range(3))
    for at, block in enumerate(portable.tiles(problem)):
        early = {"rows": block.rows.start < 70, "cols": block.cols.start < 90, "alternating": at % 2 == 0}
        weights = block.weights(norm)
        for name in READINGS:
            whole[name].update(block, weights)
            (first if early[split] else second)[name].update(block, weights)
    for name in READINGS:
        first[name].merge(second[name])
        got, wanted = first[name].finalize(), whole[name].finalize()
        if name == "topk":
            assert torch.equal(got[1], wanted[1])
            got, wanted = got[0], wanted[0]
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("name", ["dense", "softcap and sinks", "nothing visible"])
def test_the_reference_reads_by_the_same_classes(name: str) -> None:
    query, key, _ = inputs()
    problem = build(query, key, **MASKS[name])
    statistics = made(Frame.of(problem, F64))
    reference.read(problem, list(statistics.values()))
    options = {n: v for n, v in MASKS[name].items() if n != "mask"}
    visible = {"dense": ragged, "nothing visible": torch.zeros(Q, K, dtype=torch.bool)}.get(name)
    weights = brute(query, key, visible=visible, **options).weights
    assert torch.allclose(statistics["entropy"].finalize(), torch.special.entr(weights).sum(-1), atol=1e-12)
    assert torch.allclose(statistics["max"].finalize(), weights.amax(-1), atol=1e-12)
    after = torch.arange(K) > torch.arange(Q).unsqueeze(-1) + K - Q
    assert torch.allclose(statistics["future"].finalize(), (weights * after).sum(-1), atol=1e-12)
    assert torch.allclose(statistics["topk"].finalize()[0], weights.topk(4).values, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_received_over_the_last_queries(backend: str) -> None:
    query, key, _ = inputs()
    options: dict[str, Any] = {"mask": masks.causal("lower_right"), "backend": backend}
    truth = brute(query, key, visible=causal(Q, K, "lower_right"))
    weights = kizuki.attend(query, key, **options).dense()
    for last in (1, 6, 100, Q, 10 * Q):
        got = kizuki.attend(query, key, **options).received(last=last)
        assert_accurate(
            got, truth.weights[:, :, -last:].sum(-2), weights[:, :, -last:].sum(-2), f"last {last}"
        )
        mean = kizuki.attend(query, key, **options).received("mean", last=last)
        seen = truth.seen[:, :, -last:].sum(-2).clamp(min=1)
        assert torch.allclose(mean, (truth.weights[:, :, -last:].sum(-2) / seen).float(), atol=1e-6)
    seen_in_passing = kizuki.attend(query, key, **options).observe(kizuki.Observe(received=True, last=6))
    assert torch.equal(seen_in_passing.received, kizuki.attend(query, key, **options).received(last=6))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["query", "key", "inf"])
def test_a_row_that_is_nan_spoils_what_it_sees_and_nothing_else(where: str, backend: str) -> None:
    query, key, _ = inputs()
    if where == "query":
        query[1, 2, 70, 3] = NAN
    elif where == "key":
        key[1, 0, 220, 1] = NAN  # seen by the last queries only
    else:
        query[1, 2, 70, 3], key[1, 0, 100, 3] = INF, 1.0
    options: dict[str, Any] = {"mask": masks.causal("lower_right"), "backend": backend}
    clean_query, clean_key, _ = inputs()
    matrix = kizuki.attend(query, key, **options)
    clean = kizuki.attend(clean_query, clean_key, **options)
    odd = matrix.lse.isnan()
    assert odd.any()
    assert not odd.all()
    visible = torch.from_numpy(causal(Q, K, "lower_right"))
    for reading in ("entropy", "max", "distance"):
        got, wanted = getattr(matrix, reading)(), getattr(clean, reading)()
        assert torch.equal(got.isnan(), odd), reading
        if where == "query":
            assert torch.equal(got[~odd], wanted[~odd]), reading
    weights, keys = matrix.topk(3)
    assert weights[odd].isnan().all()
    assert (keys[odd] == torch.arange(3)).all()
    assert not weights[~odd].isnan().any()
    spoiled = (odd.unsqueeze(-1) & visible).any(-2)
    assert torch.equal(matrix.received().isnan(), spoiled)
    row_of, col_of = torch.arange(Q) * 5 // Q, torch.arange(K) * 7 // K
    pixel = torch.zeros(2, 3, 5, 7, dtype=torch.bool)
    for b, h, i in odd.nonzero().tolist():
        pixel[b, h, row_of[i], col_of[visible[i]].unique()] = True
    for reduce in ("mass", "peak"):
        assert torch.equal(matrix.pool(5, 7, reduce).isnan(), pixel), reduce


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_huge_scores_cost_no_digits(dtype: torch.dtype, backend: str) -> None:
    """A bias of finfo.min makes lse too large to hold its own digits; neither that row nor another suffers."""
    query, key, _ = inputs(dtype)
    bias = torch.zeros(Q, 1, dtype=dtype)
    bias[5], bias[6] = torch.finfo(dtype).min / 4, 1e5
    matrix = kizuki.attend(query, key, bias=bias, backend=backend)
    plain = kizuki.attend(query, key, backend=backend)
    others = torch.arange(Q) != 5
    others[6] = False
    if backend == "cpu":  # the portable rows share their matrix products
        assert torch.equal(matrix.entropy()[..., others], plain.entropy()[..., others])
    assert matrix.entropy()[..., 5].allclose(torch.tensor(K, dtype=dtype).log(), rtol=1e-5)
    assert matrix.max()[..., 5].allclose(torch.tensor(1 / K, dtype=dtype), rtol=1e-5)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no compiled kernels here")
def test_shorter_strips_and_threads_change_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few queries a block has, rows keep their bits; column sums add up in another order."""
    from kizuki.cpu import watch

    query, key, value = inputs()
    options: dict[str, Any] = {"mask": masks.causal("lower_right"), "observe": ALL, "backend": "cpu"}
    output, seen = kizuki.attention(query, key, value, **options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one, alone = kizuki.attention(query, key, value, **options)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(output, one)
    for field in fields(seen):
        if getattr(seen, field.name) is not None:
            assert same(getattr(seen, field.name), getattr(alone, field.name)), field.name
    single = kizuki.attention(query[1:], key[1:], value[1:], **options)[1]
    for name in ("received", "pool", "entropy"):
        assert torch.equal(getattr(single, name), getattr(seen, name)[1:]), name
    monkeypatch.setattr(watch, "STRIP", 1)
    short, seen_in_strips = kizuki.attention(query, key, value, **options)
    assert torch.equal(short, output)
    assert same(seen_in_strips.entropy, seen.entropy)
    assert same(seen_in_strips.topk, seen.topk)
    for name in ("received", "pool"):
        assert torch.allclose(getattr(seen_in_strips, name), getattr(seen, name), rtol=1e-5, atol=1e-7), name


def test_a_sink_that_takes_everything_leaves_nothing_to_see() -> None:
    query, key, _ = inputs()
    matrix = kizuki.attend(query, key, sinks=torch.tensor([1e4, 0.0, 3e38]))
    for reading in (matrix.entropy(), matrix.max(), matrix.received(), matrix.topk(2)[0]):
        assert not reading[:, 0].any()
        assert not reading[:, 2].any()
        assert reading[:, 1].any()


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no compiled kernels here")
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("name", ["none", "causal", "window", "dense", "bias", "softcap and sinks"])
def test_a_weight_is_the_same_number_wherever_it_is_read(name: str, dtype: torch.dtype) -> None:
    """All of A, a row, a few rows, scattered ones, a block, the top, the largest: one arithmetic, the same bits."""
    query, key, _ = inputs(dtype)
    matrix = kizuki.attend(query, key, backend="cpu", **MASKS[name])
    whole = matrix.dense()
    scattered = [3, 4, 100, 101, 130, 150]
    assert torch.equal(matrix[1, 2, 77], whole[1, 2, 77])
    assert torch.equal(matrix[0, 1, 20:140], whole[0, 1, 20:140])
    assert torch.equal(matrix[1, 0, scattered], whole[1, 0, scattered])
    assert torch.equal(matrix[:, :, 7:9, 20:240:3], whole[:, :, 7:9, 20:240:3])
    assert torch.equal(
        matrix[0, [1, 2, 2], [150, 8, 9], [4, 300, 0]], whole[0, [1, 2, 2], [150, 8, 9], [4, 300, 0]]
    )
    weights, keys = matrix.topk(5)
    assert torch.equal(whole.gather(-1, keys.clamp(min=0)).where(keys >= 0, 0.0), weights)
    assert torch.equal(matrix.max(), whole.amax(-1))
    # A picture scales what the softmax left (exp(s − m)·exp(m − max)), which may round the last bit otherwise.
    assert torch.allclose(matrix.pool(Q, K, "peak"), whole, rtol=1e-6, atol=1e-9)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no compiled kernels here")
@pytest.mark.parametrize("how", [slice(70, 71), slice(60, 130)])
def test_rows_that_are_nan_are_read_like_others(how: slice) -> None:
    query, key, _ = inputs()
    query[1, 2, 70, 3] = NAN
    options: dict[str, Any] = {"mask": masks.causal("lower_right")}
    got = kizuki.attend(query, key, backend="cpu", **options)[1, 2, how]
    assert same(got, kizuki.attend(query, key, backend="cpu", **options).dense()[1, 2, how])
    wanted = kizuki.attend(query, key, backend="portable", **options)[1, 2, how]
    assert torch.equal(got.isnan(), wanted.isnan())
    assert got.isnan().any()


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no compiled kernels here")
@pytest.mark.parametrize("name", MASKS)
def test_rows_read_one_after_another(name: str) -> None:
    """What is kept from one row to the next neither goes stale nor belongs to another matrix, head or thread."""
    query, key, _ = inputs()
    matrix = kizuki.attend(query, key, backend="cpu", **MASKS[name])
    other = kizuki.attend(query.flip(2), key.flip(2), backend="cpu", **MASKS[name])
    whole, others = matrix.dense(), other.dense()
    found: list[bool] = []
    compiled = name in (
        "where",
        "score",
    )  # a function knows its plane's number, so that rows are torch's there

    def equal(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=1e-4, atol=1e-6) if compiled else torch.equal(a, b)

    def read(places: list[tuple[int, int, int]]) -> None:
        for b, h, i in places:
            found.append(equal(matrix[b, h, i], whole[b, h, i]))
            if i % 3 == 0:
                found.append(equal(other[b, h, i], others[b, h, i]))

    places = [(b, h, i) for b in (0, 1) for h in (0, 2) for i in (0, 1, 2, 77, 150)]
    threads = [threading.Thread(target=read, args=(places[at:],)) for at in (0, 3, 5)]
    for thread in threads:
        thread.start()
    read(places)
    for thread in threads:
        thread.join()
    assert all(found)
    assert len(found) > 60
    key.mul_(0.5)  # written to in place: the next row is that of the new keys
    assert torch.equal(matrix[1, 2, 77], kizuki.attend(query, key, backend="cpu", **MASKS[name])[1, 2, 77])


def test_reading_a_row_keeps_no_matrix_alive() -> None:
    query, key, _ = inputs()
    matrix = kizuki.attend(query, key)
    _ = matrix[0, 0, 3]
    gone = weakref.ref(key)
    del matrix, key, _
    gc.collect()
    assert gone() is None


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no compiled kernels here")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ["none", "causal", "window", "dense", "lengths"])
def test_keys_packed_where_they_are_used(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long keys are packed block by block by the thread that reads them; whoever packs them, the bits are the same."""
    from kizuki.cpu import call

    query, key, value = inputs(dtype)
    value[0, 0, 200, 1] = NAN
    options: dict[str, Any] = {**MASKS[name], "observe": ALL, "backend": "cpu"}
    output, seen = kizuki.attention(query, key, value, **options)
    monkeypatch.setattr(call, "LOCAL", 1)
    alone, again = kizuki.attention(query, key, value, **options)
    plain = kizuki.attention(query, key, value, **MASKS[name], backend="cpu")
    assert same(alone, output)
    assert same(plain, output)
    for field in fields(seen):
        if getattr(seen, field.name) is not None:
            assert same(getattr(again, field.name), getattr(seen, field.name)), field.name
    assert same(
        kizuki.attend(query, key, **MASKS[name]).dense(), kizuki.attend(query, key, **MASKS[name]).dense()
    )


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no compiled kernels here")
def test_long_keys_in_pages_are_still_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    from kizuki import nn
    from kizuki.cpu import call

    cache = nn.KVCache(1, 2, 8, page=16, pages=5)
    query, key, value = randn(1, 2, 40, 8), randn(1, 2, 70, 8, seed=1), randn(1, 2, 70, 8, seed=2)
    cache.append(key, value)
    wanted = cache.attention(query)
    monkeypatch.setattr(call, "LOCAL", 1)
    assert torch.equal(cache.attention(query), wanted)
    assert torch.equal(wanted, kizuki.attention(query, key, value, mask=masks.causal("lower_right")))
