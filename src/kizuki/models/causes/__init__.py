"""What a head, a key or a row of weights does to a live model's answer: interventions, each beside its control.

A weight says where a head reads, not that it matters. To claim that, take it away and see what changes:

    source = load("smollm2")
    found = cause(source, "Mika gave the key to", AblateHead(layer=5, head=3))
    found.kl, found.control.mean, found.control.sd     # nats, and what ten random other heads of the layer do

`intervene` makes the same change around passes of your own.
"""

from __future__ import annotations

from .edits import AblateHead, CauseError, Edit, MaskKeys, SetRow, intervene
from .effect import Control, Effect, cause

__all__ = [
    "AblateHead",
    "CauseError",
    "Control",
    "Edit",
    "Effect",
    "MaskKeys",
    "SetRow",
    "cause",
    "intervene",
]
