"""How much memory a kernel works in, and how operands lie: what a call must know before a kernel is loaded.

Both sides read it, the Python that fills the argument block and the kernels that walk through the memory, and
nothing here needs a compiler.
"""

from __future__ import annotations

from .target import Target

PLAIN, BFLOAT16, FLOAT16 = 0, 1, 2  # how an operand lies in memory: as the kernel's own type, or narrower
SPAN_BYTES = 16  # for each panel of mr rows: the keys it sees
WAITING = (
    5  # vectors of scores that may wait: fewer than one is left from before, and four are looked at together
)


def _whole_lines(size: int) -> int:
    return -(-size // 64) * 64


def forward_scratch(t: Target, head_dim: int, value_panels: int) -> int:
    """Scratch of one thread of the forward kernel, in bytes.

    Packed queries, scores, two accumulators, running sums and maxima, two states a row, spans, which scores are seen.
    """
    numbers = t.block_q * (head_dim + t.block_k + 2 * value_panels * t.nr + t.lanes + 1 + 4)
    spans = t.block_q // t.mr * SPAN_BYTES
    return _whole_lines(numbers * t.size + spans + t.block_q * t.block_k)


def watch_scratch(t: Target, blocks: int, step: int, best: bool) -> int:
    """What observing adds to the scratch of a thread: a counter, two vectors and six numbers a row, a line of a grid.

    With `best`, the scores that wait for a place among the k best, and their keys. With sums over columns the running
    maximum and the weights of each of `step` rows for each key block.
    """
    numbers = t.block_q * (2 * t.lanes + 6) + t.block_k + t.lanes + blocks * step * (1 + t.block_k)
    numbers += t.block_q * 2 * WAITING * t.lanes if best else 0
    return _whole_lines(numbers * t.size) + t.block_q * 8


def key_rows(t: Target) -> int:
    """Rows of an accumulator of a key block: block_k rounded up to the register tile."""
    return -(-t.block_k // t.mr) * t.mr


def backward_scratch(t: Target, head_panels: int, value_panels: int, bent: bool) -> int:
    """Scratch of one thread of the backward kernel.

    Grids of scores, of dP and (if bent) of slopes; accumulators of a key block; spans.
    """
    # One more row: the last turned tile reads past the end.
    grids = (3 if bent else 2) * (t.block_q + 1) * t.block_k
    sums = key_rows(t) * (head_panels + value_panels) * t.nr
    return _whole_lines((grids + sums) * t.size + t.block_q // t.mr * SPAN_BYTES)


def padded(t: Target, rows: int) -> int:
    """Rows of the decoder rounded up to the register tile; a single row has a tile of its own."""
    return rows if rows == 1 else -(-rows // t.few) * t.few


def decode_scratch(t: Target, head_dim: int, value_dim: int, rows: int) -> int:
    """Scratch of one thread of the decoder.

    Packed queries, scores, running sums and maxima, row addresses, which scores are seen; of pairs also the values of
    a block without its NaN, and their addresses.
    """
    numbers = padded(t, rows) * (head_dim + t.block_k + t.lanes + 1)
    clean = t.block_k * (8 + 2 * value_dim) if t.pairs else 0
    tables = 3 * 8 * t.block_k + padded(t, rows) * t.block_k
    return _whole_lines(_whole_lines(numbers * t.size + 8) + tables + clean)


def partial_bytes(t: Target, rows: int, value_panels: int) -> int:
    """What a split of the decoder leaves behind: (maximum, total) and the accumulator of each row."""
    return _whole_lines(padded(t, rows) * (2 + value_panels * t.nr) * t.size)


def step_of(t: Target, kind: int) -> int:
    """The dimensions of a key that the decoder takes at once; head_dim is a multiple of it."""
    return 2 * t.lanes if kind == BFLOAT16 else t.lanes
