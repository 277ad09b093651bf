"""Rows as a table, printed cell by cell as they come; and the bars in the end."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .cells import UNITS, Bar, duration
from .rows import OURS, Row

WIDTHS = (16, 8, 17, 12, 7, 7)
HEADS = ("", "median", "10 – 90 %", "rate", "of peak", "/ ours")


def show(rows: Sequence[Row], console: Console) -> None:
    """One cell: a line of its name and bars, and a line for each provider."""
    console.print(Text(rows[0].cell.name, style="bold"))
    for bar, got in rows[0].reached:
        console.print(verdict(bar, got))
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for index, (head, width) in enumerate(zip(HEADS, WIDTHS, strict=True)):
        table.add_column(
            head, min_width=width, justify="left" if index == 0 else "right", header_style="dim", no_wrap=True
        )
    refused = []
    for row in rows:
        if row.median is None:
            refused.append(row)
            continue
        style = "bold" if row.provider == OURS else ""
        table.add_row(
            f" {row.provider}",
            duration(row.median),
            spread(row),
            rate(row),
            "" if row.of_peak is None else f"{row.of_peak:.0%}",
            "" if row.of_ours is None else f"{row.of_ours:.2f}×",
            style=style,
        )
    if table.row_count:
        console.print(table)
    for row in refused:
        style = "bold red" if row.provider == OURS or row.status in ("wrong", "failed") else "dim"
        line = f" {row.provider:<18} {'' if row.status in ('cannot', 'missing') else row.status + ': '}{row.note}"
        console.print(Text(line, style=style), soft_wrap=True)
    console.print()


def spread(row: Row) -> str:
    """ "17.6 – 19.1 ms", both in the unit of the larger."""
    high = duration(row.high or 0)
    unit = high.partition(" ")[2]
    return f"{(row.low or 0) / UNITS[unit]:.3g} – {high}"


def rate(row: Row) -> str:
    if row.gbs is not None:
        return f"{row.gbs:.3g} GB/s"
    return "" if row.gflops is None else f"{row.gflops:.3g} GFLOP/s"


def reached(bar: Bar, got: float | None) -> str:
    if got is None:
        return "not measured"
    if bar.quantity in ("peak", "read"):
        return f"{got:.0%}"
    return duration(got) if bar.quantity == "seconds" else f"{got:.2f}×"


def verdict(bar: Bar, got: float | None) -> Text:
    """ " ✓ 1.21×  bar ≥ 1.08× peers"."""
    met = got is not None and bar.met(got)
    sign, style = ("?", "dim") if got is None else ("✓", "green") if met else ("✗", "red")
    return Text(f" {sign} {reached(bar, got)} (bar {bar})", style=style)


def summary(rows: Sequence[Row], console: Console) -> None:
    """How many bars were met, and every one that was not."""
    bars = [(row, bar, got) for row in rows for bar, got in row.reached]
    measured = [(row, bar, got) for row, bar, got in bars if got is not None]
    missed = [(row, bar, got) for row, bar, got in measured if not bar.met(got)]
    unknown = len(bars) - len(measured)
    rest = f", {unknown} not measured" if unknown else ""
    console.print(f"{len(measured) - len(missed)} of {len(measured)} bars met{rest}")
    for row, bar, got in missed:
        console.print(Text(f"  {row.cell.name:<36} {reached(bar, got):>8}  bar {bar}"), soft_wrap=True)
    for row in rows:
        if row.status == "wrong":
            console.print(
                Text(f"  {row.cell.name}: {row.provider} is wrong, {row.note}", style="red"), soft_wrap=True
            )
