"""What the served explorer costs: first paint, a tile at full zoom, panning, memory; and recordings long enough to try.

    python benchmarks/serving.py make long.safetensors --tokens 100000       # one head of made-up numbers, saved
    python benchmarks/serving.py make smollm2.safetensors --model smollm2 --tokens 8192
    python benchmarks/serving.py run long.safetensors smollm2.safetensors    # one JSON line a row
    python benchmarks/serving.py table long.safetensors smollm2.safetensors  # the same as a Markdown table

`run` and `table` serve each recording in a process of its own and look at it with Chromium (playwright). A tile was
compared with A before any is timed. Bars: first paint 1 s after the server answers; a 256 × 256 tile at full zoom 50 ms
on 2 cores; panning 30 frames/s (a frame every 33.3 ms); the page's memory bounded. Where the machine did other work
meanwhile, its load average, which is a row, says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kizuki
from kizuki import models
from kizuki.bench.point import peak
from kizuki.explorer.answers import Answers
from kizuki.explorer.heads import Head
from kizuki.explorer.server import Server
from kizuki.explorer.tiles import TILE, Far

WORD = "node "  # the made-up text: one word again and again, a token each
PLACES = 24  # where tiles are timed

Row = dict[str, Any]


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


# -- the server's process ------------------------------------------------------------------------------


def serve(path: Path, rounds: int) -> None:
    """Open a recording, time its tiles, then serve it until standard input ends; a JSON line for each row."""
    begun = time.perf_counter()
    recording = kizuki.open(path)
    if recording.tokens is None:
        sys.exit(f"{path} holds no tokens")
    run: Any = models.Run(recording.tokens, recording, None, None, {})
    answers = Answers(run)
    opened = time.perf_counter() - begun
    shape = f"{answers.queries:,} tokens, {len(answers.matrices)} layers × {len(answers.heads)} heads"
    tell("opened", seconds=round(opened, 2), shape=shape)
    for made in tiles(answers, rounds):
        tell(**made)
    server = Server(answers)
    with server.running():
        tell("address", address=server.address)
        sys.stdin.read()
    tell("server memory", **memory())


def tell(what: str, **values: object) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


def memory() -> Row:
    """The most that this process had in memory, in MB."""
    return {"peak_mb": round(peak() / 1e6)}


def tiles(answers: Answers, rounds: int) -> Iterator[Row]:
    """Tiles near the full zoom: the question's whole way to its bytes, the first time (L of its rows is computed with
    it) and again, at places all over the part of the matrix that is visible."""
    layer = answers.meta["start"]["layer"]
    last = (answers.queries - 1) // TILE
    order = np.random.default_rng(0)
    places = [(int(row), int(order.integers(row + 1))) for row in order.integers(last + 1, size=PLACES)]
    head = Head(answers.matrices[layer], 0)
    if head.direct:
        row, col = places[0]
        exact = answers.matrices[layer][0, 0, row * TILE : row * TILE + 4, col * TILE : (col + 1) * TILE]
        mine = Far(head).tile(0, row, col)[0][:4]
        if not np.allclose(mine, exact, rtol=2e-5, atol=4e-6):
            raise SystemExit("a tile is not A's")
    for zoom in (0, 1, 2):
        side = TILE << zoom
        cold, again = [], []
        for row, col in places:
            slot = answers.heads[row % len(answers.heads)]
            at = {
                "layer": layer,
                "head": slot,
                "zoom": zoom,
                "row": row * TILE // side,
                "col": col * TILE // side,
            }
            for once in range(1 + rounds):
                begun = time.perf_counter()
                answers.ask("tile", {name: str(value) for name, value in at.items()})
                (again if once else cold).append(1e3 * (time.perf_counter() - begun))
        yield {"what": "tile", "zoom": zoom, "cold_ms": spread(cold), "again_ms": spread(again)}


def spread(times: Sequence[float]) -> Row:
    """Median, 95th percentile and worst, of milliseconds."""
    return {
        "median": round(statistics.median(times), 1),
        "p95": round(float(np.percentile(times, 95)), 1),
        "worst": round(max(times), 1),
    }


@contextmanager
def served(path: Path, rounds: int) -> Iterator[tuple[str, list[Row]]]:
    """A recording served by another process: its address, and its rows, to which its memory comes at the end."""
    command = [sys.executable, __file__, "serve", str(path), "--rounds", str(rounds)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rows: list[Row] = []
    if process.stdout is None or process.stdin is None:
        raise SystemExit("the server's process has no pipes")
    for line in process.stdout:
        rows.append(json.loads(line))
        if rows[-1]["what"] == "address":
            break
    else:
        raise SystemExit(f"the server stopped with {process.wait()}")
    try:
        yield rows.pop()["address"], rows
    finally:
        process.stdin.close()
        rows.extend(json.loads(line) for line in process.stdout)
        process.wait()


# -- the page ------------------------------------------------------------------------------------------

READING = "() => document.querySelectorAll('#reading-rows tr').length > 0"
NODES = "() => document.querySelectorAll('*').length"
HEAP = "() => performance.memory.usedJSHeapSize / 1e6"
# What a person sees while dragging: the time between two frames, recorded by the page itself.
RECORD = """() => { globalThis.frames = []; globalThis.recording = true;
  const tick = (now) => { frames.push(now); if (recording) requestAnimationFrame(tick); };
  requestAnimationFrame(tick); }"""
STOP = "() => { recording = false; return frames.slice(1).map((at, i) => at - frames[i]); }"
READ = "() => kizukiPage.pictures.check !== null ? kizukiPage.meta.queries : kizukiPage.pictures.read"


def look(address: str, steps: int, wait: float) -> Iterator[Row]:
    """First paint, panning and memory in a browser."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--enable-precise-memory-info"]
        )
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        tile_requests = {"asked": 0, "answered": 0, "cancelled": 0}

        def count(name: str) -> Any:
            def counted(request: Any) -> None:
                if "/data/tile?" in request.url:
                    tile_requests[name] += 1

            return counted

        for event, name in (
            ("request", "asked"),
            ("requestfinished", "answered"),
            ("requestfailed", "cancelled"),
        ):
            page.on(event, count(name))
        page.goto(address)
        page.wait_for_function(READING, timeout=120_000)
        reading = page.evaluate("() => performance.now()")
        paint = page.evaluate(
            "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
        )
        yield {"what": "first paint", "contentful_ms": round(paint), "reading_ms": round(reading)}
        yield {"what": "elements of the page", "count": page.evaluate(NODES)}
        begun = time.perf_counter()
        # tiles are drawn of rows that are checked: as far down as the drags will go
        wanted = min(16 * TILE, page.evaluate("() => kizukiPage.meta.queries"))
        page.wait_for_function(f"() => ({READ})() >= {wanted}", timeout=1e3 * wait)
        collect = page.context.new_cdp_session(page)

        def heap() -> float:
            collect.send("HeapProfiler.collectGarbage")
            return round(page.evaluate(HEAP), 1)

        before = heap()
        yield from pan(page, tile_requests, steps)
        yield {"what": "page memory", "before_mb": before, "after_mb": heap()}
        yield {"what": "elements after panning", "count": page.evaluate(NODES)}
        while (
            page.evaluate("() => kizukiPage.pictures.check === null") and time.perf_counter() - begun < wait
        ):
            page.wait_for_timeout(250)
        whole = page.evaluate("() => kizukiPage.pictures.check !== null")
        yield {
            "what": "whole picture",
            "seconds": round(time.perf_counter() - begun, 1) if whole else None,
            "waited_s": wait,
        }
        read, layers = page.evaluate("() => [kizukiPage.meta.read, kizukiPage.meta.layers.length]")
        yield {"what": "layers read meanwhile", "read": read, "layers": layers}
        browser.close()


