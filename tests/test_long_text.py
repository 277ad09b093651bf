"""Is all of a long text there, though only the part around the view is in the document?"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pages import make_run, matrix, table, text_of

from kizuki.explorer import write_page

LONG = 100_000
NODES = 4_000  # of the whole document, whatever the text's length


def read(page: Any) -> None:
    """Until what is selected has its reading; the picture of the whole matrix may take longer."""
    page.wait_for_function(
        "() => { const p = globalThis.kizukiPage; if (!p || !p.shown) return false; const { shown, store } = p;"
        " return shown.subjects.join() === p.selected().join() && shown.direction === store.state.direction"
        " && shown.units === p.units; }"
    )
    page.wait_for_timeout(50)


def run_of(count: int, words: list[str] | None = None) -> Any:
    """A window of 40 keys: a picture of any length of text is made at once."""
    return make_run({0: matrix(count, heads=1, kv_heads=1, dim=4, window=(40, 0))}, words=words)


@pytest.fixture(params=["served", "embedded"])
def long_page(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., tuple[Any, int]]:
    """Opens a long text, and says of how many tokens: 100,000 served; fewer in a file, whose page computes alone."""
    visit: Any = request.getfixturevalue("visit")
    show: Any = request.getfixturevalue("show")

    def opened(at: str = "", **options: Any) -> tuple[Any, int]:
        if request.param == "served":
            return visit(run_of(LONG), at, read=False, wait=read, **options), LONG
        return show(write_page(tmp_path / "page.html", run_of(9_000)), at, **options), 9_000

    return opened


def counted(page: Any) -> tuple[int, int]:
    """Elements of the document, and those of them that are tokens."""
    return tuple(
        page.evaluate("() => ['*', '#tokens .t'].map(what => document.querySelectorAll(what).length)")
    )


def in_view(page: Any, token: int) -> bool:
    found: bool = page.evaluate(
        "id => { const e = document.getElementById(id); if (!e) return false; const box = e.getBoundingClientRect(),"
        " list = document.getElementById('tokens').getBoundingClientRect();"
        " return box.top >= list.top && box.bottom <= list.bottom; }",
        f"t{token}",
    )
    return found


@pytest.mark.browser
def test_the_document_stays_small_and_every_token_can_be_reached(
    long_page: Callable[..., tuple[Any, int]],
) -> None:
    page, count = long_page("#l=0&h=0&q=30&k=2")
    nodes, tokens = counted(page)
    assert nodes < NODES
    assert 100 < tokens < count
    assert "holds only the part around the view" in text_of(page, "#text-note")
    assert page.locator("#t30").get_attribute("aria-posinset") == "31"
    assert page.locator("#t30").get_attribute("aria-setsize") == str(count)
    # by the scroll bar: the middle and the end, and what is there is the text's own
    for share in (0.5, 1.0):
        page.evaluate(
            "s => { const box = document.getElementById('tokens'); box.scrollTop = s * box.scrollHeight; }",
            share,
        )
        page.wait_for_timeout(150)
        assert counted(page)[0] < NODES
        shown = page.evaluate(
            "() => { const box = document.getElementById('tokens').getBoundingClientRect();"
            " return [...document.querySelectorAll('#tokens .t')].filter(e => { const b = e.getBoundingClientRect();"
            " return b.bottom > box.top && b.top < box.bottom; }).map(e => [e.id, e.textContent]); }"
        )
        assert [text for _, text in shown] == [f"w{token[1:]} " for token, _ in shown]
        middle = int(shown[len(shown) // 2][0][1:]) / count
        assert abs(middle - share) < 0.05
    assert shown[-1][0] == f"t{count - 1}"
    # and the chosen token, which is out of the document now, by keyboard
    assert page.locator("#t30").count() == 0
    assert page.locator("#tokens").get_attribute("aria-activedescendant") is None
    page.keyboard.press("1")
    page.keyboard.press("ArrowRight")
    read(page)
    assert in_view(page, 31)
    assert page.locator("#tokens").get_attribute("aria-activedescendant") == "t31"


@pytest.mark.browser
def test_a_search_finds_a_token_far_outside_the_window(long_page: Callable[..., tuple[Any, int]]) -> None:
    page, count = long_page("#l=0&h=0&q=30&k=2")
    far = count - 1_234
    assert page.locator(f"#t{far}").count() == 0
    page.keyboard.press("/")
    page.keyboard.type(f"w{far} ")
    page.keyboard.press("Enter")
    read(page)
    assert text_of(page, "#search-count") == "1 of 1"
    assert page.evaluate("() => kizukiPage.store.state.query") == far
    assert in_view(page, far)
    assert "found" in page.locator(f"#t{far}").get_attribute("class")
    assert page.locator("#tokens [aria-selected=true]").get_attribute("id") == f"t{far}"
    assert [token for token, _ in table(page)]
    assert all(far - 40 <= token <= far for token, _ in table(page))
    painted = page.evaluate(
        "() => [...document.querySelectorAll('#tokens .t')].filter(e => e.style.backgroundColor)"
        ".map(e => +e.id.slice(1))"
    )
    assert painted
    assert all(far - 40 <= token <= far for token in painted)


@pytest.mark.browser
def test_a_selection_by_keyboard_crosses_the_edge_of_the_window(
    long_page: Callable[..., tuple[Any, int]],
) -> None:
    page, count = long_page("#l=0&h=0&q=5000&k=4990&dir=reads")
    page.keyboard.press("1")
    edge = page.evaluate(
        "() => Math.max(...[...document.querySelectorAll('#tokens .t')].map(e => +e.id.slice(1)))"
    )
    assert 5000 < edge < count - 1
    for key in ("ArrowUp", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert page.evaluate("() => kizukiPage.store.state.query") > 5000
    page.evaluate("q => kizukiPage.store.set({ query: q, several: '' })", edge - 1)
    read(page)
    for _ in range(4):
        page.keyboard.press("Shift+ArrowRight")
    read(page)
    assert page.evaluate("() => kizukiPage.store.state.several") == f"{edge - 1}-{edge + 3}"
    assert page.locator("#tokens [aria-selected=true]").count() == 5
    assert in_view(page, edge + 3)
    page.keyboard.press("End")
    read(page)
    assert in_view(page, count - 1)
    page.keyboard.press("Home")
    read(page)
    assert in_view(page, 0)
    assert counted(page)[0] < NODES


@pytest.mark.browser
def test_lines_break_where_the_text_breaks_them_and_a_new_width_keeps_the_place(visit: Any) -> None:
    words = [f"w{i}" + ("\n" if i % 90 == 89 else " ") for i in range(6_000)]
    page = visit(run_of(6_000, words), "#l=0&h=0&q=3000&k=2999", read=False)
    last = page.evaluate(
        "() => [...document.querySelectorAll('#tokens > div')].filter(e => e.firstElementChild)"
        ".map(e => e.lastElementChild.textContent)"
    )
    assert last
    assert all(text.endswith("⏎\n") for text in last[:-1])
    assert in_view(page, 3000)
    page.set_viewport_size({"width": 700, "height": 900})
    page.wait_for_timeout(300)
    assert in_view(page, 3000)


@pytest.mark.browser
def test_words_come_later_and_show_the_same_text(visit: Any) -> None:
    words = [piece for i in range(3_000) for piece in (f"un{i:04}", "happy ")]
    page = visit(run_of(6_000, words), read=False)
    page.wait_for_selector("[data-set='unit word']", state="visible")
    for at in ("", "#u=word"):
        if at:
            page = visit(run_of(6_000, words), at, read=False)
        else:
            page.keyboard.press("w")
            read(page)
        shown = page.evaluate("() => [...document.querySelectorAll('#tokens .t')].map(e => e.textContent)")
        assert shown[:2] == ["un0000happy ", "un0001happy "]
        assert re.fullmatch(r"un\d{4}happy ", shown[-1])


@pytest.mark.browser
def test_while_many_rows_are_read_no_other_reading_stands_under_them(visit: Any) -> None:
    page = visit(run_of(LONG), "#l=0&h=0&q=5000&k=4990&dir=reads", read=False, wait=read)
    assert page.locator("#reading-rows tr").count() > 0
    page.evaluate("() => kizukiPage.store.set({ several: '20000-29999' })")
    page.wait_for_function(
        "() => / [0-9]+ . 10000$/.test(document.getElementById('reading-title').textContent)"
    )
    assert page.locator("#reading-rows tr").count() == 0
    assert page.locator("#mass").text_content() == ""
    page.evaluate("() => kizukiPage.store.set({ query: 7, several: '' })")
    read(page)
    assert "token 7)" in page.locator("#reading-title").text_content()
    assert "100 %" in page.locator("#mass").text_content()
