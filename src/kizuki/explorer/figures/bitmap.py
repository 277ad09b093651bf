"""A drawing as PNG, its text set with Pillow in fonts of the machine: each sign in the first font that has it."""

from __future__ import annotations

import io
import unicodedata
from functools import cache
from typing import Any

import numpy as np

from ...extras import absent
from .cells import FigureError
from .drawing import Drawing, Grid, Line, Text

# By the file names that systems give them; the first that are there, in this order: Latin, Japanese, signs.
FONTS = (
    ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial.ttf", "arial.ttf", "Helvetica.ttc", "LiberationSans-Regular.ttf"),
    (
        "NotoSansCJK-Regular.ttc", "NotoSansCJKjp-Regular.otf", "NotoSansJP-Regular.ttf", "NotoSansJP-Regular.otf",
        "ヒラギノ角ゴシック W3.ttc", "YuGothM.ttc", "meiryo.ttc", "msgothic.ttc", "ipag.ttf", "ipagp.ttf",
        "TakaoGothic.ttf", "fonts-japanese-gothic.ttf",
    ),
    ("NotoEmoji-Regular.ttf", "seguiemj.ttf", "seguisym.ttf", "Symbola.ttf", "Symbola_hint.ttf"),
)  # fmt: skip
ABSENT = "\U0010ffff"  # no font has it, so it looks as a missing sign does


def library() -> Any:
    """Pillow, or an error that says what to install."""
    try:
        from PIL import Image, ImageDraw, ImageFont, PngImagePlugin
    except (ImportError, OSError) as error:
        why = absent(error, "PNG needs the package pillow", "explorer", ", or save an .svg")
        raise FigureError(f"figure: {why}") from None
    return Image, ImageDraw, ImageFont, PngImagePlugin


class Fonts:
    """The fonts of the machine as one: measures and draws text sign by sign where one font does not have it all."""

    def __init__(self, own: str | None, pixels: float) -> None:
        """`own`: a font file to be tried first; `pixels` a point."""
        self.pixels = pixels
        self.names = _chain(own)
        self.missing: set[str] = set()

    def width(self, text: str, size: float) -> float:
        """In points."""
        return sum(font.getlength(run) for font, run in self.runs(text, size)) / self.pixels

    def runs(self, text: str, size: float) -> list[tuple[Any, str]]:
        """The text in pieces with a font each. A sign that no font has becomes its code point, U+1F60A."""
        found: list[tuple[str, str]] = []
        for char in text:
            name = next((name for name in self.names if _has(name, char)), None)
            if name is None:
                if unicodedata.category(char) == "Cf" or "\ufe00" <= char <= "\ufe0f":
                    continue  # a joiner or a selector, which has no look of its own
                self.missing.add(char)
                name, char = self.names[0], f"U+{ord(char):04X}"
            if found and (found[-1][0] == name or unicodedata.combining(char[0])):
                found[-1] = found[-1][0], found[-1][1] + char
            else:
                found.append((name, char))
        return [(_font(name, max(1, round(size * self.pixels))), run) for name, run in found]


@cache
def _chain(own: str | None) -> tuple[str, ...]:
    _, _, image_font, _ = library()
    found = []
    if own is not None:
        try:
            image_font.truetype(own, 10)
        except OSError as error:
            raise FigureError(
                f"figure: font {own} cannot be read ({error}); give a .ttf, .otf or .ttc file"
            ) from None
        found.append(own)
    for names in FONTS:
        for name in names:
            try:
                image_font.truetype(name, 10)
            except OSError:
                continue
            found.append(name)
            break
    if not found:
        raise FigureError("figure: no font was found on this machine; name one with font=, or save an .svg")
    return tuple(found)


@cache
def _font(name: str, pixels: int) -> Any:
    return library()[2].truetype(name, pixels)


