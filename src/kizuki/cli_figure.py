"""`kizuki figure`: one head of a saved recording as a figure for a paper, or as a table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from .explorer.figures import FigureOptions


def figure(
    recording: Annotated[Path, typer.Argument(help="A saved recording, ….safetensors (kizuki look --save).")],
    layer: Annotated[str, typer.Option(help="Which layer, by its number from 0 or its name.")],
    head: Annotated[int, typer.Option(help="Which head, from 0.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The file: .svg, .png, .csv, .json or .parquet.")
    ] = Path("head.svg"),
    queries: Annotated[
        str | None, typer.Option(help="The queries shown, such as 0-39.", show_default="all")
    ] = None,
    keys: Annotated[str | None, typer.Option(help="The keys shown, likewise.", show_default="all")] = None,
    unit: Annotated[
        str, typer.Option(help="token, or word or character: their tokens joined; the spans count those.")
    ] = "token",
    pool: Annotated[str, typer.Option(help="What a cell of several tokens holds: mass or peak.")] = "mass",
    pixels: Annotated[int, typer.Option(help="Cells a side at most; more tokens are pooled.")] = 512,
    scale: Annotated[str, typer.Option(help="log or linear.")] = "log",
    width: Annotated[str, typer.Option(help="The figure's width: 85mm, 3.35in, 240pt.")] = "85mm",
    font_pt: Annotated[float, typer.Option(help="The size of its text, in points.")] = 7.0,
    font: Annotated[
        str | None, typer.Option(help="A font file for a PNG.", show_default="the machine's")
    ] = None,
    dpi: Annotated[float, typer.Option(help="Dots an inch of a PNG.")] = 300.0,
    title: Annotated[
        str | None, typer.Option(help="The line above; '' leaves it out.", show_default="model, layer, head")
    ] = None,
    dark: Annotated[bool, typer.Option("--dark/--light", help="Light on dark, or dark on light.")] = False,
    lang: Annotated[str, typer.Option(help="en or ja, of axes and notes.")] = "en",
) -> None:
    """Write one head of a saved recording as a figure (SVG, PNG) or a table (CSV, JSON, Parquet).

    Its path is printed on standard output.
    """
    from .explorer.figures import check_target
    from .models import open as opened

    target = check_target(out)
    named = int(layer) if re.fullmatch(r"\d+", layer) else layer
    options = {
        "queries": span(queries, "--queries"),
        "keys": span(keys, "--keys"),
        "pool": pool,
        "pixels": pixels,
        "scale": scale,
        "width": width,
        "font_pt": font_pt,
        "font": font,
        "dpi": dpi,
        "title": title,
        "dark": dark,
        "language": lang,
    }
    # What the words may be is checked there, so that the command line and Python say the same.
    made: Any = opened(recording, layers=[named]).figure(
        named, head, unit=cast(Any, unit), **cast("FigureOptions", options)
    )
    made.save(target)
    typer.echo(out)


def span(given: str | None, name: str) -> tuple[int, int] | None:
    """`10-39` as (10, 40), `7` as (7, 8)."""
    from .look import InputError

    if given is None or given == "all":
        return None
    found = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", given)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if first > last:
        raise InputError(f"{name} {given!r}: is no number or range; write 10-39")
    return first, last + 1
