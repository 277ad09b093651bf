"""Any combination of masks, options, dtypes, layouts and poison, forward and backward, against float64."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import BACKENDS
from problems import brute_agrees, check, draw

import kizuki


@pytest.mark.parametrize("backend", BACKENDS)
@settings(derandomize=True, max_examples=40, deadline=None, database=None)
@given(chance=st.randoms(use_true_random=False))
def test_any_problem(chance: random.Random, backend: str) -> None:
    """PT#101531, PT#100709, PT#118972 and whatever else combines. `benchmarks/fuzz.py` runs any number of them."""
    check(chance.getrandbits(64), backend, largest=12)


@pytest.mark.parametrize("seed", range(12))
def test_the_two_oracles_agree(seed: int) -> None:
    """What the problems are compared with: the dense formula, and the rows one by one, which know nothing of it."""
    assert brute_agrees(draw(random.Random(seed), largest=9))


@pytest.mark.parametrize("lost", ["mask", "causal", "softcap", "sinks", "bias", "scale"])
def test_what_is_lost_is_seen(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: an attention that forgets one of its arguments does not pass."""
    whole = kizuki.attend
    monkeypatch.setattr(
        kizuki, "attend", lambda q, k, **o: whole(q, k, **{n: x for n, x in o.items() if n != lost})
    )

    def problems() -> None:
        for seed in range(200):
            problem = draw(random.Random(seed), largest=9)
            if lost in problem.rules | problem.numbers and problem.query.dtype is torch.float32:
                check(seed, "portable", largest=9)

    with pytest.raises(AssertionError, match="error"):
        problems()