@cache
def _has(name: str, char: str) -> bool:
    font = _font(name, 24)
    # A line that ends in a label is no line of the picture: such a sign is drawn by its number.
    if unicodedata.category(char[0]) in ("Cc", "Zl", "Zp"):
        return False
    if char.isspace():
        return True
    mask, missing = font.getmask(char), font.getmask(ABSENT)
    return bool(mask.size != missing.size or bytes(mask) != bytes(missing))


def render(drawing: Drawing, fonts: Fonts) -> Any:
    """The drawing as a Pillow image. FigureError where a cell would be smaller than a pixel."""
    image, image_draw, _, _ = library()
    unit = fonts.pixels
    sheet = image.new("RGB", (round(drawing.width * unit), round(drawing.height * unit)), drawing.paper)
    pen = image_draw.Draw(sheet)
    thin = max(1, round(0.5 * unit))
    for mark in drawing.marks:
        if isinstance(mark, Line):
            ends = [
                (round(mark.x0 * unit), round(mark.y0 * unit)),
                (round(mark.x1 * unit), round(mark.y1 * unit)),
            ]
            pen.line(ends, fill=drawing.ink, width=thin)
        elif isinstance(mark, Text):
            _set(image, image_draw, sheet, mark, fonts, drawing.faint if mark.faint else drawing.ink)
        else:
            _cells(image, sheet, pen, mark, unit, thin, drawing.ink)
    return sheet


def encoded(sheet: Any, dpi: float, about: dict[str, str]) -> bytes:
    """The image as a file; `about` goes into its text chunks."""
    held = library()[3].PngInfo()
    for name, text in about.items():
        held.add_itxt(name, text)
    file = io.BytesIO()
    sheet.save(file, "PNG", dpi=(dpi, dpi), pnginfo=held, optimize=True)
    return file.getvalue()


def _cells(image: Any, sheet: Any, pen: Any, grid: Grid, unit: float, thin: int, ink: str) -> None:
    x0, y0 = round(grid.x * unit), round(grid.y * unit)
    x1, y1 = round((grid.x + grid.width) * unit), round((grid.y + grid.height) * unit)
    rows, cols, _ = grid.colours.shape
    if cols > 1 and (rows > y1 - y0 or cols > x1 - x0):
        raise FigureError(
            f"figure: {rows} × {cols} cells do not fit into {y1 - y0} × {x1 - x0} pixels, and some would be lost; give "
            f"a larger width or dpi, or pixels={min(x1 - x0, y1 - y0)}"
        )
    down = np.arange(y1 - y0) * rows // (y1 - y0)
    across = np.arange(x1 - x0) * cols // (x1 - x0)
    sheet.paste(image.fromarray(np.ascontiguousarray(grid.colours[down][:, across])), (x0, y0))
    pen.rectangle([x0 - thin, y0 - thin, x1 + thin - 1, y1 + thin - 1], outline=ink, width=thin)


def _set(image: Any, image_draw: Any, sheet: Any, mark: Text, fonts: Fonts, ink: str) -> None:
    """Draw a line of text, turned by a quarter where it is asked for."""
    unit = fonts.pixels
    runs = fonts.runs(mark.text, mark.size)
    length = sum(font.getlength(run) for font, run in runs)
    room = 2 * round(mark.size * unit)  # above and below the baseline, enough for any sign
    strip = image.new("L", (int(length) + 2 * room, 2 * room), 0)
    pen, at = image_draw.Draw(strip), float(room)
    for font, run in runs:
        pen.text((at, room), run, fill=255, font=font, anchor="ls")
        at += font.getlength(run)
    before = {"start": 0.0, "middle": length / 2, "end": length}[mark.anchor]
    x, y = mark.x * unit, mark.y * unit
    if mark.turn == 90:
        strip = strip.rotate(90, expand=True)
        # The baseline's start was (room, room); turned about, it is (room, width - room).
        corner = round(x - room), round(y + before - (strip.height - room))
    else:
        corner = round(x - before - room), round(y - room)
    sheet.paste(image.new("RGB", strip.size, ink), corner, strip)
