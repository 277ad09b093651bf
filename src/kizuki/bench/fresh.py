"""First calls and imports, each in a new process: what a person waits for before anything is warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .cells import Cell
from .measure import Effort, compare, fill, said
from .rows import OURS, Row

# Seconds after `import torch`: until a public function is there, and until the first result is.
PROGRAM = """
import json, sys, time
import torch
torch.set_num_threads(int(sys.argv[1]))
q, k, v = (torch.randn(1, 8, 256, 64) for _ in range(3))
q @ k.transpose(-1, -2)
begun = time.perf_counter()
import kizuki
kizuki.attention
imported = time.perf_counter()
if sys.argv[2] == "call":
    kizuki.attention(q, k, v)
print(json.dumps([imported - begun, time.perf_counter() - begun]))
"""
EMPTY_RUNS = 2  # each compiles every kernel it needs


def measure(cell: Cell, effort: Effort, threads: int) -> list[Row]:
    """Our row; peers compile nothing and so have none."""
    row = Row(cell, OURS, note="new processes, counted from after `import torch`")
    what = cell.name.partition("/")[2]
    try:
        times = _times(what, effort, threads)
    except (RuntimeError, subprocess.TimeoutExpired) as fault:
        row.status, row.note = "failed", said(fault)
        return [row]
    fill(row, times)
    rows = [row]
    compare(rows)
    return rows


def _times(what: str, effort: Effort, threads: int) -> list[float]:
    """Seconds of each new process."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        if what == "filled-cache":
            _run(Path(folder), threads, "call")
        for n in range(min(EMPTY_RUNS, effort.rounds) if what == "empty-cache" else effort.rounds):
            place = Path(folder) / str(n) if what == "empty-cache" else Path(folder)
            imported, called = _run(place, threads, "import" if what == "import" else "call")
            times.append(imported if what == "import" else called)
    return times


def _run(cache: Path, threads: int, what: str) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(threads), what],
        env=os.environ | {"KIZUKI_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"a new process failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    imported, called = json.loads(done.stdout)
    return imported, called
