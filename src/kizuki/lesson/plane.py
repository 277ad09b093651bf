"""The plane of one query and all keys: the direction of q, and the direction in which the keys differ most beside it.

The horizontal place of a key is exact: k · q/|q|, its score but for |q|. The vertical one is the best single
direction of what is left (the first right singular vector of the keys without their part along q), so something
is dropped; how much is said with the picture, as the share of the keys' squared length outside the plane.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import formula
from .formula import Array


@dataclass(frozen=True, eq=False)
class Plane:
    """Where q and the keys lie, in the units of q and k."""

    query: float  # |q|; q itself lies at (|q|, 0)
    along: Array  # [keys], exact
    beside: Array  # [keys]
    residual: float  # share of Σ|k|² that lies outside the plane, 0 … 1


def plane(query: Array, key: Array) -> Plane:
    """The plane of one query `[d]` and keys `[n, d]`."""
    size = float(formula.norm(query))
    forward = query / size if size else np.eye(1, len(query))[0]
    along = key @ forward
    rest = key - along[:, None] * forward
    side = np.linalg.svd(rest, full_matrices=False)[2][0]
    beside = rest @ side
    beside = beside if beside.sum() >= 0 else -beside  # a singular vector has two signs; most keys lie above
    total = float((key**2).sum())
    kept = float((along**2).sum() + (beside**2).sum())
    return Plane(size, along, beside, max(0.0, 1 - kept / total) if total else 0.0)
