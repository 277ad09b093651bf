"""One ragged view over prompt and answer: what each token of a generated text read, row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .course import Course, Part
from .recording import Layer, leeway
from .rule import Lines, RecordError, fit

if TYPE_CHECKING:
    from kizuki import AttentionMatrix

    from .recording import Recording


@dataclass(frozen=True)
class Row:
    """A row of A by name: the token it read from, and the token it produced.

    `position` counts the tokens of the text from 0; the row reads token `position` and sees the tokens up to it.
    `produced` is None in the rows of the prompt that produced nothing: what followed them was given.

    >>> from kizuki.models import Row
    >>> Row(position=4, read=17, produced=230)  # token 4 of the text, number 17, was read and 230 came of it
    Row(position=4, read=17, produced=230)
    """

    position: int
    read: int
    produced: int | None


class GeneratedLayer:
    """One layer over prompt and answer: `matrix` is its A, `[1, heads, rows, tokens]`, held and not stored.

    `layer[step]` are the weights `[heads, tokens seen]` from which answer token `step` was produced (0 = the first;
    negative counts from the end); `layer.row(i)` those of row i of `rows`, prompt or answer. Keys are the text's tokens
    without its padding; in a cross-attention layer they are the encoder's.

    >>> import kizuki, torch, transformers
    >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2,
    ...                                  bos_token_id=0, eos_token_id=0)
    >>> model = transformers.GPT2LMHeadModel(config).eval()
    >>> with kizuki.record(model) as recording:
    ...     output = model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=3, do_sample=False,
    ...                             pad_token_id=0, eos_token_id=None)
    >>> layer = recording.generation(output)[1]
    >>> len(layer), layer[-1].shape, layer.matrix.shape  # [heads, tokens seen], [1, heads, rows, keys]
    (3, torch.Size([2, 5]), torch.Size([1, 2, 5, 5]))
    """

    def __init__(
        self,
        matrix: AttentionMatrix,
        value: Tensor,
        rows: Sequence[Row],
        rule: str,
        steps: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        self.matrix = matrix
        self.value = value
        self.rows = tuple(rows)
        self.rule = rule
        self._steps = tuple(steps)  # the row that produced each answer token
        self._ends = tuple(ends)  # how many keys stand up to each row's own

    def __repr__(self) -> str:
        return f"GeneratedLayer({list(self.matrix.shape)}, {self.rule}: {len(self)} answer tokens)"

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, step: int) -> Tensor:
        """The weights that produced answer token `step`, `[heads, tokens seen]`."""
        if isinstance(step, bool) or not isinstance(step, int):
            raise RecordError(
                f"generation[layer][{step!r}]: a step is a whole number; layer.matrix takes slices"
            )
        if not -len(self) <= step < len(self):
            raise IndexError(
                f"generation[layer][{step}]: there are {len(self)} answer tokens, 0 … {len(self) - 1}"
            )
        return self.row(self._steps[step])

    def row(self, i: int) -> Tensor:
        """The weights of row i, `[heads, tokens seen]`: over the tokens up to the one it read from."""
        if not -len(self.rows) <= i < len(self.rows):
            raise IndexError(f"row({i}): there are {len(self.rows)} rows, 0 … {len(self.rows) - 1}")
        return self.matrix[0, :, i % len(self.rows), : self._ends[i]]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[step] for step in range(len(self)))

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest weights of each row and their tokens, both `[heads, rows, k]`; streamed, exact."""
        weights, keys = self.matrix.topk(k)
        return weights[0], keys[0]

    def received(self, reduce: str = "sum") -> Tensor:
        """What each token was given by all rows together, `[heads, tokens]`."""
        return self.matrix.received(reduce)[0]


