"""Are the same head's readings in two inputs those of each, and the difference shown only where tokens correspond?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages import axe, make_run, matrix, settle, text_of
from served import asked
from test_widget import recording

from kizuki.explorer import PageError
from kizuki.explorer.answers import Answers, QuestionError
from kizuki.explorer.server import Server

LAYERS = {0: matrix(), 5: matrix(seed=2)}
SAME = {0: matrix(seed=3), 5: matrix(seed=4)}  # as many tokens
LONGER = {5: matrix(50, seed=5)}  # more of them, and no layer 0


def test_questions_about_the_other_input_are_answered_from_it() -> None:
    answers = Answers(make_run(LAYERS), other=Answers(make_run(LONGER)))
    assert answers.meta["other"] is True
    assert asked(answers, "other.meta")["meta"]["queries"] == 50
    row = asked(answers, "other.row", layer=5, head=1, query=45)["weights"]
    assert np.allclose(row, LONGER[5][0, 1, 45], rtol=2e-5, atol=1e-6)
    assert np.allclose(
        asked(answers, "row", layer=5, head=1, query=30)["weights"], LAYERS[5][0, 1, 30], rtol=2e-5, atol=1e-6
    )
    with pytest.raises(QuestionError, match="layer: 0 is not here; there are 5"):
        asked(answers, "other.row", layer=0, head=1, query=45)
    with pytest.raises(QuestionError, match=r"'other\.other\.row': no such question|'other\.row': no such"):
        asked(answers, "other.other.row", layer=5, head=1, query=45)
    with pytest.raises(QuestionError, match=r"'other\.row': no such question"):
        asked(Answers(make_run(LAYERS)), "other.row", layer=5, head=1, query=3)


def test_recordings_that_share_no_head_are_refused() -> None:
    with pytest.raises(
        PageError, match=r"^other: holds layers 5 and heads 0–3, none of which are here \(0 and"
    ):
        Answers(make_run({0: matrix()}), other=Answers(make_run(LONGER)))


def test_a_notebook_shows_two_recordings() -> None:
    shown = recording().show(other=recording(50))
    try:
        assert asked(shown.conversation.answers, "other.meta")["meta"]["queries"] == 50
    finally:
        shown.close()


def test_a_second_recording_is_served_or_written_and_what_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kizuki import cli
    from kizuki.look import serve

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the command line sets it; put it back

    def look(*words: object) -> object:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["look", "--no-open", *map(str, words)])
        return stopped.value.code

    first, second = (recording(n).save(tmp_path / f"{n}.safetensors") for n in (37, 50))
    assert serve(None, recording=first, other=second).answers.meta["other"] is True
    assert look(first, second) == 0
    assert 'id="kz-other-q-1-0"' in (tmp_path / "kizuki.html").read_text()
    for words, message in (
        ((first, "gave"), "gave: no saved recording; put a text of several words between quotes"),
        (("Mika gave", second), "is compared with another recording, or with --serve; save this one first"),
    ):
        assert look(*words) == 2
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Serves one input beside another and opens the page; afterwards no script may have failed."""
    undo: list[Callable[[], Any]] = []
    troubles: list[str] = []

    def opened(other: dict[int, Any], at: str, **options: Any) -> Any:
        running = Server(Answers(make_run(LAYERS), other=Answers(make_run(other)))).running()
        server = running.__enter__()
        undo.append(lambda: running.__exit__(None, None, None))
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        undo.append(context.close)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(server.address + at)
        settle(page)
        return page

    yield opened
    for step in reversed(undo):
        step()
    assert troubles == []


def cells(page: Any) -> list[list[list[str]]]:
    found: list[list[list[str]]] = page.evaluate(
        "() => [...document.querySelectorAll('#compare-table table')]"
        ".map(t => [...t.tBodies[0].rows].map(r => [...r.cells].slice(1).map(c => c.textContent)))"
    )
    return found


def number(text: str) -> float:
    return float(text.replace("−", "-"))


