"""Figures for papers and tables for programs: one head's attention as SVG, PNG, CSV, JSON or Parquet, headless.

    recording = kizuki.open("mika.safetensors")
    recording.save_svg("head.svg", layer=5, head=3)         # the same as
    figure(recording[5], 3, labels=recording.tokens.labels).save("head.svg")

The colours, the scales and the words of caution are the page's own.
"""

from __future__ import annotations

from .cells import Axis, Cells, FigureError
from .figure import Figure, FigureOptions, check_target, figure

__all__ = ["Axis", "Cells", "Figure", "FigureError", "FigureOptions", "check_target", "figure"]
