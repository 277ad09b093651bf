"""Does each emitted body give what its twin (tests/twins/) says it means? On plain and on hostile operands.

The same bits where the order of the sums is promised, else within what the body's docstring promises. Everything
around the operands is compared too: a body that writes a byte too far is seen.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import twins
from twins import emitted
from twins.arena import Arena, alike, differences
from twins.operands import CASES, of_exp

from kizuki.cpu import target as targets

ROUNDS = 6
HOST = targets.select(targets.features())
TARGETS = {
    "float32": replace(HOST, dot=""),
    "float64": replace(HOST, dot="").double,
    "pairs": replace(targets.TARGETS["generic"], dot="emulated").paired,
}
OF_PAIRS = ("tile.", "few.", "pack.pairs", "rows.emit.narrow_row")  # what is emitted otherwise for pairs
# One type has no 16-bit memory, or they are not called with it.
ONLY = {"simd.load_narrow": {"float32"}, "simd.store_narrow": {"float32"}, "rows.emit.narrow_row": {"pairs"}}
OWN = {"simd.call_row", "custom._wide", "custom._inside", "custom._element"}  # tests of their own, below


def pairs() -> list[Any]:
    made = []
    for name in sorted(twins.MAKERS.keys() - OWN):
        for kind in TARGETS:
            fits = kind in ONLY.get(name, TARGETS)
            if kind == "pairs":
                fits = fits and name.startswith(OF_PAIRS)
            elif name in ("tile.emit.scores_of_pairs", "pack.pairs.weave_panel"):
                fits = False
            if name.startswith("simd.") and kind != "float32":
                fits = fits and name == "simd.fma_one"
            if fits:
                made.append(pytest.param(name, kind, id=f"{name} {kind}"))
    return made


def once(each: emitted.Emitted, t: targets.Target, seed: int, hostile: bool) -> tuple[Any, Any, Arena, Arena]:
    """What the body and its twin return, and what they leave behind."""
    given = {n: value for n, value in each.given.items() if n != "t"}
    results, arenas = [], []
    for function in (each.body, each.twin):
        arena = Arena()
        with np.errstate(all="ignore"):
            arguments = CASES[each.name](arena, t, np.random.default_rng(seed), hostile, **given)
            results.append(function(*arguments))
        arenas.append(arena)
    return (*results, *arenas)


@pytest.mark.parametrize(("name", "kind"), pairs())
def test_a_body_is_its_twin(name: str, kind: str) -> None:
    t = TARGETS[kind]
    for each in emitted.of(t)[name]:
        for at in range(ROUNDS):
            seed = zlib.crc32(f"{name} {kind} {at}".encode())
            mine, yours, body, twin = once(each, t, seed, hostile=at % 2 == 1)
            said = differences(body, twin)
            assert not said, f"{name} {each.given}, round {at}: {said}"
            if yours is None:
                assert mine is None
            elif isinstance(yours, int):
                assert mine == yours
            else:
                assert mine.dtype == yours.dtype
                near = of_exp(np.log(np.array([yours]))) if name == "rows.emit.exp_one" else 0.0
                same = alike(np.array([mine]), np.array([yours]), near, 0.0)
                assert same.all(), f"{name} {each.given}, round {at}: {mine!r}, {yours!r}"