class Generation:
    """What a model read while it wrote one returned sequence; made by `recording.generation(output)`.

    `generation[layer]` is a `GeneratedLayer`. Before it is handed out for the first time, A v is compared with what
    the model's own attention returned in the passes that wrote the sequence.

    Attributes:
        tokens: ids of the text, `[tokens]`: prompt and answer, without padding on the left and behind the end.
        prompt: how many of them were given.
        rows: one `Row` a token that was read: all but the last.
        layers: the layers that ran in every pass.

    Time and memory: the first reading of a layer gathers its q, k and v (of the beams that led to the sequence) into
    one tensor each, O(tokens); A stays unstored. A position bias by distance (T5) is laid out once, heads × tokens².

    Example:
        >>> import kizuki, torch, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2,
        ...                                  bos_token_id=0, eos_token_id=0)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with kizuki.record(model) as recording:
        ...     output = model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=3, do_sample=False,
        ...                             pad_token_id=0, eos_token_id=None)
        >>> generation = recording.generation(output)
        >>> generation.prompt, len(generation.tokens), generation.rows[-1].produced == generation.tokens[-1]
        (3, 6, tensor(True))
    """

    def __init__(
        self, recording: Recording, output: Any, sequence: int | None, prompt: int | None, eos: Any
    ) -> None:
        course = recording._course
        if recording._observations:
            raise RecordError("recording.generation: keep=Observe(...) keeps no q and k; record without it")
        if course is None or not course.starts:
            raise RecordError(f"recording.generation: {recording._missing}")
        self._course = course
        self._cross = recording._cross
        self._once = set(recording._apart)
        self._parts, self._errors = recording._parts()
        sequences = getattr(output, "sequences", output)
        if not isinstance(sequences, Tensor) or sequences.dim() != 2:
            raise RecordError(
                "recording.generation: output is not what model.generate returned: token ids [sequences, tokens], or "
                "an object that has them as .sequences"
            )
        if sequence is None:
            if sequences.shape[0] != 1:
                raise RecordError(
                    f"recording.generation: output has {sequences.shape[0]} sequences; say which: sequence=0 … "
                    f"{sequences.shape[0] - 1}"
                )
            sequence = 0
        for name, number in (("sequence", sequence), ("prompt", prompt)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
                raise RecordError(f"recording.generation: {name} is {number!r} but must be a whole number")
        if not 0 <= sequence < sequences.shape[0]:
            raise RecordError(
                f"recording.generation: sequence is {sequence} but output has {sequences.shape[0]} sequences"
            )
        ids = sequences[sequence].detach().cpu()
        beams = getattr(output, "beam_indices", None)
        given = _prompt_length(course, prompt)
        if not 0 < given < len(ids):
            raise RecordError(
                f"recording.generation: the prompt has {given} tokens but the output {len(ids)}"
            )
        steps = _steps(ids, given, None if beams is None else beams[sequence], eos)
        ids = ids[: given + steps]
        self._rows_of = _batch_rows(
            course, given, None if beams is None else beams[sequence].tolist(), sequence
        )
        self._check_ids(ids)
        if course.length < len(ids) - 1:
            raise RecordError(
                f"recording.generation: {course.length} tokens were read in the recorded passes but the sequence has "
                f"{len(ids)}; record the whole model.generate call, with its cache"
            )
        self._first = self._padding()
        self.tokens = ids[self._first :]
        self.prompt = given - self._first
        begin = max(self._first, course.offset)
        self._places = range(begin, len(ids) - 1)  # of the rows among all places, padding included
        self.rows = tuple(
            Row(place - self._first, int(ids[place]), int(ids[place + 1]) if place + 1 >= given else None)
            for place in self._places
        )
        self.layers = tuple(layer for layer in recording.layers if layer in self._parts)
        self._made: dict[Layer, GeneratedLayer] = {}

    def __repr__(self) -> str:
        produced = len(self.tokens) - self.prompt
        return f"Generation({self.prompt} tokens given, {produced} produced, {len(self.layers)} layers)"

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, layer: Layer) -> GeneratedLayer:
        """A layer over prompt and answer; RecordError where it cannot be shown truly."""
        if layer not in self._made:
            if layer not in self._parts:
                why = self._errors.get(layer, "it was not recorded in the passes that wrote the answer")
                if layer in self._once:
                    why = f"it ran once, before the passes that wrote the answer; read recording[{layer!r}]"
                raise RecordError(f"generation[{layer!r}]: {why}")
            try:
                self._made[layer] = self._make(self._parts[layer], layer in self._cross)
            except RecordError as error:
                raise RecordError(f"generation[{layer!r}]: {error}") from None
        return self._made[layer]

    # -- which rows of which pass ------------------------------------------------------------------

    def _check_ids(self, ids: Tensor) -> None:
        """Every pass must have read the tokens of the sequence, in the batch row it is taken from."""
        for number, (start, read) in enumerate(zip(self._course.starts, self._course.ids, strict=True)):
            if read is None:
                continue
            row = self._rows_of[number]
            if row is None:
                continue
            expected = ids[start : start + read.shape[1]]
            if row >= read.shape[0] or not torch.equal(read[row, : len(expected)].cpu(), expected):
                raise RecordError(
                    f"recording.generation: pass {number} did not read this sequence's tokens in row {row} of its "
                    "batch; for beams, give what model.generate(..., return_dict_in_generate=True, output_scores=True) "
                    "returned, which has beam_indices"
                )

    def _padding(self) -> int:
        """How many places before the text no row sees, the same in every layer that has the whole of it."""
        for layer, parts in self._parts.items():
            if layer not in self._cross and not parts[0].key_start:
                line = _row(parts[0].lines.seen, self._rows_of[0])[0]
                return int(line.to(torch.uint8).argmax()) if bool(line.any()) else 0
        return 0

    # -- one layer ---------------------------------------------------------------------------------

    def _make(self, parts: list[Part], cross: bool) -> GeneratedLayer:
        from kizuki import attend

        stop = self._places.stop
        query = self._gather(parts, "query", stop)
        first, last, count = (self._lines(parts, name, stop) for name in ("first", "last", "count"))
        begin = self._places.start - parts[0].start  # rows of padding
        if cross:
            key, value = (_row(getattr(parts[0], name), self._rows_of[0]) for name in ("key", "value"))
            seen = _row(parts[0].lines.seen, self._rows_of[0])
            place, ends = 0, [key.shape[2]] * len(self.rows)
        else:
            place = max(parts[0].key_start, self._first)
            cut = place - parts[0].key_start
            key, value = (self._gather(parts, name, stop)[:, :, cut:] for name in ("key", "value"))
            seen = self._lines(parts, "seen", stop)[:, cut:]
            ends = [at - place + 1 for at in self._places]
        live = count[:, begin:] > 0
        lines = Lines(
            torch.where(live, first[:, begin:] - place, 0), torch.where(live, last[:, begin:] - place, -1),
            count[:, begin:], seen,
        )  # fmt: skip
        if place > self._first and not cross:
            raise RecordError(
                f"its cache had dropped the first {place - self._first} tokens before the first pass"
            )
        query = query[:, :, begin:]
        rule = fit(lines, key.shape[2])
        row = list(self._used(parts, stop))[-1][1]
        bias = _bias(parts[-1], row, self._first, query.shape[2], key.shape[2])
        matrix = attend(
            query,
            key,
            mask=rule.mask(query.shape[2]),
            scale=parts[0].scale,
            softcap=parts[0].softcap,
            sinks=parts[0].sinks,
            bias=bias,
        )
        self._check(matrix, value, parts)
        steps = [number for number, row in enumerate(self.rows) if row.produced is not None]
        return GeneratedLayer(matrix, value, self.rows, str(rule), steps, ends)

    def _used(self, parts: list[Part], stop: int) -> Iterator[tuple[Part, int, int]]:
        """The parts before place `stop`, with the batch row of each and how many of its queries count."""
        for number, part in enumerate(parts):
            row = self._rows_of[number]
            if part.start < stop and row is not None:
                yield part, row, min(part.query.shape[2], stop - part.start)

    def _gather(self, parts: list[Part], name: str, stop: int) -> Tensor:
        pieces = []
        for part, row, queries in self._used(parts, stop):
            piece = _row(getattr(part, name), row)
            # Before its first queries, a part may hold the keys that were in the cache.
            extra = 0 if name == "query" else piece.shape[2] - part.query.shape[2]
            pieces.append(piece[:, :, : extra + queries])
        return torch.cat(pieces, 2)

    def _lines(self, parts: list[Part], name: str, stop: int) -> Tensor:
        pieces = []
        for part, row, queries in self._used(parts, stop):
            piece = _row(getattr(part.lines, name), row)
            extra = piece.shape[1] - part.query.shape[2]
            pieces.append(piece[:, : extra + queries])
        return torch.cat(pieces, 1)

    def _check(self, matrix: AttentionMatrix, value: Tensor, parts: list[Part]) -> None:
        """A v of every sampled row against the model's own, in units of √ε · max|v|."""
        mine = matrix @ value
        unit = leeway(matrix.dtype) * max(float(value.abs().max()), 1e-30)
        worst = 0.0
        for part, row, queries in self._used(parts, self._places.stop):
            if part.sample is None:
                continue
            at = [r for r in part.rows if r < queries and part.start + r >= self._places.start]
            own = _row(part.sample, row)[:, :, [part.rows.index(r) for r in at]]
            got = mine[:, :, [part.start + r - self._places.start for r in at]]
            gap = (got - own).abs().nan_to_num(nan=math.inf)
            gap = gap.masked_fill(got.isnan() & own.isnan(), 0)
            worst = max(worst, float(gap.max()) / unit if gap.numel() else 0.0)
        if worst > 1:
            raise RecordError(
                f"A v over the whole text is not what the layer returned step by step (off by {worst:.2g} times what "
                "rounding explains)"
            )


