"""The page and the lesson for everybody: any width, both languages and themes, the keyboard alone, and axe-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pages import axe, make_run, matrix, pieces_run, settle, text_of

from kizuki.explorer import write_page


@pytest.mark.browser
@pytest.mark.parametrize(
    ("width", "locale", "theme"),
    [(360, "ja-JP", "dark"), (768, "en-US", "light"), (1400, "en-US", "dark"), (2560, "ja-JP", "light")],
)
def test_everything_open_fits_every_width_and_axe_finds_nothing(
    tmp_path: Path, show: Any, width: int, locale: str, theme: str
) -> None:
    path = write_page(tmp_path / "page.html", pieces_run(matrix(12)))
    at = "#l=0&h=1&q=11&k=3&c=0.2&u=word&o=3&z=1_1_8&p=0_1_11_3_reads_word~0_2_5_3_readers_token_3-7"
    page = show(path, at, width=width, locale=locale, theme=theme)
    page.evaluate("() => { for (const each of document.querySelectorAll('details')) each.open = true; }")
    page.keyboard.press("/")
    page.wait_for_timeout(200)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert axe(page) == []
    if width == 1400:
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        assert axe(page) == []


@pytest.mark.browser
@pytest.mark.parametrize("language", ["en", "ja"])
def test_axe_finds_nothing_on_the_lesson(tmp_path: Path, browser: Any, language: str) -> None:
    from kizuki.lesson import shipped
    from kizuki.lesson import write_page as write_lesson

    path = write_lesson(tmp_path / "lesson.html", shipped(), language=language)
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.goto(f"file://{path}")
    page.wait_for_selector("h2")
    assert axe(page) == []
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("() => matchMedia('(prefers-color-scheme: dark)').matches")
    assert axe(page) == []
    context.close()


@pytest.mark.browser
def test_every_panel_is_reached_and_used_by_keyboard_alone(tmp_path: Path, show: Any) -> None:
    page = show(write_page(tmp_path / "page.html", make_run({0: matrix()})), "#l=0&h=1&q=20&k=2")
    for key, element in {
        "1": "tokens",
        "2": "atlas",
        "3": "map",
        "4": "strips",
        "5": "compare-open",
        "6": "pin",
    }.items():
        page.keyboard.press(key)
        assert page.evaluate("() => document.activeElement.id") == element
    page.keyboard.press("Enter")
    assert page.locator("#pins li").count() == 1
    page.keyboard.press("c")
    settle(page)
    assert page.evaluate("() => kizukiPage.store.state.against") == "0.2"
    page.locator("#compare-strips").focus()
    page.keyboard.press("ArrowRight")
    assert text_of(page, "#compare-cell").startswith("0 “w0")
    page.locator("#text-panel details.save summary").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "PNG"
    with page.expect_download():
        page.keyboard.press("Enter")
    stops = []
    page.evaluate("() => document.activeElement.blur()")
    for _ in range(70):
        page.keyboard.press("Tab")
        stops.append(page.evaluate("() => document.activeElement.id || document.activeElement.textContent"))
    for wanted in (
        "tour-open",
        "tokens",
        "adding",
        "atlas",
        "map",
        "strips",
        "pin",
        "compare-swap",
        "compare-strips",
    ):
        assert wanted in stops
