"""The forward kernel: online softmax over key blocks, one query block a task; and the same, observed.

For a block of queries: scores of a key block into scratch (scores.py), one softmax step a row
(running_max, running_sum), then the weights times the values into the accumulator.
A row's arithmetic depends on its own data, on the key blocks, which start at multiples of block_k, and
on the splits, which start at multiples of `SPLIT` blocks: the same bits come out alone or in a batch, on
one thread or many.

`observe` is this kernel with the readings of `watch.py` folded in. A task is then a part of a plane's query blocks,
whose columns are summed by one thread in one order. What it does to the output is the same code, so the bits
are the same.
"""

from __future__ import annotations

import math
from typing import Any

import numba

from ..layout import SLOT
from ..sizes import SPAN_BYTES, WAITING
from ..target import SPLIT, Target
from . import best as best_of
from . import rows as row_bodies
from . import scores as shared
from . import softmax, tile
from . import watch as watching
from .pack import panels as panels_of
from .scalar import access, load_i64, load_u8, piece, prefetch, steps_for, store_i64, store_u8, take_ticket

S = SLOT
NEXT_TASK, NEXT_SLOT, TASKS = S["NEXT_TASK"], S["NEXT_SLOT"], S["TASKS"]
SCRATCH, SCRATCH_BYTES, OUT_KIND = S["SCRATCH"], S["SCRATCH_BYTES"], S["OUT_KIND"]
PLANES, QUERY_TABLE, QUERY_ROW = S["PLANES"], S["QUERY_TABLE"], S["QUERY_ROW"]
QUERIES, KEYS, HEAD_DIM, VALUE_DIM = S["QUERIES"], S["KEYS"], S["HEAD_DIM"], S["VALUE_DIM"]
KEY_BLOCKS, KEY_WIDTH, VALUE_PANELS = S["KEY_BLOCKS"], S["KEY_WIDTH"], S["VALUE_PANELS"]
VALUE_TABLE, VALUE_PACKED, VALUE_ODD = S["VALUE_TABLE"], S["VALUE_PACKED"], S["VALUE_ODD"]
OUTPUT_TABLE, LSE_TABLE, FUSED = S["OUTPUT_TABLE"], S["LSE_TABLE"], S["FUSED"]
KIND, VALUE_KIND = S["KIND"], S["VALUE_KIND"]
KEY_TABLE, KEY_SOURCE, KEY_ROW, KEY_COL = S["KEY_TABLE"], S["KEY_SOURCE"], S["KEY_ROW"], S["KEY_COL"]
KEY_PACKED, VALUE_SOURCE = S["KEY_PACKED"], S["VALUE_SOURCE"]
VALUE_ROW, VALUE_COL = S["VALUE_ROW"], S["VALUE_COL"]
GROUPS, STEP, WATCH_AT, COLUMNS = S["GROUPS"], S["STEP"], S["WATCH_AT"], S["COLUMNS"]
ROW_OFFSET, STATS_TABLE, SCORES_TABLE = S["ROW_OFFSET"], S["STATS_TABLE"], S["SCORES_TABLE"]
TOP_COUNT, TOP_SCORES_TABLE, TOP_KEYS_TABLE = S["TOP_COUNT"], S["TOP_SCORES_TABLE"], S["TOP_KEYS_TABLE"]
MOMENTS, REACHES = S["MOMENTS"], S["REACHES"]


def build_observed(t: Target) -> Any:
    """The forward kernel with readings folded in, for a target."""
    return build(t, True)


