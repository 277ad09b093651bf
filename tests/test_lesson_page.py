"""The lesson's page in a browser with the network cut: both languages, by keyboard, at any width."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lessons import random_lesson

from kizuki.lesson import Book, Material, formula, shipped, write_page
from kizuki.lesson.language import table

pytestmark = pytest.mark.browser
WIDTHS = (360, 700, 1100, 1440, 2560)


@pytest.fixture(scope="module")
def lesson() -> Material:
    return shipped()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open a lesson's page offline; at the end nothing may have gone wrong and nothing may have been asked for."""
    opened, wrong = [], []

    def open_page(made: Material, language: str = "en", mark: str = "", **options: Any) -> Any:
        path = write_page(tmp_path / "lesson.html", made, language=language)
        context = browser.new_context(
            offline=True, **({"viewport": {"width": 1280, "height": 900}} | options)
        )
        opened.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None
        )
        page.on("request", lambda asked: asked.url.startswith("file:") or wrong.append(asked.url))
        page.goto(path.as_uri() + mark)
        page.wait_for_selector("#step-8 .headcard")
        return page

    yield open_page
    for context in opened:
        context.close()
    assert wrong == []


def texts(page: Any, selector: str) -> list[str]:
    found: list[str] = page.locator(selector).all_inner_texts()
    return found


def number(text: str) -> float:
    return float(text.replace("−", "-").replace("∞", "inf"))


@pytest.mark.parametrize("language", ["en", "ja"])
def test_eight_steps_in_each_language_and_the_switch_between_them(
    show: Any, lesson: Material, language: str
) -> None:
    page, words = show(lesson, language), table(language)
    other = table("ja" if language == "en" else "en")
    for said in (words, other, words):
        assert page.locator("html").get_attribute("lang") == ("en" if said["language"] == "English" else "ja")
        titles = [title.replace("\n", "") for title in texts(page, ".step > h2")[:8]]
        assert titles == [f"{k}{said[f'step{k}_title']}" for k in range(1, 9)]
        assert said["caution"] in page.inner_text("body")
        assert "{" not in page.inner_text("main")
        assert "undefined" not in page.inner_text("body")
        assert "NaN]" in page.inner_text("#step-5")  # float16's, and nobody else's
        assert page.inner_text("body").count("NaN") == page.inner_text("#step-5").count("NaN")
        page.click("#language")


def test_the_numbers_on_the_page_are_pythons(show: Any, lesson: Material) -> None:
    page, i = show(lesson), lesson.word
    weights, dots = lesson.weights()[i], lesson.dots()[i]
    shown = [number(text) for text in texts(page, f'#step-6 tbody button[data-open^="weight[{i},"]')]
    assert shown == pytest.approx([w for w in weights if w > 0], abs=5.1e-5)
    shown = [number(text) for text in texts(page, f'#step-3 tbody button[data-open^="dot[{i},"]')]
    assert shown == pytest.approx(dots.tolist(), rel=1e-3)
    shown = [number(text) for text in texts(page, f'#step-7 tr.total button[data-open^="z[{i},"]')]
    assert shown == pytest.approx(lesson.output()[i, :5].tolist(), abs=5.1e-5)
    assert "17.1 %" in page.inner_text("#step-3")
    assert lesson.projection is not None
    size = formula.norm(lesson.projection.residual[i].astype(np.float64))
    assert f"{size:.2f}" in page.inner_text("#step-8")
    for text in ("0.9895, 0.0105", "1 − 1.49e-10", "22.627"):
        assert text in page.inner_text("#step-4")


def test_a_number_opens_down_to_the_models_own(show: Any, lesson: Material) -> None:
    page, book = show(lesson), Book(lesson)
    page.click('#step-7 tr.total button[data-open="z[7,3]"]')
    for name in ("weight[7,1]", "exp[7,1]", "scaled[7,1]", "dot[7,1]", "q[7,62]", "raw_q[7,62]", "x[7,247]"):
        page.click(f'#opened button[data-open="{name}"] >> nth=0')
        assert page.inner_text("#opened .formula strong") == name
        value = page.inner_text("#opened .formula").rsplit("=", 1)[1]
        assert number(value) == pytest.approx(book.open(name).value, rel=1e-5)
    assert table("en")["leaf"] in page.inner_text("#opened")
    page.click("#opened button:has-text('Back')")
    assert page.inner_text("#opened .formula strong") == "raw_q[7,62]"
    page.click("#opened .all")
    products = [number(text) for text in texts(page, "#opened tr:not(.total) td:last-child")]
    assert len(products) == 576
    assert sum(products) == pytest.approx(book.open("raw_q[7,62]").value, abs=2e-3)


def test_the_switches_change_steps_3_to_7_and_say_so(show: Any, lesson: Material) -> None:
    page, i = show(lesson), lesson.word
    page.click(".toggle >> nth=1")  # the mask
    assert table("en")["not_as_model"] in page.inner_text(".status")
    assert table("en")["step8_switched"] in page.inner_text("#step-8")
    page.click(".toggle >> nth=0")  # the scale
    page.locator("input[type=range]").fill("3")  # T = 2
    want = lesson.weights(scale=False, mask=False, temperature=2)[i]
    shown = [number(text) for text in texts(page, f'#step-6 tbody button[data-open^="weight[{i},"]')]
    assert shown == pytest.approx(want.tolist(), abs=5.1e-5)
    assert len(shown) == len(lesson)
    page.click("text=As the model does it")
    assert page.locator(".toggle[aria-pressed=true]").count() == 2
    assert table("en")["not_as_model"] not in page.inner_text("body")


