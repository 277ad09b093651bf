"""Packing for the backward pass: every operand is the left side of one product and the right side of another.

    S = Q Kᵀ         query rows, keys turned             dV = Pᵀ dO       gradient columns
    dP = dO Vᵀ       gradient rows, values turned        dK = dSᵀ Q       query columns
                                                         dQ = dS K        key columns

O(n · d) beside O(n² · d).
"""

from __future__ import annotations

import math
from typing import Any

from ..layout import SLOT
from ..target import Target
from . import rows as row_bodies
from . import scores as shared
from . import tile
from .pack import panels
from .scalar import access, load_f64, load_i64, piece, store_i64, take_ticket

S = SLOT
NEXT_TASK, TASKS, KEYS, QUERIES = S["NEXT_TASK"], S["TASKS"], S["KEYS"], S["QUERIES"]
KIND, VALUE_KIND, GRAD_KIND = S["KIND"], S["VALUE_KIND"], S["GRAD_KIND"]
HEAD_DIM, VALUE_DIM, VALUE_PANELS = S["HEAD_DIM"], S["VALUE_DIM"], S["VALUE_PANELS"]
KEY_BLOCKS, KEY_WIDTH, QUERY_BLOCKS = S["KEY_BLOCKS"], S["KEY_WIDTH"], S["QUERY_BLOCKS"]
KEY_PLANES, KEY_SOURCE, KEY_ROW, KEY_COL = S["KEY_PLANES"], S["KEY_SOURCE"], S["KEY_ROW"], S["KEY_COL"]
VALUE_PLANES, VALUE_SOURCE = S["VALUE_PLANES"], S["VALUE_SOURCE"]
VALUE_ROW, VALUE_COL = S["VALUE_ROW"], S["VALUE_COL"]
QUERY_TABLE, QUERY_ROW, QUERY_COL = S["QUERY_TABLE"], S["QUERY_ROW"], S["QUERY_COL"]
GRAD_TABLE, GRAD_ROW, GRAD_COL, GRAD_ODD = S["GRAD_TABLE"], S["GRAD_ROW"], S["GRAD_COL"], S["GRAD_ODD"]
KEY_PACKED, KEY_COLUMNS, VALUE_KEYS = S["KEY_PACKED"], S["KEY_COLUMNS"], S["VALUE_KEYS"]
QUERY_ROWS, QUERY_COLUMNS = S["QUERY_ROWS"], S["QUERY_COLUMNS"]
LSE_TABLE = S["LSE_TABLE"]
GRAD_ROWS, GRAD_COLUMNS = S["GRAD_ROWS"], S["GRAD_COLUMNS"]


def build(t: Target) -> Any:
    """The kernel for a target: one task a key block of a key plane, of a value plane, a query block of a plane."""
    turned, straight = panels(t)
    pack_query = shared.build(t, tile.emit(t), row_bodies.emit(t)).pack_query
    _, store, load_kind, _, real, size = access(t)
    nr, block_q, block_k = t.nr, t.block_q, t.block_k
    infinity = real(math.inf)

    @piece
    def queries_of(args: int, task: int) -> None:
        blocks, queries, kind = load_i64(args + QUERY_BLOCKS), load_i64(args + QUERIES), load_i64(args + KIND)
        plane, start = task // blocks, task % blocks * block_q
        rows = min(block_q, queries - start)
        dim, value_dim, panels = (
            load_i64(args + HEAD_DIM),
            load_i64(args + VALUE_DIM),
            load_i64(args + VALUE_PANELS),
        )
        pack_query(
            args, plane, start, rows, block_q, load_i64(args + QUERY_ROWS) + task * block_q * dim * size
        )
        row = load_i64(args + QUERY_ROW)
        source = load_i64(load_i64(args + QUERY_TABLE) + 8 * plane) + start * row
        out = load_i64(args + QUERY_COLUMNS) + task * block_q * ((dim + nr - 1) // nr) * nr * size
        straight(source, row, load_i64(args + QUERY_COL), kind, dim, rows, block_q, out, 0)
        row, col, kind = load_i64(args + GRAD_ROW), load_i64(args + GRAD_COL), load_i64(args + GRAD_KIND)
        source = load_i64(load_i64(args + GRAD_TABLE) + 8 * plane) + start * row
        out = load_i64(args + GRAD_COLUMNS) + task * block_q * panels * nr * size
        odd = straight(source, row, col, kind, value_dim, rows, block_q, out, 0) != 0
        lse = load_i64(load_i64(args + LSE_TABLE) + 8 * plane) + start * 8
        out = load_i64(args + GRAD_ROWS) + task * block_q * value_dim * size
        for r in range(rows):
            for d in range(value_dim):
                x = load_kind(source + r * row + d * col, kind)
                store(out + (r * value_dim + d) * size, x)
                if odd and not math.fabs(x) < infinity and load_f64(lse + r * 8) != -math.inf:
                    store_i64(load_i64(args + GRAD_ODD), 1)  # a row that sees something
        for at in range(rows * value_dim, block_q * value_dim):
            store(out + at * size, real(0.0))

    def prepare(args: int) -> None:
        tasks, blocks, keys = load_i64(args + TASKS), load_i64(args + KEY_BLOCKS), load_i64(args + KEYS)
        key_tasks = load_i64(args + KEY_PLANES) * blocks
        value_tasks = load_i64(args + VALUE_PLANES) * blocks
        width, dim, value_dim = (
            load_i64(args + KEY_WIDTH),
            load_i64(args + HEAD_DIM),
            load_i64(args + VALUE_DIM),
        )
        while True:
            task = take_ticket(args + NEXT_TASK)
            if task >= tasks:
                break
            if task < key_tasks:
                plane, block = task // blocks, task % blocks
                row, col, kind = load_i64(args + KEY_ROW), load_i64(args + KEY_COL), load_i64(args + KIND)
                source = load_i64(load_i64(args + KEY_SOURCE) + 8 * plane) + block * block_k * row
                there = min(width, keys - block * block_k)
                out = load_i64(args + KEY_PACKED) + task * width * dim * size
                turned(source, row, col, kind, dim, there, width, out, 0)
                out = load_i64(args + KEY_COLUMNS) + task * width * ((dim + nr - 1) // nr) * nr * size
                straight(source, row, col, kind, dim, there, width, out, 0)
            elif task < key_tasks + value_tasks:
                place = task - key_tasks
                plane, block = place // blocks, place % blocks
                row, col, kind = (
                    load_i64(args + VALUE_ROW),
                    load_i64(args + VALUE_COL),
                    load_i64(args + VALUE_KIND),
                )
                source = load_i64(load_i64(args + VALUE_SOURCE) + 8 * plane) + block * block_k * row
                there = min(width, keys - block * block_k)
                out = load_i64(args + VALUE_KEYS) + place * width * value_dim * size
                turned(source, row, col, kind, value_dim, there, width, out, 0)
            else:
                queries_of(args, task - key_tasks - value_tasks)

    return prepare
