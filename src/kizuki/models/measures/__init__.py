"""What a model's heads do: numbers read off a recording, each with the number it has to be compared with.

    source = kizuki.models.load("smollm2")
    recording = kizuki.models.run(source, text, k=0).recording
    measures.first_key(recording)               # Measure: value and control, each [batch, layers, heads]
    measures.repeats(source).induction.top(5)   # the heads that complete a repeated pattern

A weight says where a head reads. It does not say that the place mattered for the answer: that needs at least the
value's size (`contributions`), and to be claimed needs an intervention: take the head or the key away and see the
output move. A number without its control says nothing at all, for the shape of a causal mask alone gives high ones.

The definitions, their units and where they come from stand with each function. Everything is streamed: no measure
holds queries × keys numbers. The layers are those of self-attention.
"""

from __future__ import annotations

from .contributions import Contributions, contribution, contributions, output_weights
from .heads import SinkRate, distance, distance_rest, effective_keys, entropy, first_key, previous, sink_rate
from .patterns import Repeats, duplicate, induction, repeats
from .reader import Measure
from .rollout import Rollout, rollout
from .segments import Segments, segments

__all__ = [
    "Contributions",
    "Measure",
    "Repeats",
    "Rollout",
    "Segments",
    "SinkRate",
    "contribution",
    "contributions",
    "distance",
    "distance_rest",
    "duplicate",
    "effective_keys",
    "entropy",
    "first_key",
    "induction",
    "output_weights",
    "previous",
    "repeats",
    "rollout",
    "segments",
    "sink_rate",
]
