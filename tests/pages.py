"""What the browser tests share: runs of given matrices, a browser with the network cut, and what stands on a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kizuki
from kizuki.explorer.answers import Answers
from kizuki.explorer.server import Server
from kizuki.models import RecordError

PIECES = [
    "東 1/2",
    "東 2/2",
    "京",
    "メトロ",
    " gave",
    " the",
    " key",
    " 👩 1/3",
    "👩 2/3",
    "👩 3/3",
    " to",
    " her",
]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Recorded:
    """A recording made of given matrices: what `write_page` asks of one."""

    def __init__(self, matrices: dict[int, kizuki.AttentionMatrix | RecordError]) -> None:
        self.matrices = matrices
        self.layers = tuple(matrices)
        self.heads = None
        self.model_name = "random numbers"
        self.versions = None

    def __getitem__(self, layer: int) -> kizuki.AttentionMatrix:
        matrix = self.matrices[layer]
        if isinstance(matrix, RecordError):
            raise matrix
        return matrix

    def value(self, layer: int) -> torch.Tensor:
        problem = self[layer].problem
        make = torch.Generator().manual_seed(layer)
        return torch.randn(1, problem.kv_heads, problem.keys, 5, generator=make)

    def rule(self, layer: int) -> str:
        return "causal"


def make_run(
    matrices: dict[int, Any], words: list[str] | None = None, predictions: Any = "some", kind: str = "decoder"
) -> Any:
    count = next(m for m in matrices.values() if not isinstance(m, RecordError)).shape[-1]
    labels = words or [f"w{i} " for i in range(count)]
    ends = np.cumsum([len(label) for label in labels]).tolist()
    if predictions == "some":
        predictions = [[(i, f"next {i}", 0.5), (i + 1, "<i>", 0.25)] for i in range(count)]
    return SimpleNamespace(
        tokens=SimpleNamespace(
            text="".join(labels),
            ids=list(range(count)),
            offsets=list(zip([0, *ends[:-1]], ends, strict=True)),
            labels=labels,
            special=[False] * count,
        ),
        recording=Recorded(matrices),
        predictions=predictions,
        note="",
        seconds={"forward": 0.25},
        source=SimpleNamespace(name="random", kind=kind, origin=str(Path("somewhere", "private").absolute())),
    )


def matrix(
    count: int = 37, heads: int = 4, kv_heads: int = 2, dim: int = 6, seed: int = 1, **options: Any
) -> kizuki.AttentionMatrix:
    make = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(1, heads, count, dim, generator=make)
    key = 2 * torch.randn(1, kv_heads, count, dim, generator=make)
    return kizuki.attend(query, key, **({"causal": True} | options))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is not installed, and CI must run the browser tests")
        pytest.skip("chromium is not installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def watched(context: Any, troubles: list[str], home: str) -> Any:
    """A new page that tells of every error, every word on its console, and every request that does not go home."""
    page = context.new_page()
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text))

    def asked(request: Any) -> None:
        if not request.url.startswith((home, "data:", "blob:")):
            troubles.append(request.url)

    page.on("request", asked)
    return page


@pytest.fixture
def show(browser: Any) -> Iterator[Any]:
    """Opens a page, waits until its head is drawn; afterwards no error and no request may have happened."""
    contexts, troubles = [], []

    def opened(
        path: Path,
        at: str = "",
        width: int = 1280,
        locale: str = "en-US",
        theme: str = "light",
        script: str = "",
        **options: Any,
    ) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, locale=locale, color_scheme=theme, **options
        )
        contexts.append(context)
        context.add_init_script(script)
        page = watched(context, troubles, "file:")
        page.goto(f"file://{path}{at}")
        settle(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Serves a run and opens its page; afterwards no error, and no request to anywhere else, may have happened."""
    undo: list[Callable[[], Any]] = []
    troubles: list[str] = []

    def opened(
        run: Any, at: str = "", read: bool = True, wait: Callable[[Any], None] | None = None, **options: Any
    ) -> Any:
        server = Server(Answers(run))
        if not read:
            server.answers.reader.begin = lambda: None  # type: ignore[method-assign]
        running = server.running()
        running.__enter__()
        undo.append(lambda: running.__exit__(None, None, None))
        context = browser.new_context(
            viewport={"width": 1280, "height": 900},
            **({"locale": "en-US", "color_scheme": "light"} | options),
        )
        undo.append(context.close)
        page = watched(context, troubles, server.address)
        page.server, page.troubles = server, troubles
        page.goto(server.address + at)
        (wait or settle)(page)
        return page

    yield opened
    for step in reversed(undo):
        step()
    assert troubles == []


def settle(page: Any) -> None:
    """Until the chosen head is opened, checked and its reading shown."""
    for _ in range(200):
        if page.evaluate(
            "() => { const p = globalThis.kizukiPage; if (!p) return false;"
            " const s = p.store.state; return p.opened === `${s.layer} ${s.head}`"
            " && (p.pictures.head === null || p.pictures.check !== null) && !p.busy; }"
        ):
            page.wait_for_timeout(80)
            return
        page.wait_for_timeout(25)
    pytest.fail("the page did not open its head")


def text_of(page: Any, selector: str) -> str:
    text: str = page.locator(selector).inner_text()
    return text


def table(page: Any) -> list[tuple[int, float]]:
    """The reading table: position and weight of each row."""
    rows = page.evaluate(
        "() => [...document.querySelectorAll('#reading-rows tr')]"
        ".map(r => [r.dataset.token, r.querySelector('.w').textContent])"
    )
    return [(int(token), float(weight.replace("−", "-"))) for token, weight in rows]


def pieces_run(made: kizuki.AttentionMatrix) -> Any:
    """A run whose tokens are pieces of characters and words, as byte-level tokenizers cut them."""
    run = make_run({0: made}, words=PIECES)
    text = "東京メトロ gave the key 👩 to her"
    spans = [
        (0, 1),
        (0, 1),
        (1, 2),
        (2, 5),
        (5, 10),
        (10, 14),
        (14, 18),
        (18, 20),
        (19, 20),
        (19, 20),
        (20, 23),
        (23, 27),
    ]
    run.tokens.text, run.tokens.offsets = text, spans
    return run


def axe(page: Any) -> list[Any]:
    """What axe-core finds wrong."""
    spec = find_spec("axe_core_python")
    if spec is None or spec.origin is None:
        if os.environ.get("CI"):
            pytest.fail("axe-core-python is not installed, and CI must run the accessibility checks")
        pytest.skip("axe-core-python is not installed")
    page.evaluate((Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
    found: list[Any] = page.evaluate(
        "async () => (await axe.run(document)).violations"
        ".map(v => [v.id, v.help, v.nodes.map(n => n.html.slice(0, 200))])"
    )
    return found
