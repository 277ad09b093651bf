"""Named segments, leaks, and proofs on demand: what `A.mass`, `A.leaks` and `A.verify` say, and when they say no."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import BACKENDS, INF, NAN, brute, causal, randn
from torch import Tensor

import kizuki
from kizuki import masks, models
from kizuki.backends import Portable
from kizuki.operator import AttentionMatrix

SEGMENTS = {"system": (0, 4), "document": slice(4, 9), "question": torch.tensor([9, 11]), "nothing": (3, 3)}
IDS = torch.tensor([0] * 4 + [1] * 5 + [2, -1, 2])


def matrix(queries: int = 12, backend: str = "auto", **options: Any) -> AttentionMatrix:
    return kizuki.attend(randn(2, 3, queries, 8), randn(2, 3, 12, 8, seed=1), backend=backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_named_segments_are_numbered_groups(backend: str) -> None:
    a = matrix(backend=backend, causal=True)
    whole = a.mass(SEGMENTS, rows=SEGMENTS)
    assert tuple(whole.shape) == (2, 3, 4, 4)
    assert torch.equal(whole[..., :3, :3], a.mass(IDS, rows=IDS))
    assert not whole[..., 3, :].any()
    assert not whole[..., :, 3].any()
    assert torch.equal(a.mass(SEGMENTS)[..., :3], a.mass(IDS))
    assert torch.equal(a.mass(SEGMENTS, rows=["question", "system"]), whole[..., [2, 0], :])
    assert torch.equal(a.mass(SEGMENTS, rows="question"), whole[..., [2], :])
    seen = torch.zeros(12, dtype=torch.bool)
    seen[4:9] = True
    assert torch.equal(a.mass({"document": seen}), whole_rows := a.mass(SEGMENTS)[..., 1:2])
    assert tuple(whole_rows.shape) == (2, 3, 12, 1)


def test_a_query_stands_at_its_own_position() -> None:
    """Behind a cache the queries are the last positions, and so are the rows a name means."""
    whole = matrix(causal=True)
    behind = kizuki.attend(whole.query[:, :, 8:], whole.key, mask=masks.causal("lower_right"))
    named = behind.mass(SEGMENTS, rows=["question", "system"])
    assert torch.allclose(named[..., 0, :], whole.mass(SEGMENTS, rows=["question"])[..., 0, :], atol=1e-6)
    assert not named[..., 1, :].any(), "no query of the system prompt is there"


BAD: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "overlap": (lambda: matrix().mass({"a": (0, 5), "b": (4, 6)}), ["'b'", "overlaps", "'a'"]),
    "outside": (lambda: matrix().mass({"a": (0, 13)}), ["'a'", "12", "0 … 11"]),
    "a number": (lambda: matrix().mass({"a": 3}), ["'a'", "(start, stop)"]),
    "bool of another length": (
        lambda: matrix().mass({"a": torch.ones(3, dtype=torch.bool)}),
        ["[3]", "[12]"],
    ),
    "unknown name": (lambda: matrix().mass(SEGMENTS, rows=["answer"]), ["'answer'", "'question'"]),
    "names without names": (lambda: matrix().mass(IDS, rows=["answer"]), ["rows", "mapping"]),
    "rows of a wrong kind": (lambda: matrix().mass(SEGMENTS, rows=3), ["rows", "int", "integer tensor"]),
    "documents of another length": (lambda: matrix().leaks(documents=IDS[:5]), ["documents", "[5]", "[12]"]),
    "documents of floats": (
        lambda: matrix().leaks(documents=IDS.float()),
        ["documents", "float32", "integer"],
    ),
    "padding of ints": (lambda: matrix().leaks(padding=IDS), ["padding", "int64", "bool"]),
    "padding of another length": (
        lambda: matrix().leaks(padding=torch.ones(3, dtype=torch.bool)),
        ["padding", "[3]", "[12]"],
    ),
    "no rows": (lambda: matrix().verify(rows=0), ["rows", "0", ">= 1"]),
    "a seed of words": (lambda: matrix().verify(seed="a"), ["seed", "'a'", "whole number"]),
    "future of words": (lambda: matrix().leaks(future="no"), ["future", "'no'", "True or False"]),
    "heads that do not divide": (
        lambda: kizuki.nn.MultiheadAttention(7, 2),
        ["embed_dim is 7", "num_heads, 2"],
    ),
    "words of no tokens": (lambda: models.join(3), ["tokens", "int", "tokenize"]),
    "no cells": (lambda: matrix().verify(cells=1.5), ["cells", "1.5", "whole number"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line(name: str) -> None:
    call, parts = BAD[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    for part in parts:
        assert part in line


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_leaks_through_a_mask(backend: str) -> None:
    padded = torch.tensor([[False] * 12, [True] * 3 + [False] * 9])
    ids = torch.tensor([0] * 4 + [1] * 8)
    mask = masks.causal() & masks.documents([4, 8]) & masks.keys(~padded)
    found = matrix(backend=backend, mask=mask).leaks(documents=ids, padding=padded)
    assert found.none
    assert str(found) == "future: none; other documents: none; padding: none"
    for tensor in (found.future, found.documents, found.padding):
        assert tensor is not None
        assert tuple(tensor.shape) == (2, 3)
        assert not tensor.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_leaks_are_found_where_they_are(backend: str) -> None:
    a = matrix(backend=backend)
    truth = brute(a.query, a.key).weights
    ids = torch.arange(12) // 4
    padding = torch.arange(12) >= 10
    found = a.leaks(documents=ids, padding=padding)
    after = torch.ones(12, 12).triu(1)
    other = ids[:, None] != ids
    for got, weights in (
        (found.future, truth * after),
        (found.documents, truth * other),
        (found.padding, truth * padding),
    ):
        assert got is not None
        assert torch.allclose(got.double(), weights.sum(-1).amax(-1), atol=1e-6)
    assert not found.none
    assert "future: LEAK in 6 of 6 heads" in str(found)
    one = kizuki.attend(a.query, a.key, bias=torch.full((12, 12), -40.0).triu(1), backend=backend).leaks()
    assert one.future is not None
    assert (one.future > 0).all(), "a large negative number is not absence"
    assert matrix(backend=backend).leaks(future=False).none
    assert str(matrix(backend=backend).leaks(future=False)) == "nothing was asked for"


def test_a_nan_is_no_proof_and_does_not_hide_a_clean_head() -> None:
    a = matrix(causal=True)
    query = a.query.clone()
    query[0, 1, 5] = NAN
    found = kizuki.attend(query, a.key, causal=True).leaks(documents=torch.zeros(12, dtype=torch.int64))
    assert found.none, "row 5 is NaN, on keys that it may see"
    assert not replace(found, future=torch.tensor([NAN])).none


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "sinks": {"sinks": torch.tensor([0.5, 3.0, -INF])},
    "window": {"mask": masks.window(2, 0)},
    "rows that see nothing": {"mask": masks.lengths(query=torch.tensor([12, 3]), key=torch.tensor([12, 4]))},
    "bias": {"bias": randn(12, 12, seed=5)},
    "score": {"score": lambda s, b, h, i, j: s * 0.5},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_verify_holds(name: str, backend: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        query, key = randn(2, 3, 12, 8, dtype=dtype), randn(2, 3, 12, 8, seed=1, dtype=dtype)
        found = kizuki.attend(query, key, backend=backend, **OPTIONS[name]).verify(rows=30)
        assert found.ok, str(found)
        assert len(found.checks) == 5
        assert all(check.places > 0 for check in found.checks)


def test_verify_at_length_and_with_nan() -> None:
    query, key = randn(1, 2, 700, 16), randn(1, 2, 900, 16, seed=1)
    a = kizuki.attend(query, key, mask=masks.causal("lower_right"))
    assert a.verify().ok, str(a.verify())
    assert str(a.verify()).count("ok ") == 5
    query[0, 0, 3] = NAN
    assert kizuki.attend(query, key, mask=masks.causal("lower_right")).verify(rows=100).ok
    assert kizuki.attend(torch.ones(0, 4), torch.ones(3, 4)).verify().ok
    assert kizuki.attend(torch.ones(1, 4), torch.ones(1, 4)).verify().ok


class Wrong(Portable):
    """A backend that is wrong in one way."""

    def __init__(self, way: str) -> None:
        self.way = way

    def rows(self, problem: Any, b: int, h: int, i: Tensor, first: int, stop: int) -> Tensor:
        made = super().rows(problem, b, h, i, first, stop)
        if self.way == "rows":
            return made * 1.001
        return made.flip(-1) if self.way == "cells" else made

    def observe(self, problem: Any, value: Any, statistics: Any, lse: Any = None) -> Any:
        made = super().observe(problem, value, statistics, lse)
        for statistic in statistics:
            kind = type(statistic).__name__
            if self.way == "received" and kind == "Received":
                statistic.total *= 1.001
            if self.way == "top" and kind == "TopK":
                statistic.best.codes[..., 0] -= 1  # the key beside it
            if self.way == "pool" and kind == "Pool" and statistic.picture.shape[-1] > 6:
                statistic.picture[..., 0] *= 1.001
        return made


@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("rows", "sum to 1"),
        ("cells", "cells"),
        ("received", "received"),
        ("top", "top 8"),
        ("pool", "pooled"),
    ],
)
def test_verify_finds_what_is_wrong(way: str, what: str) -> None:
    good = matrix()
    found = AttentionMatrix(good.problem, Wrong(way)).verify()
    assert not found.ok
    wrong = [check.what for check in found.checks if not check.ok]
    assert any(what in name for name in wrong), wrong
    assert "WRONG" in str(found)


def test_future_counts_from_the_right_end() -> None:
    query, key = randn(1, 1, 5, 4), randn(1, 1, 9, 4, seed=1)
    truth = brute(query, key).weights
    hidden = ~torch.from_numpy(causal(5, 9, "lower_right"))
    got = kizuki.attend(query, key).future()
    assert torch.allclose(got.double(), (truth * hidden).sum(-1), atol=1e-6)


@pytest.mark.model
def test_verify_raises_no_false_alarm_on_a_real_model() -> None:
    """Large scores and peaked rows, as SmolLM2 has them: where a yardstick taken from single rows was too short."""
    from importlib import resources

    from kizuki.models import load, run

    text = resources.files("kizuki").joinpath("samples/noticing.txt").read_text(encoding="utf-8")
    recording = run(load("smollm2"), text).recording
    for layer in recording.layers:
        found = recording[layer].verify(rows=4, cells=16)
        assert found.ok, f"layer {layer}: {found}"
