"""From a Problem to a kernel's argument block: addresses, strides, masks, scratch; then the launch."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..masks import Dense
from ..problem import Problem, in_dtype, tile
from . import forward as forward_kernel
from . import launch
from . import read as read_kernel
from .layout import NAMES, SLOT
from .target import Target

KEPT = 1 << 24  # bytes of working memory a thread keeps for each purpose
CHUNK = 1 << 22  # mask or bias entries evaluated at once when a mask has no rule the kernel knows

Ints = npt.NDArray[np.int64]


_kept = threading.local()


def borrow(name: str, size: int) -> Tensor:
    """Memory that is kept from call to call, one a Python thread: fresh pages cost more than short kernels.

    While a call has it nobody else can: a mask's function may itself compute attention.
    """
    known: Tensor | None = _kept.__dict__.pop(name, None)
    if known is None or known.numel() < size:
        known = torch.empty(max(size, 4096), dtype=torch.uint8)
    return known


class Block:
    """The argument block of one call, and everything its addresses must keep alive."""

    def __init__(self) -> None:
        self.slots = np.zeros(len(NAMES), dtype=np.int64)
        # By name, so that what one chunk of queries needed goes when the next chunk's takes its place.
        self.alive: dict[str, object] = {}
        self.borrowed: dict[str, Tensor] = {}

    def __setitem__(self, name: str, value: int | float) -> None:
        if isinstance(value, float):
            value = struct.unpack("<q", struct.pack("<d", value))[0]
        self.slots[SLOT[name] // 8] = value

    def table(self, name: str, addresses: Ints) -> None:
        """Point slot `name` at an int64 array."""
        kept = np.ascontiguousarray(addresses, dtype=np.int64)
        self.alive[name] = kept
        self[name] = kept.ctypes.data

    def room(self, name: str, size: int) -> None:
        """`size` bytes of uninitialised working memory for slot `name`, aligned to 64 bytes."""
        made = borrow(name, size)
        self.borrowed[name] = made
        self[name] = made.data_ptr()

    def release(self) -> None:
        """Put the working memory back for the next call, unless it is more than a thread should keep."""
        for name, room in self.borrowed.items():
            if room.numel() <= KEPT:
                setattr(_kept, name, room)
        self.borrowed.clear()

    def run(self, kernel: str, target: Target, tasks: int, threads: int) -> None:
        if tasks == 0:
            return
        self["TASKS"], self["NEXT_TASK"], self["NEXT_SLOT"] = tasks, 0, 0
        launch.run(launch.kernel(kernel, target), self.slots.ctypes.data, min(threads, tasks))


def planes(tensor: Tensor, problem: Problem, heads: int) -> Ints:
    """The byte address of each plane `[batch, heads]` of a tensor with any rank and strides; nothing is copied."""
    rank = len(problem.lead) + 3
    full = tensor[(None,) * (rank - tensor.dim())]
    own = full.shape[-3]
    offsets = np.zeros((1,), dtype=np.int64)
    for length, size, stride in zip(problem.lead, full.shape[:-3], full.stride()[:-3], strict=True):
        steps = np.arange(length, dtype=np.int64) * (stride if size > 1 else 0)
        offsets = (offsets[:, None] + steps[None, :]).reshape(-1)
    # Grouped queries: head h reads head h·own/heads; nothing is repeated.
    head = np.arange(heads, dtype=np.int64) * own // heads * full.stride(-3)
    places = (offsets[:, None] + head[None, :]).reshape(-1)
    return tensor.data_ptr() + places * tensor.element_size()


def pair_planes(tensor: Tensor, problem: Problem) -> tuple[Ints, int, int]:
    """Plane addresses and (row, col) strides of a mask or bias that broadcasts to A; broadcast axes have stride 0."""
    rank = len(problem.lead) + 3
    full = tensor[(None,) * (rank - tensor.dim())]
    row = full.stride(-2) if full.shape[-2] > 1 else 0
    col = full.stride(-1) if full.shape[-1] > 1 else 0
    if full.shape[-3] == 1 and problem.heads > 1:
        full = full.expand(*full.shape[:-3], problem.heads, *full.shape[-2:])
    return planes(full, problem, problem.heads), row, col


def ready(problem: Problem, value: Tensor) -> tuple[Block, Target, int, Tensor, Tensor]:
    """An argument block with everything but the mask, its operands packed; and the output and lse to be filled."""
    target = launch.target()
    block = Block()
    batch, heads, queries, keys = problem.batch, problem.heads, problem.queries, problem.keys
    value_dim = value.shape[-1]
    output = torch.empty(batch, heads, queries, value_dim, dtype=torch.float32)
    lse = torch.empty(batch, heads, queries, dtype=torch.float64)
    block.alive["operands"] = (output, lse, problem.query, problem.key, value)
    panels = -(-value_dim // target.nr)
    grain = math.lcm(target.nr, 4 * target.lanes)
    width = min(target.block_k, -(-keys // grain) * grain)
    blocks = -(-keys // target.block_k)
    for name, number in (
        ("PLANES", batch * heads),
        ("QUERIES", queries),
        ("KEYS", keys),
        ("HEAD_DIM", problem.head_dim),
        ("VALUE_DIM", value_dim),
        ("KEY_BLOCKS", blocks),
        ("KEY_WIDTH", width),
        ("VALUE_PANELS", panels),
        ("QUERY_ROW", problem.query.stride(-2)),
        ("QUERY_COL", problem.query.stride(-1)),
        ("KEY_ROW", problem.key.stride(-2)),
        ("KEY_COL", problem.key.stride(-1)),
        ("VALUE_ROW", value.stride(-2)),
        ("VALUE_COL", value.stride(-1)),
    ):
        block[name] = number
    block["SCALE"] = float(problem.scale)
    block["SOFTCAP"] = float(problem.softcap or 0.0)
    block.table("QUERY_TABLE", planes(problem.query, problem, heads))
    # Planes that are the same memory (grouped heads, broadcast batch axes) are packed once.
    key_source, key_of = np.unique(planes(problem.key, problem, heads), return_inverse=True)
    value_source, value_of = np.unique(planes(value, problem, heads), return_inverse=True)
    for name, source, of in (("KEY", key_source, key_of), ("VALUE", value_source, value_of)):
        block[f"{name}_PLANES"] = len(source)
        block.table(f"{name}_SOURCE", source)
        block.table(f"{name}_TABLE", of.reshape(-1))
    block.room("KEY_PACKED", 4 * len(key_source) * blocks * width * problem.head_dim)
    block.room("VALUE_PACKED", 4 * len(value_source) * blocks * width * panels * target.nr)
    block.room("VALUE_ODD", len(value_source) * blocks)
    if problem.sinks is not None:
        sinks = in_dtype(problem.sinks.detach(), torch.float32).repeat(batch).contiguous()
        block.alive["sinks"] = sinks
        block["SINK_TABLE"] = sinks.data_ptr()
    threads = launch.threads()
    block.run("pack", target, (len(key_source) + len(value_source)) * blocks, threads)
    size = forward_kernel.scratch_bytes(target, problem.head_dim, panels)
    block["SCRATCH_BYTES"] = size
    block.room("SCRATCH", threads * size)
    return block, target, threads, output, lse


@dataclass(frozen=True)
class Readings:
    """What one reading pass gives, float32 `[batch, heads, queries]`; top scores, top keys, column sums if asked."""

    entropy: Tensor
    distance: Tensor
    peak: Tensor
    top_score: Tensor
    best_scores: Tensor  # [batch, heads, queries, k], −inf where there is none
    best_keys: Tensor  # int64, −1 where there is none
    received: Tensor  # [batch, heads, keys], 0 keys wide if not asked for


GROUPS = (
    16  # of query blocks: each sums its own columns, so that the order of the sum never depends on threads
)


def read(problem: Problem, lse: Tensor, k: int = 0, received: bool = False) -> Readings:
    """One pass over the scores given the lse: entropy, distance, largest weight and score, top k, received."""
    block, target, threads, output, own_lse = ready(problem, problem.key.new_zeros(problem.keys, 0))
    own_lse.copy_(lse)
    count, queries = problem.batch * problem.heads, problem.queries
    shape = (problem.batch, problem.heads, queries)
    stats = torch.zeros(*shape, 4)
    stats[..., 3] = -math.inf
    best = torch.full((*shape, k), -math.inf)
    keys = torch.full((*shape, k), -1, dtype=torch.int64)
    blocks = -(-problem.keys // target.block_k)
    groups = max(1, min(GROUPS, -(-queries // target.block_q)))
    line = blocks * target.block_k
    sums = torch.zeros(count, groups, line if received else 0)
    block.alive["readings"] = (stats, best, keys, sums)
    block["TOP_COUNT"], block["GROUPS"] = k, groups
    block["RECEIVED"] = sums.data_ptr() if received else 0
    size = read_kernel.scratch_bytes(target, problem.head_dim)
    block["SCRATCH_BYTES"] = size
    block.room("SCRATCH", threads * size)
    rank = np.arange(count, dtype=np.int64) * queries
    for start, stop in chunks(problem):
        point(block, problem, output, own_lse, start, stop)
        # A query's own position is counted from the right end when there are fewer queries than keys.
        block["ROW_OFFSET"] = start + max(0, problem.keys - queries)
        block.table("STATS_TABLE", stats.data_ptr() + (rank + start) * 16)
        block.table("TOP_SCORES_TABLE", best.data_ptr() + (rank + start) * k * 4)
        block.table("TOP_KEYS_TABLE", keys.data_ptr() + (rank + start) * k * 8)
        block.run("read", target, count * groups, threads)
    block.release()
    entropy, distance, peak, top_score = stats.unbind(-1)
    wide = problem.keys if received else 0
    return Readings(
        entropy,
        distance,
        peak,
        top_score,
        best_scores=best,
        best_keys=keys,
        received=sums.sum(1)[:, :wide].reshape(*shape[:2], wide),
    )


def chunks(problem: Problem) -> Iterator[tuple[int, int]]:
    """Ranges of queries for which the kernel can be aimed at once.

    All of them, unless a mask must be evaluated (not a range, not a tensor) or a bias converted: then so many
    that what is evaluated stays below `CHUNK` entries.
    """
    plain_mask = problem.residual is None or isinstance(problem.residual, Dense)
    plain_bias = problem.bias is None or problem.bias.dtype is torch.float32
    step = problem.queries
    if not (plain_mask and plain_bias):
        step = CHUNK // max(1, problem.batch * problem.heads * problem.keys)
        block_q = launch.target().block_q
        step = step // block_q * block_q if step > block_q else step  # whole tasks
    step = max(1, step)
    for start in range(0, problem.queries, step):
        yield start, min(start + step, problem.queries)


def forward(problem: Problem, value: Tensor) -> tuple[Tensor, Tensor]:
    """`(A @ value, lse)`: float32 `[batch, heads, queries, value_dim]`, float64 `[batch, heads, queries]`."""
    block, target, threads, output, lse = ready(problem, value)
    for start, stop in chunks(problem):
        point(block, problem, output, lse, start, stop)
        query_blocks = -(-(stop - start) // target.block_q)
        block.run("forward", target, problem.batch * problem.heads * query_blocks, threads)
    block.release()
    return output, lse


def point(block: Block, problem: Problem, output: Tensor, lse: Tensor, start: int, stop: int) -> None:
    """Aim the block at queries start … stop: shifted addresses, and the mask and bias of those rows."""
    heads, residual = problem.heads, problem.residual
    block["QUERIES"] = stop - start
    at = planes(problem.query, problem, heads) + start * problem.query.stride(-2) * 4
    block.table("QUERY_TABLE", at)
    count = problem.batch * heads
    size = output.shape[-1] * 4
    rank = np.arange(count, dtype=np.int64)
    block.table("OUTPUT_TABLE", output.data_ptr() + (rank * problem.queries + start) * size)
    block.table("LSE_TABLE", lse.data_ptr() + (rank * problem.queries + start) * 8)
    if problem.bounds is not None:
        for name, edge in (("FIRST", problem.bounds.first), ("STOP", problem.bounds.stop)):
            edge = edge.contiguous()
            block.alive[f"{name} edge"] = edge
            shaped = edge.view(
                *(problem.lead if edge.shape[0] > 1 else (1,) * len(problem.lead)), *edge.shape[1:], 1
            )
            table = planes(shaped.expand(*shaped.shape[:-3], heads, *shaped.shape[-2:]), problem, heads)
            block.table(f"{name}_TABLE", table + start * 8)
    if residual is not None:
        if isinstance(residual, Dense):
            mask = residual.tensor
            shift = start
        else:
            mask = tile(residual, problem, slice(start, stop), slice(0, problem.keys))
            mask = mask.reshape(
                *(problem.lead if mask.shape[0] > 1 else (1,) * len(problem.lead)), *mask.shape[1:]
            )
            shift = 0
        block.alive["mask"] = mask
        table, row, col = pair_planes(mask, problem)
        block.table("MASK_TABLE", table + shift * row)
        block["MASK_ROW"], block["MASK_COL"] = row, col
    if problem.bias is not None:
        bias, shift = problem.bias.detach().resolve_neg(), start
        if bias.dtype is not torch.float32:
            if bias.shape[-2:-1] != (1,) and bias.dim() > 1:
                bias, shift = bias[..., start:stop, :], 0
            bias = in_dtype(bias, torch.float32)
        block.alive["bias"] = bias
        table, row, col = pair_planes(bias, problem)
        block.table("BIAS_TABLE", table + shift * row * 4)
        block["BIAS_ROW"], block["BIAS_COL"] = row, col
