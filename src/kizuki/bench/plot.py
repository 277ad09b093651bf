"""Pictures of the rows: the grid as times over ours, the growth as two log-log panels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .growth import BYTES, SECONDS, Point
from .providers import need
from .rows import OURS, Row

# Colours that differ in lightness too (Okabe and Ito), and a marker each, so that neither has to be seen alone.
STYLES = {
    "kizuki": ("#000000", "o", "kizuki"),
    "torch-sdpa": ("#0072b2", "s", "torch SDPA"),
    "torch-eager": ("#56b4e9", "^", "torch eager"),
    "onnxruntime": ("#d55e00", "D", "onnxruntime"),
    "openvino": ("#cc79a7", "v", "openvino"),
    "jax": ("#009e73", "P", "jax"),
}
FLOOR = 0.1  # MB; less is drawn here, where the axis says "≤ 0.1"
KINDS = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Raise, before anything is measured, where no picture could be written."""
    if path.suffix.lower() not in KINDS:
        raise OptionError(f"kizuki bench: --plot {path}: has to end in one of {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise OptionError(f"kizuki bench: --plot {path}: there is no folder {path.parent}; make it")
    need("matplotlib")


def _figure(width: float, height: float, panels: int) -> tuple[Any, Any]:
    need("matplotlib").use("Agg")
    pyplot = need("matplotlib.pyplot")
    pyplot.rcParams.update(
        {
            "font.size": 12,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.8,
            "svg.fonttype": "none",
        }
    )
    return pyplot.subplots(1, panels, figsize=(width, height), layout="constrained")


def growth(points: Sequence[Point], path: Path, about: str) -> None:
    """Seconds a call and peak extra memory over tokens, one line a provider; × where it failed."""
    figure, (time, memory) = _figure(13.5, 6.4, 2)
    for name in dict.fromkeys(point.provider for point in points):
        colour, marker, label = STYLES[name]
        mine = [point for point in points if point.provider == name]
        good = [point for point in mine if not point.failed]
        bad = next((point for point in mine if point.failed), None)
        looks = {
            "color": colour,
            "marker": marker,
            "markersize": 6,
            "linewidth": 2.6 if name == OURS else 1.6,
            "zorder": 4 if name == OURS else 3,
        }
        tokens = [point.tokens for point in good]
        if bad is not None and not good:
            label += f": {bad.failed}"
        elif bad is not None:
            label += f" (at {bad.tokens:,}: {bad.failed})"
        time.plot(tokens, [point.seconds for point in good], label=label, **looks)
        memory.plot(tokens, [max((point.extra_bytes or 0) / 1e6, FLOOR) for point in good], **looks)
        if good and bad is not None:
            # The cross stands at the last length that worked: how far beyond it is not known.
            cross = {"marker": "x", "markersize": 15, "markeredgewidth": 2.2, "color": colour, "zorder": 5}
            time.plot(tokens[-1:], [good[-1].seconds], **cross)
            memory.plot(tokens[-1:], [max((good[-1].extra_bytes or 0) / 1e6, FLOOR)], **cross)
    _axes(time, points, "seconds a call")
    _axes(memory, points, "peak extra memory, MB")
    if any((point.extra_bytes or 0) / 1e6 <= FLOOR for point in points if not point.failed):
        memory.yaxis.set_major_formatter(lambda y, _: f"≤ {FLOOR:g}" if abs(y - FLOOR) < 1e-9 else _number(y))
    top = max((point.seconds or 0 for point in points), default=0)
    if top > SECONDS / 20:
        time.axhline(SECONDS, color="#999999", linestyle=":", linewidth=1.2, zorder=1)
    if max((point.extra_bytes or 0 for point in points), default=0) > BYTES / 20:
        memory.axhline(BYTES / 1e6, color="#999999", linestyle=":", linewidth=1.2, zorder=1)
    figure.suptitle(f"Causal attention, one head of 64, float32\n{about}", fontsize=13)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=11)
    _save(figure, path)


def _number(y: float) -> str:
    return f"{y:g}" if y < 1000 else f"{y:,.0f}"


def _axes(axes: Any, points: Sequence[Point], label: str) -> None:
    ticker = need("matplotlib.ticker")
    lengths = sorted({point.tokens for point in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    shown = lengths[:: 2 if len(lengths) > 6 else 1]
    if lengths[-1] not in shown:
        shown = [n for n in shown if n * 2 < lengths[-1]] + [lengths[-1]]
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.set_xticks(lengths, minor=True)
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.yaxis.set_major_formatter(lambda y, _: _number(y))
    axes.set_xlim(lengths[0] / 1.25, lengths[-1] * 1.25)
    axes.set_xlabel("tokens")
    axes.set_title(label, fontsize=12, loc="left")


def grid(rows: Sequence[Row], path: Path, about: str) -> None:
    """Each cell a line: how long each provider takes, as a multiple of our time; the bar as a stroke."""
    peers = [
        row for row in rows if row.of_ours is not None and row.provider in STYLES and row.provider != OURS
    ]
    cells = list(dict.fromkeys(row.cell.name for row in peers))
    if not cells:
        raise OptionError("kizuki bench: --plot needs a cell that kizuki and a peer computed; there is none")
    figure, axes = _figure(11, 1.9 + 0.34 * len(cells), 1)
    place = {name: len(cells) - n for n, name in enumerate(cells)}
    used = [name for name in STYLES if name != OURS and any(row.provider == name for row in peers)]
    for name in used:
        colour, marker, label = STYLES[name]
        mine = [row for row in peers if row.provider == name]
        axes.plot(
            [row.of_ours for row in mine],
            [place[row.cell.name] for row in mine],
            linestyle="none",
            marker=marker,
            color=colour,
            markersize=7,
            label=label,
            zorder=3,
        )
    bars = [
        (bar.value, place[row.cell.name])
        for row in rows
        if row.cell.name in place
        for bar, _ in row.reached
        if bar.quantity in ("peers", "torch")
    ]
    if bars:
        axes.plot(
            [x for x, _ in bars],
            [y for _, y in bars],
            linestyle="none",
            marker="|",
            markersize=16,
            markeredgewidth=2,
            color="#555555",
            label="bar (for the fastest peer, or torch)",
            zorder=2,
        )
    axes.axvline(1, color="black", linewidth=2, label="kizuki", zorder=1)
    ticker = need("matplotlib.ticker")
    axes.set_xscale("log")
    ratios = [row.of_ours for row in peers if row.of_ours]
    wide = max(ratios) / min(ratios) > 200
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1,) if wide else (1, 2, 5)))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}×"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_yticks(list(place.values()), list(place), fontsize=10)
    axes.set_ylim(0.3, len(cells) + 0.7)
    axes.set_xlabel("time over kizuki's (right of 1 is slower than kizuki)")
    figure.suptitle(about, fontsize=12)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=11)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise OptionError(f"kizuki bench: --plot {path}: cannot be written ({error.strerror})") from None
    finally:
        need("matplotlib.pyplot").close(figure)
