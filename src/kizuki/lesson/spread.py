"""Step 4's measurement: what 1/√d does to scores, weights and the gradient, at several d."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import formula
from .formula import Array, Seen
from .material import Material

DIMS = (4, 16, 64, 128, 512)
QUERIES, KEYS, SEED = 256, 64, 0


@dataclass(frozen=True)
class Measured:
    """The scores and weights of some rows, with the scale off or on; means over the rows."""

    dim: int
    scaled: bool
    spread: float  # standard deviation of the scores
    largest: float  # the largest weight, mean over the rows
    entropy: float  # nats
    slope: float  # size of softmax's derivative, `formula.slope`
    saturated: float  # share of rows whose largest weight is above 0.99


def measure(dot: Array, dim: int, scale: float | None, seen: Seen) -> Measured:
    """One line of the table; only rows that see two keys or more have a choice to measure."""
    score = formula.logits(dot, 1.0 if scale is None else scale, 1.0, seen)
    weight = formula.softmax(score)
    rows = weight[seen.sum(-1) > 1]
    if not len(rows):
        rows = weight
    return Measured(
        dim=dim,
        scaled=scale is not None,
        spread=formula.spread(score, seen),
        largest=float(rows.max(-1).mean()),
        entropy=float(formula.entropy(rows).mean()),
        slope=float(formula.slope(rows).mean()),
        saturated=formula.saturated(weight, seen),
    )


def drawn() -> list[Measured]:
    """256 queries on 64 keys with independent entries of mean 0 and variance 1: what Var(q·k) = d is about.

    These are drawn numbers (numpy's default_rng(0)), for the law speaks of such; `real` measures the sentence.
    """
    made = []
    for dim in DIMS:
        draw = np.random.default_rng(SEED)
        dot = formula.dots(draw.standard_normal((QUERIES, dim)), draw.standard_normal((KEYS, dim)))
        seen = np.ones(dot.shape, dtype=bool)
        made += [measure(dot, dim, None, seen), measure(dot, dim, dim**-0.5, seen)]
    return made


def real(lesson: Material) -> list[Measured]:
    """The same of the sentence's own q and k in the lesson's head, at its d, with the model's own scale and mask."""
    seen, dot = lesson.visible(), lesson.dots()
    return [measure(dot, lesson.head_dim, scale, seen) for scale in (None, lesson.scale)]
