"""Pictures of one head: blocks of 2^zoom × 2^zoom cells, their mass or their peak, computed when looked at.

*mass* of a pixel is the mean over its queries of the sum over its keys, so that a whole pixel row sums to 1; *peak* is
the largest weight in it. No array here grows as queries × keys: at most `heads.CELLS` weights are held at a time.

Near zooms are computed tile by tile. Far zooms come from one pass over the head, made band by band: the picture one
zoom nearer than the one that is shown first is kept, and every farther one is halved from it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .heads import CELLS, Gone, Head, Stale, nobody_left

Floats = NDArray[np.float32]

TILE = 256  # pixels a side
BASE = 1024  # pixels a side, at most, of the picture that is shown first
PASS_CELLS = 2**25  # cells of a band, about: what is computed between two looks at who still waits


def base_zoom(length: int) -> int:
    """The least zoom at which `length` cells fit into BASE pixels; engine.js has the same.

    >>> [base_zoom(n) for n in (1, 1024, 1025, 100_000)]
    [0, 0, 1, 7]
    """
    zoom = 0
    while -(-length // 2**zoom) > BASE:
        zoom += 1
    return zoom


@dataclass(frozen=True)
class Picture:
    """Pixels `[rows, cols]`, and Σ_j a_ij over the keys that were asked for of every row, `[queries]`."""

    mass: Floats
    peak: Floats
    sums: NDArray[np.float64]


def pooled(
    head: Head, rows: tuple[int, int], keys: tuple[int, int], block: int, gone: Gone = nobody_left
) -> Picture:
    """Rows and keys `(first, stop)` in blocks of `block` cells a side, counted from the first of each.

    Raises `Stale` between two chunks when `gone()` says so. Time: one product of q and k over the visible keys.
    """
    (i0, i1), (j0, j1) = rows, keys
    shape = -(-(i1 - i0) // block), -(-(j1 - j0) // block)
    mass, peak = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    sums = np.zeros(i1 - i0)
    if head.direct:
        head.lse(i0, i1, gone)  # with all threads, before the small parts
    small = (i1 - i0) * (j1 - j0) <= CELLS
    with alone() if small else nullcontext():
        _fill(head, rows, keys, block, gone, mass, peak, sums)
    mass /= counts(i1 - i0, block)[:, None]
    return Picture(mass, peak, sums)


@contextmanager
def alone() -> Iterator[None]:
    """torch works with one thread in here: a millisecond's work takes a hundred where threads wait for each other."""
    threads = torch.get_num_threads()  # of this thread; others have their own
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fill(
    head: Head,
    rows: tuple[int, int],
    keys: tuple[int, int],
    block: int,
    gone: Gone,
    mass: Floats,
    peak: Floats,
    sums: NDArray[np.float64],
) -> None:
    """Sums and largest weights of the blocks, chunk by chunk."""
    (i0, i1), (j0, j1) = rows, keys
    for at, end in head.chunks(i0, i1, j1 - j0, block):
        if gone():
            raise Stale
        low, high = head.span(at, end, j0, j1)
        if high <= low:
            continue
        left, right = (low - j0) // block, -(-(high - j0) // block)
        a, b = j0 + left * block, min(j1, j0 + right * block)
        weights = head.weights(at, end, a, b, gone)
        sums[at - i0 : end - i0] = weights.sum(-1).numpy()  # summed pairwise
        if block > 1:
            if (b - a) % block:
                weights = F.pad(weights, (0, -(b - a) % block))
            added, largest = _joined(weights, block, torch.sum), _joined(weights, block, torch.amax)
        else:
            added = largest = weights
        # A chunk is whole pixel rows, or a part of one: either way it is added to what is there.
        target = slice((at - i0) // block, (end - 1 - i0) // block + 1), slice(left, right)
        mass[target] += added.numpy()
        np.maximum(peak[target], largest.numpy(), out=peak[target])  # a NaN stays


def _joined(weights: Tensor, block: int, reduce: Callable[..., Tensor]) -> Tensor:
    """Blocks of the weights reduced to a number each. Rows first: whole lines are joined, and little is left."""
    if len(weights) > block:
        if len(weights) % block:
            weights = F.pad(weights, (0, 0, 0, -len(weights) % block))
        flat = reduce(weights.view(-1, block, weights.shape[1]), dim=1)
    else:
        flat = reduce(weights, dim=0, keepdim=True)
    return reduce(flat.view(len(flat), -1, block), dim=2)


def counts(queries: int, block: int) -> Floats:
    """How many queries are behind each pixel row."""
    made = np.full(-(-queries // block), block, np.float32)
    if queries % block:
        made[-1] = queries % block
    return made


def halved(mass: Floats, peak: Floats, behind: Floats) -> tuple[Floats, Floats, Floats]:
    """The next farther picture, 2 × 2 pixels to one, and the queries behind its rows; `behind` those of these rows."""
    if len(mass) % 2:
        mass, peak = (np.pad(picture, ((0, 1), (0, 0))) for picture in (mass, peak))
        behind = np.pad(behind, (0, 1))
    if mass.shape[1] % 2:
        mass, peak = (np.pad(picture, ((0, 0), (0, 1))) for picture in (mass, peak))
    grown = behind[0::2] + behind[1::2]
    tall = mass[0::2] * (behind[0::2] / grown)[:, None] + mass[1::2] * (behind[1::2] / grown)[:, None]
    top = np.maximum(peak[0::2], peak[1::2])  # a NaN stays
    return tall[:, 0::2] + tall[:, 1::2], np.maximum(top[:, 0::2], top[:, 1::2]), grown


class Far:
    """The far zooms of one head: one pass over it, as far as it has come.

    `zoom` is that of the picture the page shows first; the one that is kept is a zoom nearer, so that zooming in once
    costs nothing. Rows whose L the pass does not confirm are blank (NaN) and named in `bad`.
    """

    def __init__(self, head: Head) -> None:
        self.head = head
        self.zoom = base_zoom(max(head.queries, head.keys))
        self.fine = max(0, self.zoom - 1)
        self.block = 2**self.fine
        shape = -(-head.queries // self.block), -(-head.keys // self.block)
        self.mass, self.peak = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.behind = counts(head.queries, self.block)
        self.done = 0  # fine pixel rows
        self.bad: list[int] = []
        self.worst = 0.0
        self.lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return self.mass.nbytes + self.peak.nbytes

    @property
    def whole(self) -> bool:
        return self.done == len(self.mass)

    def band(self, row: int, gone: Gone = nobody_left) -> tuple[Floats, Floats, list[int], float]:
        """Pixel rows of the first picture from `row` on: mass, peak, the refused rows among them, the largest |ln Σ|.

        At least one pixel row, more where they are there already.
        """
        step = 1 if self.zoom == self.fine else 2
        with self.lock:
            while self.done < min(len(self.mass), step * (row + 1)):
                self._advance(step, gone)
            first, stop = step * row, self.done
            mass, peak = self.mass[first:stop], self.peak[first:stop]
            if step == 2:
                mass, peak, _ = halved(mass, peak, self.behind[first:stop])
            begin, end = first * self.block, stop * self.block
            return mass, peak, [i for i in self.bad if begin <= i < end], self.worst

    def _advance(self, step: int, gone: Gone) -> None:
        """One more band, of about PASS_CELLS cells."""
        head, block = self.head, self.block
        many = max(1, PASS_CELLS // max(1, head.keys * block * step)) * step
        i0, i1 = self.done * block, min(head.queries, (self.done + many) * block)
        made = pooled(head, (i0, i1), (0, head.keys), block, gone)
        error = head.sum_errors(i0, i1, made.sums)
        refused = ~(error <= head.tolerances(i0, i1).numpy())
        bad = (i0 + np.flatnonzero(refused)).tolist()
        blank(made, bad, i0, block)
        stop = self.done + len(made.mass)
        self.mass[self.done : stop], self.peak[self.done : stop] = made.mass, made.peak
        self.bad += bad
        self.worst = float(np.fmax.reduce(error, initial=self.worst))  # a NaN is in bad, and no largest
        self.done = stop

    def tile(self, zoom: int, row: int, col: int, gone: Gone = nobody_left) -> tuple[Floats, Floats]:
        """Mass and peak of tile (row, col) of TILE × TILE pixels, less at the ends. From the pass where it has come."""
        head = self.head
        if zoom >= self.fine and self.whole:
            times = zoom - self.fine
            side = TILE << times
            rows, cols = slice(row * side, (row + 1) * side), slice(col * side, (col + 1) * side)
            mass, peak, behind = self.mass[rows, cols], self.peak[rows, cols], self.behind[rows]
            for _ in range(times):
                mass, peak, behind = halved(mass, peak, behind)
            return mass, peak
        block = 2**zoom
        side = TILE * block
        rows_, keys = (
            (at * side, min(length, (at + 1) * side))
            for at, length in ((row, head.queries), (col, head.keys))
        )
        made = pooled(head, rows_, keys, block, gone)
        blank(made, self.bad, rows_[0], block)
        return made.mass, made.peak


def blank(picture: Picture, bad: list[int], i0: int, block: int) -> None:
    """NaN, which nothing paints, over every pixel row that holds a refused row."""
    for i in bad:
        r = (i - i0) // block
        if 0 <= r < len(picture.mass):
            picture.mass[r] = picture.peak[r] = np.nan
