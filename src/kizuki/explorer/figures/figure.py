"""`figure`: one head's attention as a picture for a paper, or as a table, without a browser."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ... import files
from .. import bundle
from ..colour import Scale
from . import bitmap, tables
from .cells import Cells, FigureError, Pool, Span, join, read
from .drawing import MM, guessed
from .layout import WORDS, Style, described, draw
from .svg import svg, writable

if TYPE_CHECKING:
    from kizuki import AttentionMatrix
    from kizuki.models import Words

KINDS = (".svg", ".png", ".csv", ".json", ".parquet")
UNITS = {"mm": MM, "cm": 10 * MM, "in": 72.0, "pt": 1.0}
MOST = 2048  # cells a side


class FigureOptions(TypedDict, total=False):
    """What `figure` and the `save_…` methods of a recording share; `figure` says what each means."""

    queries: Span | None
    keys: Span | None
    pool: Pool
    pixels: int
    scale: Literal["log", "linear"]
    dark: bool
    width: str | float
    font_pt: float
    font: str | None
    dpi: float
    title: str | None
    language: Literal["en", "ja"]


@dataclass(frozen=True, eq=False)
class Figure:
    """What `figure` made: the numbers in `cells`, and how they are drawn.

    `save(path)` goes by the name's ending: .svg, .png, .csv, .json or .parquet.

    >>> import torch
    >>> from kizuki import attend
    >>> from kizuki.explorer.figures import figure
    >>> made = figure(attend(torch.zeros(6, 2), torch.zeros(6, 2)), pixels=3)
    >>> "<svg" in made.svg(), made.save("head.csv").name
    (True, 'head.csv')
    """

    cells: Cells
    style: Style
    dpi: float
    font: str | None

    @property
    def about(self) -> dict[str, Any]:
        """What every file but a CSV says of itself: where it came from, what is shown of it, and the caution."""
        return {**described(self.cells, self.style), "caution": caution(self.style.language)}

    def svg(self) -> str:
        """The picture as SVG: text is text, up to 64 × 64 cells are rectangles, more are one embedded picture."""
        drawing = draw(self.cells, self.style, guessed)
        return svg(drawing, self.about, self.style.title, caution(self.style.language))

    def png(self) -> bytes:
        """The picture as PNG, `dpi` dots an inch; text in fonts of this machine, its signs that none has by number."""
        fonts = bitmap.Fonts(self.font, self.dpi / 72)
        sheet = bitmap.render(draw(self.cells, self.style, fonts.width), fonts)
        about = self.about
        if fonts.missing:
            about["drawn_by_number"] = sorted(fonts.missing)
        texts = {
            "Title": self.style.title,
            "Description": caution(self.style.language),
            "Software": "kizuki",
            "kizuki": json.dumps(about, allow_nan=False),
        }
        return bitmap.encoded(sheet, self.dpi, {name: writable(text) for name, text in texts.items()})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the figure; an existing file is replaced, at once and only when the new one is complete.

        Raises FigureError, in one line, for another ending, a file that cannot be written, or a missing package.
        """
        target = check_target(path)
        files.write(target, self._data(Path(path).suffix.lower()), FigureError, "figure")
        return target

    def _data(self, kind: str) -> bytes:
        if kind == ".png":
            return self.png()
        if kind == ".parquet":
            return tables.written_parquet(self.cells, self.about)
        text = {
            ".svg": self.svg,
            ".csv": lambda: tables.written_csv(self.cells),
            ".json": lambda: tables.written_json(self.cells, self.about),
        }[kind]()
        return text.encode()


def check_target(path: str | os.PathLike[str]) -> Path:
    """The file a figure goes to; FigureError, before any work is done, where it cannot.

    >>> from kizuki.explorer.figures import check_target
    >>> check_target("head.svg").name
    'head.svg'
    """
    target = files.check_target(path, FigureError, "figure")
    if Path(path).suffix.lower() not in KINDS:
        raise FigureError(
            f"figure: {path}: the name ends in none of {', '.join(KINDS)}, which say what to write"
        )
    return target


