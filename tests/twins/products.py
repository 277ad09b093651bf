"""Twins of the matrix products: of packed panels (tile.py), and of rows read where they lie (few.py).

A sum goes over its terms in order, each a multiply-add rounded once, beginning with 0 or with what `out` holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kizuki.cpu.sizes import PLAIN, step_of
from kizuki.cpu.target import Target

from .memory import Array, grid, numbers, real, widened
from .registry import Twin, needs, twin
from .rounding import dot_pairs, fma, from_bfloat16


def _summed(left: Array, right: Array, sums: Array) -> Array:
    """sums[r, c] + Σ_k left[r, k] · right[k, c]; words of pairs where they are unsigned."""
    step = dot_pairs if left.dtype == np.uint32 else fma
    for k in range(left.shape[1]):
        sums = step(left[:, k, None], right[k], sums)
    return sums


def _operands(t: Target, left: int, right: int, steps: int, row: int) -> tuple[Array, Array]:
    needs(steps >= 1, "a product has at least one step")
    kind = np.uint32 if t.pairs else real(t)
    a = grid(left, kind, t.mr, row * t.size, steps)
    return a, numbers(right, kind, steps * t.nr).reshape(steps, t.nr)


def _zeros(t: Target) -> Array:
    return np.zeros((t.mr, t.nr), real(t))


@twin("tile.emit.scores")
def scores(t: Target) -> Twin:
    def scores(left: int, right: int, steps: int, out: int) -> None:
        a, b = _operands(t, left, right, steps, steps)
        grid(out, real(t), t.mr, t.block_k * t.size, t.nr)[:] = _summed(a, b, _zeros(t))

    return scores


@twin("tile.emit.scores_of_pairs")
def scores_of_pairs(t: Target) -> Twin:
    def scores_of_pairs(left: int, right: int, steps: int, out: int, factor: Any) -> None:
        a, b = _operands(t, left, right, steps, steps)
        with np.errstate(all="ignore"):
            found = _summed(a, b, _zeros(t)) * np.float32(factor)
        grid(out, real(t), t.mr, t.block_k * t.size, t.nr)[:] = found

    return scores_of_pairs


def _accumulator(t: Target, out: int) -> Array:
    return numbers(out, real(t), t.mr * t.nr).reshape(t.mr, t.nr)


@twin("tile.emit.mix")
def mix(t: Target) -> Twin:
    def mix(left: int, right: int, steps: int, out: int) -> None:
        a, b = _operands(t, left, right, steps, t.block_k)
        sums = _accumulator(t, out)
        sums[:] = _summed(a, b, sums)

    return mix


@twin("tile.emit.mix_apart")
def mix_apart(t: Target) -> Twin:
    def mix_apart(left: int, right: int, steps: int, out: int) -> None:
        a, b = _operands(t, left, right, steps, t.block_k)
        sums = _accumulator(t, out)
        with np.errstate(all="ignore"):
            sums += _summed(a, b, _zeros(t))

    return mix_apart


@twin("tile.emit.mix_turned")
def mix_turned(t: Target) -> Twin:
    def mix_turned(left: int, right: int, steps: int, out: int) -> None:
        needs(steps >= 1, "a product has at least one step")
        turned = grid(left, real(t), steps, t.block_k * t.size, t.mr)
        b = numbers(right, real(t), steps * t.nr).reshape(steps, t.nr)
        sums = _accumulator(t, out)
        with np.errstate(all="ignore"):
            sums += _summed(turned.T, b, _zeros(t))

    return mix_turned


# -- the decoder -------------------------------------------------------------------------------------


def _few(
    t: Target, kind: int, keys: list[int], queries: int, rows: int, dim: int, out: int, factor: Any
) -> None:
    """out[rows][keys] = queries · keys; rows of the queries are `dim` numbers apart."""
    needs(dim >= 1 and dim % step_of(t, kind) == 0, "head_dim is a multiple of what a step takes")
    if t.pairs:
        left = grid(queries, np.uint32, rows, dim * t.size, dim // 2)
        right = np.stack([numbers(key, np.uint32, dim // 2) for key in keys], 1)
    else:
        left = grid(queries, real(t), rows, dim * t.size, dim)
        right = np.stack([widened(key, t, kind, dim) for key in keys], 1)
    found = _summed(left, right, np.zeros((rows, len(keys)), real(t)))
    if t.pairs:
        with np.errstate(all="ignore"):
            found = found * np.float32(factor)
    grid(out, real(t), rows, t.block_k * t.size, len(keys))[:] = found


@twin("few.build.dots_for.dots")
def dots(t: Target, kind: int, rows: int, squares: int) -> Twin:
    count = squares * t.lanes

    def dots(addresses: int, queries: int, dim: int, out: int, ahead: int, dense: int, factor: Any) -> None:
        numbers(ahead, np.int64, count)  # what is asked for stands in a table too, and that is read
        keys = [int(key) for key in numbers(addresses, np.int64, count)]
        _few(t, kind, keys, queries, rows, dim, out, factor)

    return dots


@twin("few.build.dots_for.dots_dense")
def dots_dense(t: Target, kind: int, rows: int, squares: int, known: int) -> Twin:
    count, size = squares * t.lanes, t.size if kind == PLAIN else 2

    def dots_dense(keys: int, queries: int, dim: int, out: int, ahead: int, factor: Any) -> None:
        needs(known in (0, dim), "a head_dim that is compiled in is that of the call")
        places = [int(keys) + n * dim * size for n in range(count)]
        _few(t, kind, places, queries, rows, dim, out, factor)

    return dots_dense


@twin("few.build.mix_for.mix")
def mix_few(t: Target, kind: int, rows: int, vectors: int) -> Twin:
    wide, size = vectors * t.lanes, t.size if kind == PLAIN else 2

    def mix(
        addresses: int,
        weights: int,
        count: int,
        column: int,
        out: int,
        row: int,
        ahead: int,
        dense: int,
    ) -> None:
        needs(count >= 1, "there is at least one key")
        numbers(ahead, np.int64, 1 if dense else count)
        places = [int(place) + column * size for place in numbers(addresses, np.int64, count)]
        values = np.stack([widened(place, t, kind, wide) for place in places])
        if t.pairs:
            halves = grid(weights, np.uint16, rows, t.block_k * t.size, count)
            shares = from_bfloat16(halves)
        else:
            shares = grid(weights, real(t), rows, t.block_k * t.size, count)
        sums = grid(int(out) + column * t.size, real(t), rows, row * t.size, wide)
        sums[:] = _summed(shares, values, sums)

    return mix