def test_another_head_is_shown_and_says_what_the_page_has_not(show: Any, lesson: Material) -> None:
    page = show(lesson)
    page.click('[data-head="1"]')
    want = lesson.weights(1)[lesson.word]
    shown = [number(text) for text in texts(page, '#step-6 tbody button[data-open^="weight["]')]
    assert shown == pytest.approx(want[want > 0].tolist(), abs=5.1e-5)
    assert "--head 1" in page.inner_text("#step-2")
    assert page.locator('#step-2 button[data-open^="q["]').count() == 0
    page.click('#step-3 button[data-open="dot[7,1]"]')
    assert page.locator('#opened button[data-open^="q["]').count() == 0


def test_everything_works_by_keyboard(show: Any, lesson: Material) -> None:
    page = show(lesson)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus(".word[aria-pressed=true]")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text(".word[aria-pressed=true]").startswith("was")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    page.keyboard.press("ArrowRight")
    page.focus("#step-6 canvas")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.inner_text("#opened .formula strong") == "weight[7,2]"
    page.focus("#opened button[data-open='exp[7,2]']")
    page.keyboard.press("Enter")
    assert page.inner_text("#opened .formula strong") == "exp[7,2]"
    page.keyboard.press("Escape")
    assert page.locator("#opened .formula").count() == 0
    assert page.evaluate("document.activeElement.tagName") == "CANVAS"
    page.focus("#step-2 canvas")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.inner_text("#opened .formula strong") == "k[7,1]"


@pytest.mark.parametrize("language", ["en", "ja"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_width_overflows_and_text_can_be_read(
    show: Any, lesson: Material, language: str, scheme: str
) -> None:
    page = show(lesson, language, color_scheme=scheme)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for canvas in page.locator(".step canvas").all():
            box, panel = canvas.bounding_box(), page.locator("main").bounding_box()
            assert box["x"] >= 0
            assert box["width"] > 100
            assert box["width"] <= panel["width"]
    assert contrast(page) >= 4.5


def contrast(page: Any) -> float:
    """The least contrast (WCAG 2) of the page's inks on its grounds."""

    def luminance(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    read = "name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
    inks, grounds = ("--ink", "--muted", "--accent"), ("--bg", "--panel", "--button")
    pairs = [(ink, ground) for ink in inks for ground in grounds] + [("--warn", "--warn-bg")]
    ratios = []
    for pair in pairs:
        low, high = sorted(luminance(page.evaluate(read, name)) for name in pair)
        ratios.append((high + 0.05) / (low + 0.05))
    return min(ratios)


def test_the_theme_can_be_turned_and_the_address_keeps_the_selection(show: Any, lesson: Material) -> None:
    page = show(lesson, mark="#word=5&head=8&t=2&lang=ja")
    assert page.locator("html").get_attribute("lang") == "ja"
    assert page.inner_text(".word[aria-pressed=true]").startswith("it")
    assert page.inner_text("output") == "2"
    before = page.evaluate(
        "getComputedStyle(document.body).backgroundColor + getComputedStyle(document.documentElement).backgroundColor"
    )
    page.click("#theme")
    after = page.evaluate(
        "getComputedStyle(document.body).backgroundColor + getComputedStyle(document.documentElement).backgroundColor"
    )
    assert before != after
    page.click(".word >> nth=10")
    assert re.search(r"#word=10&key=\d+&head=8&scale=1&mask=1&t=2&lang=ja", page.url)


def test_an_address_that_means_nothing_is_the_lesson_as_it_is(show: Any, lesson: Material) -> None:
    page = show(lesson, mark="#word=99&head=-1&t=7&lang=xx&key=<b>")
    assert page.inner_text(".word[aria-pressed=true]").startswith("playing")
    assert page.locator(".toggle[aria-pressed=true]").count() == 2


def test_token_text_stays_text_and_an_encoder_has_no_mask(show: Any) -> None:
    hostile = ['</script><img src=x onerror="document.title=1">', "<b>", "{word}", "\u2028", "", "&lt;"]
    page = show(replace(random_lesson(masked=False), labels=hostile), "ja")
    assert page.locator("main img, main b").count() == 0
    assert "{word}" in page.inner_text(".sentence")
    assert table("ja")["off"] in page.inner_text(".toggle >> nth=1")
    assert page.locator("#step-6 button[data-open^='weight[']").count() == 6


def test_a_lesson_without_its_matrices_shows_the_rest(show: Any) -> None:
    page = show(shipped(head=2))
    assert table("en")["closed_example"] in page.inner_text("#step-2")
    assert page.locator("#step-6 button[data-open^='weight[']").count() > 3
    page.click("#step-6 button[data-open^='scaled['] >> nth=0")
    assert "dot[" in page.inner_text("#opened")
