"""Does the control of every head's label stand beside it, and is it what equal weights give?"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pages import make_run, matrix, settle, text_of
from test_interventions_page import live

import kizuki
from kizuki.explorer import page as made_of
from kizuki.explorer.answers import Answers
from kizuki.explorer.server import Server
from kizuki.models import measures

MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "none": {"causal": False},
    "window": {"causal": True, "window": (5, 0)},
    "both ways": {"causal": False, "window": (2, 3)},
    "documents": {"causal": True, "mask": kizuki.masks.documents(lengths=[9, 1, 20, 7])},
}


@pytest.mark.parametrize("name", MASKS)
def test_controls_are_the_measures_of_equal_weights(name: str) -> None:
    """The same readings of an A whose queries are 0, so that its rows are flat: nothing of ranges is used."""
    options = MASKS[name]
    flat = kizuki.attend(torch.zeros(1, 1, 37, 4), torch.zeros(1, 1, 37, 4), **options)
    a = flat.dense()[0, 0].double()
    step = (torch.arange(37)[:, None] - torch.arange(37)).abs().double()
    others = a[:, 1:] / a[:, 1:].sum(-1, keepdim=True)
    entropy = -torch.special.xlogy(a, a).sum(-1)
    wanted = {
        "entropy": entropy.mean(),
        "effective": entropy.exp().mean(),
        "max": a.amax(-1).mean(),
        "distance": (a * step).sum(-1).mean(),
        "other_distance": (others * step[:, 1:]).sum(-1).nanmean(),
        "first_key": a[:, 0].mean(),
        "previous": a.diagonal(-1).mean(),
    }
    rule = flat.visible_range()
    assert rule is not None
    found = made_of.controls_of(made_of.ranges_of(rule, 1, 37), 37)
    assert list(found) == list(made_of.MEANS)
    for measure, value in wanted.items():
        assert math.isclose(found[measure] or math.nan, value, rel_tol=1e-5), measure


def test_controls_are_those_of_the_measures_room() -> None:
    run = live()
    answers = Answers(run)
    ((controls),) = answers.meta["controls"]
    for name in ("first_key", "previous", "entropy", "distance"):
        control = getattr(measures, name)(run.recording).control
        assert torch.allclose(control, torch.full_like(control, controls[name]), rtol=1e-5), name


@pytest.mark.browser
def test_the_page_sets_the_control_beside_what_it_names(browser: Any) -> None:
    with Server(Answers(make_run({0: matrix(), 5: matrix(seed=2)}))).running() as running:
        context = browser.new_context(locale="en-US")
        page = context.new_page()
        page.goto(f"{running.address}#l=5&h=3&m=first_key")
        settle(page)
        page.wait_for_function("() => kizukiPage.meta.read === kizukiPage.meta.layers.length", timeout=60000)
        control = running.answers.meta["controls"][0]["first_key"]
        settle(page)
        assert f"(equal weights: {control:.4g})" in text_of(page, "#atlas-cell")
        assert "(equal weights: 0.0 %)" in text_of(page, "#atlas-note")  # the sink rate of equal weights
        rows = page.evaluate(
            "() => [...document.querySelectorAll('#numbers-rows tr')].map(r => [...r.cells].map(c => c.textContent))"
        )
        found = {row[0].split("from 0")[0]: row[3] for row in rows}
        assert found["Weight on the first key"] == f"{control:.4g}"
        page.evaluate("() => kizukiPage.tour.go(5)")
        settle(page)
        assert f"(equal weights: {100 * control:.1f} %)" in text_of(page, "#tour-text")
        context.close()