def _row(tensor: Tensor, row: int | None) -> Tensor:
    """One batch row, kept as an axis; a batch of 1 serves all."""
    row = 0 if row is None or tensor.shape[0] == 1 else row
    return tensor[row : row + 1]


def _prompt_length(course: Course, prompt: int | None) -> int:
    if prompt is not None:
        return prompt
    if course.cache is None:
        raise RecordError(
            "recording.generation: the model ran without a cache of transformers. Where each pass read the whole text, "
            "say how many tokens were given: prompt=. Where it decoded through one of its own (KVCache), each pass "
            "stands alone: recording.pass_(n), under keep='all'"
        )
    return course.starts[0] + course.queries(0)


def _steps(ids: Tensor, prompt: int, beams: Tensor | None, eos: Any) -> int:
    """How many tokens were produced, the end token included and the padding behind it not."""
    total = len(ids) - prompt
    if beams is not None:
        return min(total, int((beams >= 0).sum()))
    ends = set() if eos is None else {int(e) for e in ([eos] if isinstance(eos, int) else eos)}
    answer = ids[prompt:].tolist()
    for step, token in enumerate(answer):
        # Behind the end everything is one padding token; anything else means that it was not the end.
        if token in ends and len(set(answer[step + 1 :])) <= 1:
            return step + 1
    return total


def _batch_rows(course: Course, prompt: int, beams: list[int] | None, sequence: int) -> list[int | None]:
    """The batch row of each pass that the sequence came through; None for passes behind its end."""
    if beams is None:
        return [sequence] * len(course.starts)
    rows: list[int | None] = []
    step = 0
    for number, start in enumerate(course.starts):
        if start + course.queries(number) > prompt:
            step += 1
        rows.append(beams[step] if step < len(beams) and beams[step] >= 0 else None)
    return rows


def _bias(part: Part, row: int, first: int, queries: int, keys: int) -> Tensor | None:
    """The bias of all rows, from that of the last pass."""
    if part.bias is None:
        return None
    line = _row(part.bias, row)  # [1, heads, keys]
    if part.by_key:
        return line[:, :, None, first : first + keys]
    at = torch.arange(keys, device=line.device)
    own = torch.arange(queries, device=line.device)[:, None] + keys - queries
    far = (own - at).clamp(min=0)  # [queries, keys]; keys behind the own one are masked
    return line.flip(2)[:, :, far]
