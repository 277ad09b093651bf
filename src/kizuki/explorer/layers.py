"""A of a recording's layers, each opened when it is first looked at: opening reads it and checks it against the model's
own output, which for a long text takes a moment a layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .budget import LayerSize
from .page import PageError, numbers_of, size_of, unlike

if TYPE_CHECKING:
    from kizuki import AttentionMatrix
    from kizuki.models import Run

AT_ONCE = (
    1024  # tokens up to which all layers are opened at once: whatever is wrong is told before the page opens
)


class MissingError(PageError):
    """A layer cannot be shown; the message is one line and says why."""


class Layers(Mapping[int, "AttentionMatrix"]):
    """The layers of a run, by number. Safe between threads.

    `sizes` are those of the layers opened so far, `missing` the ones that cannot be opened, each with its reason.
    Layers that are found missing at once are not in the mapping; one found later stays and raises `MissingError`.

    Raises:
        PageError: the run holds no layer that can be opened, its layers have names, or the first is not one text.

    Time and memory: of each layer that is looked at, what `recording[layer]` takes.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._opened: dict[int, AttentionMatrix] = {}
        self._lock = threading.RLock()
        self.sizes: list[LayerSize] = []
        self.missing: list[dict[str, Any]] = []
        self._numbers = numbers_of(run)
        wanted, long = list(self._numbers), len(run.tokens.ids) > AT_ONCE
        if long:  # one from the middle, where the page opens
            wanted = wanted[len(wanted) // 2 :] + wanted[: len(wanted) // 2]
        while wanted:
            try:
                self[wanted.pop(0)]
            except MissingError:
                continue
            if long:
                break
        gone = {told["layer"] for told in self.missing}
        self._numbers = [layer for layer in self._numbers if layer not in gone]
        if not self._opened:
            why = self.missing[0]["reason"] if self.missing else "record at least one"
            raise PageError(f"run: its recording holds no layer; {why}")

    @property
    def opened(self) -> list[int]:
        """The layers opened so far, in their order."""
        with self._lock:
            return [layer for layer in self._numbers if layer in self._opened]

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, layer: object) -> bool:
        return layer in self._numbers  # without opening it

    def __getitem__(self, layer: int) -> AttentionMatrix:
        """A of a layer.

        Raises:
            KeyError: there is no such layer.
            MissingError: its A cannot be handed out, and why.
            PageError: it is not of one text, or unlike the layer opened first.
        """
        from kizuki.models import RecordError

        with self._lock:
            if layer in self._opened:
                return self._opened[layer]
            if layer not in self._numbers:
                raise KeyError(layer)
            for told in self.missing:
                if told["layer"] == layer:
                    raise MissingError(told["reason"])
            try:
                matrix = self._run.recording[layer]
            except RecordError as error:
                self.missing.append({"layer": layer, "reason": str(error)})
                raise MissingError(str(error)) from None
            size = size_of(layer, matrix, len(self._run.tokens.ids))
            if self.sizes and (why := unlike(size, self.sizes[0])) is not None:
                raise PageError(why)
            self.sizes.append(size)
            self._opened[layer] = matrix
            return matrix