def pan(page: Any, tile_requests: dict[str, int], steps: int) -> Iterator[Row]:
    """Drags along the diagonal at one cell a pixel, each over most of the picture: new tiles come in all the time."""
    page.locator("#map").scroll_into_view_if_needed()
    page.evaluate("() => kizukiPage.map.setView(0, 0, kizukiPage.map.geometry().side)")
    box = page.locator("#map").bounding_box()
    g = page.evaluate("() => kizukiPage.map.geometry()")
    left, top, side = box["x"] + g["x0"], box["y"] + g["y0"], g["side"]
    page.evaluate(RECORD)
    done = 0
    while done < steps:
        (x0, y0), (x1, y1) = (0.9, 0.9), (0.1, 0.1)  # what lies right of and below the view comes in
        page.mouse.move(left + x0 * side, top + y0 * side)
        page.mouse.down()
        for step in range(1, 31):
            share = step / 30
            page.mouse.move(left + (x0 + share * (x1 - x0)) * side, top + (y0 + share * (y1 - y0)) * side)
        page.mouse.up()
        done += 30
    times = page.evaluate(STOP)
    page.wait_for_timeout(1000)
    yield {"what": "panning", "frame_ms": spread(times), "frames": len(times)}
    yield {"what": "tiles while panning", **tile_requests}


