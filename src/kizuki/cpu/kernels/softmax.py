"""The end of a row of the online softmax: joining the sums of two splits, and dividing by the total.

The keys of a row are summed in splits of `SPLIT` key blocks, and the splits are joined in order. The
forward kernel and the decoder share these pieces, so that a row has the same bits from either.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba

from ..layout import SLOT
from ..sizes import BFLOAT16, PLAIN
from ..target import Target
from .rows import Rows
from .scalar import access, load_f64, load_i64, load_u8, piece, store_f64, store_u8

S = SLOT
VALUE_KIND, OUT_KIND, KEYS, VALUE_DIM = S["VALUE_KIND"], S["OUT_KIND"], S["KEYS"], S["VALUE_DIM"]
SINK_TABLE, DROPOUT, DROP_BELOW, KEEP_FACTOR = (
    S["SINK_TABLE"],
    S["DROPOUT"],
    S["DROP_BELOW"],
    S["KEEP_FACTOR"],
)
PAGES_TABLE, PAGE_KEYS, VALUE_PAGE = S["PAGES_TABLE"], S["PAGE_KEYS"], S["VALUE_PAGE"]
VALUE_TABLE, VALUE_SOURCE, VALUE_ROW, VALUE_COL = (
    S["VALUE_TABLE"],
    S["VALUE_SOURCE"],
    S["VALUE_ROW"],
    S["VALUE_COL"],
)
FIRST_QUERY, SEED = S["FIRST_QUERY"], S["SEED"]
SCORES_TABLE, SCORES_ROW, SCORES_FROM, SCORES_TO = (
    S["SCORES_TABLE"],
    S["SCORES_ROW"],
    S["SCORES_FROM"],
    S["SCORES_TO"],
)


class Softmax(NamedTuple):
    """Inlined pieces, callable from a kernel."""

    join: Any
    finish: Any
    normaliser: Any
    note_scores: Any
    weigh: Any
    weigh_noted: Any
    drop: Any
    note_seen: Any
    add_odd: Any


def build(t: Target, rows: Rows) -> Softmax:
    """The pieces for a target."""
    exp_one, merge_row, drop_row, settle_row = rows.exp_one, rows.merge_row, rows.drop_row, rows.settle_row
    finish_plain, finish_bfloat16, finish_float16 = rows.finish_panel
    load, store, load_kind, store_kind, real, size = access(t)
    nr, block_q, block_k, lanes = t.nr, t.block_q, t.block_k, t.lanes
    neg_inf, zero = real(-math.inf), real(0.0)
    infinity = real(math.inf)

    @piece
    def join(state: int, more: int, sums: int, more_sums: int, panels: int, step: int) -> None:
        """Join a row's later split to the sums so far: `state` and `more` are (maximum, total), each two numbers."""
        old, top = load(state), load(more)
        mass = load(more + size)
        if top == neg_inf and mass == zero:
            return
        peak = top if top > old else old
        factor, share = real(1.0), real(1.0)
        if peak != neg_inf:
            factor, share = exp_one(old - peak), exp_one(top - peak)
        store(state, peak)
        store(state + size, load(state + size) * factor + mass * share)
        if panels > 0:
            merge_row(sums, more_sums, panels, step, factor, share)

    @piece
    def finish(
        args: int, plane: int, top: float, total: float, empty: bool, sums: int, step: int, out: int, lse: int
    ) -> None:
        """Divide a row by its total (and its sink's share) into the output at `out`, and write its lse if asked to.

        `sums`: nr numbers in each panel, panels `step` bytes apart.
        """
        dim, kind = load_i64(args + VALUE_DIM), load_i64(args + OUT_KIND)
        width = size if kind == PLAIN else 2
        factor, natural = zero, -math.inf
        if not empty:
            sink = neg_inf
            if load_i64(args + SINK_TABLE) != 0:
                sink = load(load_i64(args + SINK_TABLE) + size * plane)
            peak, mass, decay = numba.float64(top), numba.float64(total), 1.0
            if sink != neg_inf:
                peak = max(peak, numba.float64(sink)) if sink == sink else math.nan
                decay = math.exp(numba.float64(top) - peak)
                mass = mass * decay + math.exp(numba.float64(sink) - peak)
            factor = real(decay / mass)
            if lse != 0:
                # All scores −inf, yet seen: 0/0. A total of NaN stays NaN.
                natural = math.nan if mass == 0.0 else math.log(mass) + (0.0 if peak == -math.inf else peak)
        if lse != 0:
            store_f64(lse, natural)
        for p in range((dim + nr - 1) // nr):
            here, there = sums + p * step, out + p * nr * width
            if empty:
                for c in range(min(nr, dim - p * nr)):
                    store_kind(there + c * width, zero, kind)
            elif (p + 1) * nr <= dim:
                if kind == PLAIN:
                    finish_plain(here, there, factor)
                elif kind == BFLOAT16:
                    finish_bfloat16(here, there, factor)
                else:
                    finish_float16(here, there, factor)
            else:
                for c in range(dim - p * nr):
                    store_kind(there + c * width, load(here + c * size) * factor, kind)

    @piece
    def normaliser(args: int, plane: int, top: float, total: float, empty: bool) -> float:
        """Σ e^(score − top) of a row with its sink's share: inf for an empty row, NaN for one that has no softmax."""
        if empty:
            return math.inf
        norm = numba.float64(total)
        if load_i64(args + SINK_TABLE) != 0:
            sink = load(load_i64(args + SINK_TABLE) + size * plane)
            if sink != neg_inf:
                norm += math.exp(numba.float64(sink) - numba.float64(top))
        return math.nan if norm == 0.0 else norm

    @piece
    def note_scores(args: int, plane: int, query: int, key: int, first: int, stop: int, row: int) -> None:
        """Copy the scores of columns first … stop of a row to who asked for them."""
        begin, end = load_i64(args + SCORES_FROM), load_i64(args + SCORES_TO)
        out = load_i64(load_i64(args + SCORES_TABLE) + 8 * plane) + query * load_i64(args + SCORES_ROW)
        out += (key - begin) * size
        for c in range(max(first, begin - key), min(stop, end - key)):
            store(out + c * size, load(row + c * size))

    @piece
    def weigh(row: int, count: int, top: float, norm: float) -> None:
        """`count` scores of a row to its weights, in place: e^(score − top) / norm, 0 where there is no key.

        Wherever a weight is read, it is this number.
        """
        inverse = real(1.0 / norm)  # 0 for an empty row, whose scores are −inf, as its largest is
        peak = zero if top == neg_inf else top
        whole = count // lanes
        if whole > 0:
            settle_row(row, whole, peak, inverse)
        for c in range(whole * lanes, count):
            store(row + c * size, exp_one(load(row + c * size) - peak) * inverse)

    @piece
    def weigh_noted(args: int, plane: int, query: int, top: float, norm: float) -> None:
        """The scores of a row that were copied to who asked for them become its weights."""
        row = load_i64(load_i64(args + SCORES_TABLE) + 8 * plane) + query * load_i64(args + SCORES_ROW)
        weigh(row, load_i64(args + SCORES_TO) - load_i64(args + SCORES_FROM), top, norm)

    @piece
    def drop(args: int, plane: int, query: int, key: int, width: int, row: int) -> None:
        """Dropout on `width` weights of a row, whose first key is `key`.

        Each weight's number comes from its place and the seed alone, so the backward pass finds it again.
        """
        if load_i64(args + DROPOUT) != 0:
            word = row_word(load_i64(args + SEED), plane, load_i64(args + FIRST_QUERY) + query)
            below, factor = load_i64(args + DROP_BELOW), real(load_f64(args + KEEP_FACTOR))
            drop_row(row, width, key, numba.int64(word), below, factor)

    @piece
    def note_seen(row: int, seen: int, first: int, stop: int) -> None:
        """One byte a column: does the row see it?"""
        for c in range(block_k):
            inside = first <= c < stop
            store_u8(seen + c, numba.uint8(inside and load(row + c * size) != neg_inf))

    @piece
    def add_odd(args: int, plane: int, key: int, weights: int, seen: int, sums: int, rows: int) -> None:
        """Add weight · value for the NaN and infinite values of a key block, only to the rows that see the key."""
        dim, row, col = load_i64(args + VALUE_DIM), load_i64(args + VALUE_ROW), load_i64(args + VALUE_COL)
        kind = load_i64(args + VALUE_KIND)
        place = load_i64(load_i64(args + VALUE_TABLE) + 8 * plane)
        source = load_i64(load_i64(args + VALUE_SOURCE) + 8 * place)
        pages, each = load_i64(args + PAGES_TABLE), load_i64(args + PAGE_KEYS)
        for c in range(min(block_k, load_i64(args + KEYS) - key)):
            here, j = source + (key + c) * row, key + c
            if pages != 0:  # a cache in pages (paged.py)
                page = load_i64(load_i64(pages + 8 * place) + j // each * 8)
                here = source + page * load_i64(args + VALUE_PAGE) + j % each * row
            for d in range(dim):
                x = load_kind(here + d * col, kind)
                if not math.fabs(x) < infinity:
                    for r in range(rows):
                        if load_u8(seen + r * block_k + c) != 0:
                            at = sums + ((d // nr) * block_q * nr + r * nr + d % nr) * size
                            store(at, load(at) + load(weights + (r * block_k + c) * size) * x)

    return Softmax(join, finish, normaliser, note_scores, weigh, weigh_noted, drop, note_seen, add_odd)


@piece
def mixed(z: int) -> int:
    """A 64-bit number thoroughly mixed (the finaliser of SplitMix64: Steele, Lea and Flood 2014)."""
    z = numba.uint64(z)
    z = (z ^ (z >> numba.uint64(30))) * numba.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> numba.uint64(27))) * numba.uint64(0x94D049BB133111EB)
    return z ^ (z >> numba.uint64(31))


@piece
def row_word(seed: int, plane: int, query: int) -> int:
    """64 random bits for a row of A, from its place alone."""
    step = numba.uint64(0x9E3779B97F4A7C15)
    first = mixed(numba.uint64(seed) + step * (numba.uint64(plane) + numba.uint64(1)))
    return mixed(first + step * (numba.uint64(query) + numba.uint64(1)))
