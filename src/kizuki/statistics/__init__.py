"""Readings of A that are not linear, or that a picture is made of: one small class a statistic, one file each.

A statistic is made of a `Frame` (the shape and dtype of what is read). `update` takes in one tile of A, its scores and
exact weights; `merge` takes in what another one of the same frame has seen of other tiles; `finalize` gives the
reading. Nothing they hold grows as queries × keys. The reference updates them with one tile, the portable backend
with many, and the cpu backend hands over what its kernel has folded in for those it knows (`cpu/readings.py`).

A new statistic is one file here, a line in `READINGS`, and its test.
"""

from __future__ import annotations

from .distance import Distance
from .entropy import Entropy
from .frame import Frame, Statistic
from .largest import MaxScore, MaxWeight
from .outside import Future, Outside
from .pool import Pool
from .received import Received
from .topk import TopK

READINGS: dict[str, type[Statistic]] = {
    "topk": TopK,
    "entropy": Entropy,
    "max": MaxWeight,
    "max_score": MaxScore,
    "received": Received,
    "pool": Pool,
    "distance": Distance,
    "future": Future,
}

__all__ = [
    "READINGS",
    "Distance",
    "Entropy",
    "Frame",
    "Future",
    "MaxScore",
    "MaxWeight",
    "Outside",
    "Pool",
    "Received",
    "Statistic",
    "TopK",
]
