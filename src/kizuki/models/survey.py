"""The measures of every head over many texts: one row a text, layer and head."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import parquet
from .measures import heads as of_heads
from .measures.contributions import output_weights, read_norm
from .measures.patterns import RELABELLED, read_same
from .measures.reader import Reader
from .onepass import check_length, run
from .parquet import Columns, SurveyError
from .sources import Progress, Source
from .tokens import TextError, Tokens, cut

Read = Callable[[Reader, "Context"], tuple[Tensor, Tensor]]


@dataclass
class Context:
    """What some measures need beside A."""

    ids: Tensor
    weights: dict[Any, Tensor]


@dataclass(frozen=True)
class Kind:
    """One measure of a survey: how it is read, what its control is, and whether it needs W_O."""

    read: Read
    against: str
    weights: bool = False


def _plain(read: Callable[[Reader], tuple[Tensor, Tensor]]) -> Read:
    return lambda reader, context: read(reader)


def _same(reader: Reader, context: Context, after: int, name: str) -> tuple[Tensor, Tensor]:
    return read_same(reader, context.ids, after, 0, name)


def _norm(reader: Reader, context: Context) -> tuple[Tensor, Tensor]:
    return read_norm(reader, context.weights[reader.layer])


MEASURES: dict[str, Kind] = {
    "previous": Kind(_plain(of_heads.read_previous), of_heads.UNIFORM),
    "duplicate": Kind(partial(_same, after=0, name="duplicate"), RELABELLED),
    "induction": Kind(partial(_same, after=1, name="induction"), RELABELLED),
    "first_key": Kind(_plain(of_heads.read_first_key), of_heads.UNIFORM),
    "entropy": Kind(_plain(of_heads.read_entropy), "ln of the keys each row sees"),
    "effective_keys": Kind(_plain(of_heads.read_effective), "the keys each row sees"),
    "distance": Kind(_plain(of_heads.read_distance), of_heads.UNIFORM),
    "distance_rest": Kind(_plain(of_heads.read_distance_rest), of_heads.UNIFORM),
    "contribution": Kind(_norm, of_heads.UNIFORM, weights=True),
}


@dataclass(frozen=True, eq=False)
class Survey:
    """What `survey` did.

    Attributes:
        texts: how many texts the result has.
        done: how many of them were read now; the others were on the disk from a run before.
        path: the Parquet file, where one was asked for.

    Example:
        >>> from kizuki.models import load, survey
        >>> done = survey(["Mika saw.", "She laughed."], load("minilm"), ["entropy"], layers=[0])
        >>> done.texts, done.done, done.path, sorted(set(done.columns()["text"]))
        (2, 2, None, ['0', '1'])
    """

    texts: int
    done: int
    path: Path | None
    _columns: Columns | None = field(default=None, repr=False)

    def columns(self) -> Columns:
        """All rows, by column; read from the file where there is one."""
        if self._columns is not None:
            return self._columns
        columns: Columns = parquet.library().parquet.read_table(self.path).to_pydict()
        return columns


def survey(
    texts: Mapping[str, str] | Iterable[str],
    source: Source,
    measures: Sequence[str] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    first: int | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Read many texts with a model, one pass each, and measure every head in each of them.

    Columns of the result: `text` (its name), `tokens`, `layer`, `head`, and of every measure two, `NAME` and
    `NAME_control`; NaN where a text gives no number (no token occurs twice). One row a text, layer and head.

    Args:
        texts: name → text, or texts, whose names are then "0", "1", ….
        source: what `kizuki.models.load` returned.
        measures: names of `kizuki.models.survey.MEASURES` (previous, duplicate, induction, first_key, entropy,
            effective_keys, distance, distance_rest, contribution); None = all. They are defined in
            `kizuki.models.measures`; duplicate and induction are those on the text itself.
        out: a Parquet file. Each text's rows go to the disk as soon as they are there, into a folder beside it; a run
            that is killed is gone on with by the same call again, which loses and repeats no text. None keeps the rows
            in memory.
        layers, heads: which to record; None = all.
        first: read the first so many tokens of each text only; None = all of them.
        progress: called as `progress("texts", done, texts)`.

    Returns a `Survey`.

    Raises SurveyError for no texts, an unknown measure, an `out` that holds another survey or cannot be written;
    TextError, before any text is read, for one that is empty or longer than the model's positions; RecordError for a
    model that cannot be recorded, or whose W_O cannot be found (leave out contribution).

    Time and memory: of each text one forward pass and about six passes over A; q, k and v of one text.

    Example:
        >>> import kizuki
        >>> source = kizuki.models.load("minilm")
        >>> rows = kizuki.models.survey({"a": "Mika laughed."}, source, ["entropy"]).columns()
        >>> rows["text"][0], rows["layer"][0], rows["head"][0], rows["entropy"][0] < rows["entropy_control"][0]
        ('a', 0, 0, True)
    """
    if first is not None and (isinstance(first, bool) or not isinstance(first, int) or first < 1):
        raise SurveyError(
            f"kizuki.models.survey: first is {first!r} but must be a number of tokens from 1 up"
        )
    named = _named(texts)
    chosen = _chosen(measures)
    target = None if out is None else parquet.check_target(out)
    report = progress or (lambda stage, done, total: None)
    read: dict[str, Tokens] = {}
    for name, text in named.items():
        read[name] = _tokens(source, name, text, first)
    keys = {name: _key(name, text) for name, text in named.items()}
    weights: dict[Any, Tensor] = {}

    def rows(name: str) -> Columns:
        if not weights and any(MEASURES[measure].weights for measure in chosen):
            weights.update(output_weights(source.model, layers))
        return _rows(source, name, read[name], chosen, layers, heads, weights)

    if target is None:
        columns: Columns = {column: [] for column, _ in _schema(chosen)}
        for number, name in enumerate(named):
            report("texts", number, len(named))
            for column, more in rows(name).items():
                columns[column] += more
        report("texts", len(named), len(named))
        return Survey(len(named), len(named), None, columns)

    journal = parquet.Journal(target, _about(source, named, chosen, layers, heads, first), _schema(chosen))
    if journal.finished():
        report("texts", len(named), len(named))
        return Survey(len(named), 0, target)
    fresh = 0
    with journal.opened():
        waiting = [name for name in named if not journal.has(keys[name])]
        done = len(named) - len(waiting)
        report("texts", done, len(named))
        for name in waiting:
            journal.add(keys[name], rows(name))
            fresh += 1
            report("texts", done + fresh, len(named))
        journal.merge(list(keys.values()))
    return Survey(len(named), fresh, target)


