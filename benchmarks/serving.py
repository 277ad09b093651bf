"""What the served explorer costs: first paint, a tile at full zoom, panning, memory; and recordings long enough to try.

    python benchmarks/serving.py make long.safetensors --tokens 100000       # one head of made-up numbers, saved
    python benchmarks/serving.py make smollm2.safetensors --model smollm2 --tokens 8192
    python benchmarks/serving.py run long.safetensors                        # one JSON line a row

`run` serves the recording in this process and looks at it with Chromium (playwright). Every tile that is timed was
compared with A first. Bars: first paint 1 s after the server answers; a 256 × 256 tile at full zoom 50 ms on 2 cores;
panning 30 frames/s; the page's memory bounded.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kizuki
from kizuki import models
from kizuki.explorer.answers import Answers
from kizuki.explorer.heads import Head
from kizuki.explorer.server import Server
from kizuki.explorer.tiles import TILE, Far

WORD = "node "  # the made-up text: one word again and again, a token each


def make_long(path: Path, tokens: int, dim: int = 64) -> None:
    """One layer of one head, through the recorder itself: a module that attends over made-up q and k, noted."""

    class Attends(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            models.note(query, key, value, causal=True)
            return value

    generator = torch.Generator().manual_seed(0)
    drift = torch.cumsum(torch.randn(1, 1, tokens, dim, generator=generator), 2)
    drift = (
        drift / drift.norm(dim=-1, keepdim=True) * dim**0.5
    )  # near tokens are alike: bands, not only noise
    query, key, value = (drift + torch.randn(1, 1, tokens, dim, generator=generator) for _ in range(3))
    model = Attends()
    with kizuki.record(model) as recording:
        model(query, key, value)
    ends = [len(WORD) * (i + 1) for i in range(tokens)]
    recording.tokens = models.Tokens(
        WORD * tokens,
        [0] * tokens,
        [(end - len(WORD), end) for end in ends],
        [WORD] * tokens,
        [False] * tokens,
    )
    recording.save(path)


def make_model(path: Path, name: str, tokens: int) -> None:
    """A model's own pass over the sample text, repeated until it is long enough."""
    from kizuki.look import sample
    from kizuki.models.tokens import cut

    source = models.load(name)
    text = sample()
    while len((whole := source.tokenize(text)).ids) < tokens:
        text += "\n\n" + text
    models.run(source, cut(whole, tokens), k=0).recording.save(path)


def row(what: str, **values: object) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


def tiles(answers: Answers, rounds: int) -> None:
    """A tile at full zoom: the question's whole way to its bytes, at places along the diagonal and below it."""
    layer = answers.meta["start"]["layer"]
    head = Head(answers.matrices[layer], 0)
    last = (answers.queries - 1) // TILE
    places = [(r, c) for r in range(0, last + 1, max(1, last // 6)) for c in (0, r)]
    if head.direct:
        r = last // 2
        exact = answers.matrices[layer][0, 0, r * TILE : r * TILE + 4, :TILE]
        mine = Far(head).tile(0, r, 0)[0][:4]
        if not np.allclose(mine, exact, rtol=2e-5, atol=4e-6):
            raise SystemExit("a tile is not A's")
    for zoom in (0, 1, 2):
        side = TILE << zoom
        times = []
        for r, c in places:
            at = {
                "layer": layer,
                "head": answers.heads[0],
                "zoom": zoom,
                "row": r * TILE // side,
                "col": c * TILE // side,
            }
            asked = {name: str(value) for name, value in at.items()}
            answers.ask("tile", asked)  # L of these rows is computed once
            for _ in range(rounds):
                begun = time.perf_counter()
                answers.ask("tile", asked)
                times.append(time.perf_counter() - begun)
        row(
            "tile",
            zoom=zoom,
            median_ms=round(1e3 * statistics.median(times), 2),
            worst_ms=round(1e3 * max(times), 2),
            bar_ms=50,
        )


PAN = """
async ({ size, steps }) => {
  const { map, meta } = kizukiPage, times = [];
  map.setView(0, 0, size);
  let last = await new Promise(requestAnimationFrame);
  for (let step = 0; step < steps; step += 1) {
    map.setView(step * size / 40, step * size / 40, size);
    const now = await new Promise(requestAnimationFrame);
    times.push(now - last);
    last = now;
  }
  return times;
}
"""


def look(server: Server, steps: int, wait: float) -> None:
    """First paint, panning and memory in a browser."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--enable-precise-memory-info"]
        )
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        begun = time.perf_counter()
        page.goto(server.address)
        page.wait_for_function(
            "() => document.querySelectorAll('#reading-rows tr').length > 0", timeout=120_000
        )
        paint = page.evaluate(
            "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
        )
        row(
            "first paint",
            first_contentful_ms=paint,
            first_reading_s=round(time.perf_counter() - begun, 2),
            bar_s=1,
        )
        page.wait_for_function("() => kizukiPage.pictures.check !== null", timeout=1e3 * wait)
        row("whole picture", seconds=round(time.perf_counter() - begun, 2))
        memory = "() => performance.memory.usedJSHeapSize / 1e6"
        before = page.evaluate(memory)
        times = page.evaluate(PAN, {"size": 300, "steps": steps})
        row(
            "panning",
            frames_per_second=round(1e3 / statistics.mean(times), 1),
            slowest_frame_ms=round(max(times), 1),
            bar=30,
        )
        row("page memory", before_mb=round(before, 1), after_mb=round(page.evaluate(memory), 1))
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("path", type=Path)
    making.add_argument("--tokens", type=int, default=100_000)
    making.add_argument("--model")
    running = commands.add_parser("run")
    running.add_argument("path", type=Path, nargs="?", help="a recording; none = a small made-up one")
    running.add_argument("--rounds", type=int, default=5)
    running.add_argument("--steps", type=int, default=120)
    running.add_argument("--wait", type=float, default=300.0, help="seconds for the whole picture")
    options = parser.parse_args()
    if options.command == "make":
        if options.model is None:
            make_long(options.path, options.tokens)
        else:
            make_model(options.path, options.model, options.tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        path: Path = options.path or Path(folder) / "small.safetensors"
        if options.path is None:
            make_long(path, 3000)
        begun = time.perf_counter()
        recording = kizuki.open(path)
        if recording.tokens is None:
            sys.exit(f"{path} holds no tokens")
        run: Any = models.Run(recording.tokens, recording, None, None, {})
        answers = Answers(run)
        row(
            "opened",
            tokens=answers.queries,
            layers=len(answers.matrices),
            heads=len(answers.heads),
            seconds=round(time.perf_counter() - begun, 2),
        )
        tiles(answers, options.rounds)
        with Server(answers).running() as server:
            look(server, options.steps, options.wait)
    row("server memory", peak_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3))


if __name__ == "__main__":
    main()
