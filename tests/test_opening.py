"""Is a layer of a long text opened when it is looked at and not before, with nothing about it lost?"""

from __future__ import annotations

import math
from typing import Any

import pytest
from pages import Recorded, make_run, matrix, settle, table, text_of
from served import asked

import kizuki
from kizuki.explorer import layers
from kizuki.explorer.answers import Answers, QuestionError
from kizuki.models import RecordError


class Watched(Recorded):
    """A recording that notes which layers are opened, in their order."""

    def __init__(self, matrices: dict[int, kizuki.AttentionMatrix | RecordError]) -> None:
        super().__init__(matrices)
        self.opened: list[int] = []

    def __getitem__(self, layer: int) -> kizuki.AttentionMatrix:
        self.opened.append(layer)
        found: kizuki.AttentionMatrix = super().__getitem__(layer)
        return found


def watched(**wrong: Any) -> Any:
    """Five layers, of which 3 has a window and some are `wrong`, by name "at4"."""
    made: dict[int, Any] = {
        n: matrix(seed=n, **({"window": (5, 0)} if n == 3 else {})) for n in (0, 1, 2, 3, 4)
    }
    made |= {int(name.removeprefix("at")): value for name, value in wrong.items()}
    run = make_run(made)
    run.recording = Watched(made)
    return run


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """37 tokens are a long text."""
    monkeypatch.setattr(layers, "AT_ONCE", 10)


def read_all(answers: Answers) -> dict[str, Any]:
    """The atlas, once the reader is through."""
    answers.reader._last = -math.inf
    answers.reader.begin()
    thread = answers.reader._thread
    assert thread is not None
    thread.join(30)
    found: dict[str, Any] = asked(answers, "atlas")["atlas"]
    return found


def test_all_layers_of_a_short_text_are_open_from_the_beginning() -> None:
    run = watched(at4=RecordError("off by 3"))
    answers = Answers(run)
    assert run.recording.opened[:5] == [0, 1, 2, 3, 4]
    meta = asked(answers, "meta")["meta"]
    assert [info["layer"] for info in meta["layers"]] == [0, 1, 2, 3]
    assert all("dim" in info for info in meta["layers"])
    assert meta["missing"] == [{"layer": 4, "reason": "off by 3"}]


@pytest.mark.usefixtures("long")
def test_a_layer_is_opened_when_it_is_asked_for() -> None:
    run = watched()
    answers = Answers(run)
    assert set(run.recording.opened) == {2}, "the one in the middle, where the page opens"
    meta = asked(answers, "meta")["meta"]
    assert meta["start"]["layer"] == 2
    assert [info["layer"] for info in meta["layers"] if "dim" in info] == [2]
    told = asked(answers, "layer", layer=3)
    assert set(run.recording.opened) == {2, 3}
    whole = layers_of_a_short_text(run)
    assert told["info"] | {"ranges": None} == whole["layers"][3] | {"ranges": None}
    assert told["controls"][told["info"]["ranges"]] == whole["controls"][whole["layers"][3]["ranges"]]
    assert told["bound"] == pytest.approx(whole["bound"])
    row = asked(answers, "row", layer=4, head=1, query=20)["weights"]
    assert row == pytest.approx(run.recording[4][0, 1, 20].numpy(), rel=2e-5, abs=1e-7)


def layers_of_a_short_text(run: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "AT_ONCE", 100)
        found: dict[str, Any] = asked(Answers(run), "meta")["meta"]
    return found


@pytest.mark.usefixtures("long")
def test_a_layer_that_cannot_be_opened_is_named_and_the_others_are_read() -> None:
    run = watched(at0=RecordError("off by 3"))
    answers = Answers(run)
    for what, rest in (("layer", {}), ("row", {"head": 0, "query": 3})):
        with pytest.raises(QuestionError, match=r"^layer 0 cannot be shown: off by 3$"):
            asked(answers, what, layer=0, **rest)
    assert run.recording.opened.count(0) == 1
    atlas = read_all(answers)
    assert (atlas["read"], atlas["trouble"]) == (5, "")
    assert atlas["missing"] == [{"layer": 0, "reason": "off by 3"}]
    assert atlas["means"]["entropy"][0] == [None] * 4
    assert None not in atlas["means"]["entropy"][1]
    # where the first that is tried is missing, the page opens with another
    answers = Answers(watched(at2=RecordError("off by 3")))
    assert asked(answers, "meta")["meta"]["start"]["layer"] == 3
    assert list(answers.matrices) == [0, 1, 3, 4]
    run = watched()
    run.recording.matrices = dict.fromkeys(range(5), RecordError("off by 3"))
    with pytest.raises(kizuki.explorer.PageError, match="holds no layer; off by 3"):
        Answers(run)


@pytest.mark.usefixtures("long")
def test_a_layer_unlike_the_first_is_refused_by_name() -> None:
    answers = Answers(watched(at4=matrix(37, heads=6, kv_heads=3)))
    with pytest.raises(QuestionError, match="layer 4 has 6 heads on 3 but layer 2 has 4 on 2"):
        asked(answers, "row", layer=4, head=0, query=3)
    assert "layer 4 has 6 heads" in read_all(answers)["trouble"]


@pytest.mark.browser
@pytest.mark.usefixtures("long")
def test_the_page_opens_a_layer_when_it_is_chosen(visit: Any) -> None:
    run = watched(at0=RecordError("off by 3"))
    page = visit(run, "#l=2&h=1&q=20&k=3", read=False)
    assert set(run.recording.opened) == {2}
    page.evaluate("() => kizukiPage.store.set({ layer: 3 })")
    settle(page)
    assert 3 in run.recording.opened
    row = run.recording[3][0, 1, 20]
    for token, weight in table(page):
        assert weight == pytest.approx(float(row[token]), rel=6e-4)
    page.evaluate("() => kizukiPage.store.set({ layer: 0 })")
    page.wait_for_selector("#failure", state="visible")
    assert "layer 0 cannot be shown: off by 3" in text_of(page, "#failure")
    page.wait_for_function("() => kizukiPage.meta.missing.length > 0")  # no layer has been read meanwhile
    assert "Layer 0 could not be recorded: off by 3" in text_of(page, "#left-out")
    type(page.server.answers.reader).begin(page.server.answers.reader)
    page.wait_for_function("() => kizukiPage.meta.read === 5")
    page.server.answers.reader.close()
    page.evaluate("() => kizukiPage.store.set({ layer: 3 })")
    settle(page)
    page.troubles[:] = [line for line in page.troubles if "400" not in line]  # the browser's own word for it
