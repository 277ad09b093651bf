"""What `kizuki bench` does: choose, measure, print, write lines, draw."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from ..errors import OptionError
from . import cells, growth, providers, rows, table
from .providers import Missing

if TYPE_CHECKING:
    from rich.console import Console


def list_cells(console: Console) -> None:
    """Every cell with its bars, one a line."""
    for cell in cells.CELLS.values():
        console.print(f"{cell.name:<40} {', '.join(map(str, cell.bars))}".rstrip(), soft_wrap=True)
    console.print(
        f"{cells.GROWTH:<40} time and memory, 256 to 131,072 tokens (not part of the grid)", soft_wrap=True
    )


def bench(
    names: Sequence[str],
    *,
    console: Console,
    quick: bool = False,
    out: Path | None = None,
    plot: Path | None = None,
    only: str | None = None,
    threads: int | None = None,
    seconds: float = 2.0,
) -> bool:
    """Run cells, or the growth curve; whether everything of ours was right. Raises OptionError before it starts."""
    chosen = providers.choose(only)
    if cells.GROWTH in names and len(names) > 1:
        raise OptionError(f"kizuki bench: {cells.GROWTH} is a run of its own; give it without other cells")
    wanted = [] if cells.GROWTH in names else cells.choose(names)
    if plot is not None:
        from . import plot as picture

        try:
            picture.check(plot)
        except Missing as missing:
            raise OptionError(f"kizuki bench: --plot needs matplotlib, {missing}") from None
    before = torch.get_num_threads()
    with _opened(out) as lines:
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            facts = about(torch.get_num_threads(), chosen)
            console.print(headline(facts), soft_wrap=True)
            if not wanted:
                return _growth(chosen, console, quick, lines, plot, facts)
            return _grid(wanted, chosen, console, quick, seconds, lines, plot, facts)
        finally:
            torch.set_num_threads(before)


def _grid(
    wanted: Sequence[cells.Cell],
    chosen: Sequence[providers.Provider],
    console: Console,
    quick: bool,
    seconds: float,
    lines: IO[str] | None,
    plot: Path | None,
    facts: dict[str, Any],
) -> bool:
    from . import fresh, measure
    from .peak import Peaks

    threads = facts["threads"]
    effort = measure.Effort(min(seconds, 0.3), 2) if quick else measure.Effort(seconds)
    peaks = Peaks(threads)
    everything: list[rows.Row] = []
    for cell in wanted:
        if cell.kind == "fresh":
            ours = any(provider.name == rows.OURS for provider in chosen)
            found = fresh.measure(cell, effort, threads) if ours else []
        else:
            found = measure.measure(cell, chosen, peaks, effort, threads)
        if not found:
            continue
        table.show(found, console)
        for row in found:
            _write(lines, row.line(facts | {"groups": effort.rounds, "quick": quick}))
        everything += found
    for name, peak in peaks.found.items():
        unit = "GB/s" if name == "read" else "GFLOP/s"
        console.print(f"peak, {name}: {peak.value:.0f} {unit} ({peak.method})")
    table.summary(everything, console)
    if plot is not None:
        from . import plot as picture

        picture.grid(everything, plot, headline(facts))
        console.print(f"drawn in {plot}", soft_wrap=True)
    return not any(row.provider == rows.OURS and row.status != "ok" for row in everything)


def _growth(
    chosen: Sequence[providers.Provider],
    console: Console,
    quick: bool,
    lines: IO[str] | None,
    plot: Path | None,
    facts: dict[str, Any],
) -> bool:
    console.print(
        f"causal, one head of 64, float32; each point in a new process; stopped above {growth.SECONDS:.0f} s "
        f"a call or {growth.BYTES / 1e9:.0f} GB; memory: peak resident above the inputs",
        soft_wrap=True,
    )
    points = []
    for point in growth.measure(chosen, facts["threads"], growth.QUICK if quick else growth.TOKENS):
        points.append(point)
        _write(lines, point.line(facts))
        if point.failed:
            said = point.failed
        else:
            said = f"{cells.duration(point.seconds or 0):>9} {(point.extra_bytes or 0) / 1e6:>10,.1f} MB"
        console.print(f"{point.provider:<12} {point.tokens:>8,} tokens  {said}", soft_wrap=True)
    exponent = growth.slope(points)
    if exponent is not None:
        console.print(f"kizuki's extra memory grows as tokens^{exponent:.2f} over the last factor of 16")
    if plot is not None:
        from . import plot as picture

        picture.growth(points, plot, headline(facts))
        console.print(f"drawn in {plot}", soft_wrap=True)
    return not any(point.provider == rows.OURS and point.failed for point in points)


def _opened(out: Path | None) -> Any:
    """The file of JSON lines, opened for adding to before anything is measured."""
    if out is None:
        return nullcontext(None)
    try:
        return out.open("a", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"kizuki bench: --out {out}: cannot be written ({error.strerror})") from None


def _write(lines: IO[str] | None, line: str) -> None:
    if lines is not None:
        lines.write(line + "\n")
        lines.flush()  # a run that is stopped keeps what it measured


def about(threads: int, chosen: Sequence[providers.Provider]) -> dict[str, Any]:
    """What every row of a run has in common."""
    from ..cpu import launch
    from ..doctor import processor_name

    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processor": processor_name(),
        "machine": platform.machine(),
        "target": launch.target().name,
        "threads": threads,
        "python": platform.python_version(),
        "versions": {provider.name: provider.version() for provider in chosen}
        | {name: providers.installed(name) for name in ("numba", "llvmlite")},
    }


def headline(facts: dict[str, Any]) -> str:
    versions = facts["versions"]
    named = [
        (name, versions.get(name)) for name in ("kizuki", "torch-sdpa", "onnxruntime", "openvino", "jax")
    ]
    listed = ", ".join(f"{name.removesuffix('-sdpa')} {version}" for name, version in named if version)
    return f"{facts['processor']}, {facts['target']}, {facts['threads']} threads; {listed}"
