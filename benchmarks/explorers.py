"""Explorers side by side: BertViz, CircuitsVis, attnview and kizuki show the same heads of the same texts in Chromium.

    python benchmarks/explorers.py [--tokens 16,512,4096,32768] [--only kizuki,bertviz] [--out explorers.jsonl]
        [--peers PYTHON] [--cdn FOLDER] [--layers 1] [--timeout 120] [--memory-gb 8]

For every text and explorer: the page is made by one process and opened by another, each with a time and a memory
limit, so that one that dies or hangs is a row of the table and no more. Measured are the page's size, the seconds to
make it, from navigation to the browser's first contentful paint and until what the explorer draws first is there
(`READY`), the JS heap, the memory of all of Chromium's processes (of shared pages each its part), the
DOM's nodes, and how long the page takes to answer. Printed: one JSON line a cell, then a Markdown table.
Chromium runs with the network cut. Build seconds are of one cold process, its imports included.

The texts are the sample text again and again, read by SmolLM2 (one layer of nine heads by default, the most favourable
to explorers that hold n × n numbers a head). It reads 8,192 tokens at most; a longer row is a tiny random Llama, one
layer of four heads, and says so. Peers are given the dense matrices that they ask for; making them counts as theirs.

The peers live in an environment of their own, which sees this one's packages and adds three wheels:

    python -m venv peers
    python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])" > peers/lib/python3.*/site-packages/here.pth
    peers/bin/python -m pip install --no-deps bertviz==1.4.1 circuitsvis==1.43.3 attnview==0.5.1 \\
        importlib-metadata==8.5.0
    python benchmarks/explorers.py --peers peers/bin/python

BertViz's page loads three scripts from a CDN and is blank without them. With `--cdn FOLDER` they are handed to it from
a folder in which `npm pack requirejs@2.3.6 d3@5.7.0 jquery@2.1.4` was unpacked (jQuery 2.0.0, which it names, is not on
npm), and BertViz has a second row.

Transformer Explainer is a web site about one model of its own (GPT-2 in the browser), in no package registry; its form
takes 12 words at most, so that only the first of these inputs could be given to it: its cells stay empty. kizuki's
served carrier is measured where `kizuki look --serve` exists.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MB = 1e6
SETTLE = 2.0  # seconds after a page is ready before its memory is read
HEAD_LIMIT = 8192  # SmolLM2's positions
CDN = {
    "https://cdnjs.cloudflare.com/ajax/libs/require.js/2.3.6/require.min.js": "require.js",
    "https://cdnjs.cloudflare.com/ajax/libs/d3/5.7.0/d3.min.js": "d3.min.js",
    "https://cdnjs.cloudflare.com/ajax/libs/jquery/2.0.0/jquery.min.js": "jquery.min.js",
}
# What is looked for in a page before it counts as ready: the first weights, as a row with numbers, lines or a map.
READY = {
    "kizuki page": "() => document.querySelectorAll('#reading-rows tr').length > 0",
    "bertviz": "() => document.querySelectorAll('svg line').length > 0",
    "circuitsvis": "() => document.querySelectorAll('canvas, img').length > 0",
    "attnview": "() => document.querySelectorAll('canvas, svg, table, .cell').length > 0",
}
READY["kizuki served"] = READY["kizuki page"]
READY["bertviz with its CDN"] = READY["bertviz"]
# From each one's own documentation and its page.
READS = {
    "kizuki page": "any weight with its digits, rows, columns, whole map, row statistics, q·k; all layers and heads",
    "kizuki served": "the same, computed as it is looked at",
    "bertviz": "lines from token to token, their strength by opacity; no numbers; heads overlaid by colour",
    "circuitsvis": "one map a head, weights on hover; token-to-token view",
    "attnview": "one row of one head, its largest weights, an exact-matrix panel",
    "transformer explainer": "GPT-2 small, its own short texts",
}
READS["bertviz with its CDN"] = READS["bertviz"]
NUMBERS = {
    "page_mb": 2, "make_s": 1, "paint_s": 2, "ready_s": 2, "heap_mb": 0, "memory_mb": 0, "nodes": 0,
}  # and their digits  # fmt: skip
PEERS = ("bertviz", "bertviz with its CDN", "circuitsvis", "attnview")
ALL = ("kizuki page", "kizuki served", *PEERS, "transformer explainer")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="16,512,4096,32768")
    parser.add_argument("--only", help="explorers, by the beginnings of their names, with commas")
    parser.add_argument("--layers", type=int, default=1, help="how many of the model's layers are shown")
    parser.add_argument("--peers", default=sys.executable, help="the Python that has the peers")
    parser.add_argument("--cdn", type=Path, help="a folder with BertViz's three scripts")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds, of each of a cell's two processes"
    )
    parser.add_argument(
        "--memory-gb", type=float, default=8.0, help="resident, of each of them with its children"
    )
    parser.add_argument("--out", type=Path, help="add the JSON lines to this file")
    parser.add_argument("--shots", type=Path, help="a folder for a picture of every page")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)  # a process of a cell
    args = parser.parse_args()
    if args.step:
        step(args)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for tokens in (int(part) for part in args.tokens.split(",")):
            made = child(args, ["input", folder, str(tokens)], sys.executable)
            if "failed" in made:
                print(f"{tokens:,} tokens: the input could not be made: {made['failed']}", file=sys.stderr)
                continue
            for name in ALL:
                if args.only and not any(name.startswith(part) for part in args.only.split(",")):
                    continue
                row = {
                    "tokens": tokens,
                    "input": made["input"],
                    "explorer": name,
                    **cell(args, folder, tokens, name),
                }
                print(json.dumps(row), flush=True)
                rows.append(row)
                if args.out:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    print(f"\n{table(rows)}")


def cell(args: argparse.Namespace, folder: str, tokens: int, name: str) -> dict[str, Any]:
    """One explorer on one text: its page is made, then opened."""
    if name == "transformer explainer":
        return {
            "failed": "not to be had: a web site of one model, in no package registry; it takes 12 words at most"
        }
    if name == "bertviz with its CDN" and args.cdn is None:
        return {"failed": "not tried: no --cdn"}
    page = Path(folder) / "page.html"
    page.unlink(missing_ok=True)
    if name == "kizuki served":
        return served(args, folder, tokens)
    made = child(
        args, ["make", folder, str(tokens), name, str(page)], args.peers if name in PEERS else sys.executable
    )
    if "failed" in made:
        return {"failed": f"making the page: {made['failed']}"}
    row = {"page_mb": page.stat().st_size / MB, "make_s": made["seconds"]}
    return row | opened(args, name, page.as_uri(), tokens)


def opened(args: argparse.Namespace, name: str, address: str, tokens: int) -> dict[str, Any]:
    found = child(args, ["open", name, address, str(tokens)], sys.executable)
    return {"failed": f"opening it: {found['failed']}"} if "failed" in found else found


def served(args: argparse.Namespace, folder: str, tokens: int) -> dict[str, Any]:
    """kizuki's server on a saved recording, for as long as its page is measured."""
    command = [sys.executable, "-m", "kizuki", "look"]
    if (
        "--serve"
        not in subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60).stdout
    ):
        return {"failed": "not tried: this kizuki look has no --serve"}
    began = time.perf_counter()
    server = subprocess.Popen(
        [*command, str(recording_of(folder, tokens)), "--serve", "--no-open"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    stop = threading.Timer(2 * args.timeout, lambda: end(server))
    stop.start()
    try:
        address = ""
        while not address.startswith("http"):
            line = server.stdout.readline() if server.stdout else ""
            if not line:
                return {"failed": "the server gave no address"}
            address = line.strip()
        row = {"page_mb": None, "make_s": time.perf_counter() - began}
        row |= opened(args, "kizuki served", address, tokens)
        return row | {"server_mb": resident(server.pid) / MB}
    finally:
        stop.cancel()
        end(server)


def child(args: argparse.Namespace, what: list[str], python: str) -> dict[str, Any]:
    """Run a step in a process of its own, within its limits; what it printed, or {"failed": why}."""
    command = [
        python, str(Path(__file__).resolve()), "--chromium", args.chromium, "--timeout", str(args.timeout),
        "--layers", str(args.layers), *(["--cdn", str(args.cdn.resolve())] if args.cdn else []),
        *(["--shots", str(args.shots.resolve())] if args.shots else []), "--step", *what,
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        over: list[str] = []
        watch = threading.Thread(target=guard, args=(process, args.timeout, args.memory_gb * 1e9, over))
        watch.start()
        out, _ = process.communicate()
        watch.join()
        end(process)
        if over:
            return {"failed": over[0]}
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if process.returncode or not lines:
            errors.seek(0)
            said = [line.strip() for line in errors.read().splitlines() if line.strip()]
            return {"failed": (said[-1] if said else f"exit code {process.returncode}")[:160]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def guard(process: subprocess.Popen[str], timeout: float, most: float, over: list[str]) -> None:
    """End a process and its children above their limits."""
    began = time.perf_counter()
    while process.poll() is None:
        if time.perf_counter() - began > timeout:
            over.append(f"not done after {timeout:.0f} s")
        elif resident(process.pid) > most:
            over.append(f"more than {most / 1e9:g} GB")
        if over:
            end(process)
            return
        time.sleep(0.2)


def end(process: subprocess.Popen[str]) -> None:
    """End a process with everything it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def resident(pid: int) -> int:
    """Bytes of a process and all below it; pages they share are counted in each."""
    import psutil

    total = 0
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            try:
                total += process.memory_info().rss
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
    except psutil.NoSuchProcess:
        pass
    return total


def held(named: str) -> float:
    """MB of this process's children of a name: of shared pages each has its part (Linux' PSS; elsewhere USS)."""
    import psutil

    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith(named):
                found = process.memory_full_info()
                total += getattr(found, "pss", found.uss)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return total / MB


# -- the steps, each in a process of its own ---------------------------------------------------------


def step(args: argparse.Namespace) -> None:
    kind, *rest = args.step
    if kind == "input":
        print(json.dumps({"input": make_input(rest[0], int(rest[1]), args.layers)}))
    elif kind == "make":
        folder, tokens, name, page = rest
        began = time.perf_counter()
        MAKERS[name](recording_of(folder, int(tokens)), Path(page))
        print(json.dumps({"seconds": time.perf_counter() - began}))
    else:
        print(json.dumps(look(rest[0], rest[1], args)))


def recording_of(folder: str, tokens: int) -> Path:
    return Path(folder) / f"{tokens}.safetensors"


def make_input(folder: str, tokens: int, layers: int) -> str:
    """Save the recording that every explorer gets; what it is, in words."""
    import torch

    import kizuki
    from kizuki.look import sample
    from kizuki.models import Tokens, run, sources
    from kizuki.models.tokens import cut

    source = sources.load("smollm2")
    whole = source.tokenize(sample() * (tokens // 500 + 1))
    read = cut(whole, tokens)
    if tokens <= HEAD_LIMIT:
        count = source.model.config.num_hidden_layers
        middle = list(range(count))[count // 2 : count // 2 + layers]
        recording, told = (
            run(source, read, layers=middle, k=0).recording,
            f"SmolLM2, {layers} layer(s) of 9 heads",
        )
    else:
        import transformers

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=101, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
            max_position_embeddings=tokens,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval()
        ids = torch.tensor([[one % 101 for one in read.ids]])
        with torch.no_grad(), kizuki.record(model) as recording:
            model.base_model(ids, use_cache=False)
        recording.tokens = Tokens(read.text, read.ids, read.offsets, read.labels, read.special)
        told = f"a random Llama, {layers} layer(s) of 4 heads"
    recording.save(recording_of(folder, tokens))
    return told


def kizuki_page(path: Path, page: Path) -> None:
    from kizuki.look import reopen

    reopen(path, out=page)


def dense(path: Path) -> tuple[list[str], list[Any]]:
    """Token names and, layer by layer, the matrices that peers ask for: float32 [1, heads, tokens, tokens]."""
    import kizuki

    recording = kizuki.open(path)
    names = recording.tokens.labels if recording.tokens else []
    return list(names), [recording[layer].dense(limit=2**62) for layer in recording]


def bertviz(path: Path, page: Path) -> None:
    from bertviz import head_view

    names, layers = dense(path)
    made = head_view(layers, names, prettify_tokens=False, html_action="return").data
    page.write_text(f'<!doctype html><meta charset="utf-8"><title>BertViz</title>{made}', encoding="utf-8")


def circuitsvis(path: Path, page: Path) -> None:
    from circuitsvis.attention import attention_heads

    names, layers = dense(path)
    views = [attention_heads(attention=layer[0].numpy(), tokens=names).local_src for layer in layers]
    page.write_text(
        f'<!doctype html><meta charset="utf-8"><title>CircuitsVis</title>{"".join(views)}', encoding="utf-8"
    )


def attnview(path: Path, page: Path) -> None:
    import attnview as peer

    names, layers = dense(path)
    cache = {f"blocks.{layer}.attn.hook_pattern": made for layer, made in enumerate(layers)}
    peer.export_cache(cache, page, tokens=names)


MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "kizuki page": kizuki_page,
    "bertviz": bertviz,
    "bertviz with its CDN": bertviz,
    "circuitsvis": circuitsvis,
    "attnview": attnview,
}


def look(name: str, address: str, args: argparse.Namespace) -> dict[str, Any]:
    """Open a page in a fresh Chromium without a network, and say what it took."""
    from playwright.sync_api import Route, sync_playwright
    from playwright.sync_api import TimeoutError as Timeout

    given = dict(CDN) if name == "bertviz with its CDN" else {}
    refused: list[str] = []

    def answer(route: Route) -> None:
        url = route.request.url
        if url in given:
            file = next(args.cdn.rglob(given[url]))
            route.fulfill(body=file.read_text(encoding="utf-8"), content_type="text/javascript")
        elif re.match(r"(file|data|blob):|http://127\.0\.0\.1[:/]", url):
            route.continue_()
        else:
            refused.append(url)
            route.abort()

    wait = 1000 * args.timeout
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.route("**/*", answer)
        began = time.perf_counter()
        page.goto(address, wait_until="commit", timeout=wait)
        row: dict[str, Any] = {"ready_s": None}
        shown = None
        while shown is None and time.perf_counter() - began < 0.7 * args.timeout:
            try:
                page.wait_for_function(READY[name], timeout=10_000)
                row["ready_s"] = time.perf_counter() - began
                shown = "yes"
            except Timeout:
                if refused:  # it will not come
                    shown = "nothing: it asks for " + refused[0]
        row["shows"] = shown or f"nothing after {0.7 * args.timeout:.0f} s"
        time.sleep(SETTLE)
        if args.shots:
            page.screenshot(path=args.shots / f"{name} {args.step[3]}.png", timeout=wait)
        tick = time.perf_counter()
        paint = page.evaluate(
            "() => performance.getEntriesByName('first-contentful-paint').map((entry) => entry.startTime / 1000)[0]"
        )
        row |= {"answers_s": time.perf_counter() - tick, "paint_s": paint}
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        row |= {
            "heap_mb": metrics["JSHeapUsedSize"] / MB,
            "nodes": metrics["Nodes"],
            "memory_mb": held("chrom"),
        }
        browser.close()
    return row


# -- the table ---------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    names = (
        "tokens", "explorer", "opens", "page MB", "made s", "paint s", "ready s", "JS heap MB", "browser MB",
        "DOM nodes", "what can be read off",
    )  # fmt: skip
    lines = [f"| {' | '.join(names)} |", "|" + " --- |" * len(names)]
    for row in rows:
        opens = row.get("failed") or row["shows"]
        numbers = [number(row.get(key), digits) for key, digits in NUMBERS.items()]
        shown = READS[row["explorer"]] if row.get("ready_s") is not None else "–"
        lines.append(
            f"| {' | '.join((format(row['tokens'], ','), row['explorer'], opens, *numbers, shown))} |"
        )
    inputs = "; ".join(dict.fromkeys(f"{row['tokens']:,} tokens: {row['input']}" for row in rows))
    return "\n".join([*lines, "", f"Inputs: {inputs}."])


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


if __name__ == "__main__":
    main()
