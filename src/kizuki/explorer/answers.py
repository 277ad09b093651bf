"""What Python answers the page: each question by name, its parameters checked, its answer as bytes.

The server and the notebook's widget ask here; what they differ in is only how questions and bytes travel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import causing, page, several, start, wire
from .atlas import Between, HeadRows, Reader
from .budget import ROWS
from .heads import Gone, Head, nobody_left
from .kept import Kept
from .layers import Layers
from .tiles import TILE, Far, alone

if TYPE_CHECKING:
    from kizuki.models import Run

LIMIT = 512 * 2**20  # bytes of opened heads, far pictures and row statistics that are kept
BLOCK_SIDE = 64  # cells a side of a block of single weights, at most
SUSPECTS = 12  # rows of a column whose L is checked: as many as the page lists at first
OTHER = "other."  # before the name of a question about the other input
DIGITS = 9  # of a number in a question
NAMES = 200  # characters of a question's own words that an error repeats


class QuestionError(ValueError):
    """A question that has no answer; the message is one line and says what was expected."""


@dataclass(frozen=True)
class At:
    """A head that was asked about."""

    layer: int
    slot: int


class Answers:
    """Everything a page can ask about one run.

    Args:
        run: what `kizuki.models.run` returned, or a `Run` around an opened recording; one text, layers that are alike.
        limit: bytes of computed things that are kept; q and k of the recording itself are not counted.
        other: those of another input, whose heads can be compared with the same heads here.

    Raises:
        PageError: the run is not one text, or holds no layer; it has no layer or no head in common with `other`.

    Time and memory: opens every layer of a short text (which checks it against its own output), and of a long one a
    single layer, the others when they are asked for; reads a few rows to choose where the page opens, and keeps
    O(queries + keys) numbers a layer. The rest is computed when asked for.
    """

    def __init__(self, run: Run, *, limit: int = LIMIT, other: Answers | None = None) -> None:
        self.run, self.other = run, other
        self.matrices = Layers(run)
        sizes = self.matrices.sizes
        self.queries, self.keys = sizes[0].queries, sizes[0].keys
        self.kept = Kept(limit)
        self.meta = page.meta_of(run, list(self.matrices), self.matrices, self.matrices.missing, sizes)
        self.heads: list[int] = self.meta["heads"]
        self.meta["other"] = other is not None
        if other is not None:
            page.check_shared(self.heads, self.matrices, other.heads, other.matrices)
        self.ranges: list[bytes] = []
        self.meta["bound"] = 0.0
        self.meta["controls"] = []
        self._infos: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        opened = self.matrices.opened
        self.meta["layers"] = [
            self._info(layer) if layer in opened else {"layer": layer, "full": True, "reason": None}
            for layer in self.matrices
        ]
        self.meta["rows"], self.meta["top"] = list(ROWS), 0
        self.meta["start"] = start.choose(run.tokens, opened, self.matrices, self.heads)
        self.reader = Reader(self.matrices, len(self.heads), self._rows, first=self.meta["start"]["layer"])
        self._asked: dict[str, Callable[[Mapping[str, str], Gone], dict[str, Any]]] = {
            "meta": self._meta,
            "atlas": self._atlas,
            "layer": self._layer,
            "words": self._words,
            "next": self._next,
            "ranges": self._ranges,
            "rows": self._row_statistics,
            "row": self._row,
            "column": self._column,
            "cell": self._cell,
            "rowsum": self._row_sum,
            "columnsum": self._column_sum,
            "block": self._block,
            "bare": self._bare,
            "values": self._values,
            "band": self._band,
            "tile": self._tile,
            "cause": self._cause,
        }
        self.causes = causing.causes_of(run)
        self.meta["live"] = self.causes is not None

    def ask(self, what: str, parameters: Mapping[str, str], gone: Gone = nobody_left) -> bytes:
        """The answer to one question, as `wire.pack` makes it.

        Raises:
            QuestionError: there is no such question, or a parameter is missing, unknown or out of its range.
            Stale: `gone()` said, between two parts of the work, that nobody waits any more.
        """
        if self.other is not None and what.startswith(OTHER):
            with self.reader.aside():
                return self.other.ask(what.removeprefix(OTHER), parameters, gone)
        answer = self._asked.get(what)
        if answer is None:
            raise QuestionError(f"{short(what)}: no such question; there are {', '.join(self._asked)}")
        # Row statistics are what the reader reads as well: they too wait for the other questions, not for each other.
        with nullcontext() if what == "rows" else self.reader.aside():
            return wire.pack(answer(parameters, gone))

    # -- parameters ------------------------------------------------------------------------------

    def _take(self, parameters: Mapping[str, str], **limits: int) -> list[int]:
        """Whole numbers, each from 0 up to but without its limit; nothing else may be asked."""
        for name in parameters:
            if name not in limits:
                raise QuestionError(
                    f"{short(name)}: no such parameter; there are {', '.join(limits) or 'none'}"
                )
        found = []
        for name, limit in limits.items():
            text = parameters.get(name)
            if text is None:
                raise QuestionError(f"{name}: is missing; give a whole number in 0 … {limit - 1}")
            if not (isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= DIGITS):
                raise QuestionError(f"{name}: is {short(text)} but must be a whole number in 0 … {limit - 1}")
            if int(text) >= limit:
                raise QuestionError(f"{name}: is {text} but must be in 0 … {limit - 1}")
            found.append(int(text))
        return found

    def _at(self, layer: int, head: int) -> At:
        if layer not in self.matrices:
            raise QuestionError(f"layer: {layer} is not here; there are {page.spans(list(self.matrices))}")
        if head not in self.heads:
            raise QuestionError(f"head: {head} is not here; there are {page.spans(self.heads)}")
        try:
            self._info(layer)
        except page.PageError as error:
            raise QuestionError(f"layer {layer} cannot be shown: {error}") from None
        return At(layer, self.heads.index(head))

    def _head(self, parameters: Mapping[str, str], **limits: int) -> tuple[At, Head, list[int]]:
        """The head of `layer` and `head`, and the other numbers."""
        layer, head, *rest = self._take(
            parameters, layer=max(self.matrices) + 1, head=max(self.heads) + 1, **limits
        )
        at = self._at(layer, head)
        return at, self._opened(at), rest

    def _info(self, layer: int) -> dict[str, Any]:
        """What the page is told of a layer; opens it, and raises `PageError` where it cannot be shown."""
        matrix = self.matrices[layer]
        with self._lock:
            if layer in self._infos:
                return self._infos[layer]
            problem, number, own = matrix.problem, None, None
            if (rule := matrix.visible_range()) is not None:
                own = page.ranges_of(rule, problem.heads, self.queries)
                if own not in self.ranges:
                    self.ranges.append(own)
                    self.meta["controls"].append(page.controls_of(own, self.queries))
                number = self.ranges.index(own)
            self.meta["bound"] = max(self.meta["bound"], page.bound_of(own, self.queries, self.keys))
            self._infos[layer] = {
                "layer": layer,
                "full": True,
                "reason": None,
                "ranges": number,
                "dim": problem.head_dim,
                "scale": matrix.scale,
                "softcap": problem.softcap,
                "sinks": None if problem.sinks is None else [float(s) for s in problem.sinks],
                "bent": problem.bias is not None or problem.score is not None,
            }
            return self._infos[layer]

    # -- what is kept ----------------------------------------------------------------------------

    def _opened(self, at: At) -> Head:
        made: Head = self.kept.get(
            ("head", at), lambda: Head(self.matrices[at.layer], at.slot), lambda head: head.size
        )
        return made

    def _far(self, at: At) -> Far:
        made: Far = self.kept.get(("far", at), lambda: Far(self._opened(at)), lambda far: far.size)
        return made

    def _rows(self, layer: int, slot: int, between: Between) -> dict[str, page.Floats]:
        at = At(layer, slot)
        made: HeadRows = self.kept.get(
            ("rows", at), lambda: HeadRows(self._opened(at)), lambda rows: rows.size
        )
        return made.read(between)

    # -- the answers -----------------------------------------------------------------------------

    def _meta(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        self._take(parameters)
        return {"meta": {**self.meta, **self.reader.state()}}

    def _atlas(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        self._take(parameters)
        return {"atlas": self.reader.state() | {"missing": list(self.matrices.missing)}}

    def _layer(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        """What was left out of `meta` because the layer was not open then."""
        (layer,) = self._take(parameters, layer=max(self.matrices) + 1)
        self._at(layer, self.heads[0])
        return {
            "info": self._info(layer),
            "controls": list(self.meta["controls"]),
            "bound": float(self.meta["bound"]),
        }

    def _words(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        """The words of the text, joined when they are first asked for."""
        self._take(parameters)

        def size(words: dict[str, Any] | None) -> int:
            return 0 if words is None else 100 * len(words["starts"])  # about: a number and a short str

        words = self.kept.get(("words",), lambda: page.words_of(self.run), size)
        if words is None:
            return {"labels": None}
        return {"labels": words["labels"], "starts": np.array(words["starts"], np.int32)}

    def _next(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        """What the model predicted to follow token `query`, and which of it the text has there."""
        (query,) = self._take(parameters, query=self.queries)
        if self.run.predictions is None:
            raise QuestionError("next: this run has no predictions; record with a live model")
        ids, predicted = self.run.tokens.ids, self.run.predictions[query]
        actual = ids[query + 1] if query + 1 < len(ids) else None
        return {
            "names": [label for _, label, _ in predicted],
            "here": [token == actual for token, _, _ in predicted],
            "probabilities": np.array([p for _, _, p in predicted], np.float64),
        }

    def _ranges(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        (number,) = self._take(parameters, number=len(self.ranges))
        first, stop = np.frombuffer(self.ranges[number], "<i4").reshape(2, self.queries)
        return {"first": first, "stop": stop}

    def _row_statistics(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        at, _, _ = self._head(parameters)
        return dict(self._rows(at.layer, at.slot, self.reader.between(gone)))

    def _row(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        _, head, (query,) = self._head(parameters, query=self.queries)
        head.lse(query, query + 1)  # with all threads
        with alone():
            weights, scores, check = head.row(query)
        return {
            "query": query,
            "ok": check.ok,
            "recorded": check.recorded,
            "recomputed": check.recomputed,
            "tolerance": check.tolerance,
            "weights": page.floats(weights),
            "scores": page.floats(scores),
        }

    def _column(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        _, head, (key,) = self._head(parameters, key=self.keys)
        weights, scores = head.column(key, gone)
        heaviest = weights.nan_to_num(nan=np.inf).topk(min(SUSPECTS, len(weights))).indices.tolist()
        return {
            "bad": [i for i in heaviest if not head.check(i).ok],
            "weights": page.floats(weights),
            "scores": page.floats(scores),
        }

    def _cell(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        _, head, (query, key) = self._head(parameters, query=self.queries, key=self.keys)
        with alone():
            steps = head.alone.steps(query, key)

        def number(reading: Any) -> float | None:
            return None if reading is None else float(reading[0, head.lane])

        return {
            "product": number(steps.dot),
            "scale": head.scale,
            "scaled": number(steps.scaled),
            "capped": number(steps.capped),
            "bent": number(steps.bent),
            "bias": number(steps.bias),
            "score": number(steps.score),
            "lse": number(steps.lse),
            "visible": bool(steps.visible[0, head.lane]),
            "weight": number(steps.weight),
            "q": page.floats(steps.query[0, head.lane]),
            "k": page.floats(steps.key[0, head.lane]),
        }

    def _several(self, parameters: Mapping[str, str], count: int) -> tuple[Head, list[int]]:
        """The head, and the tokens of a selection."""
        rest = dict(parameters)
        tokens = several.parse(rest.pop("tokens", None), count)
        if tokens is None:
            raise QuestionError(
                f"tokens: is {short(parameters.get('tokens'))} but must be 1 to {several.MOST} rising numbers in "
                f"0 … {count - 1}, as 3-7.12"
            )
        return self._head(rest)[1], tokens

    def _row_sum(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        head, tokens = self._several(parameters, self.queries)
        total, bad = several.rows(head, tokens, gone)
        if bad is not None:
            return {
                "ok": False,
                "recorded": bad.recorded,
                "recomputed": bad.recomputed,
                "tolerance": bad.tolerance,
            }
        return {"ok": True, "weights": page.floats(total)}

    def _column_sum(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        head, tokens = self._several(parameters, self.keys)
        total = several.columns(head, tokens, gone)
        heaviest = total.nan_to_num(nan=np.inf).topk(min(SUSPECTS, len(total))).indices.tolist()
        return {"bad": [i for i in heaviest if not head.check(i).ok], "weights": page.floats(total)}

    def _block(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        _, head, (i0, i1, j0, j1) = self._head(
            parameters, i0=self.queries, i1=self.queries + 1, j0=self.keys, j1=self.keys + 1
        )
        if not (0 < i1 - i0 <= BLOCK_SIDE and 0 < j1 - j0 <= BLOCK_SIDE):
            raise QuestionError(
                f"block: is {i1 - i0} × {j1 - j0} cells but must be 1 … {BLOCK_SIDE} a side; ask for a tile"
            )
        weights = page.floats(head.weights(i0, i1, j0, j1, gone)).copy()
        if head.first is not None and head.stop is not None:
            key = np.arange(j0, j1)
            first, stop = (end[i0:i1, None].numpy() for end in (head.first, head.stop))
            weights[(key < first) | (key >= stop)] = np.nan
        return {"weights": weights, "bad": [i for i in range(i0, i1) if not head.check(i).ok]}

    def _bare(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        """A row before its mask: q · k of all keys, its weights with no mask, and where q and the keys lie."""
        from kizuki import attend
        from kizuki.lesson.plane import plane

        at, head, (query,) = self._head(parameters, query=self.queries)
        own, key = head.q[query].to(torch.float64), head.k.to(torch.float64)
        with alone():
            lies = plane(own.numpy(), key.numpy())
            made: dict[str, Any] = {
                "products": page.floats(key @ own),
                "query": lies.query,
                "residual": lies.residual,
                "along": lies.along.astype(np.float32),
                "beside": lies.beside.astype(np.float32),
            }
            problem = self.matrices[at.layer].problem
            if problem.bias is None and problem.score is None:
                sinks = None if problem.sinks is None else problem.sinks[at.slot : at.slot + 1]
                free = attend(
                    head.q[None, None, query : query + 1],
                    head.k[None, None],
                    scale=head.scale,
                    softcap=head.softcap,
                    sinks=sinks,
                )
                made["weights"] = page.floats(free[0, 0, 0])
        return made

    def _values(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        at, head, (query, key) = self._head(parameters, query=self.queries, key=self.keys)
        value = self.run.recording.value(at.layer)[0]
        own = value[at.slot * len(value) // self.matrices[at.layer].problem.heads].cpu()  # [keys, value_dim]
        weights = head.row(query)[0]
        low, high = head.span(query, query + 1, 0, self.keys)
        output = weights[low:high] @ own[low:high].to(weights.dtype)
        return {"v": page.floats(own[key]), "output": page.floats(output)}

    def _band(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        at, _, (zoom, row) = self._head(parameters, zoom=64, row=self.queries)
        far = self._far(at)
        if zoom != far.zoom:
            raise QuestionError(f"zoom: is {zoom} but must be {far.zoom}, that of the first picture")
        if row * 2**zoom >= self.queries:
            raise QuestionError(f"row: is {row} but must be in 0 … {(self.queries - 1) // 2**zoom}")
        mass, peak, bad, worst = far.band(row, gone)
        return {
            "rows": len(mass),
            "cols": mass.shape[1],
            "bad": bad,
            "worst": worst,
            "mass": mass,
            "peak": peak,
        }

    def _tile(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        pool = parameters.get("pool", "both")
        if pool not in ("mass", "peak", "both"):
            raise QuestionError(f"pool: is {short(pool)} but must be mass, peak or both")
        rest = {name: value for name, value in parameters.items() if name != "pool"}
        at, _, (zoom, row, col) = self._head(rest, zoom=64, row=self.queries, col=self.keys)
        side = TILE << zoom
        if row * side >= self.queries or col * side >= self.keys:
            last = (self.queries - 1) // side, (self.keys - 1) // side
            raise QuestionError(
                f"tile: is ({row}, {col}) but at zoom {zoom} must be in (0, 0) … ({last[0]}, {last[1]})"
            )
        mass, peak = self._far(at).tile(zoom, row, col, gone)
        made: dict[str, Any] = {"rows": len(mass), "cols": mass.shape[1]}
        if pool != "peak":
            made["mass"] = mass
        if pool != "mass":
            made["peak"] = peak
        return made

    def _cause(self, parameters: Mapping[str, str], gone: Gone) -> dict[str, Any]:
        from kizuki.models import RecordError
        from kizuki.models.causes import CauseError

        if self.causes is None:
            raise QuestionError(
                "cause: the model of this recording is not here; serve a text with its model, kizuki look TEXT --serve"
            )
        kind = parameters.get("kind", "")
        if kind not in causing.KINDS:
            raise QuestionError(f"kind: is {short(kind)} but must be one of {', '.join(causing.KINDS)}")
        layer, head, query, key, position, weight, controls = self._take(
            {name: value for name, value in parameters.items() if name != "kind"},
            layer=max(self.matrices) + 1,
            head=max(self.heads) + 1,
            query=self.queries,
            key=self.keys,
            position=self.queries,
            weight=causing.STEPS + 1,
            controls=causing.CONTROLS + 1,
        )
        self._at(layer, head)
        edit = causing.edit_of(kind, layer, head, query, key, weight)
        try:
            return causing.fields_of(self.causes.effect(edit, position, controls, gone))
        except (causing.BusyError, CauseError, RecordError) as error:
            raise QuestionError(str(error)) from None


def short(text: object) -> str:
    """A question's own words, cut so that an answer stays short."""
    shown = repr(text)
    return shown if len(shown) <= NAMES else f"{shown[:NAMES]}…"
