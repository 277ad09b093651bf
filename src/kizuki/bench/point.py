"""One point of the growth curve, in a process of its own: `python -m kizuki.bench.point PROVIDER TOKENS THREADS`.

Prints JSON lines: {"stage": "ready"} when the inputs are there, then the first call's seconds and memory, then
the median of more calls. What is measured as memory: the peak of the resident memory while the provider prepares
the problem and runs it once, above what the process held before, its inputs made and the provider loaded by a
small problem of the same kind.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .cells import Cell
from .measure import FAULTS, said, timed
from .providers import CannotDo, Missing, Provider, all_providers, make_data
from .truth import PEER_SLACK, Truth

STATUS = Path("/proc/self/status")
HEAD_DIM = 64
SMALL = 128  # tokens of the problem that loads a provider
AGAIN = 1.0  # seconds of repeated calls


def problem(tokens: int) -> Cell:
    """`[1, 1, tokens, 64]`, float32, causal."""
    return Cell(f"growth/{tokens}", "forward", queries=tokens, keys=tokens, head_dim=HEAD_DIM, causal=True)


def resident() -> int:
    """Bytes of this process in memory now; on systems that do not tell, its peak so far."""
    return _kilobytes("VmRSS:")


def peak() -> int:
    """The most bytes since `reset_peak`, or since the start where Linux does not reset it."""
    return _kilobytes("VmHWM:")


def _kilobytes(name: str) -> int:
    try:
        for line in STATUS.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # not there on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def reset_peak() -> str:
    """Reset the high-water mark; returns how memory is measured here, in words."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return "ru_maxrss"
    return "VmHWM, reset"


def run(provider: Provider, tokens: int, threads: int) -> None:
    small = problem(SMALL)
    trials = provider.ways(small, make_data(small), threads)
    for way in trials:
        way.call()
    # Of several ways the one that is fastest here is taken: to try them all would measure the hungriest.
    index = min(range(len(trials)), key=lambda n: timed(trials[n].call, 3))
    cell = problem(tokens)
    data = make_data(cell)
    method = reset_peak()
    before = resident()
    tell(stage="ready")
    way = provider.ways(cell, data, threads)[index]
    first = timed(way.call, 1)
    tell(stage="first", seconds=first, extra_bytes=max(0, peak() - before), memory_method=method)
    report = Truth(cell, data).check(
        provider.name, way.results(), PEER_SLACK if provider.name != "kizuki" else 1
    )
    if not report.ok:
        tell(stage="wrong", why=str(report))
        return
    times: list[float] = []
    until = time.perf_counter() + AGAIN
    while not times or (time.perf_counter() < until and len(times) < 200):
        times.append(timed(way.call, 1))
    tell(stage="done", median_s=statistics.median(times), calls=len(times), note=way.note)


def tell(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main(name: str, tokens: int, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        run(all_providers()[name], tokens, threads)
    except (CannotDo, Missing) as reason:
        tell(stage="cannot", why=str(reason))
    except FAULTS as fault:
        tell(stage="failed", why=said(fault))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
