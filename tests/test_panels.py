"""Do the panels say what Python computes, at every depth, by keyboard, at any width, in both languages and themes?"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import PIECES, axe, make_run, matrix, pieces_run, settle, table, text_of

import kizuki
from kizuki.explorer import export, write_page
from kizuki.explorer.budget import Plan
from kizuki.explorer.squeeze import squeeze

NODE = pytest.mark.skipif(
    shutil.which("node") is None and not os.environ.get("CI"), reason="node is not installed"
)


def value_of(made: kizuki.AttentionMatrix, layer: int = 0) -> torch.Tensor:
    """v as the made-up recording of tests/pages.py gives it."""
    make = torch.Generator().manual_seed(layer)
    return torch.randn(1, made.problem.kv_heads, made.problem.keys, 5, generator=make)


def select(page: Any, **state: Any) -> None:
    page.evaluate("s => kizukiPage.store.set(s)", state)
    settle(page)


# -- without a browser -------------------------------------------------------------------------------


@NODE
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("const long = 3; console.log(`a  ${long  +  1}  b ${`in  ${long}`} // c`);", "a  4  b in  3 // c"),
        ("const first = 8, second = 2;\nconst third = first / second / 2 // half\nconsole.log(third)", "2"),
        ("const text = 'a // b  \"c\"'; console.log(text.replace(/[/]+ */g, \"-\"));", 'a -b  "c"'),
        ("let count = 1;\nconst other = count\n++count\nconsole.log(other, count + +count - -1)", "1 5"),
        (("let a = 1; const [b] = [a + 1]; let c = () => { let d = b; return d; };\nlet e\nc(); const f = e;"
         " for (let i = 0; i < 1; i += 1) { const j = i; let k = j; console.log(a, b, c(), f, k); }"),
         "1 2 2 undefined 0"),
        ("let at = 0; function go() { while (++at < 5); } go(); if (at) { console.log(at); }", "5"),
        (
            """class Box { show(value) { return { value, size: value.length }; } get size() { return 7; } }
            const value = 'abc', size = 1; const { size: length, value: again = size } = new Box().show(value);
            console.log(length, again, new Box().size, size)""",
            "3 abc 7 1",
        ),
        (
            """const flag = true, left = 1, right = 2;
            console.log(flag ? left : right, { left, flag: right }.flag, ...[left])""",
            "1 2 1",
        ),
        (
            """const each = (item) => item * 2; function show(list) { return list.map((item) => each(item)); }
            console.log(show([1, 2]).join())""",
            "2,4",
        ),
    ],
)  # fmt: skip
def test_a_squeezed_program_does_the_same(code: str, printed: str) -> None:
    for program in (code, squeeze(code)):
        done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=False)
        assert done.stdout.rstrip("\n") == printed, program + done.stderr
    assert len(squeeze(code)) < len(code)


@NODE
def test_the_arithmetic_agrees_with_pythons_to_float32(tmp_path: Path) -> None:
    starts = [0, 1, 4, 5, 9]
    groups = torch.repeat_interleave(torch.arange(5), torch.tensor([1, 3, 1, 4, 3]))
    heads = []
    for name, options in {
        "causal": {},
        "softcap in a window": {"softcap": 3.0, "window": (5, 0), "scale": 0.7},
        "sinks, both ways": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "causal": False, "mask": None},
    }.items():
        made = matrix(12, **options)
        rule = made.visible_range()
        assert rule is not None
        first, stop = (end.expand(1, 4, 12)[0, 3].tolist() for end in rule)
        value = value_of(made)
        output = (made @ value)[0, 3]
        cells = []
        for query, key in ((0, 0), (11, 4), (6, 5), (3, 9)):
            steps = made.steps(query, key)
            visible, weight = bool(steps.visible[0, 3]), steps.weight[0, 3]
            cells.append(
                {
                    "query": query,
                    "key": key,
                    "products": steps.products[0, 3].tolist(),
                    "dot": float(steps.dot[0, 3]),
                    "scaled": float(steps.scaled[0, 3]),
                    "capped": None if steps.capped is None else float(steps.capped[0, 3]),
                    "score": float(steps.score[0, 3]) if visible else None,
                    "weight": float(weight),
                    "part": (weight * value[0, 1, key]).tolist(),
                    "output": output[query].tolist(),
                }
            )
        sinks = made.problem.sinks
        heads.append(
            {
                "name": name,
                "parts": {
                    "queries": 12,
                    "keys": 12,
                    "dim": 6,
                    "q": made.query[0, 3].flatten().tolist(),
                    "k": made.key[0, 1].flatten().tolist(),
                    "lse": made.lse[0, 3].tolist(),
                    "first": first,
                    "stop": stop,
                    "scale": made.scale,
                    "softcap": made.problem.softcap,
                    "sink": None if sinks is None else float(sinks[3]),
                },
                "value": {"dim": 5, "v": value[0, 1].flatten().tolist()},
                "cells": cells,
                "starts": starts,
                "reads": made.mass(groups, rows=groups)[0, 3].tolist(),
                "readers": made.mass(groups, rows=groups)[0, 3].tolist(),
            }
        )
    fixture = tmp_path / "heads.json"
    fixture.write_text(json.dumps({"heads": heads}))
    script = Path(__file__).parent / "js" / "explorer" / "agree.mjs"
    done = subprocess.run(["node", str(script), str(fixture)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 3 * 4 * 20


# -- in a browser ------------------------------------------------------------------------------------


@pytest.mark.browser
def test_several_tokens_add_up_in_both_directions(tmp_path: Path, show: Any) -> None:
    made = matrix()
    page = show(write_page(tmp_path / "page.html", make_run({0: made})), "#l=0&h=2&q=20")
    a = made[0, 2].double()
    page.locator("#t20").click()
    page.locator("#t23").click(modifiers=["Shift"])
    page.locator("#t9").click(modifiers=["Control"])
    settle(page)
    assert page.evaluate("() => kizukiPage.store.state.several") == "9.20-23"
    chosen = [9, 20, 21, 22, 23]
    row = a[chosen].mean(0)
    assert [token for token, _ in table(page)] == row.topk(12).indices.tolist()
    for token, weight in table(page):
        assert math.isclose(weight, row[token], rel_tol=6e-4)
    shown = float(text_of(page, "#reading-note").split("mass shown: ")[1].split(" ")[0])
    assert abs(shown / 100 - row.topk(12).values.sum().item()) < 6e-4
    assert "the mean over their rows" in text_of(page, "#text-note")
    page.keyboard.press("r")
    settle(page)
    column = a[:, chosen].sum(1)
    assert [token for token, _ in table(page)] == column.topk(12).indices.tolist()
    for token, weight in table(page):
        assert math.isclose(weight, column[token], rel_tol=6e-4)
    shown = float(text_of(page, "#reading-note").split("mass shown: ")[1].split(" ")[0])
    assert abs(shown / 100 - (column.topk(12).values.sum() / column.sum()).item()) < 6e-4
    assert page.locator("#tokens [aria-selected=true]").count() == 5


@pytest.mark.browser
def test_several_tokens_by_keyboard_and_by_dragging(tmp_path: Path, show: Any) -> None:
    page = show(write_page(tmp_path / "page.html", make_run({0: matrix()})), "#l=0&h=2&q=20")

    def several() -> str:
        found: str = page.evaluate("() => kizukiPage.store.state.several")
        return found

    page.keyboard.press("1")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    assert several() == "20-22"
    page.keyboard.press("Control+ArrowRight")
    page.keyboard.press("Control+ArrowRight")
    page.keyboard.press("Space")
    assert several() == "20-22.24"
    page.keyboard.press("Escape")
    assert several() == ""
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Shift+ArrowLeft")
    assert several() == "22-23"
    page.locator("#t3").hover()
    page.mouse.down()
    page.locator("#t5").hover()
    page.locator("#t6").hover()
    page.mouse.up()
    assert several() == "3-6"
    page.locator("#adding").click()
    page.locator("#t9").click()
    assert several() == "3-6.9"
    page.locator("#alone").click()
    assert several() == ""
    page.keyboard.press("/")
    page.keyboard.type("w1")
    page.keyboard.press("Control+Enter")
    assert several() == "1.10-19"


@pytest.mark.browser
def test_pieces_are_read_as_people_write_them_and_rows_sum_to_one(tmp_path: Path, show: Any) -> None:
    from kizuki.models import Tokens, join

    made = matrix(12)
    run = pieces_run(made)
    page = show(write_page(tmp_path / "page.html", run), "#l=0&h=1&q=11&u=word")
    t = run.tokens
    words = join(Tokens(t.text, t.ids, t.offsets, t.labels, t.special), "word")
    joined = made.mass(words.groups, rows=words.groups)[0, 1]
    shown = page.evaluate("() => [...document.querySelectorAll('#tokens .t')].map(e => e.textContent.trim())")
    assert shown == words.labels
    assert "東京" in words.labels
    assert "👩" in words.labels
    assert page.evaluate("() => document.getElementById('tokens').textContent") == t.text
    for group, first in enumerate(words.starts):
        select(page, query=first, direction="reads")
        row = {words.starts.index(token): weight for token, weight in table(page)}
        for other, weight in row.items():
            assert math.isclose(weight, joined[group, other], rel_tol=6e-4)
        assert abs(sum(row.values()) - 1) < 2e-3  # four digits each
        assert "mass shown: 100 %" in text_of(page, "#reading-note")
    page.locator("[data-set='unit token']").click()
    settle(page)
    assert page.locator("#tokens .t").count() == 12
    assert "東 2/2" in page.evaluate("() => kizukiPage.units.labels.join('|')")


@pytest.mark.browser
def test_the_microscope_has_the_numbers_of_steps(tmp_path: Path, show: Any) -> None:
    made = matrix(softcap=3.0)
    value = value_of(made)
    page = show(write_page(tmp_path / "page.html", make_run({0: made})), "#l=0&h=3&q=30&k=11")
    steps = made.steps(30, 11)
    now = page.evaluate(
        "() => { const { steps, mixed } = kizukiPage.microscope.now;"
        " return { products: [...steps.products], weight: steps.weight, z: [...mixed.output] }; }"
    )
    torch.testing.assert_close(torch.tensor(now["products"]), steps.products[0, 3], rtol=1e-6, atol=1e-6)
    assert math.isclose(now["weight"], steps.weight[0, 3], rel_tol=1e-5)
    torch.testing.assert_close(torch.tensor(now["z"]), (made @ value)[0, 3, 30], rtol=1e-5, atol=1e-6)
    said = text_of(page, "#chain").replace("−", "-")
    assert steps.capped is not None
    for number in (steps.dot, steps.scaled, steps.capped, steps.weight):
        assert f"{number[0, 3].item():.4g}".rstrip("0") in said, said
    assert text_of(page, "#scope-check").startswith("Checked: the 6 products")
    page.keyboard.press("4")
    page.keyboard.press("End")
    assert f"[5] qᵢ {made.query[0, 3, 30, 5].item():.4g}".replace("-", "−")[:9] in text_of(
        page, "#scope-cell"
    )
    page.locator("#scope-twin summary").click()
    page.wait_for_selector("#scope-table tbody tr", state="attached")  # the toggle is told a moment later
    assert page.locator("#scope-table tbody tr").count() == 6
    select(page, key=31)
    assert "not visible" in text_of(page, "#chain")
    assert page.evaluate("() => kizukiPage.microscope.now.steps.weight") == 0


@pytest.mark.browser
def test_where_v_does_not_fit_the_page_says_so(tmp_path: Path, show: Any) -> None:
    run = make_run({layer: matrix(300, seed=layer, dim=64) for layer in range(2)})
    whole = write_page(tmp_path / "whole.html", run).stat().st_size
    path = write_page(tmp_path / "page.html", run, limit_mb=(whole - 25_000) / 1e6)
    assert path.stat().st_size <= whole - 25_000
    page = show(path)
    layers = page.evaluate("() => kizukiPage.meta.layers.map(l => [l.full, l.value_dim])")
    assert layers == [[True, None], [True, None]]
    assert "v of this layer is not here" in text_of(page, "#scope-note")
    assert "v of layers 0, 1: no room." in text_of(page, "#left-out")


def test_the_layer_that_the_page_opens_with_gets_room_for_v_first() -> None:
    run = make_run({layer: matrix(300) for layer in range(3)})
    one = 2 * (4 * -(-4 * 300 * 5 // 3) + export.BLOCK)  # base64 of [2, 300, 5] float32
    for room, held in ((one - 1, []), (one, [1]), (2 * one, [1, 0])):
        meta: dict[str, Any] = {"start": {"layer": 1}, "layers": [{"layer": layer} for layer in range(3)]}
        found = export._values(run, meta, Plan((0, 1), (), 0, 0, 0), room)  # layer 2 is not there in full
        assert list(found) == held
        assert [info["value_dim"] for info in meta["layers"]] == [5 if n in held else None for n in range(3)]


@pytest.mark.browser
def test_pins_and_two_heads_and_the_way_back(tmp_path: Path, show: Any) -> None:
    layers = {0: matrix(), 4: matrix(seed=2)}
    page = show(write_page(tmp_path / "page.html", make_run(layers)), "#l=0&h=1&q=10&k=2")
    page.keyboard.press("p")
    page.wait_for_timeout(1000)  # a pause makes an entry of the history
    select(page, layer=4, head=3, query=30)
    page.wait_for_timeout(1300)
    page.keyboard.press("p")
    assert page.locator("#pins li").count() == 2
    assert "“w10␣”" in text_of(page, "#pins li >> nth=0")
    best = layers[0][0, 1, 10].topk(1)
    page.wait_for_timeout(300)
    assert f"{best.values.item():.4g}".rstrip("0") in text_of(page, "#pins li >> nth=0")
    page.locator("#pins li >> nth=0").get_by_role("button", name="Compare").click()
    settle(page)
    assert page.evaluate("() => kizukiPage.store.state.against") == "0.1"
    a, b = layers[4][0, 3, 30].double(), layers[0][0, 1, 30].double()
    order = (a - b).abs().sort(descending=True, stable=True).indices[:12].tolist()
    rows = page.evaluate(
        "() => [...document.querySelectorAll('#compare-table tbody tr')]"
        ".map(r => [...r.cells].slice(1).map(c => c.textContent))"
    )
    assert [int(row[0]) for row in rows] == order
    for token, x, y, difference in rows:
        for text, wanted in (
            (x, a[int(token)]),
            (y, b[int(token)]),
            (difference, a[int(token)] - b[int(token)]),
        ):
            assert math.isclose(float(text.replace("−", "-")), wanted, rel_tol=6e-4, abs_tol=1e-9)
    moved = float(text_of(page, "#compare-note").split(" ")[0])
    assert abs(moved / 100 - (a - b).abs().sum().item() / 2) < 6e-4
    page.wait_for_function("() => kizukiPage.compare.both() !== null")
    difference = page.evaluate(
        "() => { const { a, b } = kizukiPage.compare.both(); return [...a].map((x, i) => x - b[i]); }"
    )
    torch.testing.assert_close(
        torch.tensor(difference).view(37, 37), layers[4][0, 3] - layers[0][0, 1], rtol=1e-4, atol=1e-6
    )
    page.locator("#pins .link >> nth=0").click()
    settle(page)
    assert page.evaluate(
        "() => { const s = kizukiPage.store.state; return [s.layer, s.head, s.query]; }"
    ) == [0, 1, 10]
    page.wait_for_timeout(1300)
    page.go_back()
    page.wait_for_function(
        "() => { const s = kizukiPage.store.state; return s.layer === 4 && s.head === 3 && s.query === 30; }"
    )
    page.go_forward()
    page.wait_for_function("() => kizukiPage.store.state.layer === 0")
    page.reload()
    settle(page)
    assert page.locator("#pins li").count() == 2
    assert not page.locator("#compare").is_hidden()


@pytest.mark.browser
def test_the_map_zooms_under_two_fingers_and_its_corner_shows_the_whole(tmp_path: Path, show: Any) -> None:
    page = show(
        write_page(tmp_path / "page.html", make_run({0: matrix(300)})), "#l=0&h=1&q=150&k=100", has_touch=True
    )
    page.locator("#map").scroll_into_view_if_needed()
    box = page.locator("#map").bounding_box()
    g = page.evaluate("() => kizukiPage.map.geometry()")
    x, y = box["x"] + g["x0"] + g["side"] / 2, box["y"] + g["y0"] + g["side"] / 2
    touch = page.context.new_cdp_session(page)

    def fingers(kind: str, *places: float) -> None:
        points = [{"x": x + at, "y": y, "id": n} for n, at in enumerate(places)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        page.wait_for_timeout(60)  # a frame, as between the moves of a hand

    size = "() => kizukiPage.map.view.size"
    fingers("touchStart", -20, 20)
    fingers("touchMove", -40, 40)
    fingers("touchMove", -80, 80)
    fingers("touchEnd")
    zoomed = page.evaluate(size)
    assert abs(zoomed - 75) < 8, "four times as far apart, a quarter across"
    assert abs(page.evaluate("() => kizukiPage.map.view.x + kizukiPage.map.view.size / 2") - 150) < 8
    page.wait_for_timeout(400)
    assert f"z={page.evaluate('() => kizukiPage.store.state.view')}" in page.evaluate("() => location.hash")
    page.mouse.click(box["x"] + 4, box["y"] + 4)  # the corner of the corner
    assert page.evaluate("() => [kizukiPage.map.view.x, kizukiPage.map.view.y]") == [0, 0]
    page.keyboard.press("Shift+ArrowRight")
    assert abs(page.evaluate("() => kizukiPage.map.view.x") - zoomed / 4) < 0.1
    page.keyboard.press("0")
    assert page.evaluate(size) == 300
    assert "z=" not in page.evaluate("() => kizukiPage.store.state.view")
    page.mouse.dblclick(x, y)
    assert page.evaluate(size) == 150


@pytest.mark.browser
def test_what_is_shown_can_be_saved_as_pictures_and_numbers(tmp_path: Path, show: Any) -> None:
    made = matrix(12)
    page = show(write_page(tmp_path / "page.html", pieces_run(made)), "#l=0&h=1&q=11&k=3&c=0.2")

    def saved(panel: str, kind: str) -> bytes:
        page.locator(f"#{panel}-panel details.save summary").click()
        with page.expect_download() as download:
            page.get_by_role("button", name=kind, exact=True).locator("visible=true").first.click()
        page.locator(f"#{panel}-panel details.save summary").click()
        return Path(download.value.path()).read_bytes()

    text = saved("text", "CSV").decode()
    notes, head, *rows = list(csv.reader(io.StringIO(text)))
    assert notes[0] == "# text"
    assert head == ["token", "label", "weight"]
    assert [row[1] for row in rows] == PIECES
    torch.testing.assert_close(
        torch.tensor([float(row[2]) for row in rows]), made[0, 1, 11], rtol=1e-5, atol=1e-7
    )
    whole = json.loads(saved("map", "JSON"))
    torch.testing.assert_close(
        torch.tensor([row[1:] for row in whole["rows"]]), made[0, 1], rtol=1e-5, atol=1e-7
    )
    cell = json.loads(saved("scope", "JSON"))
    assert math.isclose(cell["weight"], made[0, 1, 11, 3], rel_tol=1e-5)
    atlas = list(csv.reader(io.StringIO(saved("atlas", "CSV").decode())))[2:]
    assert math.isclose(float(atlas[1][2]), made.entropy()[0, 1].double().mean(), rel_tol=1e-5)
    assert saved("map", "PNG").startswith(b"\x89PNG")
    for panel in ("text", "compare"):
        picture = saved(panel, "SVG").decode()
        loaded = page.evaluate(
            "async svg => { const i = new Image(); i['src'] = 'data:image/svg+xml,' + encodeURIComponent(svg);"
            " await i.decode(); return i.naturalWidth; }",
            picture,
        )
        assert loaded > 400
        assert "It does not say why the model answered" in picture
        assert ("メトロ" in picture) == (panel == "text")


@pytest.mark.browser
def test_the_tour_stops_at_the_heads_that_python_finds(tmp_path: Path, show: Any) -> None:
    layers = {0: matrix(), 3: matrix(seed=5, window=(4, 0)), 5: matrix(seed=7, scale=2.0)}
    page = show(write_page(tmp_path / "page.html", make_run(layers)))
    effective = {
        (layer, h): made.entropy()[0, h].exp().mean().item()
        for layer, made in layers.items()
        for h in range(4)
    }
    first = {(layer, h): made[0, h, :, 0].mean().item() for layer, made in layers.items() for h in range(4)}
    page.keyboard.press("t")
    seen = []
    for step in range(1, 11):
        settle(page)
        assert text_of(page, "#tour-step") == f"{step} of 10"
        seen.append(text_of(page, "#tour-text"))
        assert "{" not in seen[-1]
        assert page.locator(".looked-at").count() == 1
        at = tuple(page.evaluate("() => [kizukiPage.store.state.layer, kizukiPage.store.state.head]"))
        if step in (4, 10):
            assert at == min(effective, key=effective.__getitem__)
            assert step == 10 or f"{effective[at]:.4g}".rstrip("0") in seen[-1]
        if step == 5:
            assert at == max(first, key=first.__getitem__)
        if step == 10:
            layer, head = max(effective, key=effective.__getitem__)
            assert page.evaluate("() => kizukiPage.store.state.against") == f"{layer}.{head}"
        if step < 10:
            page.keyboard.press("t")
    assert len(set(seen)) == 10
    page.locator("#language").click()
    assert "介入" in text_of(page, "#tour-text")
    page.locator("#tour-next").click()
    settle(page)
    assert page.locator("#tour").is_hidden()


@pytest.mark.browser
def test_the_lesson_follows_the_selection_and_its_switches_are_the_formula(tmp_path: Path, show: Any) -> None:
    made = matrix(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), softcap=3.0)
    page = show(write_page(tmp_path / "page.html", make_run({0: made})), "#l=0&h=2&q=20&k=3")
    page.keyboard.press("l")
    settle(page)

    def weights() -> dict[int, float]:
        rows = page.evaluate(
            "() => [...document.querySelectorAll('#lesson-steps [aria-label=Softmax] tbody tr')]"
            ".map(r => [...r.cells].map(c => c.textContent))"
        )
        return {int(row[1]): float(row[4]) for row in rows}

    q, k = made.query[0, 2, 20].double(), made.key[0, 1].double()
    sink = torch.tensor([2.0], dtype=torch.float64)

    def formula(scale: float, seen: int, temperature: float) -> torch.Tensor:
        scores = 3 * torch.tanh(scale * (k[:seen] @ q) / 3) / temperature
        return torch.cat([scores, sink]).softmax(0)[:-1]

    assert text_of(page, "#lesson-now") == "As in the model."
    assert page.locator("#lesson-steps > li").count() == 8
    assert page.locator("#lesson-steps .heads li").count() == 4
    for token, weight in weights().items():
        assert math.isclose(weight, made[0, 2, 20, token], rel_tol=6e-4)
    for switch, scale, seen in (("scale", 1.0, 21), ("mask", 1.0, 37)):
        page.locator(f"#lesson-{switch}").click()
        wanted = formula(scale, seen, 1.0)
        assert list(weights()) == sorted(range(seen), key=lambda j: (-float(wanted[j]), j))[:8]
        for token, weight in weights().items():
            assert math.isclose(weight, wanted[token], rel_tol=6e-4)
    page.locator("#lesson-heat").focus()
    page.keyboard.press("End")
    wanted = formula(1.0, 37, 8.0)
    for token, weight in weights().items():
        assert math.isclose(weight, wanted[token], rel_tol=6e-4)
    assert text_of(page, "#lesson-now").startswith("Not the model’s own numbers")
    assert axe(page) == []
    page.keyboard.press("Escape")
    settle(page)
    assert page.evaluate("() => kizukiPage.store.state.lesson") == ""
