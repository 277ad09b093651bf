"""Where everything of a figure stands: title, axes with tokens or numbers, cells, legend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..colour import STEPS, Scale, table
from .cells import Axis, Cells, FigureError
from .drawing import Drawing, Grid, Line, Text, Width, shortened, wrapped

SMALLEST = 4.0  # pt: a token's name is not set smaller; there are numbers instead
ROOM = 8.0  # em: the longest name of a token that is set in full
TALLEST = 1.5  # widths: a picture with more rows than that has lower cells
LOWEST = 3.4  # em: a picture of a row or two is at least so high that the word beside it fits
NOT_A_NUMBER = (128, 128, 128)

WORDS = {
    "en": {
        "keys": "key (what is read)",
        "queries": "query (what reads)",
        "query": "query",
        "key_numbers": "key (token number)",
        "query_numbers": "query (token number)",
        "weight": "weight",
        "mass": "weight on the keys of a cell, mean of its queries",
        "peak": "largest weight in a cell",
        "log": "logarithmic scale",
        "linear": "linear scale",
        "pooled": "pooled {rows} × {cols} tokens a cell",
        "shown": "{percent} of the weight shown",
        "below": "unpainted below {floor}",
        "joined": "tokens joined (sum over keys, mean over queries)",
        "nan": "grey: not a number",
        "of": "queries {rows} and keys {cols} of {total}",
    },
    "ja": {
        "keys": "キー（読まれる側）",
        "queries": "クエリ（読む側）",
        "query": "クエリ",
        "key_numbers": "キー（トークン番号）",
        "query_numbers": "クエリ（トークン番号）",
        "weight": "重み",
        "mass": "マス内のキーへの重みの和（クエリについて平均）",
        "peak": "マス内の最大の重み",
        "log": "対数目盛",
        "linear": "線形目盛",
        "pooled": "1 マス = {rows} × {cols} トークン",
        "shown": "表示中の重み {percent}",
        "below": "{floor} 未満は塗らない",
        "joined": "トークンをまとめて表示（キーは和、クエリは平均）",
        "nan": "灰色: 数ではない値（NaN）",
        "of": "{total} トークンのうちクエリ {rows}、キー {cols}",
    },
}


@dataclass(frozen=True)
class Style:
    """How a figure looks: lengths in points."""

    width: float
    font: float
    scale: Scale
    dark: bool
    language: str
    title: str


def colours(cells: Cells, style: Style) -> NDArray[np.uint8]:
    """Every cell's colour, uint8 `[rows, cols, 3]`."""
    made = table(style.dark)[style.scale.steps(np.nan_to_num(cells.values, nan=0.0))]
    made[np.isnan(cells.values)] = NOT_A_NUMBER
    return made


def draw(cells: Cells, style: Style, width: Width) -> Drawing:
    """The figure as marks. `width` measures text in the font it will be set in."""
    words, font = WORDS[style.language], style.font
    paper, ink, faint = ("#14161a", "#f0f1f3", "#a9afb8") if style.dark else ("#ffffff", "#111111", "#555b63")
    drawing = Drawing(style.width, 0.0, paper, ink, faint)
    pad = 0.6 * font
    top = _head(drawing, cells, style, words, pad, width)

    tick_room = max(width(_tick(tick, style.scale), 0.9 * font) for tick in style.scale.ticks)
    legend = 1.0 * font + 1.0 * font + 0.4 * font + tick_room + pad  # gap, bar, gap, numbers
    room = style.width - 2 * pad - 1.6 * font - legend
    if room < 6 * font:
        raise FigureError(
            f"figure: a width of {style.width:.0f} pt leaves no room for the cells beside text of {font:g} pt; "
            "give a larger width or a smaller font_pt"
        )
    left, named, side, size = _across(cells, room, style, width)
    x0 = pad + 1.6 * font + left
    high = min(side * len(cells.rows) / len(cells.cols), TALLEST * style.width)
    high = max(high, LOWEST * font)
    y0 = top + 0.5 * font
    drawing.marks.append(Grid(x0, y0, side, high, colours(cells, style)))

    named = _rows(drawing, cells.rows, x0, y0, high, left if named else 0.0, style, width)
    bottom, below = _cols(drawing, cells.cols, x0, y0 + high, side, size, style, width)
    middle = y0 + high / 2
    beside = words["queries" if named else "query_numbers"]
    beside = beside if width(beside, font) <= high + 2 * font else words["query"]
    drawing.marks.append(Text(pad + font, middle, beside, font, "middle", 90))
    drawing.marks.append(
        Text(x0 + side / 2, bottom + 1.2 * font, words["keys" if below else "key_numbers"], font, "middle")
    )
    ends = _legend(drawing, style, x0 + side + font, y0, max(high, 9 * font), words, width)
    drawing.height = max(bottom + 1.2 * font, ends) + pad + 0.2 * font
    return drawing