@pytest.mark.browser
def test_as_many_tokens_have_a_signed_difference(visit: Callable[..., Any]) -> None:
    page = visit(SAME, "#l=5&h=3&q=30&k=2", locale="en-US")
    page.keyboard.press("c")
    settle(page)
    assert page.evaluate("() => kizukiPage.store.state.against") == "other"
    a, b = LAYERS[5][0, 3, 30].double(), SAME[5][0, 3, 30].double()
    (rows,) = cells(page)
    assert [int(row[0]) for row in rows] == (a - b).abs().sort(descending=True, stable=True).indices[
        :12
    ].tolist()
    for token, *numbers in rows:
        at = int(token)
        assert np.allclose([number(x) for x in numbers], [a[at], b[at], a[at] - b[at]], rtol=1e-3, atol=1e-7)
    page.wait_for_function("() => kizukiPage.compare.both() !== null")
    difference = page.evaluate(
        "() => { const { a, b } = kizukiPage.compare.both(); return [...a].map((x, i) => x - b[i]); }"
    )
    torch.testing.assert_close(
        torch.tensor(difference).view(37, 37), LAYERS[5][0, 3] - SAME[5][0, 3], rtol=1e-4, atol=1e-6
    )
    page.fill("#against-token", "20")  # another token of B
    settle(page)
    b = SAME[5][0, 3, 20].double()
    for token, *numbers in cells(page)[0]:
        assert np.isclose(number(numbers[1]), b[int(token)], rtol=1e-3, atol=1e-7)
    page.evaluate("() => kizukiPage.store.set({ layer: 0, head: 1 })")  # B follows: the same head in both
    settle(page)
    b = SAME[0][0, 1, 20].double()
    assert np.isclose(number(cells(page)[0][0][2]), b[int(cells(page)[0][0][0])], rtol=1e-3, atol=1e-7)


@pytest.mark.browser
def test_another_number_of_tokens_has_none_and_says_why(visit: Callable[..., Any]) -> None:
    page = visit(
        LONGER,
        "#l=5&h=3&q=30&k=2&c=other&i=45",
        locale="ja-JP",
        color_scheme="dark",
        viewport={"width": 360, "height": 900},
    )
    assert "A は 37 トークン、B は 50 トークン" in text_of(page, "#compare-note")
    mine, theirs = cells(page)
    for rows, row in ((mine, LAYERS[5][0, 3, 30]), (theirs, LONGER[5][0, 3, 45])):
        assert [int(token) for token, _ in rows] == row.topk(12).indices.tolist()
        assert np.allclose([number(weight) for _, weight in rows], row.topk(12).values, rtol=1e-3)
    page.wait_for_function("() => kizukiPage.compare.both() !== null")
    sizes = page.evaluate("() => kizukiPage.compare.both().sizes.map(({ rows }) => rows)")
    assert sizes == [37, 50]
    assert page.evaluate("() => kizukiPage.compare.geometry().count") == 2
    assert axe(page) == []
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.evaluate("() => kizukiPage.store.set({ layer: 0 })")
    settle(page)
    assert "層 0 のヘッド 3 が記録されていません" in text_of(page, "#compare-note")
    assert page.locator("#compare-shown").is_hidden()


@pytest.mark.browser
def test_a_file_holds_both_inputs_and_keeps_its_limit(tmp_path: Path, show: Callable[..., Any]) -> None:
    first, second = recording(37), recording(50)
    path = first.save_html(tmp_path / "both.html", other=second)
    page = show(path, "#l=1&h=3&q=30&k=2&c=other&i=45")
    mine, theirs = cells(page)
    for rows, row in ((mine, first[1][0, 3, 30]), (theirs, second[1][0, 3, 45])):
        assert [int(token) for token, _ in rows] == row.topk(12).indices.tolist()
        assert np.allclose([number(weight) for _, weight in rows], row.topk(12).values, rtol=1e-3)
    page.wait_for_function("() => kizukiPage.compare.both() !== null")
    limit = 2.5 * path.stat().st_size / 1e6  # of which the other input's half is too small
    with pytest.warns(UserWarning, match=r"not q and k, of layers [\d–]+ of other"):
        part = first.save_html(tmp_path / "part.html", other=recording(300, layers=4, dim=64), limit_mb=limit)
    assert part.stat().st_size <= limit * 1e6