def figure(
    matrix: AttentionMatrix,
    head: int = 0,
    *,
    batch: int = 0,
    labels: Sequence[str] | None = None,
    words: Words | None = None,
    about: dict[str, Any] | None = None,
    queries: Span | None = None,
    keys: Span | None = None,
    pool: Pool = "mass",
    pixels: int = 512,
    scale: Literal["log", "linear"] = "log",
    dark: bool = False,
    width: str | float = "85mm",
    font_pt: float = 7.0,
    font: str | None = None,
    dpi: float = 300.0,
    title: str | None = None,
    language: Literal["en", "ja"] = "en",
) -> Figure:
    """One head of A as a figure: its cells read, pooled where there are more than fit, and a place for everything.

    A cell is a_ij itself, or, pooled, the mean over its queries of the sum over its keys ("mass": rows still sum to 1)
    or the largest a_ij in it ("peak": a thin stripe survives).

    Args:
        matrix: A, `[batch, heads, queries, keys]`, or without its first axes.
        head, batch: which, counted from 0.
        labels: a name for each key, such as `recording.tokens.labels`; the queries are the last of them.
        words: tokens joined into words, `kizuki.models.join(tokens)`: a cell is then the sum over a word's keys, the
            mean over its queries, and rows still sum to 1. `queries` and `keys` count words.
        about: where it came from, for the file's metadata.
        queries, keys: the tokens shown, `(first, end)`, end exclusive; None = all. The figure then says how much of
            the weight it shows.
        pool: what a cell of several tokens holds.
        pixels: cells a side at most, 1 … 2048; more tokens are pooled.
        scale: "log" from 0.0001 to 1, or "linear" from 0 to 1: the page's, fixed, so that figures compare.
        dark: light on dark.
        width: the figure's, "85mm", "8.5cm", "3.35in", "240pt", or a number of mm. The height follows.
        font_pt: the text's size in points.
        font: a font file for PNG that is tried before those of the machine; None = these alone.
        dpi: dots an inch of a PNG.
        title: the line above; "" = none, None = what `about` says.
        language: "en" or "ja", of axes and notes.

    Returns:
        A `Figure`; `.save("head.svg")`, also .png (needs Pillow), .csv, .json, .parquet (needs pyarrow).

    Raises:
        FigureError: an option outside what it can mean, labels that are not one a key; in one line.

    Time and memory: at most `pixels` tokens a side: their weights. More: one pass of `A.pool` over all heads of A (one
    head, where a recording is asked for it), or of the part that is shown; never queries × keys numbers.

    Example:
        >>> import torch, kizuki
        >>> from kizuki.explorer.figures import figure
        >>> A = kizuki.attend(torch.eye(4), torch.eye(4), causal=True)
        >>> made = figure(A, labels=["so", "it", "goes", "."], title="the identity")
        >>> made.cells.values.shape, made.svg().count("<text")
        ((4, 4), 17)
    """
    held = tuple(matrix.shape)
    if not 2 <= len(held) <= 4:
        raise FigureError(f"figure: matrix has shape {list(held)} but must be [batch, heads, queries, keys]")
    full = (1,) * (4 - len(held)) + held
    for name, value, count in (("batch", batch, full[0]), ("head", head, full[1])):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise FigureError(f"figure: {name} is {value!r} but must be a whole number in 0 … {count - 1}")
    if not full[2] or not full[3]:
        raise FigureError(f"figure: matrix has shape {list(held)}, and there is nothing to draw")
    _check(pool=pool, pixels=pixels, scale=scale, language=language, font_pt=font_pt, dpi=dpi)
    known = dict(about or {})
    known.setdefault("head", head)
    if words is None:
        cells = read(matrix, head, batch, queries, keys, pixels, pool, labels, known)
    elif pool == "mass":
        cells = join(matrix, head, batch, queries, keys, pixels, words, known)
    else:
        raise FigureError(f"figure: pool is {pool!r}, and words are joined by mass; leave one of them out")
    named = _title(known, language) if title is None else title
    return Figure(cells, Style(points(width), font_pt, Scale(scale), dark, language, named), dpi, font)


def _check(*, pool: str, pixels: int, scale: str, language: str, font_pt: float, dpi: float) -> None:
    for name, value, there in (
        ("pool", pool, ("mass", "peak")),
        ("scale", scale, ("log", "linear")),
        ("language", language, tuple(WORDS)),
    ):
        if value not in there:
            raise FigureError(f"figure: {name} is {value!r} but must be {' or '.join(map(repr, there))}")
    if isinstance(pixels, bool) or not isinstance(pixels, int) or not 1 <= pixels <= MOST:
        raise FigureError(f"figure: pixels is {pixels!r} but must be a whole number in 1 … {MOST}")
    for name, size, least, most in (("font_pt", font_pt, 2, 72), ("dpi", dpi, 36, 2400)):
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not least <= size <= most:
            raise FigureError(f"figure: {name} is {size!r} but must be a number in {least} … {most}")


def points(width: str | float) -> float:
    """A width in points."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(mm|cm|in|pt)?\s*", str(width))
    length = float(found[1]) * UNITS[found[2] or "mm"] if found else math.nan
    if not 36 <= length <= 7200:
        raise FigureError(
            f'figure: width is {width!r} but must be a length such as "85mm", "3.35in" or "240pt", half an inch to 100'
        )
    return length


def _title(about: dict[str, Any], language: str) -> str:
    """ "smollm2, layer 5, head 3", of what is known."""
    names = {"en": ("layer", "head"), "ja": ("層", "ヘッド")}[language]
    parts = [str(about["model"])] if about.get("model") else []
    parts += [
        f"{name} {about[key]}"
        for name, key in zip(names, ("layer", "head"), strict=True)
        if about.get(key) is not None
    ]
    return ("、" if language == "ja" else ", ").join(parts)


@cache
def caution(language: str) -> str:
    """The sentence that stands on the page as well, and in its words."""
    found = re.findall(r'^\s*caution: "(.*)",$', bundle.read("words.js"), re.MULTILINE)
    text: str = found[list(WORDS).index(language)]
    return text
