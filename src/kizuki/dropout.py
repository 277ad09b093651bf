"""Dropout from a counter: which weights are dropped follows from their places and a seed, so no mask is stored.

Forward and backward, and every backend, find the same weights again. This is the generator in torch; the
compiled one (cpu/softmax.py `row_word`, cpu/rows.py `drop_row`) makes the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import KizukiTypeError, OptionError
from .problem import Problem

LOW = (1 << 32) - 1
STEP = 0x9E3779B97F4A7C15
SEEDS = (1 << 63) - 1


def draw(dropout: Any, generator: Any, caller: str) -> tuple[float, int] | None:
    """`(p, seed)` for one call, its 63-bit seed drawn from `generator` (None: torch's own); None where p is 0."""
    check(dropout, generator, caller)
    return None if dropout == 0 else (float(dropout), int(seed(generator)))


def check(dropout: Any, generator: Any, caller: str) -> None:
    """Raise KizukiTypeError or OptionError for what is no probability and no generator."""
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)):
        raise KizukiTypeError(
            f"{caller}: dropout is a {type(dropout).__name__} but must be a number in 0 … 1, the share of the "
            "weights that become 0; 0.0 turns it off"
        )
    if not 0 <= dropout <= 1:
        raise OptionError(
            f"{caller}: dropout is {dropout} but must lie in 0 … 1, the share of the weights that become 0"
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise KizukiTypeError(
            f"{caller}: generator is a {type(generator).__name__} but must be a torch.Generator or None (torch's own)"
        )


def seed(generator: torch.Generator | None) -> Tensor:
    """63 random bits as a tensor, so that a graph draws new ones each time it runs."""
    device = "cpu" if generator is None else generator.device
    return torch.randint(0, SEEDS, (), dtype=torch.int64, generator=generator, device=device)


def below(p: float) -> int:
    """A weight whose 32 bits are less than this is dropped. At p = 1 all stay, and are multiplied by 0."""
    return 0 if p == 1 else min(round(p * 2.0**32), LOW)


def factor(p: float) -> float:
    """What multiplies a weight that stays: 1/(1 − p), 0 where none stays."""
    return 0.0 if p == 1 else 1.0 / (1.0 - p)


def kept(problem: Problem, seed: int, p: float, rows: slice, cols: slice) -> Tensor:
    """Which weights of one tile stay, boolean `[batch, heads, rows, cols]`.

    The 32 bits of a weight are a hash of its key and of its row's 64, those a hash of seed, plane and query.
    """
    device = problem.device
    plane = torch.arange(problem.batch * problem.heads, device=device).view(problem.batch, problem.heads, 1)
    query = torch.arange(rows.start, rows.stop, device=device)
    word = _mixed(
        _mixed((plane + 1) * _signed(STEP) + _signed(seed)) + (query + 1) * _signed(STEP)
    ).unsqueeze(-1)
    low, high = word & LOW, (word >> 32) & LOW
    # Two numbers below 2³² may overflow 64 bits when multiplied, but their low 32 bits are right.
    x = torch.arange(cols.start, cols.stop, device=device) & LOW
    x = ((x * 0x9E3779B1) & LOW) ^ low
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW
    x = x ^ high
    x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW
    x = x ^ (x >> 16)
    return x >= below(p)


def dropped(problem: Problem, weights: Tensor, rows: slice, cols: slice) -> Tensor:
    """One tile of A (or of its gradient) with dropout: 0, or multiplied by 1/(1 − p); as it is without dropout."""
    if problem.dropout is None:
        return weights
    p, seed = problem.dropout
    return torch.where(kept(problem, seed, p, rows, cols), weights * factor(p), 0.0)


def _mixed(z: Tensor) -> Tensor:
    """64 bits thoroughly mixed: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """z >> by with zeros from the left; torch's own shift repeats the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    """The int64 with the bits of x."""
    return x - (1 << 64) if x >= 1 << 63 else x
