"""Is what the page shows what Python computes, is it one safe file, and can it be used by keyboard?"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages import Recorded, make_run, matrix, settle, table, text_of

import kizuki
from kizuki.explorer import PageError, bundle, check_writable, export, write_page
from kizuki.explorer.budget import BudgetError, LayerSize, plan
from kizuki.models import RecordError

MARKUP = [
    '</script><img src=x onerror="document.title=1">',
    "<!--",
    "\u2028",
    "&lt;",
    "'\"",
    "<b>",
    "https://example.org",
]


def meta_of(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(re.search(r'id="kz-meta">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    return found


def without_data(text: str) -> str:
    return re.sub(r'<script type="text/plain" id="kz-[^>]*>[^<]*</script>', "", text)


# -- the file ----------------------------------------------------------------------------------------


def test_the_front_end_is_small_and_names_no_network_address(tmp_path: Path) -> None:
    path = write_page(
        tmp_path / "page.html", make_run({0: matrix()}, words=[*MARKUP, *"abcdefghijklmnopqrstuvwxyzABCD"])
    )
    text = without_data(path.read_text(encoding="utf-8"))
    # Counted is all that a browser is sent in order to run and style the page, in bytes as they are sent: the script
    # with the words of both languages in it, and the style sheet. Not counted are the elements of page.html, and data.
    for carrier in ("file", "live"):
        assert len((bundle.script("main.js", carrier) + bundle.style("page.css")).encode()) <= 150_000, (
            carrier
        )
    assert not re.findall(r"\b(?:https?|wss?|ftp)://|//[a-z0-9-]+\.[a-z]|@import|url\(", text)
    ours = re.sub(r'id="kz-meta">.*?</script>', "", text, flags=re.S)
    assert not re.findall(r"\bsrc=|<iframe|<object|<embed|rel=.?stylesheet", ours)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "unsafe-inline" not in policy[1]
    assert "connect-src" not in policy[1]
    assert "private" in text
    assert str(Path.cwd()) not in text  # of a local model only the folder's name


def test_the_modules_join_into_one_script() -> None:
    script = bundle.script("main.js")
    assert not re.search(r"\b(import|export)[ {]", script)
    assert "</script" not in script
    assert "<!--" not in script


@pytest.mark.skipif(shutil.which("node") is None and not os.environ.get("CI"), reason="node is not installed")
def test_the_front_ends_own_tests_pass() -> None:
    folder = Path(__file__).parent / "js"
    done = subprocess.run(
        ["node", "--test", *sorted(map(str, folder.glob("*.mjs")))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_q_k_and_l_are_there_bit_for_bit(tmp_path: Path) -> None:
    import base64

    made = matrix()
    text = write_page(tmp_path / "page.html", make_run({3: made})).read_text(encoding="utf-8")

    def block(name: str) -> np.ndarray[Any, Any]:
        found = re.search(rf'id="kz-{name}">([^<]*)<', text)
        assert found
        return np.frombuffer(base64.b64decode(found[1]), "<f4")

    for head in range(4):
        assert np.array_equal(block(f"q-3-{head}"), made.query[0, head].numpy().ravel())
    for head in range(2):
        assert np.array_equal(block(f"k-3-{head}"), made.key[0, head].numpy().ravel())
    assert np.array_equal(block("lse-3"), made.lse[0].numpy().ravel())
    assert np.array_equal(block("received-3"), made.received()[0].numpy().ravel())


def test_means_are_the_definitions(tmp_path: Path) -> None:
    made = matrix()
    means = meta_of(write_page(tmp_path / "page.html", make_run({0: made})))["means"]
    a = made.dense()[0].double()
    n = a.shape[-1]
    step = (torch.arange(n)[:, None] - torch.arange(n)).abs().double()
    others = a[:, 1:, 1:] / a[:, 1:, 1:].sum(-1, keepdim=True)
    wanted = {
        "entropy": -torch.special.xlogy(a, a).sum(-1).mean(-1),
        "effective": (-torch.special.xlogy(a, a).sum(-1)).exp().mean(-1),
        "max": a.amax(-1).mean(-1),
        "distance": (a * step).sum(-1).mean(-1),
        "other_distance": (others * step[1:, 1:]).sum(-1).mean(-1),
        "first_key": a[..., 0].mean(-1),
        "previous": a.diagonal(-1, -2, -1).mean(-1),
    }
    for name, values in wanted.items():
        torch.testing.assert_close(
            torch.tensor(means[name][0], dtype=torch.float64), values, rtol=3e-6, atol=1e-6
        )


# -- the budget --------------------------------------------------------------------------------------

SIZES = [
    LayerSize(layer, heads=9, kv_heads=3, queries=4096, keys=4096, dim=64, drawable=True)
    for layer in range(30)
]


def test_the_plan_keeps_the_limit_and_spreads_the_layers() -> None:
    for limit in (60_000_000, 100_000_000, 200_000_000, 600_000_000):
        chosen = plan(SIZES, limit, 1_000_000)
        assert chosen.bytes <= limit
        assert chosen.full[0] == 0 or len(chosen.full) == 1
        assert chosen.full[-1] == 29 or len(chosen.full) == 1
    assert len(plan(SIZES, 600_000_000, 0).full) == 30
    assert set(plan(SIZES, 100_000_000, 0, first=[7, 11]).full) == {7, 11}
    with pytest.raises(BudgetError, match="limit_mb is 1 but the smallest page of these 30 layers"):
        plan(SIZES, 1_000_000, 0)


def test_a_small_limit_leaves_layers_out_and_says_so(tmp_path: Path) -> None:
    run = make_run({layer: matrix(300, seed=layer, dim=64) for layer in range(6)})
    whole = write_page(tmp_path / "whole.html", run)
    limit = whole.stat().st_size / 1e6 * 0.6
    path = write_page(tmp_path / "page.html", run, limit_mb=limit, first=[4])
    meta = meta_of(path)
    assert path.stat().st_size <= limit * 1e6
    full = [layer["layer"] for layer in meta["layers"] if layer["full"]]
    assert 4 in full
    assert 0 < len(full) < 6
    assert meta["top"] > 0
    for wrong, says in (
        ([4, 99], "99, which was not"),
        ([True], "True, which was not"),
        (4, "4 but must be a list"),
    ):
        with pytest.raises(PageError, match=says):
            write_page(tmp_path / "wrong.html", run, first=wrong)
    assert not (tmp_path / "wrong.html").exists()


# -- writing -----------------------------------------------------------------------------------------


def test_a_failure_half_way_leaves_the_old_page_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    written = []

    def full_disk(file: Any, name: str, array: Any) -> None:
        written.append(name)
        if len(written) > 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "_block", full_disk)
    with pytest.raises(PageError, match="No space left on device"):
        write_page(path, make_run({0: matrix()}))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_path_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    class Untouched:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("work was begun")

    for path in (tmp_path, tmp_path / "missing" / "page.html", Path("/proc/page.html")):
        with pytest.raises(PageError) as caught:
            write_page(path, Untouched())  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert check_writable(tmp_path / "page.html") == tmp_path / "page.html"
    assert os.listdir(tmp_path) == []


def test_what_is_not_one_text_is_refused_in_one_line(tmp_path: Path) -> None:
    q = torch.randn(2, 4, 5, 8)
    for wrong in (kizuki.attend(q, q, causal=True), kizuki.attend(q[:1, :, :3], q[:1])):
        with pytest.raises(PageError, match=r"^run: layer 0 holds"):
            write_page(tmp_path / "page.html", make_run({0: wrong}))
    with pytest.raises(PageError, match="off by 3"):
        write_page(tmp_path / "page.html", _only_errors())
    assert os.listdir(tmp_path) == []


def _only_errors() -> Any:
    run = make_run({0: matrix(5)})
    run.recording = Recorded({0: RecordError("off by 3")})
    return run


# -- the page in a browser ---------------------------------------------------------------------------


@pytest.mark.browser
def test_numbers_on_the_page_are_pythons(tmp_path: Path, show: Any) -> None:
    layers = {
        0: matrix(),
        7: matrix(seed=2, window=(5, 0), softcap=3.0, scale=0.7),
        8: matrix(seed=3, causal=False, mask=None),
        9: matrix(seed=4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    }
    page = show(write_page(tmp_path / "page.html", make_run(layers)))
    for layer, made in layers.items():
        for head, query in ((0, 20), (3, 36), (2, 0)):
            page.evaluate(
                "s => kizukiPage.store.set(s)",
                {"layer": layer, "head": head, "query": query, "direction": "reads"},
            )
            settle(page)
            row = made[0, head, query].double()
            _, keys = made.topk(12)
            assert [token for token, _ in table(page)] == [k for k in keys[0, head, query].tolist() if k >= 0]
            for token, weight in table(page):
                assert math.isclose(weight, row[token], rel_tol=6e-4)  # four digits are shown
            exact = page.evaluate(
                "async ([l, h, i]) => [...(await (await kizukiPage.data.head(l, h)).row(i)).weights]",
                [layer, head, query],
            )
            torch.testing.assert_close(torch.tensor(exact, dtype=torch.float64), row, rtol=2e-5, atol=1e-7)
            page.evaluate("() => kizukiPage.store.set({ direction: 'readers', key: 3 })")
            settle(page)
            column = made[0, head, :, 3]
            assert table(page)
            for token, weight in table(page):
                assert math.isclose(weight, column[token], rel_tol=6e-4)
        assert "agrees with the recorded L in all 37 rows" in text_of(page, "#map-status")
        base = page.evaluate(
            "() => { const p = kizukiPage.pictures; return [...p.levels.get(p.base).mass]; }"
        )
        torch.testing.assert_close(torch.tensor(base).view(37, 37), made[0, 2], rtol=2e-5, atol=1e-7)


@pytest.mark.browser
def test_a_cell_shows_every_number_of_the_formula(tmp_path: Path, show: Any) -> None:
    made = matrix()
    page = show(write_page(tmp_path / "page.html", make_run({0: made})), "#l=0&h=3&q=30&k=11")
    dot = float(made.query[0, 3, 30] @ made.key[0, 1, 11])
    line = text_of(page, "#cell").replace("−", "-")
    for value in (dot, made.scale, dot * made.scale, made.lse[0, 3, 30].item(), made[0, 3, 30, 11].item()):
        shown = f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.3e}"
        assert re.search(re.escape(shown.rstrip("0")), line), (shown, line)
    page.evaluate("() => kizukiPage.store.set({ key: 31 })")
    settle(page)
    assert text_of(page, "#cell").endswith("not visible")
    assert "not why" not in text_of(page, ".caution")
    assert "It does not say why the model answered" in text_of(page, ".caution")


@pytest.mark.browser
def test_tokens_are_text_never_markup(tmp_path: Path, show: Any) -> None:
    words = [*MARKUP, *[f" w{i}" for i in range(30)]]
    page = show(write_page(tmp_path / "page.html", make_run({0: matrix()}, words=words)))
    assert page.evaluate("() => document.images.length") == 0
    assert page.title() == "random numbers – kizuki"
    assert page.evaluate("() => document.getElementById('tokens').textContent") == "".join(words)
    assert page.locator("#next i").count() == 0
    page.keyboard.press("/")
    page.keyboard.type("</script>")
    page.keyboard.press("Enter")
    settle(page)
    assert page.evaluate("() => kizukiPage.store.state.query") == 0
    assert text_of(page, "#search-count") == "1 of 1"


@pytest.mark.browser
def test_the_keyboard_moves_the_selection_and_the_url_keeps_it(tmp_path: Path, show: Any) -> None:
    path = write_page(tmp_path / "page.html", make_run({layer: matrix(seed=layer) for layer in (0, 4, 9)}))
    page = show(path, "#l=4&h=1&q=10&k=2")

    def at() -> list[int]:
        found: list[int] = page.evaluate(
            "() => { const s = kizukiPage.store.state; return [s.layer, s.head, s.query, s.key]; }"
        )
        return found

    page.keyboard.press("1")
    page.keyboard.press("ArrowRight")
    assert at() == [4, 1, 11, 2]
    page.keyboard.press("End")
    assert at() == [4, 1, 36, 2]
    page.keyboard.press("2")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert at() == [9, 2, 36, 2]
    page.keyboard.press("3")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert at() == [9, 2, 35, 3]
    for key in ("[", ",", "r", "m"):
        page.keyboard.press(key)
    assert at() == [4, 1, 35, 35], "who reads the token that was chosen"
    page.wait_for_timeout(400)
    assert page.evaluate("() => location.hash").startswith("#l=4&h=1&q=35&k=35&dir=readers&m=effective")
    page.keyboard.press("?")
    assert page.locator("#help").evaluate("dialog => dialog.open")
    page.keyboard.press("Escape")
    assert not page.locator("#help").evaluate("dialog => dialog.open")
    page.wait_for_timeout(500)
    assert "w35" in text_of(page, "#live")
    assert page.locator("#tokens [aria-selected=true]").get_attribute("id") == "t35"


@pytest.mark.browser
def test_a_recorded_l_that_is_not_the_softmaxs_is_not_drawn(
    tmp_path: Path, show: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = export.page.read_layer

    def spoiled(layer: int, made: Any, chosen: Any) -> Any:
        result = real(layer, made, chosen)
        result.lse[1, 20] += 1e-3
        return result

    monkeypatch.setattr(export.page, "read_layer", spoiled)
    page = show(write_page(tmp_path / "page.html", make_run({0: matrix()})), "#l=0&h=1&q=20")
    assert "Not drawn" in text_of(page, "#reading-note")
    assert table(page) == []
    assert "in 1 rows" in text_of(page, "#map-status")
    page.evaluate("() => kizukiPage.store.set({ query: 21 })")
    settle(page)
    assert table(page)
    page.evaluate("() => kizukiPage.store.set({ direction: 'readers', key: 0 })")
    settle(page)
    page.locator("#more").click()
    assert 20 not in [token for token, _ in table(page)]


@pytest.mark.browser
def test_a_layer_left_out_shows_what_is_there_and_how_to_get_the_rest(tmp_path: Path, show: Any) -> None:
    layers = {layer: matrix(300, seed=layer, dim=64) for layer in range(6)}
    run = make_run(layers)
    limit = write_page(tmp_path / "whole.html", run).stat().st_size / 1e6 * 0.6
    path = write_page(tmp_path / "page.html", run, limit_mb=limit)
    meta = meta_of(path)
    out = next(layer["layer"] for layer in meta["layers"] if not layer["full"])
    page = show(path, f"#l={out}&h=1&q=250")
    assert f"kizuki look --layers {out}" in text_of(page, "#map-status")
    assert f"kizuki look --layers {out}" in text_of(page, "#left-out")
    weights, keys = layers[out].topk(meta["top"])
    assert [token for token, _ in table(page)] == keys[0, 1, 250].tolist()
    share = float(re.search(r"([\d.]+) %", text_of(page, "#mass"))[1])  # type: ignore[index]
    assert abs(share / 100 - weights[0, 1, 250].sum().item()) < 6e-4
    page.evaluate("() => kizukiPage.store.set({ direction: 'readers', key: 5 })")
    settle(page)
    hits = (keys[0, 1] == 5).nonzero().tolist()
    wanted = sorted(((i, weights[0, 1, i, r].item()) for i, r in hits), key=lambda pair: -pair[1])[:12]
    assert [i for i, _ in table(page)] == [i for i, _ in wanted]


@pytest.mark.browser
def test_what_the_page_cannot_recompute_is_refused_by_name(tmp_path: Path, show: Any) -> None:
    holes = torch.rand(37, 37, generator=torch.Generator().manual_seed(0)) > 0.3
    layers = {
        0: matrix(),
        1: matrix(bias=torch.randn(37, 37)),
        2: matrix(causal=False, mask=holes),
        3: RecordError("it does something of its own"),
    }
    path = write_page(tmp_path / "page.html", make_run(layers))
    page = show(path, "#l=1&h=0&q=9")
    assert "a bias is added to its scores" in text_of(page, "#map-status")
    made = layers[1]
    assert isinstance(made, kizuki.AttentionMatrix)
    assert [token for token, _ in table(page)] == [k for k in made.topk(8)[1][0, 0, 9].tolist() if k >= 0]
    page.evaluate("() => kizukiPage.store.set({ layer: 2 })")
    settle(page)
    assert "not one range of keys" in text_of(page, "#map-status")
    assert "Layer 3 could not be recorded: it does something of its own" in text_of(page, "#left-out")


@pytest.mark.browser
@pytest.mark.parametrize(
    ("width", "locale", "theme"), [(360, "ja-JP", "dark"), (768, "en-US", "light"), (2560, "ja-JP", "light")]
)
def test_every_width_language_and_theme(
    tmp_path: Path, show: Any, width: int, locale: str, theme: str
) -> None:
    page = show(
        write_page(tmp_path / "page.html", make_run({0: matrix()})), width=width, locale=locale, theme=theme
    )
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    caution = {"ja-JP": "モデルがなぜそう答えたかを示すものではありません", "en-US": "does not say why"}[
        locale
    ]
    assert caution in text_of(page, ".caution")
    page.locator("#language").click()
    page.locator("#theme").click()
    page.wait_for_timeout(100)
    assert caution not in text_of(page, ".caution")
    assert (
        page.evaluate("() => document.documentElement.dataset.theme")
        == {"dark": "light", "light": "dark"}[theme]
    )
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    empty = page.evaluate(
        "() => [...document.querySelectorAll('[data-t]')].filter(e => !e.textContent).map(e => e.dataset.t)"
    )
    assert empty == []


@pytest.mark.browser
def test_a_browser_that_gives_a_local_file_no_worker_draws_the_same(tmp_path: Path, show: Any) -> None:
    page = show(write_page(tmp_path / "page.html", make_run({0: matrix()})), script="delete window.Worker;")
    assert not page.evaluate("() => kizukiPage.engine.inWorker")
    assert "agrees with the recorded L in all 37 rows" in text_of(page, "#map-status")


@pytest.mark.browser
def test_one_token_and_an_encoder(tmp_path: Path, show: Any) -> None:
    page = show(write_page(tmp_path / "one.html", make_run({0: matrix(1)}, predictions=None, kind="encoder")))
    assert table(page) == [(0, 1.0)]
    assert "no language-model head" in text_of(page, "#next")
    assert "not defined here" in text_of(page, "#numbers-rows")


@pytest.mark.browser
@pytest.mark.model
def test_a_real_model_from_text_to_page(tmp_path: Path, show: Any) -> None:
    from kizuki.models import load, run

    done = run(load("minilm"), "Haru found the key. 京都の時計", layers=[0, 5])
    page = show(write_page(tmp_path / "page.html", done), "#l=5&h=11&q=3")
    row = done.recording[5][0, 11, 3]
    for token, weight in table(page):
        assert math.isclose(weight, row[token], rel_tol=6e-4)
    assert "agrees" in text_of(page, "#map-status")
    assert "京都の時計" in page.evaluate("() => document.getElementById('tokens').textContent")
