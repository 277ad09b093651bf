"""What a body is tried on: plain numbers, and numbers that tempt it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kizuki.cpu.sizes import BFLOAT16, FLOAT16, PLAIN, step_of
from kizuki.cpu.target import Target

from .arena import Arena
from .memory import Array, real
from .rounding import to_bfloat16

Random = np.random.Generator
Case = Callable[..., list[Any]]  # (arena, target, random, hostile, **what the body was made for) -> arguments

CASES: dict[str, Case] = {}


def case(*names: str) -> Callable[[Case], Case]:
    def register(make: Case) -> Case:
        for name in names:
            CASES[name] = make
        return make

    return register


def drawn(t: Target, random: Random, hostile: bool, *shape: int) -> Array:
    """Normal numbers; hostile ones of all sizes, among them NaN, ±Inf, ±0, the largest, the smallest."""
    number = real(t)
    with np.errstate(all="ignore"):
        made = random.normal(size=shape)
        if hostile:
            span = 60 if t.size == 4 else 500
            made = np.ldexp(made, random.integers(-span, span, shape))
            odd = np.array(
                [np.nan, np.inf, -np.inf, 0.0, -0.0, np.finfo(number).max, np.finfo(number).tiny, 5e-324]
            )
            made = np.where(random.random(shape) < 0.15, odd[random.integers(0, len(odd), shape)], made)
        return made.astype(number)


def stored(t: Target, kind: int, random: Random, hostile: bool, *shape: int) -> Array:
    """The same as it lies in memory of a kind."""
    plain = drawn(t, random, hostile, *shape)
    if kind == BFLOAT16:
        return to_bfloat16(plain)
    with np.errstate(all="ignore"):
        return plain.astype(np.float16) if kind == FLOAT16 else plain


def words(random: Random, hostile: bool, *shape: int) -> Array:
    """32-bit words of two bfloat16 numbers."""
    single = Target("", 4, 4, 1, 4, 16, 4)
    halves = to_bfloat16(drawn(single, random, hostile, *shape[:-1], 2 * shape[-1]))
    return halves.view(np.uint32)


def scores(t: Target, random: Random, hostile: bool, *shape: int) -> Array:
    """Scores: some absent, and some hostile."""
    found = 4 * drawn(t, random, False, *shape)
    found[random.random(shape) < 0.1] = -np.inf
    if hostile:
        found[random.random(shape) < 0.05] = np.nan
        found *= np.where(random.random(shape) < 0.2, 200, 1).astype(real(t))
    return found


def eps(t: Target) -> float:
    return float(np.finfo(real(t)).eps)


def tiny(t: Target) -> float:
    return float(np.finfo(real(t)).tiny)


def of_exp(x: Array, more: float = 0.0) -> Array:
    """How alike two e^x are, each: as if x had been rounded once more, and the result; beside `more` roundings."""
    number = np.finfo(x.dtype)
    size = np.where(np.isfinite(x), abs(np.maximum(x, np.log(number.tiny))), 0.0)
    return np.asarray(number.eps * (2 + more + size / 2), np.float64)


def width(t: Target, random: Random) -> int:
    return 4 * t.lanes * int(random.integers(1, 4))


# -- single numbers ----------------------------------------------------------------------------------


@case("scalar._scalar_load.load")
def _(a: Arena, t: Target, random: Random, hostile: bool, numba_type: Any) -> list[Any]:
    kind = np.dtype(str(numba_type))
    return [a.put(random.integers(0, 256, 8, np.uint8)[: kind.itemsize].view(kind))]


@case("scalar._scalar_store.store")
def _(a: Arena, t: Target, random: Random, hostile: bool, numba_type: Any) -> list[Any]:
    kind = np.dtype(str(numba_type))
    value = np.float64(random.normal()) if kind.kind == "f" else random.integers(0, 200)
    return [a.put(np.zeros(3, kind)) + kind.itemsize, kind.type(value)]


@case("scalar.load_narrow")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    kind = int(random.integers(BFLOAT16, FLOAT16 + 1))
    return [a.put(stored(t, kind, random, hostile, 1).view(np.uint16)), kind]


@case("scalar.store_narrow")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    value = np.float32(drawn(t, random, hostile, 1)[0])
    if np.isnan(value):
        value = np.float32(np.inf)
    return [a.put(np.zeros(3, np.uint16)) + 2, value, int(random.integers(BFLOAT16, FLOAT16 + 1))]


@case("scalar.take_ticket", "scalar.take_last")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    return [a.put(random.integers(-5, 1 << 40, 1))]


@case("scalar.prefetch")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    return [int(random.integers(0, 1 << 60)) if hostile else a.put(np.zeros(4))]


@case("scalar.fma_one")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    return list(drawn(t, random, hostile, 3))


# -- products ----------------------------------------------------------------------------------------


def _panels(a: Arena, t: Target, random: Random, hostile: bool, row: int | None, out: int) -> list[Any]:
    """left [mr, steps], rows `row` apart (None: steps); right [steps, nr]; out, `out` apart."""
    steps = int(random.integers(1, 20))
    if t.pairs:
        left, right = words(random, hostile, t.mr, row or steps), words(random, hostile, steps, t.nr)
    else:
        left, right = drawn(t, random, hostile, t.mr, row or steps), drawn(t, random, hostile, steps, t.nr)
    return [a.put(left), a.put(right), steps, a.put(drawn(t, random, hostile, t.mr, out))]


@case("tile.emit.scores")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    return _panels(a, t, random, hostile, None, t.block_k)


@case("tile.emit.scores_of_pairs")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    return [*_panels(a, t, random, hostile, None, t.block_k), np.float32(0.37)]


@case("tile.emit.mix", "tile.emit.mix_apart")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    return _panels(a, t, random, hostile, t.block_k, t.nr)


@case("tile.emit.mix_turned")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    steps = int(random.integers(1, 20))
    left, right = (drawn(t, random, hostile, steps, n) for n in (t.block_k, t.nr))
    return [a.put(left), a.put(right), steps, a.put(drawn(t, random, hostile, t.mr, t.nr))]


def _keys(a: Arena, t: Target, kind: int, random: Random, hostile: bool, count: int, dim: int) -> list[int]:
    """Addresses of rows that lie anywhere."""
    rows = [a.put(stored(t, kind, random, hostile, dim)) for _ in range(count)]
    return [rows[n] for n in random.permutation(count)]


def _queries(a: Arena, t: Target, random: Random, hostile: bool, rows: int, dim: int) -> int:
    return a.put(words(random, hostile, rows, dim) if t.pairs else drawn(t, random, hostile, rows, dim))


@case("few.build.dots_for.dots")
def _(a: Arena, t: Target, random: Random, hostile: bool, kind: int, rows: int, squares: int) -> list[Any]:
    count, dim = squares * t.lanes, step_of(t, kind) * int(random.integers(1, 4))
    table = a.table(_keys(a, t, kind, random, hostile, count, dim))
    queries = _queries(a, t, random, hostile, rows, dim)
    out = a.put(drawn(t, random, False, rows, t.block_k))
    return [table, queries, dim, out, table, int(random.integers(2)), np.float32(0.37)]


@case("few.build.dots_for.dots_dense")
def _(
    a: Arena, t: Target, random: Random, hostile: bool, kind: int, rows: int, squares: int, known: int
) -> list[Any]:
    count, dim = squares * t.lanes, known or step_of(t, kind) * int(random.integers(1, 4))
    keys = a.put(stored(t, kind, random, hostile, count, dim))
    queries = _queries(a, t, random, hostile, rows, dim)
    return [keys, queries, dim, a.put(drawn(t, random, False, rows, t.block_k)), keys, np.float32(0.37)]


@case("few.build.mix_for.mix")
def _(a: Arena, t: Target, random: Random, hostile: bool, kind: int, rows: int, vectors: int) -> list[Any]:
    count, wide = int(random.integers(1, 17)), vectors * t.lanes
    column, row = int(random.integers(0, 5)), wide + 7
    table = a.table(_keys(a, t, kind, random, hostile, count, column + wide))
    shape = (rows - 1) * t.block_k + count + 1
    weights = a.put(words(random, False, shape) if t.pairs else abs(drawn(t, random, hostile, shape)))
    out = a.put(drawn(t, random, hostile, (rows - 1) * row + column + wide))
    return [table, weights, count, column, out, row, table, int(random.integers(2))]


# -- packing -----------------------------------------------------------------------------------------


@case("pack.bodies.for_kind.turn")
def _(a: Arena, t: Target, random: Random, hostile: bool, kind: int) -> list[Any]:
    vectors = int(random.integers(1, 4))
    dim = vectors * t.lanes
    source = stored(t, kind, random, hostile, t.lanes, dim + 3)
    out = a.put(drawn(t, random, False, dim, t.nr))
    return [a.put(source), (dim + 3) * source.itemsize, vectors, out]


@case("pack.bodies.for_kind.copy_panel")
def _(a: Arena, t: Target, random: Random, hostile: bool, kind: int) -> list[Any]:
    return [a.put(stored(t, kind, random, hostile, t.nr)), a.put(drawn(t, random, False, t.nr))]


@case("pack.pairs.weave_panel")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    first, second = (a.put(stored(t, BFLOAT16, random, hostile, t.nr)) for _ in range(2))
    return [first, second, a.put(drawn(t, random, False, t.nr))]


# -- rows --------------------------------------------------------------------------------------------


@case("rows.emit.add_bias")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    count = int(random.integers(1, 6))
    row, bias = drawn(t, random, hostile, count * t.lanes), scores(t, random, hostile, count * t.lanes)
    return [a.put(row), a.put(bias), count]


@case("rows.emit.hide")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    count = int(random.integers(1, 6))
    seen = random.integers(0, 256, count * t.lanes) * random.integers(0, 2, count * t.lanes)
    return [a.put(drawn(t, random, hostile, count * t.lanes)), a.put(seen.astype(np.uint8)), count]


@case("rows.emit.weigh_row")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    n, number = width(t, random), real(t)
    row = scores(t, random, hostile, n)
    known = row[np.isfinite(row)].astype(np.float64)
    lse = number(known.max() + np.log(np.exp(known - known.max()).sum()))
    place = a.put(row, of_exp(row - lse), tiny(t))
    grad = a.put(drawn(t, random, False, n), of_exp(row - lse, 1), tiny(t))
    return [place, n, lse, number(lse * eps(t) / 3), number(random.normal()), grad]


@case("rows.emit.bend_row")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    n = width(t, random)
    grad = drawn(t, random, hostile, n) * random.integers(0, 2, n).astype(real(t))
    return [a.put(grad), n, a.put(drawn(t, random, hostile, n))]


def _top(row: Array, random: Random) -> Any:
    known = row[~np.isnan(row)]
    return known.max() if known.size else row.dtype.type(-np.inf)


@case("rows.emit.row_max")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    row = scores(t, random, hostile, width(t, random))
    bar = [-np.inf, _top(row, random), row[~np.isnan(row)].mean(), 1e6][int(random.integers(4))]
    return [a.put(row), row.size, real(t)(bar)]


@case("rows.emit.raise_row")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    row = scores(t, random, hostile, width(t, random))
    if random.random() < 0.1:
        row[:] = -np.inf
    totals = abs(drawn(t, random, False, t.lanes))
    top = _top(row, random)
    return [a.put(row, of_exp(row - top), tiny(t)), row.size, top, a.put(totals, 6 * eps(t))]


@case("rows.emit.settle_row")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    row = scores(t, random, hostile, t.lanes * int(random.integers(1, 6)))
    top = _top(row, random)
    return [a.put(row, of_exp(row - top, 1), tiny(t)), row.size // t.lanes, top, real(t)(0.3)]


@case("rows.emit.fold_total")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    return [a.put(drawn(t, random, hostile, t.lanes))]


@case("rows.emit.scale_vector")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    return [a.put(drawn(t, random, hostile, t.lanes)), drawn(t, random, hostile, 1)[0]]


@case("rows.emit.exp_one")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    ends = [0.0, -0.0, -np.inf, np.nan, -87.3, -87.4, -708.3, -708.5, -1e30]
    return [real(t)(ends[int(random.integers(len(ends)))] if hostile else -abs(20 * random.normal()))]


@case("rows.emit.scale_row")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    panels, apart = int(random.integers(1, 4)), t.nr + 3
    return [
        a.put(drawn(t, random, hostile, panels, apart)),
        panels,
        apart * t.size,
        drawn(t, random, hostile, 1)[0],
    ]


@case("rows.emit.cap_row")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    row = drawn(t, random, hostile, width(t, random)) * real(t)(10.0 ** random.integers(-3, 2))
    slope = a.put(drawn(t, random, False, row.size), 0.0, 4 * eps(t)) if random.random() < 0.6 else 0
    return [a.put(row, 4 * eps(t), tiny(t)), row.size, real(t)(30.0), slope]


@case("rows.emit.scaled.scale_panel")
def _(a: Arena, t: Target, random: Random, hostile: bool, source_kind: int, out_kind: int) -> list[Any]:
    source = stored(t, source_kind, random, hostile, t.nr)
    if out_kind == BFLOAT16:
        source = np.nan_to_num(source, nan=3.0, posinf=np.inf, neginf=-np.inf)  # its NaN: test_narrow_nan
    kinds = {PLAIN: real(t), BFLOAT16: np.uint16, FLOAT16: np.float16}
    return [a.put(source), a.put(np.zeros(t.nr, kinds[out_kind])), real(t)(0.37)]


@case("rows.emit.drop_row")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    row, word = drawn(t, random, hostile, width(t, random)), int(random.integers(-(1 << 63), 1 << 63))
    key = (1 << 40) + 3 if hostile else int(random.integers(0, 5000))
    return [a.put(row), row.size, key, word, int(random.integers(0, 1 << 32)), real(t)(1.25)]


@case("rows.emit.merge_row")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    panels, apart = int(random.integers(1, 4)), t.nr + 3
    sums, more = (a.put(drawn(t, random, hostile, panels, apart)) for _ in range(2))
    factor, share = abs(drawn(t, random, False, 2))
    return [sums, more, panels, apart * t.size, factor, share]


@case("rows.emit.narrow_row")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    left, n = 4 * t.lanes * int(random.integers(0, 2)), width(t, random)
    row = np.nan_to_num(drawn(t, random, hostile, left + n), nan=2.0, posinf=np.inf, neginf=-np.inf)
    return [a.put(row), left, n]


# -- observed rows -----------------------------------------------------------------------------------


@case("views.emit.watch.watch_row")
def _(a: Arena, t: Target, random: Random, hostile: bool, reach_too: bool) -> list[Any]:
    row = scores(t, random, hostile, width(t, random))
    totals, reach = (abs(drawn(t, random, False, t.lanes)) for _ in range(2))
    moments = -abs(drawn(t, random, False, t.lanes))
    top = _top(row, random)
    place = a.put(row, of_exp(row - top), tiny(t))
    sums = [a.put(x, 6 * eps(t), 200 * tiny(t)) for x in (totals, moments, reach)]
    own = real(t)(int(random.integers(-40, 2000)))
    return [place, row.size, top, *sums[:2], sums[2] if reach_too else 0, own]


@case("views.emit.shift_moment")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    moments, totals = (a.put(drawn(t, random, hostile, t.lanes)) for _ in range(2))
    return [moments, totals, real(t)(-abs(random.normal())), real(t)(random.random())]


@case("views.emit.over_rows.columns")
def _(a: Arena, t: Target, random: Random, hostile: bool, combine: str) -> list[Any]:
    n, rows = width(t, random), int(random.integers(1, 6))
    n = min(n, t.block_k)
    lines = a.put(drawn(t, random, hostile, rows, t.block_k))
    factors, out = a.put(drawn(t, random, hostile, rows)), a.put(drawn(t, random, hostile, n))
    return [lines, rows, factors, out, n]


@case("views.emit.add_line")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    n = width(t, random)
    return [a.put(drawn(t, random, hostile, n)), a.put(drawn(t, random, hostile, n)), n]


@case("views.emit.factor_rows")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    count = int(random.integers(1, 4 * t.lanes))
    room = -(-count // t.lanes) * t.lanes
    tops = scores(t, random, hostile, room)
    marks = np.where(random.random(room) < 0.3, -np.inf, tops - abs(drawn(t, random, False, room))).astype(
        real(t)
    )
    inverses = random.random(room).astype(real(t)) * random.integers(0, 2, room).astype(real(t))
    out = a.put(drawn(t, random, False, room), of_exp(marks - tops, 1), tiny(t))
    return [a.put(marks), a.put(tops), a.put(inverses), out, count]


# -- the k best --------------------------------------------------------------------------------------


@case("best.emit.those_above")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    row = scores(t, random, hostile, 4 * t.lanes)
    return [a.put(row), real(t)(random.choice([-np.inf, 0.0, 100.0, -100.0]))]


@case("best.emit.lowest_bit")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    return [int(random.integers(1, 1 << 62)) << int(random.integers(0, 2))]


@case("best.emit.merge")
def _(a: Arena, t: Target, random: Random, hostile: bool) -> list[Any]:
    """Few different scores, so that keys decide; places that nothing has taken hold −inf and −1."""
    chunks, number = int(random.integers(1, 4)), np.int32 if t.size == 4 else np.int64
    count = (chunks + 1) * t.lanes
    found = random.integers(-3, 3, count).astype(real(t)) if hostile else drawn(t, random, False, count)
    keys = random.permutation(5 * count)[:count].astype(number)
    free = random.random(count) < 0.2
    found[free], keys[free] = -np.inf, -1
    more, more_keys = found[: t.lanes].copy(), keys[: t.lanes].copy()
    order = np.lexsort((keys[t.lanes :], -found[t.lanes :]))
    best = a.put(found[t.lanes :][order]), a.put(keys[t.lanes :][order])
    return [*best, a.put(more), a.put(more_keys), chunks]
