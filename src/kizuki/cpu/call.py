"""From a Problem to a kernel's argument block: addresses, strides, masks, scratch; then the launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..mask import Dense, split
from ..problem import Problem, in_dtype
from . import again, equip, launch
from .block import KINDS, Block, pair_planes, planes, rows_of, shifted, sources
from .sizes import decode_scratch, forward_scratch, partial_bytes, step_of
from .target import SPLIT, Target
from .watch import Watch

FEW_ROWS = 16  # query rows that share a key up to which reading it where it lies beats packing it
LOCAL = 1 << 25  # bytes of one plane's panels from which on they are not kept
CHUNK = 1 << 22  # mask or bias entries evaluated at once when a mask has no rule the kernel knows


@dataclass(frozen=True)
class Sizes:
    """What the working memory of a call is made of."""

    key_planes: int
    value_planes: int
    blocks: int  # of keys
    width: int  # of a key block
    head_panels: int
    value_panels: int


def describe(problem: Problem, value: Tensor, target: Target) -> tuple[Block, Sizes]:
    """An argument block with the operands and what is the same for every query; not yet the mask."""
    dtype = problem.accumulate_dtype
    block = Block()
    batch, heads, keys = problem.batch, problem.heads, problem.keys
    query, key, value_dim = problem.query, problem.key, value.shape[-1]
    block.alive["operands"] = (query, key, value)
    # Planes that are the same memory (grouped heads, broadcast batch axes) are packed once.
    key_source, key_of = sources(key, problem, heads)
    value_source, value_of = sources(value, problem, heads)
    grain = math.lcm(target.nr, 4 * target.lanes)
    sizes = Sizes(
        key_planes=len(key_source),
        value_planes=len(value_source),
        blocks=-(-keys // target.block_k),
        width=min(target.block_k, -(-keys // grain) * grain),
        head_panels=-(-problem.head_dim // target.nr),
        value_panels=-(-value_dim // target.nr),
    )
    (query_row, query_col), (key_row, key_col) = query.stride()[-2:], key.stride()[-2:]
    (value_row, value_col), size, value_size = value.stride()[-2:], query.element_size(), value.element_size()
    block.fill(
        {
            "KIND": KINDS[query.dtype],
            "VALUE_KIND": KINDS[value.dtype],
            "PLANES": batch * heads,
            "KEYS": keys,
            "HEAD_DIM": problem.head_dim,
            "VALUE_DIM": value_dim,
            "KEY_BLOCKS": sizes.blocks,
            "KEY_WIDTH": sizes.width,
            "VALUE_PANELS": sizes.value_panels,
            "QUERY_ROW": query_row * size,
            "QUERY_COL": query_col * size,
            "KEY_ROW": key_row * size,
            "KEY_COL": key_col * size,
            "VALUE_ROW": value_row * value_size,
            "VALUE_COL": value_col * value_size,
            "KEY_PLANES": sizes.key_planes,
            "VALUE_PLANES": sizes.value_planes,
        }
    )
    block["SCALE"] = float(problem.scale)
    if problem.softcap is not None:
        block["SOFTCAP"] = float(problem.softcap)
    block.table("KEY_SOURCE", key_source)
    block.table("KEY_TABLE", key_of)
    block.table("VALUE_SOURCE", value_source)
    block.table("VALUE_TABLE", value_of)
    if problem.sinks is not None:
        sinks = in_dtype(problem.sinks.detach(), dtype).repeat(batch).contiguous()
        block.alive["sinks"] = sinks
        block["SINK_TABLE"] = sinks.data_ptr()
    equip.equip(block, problem)
    return block, sizes


def pack(
    block: Block, target: Target, sizes: Sizes, head_dim: int, threads: int, fused: bool = False
) -> None:
    """Keys and values into panels; `fused`: only the room for them, one key block for each thread.

    So also where the panels of one plane would be larger than `LOCAL`: each thread then packs a key block when it
    comes to it, which takes a tenth longer and no memory.
    """
    per_plane = (
        sizes.width * target.steps(head_dim) + target.steps(sizes.width) * sizes.value_panels * target.nr
    )
    whole = not block.get("PAGES_TABLE")  # the pack kernel alone follows a table of pages
    local = whole and not fused and target.size * sizes.blocks * per_plane >= LOCAL
    own = fused or local
    tall = target.size * (1 if own else sizes.blocks)
    keys, values = (threads, threads) if own else (sizes.key_planes, sizes.value_planes)
    block.room("KEY_PACKED", tall * sizes.width * keys * target.steps(head_dim))
    block.room("VALUE_PACKED", tall * target.steps(sizes.width) * values * sizes.value_panels * target.nr)
    block.room("VALUE_ODD", values * (1 if own else sizes.blocks))
    block["FUSED"] = 2 if local else int(fused)
    if own:
        return
    block.run("pack", target, (sizes.key_planes + sizes.value_planes) * sizes.blocks, threads)


def scratch(block: Block, threads: int, size: int) -> None:
    """`size` bytes for each thread."""
    block["SCRATCH_BYTES"] = size
    block.room("SCRATCH", threads * size)


def chunks(problem: Problem) -> Iterator[tuple[int, int]]:
    """Ranges of queries for which the kernel can be aimed at once.

    All of them, unless a mask must be evaluated (not a range, not a tensor) or a bias converted: then so many
    that what is evaluated stays below `CHUNK` entries.
    """
    rest = split(problem.residual)[1]  # a function that is compiled into the kernel needs no evaluating
    plain_mask = rest is None or isinstance(rest, Dense)
    plain_bias = problem.bias is None or problem.bias.dtype is problem.accumulate_dtype
    step = problem.queries
    if not (plain_mask and plain_bias):
        step = CHUNK // max(1, problem.batch * problem.heads * problem.keys)
        block_q = launch.target(problem.accumulate_dtype).block_q
        step = step // block_q * block_q if step > block_q else step  # whole tasks
    step = max(1, step)
    for start in range(0, problem.queries, step):
        yield start, min(start + step, problem.queries)


def forward(
    problem: Problem,
    value: Tensor,
    out_dtype: torch.dtype,
    place: Callable[[Block, Sizes, bool], Sizes] | None = None,
    watch: Watch | None = None,
) -> tuple[Tensor, Tensor]:
    """`(A @ value, lse)`: `[batch, heads, queries, value_dim]` in `out_dtype`, float64 `[batch, heads, queries]`.

    The lse is not computed where the problem is of a `kind`: nobody asks for it, and its logarithms take time.
    `place` writes down where keys and values are when it is not where `problem.key` and `value` say (paged.py).
    `watch` holds the readings to fold in, and then what they are.
    """
    planes_, queries, threads = problem.batch * problem.heads, problem.queries, launch.threads()
    output = torch.empty(problem.batch, problem.heads, queries, value.shape[-1], dtype=out_dtype)
    lse = torch.empty(
        problem.batch, problem.heads, queries if problem.kind is None else 0, dtype=torch.float64
    )
    if not planes_ * queries:
        return output, lse
    target = mixing_target(problem, value)
    block, sizes = describe(problem, value, target)
    block["OUT_KIND"] = KINDS[out_dtype]
    few = shared_rows(problem, value) if watch is None else 0
    if place is not None:
        sizes = place(block, sizes, few == 0)
    if few:
        # A mask or bias that must be evaluated is so for all of the few queries at once: their keys are O(n).
        steps, kernel, fused = [(0, queries)], "decode", False
        block["GROUP"] = few // queries
        dims = (problem.head_dim, value.shape[-1])
        tasks = share_keys(block, target, sizes, dims, planes_ * queries // few, few)
    else:
        # Where nobody else reads a plane's keys, its one task packs them itself: they never leave its cache.
        own = sizes.key_planes == sizes.value_planes == planes_ and place is None
        enough = queries <= target.block_q or (queries <= 2 * target.block_q and planes_ >= 4 * threads)
        fused = own and sizes.blocks == 1 and enough and watch is None
        pack(block, target, sizes, problem.head_dim, threads, fused)
        size = forward_scratch(target, problem.head_dim, sizes.value_panels)
        steps, kernel, tasks = list(chunks(problem)), "forward", planes_ if fused else 0
        if watch is not None:
            more, steps = watch.begin(block, target, sizes.blocks, size, steps)
            size, kernel = size + more, "observe"
        scratch(block, threads, size)
    size = output.shape[-1] * output.element_size()
    for start, stop in steps:
        point(block, problem, start, stop)
        block.table("OUTPUT_TABLE", rows_of(output, planes_, queries * size, start * size))
        if problem.kind is None:
            block.table("LSE_TABLE", rows_of(lse, planes_, queries * 8, start * 8))
        lots = 1 if fused else -(-(stop - start) // target.block_q)
        if watch is not None:
            lots = watch.point(block, start, stop)
        block["GROUPS"] = lots
        block.run(kernel, target, tasks or planes_ * lots, threads)
    block.release()
    equip.check(block)
    if problem.kind is not None:
        again.remember(problem.kind, block, (problem.query, problem.key, value), output)
    return output, lse


def share_keys(
    block: Block, target: Target, sizes: Sizes, dims: tuple[int, int], units: int, rows: int
) -> int:
    """Working memory of the decoder for `units` groups of `rows` query rows that share their keys; returns its tasks.

    `dims`: head_dim and value_dim.
    """
    splits, partial = max(1, -(-sizes.blocks // SPLIT)), partial_bytes(target, rows, sizes.value_panels)
    block.fill({"SPLITS": splits, "PARTIAL_BYTES": partial})
    block.room("PARTIAL", units * splits * partial)
    block.table("FINISHED", [0] * units)
    scratch(block, launch.threads(), decode_scratch(target, *dims, rows))
    return units * splits


def mixing_target(problem: Problem, value: Tensor) -> Target:
    """The target whose kernels compute `A @ value`: that of pairs where both are bfloat16 and it is worth it."""
    target = launch.target(problem.accumulate_dtype)
    return target.paired if target.dot and problem.dtype is value.dtype is torch.bfloat16 else target


def shared_heads(problem: Problem, value: Tensor) -> int:
    """How many query heads next to each other share both their keys and their values."""
    own = value.shape[-3] if value.dim() > 2 else 1
    return math.gcd(problem.heads // max(1, problem.kv_heads), problem.heads // max(1, own))


def shared_rows(problem: Problem, value: Tensor) -> int:
    """How many query rows share each key where the decoder runs the problem; 0 where packing is worth its pass.

    A matter of speed alone: both kernels give a row the same bits.
    """
    if not 0 < problem.queries <= FEW_ROWS or not decodes(problem, value):
        return 0
    rows = shared_heads(problem, value) * problem.queries
    return rows if rows <= FEW_ROWS else 0


def decodes(problem: Problem, value: Tensor) -> bool:
    """Whether the decoder can read keys and values where they lie."""
    target = launch.target(problem.accumulate_dtype)
    step = step_of(target, KINDS[problem.dtype])
    if problem.head_dim % step or value.shape[-1] % target.lanes:
        return False
    return problem.key.stride(-1) == 1 and (not value.shape[-1] or value.stride(-1) == 1)


def point(block: Block, problem: Problem, start: int, stop: int) -> None:
    """Aim the block at queries start … stop: shifted addresses, and the mask and bias of those rows."""
    heads, residual, query = problem.heads, split(problem.residual)[1], problem.query
    block["QUERIES"], block["FIRST_QUERY"] = stop - start, start
    shift = start * query.stride(-2) * query.element_size()
    block.table("QUERY_TABLE", shifted(planes(query, problem, heads), shift))
    if problem.mask is not None and problem.bounds is not None:
        for name, edge in (("FIRST", problem.bounds.first), ("STOP", problem.bounds.stop)):
            edge = edge.contiguous()
            block.alive[f"{name} edge"] = edge
            lead = problem.lead if edge.shape[0] > 1 else (1,) * len(problem.lead)
            table = planes(edge.view(*lead, *edge.shape[1:], 1), problem, heads)
            block.table(f"{name}_TABLE", shifted(table, start * 8))
    if residual is not None:
        if isinstance(residual, Dense):
            mask = residual.tensor
            shift = start
        else:
            mask = residual.tile(problem, slice(start, stop), slice(0, problem.keys))
            mask = mask.reshape(
                *(problem.lead if mask.shape[0] > 1 else (1,) * len(problem.lead)), *mask.shape[1:]
            )
            shift = 0
        block.alive["mask"] = mask
        table, row, col = pair_planes(mask, problem)
        block.table("MASK_TABLE", shifted(table, shift * row))
        block["MASK_ROW"], block["MASK_COL"] = row, col
    if problem.bias is not None:
        bias, shift = problem.bias.detach().resolve_neg(), start
        if bias.dtype is not problem.accumulate_dtype:
            if bias.dim() > 1 and bias.shape[-2] != 1:
                bias, shift = bias[..., start:stop, :], 0
            bias = in_dtype(bias, problem.accumulate_dtype)
        block.alive["bias"] = bias
        table, row, col = pair_planes(bias, problem)
        block.table("BIAS_TABLE", shifted(table, shift * row))
        block["BIAS_ROW"], block["BIAS_COL"] = row, col
