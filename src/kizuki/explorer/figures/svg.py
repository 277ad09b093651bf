"""A drawing as SVG: text as text, cells as rectangles up to 64 × 64 and as one embedded picture above."""

from __future__ import annotations

import base64
import json
import re
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from .drawing import MM, Drawing, Grid, Line, Text
from .raster import png

VECTOR = 64  # cells a side that are drawn one by one
FONTS = (
    "'Noto Sans', 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', 'Noto Sans CJK JP', 'Hiragino Sans', 'Yu Gothic', "
    "'Noto Sans JP', 'Noto Color Emoji', 'Apple Color Emoji', 'Segoe UI Emoji', sans-serif"
)
# What XML 1.0 cannot hold in any form: control characters, and halves of surrogate pairs.
UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def svg(drawing: Drawing, about: dict[str, Any], title: str, caution: str) -> str:
    """The file's text. Its size is given in mm and its inner unit is the point, so that font sizes are in points."""
    width, height = _number(drawing.width), _number(drawing.height)
    body = "\n".join(_mark(mark, drawing) for mark in drawing.marks)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_number(drawing.width / MM)}mm" '
        f'height="{_number(drawing.height / MM)}mm" viewBox="0 0 {width} {height}" font-family={quoteattr(FONTS)} '
        'role="img" aria-labelledby="title desc">\n'
        f'<title id="title">{_text(title)}</title>\n<desc id="desc">{_text(caution)}</desc>\n'
        f"<metadata>{_text(json.dumps(about, ensure_ascii=False, allow_nan=False))}</metadata>\n"
        f'<rect width="{width}" height="{height}" fill="{drawing.paper}"/>\n{body}\n</svg>\n'
    )


def _mark(mark: Text | Line | Grid, drawing: Drawing) -> str:
    if isinstance(mark, Line):
        ends = (
            f'x1="{_number(mark.x0)}" y1="{_number(mark.y0)}" x2="{_number(mark.x1)}" y2="{_number(mark.y1)}"'
        )
        return f'<line {ends} stroke="{drawing.ink}" stroke-width="0.5"/>'
    if isinstance(mark, Text):
        turn = f' transform="rotate(-{mark.turn} {_number(mark.x)} {_number(mark.y)})"' if mark.turn else ""
        anchor = "" if mark.anchor == "start" else f' text-anchor="{mark.anchor}"'
        return (
            f'<text x="{_number(mark.x)}" y="{_number(mark.y)}" font-size="{_number(mark.size)}"{anchor}{turn} '
            f'fill="{drawing.faint if mark.faint else drawing.ink}" xml:space="preserve">{_text(mark.text)}</text>'
        )
    frame = (
        f'<rect x="{_number(mark.x)}" y="{_number(mark.y)}" width="{_number(mark.width)}" '
        f'height="{_number(mark.height)}" fill="none" stroke="{drawing.ink}" stroke-width="0.5"/>'
    )
    rows, cols, _ = mark.colours.shape
    if cols > 1 and (rows > VECTOR or cols > VECTOR):
        return f"{_picture(mark)}\n{frame}"
    return f"{_cells(mark)}\n{frame}"


def _picture(grid: Grid) -> str:
    data = base64.b64encode(png(grid.colours)).decode("ascii")
    return (
        f'<image x="{_number(grid.x)}" y="{_number(grid.y)}" width="{_number(grid.width)}" '
        f'height="{_number(grid.height)}" preserveAspectRatio="none" style="image-rendering: pixelated" '
        f'href="data:image/png;base64,{data}"/>'
    )


def _cells(grid: Grid) -> str:
    """The cells as rectangles, neighbours of one colour in a row as one; no seams show between them."""
    rows, cols, _ = grid.colours.shape
    wide, high = grid.width / cols, grid.height / rows
    found = ['<g shape-rendering="crispEdges">']
    for row in range(rows):
        start = 0
        for col in range(1, cols + 1):
            if col < cols and bool((grid.colours[row, col] == grid.colours[row, start]).all()):
                continue
            found.append(
                f'<rect x="{_number(grid.x + start * wide)}" y="{_number(grid.y + row * high)}" '
                f'width="{_number((col - start) * wide)}" height="{_number(high)}" '
                f'fill="#{bytes(grid.colours[row, start]).hex()}"/>'
            )
            start = col
    return "\n".join([*found, "</g>"])


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _text(text: str) -> str:
    return escape(writable(text))


def writable(text: str) -> str:
    """The text with what XML and UTF-8 cannot hold written by its number, U+0000."""
    return UNWRITABLE.sub(lambda found: f"U+{ord(found[0]):04X}", text)
