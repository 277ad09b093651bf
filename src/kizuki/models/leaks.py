"""The leak test of a whole model: weight on the future, on other documents, on padding, in every recorded head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .measures.reader import check, same_heads
from .recording import Recording

KINDS = ("future", "documents", "padding")


@dataclass(frozen=True, eq=False)
class ModelLeaks:
    """The most that any row of each head gives to what it must not read.

    Attributes:
        future, documents, padding: `[batch, layers, heads]`; None where it was not asked for.
        layers, heads: which ones they are.

    Example:
        >>> import kizuki
        >>> from importlib.resources import files
        >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
        >>> found = kizuki.models.leaks(recording)
        >>> found.none, found.future.shape, found.where()
        (True, torch.Size([1, 1, 9]), [])
    """

    future: Tensor | None
    documents: Tensor | None
    padding: Tensor | None
    layers: tuple[Any, ...]
    heads: tuple[int, ...]

    @property
    def none(self) -> bool:
        """Whether all that was asked for is exactly 0. NaN is no proof."""
        return all(bool((tensor == 0).all()) for tensor in self._asked().values())

    def where(self) -> list[tuple[str, int, Any, int, float]]:
        """Each leak as `(kind, text of the batch, layer, head, weight)`, by kind, text, layer and head."""
        return [
            (kind, b, self.layers[layer], self.heads[head], float(tensor[b, layer, head]))
            for kind, tensor in self._asked().items()
            for b, layer, head in (tensor != 0).nonzero().tolist()
        ]

    def _asked(self) -> dict[str, Tensor]:
        return {kind: tensor for kind in KINDS if (tensor := getattr(self, kind)) is not None}

    def __str__(self) -> str:
        said = []
        for kind, tensor in self._asked().items():
            wrong = int((tensor != 0).sum())
            if wrong:
                at = [self.layers[layer] for layer in (tensor != 0).any(2).any(0).nonzero()[:, 0].tolist()]
                said.append(
                    f"{kind}: LEAK in {wrong} of {tensor.numel()} heads, layers {', '.join(map(str, at))}, up to "
                    f"{float(tensor.max()):.3g}"
                )
            else:
                said.append(f"{kind}: none")
        return "; ".join(said)


def leaks(
    recording: Recording,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    future: bool = True,
) -> ModelLeaks:
    """Look in every recorded head for weight where there must be none; a model without leaks gives 0 to the bit.

    A recording holds the mask that the model's attention was given, and A was compared with the model's own output; so
    a mask that was never made, or was dropped on the way, shows here as weight.

    Args:
        recording: what `kizuki.record` or `kizuki.open` gave.
        documents: integer `[keys]`, the document of each position of packed texts; None does not look.
        padding: bool `[keys]` or `[batch, keys]`, True where a key is padding (`attention_mask == 0`); None does not
            look.
        future: whether keys behind a query's own position are forbidden; False for an encoder.

    Returns `ModelLeaks`: per head the largest sum of forbidden weights of any of its rows; `.none` where all are 0,
    `.where()` which are not.

    Raises OptionError where nothing is asked for, and as `A.leaks` and `recording[layer]` do.

    Cost: one pass over A of each layer; memory grows with the text, never with its square.

    Example:
        >>> import kizuki, torch, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with kizuki.record(model) as recording:
        ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
        >>> print(kizuki.models.leaks(recording))
        future: none
        >>> print(kizuki.models.leaks(recording, documents=torch.tensor([0, 0, 0, 1, 1])))
        future: none; documents: LEAK in 6 of 6 heads, layers 0, 1, 2, up to ...
    """
    from kizuki import OptionError

    check(recording, "kizuki.models.leaks")
    if documents is None and padding is None and not future:
        raise OptionError(
            "kizuki.models.leaks: nothing is asked for; give documents= or padding=, or leave future=True"
        )
    found = []
    for layer in recording:
        A = recording[layer]
        found.append(A.leaks(documents=documents, padding=padding, future=future))
    heads = same_heads(recording, "kizuki.models.leaks")
    stacked = {
        kind: None if getattr(found[0], kind) is None else torch.stack([getattr(f, kind) for f in found], 1)
        for kind in KINDS
    }
    return ModelLeaks(**stacked, layers=tuple(recording.layers), heads=heads)