# -- what is printed -----------------------------------------------------------------------------------

BARS = {"first paint": "1,000 ms", "tile": "50 ms at zoom 0", "panning": "33.3 ms a frame"}


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table, one column a recording."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    names = list(dict.fromkeys((row["what"], row.get("zoom")) for row in rows))
    lines = ["| | " + " | ".join(shapes) + " | bar |", "|---" * (len(shapes) + 2) + "|"]
    for what, zoom in names:
        cells = []
        for shape in shapes:
            found = [
                row for row in rows if (row["what"], row.get("zoom"), row["shape"]) == (what, zoom, shape)
            ]
            cells.append("; ".join(written(row) for row in found) or "–")
        name = what if zoom is None else f"{what}, zoom {zoom}"
        bar = BARS.get(what, "") if zoom in (None, 0) else ""
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {bar} |")
    return "\n".join(lines)


def written(row: Row) -> str:
    """A row's numbers with their names: `cold_ms` has a median, a 95th percentile and a worst."""
    parts = []
    for name, value in row.items():
        if name in ("what", "zoom", "shape"):
            continue
        stem, _, unit = name.rpartition("_")
        label, unit = (stem, unit) if unit in ("ms", "mb", "s") else (name, "")
        if isinstance(value, dict):
            value = f"median {value['median']}, 95 % {value['p95']}, worst {value['worst']}"
        label = "" if label in ("count", "seconds", "frame") else f"{label.replace('_', ' ')} "
        unit = {"ms": " ms", "mb": " MB", "s": " s"}.get(unit, " s" if name == "seconds" else "")
        parts.append(
            f"{label}{'not in that time' if value is None else value}{unit if value is not None else ''}"
        )
    return ", ".join(parts)


def measure(paths: Sequence[Path], options: argparse.Namespace) -> Iterator[Row]:
    """The rows of each recording, each with its shape."""
    for path in paths:
        with served(path, options.rounds) as (address, rows):
            shape = rows[0].pop("shape")
            yield from (row | {"shape": shape} for row in rows)
            told = len(rows)
            for row in look(address, options.steps, options.wait):
                yield row | {"shape": shape}
        yield from (row | {"shape": shape} for row in rows[told:])
        load = [round(part, 1) for part in os.getloadavg()] if hasattr(os, "getloadavg") else None
        yield {"what": "load average of the machine", "1, 5 and 15 minutes": load, "shape": shape}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="record something long")
    making.add_argument("path", type=Path)
    making.add_argument("--tokens", type=int, default=100_000)
    making.add_argument("--model")
    serving = commands.add_parser("serve", help="what run and table start")
    serving.add_argument("path", type=Path)
    serving.add_argument("--rounds", type=int, default=5)
    for name, text in (("run", "one JSON line a row"), ("table", "a Markdown table")):
        running = commands.add_parser(name, help=text)
        running.add_argument("paths", type=Path, nargs="*", help="recordings; none = a small made-up one")
        running.add_argument("--rounds", type=int, default=5, help="times each tile is asked for again")
        running.add_argument("--steps", type=int, default=240, help="movements of the mouse while panning")
        running.add_argument("--wait", type=float, default=300.0, help="seconds for the whole picture")
    options = parser.parse_args()
    if options.command == "make":
        if options.model is None:
            make_long(options.path, options.tokens)
        else:
            make_model(options.path, options.model, options.tokens)
        return
    if options.command == "serve":
        serve(options.path, options.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = options.paths
        if not paths:
            paths = [Path(folder) / "small.safetensors"]
            make_long(paths[0], 3000)
        rows = []
        for row in measure(paths, options):
            rows.append(row)
            if options.command == "run":
                print(json.dumps(row), flush=True)
        if options.command == "table":
            print(markdown(rows))


if __name__ == "__main__":
    main()
