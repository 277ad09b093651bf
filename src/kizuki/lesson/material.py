"""What a lesson is made of: one layer of one real pass over one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from . import formula
from .formula import Array, Seen

Floats = NDArray[np.float32]
LIMIT = 64  # tokens; every row of every step is shown, and a longer text is the explorer's


class LessonError(ValueError):
    """A lesson cannot be made of this; the message is one line and says what to do."""


@dataclass(frozen=True, eq=False)
class Projection:
    """What lies around one head's q, k and v: the rows of X before them, W_O and the residual after them.

    With the rotation (cos, sin) of a model that turns q and k by their position (RoPE), and without where it does
    not. All float32, as the model has them.

    >>> from kizuki.lesson import shipped
    >>> lesson = shipped()
    >>> around = lesson.projection
    >>> around.x.shape, around.wq.shape, bool(abs(around.rotated("q") - lesson.q()).max() < 1e-4)
    ((13, 576), (64, 576), True)
    """

    x: Floats  # [n, width], what this layer's attention is given
    wq: Floats  # [head_dim, width], this head's slice
    wk: Floats  # [head_dim, width], that of its key head
    wv: Floats  # [value_dim, width]
    wo: Floats  # [width, value_dim], this head's columns
    bq: Floats | None  # [head_dim]
    bk: Floats | None
    bv: Floats | None
    cos: Floats | None  # [n, head_dim]
    sin: Floats | None
    attention: Floats  # [n, width], all heads after W_O, with its bias
    residual: Floats  # [n, width], what that is added to
    shares: Floats  # [heads, n], |W_O z| of each head by itself

    def raw(self, which: str) -> Array:
        """x W (+ b), before any rotation: `[n, head_dim]`, float64."""
        weight, bias = {"q": (self.wq, self.bq), "k": (self.wk, self.bk), "v": (self.wv, self.bv)}[which]
        made = self.x.astype(np.float64) @ weight.astype(np.float64).T
        return made if bias is None else made + bias

    def rotated(self, which: str) -> Array:
        """q, k or v as attention gets it: q and k turned by their position where the model does so."""
        made = self.raw(which)
        if self.cos is None or self.sin is None or which == "v":
            return made
        half = made.shape[1] // 2
        turned = np.concatenate([-made[:, half:], made[:, :half]], 1)
        return made * self.cos + turned * self.sin


@dataclass(frozen=True, eq=False)
class Material:
    """A sentence's q, k, v in one layer of a real model, and which head and word the lesson follows.

    Attributes:
        text, labels, ids: the sentence and its tokens.
        model, origin: the model's name, and where its weights come from, in words.
        layer, head: counted from 0.
        word: the token that is followed, counted from 0.
        query: `[heads, n, head_dim]`; key, value: `[kv_heads, n, …]`; float32, after any rotation.
        scale: what multiplies the scores.
        own: bool `[n, n]`, which keys each query sees in the model.
        projection: what lies before q, k, v and after Z, for `head`; None where it cannot be opened.
        why: why not, as a key of the words; "" where it can.
        gap: the largest difference between the weights of the lesson and `recording[layer]`'s.

    Example:
        >>> from kizuki.lesson import shipped
        >>> lesson = shipped()
        >>> lesson.labels[7], lesson.labels[1], lesson.query.shape
        (' playing', ' dog', (9, 13, 64))
        >>> round(float(lesson.weights()[7, 1]), 4), lesson.output().shape
        (0.7656, (13, 64))
    """

    text: str
    labels: list[str]
    ids: list[int]
    model: str
    origin: str
    layer: int
    layers: int
    head: int
    word: int
    query: Floats
    key: Floats
    value: Floats
    scale: float
    own: Seen
    projection: Projection | None
    why: str
    gap: float

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def heads(self) -> int:
        return self.query.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[0]

    @property
    def head_dim(self) -> int:
        return self.query.shape[2]

    @cached_property
    def masked(self) -> bool:
        """Whether the model hides any key: a decoder does, an encoder does not."""
        return not bool(self.own.all())

    @cached_property
    def seen(self) -> Seen:
        """The mask that the switch turns on: the model's own, or the causal one for a model that has none."""
        causal: Seen = np.tril(np.ones((len(self), len(self)), dtype=bool))
        return self.own if self.masked else causal

    def q(self, head: int | None = None) -> Array:
        """The queries of a head, `[n, head_dim]`, float64."""
        return self.query[self.head if head is None else head].astype(np.float64)

    def k(self, head: int | None = None) -> Array:
        """The keys that a head reads (several heads may share them), `[n, head_dim]`, float64."""
        return self.key[self._group(head)].astype(np.float64)

    def v(self, head: int | None = None) -> Array:
        """The values that a head reads, `[n, value_dim]`, float64."""
        return self.value[self._group(head)].astype(np.float64)

    def _group(self, head: int | None) -> int:
        return (self.head if head is None else head) // (self.heads // self.kv_heads)

    def dots(self, head: int | None = None) -> Array:
        return formula.dots(self.q(head), self.k(head))

    def scores(
        self,
        head: int | None = None,
        *,
        scale: bool = True,
        mask: bool | None = None,
        temperature: float = 1.0,
    ) -> Array:
        """What goes into the softmax, `[n, n]`; `mask` None is what the model does."""
        return formula.logits(self.dots(head), self.scale if scale else 1.0, temperature, self.visible(mask))

    def visible(self, mask: bool | None = None) -> Seen:
        """Which keys are seen with the switch on or off; None is what the model does."""
        on = self.masked if mask is None else mask
        return self.seen if on else np.ones_like(self.seen)

    def weights(
        self,
        head: int | None = None,
        *,
        scale: bool = True,
        mask: bool | None = None,
        temperature: float = 1.0,
    ) -> Array:
        """A of a head under the switches, `[n, n]`."""
        return formula.softmax(self.scores(head, scale=scale, mask=mask, temperature=temperature))

    def output(self, head: int | None = None) -> Array:
        """Z = A V of a head, `[n, value_dim]`."""
        return formula.mix(self.weights(head), self.v(head))