def notes(cells: Cells, style: Style) -> list[str]:
    """What must be said of the picture: the scale, the pooling, what is cut off, what is not painted."""
    words = WORDS[style.language]
    found = [words["joined" if cells.joined else cells.pool or "weight"], words[style.scale.kind]]
    if cells.pool is not None and not cells.joined:
        found.append(words["pooled"].format(rows=cells.rows.sizes(), cols=cells.cols.sizes()))
    if cells.rows.cut or cells.cols.cut:
        spans = {
            name: str(axis.starts[0]) if axis.one else f"{axis.starts[0]}–{axis.starts[-1] - 1}"
            for name, axis in (("rows", cells.rows), ("cols", cells.cols))
        }
        found.append(words["of"].format(total=f"{cells.cols.total:,}", **spans))
    if cells.shown is not None:
        found.append(words["shown"].format(percent=percent(cells.shown)))
    found.append(words["below"].format(floor=_tick(style.scale.floor, style.scale)))
    if bool(np.isnan(cells.values).any()):
        found.append(words["nan"])
    return found


def percent(share: float) -> str:
    """A share with one decimal, never rounded up to all of it nor down to nothing."""
    if 0 < share < 0.0005:
        return "< 0.1\u00a0%"
    if 0.9995 <= share < 1 - 1e-6:
        return "> 99.9\u00a0%"
    return f"{100 * share:.1f}\u00a0%"


def _head(
    drawing: Drawing, cells: Cells, style: Style, words: dict[str, str], pad: float, width: Width
) -> float:
    """Title and notes; where they end."""
    y, room = pad, style.width - 2 * pad
    between = "、" if style.language == "ja" else "; "
    for text, size, faint in (
        (style.title, 1.15 * style.font, False),
        (between.join(notes(cells, style)), 0.85 * style.font, True),
    ):
        for line in wrapped(text, room, size, width):
            y += 1.25 * size
            drawing.marks.append(Text(pad, y - 0.2 * size, line, size, faint=faint))
    return y


def _across(cells: Cells, room: float, style: Style, width: Width) -> tuple[float, bool, float, float]:
    """Width of the queries' names and whether they are names, of the cells, and the size of the keys' (0: numbers)."""
    font, cols = style.font, len(cells.cols)
    if cells.rows.named:
        names = [cells.rows.label(row) for row in range(len(cells.rows))]
        left = min(ROOM * font, max(width(name, font) for name in names)) + 0.4 * font
        size = (
            0.92 * (room - left) / cols
        )  # a row is as high as a column is wide, or higher where there are few
        if size >= SMALLEST or len(cells.rows) * SMALLEST <= 0.92 * LOWEST * font:
            return left, True, room - left, min(font, size) if cells.cols.named and size >= SMALLEST else 0.0
    left = width(str(cells.rows.total), 0.9 * font) + 0.4 * font
    size = min(font, 0.92 * (room - left) / cols)
    named = cells.cols.named and not cells.rows.named and size >= SMALLEST  # both by name, or both by number
    return left, False, room - left, size if named else 0.0


