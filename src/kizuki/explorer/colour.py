"""The page's colours in Python: the same maps and scales, their numbers read from static/colour.js.

The conversion from OKLCH to sRGB is Ottosson's (2020); a test holds both languages' 512 colours equal byte for byte.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import bundle

STEPS = 256
FAINT = (
    0.06  # where the smallest painted weight stands on the logarithmic scale, visible beside "not painted"
)

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Kind = Literal["log", "linear"]


def constant(name: str) -> Any:
    """A constant of static/colour.js."""
    found = re.search(rf"^(?:export )?const {name} = (.*);", bundle.read("colour.js"), re.MULTILINE)
    if found is None:
        raise ImportError(f"static/colour.js: holds no constant {name}")
    top, _, bottom = found[1].partition(" / ")
    return json.loads(top) / json.loads(bottom) if bottom else json.loads(top)


@cache
def table(dark: bool) -> Bytes:
    """256 colours, uint8 `[256, 3]`; entry 0 is the background, where nothing is painted."""
    maps = constant("MAPS")
    own = maps["dark" if dark else "light"]
    t = np.arange(STEPS) / (STEPS - 1)
    bow = np.sin(np.pi * np.minimum(1, maps["bow"][0] + maps["bow"][1] * t))
    chroma = maps["chroma"][0] + maps["chroma"][1] * bow
    chroma[0] *= maps["ground"]
    made = _rgb(own["lightness"][0] + own["lightness"][1] * t, chroma, own["hue"][0] + own["hue"][1] * t)
    made.flags.writeable = False
    return made


def _rgb(lightness: Floats, chroma: Floats, hue: Floats) -> Bytes:
    """OKLCH, hue in degrees, as sRGB bytes."""
    a, b = chroma * np.cos(np.radians(hue)), chroma * np.sin(np.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3
    linear = np.stack(
        [
            4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
            -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
            -0.0041960863 * long - 0.7034186147 * medium + 1.707614701 * short,
        ],
        -1,
    ).clip(0, 1)
    coded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.floor(255 * coded + 0.5).astype(np.uint8)  # Math.round


@dataclass(frozen=True)
class Scale:
    """Weight → 0 … 1 along a map. Both scales are fixed, so that a colour means the same in every picture."""

    kind: Kind

    @property
    def floor(self) -> float:
        """The smallest weight that is painted."""
        return float(constant("FLOOR" if self.kind == "log" else "LINEAR_FLOOR"))

    @property
    def ticks(self) -> tuple[float, ...]:
        """The weights that a legend names."""
        return (1e-4, 1e-3, 1e-2, 1e-1, 1.0) if self.kind == "log" else (0.0, 0.25, 0.5, 0.75, 1.0)

    def at(self, weights: Any) -> Floats:
        """Where along the map a weight lies; 0, the background, below `floor`."""
        w = np.asarray(weights, np.float64)
        if self.kind == "linear":
            along = np.minimum(w, 1)
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                along = FAINT + (1 - FAINT) * np.minimum(1, 1 - np.log10(w) / np.log10(self.floor))
        return np.where(w >= self.floor, along, 0.0)

    def steps(self, weights: Any) -> NDArray[np.intp]:
        """The entry of the table each weight is painted with."""
        return np.floor((STEPS - 1) * self.at(weights) + 0.5).astype(np.intp)
