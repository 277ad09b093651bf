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
from twins.memory import real as memory_type
from twins.operands import CASES, of_exp

from kizuki.cpu import target as targets
from kizuki.cpu.sizes import BFLOAT16

ROUNDS = 6
HOST = targets.select(targets.features())
TARGETS = {
    "float32": replace(HOST, dot=""),
    "float64": replace(HOST, dot="").double,
    "pairs": replace(targets.TARGETS["generic"], dot="emulated").paired,
}
OF_PAIRS = ("tile.", "few.", "pack.pairs", "rows.emit.narrow_row")  # what is emitted otherwise for pairs
# One type has no 16-bit memory, or they are not called with it.
ONLY = {
    "scalar.load_narrow": {"float32"},
    "scalar.store_narrow": {"float32"},
    "rows.emit.narrow_row": {"pairs"},
}
OWN = {"scalar.call_row", "custom._wide", "custom._inside", "custom._element"}  # tests of their own, below


def pairs() -> list[Any]:
    made = []
    for name in sorted(twins.MAKERS.keys() - OWN):
        for kind in TARGETS:
            fits = kind in ONLY.get(name, TARGETS)
            if kind == "pairs":
                fits = fits and name.startswith(OF_PAIRS)
            elif name in ("tile.emit.scores_of_pairs", "pack.pairs.weave_panel"):
                fits = False
            if name.startswith("scalar.") and kind != "float32":
                fits = fits and name == "scalar.fma_one"
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


def run(name: str, kind: str, seed: int, hostile: bool = False, **given: Any) -> tuple[Any, Arena]:
    """The arguments and the memory of one compiled body, after it has run."""
    t = TARGETS[kind]
    (each,) = (e for e in emitted.of(t)[name] if given.items() <= e.given.items())
    _, _, arena, _ = once(each, t, seed, hostile)
    return t, arena


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("hostile", [False, True], ids=["plain", "hostile"])
def test_a_row_is_summed_in_the_promised_order(kind: str, hostile: bool) -> None:
    """To the bit, whatever its exponentials are rounded to; and the same bits where it is observed."""
    for seed in range(4):
        t, raised = run("rows.emit.raise_row", kind, seed, hostile)
        row, before = raised.at(0), Arena()
        with np.errstate(all="ignore"):
            CASES["rows.emit.raise_row"](before, t, np.random.default_rng(seed), hostile)
            total = twins.rows.summed_by_four(t, row, before.at(1))
        assert alike(raised.at(1), total, 0.0, 0.0).all()


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_looking_changes_no_bit(kind: str) -> None:
    """`raise_row`, `watch_row` with the moment and with the reach too: one row, one total."""
    t = TARGETS[kind]
    bodies = emitted.of(t)
    rows = []
    for each in (*bodies["rows.emit.raise_row"], *bodies["views.emit.watch.watch_row"]):
        random, arena = np.random.default_rng(11), Arena()
        number = memory_type(t)
        row = random.normal(size=8 * t.lanes).astype(number)
        place, totals = arena.put(row), arena.put(np.ones(t.lanes, number))
        more = [arena.put(np.zeros(t.lanes, number)) for _ in range(2)]
        extra = [] if each.name.startswith("rows.") else [*more, number(9)]
        each.body(place, row.size, row.max(), totals, *extra)
        rows.append((arena.at(0).copy(), arena.at(1).copy()))
    for row, total in rows[1:]:
        assert np.array_equal(row, rows[0][0])
        assert np.array_equal(total, rows[0][1])


