"""Attention on keys and values in pages, read where they lie: by the decoder as they are, by packing once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from ..problem import Problem
from . import call
from .block import Block
from .call import Sizes


def forward(problem: Problem, key_pages: Tensor, value_pages: Tensor, table: Tensor) -> Tensor:
    """`A @ value`; the problem's key says everything about the keys but where they are.

    pages `[pages, kv_heads, page, width]` with at least one key, table int64 `[batch, most_pages]`, all checked.
    """
    value = value_pages[:1, :, :1].expand(problem.batch, -1, problem.keys, -1)
    problem = replace(problem, query=problem.query.resolve_neg())
    place = partial(_place, problem, (key_pages, value_pages), table)
    return call.forward(problem, value, problem.dtype, place)[0]


def _place(
    problem: Problem, pools: tuple[Tensor, Tensor], table: Tensor, block: Block, sizes: Sizes, packed: bool
) -> Sizes:
    """Every key head of every sequence is a plane of its own; its keys are found through the sequence's line."""
    batch, heads, kv_heads = problem.batch, problem.heads, problem.kv_heads
    block.alive["pages"] = (*pools, table)
    block["PAGE_KEYS"] = pools[0].shape[2]
    of = [b * kv_heads + h * kv_heads // heads for b in range(batch) for h in range(heads)]
    for name, pages in zip(("KEY", "VALUE"), pools, strict=True):
        page, head, row, col = (step * pages.element_size() for step in pages.stride())
        start = pages.data_ptr()
        block.fill(
            {f"{name}_PAGE": page, f"{name}_ROW": row, f"{name}_COL": col, f"{name}_PLANES": batch * kv_heads}
        )
        block.table(f"{name}_SOURCE", [start + h * head for h in range(kv_heads)] * batch)
        block.table(f"{name}_TABLE", of)
    # Packing goes by planes of keys, the decoder by planes of queries.
    each, start, line = (
        kv_heads if packed else heads,
        table.data_ptr(),
        table.stride(0) * table.element_size(),
    )
    block.table("PAGES_TABLE", [start + b * line for b in range(batch) for _ in range(each)])
    return replace(sizes, key_planes=batch * kv_heads, value_planes=batch * kv_heads)
