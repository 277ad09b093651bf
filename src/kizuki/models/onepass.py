"""One forward pass of a model over a text, recorded: what the explorer and `kizuki look` start from."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from .predict import PredictError, next_tokens, output_head
from .record import recorder
from .recording import Recording
from .sources import Progress, Source
from .tokens import TextError, Tokens


@dataclass(frozen=True, eq=False)
class Run:
    """What one pass over a text left.

    Attributes:
        tokens: the text's tokens.
        recording: A of every chosen layer, `recording[layer]` of shape [1, heads, tokens, tokens].
        predictions: for each position the most probable next tokens `(id, label, probability)`; None for a
            model that predicts none.
        note: why there are no predictions, where a reader would expect some; else "".
        source: the model it was; None for a recording that was opened from a file.
        seconds: how long the parts took: "tokens", "forward", "predictions".

    Example:
        >>> from kizuki.models import load, run
        >>> done = run(load("minilm"), "They had seen it.", layers=[0])
        >>> done.tokens.labels[1], done.recording.layers, done.predictions is None, sorted(done.seconds)
        ('They', (0,), True, ['forward', 'predictions', 'tokens'])
    """

    tokens: Tokens
    recording: Recording
    predictions: list[list[tuple[int, str, float]]] | None
    source: Source | None = field(repr=False)
    seconds: dict[str, float]
    note: str = ""


def run(
    source: Source,
    text: str | Tokens,
    *,
    layers: int | Iterable[int] | None = None,
    heads: int | Iterable[int] | None = None,
    k: int = 5,
    progress: Progress | None = None,
) -> Run:
    """Read a text with a model once, its attention recorded.

    Args:
        source: what `kizuki.models.load` returned.
        text: the text, or its tokens.
        layers, heads: which to record, counted from 0; `None` = all.
        k: how many next tokens to predict at each position; 0 = none.
        progress: called as `progress("forward pass", layers done, layers)` and for the predictions.

    Returns:
        A `Run`.

    Raises:
        TextError: the text is empty or longer than the model's positions.
        RecordError: a layer or head that the model does not have, a model whose attention cannot be recorded.

    Time and memory: one forward pass of the base model, its q, k and v; no logits for the whole text and no
    cache.

    Example:
        >>> from kizuki.models import load, run
        >>> done = run(load("minilm"), "They had seen it.", layers=[0])
        >>> done.recording[0].shape
        torch.Size([1, 12, 7, 7])
    """
    report = progress or (lambda stage, done, total: None)
    began = time.perf_counter()
    tokens = source.tokenize(text) if isinstance(text, str) else text
    check_length(source, tokens)
    seconds = {"tokens": time.perf_counter() - began}

    model = source.model
    has_head = output_head(model) is not None
    # The head is left out of the pass: all positions' logits at once would be the largest array of it.
    base = model.base_model if has_head else model
    options = {"use_cache": False} if source.kind == "decoder" else {}
    ids = torch.tensor([tokens.ids], device=next(model.parameters()).device)

    began = time.perf_counter()
    with (
        recorder(
            model,
            layers=layers,
            heads=heads,
            name=source.name,
            on_layer=lambda done, total: report("forward pass", done, total),
        ) as recording,
        torch.no_grad(),
    ):
        hidden = base(input_ids=ids, **options)[0]  # [1, tokens, width]
    recording.tokens = tokens
    seconds["forward"] = time.perf_counter() - began

    began = time.perf_counter()
    predictions, note = None, ""
    if has_head and k > 0:
        try:
            predictions = next_tokens(source, hidden[0], k, progress=progress)
        except PredictError as error:
            note = str(error)
    seconds["predictions"] = time.perf_counter() - began
    return Run(tokens, recording, predictions, source, seconds, note)


def check_length(source: Source, tokens: Tokens) -> None:
    """Raise TextError for no tokens, or for more than the model has positions for."""
    if not tokens.ids:
        raise TextError("text gives no tokens; give at least one word")
    limit = source.max_positions
    if limit is not None and len(tokens.ids) > limit:
        raise TextError(
            f"text has {len(tokens.ids):,} tokens but {source.name} reads at most {limit:,}; give a shorter text, or "
            f"its beginning (kizuki look --first {limit})"
        )
