"""The decoder on keys and values in pages, read where they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import Problem
from . import custom, launch
from . import decode as kernel
from .block import KINDS
from .call import FEW_ROWS, describe, point, rows_of, scratch, shared_heads
from .target import SPLIT


def reads(problem: Problem, value: Tensor) -> bool:
    """Whether the decoder can run the problem: whole vectors across, few heads to a key head."""
    target = launch.target(problem.accumulate_dtype)
    across = problem.head_dim % kernel.step_of(target, KINDS[problem.dtype]) or value.shape[-1] % target.lanes
    flat = problem.key.stride(-1) == 1 and value.stride(-1) == 1
    return flat and not across and shared_heads(problem, value) <= FEW_ROWS


def forward(problem: Problem, key_pages: Tensor, value_pages: Tensor, table: Tensor) -> Tensor:
    """`A @ value`; the problem's key says everything about the keys but where they are.

    pages `[pages, kv_heads, page, width]`, table int64 `[batch, most_pages]`, checked.
    """
    value = value_pages[:1, :, :1].expand(problem.batch, -1, problem.keys, -1)
    block, target, sizes = describe(problem, value)
    planes, queries, threads = problem.batch * problem.heads, problem.queries, launch.threads()
    output = torch.empty(problem.batch, problem.heads, queries, value.shape[-1], dtype=problem.dtype)
    lse = torch.empty(problem.batch, problem.heads, queries, dtype=torch.float64)
    block["OUT_KIND"] = KINDS[problem.dtype]
    block.alive["table"] = table
    block["PAGE_KEYS"] = key_pages.shape[2]
    for name, pages in (("KEY", key_pages), ("VALUE", value_pages)):
        page, _, row, _ = (step * pages.element_size() for step in pages.stride())
        block[f"{name}_PAGE"], block[f"{name}_ROW"] = page, row
    lines = rows_of(table, problem.batch, table.stride(0) * 8, 0)
    block.table("PAGES_TABLE", [int(line) for line in lines for _ in range(problem.heads)])
    group, splits = shared_heads(problem, value), max(1, -(-sizes.blocks // SPLIT))
    step, units = max(1, FEW_ROWS // group), planes // group
    size = output.shape[-1] * output.element_size()
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        few = group * (stop - start)
        partial = kernel.partial_bytes(target, few, sizes.value_panels)
        block.fill({"GROUP": group, "SPLITS": splits, "PARTIAL_BYTES": partial})
        block.room("PARTIAL", units * splits * partial)
        block.table("FINISHED", [0] * units)
        scratch(block, threads, kernel.scratch_bytes(target, problem.head_dim, few))
        point(block, problem, start, stop)
        block.table("OUTPUT_TABLE", rows_of(output, planes, queries * size, start * size))
        block.table("LSE_TABLE", rows_of(lse, planes, queries * 8, start * 8))
        block.run("decode", target, units * splits, threads)
    block.release()
    custom.check(block)
    return output
