"""Twins of what is done to a row of scores or weights, or to a row of an accumulator (rows.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kizuki.cpu.sizes import BFLOAT16, PLAIN
from kizuki.cpu.target import Target

from .memory import Array, numbers, put, real, widened
from .registry import Twin, needs, twin
from .rounding import exp, fma, folded, tanh

FOUR = "width is a multiple of 4 vectors, at least one"


def quiet(function: Twin) -> Twin:
    """NaN and Inf are numbers here like others."""

    def silent(*given: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*given)

    silent.__wrapped__ = function  # type: ignore[attr-defined]
    return silent


def stretch(t: Target, row: int, width: int) -> Array:
    """A row whose width is a multiple of four vectors."""
    needs(width > 0 and width % (4 * t.lanes) == 0, FOUR)
    return numbers(row, real(t), width)


def vectors(t: Target, row: int, count: int) -> Array:
    needs(count >= 1, "there is at least one vector")
    return numbers(row, real(t), count * t.lanes)


@twin("rows.emit.add_bias")
def add_bias(t: Target) -> Twin:
    @quiet
    def add_bias(row: int, bias: int, count: int) -> None:
        scores, added = vectors(t, row, count), vectors(t, bias, count)
        scores[:] = np.where(added == -np.inf, added, scores + added)

    return add_bias


@twin("rows.emit.hide")
def hide(t: Target) -> Twin:
    def hide(row: int, seen: int, count: int) -> None:
        vectors(t, row, count)[numbers(seen, np.uint8, count * t.lanes) == 0] = -np.inf

    return hide


@twin("rows.emit.weigh_row")
def weigh_row(t: Target) -> Twin:
    @quiet
    def weigh_row(row: int, width: int, lse: Any, rest: Any, delta: Any, grad: int) -> None:
        scores, grads, number = stretch(t, row, width), stretch(t, grad, width), real(t)
        hidden = scores == -np.inf
        weights = np.where(hidden, number(0), exp((scores - number(lse)) - number(rest)))
        grads[:] = np.where(hidden, number(0), weights * (grads - number(delta)))
        scores[:] = weights

    return weigh_row


@twin("rows.emit.bend_row")
def bend_row(t: Target) -> Twin:
    @quiet
    def bend_row(grad: int, width: int, slope: int) -> None:
        grads, slopes = stretch(t, grad, width), stretch(t, slope, width)
        grads[:] = np.where(grads == 0, grads, grads * slopes)

    return bend_row


@twin("rows.emit.row_max")
def row_max(t: Target) -> Twin:
    def row_max(row: int, width: int, running_max: Any) -> Any:
        scores, old = stretch(t, row, width), real(t)(running_max)
        known = scores[~np.isnan(scores)]
        top = known.max() if known.size else old
        return top if top > old else old

    return row_max


def summed_by_four(t: Target, row: Array, total: Array) -> Array:
    """`total` + the row's sum lane by lane: every fourth vector is a sum of its own, joined two by two."""
    sums = np.zeros((4, t.lanes), row.dtype)
    for four in row.reshape(-1, 4, t.lanes):
        sums = sums + four
    return total + ((sums[0] + sums[1]) + (sums[2] + sums[3]))


def above(t: Target, running_max: Any) -> Any:
    """What a row's scores are measured from: 0 where there is none yet, −inf less −inf being NaN."""
    top = real(t)(running_max)
    return real(t)(0) if top == -np.inf else top


@twin("rows.emit.raise_row")
def raise_row(t: Target) -> Twin:
    @quiet
    def raise_row(row: int, width: int, running_max: Any, totals: int) -> None:
        scores, total = stretch(t, row, width), vectors(t, totals, 1)
        scores[:] = exp(scores - above(t, running_max))
        total[:] = summed_by_four(t, scores, total)

    return raise_row


@twin("rows.emit.settle_row")
def settle_row(t: Target) -> Twin:
    @quiet
    def settle_row(row: int, vectors_: int, peak: Any, inverse: Any) -> None:
        scores = vectors(t, row, vectors_)
        scores[:] = exp(scores - real(t)(peak)) * real(t)(inverse)

    return settle_row


@twin("rows.emit.fold_total")
def fold_total(t: Target) -> Twin:
    @quiet
    def fold_total(totals: int) -> Any:
        return folded(vectors(t, totals, 1), np.add)

    return fold_total


@twin("rows.emit.scale_vector")
def scale_vector(t: Target) -> Twin:
    @quiet
    def scale_vector(place: int, factor: Any) -> None:
        vector = vectors(t, place, 1)
        vector *= real(t)(factor)

    return scale_vector


@twin("rows.emit.exp_one")
def exp_one(t: Target) -> Twin:
    def exp_one(x: Any) -> Any:
        return exp(np.array([x], real(t)))[0]

    return exp_one


@twin("rows.emit.scale_row")
def scale_row(t: Target) -> Twin:
    @quiet
    def scale_row(row: int, panels: int, panel_bytes: int, factor: Any) -> None:
        needs(panels >= 1, "there is at least one panel")
        for p in range(panels):
            part = vectors(t, row + p * panel_bytes, t.nv)
            part *= real(t)(factor)

    return scale_row


@twin("rows.emit.cap_row")
def cap_row(t: Target) -> Twin:
    @quiet
    def cap_row(row: int, width: int, cap: Any, slope: int) -> None:
        scores = stretch(t, row, width)
        bent, one = tanh(scores), real(t)(1)
        scores[:] = real(t)(cap) * bent
        if slope != 0:
            stretch(t, slope, width)[:] = (one - bent) * (one + bent)

    return cap_row


@twin("rows.emit.scaled.scale_panel")
def scale_panel(t: Target, source_kind: int, out_kind: int) -> Twin:
    @quiet
    def scale_panel(source: int, out: int, factor: Any) -> None:
        needs(PLAIN in (source_kind, out_kind), "only one of the two is 16-bit")
        put(widened(source, t, source_kind, t.nr) * real(t)(factor), out, out_kind)

    return scale_panel


def hashed(keys: Array, word: int) -> Array:
    """32 bits for each key of a row: two rounds of multiply and xor-shift over its number and the row's 64 bits."""
    low, high = np.uint32(word & 0xFFFFFFFF), np.uint32(word >> 32 & 0xFFFFFFFF)
    x = keys * np.uint32(0x9E3779B1) ^ low
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D) ^ high
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


@twin("rows.emit.drop_row")
def drop_row(t: Target) -> Twin:
    @quiet
    def drop_row(row: int, width: int, key: int, word: int, below: int, factor: Any) -> None:
        weights = stretch(t, row, width)
        keys = (int(key) + np.arange(width)).astype(np.uint32)
        kept = hashed(keys, int(word)) >= np.uint32(int(below) & 0xFFFFFFFF)
        weights[:] = np.where(kept, weights * real(t)(factor), real(t)(0))

    return drop_row


@twin("rows.emit.merge_row")
def merge_row(t: Target) -> Twin:
    @quiet
    def merge_row(sums: int, more: int, panels: int, step: int, factor: Any, share: Any) -> None:
        needs(panels >= 1, "there is at least one panel")
        for p in range(panels):
            here, there = vectors(t, sums + p * step, t.nv), vectors(t, more + p * step, t.nv)
            here[:] = fma(there, real(t)(share), here * real(t)(factor))

    return merge_row


@twin("rows.emit.narrow_row")
def narrow_row(t: Target) -> Twin:
    def narrow_row(row: int, left: int, width: int) -> None:
        columns = stretch(t, row + left * t.size, width).copy()
        put(columns, row + 2 * left, BFLOAT16)

    return narrow_row
