"""The grid: every cell `kizuki bench` measures, by name, with the bar it has to reach."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import OptionError

Kind = Literal["forward", "short", "decode", "backward", "share", "call", "fresh"]
Rule = Literal["window", "documents", "lengths", "dense", "bias"]
Quantity = Literal["peers", "torch", "peak", "read", "share", "seconds"]

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
DENSE_LIMIT = 1 << 27  # pairs of a mask that are built for a peer which has no rule for it
GROWTH = "growth"  # not a cell: a curve (growth.py)


@dataclass(frozen=True)
class Bar:
    """What a cell has to reach.

    peers: times as fast as the fastest peer; torch: as the faster of torch's two; peak: share of the measured
    multiply-adds; read: share of the measured read bandwidth; share: our time over its share of our time
    without the mask; seconds: our time. The last two are upper limits.
    """

    quantity: Quantity
    value: float

    @property
    def at_most(self) -> bool:
        return self.quantity in ("share", "seconds")

    def met(self, got: float) -> bool:
        return got <= self.value if self.at_most else got >= self.value

    def __str__(self) -> str:
        sign = "≤" if self.at_most else "≥"
        if self.quantity in ("peak", "read"):
            return f"{sign} {self.value:.0%} of {self.quantity}"
        if self.quantity == "seconds":
            return f"{sign} {duration(self.value)}"
        return f"{sign} {self.value:g}× {'its share' if self.quantity == 'share' else self.quantity}"


UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> duration(0.0123)
    '12.3 ms'
    """
    unit = next((unit for unit, size in UNITS.items() if seconds >= size), "µs")
    return f"{seconds / UNITS[unit]:.3g} {unit}"


