"""Are the numbers that Python serves to the page those of A, at every zoom, and is no n × n array made for them?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pages import make_run, matrix
from served import asked

import kizuki
from kizuki.explorer import atlas, heads, several, tiles
from kizuki.explorer.answers import Answers, QuestionError
from kizuki.explorer.budget import ROWS
from kizuki.explorer.heads import Head, Stale, nobody_left
from kizuki.explorer.kept import Kept
from kizuki.explorer.tiles import Far, base_zoom

HOLES = torch.rand(150, 150, generator=torch.Generator().manual_seed(0)) > 0.3
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "one token": {"count": 1},
    "window and softcap": {"count": 130, "window": (5, 0), "softcap": 3.0, "scale": 0.7},
    "all keys": {"count": 261, "causal": False},
    "sinks": {"count": 90, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "bias": {"count": 150, "bias": torch.randn(150, 150, generator=torch.Generator().manual_seed(1))},
    "holes": {"count": 150, "causal": False, "mask": HOLES},
    "score function": {"count": 60, "score": lambda score, b, h, i, j: score + 0.1 * h},
    "documents": {"count": 97, "mask": kizuki.masks.documents(torch.tensor([40, 57]))},
}
NEAR = {"rtol": 2e-5, "atol": 4e-6}


def blocks(dense: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mass and peak of a whole matrix, by the definition."""
    side = -(-len(dense) // block)
    full = torch.zeros(side * block, side * block, dtype=torch.float64)
    full[: len(dense), : len(dense)] = dense
    cut = full.view(side, block, side, block)
    rows = torch.full((side, 1), block)
    rows[-1] = len(dense) - (side - 1) * block
    return cut.sum((1, 3)) / rows, cut.amax((1, 3))


def close(found: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(
        torch.as_tensor(np.array(found)).double().reshape(wanted.shape), wanted.double(), **NEAR
    )


@pytest.mark.parametrize("name", CASES)
def test_rows_columns_cells_blocks_and_tiles_are_those_of_a(name: str) -> None:
    made = matrix(**CASES[name])
    answers = Answers(make_run({3: made}))
    n = made.shape[-1]
    for head in (0, 3):
        at = {"layer": 3, "head": head}
        dense = made[0, head].double()
        for i in {0, n // 2, n - 1}:
            row = asked(answers, "row", **at, query=i)
            assert row["ok"], row
            close(row["weights"], dense[i])
            live = row["scores"] > -math.inf
            close(np.exp(row["scores"][live] - row["recorded"]), dense[i][torch.from_numpy(live)])
            column = asked(answers, "column", **at, key=i)
            assert column["bad"] == []
            close(column["weights"], dense[:, i])
            cell = asked(answers, "cell", **at, query=n - 1, key=i)
            close(cell["weight"], dense[n - 1, i])
            assert math.isclose(cell["product"], float(cell["q"] @ cell["k"]), rel_tol=1e-4, abs_tol=1e-5)
            near = asked(answers, "block", **at, i0=max(0, i - 3), i1=i + 1, j0=0, j1=min(n, 7))
            close(np.nan_to_num(near["weights"]), dense[max(0, i - 3) : i + 1, :7])
            both = asked(answers, "values", **at, query=i, key=0)
            value = answers.run.recording.value(3)[0, head // 2]
            close(both["v"], value[0])
            close(both["output"], dense[i] @ value.double())
        for tokens in ([0], [2, 3, 4, n - 1], range(min(n, 256))) if n > 4 else ([0],):
            named = {4: f"2-4.{n - 1}"}.get(len(tokens), f"0-{tokens[-1]}")
            rows = asked(answers, "rowsum", **at, tokens=named)
            assert rows["ok"], rows
            close(rows["weights"], dense[list(tokens)].sum(0))
            columns = asked(answers, "columnsum", **at, tokens=named)
            assert columns["bad"] == []
            close(columns["weights"], dense[:, list(tokens)].sum(1))
        for zoom in (0, 1, 3):
            mass, peak = blocks(dense, 2**zoom)
            tile = asked(answers, "tile", **at, zoom=zoom, row=0, col=0, pool="both")
            close(tile["mass"], mass[:256, :256])
            close(tile["peak"], peak[:256, :256])
            assert (tile["rows"], tile["cols"]) == tuple(mass[:256, :256].shape)


def test_far_zooms_come_from_one_pass_and_near_ones_from_q_k_and_l() -> None:
    made = matrix(2100, heads=1, kv_heads=1)
    dense = made[0, 0].double()
    head = Head(made, 0)
    far = Far(head)
    assert (far.zoom, far.fine) == (2, 1)
    before = [far.tile(zoom, 1, 0) for zoom in (1, 2)]
    mass, peak, row = [], [], 0
    while row * 4 < 2100:
        one, top, bad, worst = far.band(row)
        assert bad == []
        assert worst < 1e-4
        mass.append(one)
        peak.append(top)
        row += len(one)
    n = 2100 // 4 * 4
    pooled = dense[:n, :n].view(n // 4, 4, n // 4, 4)
    close(np.concatenate(mass), pooled.sum(3).mean(1))
    close(np.concatenate(peak), pooled.amax((1, 3)))
    close(
        np.concatenate(mass), made.pool(n // 4, n // 4)[0, 0]
    )  # 2,100 is a multiple of 4: A.pool has these pixels
    assert far.whole
    for (old, top), zoom in zip(before, (1, 2), strict=True):
        again = far.tile(zoom, 1, 0)
        close(again[0], torch.from_numpy(old))
        close(again[1], torch.from_numpy(top))
    coarse = far.tile(5, 0, 0)[0]
    assert coarse.shape == (66, 66)
    close(coarse.sum(1), torch.ones(66))  # pixel rows sum to 1 at every zoom, ragged ones too
    assert base_zoom(100_000) == 7


def test_l_of_long_heads_is_computed_where_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "AT_ONCE", 0)
    monkeypatch.setattr(heads, "LSE_ROWS", 16)
    for options in ({}, {"causal": False}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}):
        made = matrix(100, **options)
        head = Head(made, 2)
        assert torch.equal(
            head.lse(40, 60), made.lse[0, 2, 40:60]
        )  # contract 10: the same bits alone and together
        assert torch.equal(head.lse(77, 78), made.lse[0, 2, 77:78])
        assert head._known.tolist() == [False, False, True, True, False, False, False]
        assert torch.equal(head.lse(0, 100), made.lse[0, 2])
        with pytest.raises(Stale):
            Head(made, 1).lse(0, 100, lambda: True)


def test_a_spoiled_l_and_a_nan_are_refused_and_stay_in_their_rows() -> None:
    made = matrix(300)
    made.query[0, 1, 70, 2] = math.nan
    head = Head(made, 1)
    head.lse(0, 1)
    head._lse[40] += 1e-3
    far = Far(head)
    mass, peak, bad, worst = far.band(0)
    assert bad == [40, 70]
    assert math.isclose(worst, 1e-3, rel_tol=0.01)
    assert np.isnan(mass[[40, 70]]).all()
    assert np.isnan(peak[[40, 70]]).all()
    assert np.isfinite(np.delete(mass, [40, 70], 0)).all()
    assert not head.row(40)[2].ok
    assert not head.row(70)[2].ok
    assert head.row(41)[2].ok
    for tokens, wrong in (([39, 40, 41], 40), ([*range(41, 90)], 70)):
        check = several.rows(head, tokens, nobody_left)[1]
        assert check is not None
        assert str(check) == str(head.row(wrong)[2])
    assert several.rows(head, [39, 41, 71], nobody_left)[1] is None
    assert np.isnan(far.tile(0, 0, 0)[0][[40, 70]]).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e25])
def test_what_no_query_sees_bounds_nothing(bad: float) -> None:
    """Padding may hold anything: it neither refuses the rows nor lets a wrong L pass."""
    made = matrix(60, heads=2, kv_heads=1)
    key = made.key.clone()
    key[:, :, 50:] = bad
    kept = torch.arange(60) < 50
    head = Head(kizuki.attend(made.query, key, mask=kizuki.masks.causal() & kizuki.masks.keys(kept)), 0)
    head.lse(0, 60)
    assert [i for i in range(60) if not head.check(i).ok] == []
    assert several.rows(head, list(range(60)), nobody_left)[1] is None
    head._lse[20] += 1e-2
    assert [i for i in range(60) if not head.check(i).ok] == [20]
    later = made.key.clone()  # and what only later rows see is no matter of the earlier ones
    later[0, 0, 40] = math.nan
    head = Head(kizuki.attend(made.query, later, mask=kizuki.masks.causal()), 0)
    assert [i for i in range(60) if not head.check(i).ok] == list(range(40, 60))


def test_no_array_grows_as_queries_times_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "CELLS", 2**14)
    held = []
    real = Head.weights

    def watched(self: Head, i0: int, i1: int, j0: int, j1: int, *rest: Any) -> torch.Tensor:
        held.append((i1 - i0) * (j1 - j0))
        return real(self, i0, i1, j0, j1, *rest)

    monkeypatch.setattr(Head, "weights", watched)
    far = Far(Head(matrix(3000, heads=1, kv_heads=1), 0))
    row = 0
    while row < 750:
        row += len(far.band(row)[0])
    assert 2**13 < max(held) <= 2**14
    assert far.size == 2 * 4 * 1500 * 1500  # two pictures, one zoom nearer than the first


def test_work_stops_when_nobody_waits() -> None:
    far = Far(Head(matrix(300), 0))
    with pytest.raises(Stale):
        far.band(0, lambda: True)
    assert len(far.band(0)[0]) == 300  # and goes on for the next who asks
    looks = []

    def gone() -> bool:
        looks.append(1)
        return len(looks) > 2

    with pytest.raises(Stale):
        tiles.pooled(Head(matrix(5000, heads=1, kv_heads=1), 0), (0, 5000), (0, 5000), 8, gone)
    assert len(looks) == 3


def test_row_statistics_are_the_definitions() -> None:
    made = matrix(50)
    rows = asked(Answers(make_run({0: made})), "rows", layer=0, head=3)
    a = made[0, 3].double()
    place = torch.arange(50)
    close(rows["received"], a.sum(0))
    close(rows["entropy"], -torch.special.xlogy(a, a).sum(-1))
    close(rows["max"], a.amax(-1))
    close(rows["distance"], (a * (place[:, None] - place).abs()).sum(-1))
    close(rows["first_key"], a[:, 0])
    close(rows["previous"][1:], a.diagonal(-1))
    assert math.isnan(rows["previous"][0])


def test_a_long_head_is_read_in_parts_and_goes_on_where_it_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made = matrix(2500, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), softcap=3.0)
    whole = atlas.HeadRows(Head(made, 3)).read(lambda: None)
    monkeypatch.setattr(atlas, "PART_PAIRS", 2500 * 1024)  # a part is 1,024 rows
    head = Head(made, 3)
    monkeypatch.setattr(head, "sliceable", head._sliceable())
    rows, looks = atlas.HeadRows(head), []

    def between() -> None:
        looks.append(rows.done)
        if len(looks) == 2:
            raise Stale

    with pytest.raises(Stale):
        rows.read(between)
    parts = rows.read(between)
    assert looks == [0, 1024, 1024, 2048]
    assert rows.read(between) is parts
    assert set(parts) == set(whole) == {*ROWS, "received"}
    for name, values in whole.items():
        torch.testing.assert_close(
            torch.from_numpy(parts[name]), torch.from_numpy(values), equal_nan=True, **NEAR
        )
    close(parts["received"], made.received()[0, 3])
    close(parts["entropy"], made.entropy()[0, 3])