def build(
    *,
    text: str,
    labels: list[str],
    ids: list[int],
    model: str,
    layer: int,
    layers: int,
    query: Floats,
    key: Floats,
    value: Floats,
    scale: float,
    own: Seen,
    head: int | None = None,
    word: str | int | None = None,
    special: Sequence[bool] = (),
    origin: str = "",
) -> Material:
    """A material of q, k, v and a mask, with nothing before or after them; its head and word chosen if not given.

    Raises LessonError for a head or word that is not there.
    """
    heads = query.shape[0]
    # Neither [SEP] nor a comma is what a reader wants to follow.
    quiet = [
        (at < len(special) and special[at]) or not any(map(str.isalnum, label))
        for at, label in enumerate(labels)
    ]
    if head is not None and not -heads <= head < heads:
        raise LessonError(f"head is {head} but layer {layer} has the heads 0 … {heads - 1}")
    made = Material(
        text=text,
        labels=labels,
        ids=ids,
        model=model,
        origin=origin,
        layer=layer,
        layers=layers,
        head=0,
        word=0,
        query=query,
        key=key,
        value=value,
        scale=scale,
        own=own,
        projection=None,
        why="closed_recording",
        gap=0.0,
    )
    if head is None:
        head = max(range(heads), key=lambda h: float(beyond(made.weights(h), quiet).sum(-1).mean()))
    made = replace(made, head=head % heads)
    return replace(made, word=word_of(made.labels, word, beyond(made.weights(), quiet)))


def beyond(weights: Array, quiet: Sequence[bool]) -> Array:
    """The weights between two different words: without the first key, where heads that look at nothing rest, and
    without the tokens that are `quiet`."""
    rest = weights.copy()
    np.fill_diagonal(rest, 0)
    rest[:, 0] = 0
    silent = np.flatnonzero(quiet)
    rest[:, silent] = 0
    rest[silent] = 0
    return rest


def word_of(labels: list[str], asked: str | int | None, reads: Array) -> int:
    """The token to follow: by number, by its text (the last one that has it), or the one that `reads` another most.

    Raises LessonError for a number or a word that is not there.
    """
    n = len(labels)
    if asked is None:
        return int(reads.max(-1).argmax())
    text = str(asked).strip()
    if text.lstrip("-").isdigit():
        if not -n <= int(text) < n:
            raise LessonError(f"word is {text} but the tokens are 0 … {n - 1}")
        return int(text) % n
    found = [i for i, label in enumerate(labels) if label.strip(" ␣").casefold() == text.casefold()]
    if not found:
        listed = ", ".join(label.strip() for label in labels[:12]) + (" …" if n > 12 else "")
        raise LessonError(
            f"word {text!r} is no token of the sentence; its tokens are {listed}, or give a number"
        )
    return found[-1]