@pytest.mark.parametrize(
    "name", ["scalar.store_narrow", "rows.emit.scaled.scale_panel", "rows.emit.narrow_row"]
)
def test_a_nan_stays_one_in_16_bits(name: str) -> None:
    """It keeps its sign, is quiet, and is no infinity: whatever its bits were."""
    kind = "pairs" if name == "rows.emit.narrow_row" else "float32"
    t = TARGETS[kind]
    patterns = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFBFFFFF], np.uint32)
    for each in emitted.of(t)[name]:
        if name.endswith("scale_panel") and each.given["out_kind"] != BFLOAT16:
            continue
        for bits in patterns:
            arena, number = Arena(), np.full(4 * t.lanes * t.nv, bits, np.uint32).view(np.float32)
            place, out = arena.put(number), arena.put(np.zeros(t.nr, np.uint16))
            if name == "scalar.store_narrow":
                each.body(out, number[0], BFLOAT16)
            elif name == "rows.emit.narrow_row":
                each.body(place, 0, 4 * t.lanes)
                out = place
            else:
                each.body(place, out, np.float32(1))
            found = int(arena.at(0).view(np.uint16)[0] if out == place else arena.at(1)[0])
            assert found & 0x7FC0 == 0x7FC0, f"{found:#x} of {bits:#x}"
            assert found >> 15 == int(bits) >> 31


def test_a_function_at_an_address_is_called() -> None:
    import ctypes

    told: list[tuple[int, ...]] = []
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)
    function = kind(lambda *given: told.append(given))
    address = ctypes.cast(function, ctypes.c_void_p).value
    (each,) = emitted.of(TARGETS["float32"])["scalar.call_row"]
    given = (1, -2, 3, 1 << 40, 5, -(1 << 50), 7)
    each.body(address, *given)
    each.twin(address, *given)
    assert told == [given, given]


def test_a_users_array_is_read_where_its_table_says() -> None:
    """Against the array itself: every index from either end, and those that are outside."""
    import numba

    from kizuki.cpu import custom

    inside, element = (twins.MAKERS[f"custom.{n}"]() for n in ("_inside", "_element"))
    wide = twins.MAKERS["custom._wide"]()
    for dtype in ("float32", "float64", "int16", "uint8", "int64", "bool"):
        whole = (np.arange(60).reshape(4, 15) % 7 - 2).astype(dtype)
        array = whole[::2, 3::4]
        table = np.array([array.ctypes.data, *array.shape, *array.strides], np.int64)
        captured = custom.Captured(table.ctypes.data, array.dtype, 2)

        def read(i: int, j: int, captured: Any = captured) -> Any:
            return captured[i, j]

        compiled = numba.njit(read)
        for i in range(-3, 3):
            for j in range(-4, 4):
                at = wide((np.int8(i), np.int16(j)))
                assert inside(captured, at) == (-2 <= i < 2 and -3 <= j < 3)
                if inside(captured, at):
                    assert element(captured, at) == array[i, j] == compiled(i, j)
                    assert type(element(captured, at)) in (np.float64, int, bool)


def test_a_wrong_body_is_seen() -> None:
    """The test of the test: a number off by its last bit, a byte too far, a sum in another order."""
    t = TARGETS["float32"]
    (each,) = emitted.of(t)["rows.emit.scale_vector"]

    def last_bit(place: int, factor: Any) -> None:
        each.body(place, factor)
        vector = twins.memory.numbers(place, np.int32, t.lanes)
        vector[-1] += 1

    def too_far(place: int, factor: Any) -> None:
        each.body(place, factor)
        twins.memory.numbers(place + t.lanes * 4, np.uint8, 1)[0] = 7

    for wrong, said in ((last_bit, f"array 0 at {t.lanes - 1}"), (too_far, "the compiled wrote outside")):
        _, _, body, twin = once(each._replace(body=wrong), t, 3, hostile=False)
        (found,) = differences(body, twin)
        assert found.startswith(said)

    (total,) = emitted.of(t)["rows.emit.fold_total"]
    sums = np.random.default_rng(0).normal(size=(50, t.lanes)).astype(np.float32)
    straight = [np.cumsum(row)[-1] for row in sums]
    assert any(total.twin(row.ctypes.data) != other for row, other in zip(sums, straight, strict=True))