def test_a_long_reading_waits_for_questions_and_stops_when_nobody_wants_it() -> None:
    reader = Answers(make_run({0: matrix(5)})).reader
    asked_again = []
    with reader.aside():
        waits = reader.between(lambda: len(asked_again) > 2 or asked_again.append(0))  # type: ignore[func-returns-value]
        with pytest.raises(Stale):
            waits()
    assert len(asked_again) == 3
    reader._last = -math.inf
    reader.between(lambda: False)()  # nobody asks for anything: at once


def test_the_atlas_is_read_in_the_background_and_says_how_far_it_is() -> None:
    layers = {layer: matrix(seed=layer) for layer in (0, 4, 9)}
    answers = Answers(make_run(layers))
    before = asked(answers, "meta")["meta"]
    assert before["read"] == 0
    assert before["means"]["entropy"] == [[None] * 4] * 3
    answers.reader._last = -math.inf
    answers.reader.begin()
    thread = answers.reader._thread
    assert thread is not None
    thread.join(30)
    after = asked(answers, "atlas")["atlas"]
    assert (after["read"], after["trouble"]) == (3, "")
    for column, made in enumerate(layers.values()):
        close(after["means"]["entropy"][column], made.entropy()[0].double().mean(-1))
        close(after["means"]["effective"][column], made.entropy()[0].double().exp().mean(-1))


