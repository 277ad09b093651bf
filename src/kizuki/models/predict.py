"""What a model would say next at every position, without the [positions, vocabulary] array of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .sources import Progress, Source
from .tokens import token_label

CHUNK = 2**24  # logits held at once: 64 MB of float32


class PredictError(ValueError):
    """A model's predictions cannot be computed from its hidden states."""


def next_tokens(
    source: Source, hidden: Tensor, k: int = 5, *, progress: Progress | None = None
) -> list[list[tuple[int, str, float]]] | None:
    """The k most probable next tokens at each position: `softmax(head(hidden))`, in chunks of positions.

    Args:
        source: the model, with its language-model head.
        hidden: the last hidden states of its base model, after the final norm, `[positions, width]`.
        k: how many to give.
        progress: called as `progress("predictions", positions done, positions)`.

    Returns:
        For each position k triples `(id, label, probability)`, most probable first; None for a model without
        a language-model head.

    Raises:
        PredictError: the model does something to its logits that is not known here, found by comparing with
            its own logits on two tokens.

    Time and memory: positions · width · vocabulary multiplications; 64 MB whatever the length.

    Example:
        >>> import torch
        >>> from kizuki.models import load, next_tokens
        >>> source = load("smollm2")
        >>> with torch.no_grad():
        ...     hidden = source.model.base_model(torch.tensor([[504]])).last_hidden_state[0]
        >>> len(next_tokens(source, hidden, k=3)[0])
        3
    """
    head = output_head(source.model)
    if head is None:
        return None
    if k < 1:
        raise PredictError(f"kizuki.models.next_tokens: k is {k} but must be a whole number from 1 up")
    _check_head(source.model, head)
    rows = hidden.reshape(-1, hidden.shape[-1])
    found: list[list[tuple[int, str, float]]] = []
    labels: dict[int, str] = {}
    step = 1
    with torch.no_grad():
        start = 0
        while start < rows.shape[0]:
            logits = finish(source.model, head(rows[start : start + step]).float())
            probability, ids = torch.topk(logits.softmax(-1), min(k, logits.shape[-1]), dim=-1)
            for line_p, line_i in zip(probability.tolist(), ids.tolist(), strict=True):
                for token in line_i:
                    if token not in labels:
                        labels[token] = token_label(source.tokenizer, token)
                found.append([(i, labels[i], p) for i, p in zip(line_i, line_p, strict=True)])
            start = min(start + step, rows.shape[0])
            if progress is not None:
                progress("predictions", start, rows.shape[0])
            step = max(1, CHUNK // logits.shape[-1])
    return found


def output_head(model: Any) -> nn.Module | None:
    """The layer that turns hidden states into logits over the vocabulary, of a model that predicts the next token."""
    names = type(model).__name__
    if not ("CausalLM" in names or "LMHead" in names):
        return None
    head = model.get_output_embeddings()
    return head if isinstance(head, nn.Module) else None


def finish(model: Any, logits: Tensor) -> Tensor:
    """What models do to their logits after the head: a factor (Cohere), a divisor (Granite), a softcap (Gemma 2)."""
    config = model.config.get_text_config()
    factor = getattr(config, "logit_scale", None)
    if factor is not None:
        logits = logits * factor
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:
        logits = logits / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits


def _check_head(model: Any, head: nn.Module) -> None:
    """Raise unless head and finish give the model's own logits, on two tokens."""
    ids = (
        torch.tensor([[0, 1]], device=next(model.parameters()).device)
        % model.config.get_text_config().vocab_size
    )
    with torch.no_grad():
        mine = finish(model, head(model.base_model(input_ids=ids, use_cache=False)[0]).float())
        own = model(input_ids=ids, use_cache=False).logits.float()
    if not bool(torch.isfinite(own).all()):
        raise PredictError(
            f"kizuki.models.next_tokens: {type(model).__name__} gives NaN or Inf for its logits"
        )
    eps = torch.finfo(next(head.parameters()).dtype).eps
    near = 16 * eps * float(own.abs().max())
    if mine.shape != own.shape or not torch.allclose(mine, own, rtol=0, atol=near):
        raise PredictError(
            f"kizuki.models.next_tokens: {type(model).__name__} does something to its logits that is not known here"
        )
