"""The passes through one cache, kept as one: q of every token that was read, and k and v of each once.

A model that generates runs one pass over the prompt and then one a token, each on keys that the cache gathered. The
last pass is held as any other. Of those before it a `Part` each is left: its own rows of q, its own tokens' k and v
(not the cache's, so that n steps hold n keys and not n²/2), what its mask showed as three numbers a row, and the rows
of output that it was checked with.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .recording import Capture, Layer
from .rule import Lines, RecordError, lines_of


@dataclass(frozen=True, eq=False)
class Part:
    """What one pass adds to a layer: tokens `start … start + queries − 1`, every batch row of it."""

    start: int  # the place of its first query among all tokens
    query: Tensor  # [batch, heads, queries, head_dim]
    key: Tensor  # [batch, kv_heads, new keys, head_dim]
    value: Tensor
    key_start: int  # the place of its first new key
    lines: Lines  # places counted from token 0; `seen` covers the new keys
    rows: list[int]
    sample: Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    bias: Tensor | None  # of its last query: [batch|1, heads|1, keys]
    by_key: bool  # each row adds the same to a key
    by_distance: bool  # a row adds what depends on how far the key is


def part_of(capture: Capture, past: int, queries: int, *, cross: bool, first: bool) -> Part:
    """The part a finished pass adds; RecordError where its tensors were written over or do not fit the cache."""
    if len(capture.rules) > 1 or capture.now() != capture.versions:
        rule = capture.matrix()[1]
    else:
        rule = capture.rules[0]
    if capture.query.shape[2] != queries:
        raise RecordError(
            f"{capture.path} read {capture.query.shape[2]} places in a pass over {queries} tokens"
        )
    batch = max(capture.query.shape[0], capture.key.shape[0])
    lines = lines_of(rule, batch, queries, capture.query.device)
    stop = rule.stop
    if cross:
        begin, place = 0, 0
    else:
        place = past + queries - stop  # of key 0 among all tokens: a sliding cache has dropped those before
        if place < 0:
            raise RecordError(f"{capture.path} has {stop} keys where its cache holds {past + queries} tokens")
        begin = 0 if first else stop - queries
        lines = Lines(
            lines.first + place,
            torch.where(lines.count > 0, lines.last + place, -1),
            lines.count,
            lines.seen[:, begin:].clone(),
        )
    key, value = capture.key[:, :, begin:stop], capture.value[:, :, begin:stop]
    if key.shape[2] < capture.key.shape[2]:  # a view would hold the whole cache
        key, value = key.clone(), value.clone()
    row, by_key, by_distance = None, True, True
    if capture.bias is not None:
        bias = capture.bias[..., :stop]
        row = bias[:, :, -1]
        if bias.shape[2] > 1:
            by_key = bool((bias == row[:, :, None]).all())
            by_distance = _is_by_distance(bias, row)
    return Part(
        past, capture.query, key, value, place + begin, lines, capture.rows, capture.sample, capture.scale,
        capture.softcap, capture.sinks, row, by_key, by_distance,
    )  # fmt: skip


def _is_by_distance(bias: Tensor, row: Tensor) -> bool:
    """Whether every row of a bias is the last one moved, at the keys up to its own."""
    queries, keys = bias.shape[2:]
    for i in range(queries):
        own = i + keys - queries
        if not bool((bias[:, :, i, : own + 1] == row[:, :, keys - 1 - own :]).all()):
            return False
    return True


class Course:
    """The passes of a model through one cache, from the first in the block to the last."""

    def __init__(self, cache: Any, past: int) -> None:
        try:
            self.cache = None if cache is None else weakref.ref(cache)
        except TypeError:  # a cache that nothing may point to: its passes stand alone
            self.cache = None
        self.offset = past  # tokens that were in the cache before the first pass
        self.length = past  # tokens read, those included
        self.starts: list[int] = []  # per pass
        self.ids: list[Tensor | None] = []  # per pass: the tokens it read, [batch, queries]
        self.parts: dict[Layer, list[Part]] = {}
        self.errors: dict[Layer, RecordError] = {}

    def goes_on(self, cache: Any, past: int) -> bool:
        """Whether a pass that finds `past` tokens in `cache` goes on where this one stopped, or took tokens back."""
        return (
            cache is not None
            and self.cache is not None
            and self.cache() is cache
            and self.offset < past <= self.length
        )

    def add(self, queries: int, ids: Tensor | None) -> None:
        """A pass over `queries` tokens has finished."""
        self.starts.append(self.length)
        self.ids.append(None if ids is None else ids.detach().clone())
        self.length += queries

    def queries(self, number: int) -> int:
        ends = [*self.starts[1:], self.length]
        return ends[number] - self.starts[number]

    def take(
        self, captures: dict[Layer, Capture], errors: dict[Layer, RecordError], cross: set[Layer]
    ) -> None:
        """Keep the part of the last finished pass, before its captures are dropped for those of the next."""
        for layer, part in self.parts_of(captures, errors, cross, self.errors).items():
            parts = self.parts.setdefault(layer, [])
            if parts:  # the bias of a later row holds those of all before it
                parts[-1] = replace(parts[-1], bias=None)
            parts.append(part)
        for layer in [layer for layer, parts in self.parts.items() if len(parts) < len(self.starts)]:
            self.errors.setdefault(layer, RecordError("it did not run in every pass"))
        for layer in self.errors:
            self.parts.pop(layer, None)

    def parts_of(
        self,
        captures: dict[Layer, Capture],
        errors: dict[Layer, RecordError],
        cross: set[Layer],
        failed: dict[Layer, RecordError],
    ) -> dict[Layer, Part]:
        """What the last finished pass adds to each layer; what cannot be kept goes into `failed`."""
        made: dict[Layer, Part] = {}
        number = len(self.starts) - 1
        for layer, error in errors.items():
            failed.setdefault(layer, error)
        for layer, capture in captures.items():
            if layer in failed:
                continue
            before = self.parts.get(layer, [])
            if len(before) != number:
                failed[layer] = RecordError("it did not run in every pass")
                continue
            try:
                part = part_of(
                    capture,
                    self.starts[number],
                    self.queries(number),
                    cross=layer in cross,
                    first=number == 0,
                )
                made[layer] = _beside(before[-1], part, layer in cross) if before else part
            except RecordError as error:
                failed[layer] = error
        return made

    def crop(self, past: int) -> None:
        """Take back the tokens from `past` on: a draft that was not accepted."""
        for layer, parts in list(self.parts.items()):
            if parts[-1].bias is not None:
                self.errors[layer] = RecordError(
                    "its cache was cropped, and with it a bias that has no one view then"
                )
                del self.parts[layer]
            else:
                self.parts[layer] = [_cut(part, past) for part in parts if part.start < past]
        keep = [number for number, start in enumerate(self.starts) if start < past]
        self.ids = [
            ids if ids is None else ids[:, : past - self.starts[number]]
            for number, ids in enumerate(self.ids)
            if number in keep
        ]
        self.starts = [self.starts[number] for number in keep]
        self.length = past


def _beside(before: Part, part: Part, cross: bool) -> Part:
    """A later part, its keys dropped where they are those of the first, its bias compared with the one before."""
    if cross:
        part = replace(part, key=before.key, value=before.value)
    if (before.bias is None) != (part.bias is None) and not cross:
        # A bias of nothing but zeros is not kept: one key is at distance 0.
        if before.bias is None and part.bias is not None:
            before = replace(
                before, bias=torch.zeros_like(part.bias[..., : before.key_start + before.key.shape[2]])
            )
        else:
            raise RecordError("its bias is there in some passes only")
    if before.bias is not None and part.bias is not None:
        if before.bias.shape[2] > part.bias.shape[2] or part.key_start - part.start:
            raise RecordError("its bias comes with a cache that drops keys, which has no one view")
        n = before.bias.shape[2]
        by_key = before.by_key and part.by_key and bool((part.bias[..., :n] == before.bias).all())
        by_distance = (
            before.by_distance and part.by_distance and bool((part.bias[..., -n:] == before.bias).all())
        )
        if not by_key and not by_distance:
            raise RecordError("its bias depends neither on the key alone nor on the distance alone")
        part = replace(part, by_key=by_key, by_distance=by_distance)
    return part


def _cut(part: Part, past: int) -> Part:
    queries = past - part.start
    if queries >= part.query.shape[2]:
        return part
    kept = [row for row in part.rows if row < queries]
    keys = past - part.key_start
    lines = Lines(
        part.lines.first[:, :queries], part.lines.last[:, :queries], part.lines.count[:, :queries],
        part.lines.seen[:, :keys],
    )  # fmt: skip
    return replace(
        part,
        query=part.query[:, :, :queries],
        key=part.key[:, :, :keys],
        value=part.value[:, :, :keys],
        lines=lines,
        rows=kept,
        sample=None if part.sample is None else part.sample[:, :, : len(kept)],
    )