def test_what_is_kept_is_bounded_and_made_once() -> None:
    made = []

    def make(name: str) -> str:
        made.append(name)
        return name

    kept = Kept(10)
    for name in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa", "bbbb", "x" * 11, "x" * 11):
        assert kept.get(name, lambda name=name: make(name), len) == name
        assert kept.size <= 10
    assert made == ["aaaa", "bbbb", "cccc", "bbbb", "x" * 11, "x" * 11]


@pytest.mark.parametrize(
    ("what", "parameters", "message"),
    [
        ("everything", {}, "'everything': no such question; there are meta, atlas"),
        ("row", {"layer": "0", "head": "0"}, "query: is missing; give a whole number in 0 … 36"),
        ("row", {"layer": "0", "head": "0", "query": "37"}, "query: is 37 but must be in 0 … 36"),
        ("row", {"layer": "0", "head": "0", "query": "-1"}, "query: is '-1' but must be a whole number"),
        ("row", {"layer": "0", "head": "0", "query": "1e1"}, "query: is '1e1' but"),
        ("row", {"layer": "0", "head": "0", "query": "٣"}, "query: is '٣' but"),
        ("row", {"layer": "0", "head": "0", "query": "9" * 5000}, "query: is '9999"),
        ("row", {"layer": "1", "head": "0", "query": "3"}, "layer: is 1 but must be in 0 … 0"),
        ("cell", {"layer": "0", "head": "4", "query": "3", "key": "1"}, "head: is 4 but must be in 0 … 3"),
        ("tile", {"layer": "0", "head": "0", "zoom": "0", "row": "1", "col": "0"}, "tile: is (1, 0) but"),
        ("tile", {"layer": "0", "head": "0", "zoom": "64", "row": "0", "col": "0"}, "zoom: is 64 but"),
        ("tile", {"pool": "median"}, "pool: is 'median' but must be mass, peak or both"),
        ("band", {"layer": "0", "head": "0", "zoom": "3", "row": "0"}, "zoom: is 3 but must be 0"),
        (
            "block",
            {"layer": "0", "head": "0", "i0": "3", "i1": "3", "j0": "0", "j1": "9"},
            "block: is 0 × 9 cells",
        ),
        *(
            (
                "rowsum",
                {"layer": "0", "head": "0", "tokens": text},
                f"tokens: is {text!r} but must be 1 to 256 rising",
            )
            for text in ("", "3.3", "4-2", "37", "5-3.9", "1e1", "٣", "0-36.", "-1", " 1")
        ),
        ("rowsum", {"layer": "0", "head": "0"}, "tokens: is None but must be 1 to 256 rising"),
        (
            "columnsum",
            {"layer": "0", "head": "0", "tokens": "0.1-999999999"},
            "tokens: is '0.1-999999999' but",
        ),
        ("columnsum", {"layer": "0", "head": "4", "tokens": "1"}, "head: is 4 but must be in 0 … 3"),
        ("meta", {"file": "/etc/passwd"}, "'file': no such parameter; there are none"),
        ("ranges", {"number": "1"}, "number: is 1 but must be in 0 … 0"),
    ],
)
def test_bad_questions_are_refused_in_one_short_line(
    what: str, parameters: dict[str, str], message: str
) -> None:
    with pytest.raises(QuestionError) as caught:
        Answers(make_run({0: matrix()})).ask(what, parameters)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
