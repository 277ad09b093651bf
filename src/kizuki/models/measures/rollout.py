"""Rollout: what a token takes from the text through all layers, if every layer passed on what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..recording import Recording
from ..rule import RecordError
from .reader import Reader, check


@dataclass(frozen=True, eq=False)
class Rollout:
    """The rollout of chosen tokens.

    Attributes:
        weights: `[batch, tokens, keys]`, float32 (float64 of a float64 model), how much of each key arrives at each
            token; rows sum to 1, but for what sinks take.
        control: the same for equal weights on the keys each row sees. Under a causal mask it heaps up at the beginning
            of the text by itself.
        tokens: the chosen positions.
        layers: the layers that were gone through, first to last.

    Example:
        >>> import kizuki, torch, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with kizuki.record(model) as recording:
        ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
        >>> found = kizuki.models.measures.rollout(recording, [0, 4])
        >>> found.tokens, found.weights.shape, found.layers  # the first token can only come from itself
        ((0, 4), torch.Size([1, 2, 5]), (0, 1, 2))
    """

    weights: Tensor
    control: Tensor
    tokens: tuple[int, ...]
    layers: tuple[Any, ...]


def rollout(recording: Recording, tokens: int | Sequence[int], *, residual: float = 0.5) -> Rollout:
    """Attention rollout of chosen tokens: `r ← residual · r + (1 − residual) · r · mean_h A`, layer by layer downwards.

    Rough: it takes the mean over heads, which shows none of them, and supposes that values, norms and MLPs pass on
    everything as it is. Read it beside its control.

    Args:
        recording: every layer of a pass over the whole text; only the recorded layers and heads are gone through.
        tokens: one position or several; −1 is the last.
        residual: the share that goes past each layer, 0 … 1.

    Returns a `Rollout`.

    Raises OptionError for a position or share that is none, RecordError for layers that do not read the text itself
    (cross-attention, a cache).

    Cost: of each layer one product Aᵀ y with as many columns as tokens, and one of a single head for the control;
    memory grows with the text, never with its square.

    Source: Abnar and Zuidema 2020 (Quantifying attention flow in transformers), section 3.1.

    Example:
        >>> import kizuki, torch, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with kizuki.record(model) as recording:
        ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
        >>> kizuki.models.measures.rollout(recording, -1).weights.sum(-1).round(decimals=4)
        tensor([[1.]])
    """
    from kizuki import OptionError

    check(recording, "measures.rollout")
    if isinstance(residual, bool) or not isinstance(residual, (int, float)) or not 0 <= residual <= 1:
        raise OptionError(f"measures.rollout: residual is {residual!r} but must be a number 0 … 1")
    arriving = plain = length = None
    chosen: list[int] = []
    layers = tuple(recording.layers)
    for layer in reversed(layers):
        reader = Reader(recording, layer)
        if reader.queries != reader.keys or (length is not None and reader.keys != length):
            raise RecordError(
                f"measures.rollout: layer {layer!r} has {reader.queries} queries and {reader.keys} keys; record the "
                "self-attention of one pass over the whole text"
            )
        if arriving is None or plain is None:
            length = reader.keys
            chosen = _positions(tokens, length)
            start = torch.zeros(
                reader.batch, length, len(chosen), dtype=reader.wide.dtype, device=reader.A.device
            )
            start[:, chosen, range(len(chosen))] = 1
            arriving = plain = start
        arriving = residual * arriving + (1 - residual) * (reader.wide.mean_heads().T @ arriving)
        plain = residual * plain + (1 - residual) * (reader.uniform.mean_heads().T @ plain)
    if arriving is None or plain is None:
        raise RecordError("measures.rollout: the recording has no layers")
    return Rollout(arriving.mT, plain.mT, tuple(chosen), layers)


def _positions(tokens: int | Sequence[int], length: int) -> list[int]:
    from kizuki import OptionError

    given = [tokens] if isinstance(tokens, int) else list(tokens)
    for token in given:
        if isinstance(token, bool) or not isinstance(token, int) or not -length <= token < length:
            raise OptionError(
                f"measures.rollout: tokens holds {token!r} but must hold positions −{length} … {length - 1}"
            )
    if not given:
        raise OptionError("measures.rollout: tokens is empty; name at least one position")
    return [token % length for token in given]
