"""The articles' own examples, computed: what they print, and what it should have been where they err."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import formula
from .formula import Array


@dataclass(frozen=True)
class Example:
    """One example: `key` names its text in the words; each line is (what, its numbers), "@x" for label_x."""

    key: str
    step: int
    lines: list[tuple[str, str]]


Q3 = np.array([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1]])
V3 = np.array([[10.0, 0, 0, 0], [0, 10, 0, 0], [5, 5, 0, 0]])


def weights(query: Array, key: Array, scale: float, causal: bool = False) -> Array:
    """softmax(scale · q kᵀ), below the diagonal only where causal."""
    dot = formula.dots(query, key)
    seen = np.tril(np.ones(dot.shape, dtype=bool)) if causal else np.ones(dot.shape, dtype=bool)
    return formula.softmax(formula.logits(dot, scale, 1.0, seen))


def large() -> tuple[Array, Array]:
    """The scores [512, 0] scaled by 1/√512, and their weights: 22.627 and 0; 1 − 1.49e-10 and 1.49e-10."""
    score = np.array([512.0, 0.0]) / np.sqrt(512.0)
    return score, formula.softmax(score[None])[0]


def masked_with_a_number() -> dict[str, Array]:
    """A row of four scores that is masked everywhere, by −1e9 and by absence.

    float32: every score becomes the same −1e9, so the row is uniform. float16: −1e9 is −∞, and −∞ − (−∞) is
    NaN. Absence: no weight at all.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        half = np.full(4, -1e9).astype(np.float16)
        plain = np.exp(half - half.max()) / np.exp(half - half.max()).sum()
    single = np.full(4, -1e9, dtype=np.float32)
    raised = np.exp(single - single.max())
    absent = formula.softmax(np.full((1, 4), -np.inf))[0]
    return {"half": half, "half_weights": plain, "weights": raised / raised.sum(), "absent": absent}


def examples() -> list[Example]:
    """All of them, in the order of the steps."""
    q, k = np.array([[1.0, 0.0]]), np.eye(2)
    plain, root = weights(q, k, 1.0)[0], weights(q, k, 2**-0.5)[0]
    ones = [float(np.ones(d) @ np.ones(d)) for d in (4, 512)]
    score, tamed = large()
    single = formula.softmax(np.array([[512.0, 0.0]]))[0].astype(np.float32)
    number = masked_with_a_number()
    three, causal = weights(Q3, Q3, 0.5), weights(Q3, Q3, 0.5, causal=True)
    return [
        Example("exact_ones", 3, [("d = 4", f"q·k = {ones[0]:g}"), ("d = 512", f"q·k = {ones[1]:g}")]),
        Example(
            "exact_two",
            4,
            [
                ("q", "[1, 0]"),
                ("k", "[1, 0], [0, 1]"),
                ("@no_scale", row(plain, 4)),
                ("@scale", row(root, 4)),
            ],
        ),
        Example(
            "exact_wrong",
            4,
            [
                ("@scores", "[512, 0]"),
                ("@unscaled", f"[{single[0]:g}, {single[1]:g}]"),
                ("@scaled", f"[{score[0]:.3f}, {score[1]:g}]"),
                ("@weights", f"[1 − {tamed[1]:.2e}, {tamed[1]:.2e}]"),
                ("@article", "[0.9895, 0.0105]"),
            ],
        ),
        Example(
            "exact_number",
            5,
            [
                ("@half", f"{number['half'][0]:g}".replace("-inf", "−∞")),
                ("@half_row", row(number["half_weights"], 2)),
                ("@single_row", row(number["weights"], 2)),
                ("@absent", row(number["absent"], 0)),
            ],
        ),
        Example(
            "exact_three",
            6,
            [
                ("q = k", rows(Q3, 0)),
                ("v", rows(V3, 0)),
                ("@scores", rows(formula.dots(Q3, Q3) / 2, 0)),
                ("@weights", rows(three, 6)),
                ("@output", rows(three @ V3, 6)),
            ],
        ),
        Example("exact_causal", 6, [("@weights", rows(causal, 6)), ("@output", rows(causal @ V3, 6))]),
    ]


def row(numbers: Array, digits: int) -> str:
    """A row of numbers; zeros and ones without decimals."""
    return "[" + ", ".join(one(float(n), digits) for n in numbers) + "]"


def one(number: float, digits: int) -> str:
    """A number to so many digits behind the point, and without them where it is whole."""
    if np.isnan(number):
        return "NaN"
    return f"{number:.0f}" if abs(number - round(number)) < 1e-12 else f"{number:.{digits}f}"


def rows(numbers: Array, digits: int) -> str:
    return ", ".join(row(each, digits) for each in numbers)
