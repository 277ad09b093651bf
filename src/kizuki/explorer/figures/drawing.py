"""A drawing as a list of marks, in points (1/72 inch) from the upper left: what `svg` and `png` both put on paper."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Width = Callable[[str, float], float]  # (text, font size) -> its width
MM = 72 / 25.4  # points


@dataclass(frozen=True)
class Text:
    """A line of text; `y` is its baseline, `turn` in degrees counter-clockwise about (x, y)."""

    x: float
    y: float
    text: str
    size: float
    anchor: str = "start"  # or "middle", "end"
    turn: int = 0
    faint: bool = False


@dataclass(frozen=True)
class Line:
    x0: float
    y0: float
    x1: float
    y1: float


@dataclass(frozen=True)
class Grid:
    """Coloured cells that fill a rectangle: `colours` uint8 `[rows, cols, 3]`."""

    x: float
    y: float
    width: float
    height: float
    colours: NDArray[np.uint8]
    frame: bool = True


@dataclass
class Drawing:
    """The marks, in the order they are drawn."""

    width: float
    height: float
    paper: str
    ink: str
    faint: str
    marks: list[Text | Line | Grid] = field(default_factory=list)


def guessed(text: str, size: float) -> float:
    """The width of a text in a font that is not known: wide signs take one em, others a generous 0.6."""
    return size * sum(_em(char) for char in text)


def _em(char: str) -> float:
    if unicodedata.combining(char) or unicodedata.category(char) == "Cf":
        return 0.0
    if unicodedata.east_asian_width(char) in "WF":
        return 1.0
    return (
        0.32 if char in "iljtf.,:;|!'() " else 0.82 if char in "mwMW@%…" else 0.72 if char.isupper() else 0.58
    )


def shortened(text: str, room: float, size: float, width: Width) -> str:
    """The text, or its beginning and "…" where it is wider than the room."""
    room += 1e-6 * size  # room is often the width of the longest name, give or take a rounding
    if width(text, size) <= room:
        return text
    while text and width(f"{text}…", size) > room:
        text = text[:-1]
    return f"{text}…"


def wrapped(text: str, room: float, size: float, width: Width) -> list[str]:
    """The text in lines that fit the room, broken at spaces, and between wide signs where there are none."""
    lines = [""]
    for word in _pieces(text):
        if lines[-1] and width(lines[-1] + word.rstrip(), size) > room:
            lines.append("")
            word = word.lstrip()
        lines[-1] += word
    return [line.rstrip() for line in lines if line.strip()]


def _pieces(text: str) -> list[str]:
    pieces: list[str] = [""]
    for char in text:
        wide = unicodedata.east_asian_width(char) in "WF"
        if pieces[-1] and (pieces[-1][-1] == " " or (wide and char not in "、。」）：")):
            pieces.append("")
        pieces[-1] += char
    return pieces
