"""Does the served page show what Python computes, at every zoom, and stay small and quick to leave?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pages import make_run, matrix, settle, table, text_of

MARKUP = ['</script><img src=x onerror="document.title=1">', "<b>", "\u2028", *[f"w{i} " for i in range(34)]]
Open = Callable[..., Any]


@pytest.mark.browser
def test_numbers_on_the_served_page_are_those_of_a(visit: Open) -> None:
    layers = {
        0: matrix(),
        7: matrix(seed=2, window=(5, 0), softcap=3.0, scale=0.7),
        9: matrix(seed=4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
        11: matrix(seed=5, bias=torch.randn(37, 37, generator=torch.Generator().manual_seed(1))),
    }
    page = visit(make_run(layers))
    for layer, made in layers.items():
        for head, query in ((0, 20), (3, 36)):
            chosen = {"layer": layer, "head": head, "query": query, "direction": "reads"}
            page.evaluate("s => kizukiPage.store.set(s)", chosen)
            settle(page)
            assert [token for token, _ in table(page)] == [
                k for k in made.topk(12)[1][0, head, query].tolist() if k >= 0
            ]
            for token, weight in table(page):
                assert math.isclose(weight, made[0, head, query, token], rel_tol=6e-4)
            page.evaluate("() => kizukiPage.store.set({ direction: 'readers', key: 3 })")
            settle(page)
            assert table(page)
            for token, weight in table(page):
                assert math.isclose(weight, made[0, head, token, 3], rel_tol=6e-4)
        assert "agrees with the recorded L in all 37 rows" in text_of(page, "#map-status")
        base = page.evaluate(
            "() => { const p = kizukiPage.pictures; return [...p.levels.get(p.base).mass]; }"
        )
        torch.testing.assert_close(torch.tensor(base).view(37, 37), made[0, 3], rtol=2e-5, atol=1e-6)
        assert not page.locator("#failure").is_visible()


@pytest.mark.browser
def test_a_selection_of_thousands_is_summed_by_python_and_is_the_mean_or_the_sum(visit: Open) -> None:
    """A row a question took 11 s for 200 tokens of a long text; now 256 tokens are one question."""
    made = matrix(2_000)
    page = visit(make_run({0: made}))
    for direction, selected in (
        ("reads", made[0, 2, 300:1_500].mean(0)),
        ("readers", made[0, 2, :, 300:1_500].sum(-1)),
    ):
        chosen = {
            "layer": 0,
            "head": 2,
            "query": 300,
            "key": 300,
            "direction": direction,
            "several": "300-1499",
        }
        page.evaluate("() => performance.clearResourceTimings()")
        page.evaluate("s => kizukiPage.store.set(s)", chosen)
        settle(page)
        best = selected.topk(12)
        assert [token for token, _ in table(page)] == best.indices.tolist()
        for token, weight in table(page):
            assert math.isclose(weight, selected[token], rel_tol=6e-4)
        names = page.evaluate("() => performance.getEntriesByType('resource').map(e => e.name)")
        kind = "/rowsum?" if direction == "reads" else "/columnsum?"
        assert len({name for name in names if kind in name}) == 5, names
        assert not [name for name in names if "/row?" in name or "/column?" in name]


@pytest.mark.browser
def test_zooming_asks_for_exact_tiles_and_takes_stale_ones_back(visit: Open) -> None:
    made = matrix(2300, heads=1, kv_heads=1)
    page = visit(make_run({0: made}))
    asked: list[str] = []
    page.on("request", lambda request: "data/tile" in request.url and asked.append(request.url))
    page.evaluate("() => kizukiPage.map.setView(1900, 2000, 128)")
    page.wait_for_function("() => kizukiPage.pictures.tiles.size > 0")
    page.wait_for_timeout(200)
    found = page.evaluate(
        "() => [...kizukiPage.pictures.tiles.values()].map(({ zoom, row, col, rows, cols, mass }) => "
        "({ zoom, row, col, rows, cols, mass: [...mass] }))"
    )
    assert {tile["zoom"] for tile in found} == {0}
    for tile in found:
        i, j = 256 * tile["row"], 256 * tile["col"]
        exact = made[0, 0, i : i + 256, j : j + 256]
        assert (tile["rows"], tile["cols"]) == tuple(exact.shape)
        torch.testing.assert_close(torch.tensor(tile["mass"]).view(exact.shape), exact, rtol=2e-5, atol=4e-6)
    assert asked
    # A view that is left at once: its tiles are taken back, and those of the next one come.
    page.evaluate(
        "async () => { for (let at = 0; at < 2000; at += 250) {"
        " kizukiPage.map.setView(at / 2, at, 128); await new Promise(requestAnimationFrame); } }"
    )
    page.wait_for_function("() => kizukiPage.engine.tiles.size === 0")
    page.wait_for_timeout(200)
    assert not page.locator("#failure").is_visible()
    names = page.evaluate("() => [...kizukiPage.pictures.tiles.keys()]")
    assert any(name.startswith(("0 6 ", "0 7 ")) for name in names)
    assert len(names) <= 120


@pytest.mark.browser
def test_the_page_says_how_many_layers_are_read_and_fills_the_atlas(visit: Open) -> None:
    layers = {layer: matrix(seed=layer) for layer in range(3)}
    page = visit(make_run(layers), read=False)
    assert "0 of 3 layers read" in text_of(page, "#atlas-note")
    assert "not read yet" in text_of(page, "#atlas-cell")
    reader = page.server.answers.reader
    type(reader).begin(reader)
    page.wait_for_function("() => kizukiPage.meta.read === 3", timeout=30_000)
    page.wait_for_timeout(200)
    assert "layers read" not in text_of(page, "#atlas-note")
    means = page.evaluate("() => kizukiPage.meta.means.entropy")
    for layer, made in layers.items():
        torch.testing.assert_close(
            torch.tensor(means[layer]), made.entropy()[0].mean(-1), rtol=1e-5, atol=1e-6
        )


@pytest.mark.browser
def test_tokens_that_are_markup_stay_text_and_a_failing_server_is_named(visit: Open) -> None:
    page = visit(make_run({0: matrix()}, words=MARKUP))
    assert page.evaluate("() => document.images.length") == 0
    assert page.title() == "random numbers – kizuki"
    assert page.evaluate("() => document.getElementById('tokens').textContent") == "".join(MARKUP)
    said = page.evaluate(
        "() => kizukiPage.data.transport.ask('row', { layer: 0, head: 0, query: 99 }).catch((error) => error.message)"
    )
    assert said.startswith("query: is 99 but must be in 0 … 36 (")
    assert "400" in page.troubles.pop()  # what the browser itself says of such an answer
    page.context.clear_cookies()
    assert page.context.cookies() == []  # the token is in the address and nowhere else
