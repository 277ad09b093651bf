"""The lesson's arithmetic, one short function a step, in float64; static/formula.js is its twin, line by line.

The q, k and v that go in are a model's own float32 numbers. float64 keeps each printed line true to the last digit
shown: products add up to their sum, weights to 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Seen = NDArray[np.bool_]


def dots(query: Array, key: Array) -> Array:
    """q_i · k_j of all pairs, `[n, n]`."""
    return query @ key.T


def logits(dot: Array, scale: float, temperature: float, seen: Seen) -> Array:
    """scale · q·k / T, and −∞ where the mask hides the key."""
    return np.where(seen, dot * scale / temperature, -np.inf)


def lse(score: Array) -> Array:
    """L_i = ln Σ_j e^{s_ij}; −∞ for a row that sees nothing."""
    peak = score.max(-1, initial=-np.inf)
    safe = np.where(np.isneginf(peak), 0.0, peak)
    with np.errstate(divide="ignore"):
        return np.where(np.isneginf(peak), -np.inf, safe + np.log(np.exp(score - safe[..., None]).sum(-1)))


def softmax(score: Array) -> Array:
    """e^{s_ij − L_i}: each row sums to 1, or is 0 where it sees nothing."""
    total = lse(score)
    safe = np.where(np.isneginf(total), 0.0, total)
    return np.exp(score - safe[..., None])


def mix(weight: Array, value: Array) -> Array:
    """Z = A V, `[n, value_dim]`."""
    return weight @ value


def entropy(weight: Array) -> Array:
    """−Σ a ln a of each row, in nats; 0 … ln(keys seen)."""
    return -np.where(weight > 0, weight * np.log(np.where(weight > 0, weight, 1.0)), 0.0).sum(-1)


def slope(weight: Array) -> Array:
    """The size of softmax's derivative at each row: ‖diag(a) − a aᵀ‖ (Frobenius) = √(Σa² − 2Σa³ + (Σa²)²).

    0 where one weight is 1 and the others 0; no gradient reaches the scores from there.
    """
    square, cube = (weight**2).sum(-1), (weight**3).sum(-1)
    return np.sqrt(np.maximum(square - 2 * cube + square**2, 0.0))


def norm(vector: Array) -> Array:
    """|x| along the last axis."""
    return np.sqrt((vector**2).sum(-1))


def cosine(a: Array, b: Array) -> float:
    """a·b / (|a| |b|); 0 where one of them is 0."""
    size = float(norm(a) * norm(b))
    return float(a @ b) / size if size else 0.0


def spread(score: Array, seen: Seen) -> float:
    """The standard deviation of the scores that the mask lets through."""
    return float(score[seen].std()) if seen.any() else 0.0


def saturated(weight: Array, seen: Seen, above: float = 0.99) -> float:
    """The share of rows with a choice (two keys or more) whose largest weight is above `above`."""
    rows = weight[seen.sum(-1) > 1]
    return float((rows.max(-1) > above).mean()) if len(rows) else 0.0