@dataclass(frozen=True)
class Cell:
    """One problem: `[batch, heads, queries, head_dim]` on `[batch, kv_heads, keys, head_dim]`."""

    name: str
    kind: Kind
    dtype: str = "f32"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    queries: int = 1
    keys: int = 1
    head_dim: int = 1
    causal: bool = False
    rule: Rule | None = None
    bars: tuple[Bar, ...] = ()

    @property
    def backward(self) -> bool:
        return self.kind == "backward"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def pairs(self) -> float:
        """Visible pairs of a query and a key, over batch and heads."""
        every = self.batch * self.heads
        if self.causal:
            return every * self.queries * (self.queries + 1) / 2
        if self.rule == "window":
            left, n = WINDOW[0], self.queries
            return every * (n * (left + 1) - left * (left + 1) / 2)
        if self.rule == "documents":
            return every * self.queries * DOCUMENT
        if self.rule == "lengths":
            return float(self.heads * sum(n * n for n in self.real_lengths()))
        return float(every * self.queries * self.keys)

    @property
    def share(self) -> float:
        """The visible part of all pairs; a dense mask is charged with all, its zeros are not known ahead."""
        return self.pairs / (self.batch * self.heads * self.queries * self.keys)

    @property
    def operations(self) -> float:
        """4·pairs·head_dim: two products; with the gradients 3.5 times that, seven products."""
        return 4.0 * self.pairs * self.head_dim * (3.5 if self.backward else 1.0)

    @property
    def cache_bytes(self) -> float:
        """Bytes of key and value, which a decoding step reads once."""
        size = torch.finfo(self.torch_dtype).bits // 8
        return 2.0 * self.batch * self.kv_heads * self.keys * self.head_dim * size

    def real_lengths(self) -> list[int]:
        """How many tokens of each batch entry are real under the rule "lengths": an eighth to seven eighths."""
        low, high = self.keys // 8, self.keys * 7 // 8
        steps = max(1, self.batch - 1)
        return [low + (high - low) * b // steps for b in range(self.batch)]

    def visible(self, batch: int, rows: Tensor) -> Tensor | None:
        """What the rule and causal mean for some queries of a batch entry, `[rows, keys]`; None: everything.

        Said here a second time, without `kizuki.masks`, so that results are checked against something else.
        """
        keys = torch.arange(self.keys)
        at = rows[:, None]
        if self.causal:
            return keys <= at
        if self.rule == "window":
            return (keys <= at + WINDOW[1]) & (keys >= at - WINDOW[0])
        if self.rule == "documents":
            return keys // DOCUMENT == at // DOCUMENT
        if self.rule == "lengths":
            real = self.real_lengths()[batch]
            return (keys < real) & (at < real)
        return None

    def dense_mask(self) -> Tensor | None:
        """The rule as a boolean `[batch or 1, 1, queries, keys]` for peers; None where it would be too large."""
        batch = self.batch if self.rule == "lengths" else 1
        if batch * self.queries * self.keys > DENSE_LIMIT:
            return None
        rows = torch.arange(self.queries)
        seen = [self.visible(b, rows) for b in range(batch)]
        return None if seen[0] is None else torch.stack([s for s in seen if s is not None])[:, None]


WINDOW = (511, 0)
DOCUMENT = 1024


def _shape(cell: Sequence[int]) -> str:
    return "x".join(map(str, cell))


def _plain(
    kind: Kind, shape: tuple[int, int, int, int], dtype: str, causal: bool, bars: Iterable[Bar]
) -> Cell:
    batch, heads, length, head_dim = shape
    name = f"{kind}/{dtype}/{_shape(shape)}{'/causal' if causal else ''}"
    return Cell(
        name, kind, dtype, batch, heads, heads, length, length, head_dim, causal=causal, bars=tuple(bars)
    )


def _forward() -> Iterable[Cell]:
    bar = {("f32", False): 1.08, ("bf16", False): 1.15}
    for dtype in DTYPES:
        for shape in ((1, 8, 3840, 128), (1, 8, 3840, 64), (1, 12, 768, 64)):
            for causal in (False, True):
                if dtype in ("f16", "f64"):
                    bars = [Bar("torch", 2.0)]
                elif causal:
                    long = {"f32": 2.0, "bf16": 2.4}[dtype]
                    short = {"f32": 1.7, "bf16": 2.0}[dtype]
                    bars = [Bar("peers", long if shape[2] == 3840 else short)]
                else:
                    bars = [Bar("peers", bar[dtype, causal])]
                    if shape[3] == 128:
                        bars.append(Bar("peak", {"f32": 0.82, "bf16": 0.68}[dtype]))
                yield _plain("forward", shape, dtype, causal, bars)


def _short() -> Iterable[Cell]:
    for dtype in ("f32", "bf16"):
        for shape in ((64, 12, 128, 32), (256, 12, 32, 32), (8, 12, 128, 64)):
            yield _plain("short", shape, dtype, False, [Bar("peers", 1.3)])


def _decode() -> Iterable[Cell]:
    for dtype in ("f32", "bf16"):
        for batch, heads, kv_heads, keys, dim in (
            (1, 32, 8, 32768, 128),
            (8, 9, 3, 2048, 64),
            (1, 32, 32, 8192, 128),
        ):
            name = f"decode/{dtype}/{batch}x{heads}on{kv_heads}x{keys}x{dim}"
            bars = (Bar("peers", 1.0), Bar("read", 0.8))
            yield Cell(name, "decode", dtype, batch, heads, kv_heads, 1, keys, dim, bars=bars)


def _backward() -> Iterable[Cell]:
    for dtype in ("f32", "bf16"):
        for shape in ((4, 12, 512, 64), (1, 12, 2048, 64), (1, 8, 4096, 128)):
            for causal in (False, True):
                yield _plain("backward", shape, dtype, causal, [Bar("torch", 2.2 if dtype == "f32" else 2.0)])


def _share() -> Iterable[Cell]:
    made: tuple[tuple[Rule, tuple[int, int, int, int], float], ...] = (
        ("window", (1, 2, 16384, 64), 1.3),
        ("documents", (1, 2, 16384, 64), 1.3),
        ("lengths", (8, 8, 1024, 64), 1.3),
        ("dense", (1, 8, 2048, 64), 1.15),
        ("bias", (1, 8, 2048, 64), 1.25),
    )
    for rule, (batch, heads, length, dim), most in made:
        name = f"share/{rule}/{_shape((batch, heads, length, dim))}"
        bars = (Bar("share", most),)
        yield Cell(name, "share", "f32", batch, heads, heads, length, length, dim, rule=rule, bars=bars)


def _rest() -> Iterable[Cell]:
    yield Cell("call/f32/1x1x1x8", "call", head_dim=8, bars=(Bar("seconds", 60e-6),))
    yield Cell("fresh/empty-cache", "fresh", bars=(Bar("seconds", 12.0),))
    yield Cell("fresh/filled-cache", "fresh", bars=(Bar("seconds", 1.0),))
    yield Cell("fresh/import", "fresh", bars=(Bar("seconds", 0.3),))


CELLS: dict[str, Cell] = {
    cell.name: cell for make in (_forward, _short, _decode, _backward, _share, _rest) for cell in make()
}


def choose(patterns: Sequence[str]) -> list[Cell]:
    """The cells that some names mean, in the grid's order: a whole name, its beginning, or a pattern with `*`.

    No pattern means every cell. Raises OptionError for a pattern that means none.

        >>> [cell.name for cell in choose(["short/f32"])]
        ['short/f32/64x12x128x32', 'short/f32/256x12x32x32', 'short/f32/8x12x128x64']
    """
    wanted: set[str] = set()
    for pattern in patterns:
        stem = pattern.rstrip("/")
        exact = {name for name in CELLS if name == stem}
        found = exact or {
            name for name in CELLS if name.startswith(f"{stem}/") or fnmatch.fnmatchcase(name, pattern)
        }
        if not found:
            kinds = ", ".join(dict.fromkeys(cell.kind for cell in CELLS.values()))
            raise OptionError(
                f"kizuki bench: no cell {pattern!r}; name one, its beginning ({kinds}), a pattern such as "
                f"'*/causal', or {GROWTH}; --list shows them all"
            )
        wanted |= found
    return [cell for name, cell in CELLS.items() if not patterns or name in wanted]
