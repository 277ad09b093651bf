"""The page's interventions: a head, a key or a weight is taken away from the live model, and its answer compared.

A weight says where a head reads; this is the question behind it. What is measured, and its control, is
`kizuki.models.causes.cause`; here stand the questions that a page may ask of it, and the bounds of the work.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from .heads import Gone, Stale

if TYPE_CHECKING:
    from kizuki.models import Run, Source, Tokens
    from kizuki.models.causes import Edit, Effect

KINDS = ("zero", "mean", "key", "key_everywhere", "row")
CONTROLS = 10  # random others beside one intervention, at most: 2 + CONTROLS passes of the model
STEPS = 1000  # a weight is asked for in thousandths
WAITING = 2  # interventions that are measured or wait for it; the server's other workers stay free
LOOK_AGAIN = 0.05  # seconds between two looks at whether somebody still waits


class BusyError(ValueError):
    """Enough interventions are under way; the message is one line."""


class Causes:
    """Interventions on the model that a run came from, one at a time: an intervention changes the model while it runs.

    Time and memory: those of `kizuki.models.causes.cause`, at most 2 + CONTROLS passes over the text.
    """

    def __init__(self, source: Source, tokens: Tokens) -> None:
        self.source, self.tokens = source, tokens
        self._places = threading.Semaphore(WAITING)
        self._one = threading.Lock()

    def effect(self, edit: Edit, position: int, controls: int, gone: Gone) -> Effect:
        """Measure one intervention; between two passes it stops for whoever is gone.

        Raises:
            Stale: nobody waits for it any more.
            BusyError: one is being measured, and one waits already.
            CauseError, RecordError: the model or the text cannot have this intervention. One line each.
        """
        from kizuki.models.causes import cause

        def look(stage: str = "", done: int = 0, total: int = 0) -> None:
            if gone():
                raise Stale

        if not self._places.acquire(blocking=False):
            raise BusyError("cause: two interventions are under way; ask again when one of them is done")
        try:
            while not self._one.acquire(timeout=LOOK_AGAIN):
                look()
            try:
                look()
                return cause(
                    self.source, self.tokens, edit, position=position, controls=controls, progress=look
                )
            finally:
                self._one.release()
        finally:
            self._places.release()


def causes_of(run: Run) -> Causes | None:
    """The interventions that a run can have; None where its model is not here."""
    from kizuki.models import Source

    return Causes(run.source, run.tokens) if isinstance(run.source, Source) else None


def edit_of(kind: str, layer: int, head: int, query: int, key: int, weight: int) -> Edit:
    """The intervention of that name on the selected head, query and key; `weight` in thousandths."""
    from kizuki.models.causes import AblateHead, MaskKeys, SetRow

    if kind in ("zero", "mean"):
        return AblateHead(layer, head, "mean" if kind == "mean" else "zero")
    if kind == "key":
        return MaskKeys(key, layer, head)
    if kind == "key_everywhere":
        return MaskKeys(key)
    return SetRow(layer, head, query, {key: weight / STEPS}, renormalise=True)


def fields_of(found: Effect) -> dict[str, Any]:
    """An effect as the page is told it: names as text, probabilities and sizes as numbers."""
    control = found.control
    made: dict[str, Any] = {
        "position": found.position,
        "unit": "moved" if found.kl is None else "kl",
        "size": found.size,
        "moved": found.moved,
        "before_names": [label for _, label, _ in found.before],
        "after_names": [label for _, label, _ in found.after],
        "before": np.array([p for _, _, p in found.before]),
        "after": np.array([p for _, _, p in found.after]),
        "controls": None,
    }
    if control is not None:
        made |= {
            "controls": [drawn if isinstance(drawn, int) else list(drawn) for drawn in control.drawn],
            "sizes": np.array(control.kl),
            "mean": control.mean,  # NaN where there was nothing to draw from
            "sd": control.sd,
            "above": found.above,
            "seed": control.seed,
        }
    return made