def _rows(
    source: Source,
    name: str,
    tokens: Tokens,
    measures: Sequence[str],
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    weights: dict[Any, Tensor],
) -> Columns:
    """The rows of one text, by column."""
    recording = run(source, tokens, layers=layers, heads=heads, k=0).recording
    context = Context(torch.tensor(tokens.ids), weights)
    columns: Columns = {column: [] for column, _ in _schema(measures)}
    for layer in recording:
        reader = Reader(recording, layer)
        count = len(reader.heads)
        columns["text"] += [name] * count
        columns["tokens"] += [len(tokens)] * count
        columns["layer"] += [layer] * count
        columns["head"] += list(reader.heads)
        for measure in measures:
            value, control = MEASURES[measure].read(reader, context)
            columns[measure] += value[0].tolist()
            columns[f"{measure}_control"] += control[0].tolist()
    return columns


def _schema(measures: Sequence[str]) -> list[tuple[str, str]]:
    """The columns with their Arrow types."""
    numbers = [(column, "float64") for name in measures for column in (name, f"{name}_control")]
    return [("text", "string"), ("tokens", "int32"), ("layer", "int32"), ("head", "int32"), *numbers]


def _about(
    source: Source,
    texts: dict[str, str],
    measures: Sequence[str],
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    first: int | None,
) -> dict[str, Any]:
    """What decides the numbers of a survey, and what its controls are."""
    from kizuki import __version__

    return {
        "kizuki": __version__,
        "model": source.name,
        "origin": source.origin,
        "measures": {name: MEASURES[name].against for name in measures},
        "layers": None if layers is None else sorted(set(layers)),
        "heads": None if heads is None else sorted(set(heads)),
        "first": first,
        "texts": [[name, hashlib.sha256(text.encode()).hexdigest()] for name, text in texts.items()],
    }


def _key(name: str, text: str) -> str:
    """A file name for a text's rows."""
    return hashlib.sha256(name.encode() + b"\0" + text.encode()).hexdigest()[:32]


def _named(texts: Mapping[str, str] | Iterable[str]) -> dict[str, str]:
    if isinstance(texts, str):
        raise SurveyError(
            "kizuki.models.survey: texts is one str but must be several; give [text] or {name: text}"
        )
    if isinstance(texts, Mapping):
        named = dict(texts)
    else:
        try:
            named = {str(number): text for number, text in enumerate(texts)}
        except TypeError:
            raise SurveyError(
                f"kizuki.models.survey: texts is a {type(texts).__name__} but must be texts, or a mapping of names to "
                "texts"
            ) from None
    if not named:
        raise SurveyError("kizuki.models.survey: texts is empty; give at least one")
    for name in named:
        if not isinstance(name, str) or not name:
            raise SurveyError(
                f"kizuki.models.survey: a text is named {name!r} but names must be non-empty str"
            )
    return named


def _tokens(source: Source, name: str, text: str, first: int | None) -> Tokens:
    """The tokens of a text; a text that cannot be read is refused by its name."""
    try:
        tokens = source.tokenize(text)
        if first is not None:
            tokens = cut(tokens, first)
        check_length(source, tokens)
    except TextError as error:
        raise TextError(f"text {name!r}: {error}") from None
    return tokens


def _chosen(measures: Sequence[str] | None) -> list[str]:
    """The measures' names, in the order of the table."""
    if measures is None:
        return list(MEASURES)
    if isinstance(measures, str):
        raise SurveyError(
            f"kizuki.models.survey: measures is one str but must be several; give [{measures!r}]"
        )
    for name in measures:
        if name not in MEASURES:
            raise SurveyError(
                f"kizuki.models.survey: measures holds {name!r}, which there is not; there are {', '.join(MEASURES)}"
            )
    if not measures:
        raise SurveyError("kizuki.models.survey: measures is empty; name at least one, or give None for all")
    return [name for name in MEASURES if name in measures]
