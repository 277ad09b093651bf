"""Are the lesson's plane, its row without the mask and what the scale does the real ones, on the page and served?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages import axe, make_run, matrix, settle, text_of
from served import asked

import kizuki
from kizuki.explorer import write_page
from kizuki.explorer.answers import Answers
from kizuki.explorer.server import Server
from kizuki.lesson import formula
from kizuki.lesson.plane import plane

LAYERS = {
    0: matrix(),
    7: matrix(seed=2, window=(5, 0), softcap=3.0, scale=0.7),
    9: matrix(seed=4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    11: matrix(seed=5, bias=torch.randn(37, 37, generator=torch.Generator().manual_seed(1))),
}


def row_of(made: kizuki.AttentionMatrix, head: int, query: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q of a row, and the keys of its group, float64."""
    return made.query[0, head, query].double(), made.key[0, head // 2].double()


@pytest.mark.parametrize("layer", [0, 7, 9, 11])
def test_a_row_before_its_mask_is_the_formula_over_all_keys(layer: int) -> None:
    answers, made, head, query = Answers(make_run(LAYERS)), LAYERS[layer], 2, 20
    found = asked(answers, "bare", layer=layer, head=head, query=query)
    q, k = row_of(made, head, query)
    assert np.allclose(found["products"], k @ q, rtol=1e-6, atol=1e-5)
    bent = {each["layer"]: each["bent"] for each in answers.meta["layers"]}
    assert bent == {0: False, 7: False, 9: False, 11: True}
    if bent[layer]:
        assert "weights" not in found
        return
    score = made.scale * (k @ q)
    if made.problem.softcap is not None:
        score = made.problem.softcap * torch.tanh(score / made.problem.softcap)
    if made.problem.sinks is not None:
        score = torch.cat((score, made.problem.sinks[head : head + 1].double()))
    weights = score.softmax(-1)[:37]
    assert np.allclose(found["weights"], weights, rtol=1e-4, atol=1e-7)
    assert float(made[0, head, query, 21:].sum()) == 0
    assert float(found["weights"][21:].sum()) > 0  # with the mask they weigh nothing


def test_the_plane_of_the_route_is_exact_along_q_and_the_best_beside_it() -> None:
    found = asked(Answers(make_run(LAYERS)), "bare", layer=0, head=1, query=20)
    q, k = row_of(LAYERS[0], 1, 20)
    along = k @ (q / q.norm())
    rest = k - along[:, None] * (q / q.norm())
    assert math.isclose(found["query"], q.norm(), rel_tol=1e-6)
    assert np.allclose(found["along"], along, rtol=1e-5, atol=1e-5)
    best = torch.linalg.eigvalsh(rest.T @ rest)[-1]  # no direction beside q holds more of the keys
    assert math.isclose(float((found["beside"].astype(float) ** 2).sum()), best, rel_tol=1e-5)
    outside = 1 - (along.square().sum() + best) / k.square().sum()
    assert math.isclose(found["residual"], outside, rel_tol=1e-5)


@pytest.fixture
def lesson(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens the lesson, from a file or served; afterwards no script may have failed."""
    undo: list[Callable[[], Any]] = []
    troubles: list[str] = []

    def opened(served: bool, at: str, locale: str = "en-US", **options: Any) -> Any:
        if served:
            running = Server(Answers(make_run(LAYERS))).running()
            address = running.__enter__().address
            undo.append(lambda: running.__exit__(None, None, None))
        else:
            address = f"file://{write_page(tmp_path / 'page.html', make_run({0: LAYERS[0], 7: LAYERS[7]}))}"
        context = browser.new_context(locale=locale, **options)
        undo.append(context.close)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(f"{address}#{at}&e=1")
        settle(page)
        return page

    yield opened
    for step in reversed(undo):
        step()
    assert troubles == []


def rows(page: Any, table: str) -> list[list[str]]:
    found: list[list[str]] = page.evaluate(
        "s => [...document.querySelectorAll(s)].map(r => [...r.cells].map(c => c.textContent))",
        f"{table} tbody tr",
    )
    return found


def number(text: str) -> float:
    return float(text.split(" ")[0].replace("−", "-"))


@pytest.mark.browser
def test_the_pages_own_plane_is_pythons(lesson: Callable[..., Any]) -> None:
    page = lesson(False, "l=7&h=3&q=20&k=4")
    found = page.evaluate(
        "async () => { const head = await kizukiPage.data.head(7, 3); const { products, plane } = await head.bare(20);"
        " return { products: [...products], query: plane.query, residual: plane.residual,"
        " along: [...plane.along], beside: [...plane.beside] }; }"
    )
    q, k = row_of(LAYERS[7], 3, 20)
    wanted = plane(q.numpy(), k.numpy())
    assert np.allclose(found["products"], k @ q, rtol=1e-12, atol=1e-12)
    for name in ("query", "along", "beside", "residual"):
        assert np.allclose(found[name], getattr(wanted, name), rtol=1e-6, atol=1e-6), name


@pytest.mark.browser
@pytest.mark.parametrize("served", [False, True])
def test_switches_show_the_row_they_name(lesson: Callable[..., Any], served: bool) -> None:
    page = lesson(served, "l=0&h=2&q=20&k=4")
    made = LAYERS[0]
    q, k = row_of(made, 2, 20)
    assert text_of(page, "#lesson-now") == "As in the model."
    seen = np.ones((1, 21), bool)
    for line, scale in zip(rows(page, ".scales"), (1.0, made.scale), strict=True):
        score = (scale * (k @ q))[None, :21].numpy()
        weights = formula.softmax(score)
        spread, largest, entropy, slope = map(number, line[1:])
        assert math.isclose(spread, formula.spread(score, seen), rel_tol=1e-3)
        assert math.isclose(largest, weights.max(), rel_tol=1e-3)
        assert math.isclose(entropy, formula.entropy(weights)[0], rel_tol=1e-3, abs_tol=1e-9)
        assert math.isclose(slope, formula.slope(weights)[0], rel_tol=1e-3, abs_tol=1e-7)
        assert ("saturated" in line[2]) == (weights.max() > 0.99)
    assert page.locator("#lesson-mask").is_enabled()
    page.locator("#lesson-mask").click()
    free = (made.scale * (k @ q)).softmax(-1)
    shown = rows(page, "#lesson-steps [aria-label='Softmax']")
    assert [int(line[1]) for line in shown] == free.topk(8).indices.tolist()
    for line in shown:
        assert math.isclose(number(line[4]), free[int(line[1])], rel_tol=1e-3)
    assert text_of(page, "#lesson-now").startswith("Not the model’s own numbers")
    page.locator("#lesson-mask").click()
    page.locator("#lesson-heat").focus()
    page.keyboard.press("End")  # temperature 8
    warm = (made.scale * (k @ q)[:21] / 8).softmax(-1)
    shown = rows(page, "#lesson-steps [aria-label='Softmax']")
    assert [int(line[1]) for line in shown] == warm.topk(8).indices.tolist()


@pytest.mark.browser
def test_a_layer_with_a_bias_keeps_its_switches_shut_and_says_why(lesson: Callable[..., Any]) -> None:
    page = lesson(True, "l=11&h=2&q=20&k=4")
    assert "adds a bias to its scores" in text_of(page, "#lesson-steps > li >> nth=3")
    for switch in ("scale", "mask", "heat"):
        assert page.locator(f"#lesson-{switch}").is_disabled()
    for line in rows(page, "#lesson-steps [aria-label='Softmax']"):
        assert math.isclose(number(line[4]), LAYERS[11][0, 2, 20, int(line[1])], rel_tol=1e-3)


@pytest.mark.browser
def test_the_plane_goes_by_keyboard_in_both_languages(lesson: Callable[..., Any]) -> None:
    page = lesson(
        True,
        "l=0&h=2&q=20&k=4",
        "ja-JP",
        color_scheme="dark",
        viewport={"width": 360, "height": 900},
    )
    assert "この平面の外にあります" in text_of(page, "#plane-note")
    page.focus("#plane")
    page.keyboard.press("ArrowRight")
    settle(page)
    assert page.evaluate("() => [kizukiPage.store.state.key, document.activeElement.id]") == [5, "plane"]
    assert page.locator("#plane").get_attribute("aria-label") == text_of(page, "#plane-cell")
    q, k = row_of(LAYERS[0], 2, 20)
    found = asked(Answers(make_run(LAYERS)), "bare", layer=0, head=2, query=20)
    assert f"q 方向 {k[5] @ q / q.norm():.4g}".replace("-", "−") in text_of(page, "#plane-cell")
    assert number(text_of(page, "#plane-cell").split(" ")[-1]) == pytest.approx(found["beside"][5], rel=1e-3)
    assert axe(page) == []