def _rows(
    drawing: Drawing, axis: Axis, x0: float, y0: float, high: float, left: float, style: Style, width: Width
) -> bool:
    """The queries beside their rows, by name where `left` has room for names; whether so."""
    pitch = high / len(axis)
    size = min(style.font, 0.92 * pitch)
    if left and size >= SMALLEST:
        for row in range(len(axis)):
            name = shortened(axis.label(row), left - 0.4 * style.font, size, width)
            drawing.marks.append(
                Text(x0 - 0.4 * style.font, y0 + (row + 0.5) * pitch + 0.35 * size, name, size, "end")
            )
        return True
    size = 0.9 * style.font
    for token, at in _numbered(axis, high, 2.2 * style.font):
        drawing.marks.append(Line(x0 - 0.25 * style.font, y0 + at, x0, y0 + at))
        drawing.marks.append(Text(x0 - 0.4 * style.font, y0 + at + 0.35 * size, str(token), size, "end"))
    return False


def _cols(
    drawing: Drawing, axis: Axis, x0: float, y1: float, side: float, size: float, style: Style, width: Width
) -> tuple[float, bool]:
    """The keys below their columns; where they end, and whether they are there by name."""
    pitch, font = side / len(axis), style.font
    if size:
        deepest = 0.0
        for col in range(len(axis)):
            name = shortened(axis.label(col), ROOM * font, size, width)
            x = x0 + (col + 0.5) * pitch + 0.35 * size
            drawing.marks.append(Text(x, y1 + 0.4 * font, name, size, "end", 90))
            deepest = max(deepest, width(name, size))
        return y1 + 0.4 * font + deepest, True
    size = 0.9 * font
    for token, at in _numbered(axis, side, width("0" * (len(str(axis.total)) + 2), size)):
        drawing.marks.append(Line(x0 + at, y1, x0 + at, y1 + 0.25 * font))
        drawing.marks.append(Text(x0 + at, y1 + 0.4 * font + 0.8 * size, str(token), size, "middle"))
    return y1 + 0.4 * font + 0.8 * size, False


def _numbered(axis: Axis, length: float, apart: float) -> list[tuple[int, float]]:
    """Round token numbers along an axis, at least so far apart, and where the middle of each token's cell is."""
    first, end = int(axis.starts[0]), int(axis.starts[-1])
    step = _nice(apart * (end - first) / length)
    found: list[tuple[int, float]] = []
    for token in range(-(-first // step) * step, end, step):
        cell = int(np.searchsorted(axis.starts, token, "right")) - 1
        low, high = axis.span(cell)
        inside = (token + 0.5 - low) / (high - low)
        at = (cell + inside) * length / len(axis)
        if not found or at - found[-1][1] >= 0.9 * apart:  # words are of unlike lengths
            found.append((token, at))
    return found


def _nice(least: float) -> int:
    power = 10 ** max(0, math.floor(math.log10(max(1.0, least))))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least)


def _legend(
    drawing: Drawing, style: Style, x: float, y0: float, room: float, words: dict[str, str], width: Width
) -> float:
    """The colour bar with its ticks; where it ends."""
    font, scale = style.font, style.scale
    high = min(room, 16 * font)
    bar = table(style.dark)[::-1][:, None]  # the largest weight on top
    drawing.marks.append(Grid(x, y0, font, high, bar))
    size = 0.9 * font
    for tick in scale.ticks:
        at = y0 + high * (1 - float(scale.at(tick))) if tick else y0 + high
        drawing.marks.append(Line(x + font, at, x + 1.25 * font, at))
        drawing.marks.append(Text(x + 1.4 * font, at + 0.35 * size, _tick(tick, scale), size))
    return y0 + high + 0.5 * font


def _tick(value: float, scale: Scale) -> str:
    if scale.kind == "log":
        return f"{value:.4f}".rstrip("0").rstrip(".")
    return f"{value:g}" if value in scale.ticks else f"1/{round(1 / value)}"


def described(cells: Cells, style: Style) -> dict[str, Any]:
    """What a file says of itself besides the picture."""
    return {
        **cells.about,
        "queries": [int(cells.rows.starts[0]), int(cells.rows.starts[-1])],
        "keys": [int(cells.cols.starts[0]), int(cells.cols.starts[-1])],
        "pool": cells.pool,
        "joined": cells.joined,
        "tokens_a_cell": [cells.rows.sizes(), cells.cols.sizes()],
        "weight_shown": cells.shown,
        "scale": style.scale.kind,
        "colours": STEPS,
    }
