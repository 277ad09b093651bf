"""The atlas of a page that Python serves: what every row measures, head by head, in the background.

A pass over all layers takes a while for a long text, so the page opens without it and says how many layers are read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from . import page
from .budget import ROWS
from .heads import Head

if TYPE_CHECKING:
    from kizuki import AttentionMatrix

QUIET = 0.25  # seconds without a question before the next head is begun

Rows = Callable[[int, int], dict[str, page.Floats]]


def rows_of(head: Head) -> dict[str, page.Floats]:
    """What every row of a head measures, `[queries]` each, and what every key received, `[keys]`. Three passes."""
    from kizuki import Observe

    matrix, lane = head.alone, slice(head.lane, head.lane + 1)
    seen = matrix.observe(Observe(topk=1, entropy=True, received=True, distance=True))
    rule = matrix.visible_range() if head.direct else None
    rows = {
        name: page.floats(values[lane][0]) for name, values in page.statistics_of(matrix, rule, seen).items()
    }
    received = seen.received
    if received is None:
        raise page.PageError("run: a reading that was asked for is missing; report this as a fault of kizuki")
    return rows | {"received": page.floats(received[0, head.lane])}


class Reader:
    """Reads every head once, on a thread of its own that waits while somebody asks for something else."""

    def __init__(self, matrices: Mapping[int, AttentionMatrix], heads: int, rows: Rows, first: int) -> None:
        self.layers = list(matrices)
        self.heads = heads
        self.rows = rows
        self.order = sorted(
            self.layers, key=lambda layer: layer != first
        )  # what the page opens with is read first
        none: list[float | None] = [None] * heads
        self.means: dict[str, list[list[float | None]]] = {
            name: [list(none) for _ in self.layers] for name in page.MEANS
        }
        self.done: list[int] = []
        self.trouble = ""
        self._asking = 0
        self._last = 0.0
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def state(self) -> dict[str, Any]:
        """Means so far (None: not defined, or of a layer not `done`), the layers done, and what went wrong."""
        with self._changed:
            means = {name: [list(row) for row in rows] for name, rows in self.means.items()}
            return {"means": means, "read": len(self.done), "done": list(self.done), "trouble": self.trouble}

    def begin(self) -> None:
        """Start reading, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kizuki atlas", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop after the head that is being read."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While somebody's question is answered, no further head is begun."""
        with self._changed:
            self._asking += 1
        try:
            yield
        finally:
            with self._changed:
                self._asking -= 1
                self._last = time.monotonic()
                self._changed.notify_all()

    def _wait(self) -> None:
        with self._changed:
            while not self._stop.is_set():
                left = QUIET - (time.monotonic() - self._last)
                if self._asking == 0 and left <= 0:
                    return
                self._changed.wait(None if self._asking else left)

    def _work(self) -> None:
        try:
            for layer in self.order:
                made: dict[str, list[float | None]] = {name: [] for name in page.MEANS}
                for slot in range(self.heads):
                    self._wait()
                    if self._stop.is_set():
                        return
                    rows = self.rows(layer, slot)
                    kept = {name: torch.from_numpy(rows[name])[None] for name in ROWS}
                    for name, (mean,) in page.means_of(kept).items():
                        made[name].append(None if mean is None else float(f"{mean:.9g}"))
                with self._changed:
                    for name, values in made.items():
                        self.means[name][self.layers.index(layer)] = values
                    self.done.append(layer)
        except (
            ValueError,
            RuntimeError,
            MemoryError,
        ) as error:  # the page shows it; the thread has nobody else
            with self._changed:
                self.trouble = " ".join(str(error).split())