def build(t: Target, watch: bool = False) -> Any:
    """The forward kernel for a target; `watch`: with readings folded in."""
    products, rows = tile.emit(t), row_bodies.emit(t)
    pieces, ends = shared.build(t, products, rows), softmax.build(t, rows)
    seen_by = watching.build(t, rows, pieces)
    keep_best, settle = best_of.build(t)
    shift_moment = seen_by.shift_moment
    watch_moment, watch_both = seen_by.watch_moment, seen_by.watch_both
    join_moments, conclude = seen_by.join_moments, seen_by.conclude
    silence, columns = seen_by.silence, seen_by.columns
    pack_query, ranges, span, score_block = pieces.pack_query, pieces.ranges, pieces.span, pieces.score_block
    sees, join, finish, drop = pieces.sees, ends.join, ends.finish, ends.drop
    note_seen, add_odd = ends.note_seen, ends.add_odd
    normaliser, note_scores = ends.normaliser, ends.note_scores
    weigh, weigh_noted = ends.weigh, ends.weigh_noted
    mix, row_max, raise_row = products.mix, rows.row_max, rows.raise_row
    fold_total, scale_vector, exp_one = rows.fold_total, rows.scale_vector, rows.exp_one
    scale_row = rows.scale_row
    turned, straight = panels_of(t)
    narrow_row, steps_of, pairs = rows.narrow_row, steps_for(t), t.pairs
    load, store, _, _, real, size = access(t)
    mr, nr, lanes, block_q, block_k = t.mr, t.nr, t.lanes, t.block_q, t.block_k
    stride = 4 * lanes  # what row_max and raise_row step by
    waiting = 2 * WAITING * lanes * size  # bytes of the scores and keys that wait for a row
    neg_inf, zero = real(-math.inf), real(0.0)

    @piece
    def pack_here(args: int, key_plane: int, value_plane: int, slot: int, block: int) -> None:
        """One key block of a plane into this thread's panels, which stay in its cache."""
        key, width = block * block_k, load_i64(args + KEY_WIDTH)
        there, dim, value_dim = (
            min(width, load_i64(args + KEYS) - key),
            load_i64(args + HEAD_DIM),
            load_i64(args + VALUE_DIM),
        )
        row, col, kind = load_i64(args + KEY_ROW), load_i64(args + KEY_COL), load_i64(args + KIND)
        source = load_i64(load_i64(args + KEY_SOURCE) + 8 * key_plane) + key * row
        out = load_i64(args + KEY_PACKED) + slot * width * steps_of(dim) * size
        turned(source, row, col, kind, dim, there, width, out, 0)
        row, col, kind = load_i64(args + VALUE_ROW), load_i64(args + VALUE_COL), load_i64(args + VALUE_KIND)
        source = load_i64(load_i64(args + VALUE_SOURCE) + 8 * value_plane) + key * row
        out = (
            load_i64(args + VALUE_PACKED) + slot * steps_of(width) * load_i64(args + VALUE_PANELS) * nr * size
        )
        odd = straight(source, row, col, kind, value_dim, there, width, out, 0)
        store_u8(load_i64(args + VALUE_ODD) + slot, numba.uint8(odd))

    @piece
    def ask(address: int, size: int, part: int, parts: int) -> None:
        """Ask for one of `parts` equal parts of `size` bytes."""
        each = (size // 64 + parts) // parts * 64
        for at in range(part * each, min((part + 1) * each, size), 64):
            prefetch(address + at)

    def forward(args: int) -> None:
        # Keys and values packed by the thread that uses them: those of a plane once, or each key block when it comes.
        fused, local = load_i64(args + FUSED) == 1, load_i64(args + FUSED) == 2
        tasks, queries, keys = load_i64(args + TASKS), load_i64(args + QUERIES), load_i64(args + KEYS)
        dim, value_dim, panels = (
            load_i64(args + HEAD_DIM),
            load_i64(args + VALUE_DIM),
            load_i64(args + VALUE_PANELS),
        )
        blocks, full_width = load_i64(args + KEY_BLOCKS), load_i64(args + KEY_WIDTH)
        out_size = size if load_i64(args + OUT_KIND) == 0 else 2
        step = load_i64(args + STEP) if watch else block_q  # queries a block
        query_blocks = (queries + step - 1) // step
        panel_bytes = block_q * nr * size

        slot = take_ticket(args + NEXT_SLOT)
        packed = load_i64(args + SCRATCH) + slot * load_i64(args + SCRATCH_BYTES)
        first_grid = packed + block_q * dim * size
        grid = first_grid  # scores, then weights
        sums = grid + block_q * block_k * size  # the accumulator of a split
        joined = sums + panels * panel_bytes  # of the splits before it
        totals = joined + panels * panel_bytes  # running_sum, one vector a row, folded at the end of a split
        tops = totals + block_q * lanes * size  # running_max
        states = (
            tops + block_q * size
        )  # (maximum, total) of a row over the splits before, and of the last one
        spans = states + 4 * block_q * size  # the keys each panel of rows sees
        # one byte a score, only for key blocks with NaN or infinite values
        seen = spans + block_q // mr * SPAN_BYTES

        kept, noted, top_count, top_room, moments, reached = False, False, 0, 0, False, False
        if watch:
            # Of each row: how many scores wait for a place among the best, and they; a vector of its moment and of
            # its reach; (moment, reach) joined and of the last split; 1 / normaliser; a factor. Then a line of a
            # grid, the running maxima and the weights of each key block.
            counters = packed + load_i64(args + WATCH_AT)
            top_count, pending = load_i64(args + TOP_COUNT), counters + block_q * 8
            views = pending + (block_q * waiting if top_count > 0 else 0)
            reaches = views + block_q * lanes * size
            folded = reaches + block_q * lanes * size
            inverses = folded + 4 * block_q * size
            factors = inverses + block_q * size
            line = factors + block_q * size
            marks = line + block_k * size
            strip = marks + blocks * step * size
            kept, strip_bytes = load_i64(args + COLUMNS) != 0, step * block_k * size
            noted = load_i64(args + SCORES_TABLE) != 0
            offset = load_i64(args + ROW_OFFSET)
            reached = load_i64(args + REACHES) != 0
            moments = reached or load_i64(args + MOMENTS) != 0
            top_room = (top_count + lanes - 1) // lanes * lanes

        # A plane's query blocks, the last first, are so many tasks. Where columns are summed a task has two stretches
        # of them, one from either end: under a causal mask all tasks are as long, and few share a row of pixels.
        lots, halves = load_i64(args + GROUPS), 2 if kept else 1
        each = (query_blocks + halves * lots - 1) // (halves * lots)
        last_packed, plane, group, stretch, half, turn, last_turn = -1, 0, 0, 0, halves, 0, 0
        while True:
            if turn >= last_turn:
                if half == halves:
                    task = take_ticket(args + NEXT_TASK)
                    if task >= tasks:
                        break
                    plane, group, half = task // lots, task % lots, 0
                stretch = group if half == 0 else 2 * lots - 1 - group
                half += 1
                turn, last_turn = stretch * each, min((stretch + 1) * each, query_blocks)
                continue
            # The last queries see the most keys under a causal mask: they go first.
            query_block = query_blocks - 1 - turn
            stretch = halves * lots - 1 - turn // each  # counted from the first query
            start = query_block * step
            turn += 1
            rows = min(step, queries - start)
            row_panels = (rows + mr - 1) // mr
            padded = row_panels * mr
            low, high = ranges(args, plane, start, rows, spans)
            pack_query(args, plane, start, rows, padded, packed)
            key_plane, value_plane = (
                load_i64(load_i64(args + KEY_TABLE) + 8 * plane),
                load_i64(load_i64(args + VALUE_TABLE) + 8 * plane),
            )
            if fused and last_packed != plane:
                pack_here(args, key_plane, value_plane, slot, 0)
                last_packed = plane
            block, splits = low // block_k, 0
            if watch:
                best, best_keys, grid, mark = 0, 0, first_grid, marks
                if kept:
                    grid = strip
                if top_count > 0:
                    for r in range(rows):
                        store_i64(counters + r * 8, 0)
                    best = load_i64(load_i64(args + TOP_SCORES_TABLE) + 8 * plane) + start * top_room * size
                    best_keys = (
                        load_i64(load_i64(args + TOP_KEYS_TABLE) + 8 * plane) + start * top_room * size
                    )
            while True:  # once a split; once also where no key is seen
                soon = plane + load_i64(args + NEXT_SLOT)  # the plane this thread is likely to have next
                asks = fused and soon < load_i64(args + PLANES)
                if asks:
                    soon_query = load_i64(load_i64(args + QUERY_TABLE) + 8 * soon)
                    soon_key = load_i64(
                        load_i64(args + KEY_SOURCE) + 8 * load_i64(load_i64(args + KEY_TABLE) + 8 * soon)
                    )
                    soon_value = load_i64(
                        load_i64(args + VALUE_SOURCE) + 8 * load_i64(load_i64(args + VALUE_TABLE) + 8 * soon)
                    )
                    query_bytes, key_bytes, value_bytes = (
                        queries * load_i64(args + QUERY_ROW),
                        keys * load_i64(args + KEY_ROW),
                        keys * load_i64(args + VALUE_ROW),
                    )
                for r in range(padded):
                    store(tops + r * size, neg_inf)
                    for c in range(lanes):
                        store(totals + (r * lanes + c) * size, zero)
                        if watch:
                            store(views + (r * lanes + c) * size, zero)
                            store(reaches + (r * lanes + c) * size, zero)
                    for p in range(panels):
                        for c in range(nr):
                            store(sums + p * panel_bytes + (r * nr + c) * size, zero)
                last = (block // SPLIT + 1) * SPLIT
                while block < last and block * block_k < high:
                    key = block * block_k
                    count = min(block_k, keys - key)
                    key_place, value_place = key_plane * blocks + block, value_plane * blocks + block
                    if local:
                        pack_here(args, key_plane, value_plane, slot, block)
                    if fused or local:
                        key_place, value_place = slot, slot
                    score_block(args, plane, start, rows, packed, block, spans, grid, 0, key_place)
                    odd = load_u8(load_i64(args + VALUE_ODD) + value_place) != 0
                    for p in range(row_panels):
                        first, stop = span(args, spans, p, key, count)
                        left = first // stride * stride
                        width = (stop + stride - 1) // stride * stride - left
                        for r in range(p * mr, min(rows, (p + 1) * mr)):
                            row = grid + r * block_k * size
                            if asks:
                                ask(soon_query, query_bytes, start + r, queries)
                                ask(soon_key, key_bytes, start + r, queries)
                                ask(soon_value, value_bytes, start + r, queries)
                            if odd:
                                note_seen(row, seen + r * block_k, first, stop)
                            if watch and kept:
                                store(mark + r * size, neg_inf)
                            if stop == 0:
                                continue
                            row += left * size
                            if watch and noted:
                                scores = row - left * size
                                note_scores(args, plane, start + r, key, first, stop, scores)
                            old = load(tops + r * size)
                            if watch and top_count > 0:
                                # One look at the row tells both: whether anything exceeds the least of the k best,
                                # which is not often, and, as that mostly lies below running_max, what does.
                                here, there = best + r * top_room * size, best_keys + r * top_room * size
                                bar = load(here + (top_count - 1) * size)
                                peak = row_max(row, width, bar if bar < old else old)
                                new = peak if peak > old else old
                                if peak > bar:
                                    waits, counter = pending + r * waiting, counters + r * 8
                                    keep_best(row, width, key + left, here, there, top_count, waits, counter)
                            else:
                                new = row_max(row, width, old)
                            if new != old:
                                store(tops + r * size, new)
                                if old != neg_inf:  # else there is nothing yet to rescale
                                    decay = exp_one(old - new)
                                    if panels > 0:
                                        scale_row(sums + r * nr * size, panels, panel_bytes, decay)
                                    if watch and moments:
                                        here = r * lanes * size
                                        shift_moment(views + here, totals + here, old - new, decay)
                                        scale_vector(reaches + here, decay)
                                    scale_vector(totals + r * lanes * size, decay)
                            here = r * lanes * size
                            if watch and reached:
                                own = real(offset + start + r - key - left)
                                watch_both(row, width, new, totals + here, views + here, reaches + here, own)
                            elif watch and moments:
                                watch_moment(row, width, new, totals + here, views + here, 0, zero)
                            else:
                                raise_row(row, width, new, totals + here)
                            if watch and kept:
                                store(mark + r * size, new)
                            drop(args, plane, start + r, key + left, width, row)
                    if odd:
                        add_odd(args, plane, key, grid, seen, sums, rows)
                    if pairs:
                        for p in range(row_panels):
                            first, stop = span(args, spans, p, key, count)
                            left = first // stride * stride
                            width = (stop + stride - 1) // stride * stride - left
                            if stop > 0:
                                for r in range(p * mr, min(rows, (p + 1) * mr)):
                                    narrow_row(grid + r * block_k * size, left, width)
                    tall = steps_of(full_width)
                    place = value_place * tall * panels * nr * size
                    value_panel = load_i64(args + VALUE_PACKED) + place
                    for v in range(panels):
                        here = value_panel + v * tall * nr * size
                        for p in range(row_panels):
                            first, stop = span(args, spans, p, key, count)
                            if stop > 0:
                                begin = first // 2 if pairs else first
                                mix(
                                    grid + (p * mr * block_k + begin) * size,
                                    here + begin * nr * size,
                                    steps_of(stop) - begin,
                                    sums + v * panel_bytes + p * mr * nr * size,
                                )
                    block += 1
                    if watch and kept:
                        grid, mark = grid + strip_bytes, mark + step * size
                more = states + 2 * block_q * size
                for r in range(rows):
                    at = states if splits == 0 else more
                    store(at + 2 * r * size, load(tops + r * size))
                    store(at + (2 * r + 1) * size, fold_total(totals + r * lanes * size))
                    if watch:
                        there = folded + 2 * (r if splits == 0 else block_q + r) * size
                        store(there, fold_total(views + r * lanes * size))
                        store(there + size, fold_total(reaches + r * lanes * size))
                        if splits > 0:
                            join_moments(
                                states + 2 * r * size, more + 2 * r * size, folded + 2 * r * size, there
                            )
                    if splits > 0:
                        here, there = joined + r * nr * size, sums + r * nr * size
                        join(states + 2 * r * size, more + 2 * r * size, here, there, panels, panel_bytes)
                if splits == 0:
                    sums, joined = joined, sums
                splits += 1
                if block * block_k >= high:
                    break

            output = load_i64(load_i64(args + OUTPUT_TABLE) + 8 * plane) + start * value_dim * out_size
            lses = load_i64(args + LSE_TABLE)
            lse, lse_step = (load_i64(lses + 8 * plane) + start * 8, 8) if lses != 0 else (0, 0)
            for r in range(rows):
                top, total = load(states + 2 * r * size), load(states + (2 * r + 1) * size)
                empty = top == neg_inf and total == zero and not sees(args, plane, start + r, first_grid)
                here, out = joined + r * nr * size, output + r * value_dim * out_size
                finish(args, plane, top, total, empty, here, panel_bytes, out, lse + r * lse_step)
                if watch:
                    stats = load_i64(load_i64(args + STATS_TABLE) + 8 * plane) + (start + r) * 32
                    sums_of = folded + 2 * r * size
                    norm = normaliser(args, plane, top, total, empty)
                    inverse = conclude(top, total, norm, sums_of, stats)
                    if noted:
                        weigh_noted(args, plane, start + r, top, norm)
                    if top_count > 0:
                        here, there = best + r * top_room * size, best_keys + r * top_room * size
                        chunks, count = top_room // lanes, load_i64(counters + r * 8)
                        settle(here, there, chunks, pending + r * waiting, count)
                        weigh(here, top_room, top, norm)
                    if kept and inverse != inverse:
                        silence(strip, strip_bytes, (high + block_k - 1) // block_k - low // block_k, r)
                        inverse = zero
                    store(inverses + r * size, inverse)
                    store(tops + r * size, top)
            if watch and kept:
                columns(
                    args,
                    plane,
                    group,
                    stretch,
                    start,
                    rows,
                    low,
                    high,
                    spans,
                    strip,
                    strip_bytes,
                    marks,
                    step,
                    tops,
                    inverses,
                    factors,
                    line,
                )

    return forward
