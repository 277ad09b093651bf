"""Any number of the lesson, opened: the products and sums that it is, each part with a name that opens in turn.

    q[7,3] k[7,3] v[7,3]   component 3 of token 7      raw_q[7,3] raw_k[7,3]  the same before the rotation
    x[7,100] Wq[3,100]     what they are made of       dot[7,1]               q of token 7 · k of token 1
    scaled[7,1]            scale · dot (/ T)           exp[7,1] sum[7]        e^(scaled − the row's maximum), Σ of it
    weight[7,1]            exp / sum                   z[7,3]                 Σ weight · v
    size_q[7] size_k[1]    |q|, |k|                    cosine[7,1]            dot / (|q| |k|)
    o[7,100]               W_O z of this head          out[7,100]             residual + all heads

static/opened.js is its twin for the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from . import formula
from .formula import Array
from .material import LessonError, Material, Projection

NAME = re.compile(r"(\w+)\[\s*(-?\d+)\s*(?:,\s*(-?\d+)\s*)?\]\Z")


@dataclass(frozen=True)
class Term:
    """One product a · b; `left` and `right` are the names of its two numbers.

    >>> from kizuki.lesson import Book, shipped
    >>> book = Book(shipped())
    >>> term = book.open("dot[7,1]").terms[0]
    >>> term.left, term.right, term.product == term.a * term.b
    ('q[7,0]', 'k[1,0]', True)
    """

    left: str
    a: float
    right: str
    b: float

    @property
    def product(self) -> float:
        return self.a * self.b


@dataclass(frozen=True)
class Opened:
    """A number and what it is: f(Σ terms + Σ plus), with f the identity, e^ or √.

    Attributes:
        name: such as "dot[7,1]".
        value: the number.
        formula: how it is made, in signs.
        terms: the products that are summed.
        plus: what is added as it is, `(name, value)`.
        wrap: "", "exp" or "sqrt".
        leaf: whether it is the model's own (a weight, a row of X), and opens no further.

    Example:
        >>> from kizuki.lesson import Book, shipped
        >>> book = Book(shipped())
        >>> dot = book.open("dot[7,1]")
        >>> len(dot.terms), abs(dot.total() - dot.value) < 1e-9
        (64, True)
    """

    name: str
    value: float
    formula: str
    terms: list[Term] = field(default_factory=list)
    plus: list[tuple[str, float]] = field(default_factory=list)
    wrap: str = ""
    leaf: bool = False

    def total(self) -> float:
        """The number made again from its parts; `value` but for the order of the sum."""
        made = float(sum(term.product for term in self.terms) + sum(value for _, value in self.plus))
        if self.leaf:
            return self.value
        return {"exp": np.exp, "sqrt": np.sqrt}.get(self.wrap, float)(made)


@dataclass(frozen=True, eq=False)
class Book:
    """All numbers of one lesson under its switches; `mask` None is what the model does.

    >>> from kizuki.lesson import Book, shipped
    >>> book = Book(shipped())
    >>> round(book.open("weight[7,1]").value, 4), round(Book(shipped(), scale=False).open("weight[7,1]").value, 4)
    (0.7656, 1.0)
    """

    lesson: Material
    scale: bool = True
    mask: bool | None = None
    temperature: float = 1.0

    @cached_property
    def scores(self) -> Array:
        return self.lesson.scores(scale=self.scale, mask=self.mask, temperature=self.temperature)

    @cached_property
    def raised(self) -> Array:
        peak = self.scores.max(-1, keepdims=True)
        return np.exp(self.scores - np.where(np.isneginf(peak), 0.0, peak))

    @cached_property
    def weights(self) -> Array:
        return formula.softmax(self.scores)

    def open(self, name: str) -> Opened:
        """The number `name`, such as "weight[7,1]"; places count from 0, from the end where negative.

        Raises LessonError for a name that is none, a place that is not there, and what cannot be opened here.
        """
        match = NAME.match(name.strip())
        make: Callable[..., Opened] | None = getattr(self, f"_{match[1]}", None) if match else None
        if match is None or make is None or match[1] not in KINDS:
            raise LessonError(
                f"{name!r} names no number; open one of {', '.join(KINDS)}, with its place: weight[7,1], sum[7]"
            )
        places = [int(place) for place in match.groups()[1:] if place is not None]
        lengths = self._lengths(match[1])
        if len(places) != len(lengths):
            raise LessonError(f"{name!r} has {len(places)} places but {match[1]} has {len(lengths)}")
        for place, length in zip(places, lengths, strict=True):
            if not -length <= place < length:
                raise LessonError(f"{name!r}: {place} is not in 0 … {length - 1}")
        return make(*(place % length for place, length in zip(places, lengths, strict=True)))

    def _lengths(self, kind: str) -> tuple[int, ...]:
        n, d, dv = len(self.lesson), self.lesson.head_dim, self.lesson.value.shape[2]
        if kind in ("q", "k", "raw_q", "raw_k"):
            return n, d
        if kind == "v":
            return n, dv
        if kind in ("dot", "scaled", "exp", "weight", "cosine"):
            return n, n
        if kind in ("sum", "size_q", "size_k"):
            return (n,)
        if kind == "z":
            return n, dv
        return n, self._around().x.shape[1]

    def _around(self) -> Projection:
        if self.lesson.projection is None:
            raise LessonError(
                f"what lies before q, k, v and after Z is not held for this head ({self.lesson.why})"
            )
        return self.lesson.projection

    # One method a kind of number; KINDS has the names that may be asked for.

    def _q(self, i: int, c: int) -> Opened:
        return self._projected("q", i, c, float(self.lesson.q()[i, c]))

    def _k(self, i: int, c: int) -> Opened:
        return self._projected("k", i, c, float(self.lesson.k()[i, c]))

    def _v(self, i: int, c: int) -> Opened:
        return self._products("v", "v", i, c, float(self.lesson.v()[i, c]))

    def _raw_q(self, i: int, c: int) -> Opened:
        return self._products("raw_q", "q", i, c, None)

    def _raw_k(self, i: int, c: int) -> Opened:
        return self._products("raw_k", "k", i, c, None)

    def _projected(self, which: str, i: int, c: int, value: float) -> Opened:
        around = self._around()
        if around.cos is None or around.sin is None:
            return self._products(which, which, i, c, value)
        half = self.lesson.head_dim // 2
        other, sign = (c + half, -1) if c < half else (c - half, 1)
        raw = around.raw(which)[i]
        minus = "−" if sign < 0 else ""
        terms = [
            Term(f"raw_{which}[{i},{c}]", float(raw[c]), f"cos[{i},{c}]", float(around.cos[i, c])),
            Term(
                f"raw_{which}[{i},{other}]",
                float(raw[other]),
                f"{minus}sin[{i},{c}]",
                sign * float(around.sin[i, c]),
            ),
        ]
        return Opened(
            f"{which}[{i},{c}]",
            value,
            f"{which} = raw_{which} · cos {'−' if sign < 0 else '+'} raw_{which}′ · sin",
            terms,
        )

    def _products(self, name: str, which: str, i: int, c: int, value: float | None) -> Opened:
        around = self._around()
        weight, bias = {
            "q": (around.wq, around.bq),
            "k": (around.wk, around.bk),
            "v": (around.wv, around.bv),
        }[which]
        terms = [
            Term(f"x[{i},{m}]", float(a), f"W{which}[{c},{m}]", float(b))
            for m, (a, b) in enumerate(zip(around.x[i], weight[c], strict=True))
        ]
        plus = [] if bias is None else [(f"b{which}[{c}]", float(bias[c]))]
        made = float(around.raw(which)[i, c]) if value is None else value
        ending = "" if bias is None else f" + b{which}"
        return Opened(f"{name}[{i},{c}]", made, f"Σₘ x[{i},m] · W{which}[{c},m]{ending}", terms, plus)

    def _x(self, i: int, m: int) -> Opened:
        return Opened(f"x[{i},{m}]", float(self._around().x[i, m]), "", leaf=True)

    def _dot(self, i: int, j: int) -> Opened:
        q, k = self.lesson.q()[i], self.lesson.k()[j]
        terms = [
            Term(f"q[{i},{c}]", float(a), f"k[{j},{c}]", float(b))
            for c, (a, b) in enumerate(zip(q, k, strict=True))
        ]
        return Opened(f"dot[{i},{j}]", float(q @ k), f"Σ_c q[{i},c] · k[{j},c]", terms)

    def _size_q(self, i: int) -> Opened:
        return self._size("q", i, self.lesson.q()[i])

    def _size_k(self, j: int) -> Opened:
        return self._size("k", j, self.lesson.k()[j])

    def _size(self, which: str, i: int, vector: Array) -> Opened:
        terms = [
            Term(f"{which}[{i},{c}]", float(a), f"{which}[{i},{c}]", float(a)) for c, a in enumerate(vector)
        ]
        made = float(formula.norm(vector))
        return Opened(f"size_{which}[{i}]", made, f"|{which}| = √(Σ_c {which}[{i},c]²)", terms, wrap="sqrt")

    def _cosine(self, i: int, j: int) -> Opened:
        q, k = self.lesson.q()[i], self.lesson.k()[j]
        sizes = float(formula.norm(q) * formula.norm(k))
        term = Term(
            f"dot[{i},{j}]", float(q @ k), f"1/(size_q[{i}]·size_k[{j}])", 1 / sizes if sizes else 0.0
        )
        return Opened(f"cosine[{i},{j}]", formula.cosine(q, k), "q·k / (|q| |k|)", [term])

    def _scaled(self, i: int, j: int) -> Opened:
        dot = float(self.lesson.q()[i] @ self.lesson.k()[j])
        factor = (self.lesson.scale if self.scale else 1.0) / self.temperature
        right = ("scale" if self.scale else "1") + ("" if self.temperature == 1 else "/T")
        return Opened(
            f"scaled[{i},{j}]", dot * factor, f"q·k × {right}", [Term(f"dot[{i},{j}]", dot, right, factor)]
        )

    def _exp(self, i: int, j: int) -> Opened:
        name, score = f"exp[{i},{j}]", float(self.scores[i, j])
        if np.isneginf(score):
            return Opened(name, 0.0, "−∞", plus=[(f"scaled[{i},{j}] + (−∞)", score)], wrap="exp")
        plus = [(f"scaled[{i},{j}]", score), (f"−max[{i}]", -float(self.scores[i].max()))]
        return Opened(name, float(self.raised[i, j]), "e^(scaled − max)", plus=plus, wrap="exp")

    def _sum(self, i: int) -> Opened:
        plus = [
            (f"exp[{i},{j}]", float(self.raised[i, j])) for j in range(len(self.lesson)) if self._sees(i, j)
        ]
        return Opened(f"sum[{i}]", float(self.raised[i].sum()), f"Σⱼ exp[{i},j]", plus=plus)

    def _weight(self, i: int, j: int) -> Opened:
        total = float(self.raised[i].sum())
        share = 1 / total if total else 0.0
        terms = [Term(f"exp[{i},{j}]", float(self.raised[i, j]), f"1/sum[{i}]", share)]
        return Opened(f"weight[{i},{j}]", float(self.weights[i, j]), "exp / sum", terms)

    def _z(self, i: int, c: int) -> Opened:
        v = self.lesson.v()
        terms = [
            Term(f"weight[{i},{j}]", float(self.weights[i, j]), f"v[{j},{c}]", float(v[j, c]))
            for j in range(len(self.lesson))
            if self._sees(i, j)
        ]
        return Opened(f"z[{i},{c}]", float(self.weights[i] @ v[:, c]), f"Σⱼ weight[{i},j] · v[j,{c}]", terms)

    def _o(self, i: int, m: int) -> Opened:
        around, z = self._around(), self.lesson.output()[i]
        terms = [
            Term(f"z[{i},{c}]", float(a), f"Wo[{m},{c}]", float(b))
            for c, (a, b) in enumerate(zip(z, around.wo[m], strict=True))
        ]
        return Opened(
            f"o[{i},{m}]", float(z @ around.wo[m].astype(np.float64)), f"Σ_c z[{i},c] · Wo[{m},c]", terms
        )

    def _out(self, i: int, m: int) -> Opened:
        around, mine = self._around(), self._o(i, m).value
        plus = [
            (f"residual[{i},{m}]", float(around.residual[i, m])),
            (f"o[{i},{m}]", mine),
            (f"rest[{i},{m}]", float(around.attention[i, m]) - mine),
        ]
        return Opened(
            f"out[{i},{m}]",
            float(around.residual[i, m]) + float(around.attention[i, m]),
            "residual + o + rest",
            plus=plus,
        )

    def _sees(self, i: int, j: int) -> bool:
        return not bool(np.isneginf(self.scores[i, j]))


KINDS = (
    "q",
    "k",
    "v",
    "raw_q",
    "raw_k",
    "x",
    "dot",
    "scaled",
    "exp",
    "sum",
    "weight",
    "z",
    "o",
    "out",
    "size_q",
    "size_k",
    "cosine",
)
