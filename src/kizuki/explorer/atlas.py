"""The atlas of a page that Python serves: what every row measures, head by head, in the background.

A pass over all layers takes a while for a long text, so the page opens without it and says how many layers are read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import page
from .budget import ROWS
from .heads import LSE_ROWS, Gone, Head, Stale, nobody_left
from .layers import MissingError

if TYPE_CHECKING:
    from kizuki import AttentionMatrix

QUIET = 0.25  # seconds without a question before the next head, or the next part of one, is begun
LOOK = 0.1  # seconds between two looks at whether somebody still waits

PART_PAIRS = (
    2**27
)  # pairs of query and key, about, that are read between two looks at who asks for something else

Between = Callable[[], None]
Rows = Callable[[int, int, Between], dict[str, page.Floats]]


class HeadRows:
    """What every row of a head measures (ROWS of budget.py), `[queries]` each, and what every key received, `[keys]`.

    A long causal head is read in parts of consecutive rows, so that whoever looks at it meanwhile does not wait for
    all of it; `read` goes on where it was left. Time: three passes over the head.
    """

    def __init__(self, head: Head) -> None:
        self.head = head
        self.done = 0  # rows
        self.received = np.zeros(head.keys)  # float64: added up part by part
        self.parts: list[dict[str, torch.Tensor]] = []
        self.rows: dict[str, page.Floats] | None = None
        self.lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes that are kept, once it is read."""
        return 4 * (len(ROWS) * self.head.queries + self.head.keys)

    def read(self, between: Between) -> dict[str, page.Floats]:
        """All of it. `between` is called before each part; what it raises leaves the parts that are read."""
        while not self.lock.acquire(timeout=LOOK):
            between()  # somebody else reads this head
        try:
            if self.rows is None:
                self.rows = self._in_parts(between) if self._divisible() else self._whole()
            return self.rows
        finally:
            self.lock.release()

    def _divisible(self) -> bool:
        head = self.head
        if not head.sliceable or head.stop is None or head.queries * head.keys <= PART_PAIRS:
            return False
        return bool((head.stop == torch.arange(1, head.queries + 1)).all())

    def _whole(self) -> dict[str, page.Floats]:
        head = self.head
        matrix, lane = head.alone, slice(head.lane, head.lane + 1)
        seen = matrix.observe(_wanted())
        rule = matrix.visible_range() if head.direct else None
        rows = {
            name: page.floats(values[lane][0])
            for name, values in page.statistics_of(matrix, rule, seen).items()
        }
        return rows | {"received": page.floats(page.asked(seen.received)[0, head.lane])}

    def _in_parts(self, between: Between) -> dict[str, page.Floats]:
        head = self.head
        while self.done < head.queries:
            between()
            rows = (
                max(1, PART_PAIRS // head.keys // LSE_ROWS) * LSE_ROWS
            )  # blocks whose L is then known as a whole
            stop = min(head.queries, self.done + rows)
            part = head.part(self.done, stop)
            seen = part.observe(_wanted())
            self.parts.append(
                {
                    "entropy": page.asked(seen.entropy)[0, 0],
                    "max": page.asked(seen.topk)[0][0, 0, :, 0],
                    "distance": page.asked(seen.distance)[0, 0],
                    "other_distance": page.distance_without_first(part)[0],
                }
            )
            received = page.asked(seen.received)[0, 0].cpu().numpy()
            self.received[: len(received)] += received
            head.learn(self.done, part)
            self.done = stop
        made = {name: page.floats(torch.cat([part[name] for part in self.parts])) for name in self.parts[0]}
        self.parts.clear()
        return made | {
            "first_key": page.floats(head.near(None)),
            "previous": page.floats(head.near(-1)),
            "received": self.received.astype(np.float32),
        }


def _wanted() -> Any:
    from kizuki import Observe

    return Observe(topk=1, entropy=True, received=True, distance=True)


class Reader:
    """Reads every head once, on a thread of its own that waits while somebody asks for something else.

    Args:
        matrices: A of each layer.
        heads: how many each has.
        rows: what reads one, `rows(layer, slot, between)`.
        first: the layer that is read first.
    """

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
        """Stop after the head, or the part of a long one, that is being read."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def between(self, gone: Gone) -> Between:
        """What a long reading calls between its parts: it waits while other questions are answered.

        It raises `Stale` once `gone()` says that nobody wants the reading, or this reader is closed.
        """

        def wait() -> None:
            self._wait(gone)
            if self._stop.is_set() or gone():
                raise Stale

        return wait

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While somebody's question is answered, no further head, and no further part of one, is begun."""
        with self._changed:
            self._asking += 1
        try:
            yield
        finally:
            with self._changed:
                self._asking -= 1
                self._last = time.monotonic()
                self._changed.notify_all()

    def _wait(self, gone: Gone) -> None:
        with self._changed:
            while not self._stop.is_set() and not gone():
                left = QUIET - (time.monotonic() - self._last)
                if self._asking == 0 and left <= 0:
                    return
                self._changed.wait(LOOK if self._asking else min(LOOK, left))

    def _work(self) -> None:
        between = self.between(nobody_left)
        try:
            for layer in self.order:
                made: dict[str, list[float | None]] = {name: [] for name in page.MEANS}
                for slot in range(self.heads):
                    between()
                    try:
                        rows = self.rows(layer, slot, between)
                    except (
                        MissingError
                    ):  # its means stay undefined, and the page names it among what is missing
                        made = {name: [None] * self.heads for name in page.MEANS}
                        break
                    kept = {name: torch.from_numpy(rows[name])[None] for name in ROWS}
                    for name, (mean,) in page.means_of(kept).items():
                        made[name].append(None if mean is None else float(f"{mean:.9g}"))
                with self._changed:
                    for name, values in made.items():
                        self.means[name][self.layers.index(layer)] = values
                    self.done.append(layer)
        except Stale:
            return  # closed
        except (
            ValueError,
            RuntimeError,
            MemoryError,
        ) as error:  # the page shows it; the thread has nobody else
            with self._changed:
                self.trouble = " ".join(str(error).split())
