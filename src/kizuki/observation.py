"""`Observe` says what to read, `Observation` holds what was read: several readings of A in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import OptionError, SizeError

if TYPE_CHECKING:
    from .operator import AttentionMatrix
    from .problem import Problem
    from .statistics import Statistic

DENSE_LIMIT = 1 << 26  # numbers of a result that are built before they are asked for in so many words


@dataclass(frozen=True, eq=False)
class Observe:
    """Which readings to fold in during one pass over A.

    topk: how many of the largest weights of each row to keep (0 = none).
    entropy, max, max_score, distance: True to read them.
    received: True or "sum", or "mean"; with `last`, only over the last so many queries.
    groups: integer `[keys]`, the group of each key: reads `A.mass(groups)`.
    pool: `(rows, cols)` or `(rows, cols, "mass"|"peak")`.

    >>> import torch, kizuki
    >>> x = torch.randn(1, 2, 50, 8)
    >>> what = kizuki.Observe(topk=3, entropy=True, received=True, pool=(10, 10))
    >>> output, seen = kizuki.attention(x, x, x, causal=True, observe=what)
    >>> seen.topk[0].shape, seen.received.shape, seen.pool.shape, seen.max is None
    (torch.Size([1, 2, 50, 3]), torch.Size([1, 2, 50]), torch.Size([1, 2, 10, 10]), True)
    """

    topk: int = 0
    entropy: bool = False
    received: bool | str = False
    max: bool = False
    max_score: bool = False
    distance: bool = False
    groups: Tensor | None = None
    pool: tuple[int, int] | tuple[int, int, str] | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.topk) or self.topk < 0:
            raise OptionError(
                f"kizuki.Observe: topk is {self.topk!r} but must be a whole number >= 0; 0 reads none"
            )
        for name in ("entropy", "max", "max_score", "distance"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(
                    f"kizuki.Observe: {name} is {getattr(self, name)!r} but must be True or False"
                )
        if self.received not in (True, False, "sum", "mean"):
            raise OptionError(
                f'kizuki.Observe: received is {self.received!r} but must be True, False, "sum" or "mean"'
            )
        if self.last is not None and not self.received:
            raise OptionError(
                f"kizuki.Observe: last is {self.last!r} but received is not asked for; give received=True with it"
            )
        if self.pool is not None and (not isinstance(self.pool, tuple) or len(self.pool) not in (2, 3)):
            raise OptionError(
                f"kizuki.Observe: pool is {self.pool!r} but must be (rows, cols) or (rows, cols, reduce)"
            )


@dataclass(frozen=True, eq=False)
class Observation:
    """What one pass read; None where it was not asked for. Shapes as the readings of `AttentionMatrix`.

    >>> import torch, kizuki
    >>> x = torch.zeros(4, 2)
    >>> seen = kizuki.attend(x, x, causal=True).observe(kizuki.Observe(entropy=True))
    >>> seen.entropy, seen.topk is None
    (tensor([0.0000, 0.6931, 1.0986, 1.3863]), True)
    """

    lse: Tensor
    topk: tuple[Tensor, Tensor] | None = None
    entropy: Tensor | None = None
    received: Tensor | None = None
    max: Tensor | None = None
    max_score: Tensor | None = None
    distance: Tensor | None = None
    mass: Tensor | None = None
    pool: Tensor | None = None


def asked(what: Observe) -> dict[str, tuple[Any, ...]]:
    """The readings that are folded in, by name, with their arguments."""
    received = "sum" if what.received is True else what.received
    wanted = {
        "topk": (what.topk,) if what.topk else None,
        "entropy": () if what.entropy else None,
        "received": (received, what.last) if received else None,
        "max": () if what.max else None,
        "max_score": () if what.max_score else None,
        "distance": () if what.distance else None,
        "pool": what.pool,
    }
    return {name: arguments for name, arguments in wanted.items() if arguments is not None}


def collect(matrix: AttentionMatrix, what: Observe, made: dict[str, Statistic]) -> Observation:
    """What was folded in, and what is a product of A."""
    with torch.no_grad():
        mass = None if what.groups is None else matrix.mass(what.groups)
        return Observation(lse=matrix.lse.detach(), mass=mass, **matrix.finish(made))


def check_reading(problem: Problem, name: str, *arguments: Any) -> None:
    """Raise unless the arguments of the reading `name` are what it takes."""
    if name == "topk":
        (k,) = arguments
        if not is_whole(k) or k < 0:
            raise OptionError(f"A.topk: k is {k!r} but must be a whole number >= 0")
        rows = problem.batch * problem.heads * problem.queries
        if k > problem.keys and k * rows > DENSE_LIMIT:
            raise SizeError(
                f"A.topk: k is {k:,} for {rows:,} rows of {problem.keys:,} keys, {k * rows:,} numbers; "
                "ask for at most as many as there are keys"
            )
    elif name == "received":
        reduce, last = arguments
        if last is not None and (not is_whole(last) or last < 1):
            raise OptionError(
                f"A.received: last is {last!r} but must be a whole number >= 1, or None for all queries"
            )
        if reduce not in ("sum", "mean"):
            raise OptionError(f'A.received: reduce is {reduce!r} but must be "sum" or "mean"')
    elif name == "pool":
        rows, cols, *rest = arguments
        for axis, n, limit in (("rows", rows, problem.queries), ("cols", cols, problem.keys)):
            if not is_whole(n) or not 1 <= n <= max(1, limit):
                raise OptionError(
                    f"A.pool: {axis} is {n!r} but must be a whole number in 1 … {max(1, limit)}"
                )
        if rest and rest[0] not in ("mass", "peak"):
            raise OptionError(f'A.pool: reduce is {rest[0]!r} but must be "mass" or "peak"')


def is_whole(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool)
