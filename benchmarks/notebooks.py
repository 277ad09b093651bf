"""`recording.show()` in real notebooks, JupyterLab, Notebook and marimo, each in a browser and asked something.

    python benchmarks/notebooks.py [--bin FOLDER] [--out FOLDER] [--only lab notebook marimo]

Each is started as its users start it, a cell with the example recording is run, and in the widget another token is
clicked: the table must then be that token's, whose numbers only the kernel can have sent. Prints a line each, keeps a
picture, and leaves with 1 where one failed. The notebooks stand in an environment of their own, with kizuki in it:

    python -m venv notebooks && notebooks/bin/pip install 'kizuki[explorer]' jupyterlab notebook marimo
    python benchmarks/notebooks.py --bin notebooks/bin
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Frame, Page, sync_playwright
from playwright.sync_api import TimeoutError as TooLate

CELL = """import kizuki
from importlib.resources import files
recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
recording.show(height=700)"""
MARIMO = "import marimo\n\napp = marimo.App()\n\n\n@app.cell\ndef _():\n{}\n    return\n"
WAIT = 180_000  # milliseconds, for what starts a kernel


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def until_up(address: str) -> None:
    end = time.monotonic() + WAIT / 1000
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def notebook(folder: Path) -> None:
    cell = {
        "cell_type": "code",
        "execution_count": None,
        "id": "one",
        "metadata": {},
        "outputs": [],
        "source": CELL.splitlines(keepends=True),
    }
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    text = {"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "look.ipynb").write_text(json.dumps(text), encoding="utf-8")


def jupyter(kind: str, address: str) -> tuple[list[str], str]:
    options = ["--no-browser", "--allow-root", "--ServerApp.token=x", "--ServerApp.root_dir=."]
    port = address.rsplit(":", 1)[1]
    place = {"lab": "lab/tree/look.ipynb", "notebook": "notebooks/look.ipynb"}[kind]
    return ["jupyter", kind, *options, f"--port={port}"], f"{address}/{place}?token=x"


def run_cell(page: Page) -> None:
    page.wait_for_selector(".jp-CodeCell .cm-content", timeout=WAIT)
    time.sleep(5)  # a kernel that is still starting takes the cell and answers later; a comm needs it up
    page.click(".jp-CodeCell .cm-content")
    page.keyboard.press("Shift+Enter")


def explorer(page: Page) -> Frame:
    """The frame of the widget, wherever the notebook has put it."""
    end = time.monotonic() + WAIT / 1000
    while time.monotonic() < end:
        for frame in page.frames:
            if frame.query_selector("#kz-notebook"):
                return frame
        page.wait_for_timeout(500)
    raise TooLate("no widget appeared")


def asked(frame: Frame) -> str:
    """Choose another token and wait for its numbers: the heading and the rows below it."""
    title = frame.locator("#reading-title")
    frame.locator("#reading-rows tr").first.wait_for(timeout=WAIT)
    before = title.inner_text()
    frame.locator("#tokens [role=option]").nth(4).click()
    frame.wait_for_function(
        """before => document.getElementById("reading-title").innerText !== before
           && document.getElementById("reading-rows").rows.length === 5""",  # token 4 sees 0 to 4
        arg=before,
        timeout=WAIT,
    )
    return title.inner_text()


def trial(kind: str, bin_folder: Path | None, out: Path, open_page: Callable[[], Page]) -> str:
    address = f"http://127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        notebook(folder)
        (folder / "look.py").write_text(MARIMO.format("\n".join("    " + line for line in CELL.splitlines())))
        if kind == "marimo":
            port = address.rsplit(":", 1)[1]
            command, place = ["marimo", "run", "look.py", "--headless", "--no-token", "--port", port], address
        else:
            command, place = jupyter(kind, address)
        program = shutil.which(command[0], path=None if bin_folder is None else str(bin_folder))
        if program is None:
            return f"{kind}: not installed"
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [program, *command[1:]], cwd=folder, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            until_up(address)
            page = open_page()
            page.goto(place, timeout=WAIT)
            if kind != "marimo":
                run_cell(page)
            told = asked(explorer(page))
            page.screenshot(path=out / f"{kind}.png")
            return f"{kind}: ok, {told!r}"
        finally:
            server.terminate()
            server.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description="recording.show() in real notebooks.")
    parser.add_argument("--bin", type=Path, help="where jupyter and marimo are; PATH otherwise")
    parser.add_argument("--out", type=Path, default=Path("notebook-pictures"))
    parser.add_argument("--only", nargs="*", default=["lab", "notebook", "marimo"])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with sync_playwright() as play:
        options: dict[str, Any] = {"args": ["--no-sandbox"]}
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = play.chromium.launch(**options, executable_path=chromium)
        for kind in args.only:
            try:
                line = trial(
                    kind,
                    args.bin and args.bin.resolve(),
                    args.out,
                    lambda: browser.new_page(viewport={"width": 1400, "height": 1000}),
                )
            except (TooLate, OSError) as error:
                line = f"{kind}: FAILED, {' '.join(str(error).split())[:200]}"
            failed += ": ok" not in line
            print(line, flush=True)
        browser.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
