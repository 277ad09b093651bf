"""Timing: every provider in a group of calls after a warm-up, the groups in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .cells import Cell
from .peak import Peaks
from .providers import CannotDo, Data, Kizuki, Missing, Provider, Way, make_data
from .rows import OURS, WHOLE, Row
from .truth import PEER_SLACK, Truth

SAMPLE = 5e-4  # calls shorter than this are timed several at once: the clock and Python's loop would show
SLOW = 10.0  # a second call longer than this stays the only one timed
REST = 0.02  # idle threads of the provider before (OpenMP's, TBB's) spin about this long before they sleep
# What a peer raises when it cannot run a problem it looked able to. Ours raises too, and that is a failure.
FAULTS = (RuntimeError, ValueError, TypeError, MemoryError)


@dataclass(frozen=True)
class Effort:
    """How long one provider is timed on one cell, and in how many groups."""

    seconds: float = 2.0
    rounds: int = 5


def measure(
    cell: Cell, providers: Sequence[Provider], peaks: Peaks, effort: Effort, threads: int
) -> list[Row]:
    """One row a provider, ours first, each checked against float64 before it is timed."""
    data = make_data(cell)
    truth = Truth(cell, data)
    rows: list[Row] = []
    ways: dict[str, Way] = {}
    for provider in providers:
        row, way = _prepare(cell, provider, data, truth, threads)
        rows.append(row)
        if way is not None and row.median is None:
            ways[provider.name] = way
    if cell.kind == "share" and OURS in ways:
        row, whole = _prepare_whole(cell, threads)
        rows.insert(1, row)
        if whole is not None:
            ways[WHOLE] = whole
    for name, times in take_turns({name: way.call for name, way in ways.items()}, effort).items():
        fill(next(row for row in rows if row.provider == name), times)
    for row in rows:
        _rate(row, peaks)
    compare(rows)
    return rows


def said(fault: BaseException) -> str:
    """A fault in one line."""
    return f"{type(fault).__name__}: {str(fault).strip().partition(chr(10))[0][:200]}"


def _prepare(
    cell: Cell, provider: Provider, data: Data, truth: Truth, threads: int
) -> tuple[Row, Way | None]:
    """The row to fill and the fastest way of a provider that gives the right answer."""
    row = Row(cell, provider.name)
    if provider.version() is None:
        row.status, row.note = "missing", "not installed: pip install kizuki[bench]"
        return row, None
    best: tuple[float, Way] | None = None
    try:
        for way in provider.ways(cell, data, threads):
            way.call()
            slack = 1.0 if provider.name == OURS else PEER_SLACK
            report = truth.check(provider.name, way.results(), slack)
            if not report.ok:
                if best is None:
                    row.status, row.note = "wrong", str(report).replace("WRONG, ", "")
                    row.error, row.allowed = report.error, report.allowed
                continue
            taken = timed(way.call, 1)  # the second: the first may have compiled, packed or allocated
            if best is None or taken < best[0]:
                best = taken, way
                row.status, row.note = "ok", way.note
                row.error, row.allowed = report.error, report.allowed
    except Missing as missing:
        row.status, row.note = "missing", str(missing)
    except CannotDo as reason:
        row.status, row.note = "cannot", str(reason)
    except FAULTS as fault:
        row.status, row.note = "failed", said(fault)
    if best is None or row.status != "ok":
        return row, None
    if best[0] >= SLOW:
        fill(row, [best[0]])
        row.note = f"{row.note}; " * bool(row.note) + f"one call timed, it took more than {SLOW:.0f} s"
    return row, best[1]


def _prepare_whole(cell: Cell, threads: int) -> tuple[Row, Way | None]:
    """Our own problem without its mask."""
    plain = replace(cell, rule=None)
    data = make_data(plain)
    way = Kizuki().ways(plain, data, threads)[0]
    way.call()
    report = Truth(plain, data).check(WHOLE, way.results())
    row = Row(plain, WHOLE, note=way.note, error=report.error, allowed=report.allowed)
    if not report.ok:
        row.status, row.note = "wrong", str(report).replace("WRONG, ", "")
        return row, None
    return row, way


def take_turns(calls: dict[str, Callable[[], Any]], effort: Effort) -> dict[str, list[float]]:
    """Seconds of single calls for each name: `effort.rounds` groups, the names in turn, a warm-up before each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    together: dict[str, int] = {}
    groups: dict[str, int] = {}
    for name, call in calls.items():
        once = max(timed(call, 1), 1e-7)
        together[name] = max(1, round(SAMPLE / once)) if once < SAMPLE else 1
        samples = effort.seconds / effort.rounds / (once * together[name])
        groups[name] = max(1, min(1000, int(samples)))
    for _ in range(effort.rounds):
        for name, call in calls.items():
            time.sleep(REST)
            timed(call, together[name])  # warm-up: caches and threads are this provider's again
            times[name] += [timed(call, together[name]) for _ in range(groups[name])]
    return times


def timed(call: Callable[[], Any], count: int) -> float:
    """Seconds a call, of `count` in a row."""
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count


def fill(row: Row, times: list[float]) -> None:
    """Median and spread of the times."""
    times = sorted(times)
    row.calls = len(times)
    row.median = statistics.median(times)
    row.low, row.high = times[len(times) // 10], times[-1 - len(times) // 10]


def _rate(row: Row, peaks: Peaks) -> None:
    cell = row.cell
    if row.median is None or cell.kind == "call":
        return
    if cell.kind == "decode":
        row.gbs = cell.cache_bytes / row.median / 1e9
        peak = peaks.of("read")
    else:
        row.gflops = cell.operations / row.median / 1e9
        if cell.dtype == "f16":  # its ceiling depends on instructions that are not measured
            return
        peak = peaks.of(cell.dtype)
    row.peak, row.peak_method = peak.value, peak.method


def compare(rows: list[Row]) -> None:
    """Fill in each provider's time over ours, and what our row reached of its bars."""
    ours = next((row for row in rows if row.provider == OURS), None)
    if ours is None:
        return
    times = {row.provider: row.median for row in rows if row.median is not None}
    if ours.median is not None:
        for row in rows:
            row.of_ours = None if row.median is None else row.median / ours.median
    for bar in ours.cell.bars:
        ours.reached.append((bar, _reached(bar.quantity, ours, times)))


def _reached(quantity: str, ours: Row, times: dict[str, float]) -> float | None:
    """What a bar is compared with; None where it could not be measured."""
    if ours.median is None:
        return None
    if quantity in ("peak", "read"):
        return ours.of_peak
    if quantity == "seconds":
        return ours.median
    if quantity == "share":
        whole = times.get(WHOLE)
        return None if whole is None else ours.median / (ours.cell.share * whole)
    peers = [
        taken
        for name, taken in times.items()
        if name not in (OURS, WHOLE) and (quantity == "peers" or name.startswith("torch"))
    ]
    return min(peers) / ours.median if peers else None
