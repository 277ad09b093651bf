"""What a recording holds: q, k, v and the mask's rule of a model's last forward pass, one A a layer."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .rule import RecordError, Rule

if TYPE_CHECKING:
    from kizuki import AttentionMatrix

    from .tokens import Tokens


@dataclass(eq=False)
class Capture:
    """One layer of one pass, as its attention function was given it.

    `rules` are what the mask can have been, most plausible first: exactly one, but for a custom
    attention function that was given no mask at all. `sample` holds the function's own output of a few
    rows, against which A is checked before anybody sees it.
    """

    path: str
    query: Tensor  # [batch, heads, queries, head_dim]
    key: Tensor  # [batch, kv_heads, keys, head_dim]
    value: Tensor  # [batch, kv_heads, keys, value_dim]
    scale: float | None
    softcap: float | None
    sinks: Tensor | None  # [heads]
    rules: list[Rule]
    rows: list[int]
    sample: Tensor | None  # [batch, heads, rows, value_dim]; None where dropout makes it random
    versions: tuple[int, ...] | None = field(init=False)

    def __post_init__(self) -> None:
        self.versions = self._versions()

    def _versions(self) -> tuple[int, ...] | None:
        tensors = (self.query, self.key, self.value)
        # Tensors made under inference_mode carry no version counter.
        return None if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)

    def matrix(self) -> tuple[AttentionMatrix, Rule]:
        """A of this layer, checked against the model's own output, and the rule it was made with."""
        if self._versions() != self.versions:
            raise RecordError(
                f"{self.path}: the model's tensors were written over after the pass (a cache that was reused); "
                "record the pass again and read it first"
            )
        if self.sample is None and len(self.rules) > 1:
            raise RecordError(
                f"{self.path}: its custom attention function was given no mask, and under dropout its output cannot "
                "tell which keys it reads; call model.eval()"
            )
        worst = math.inf
        for rule in self.rules:
            matrix = self._attend(rule)
            gap = self._gap(matrix, rule)
            if gap <= 1:
                return matrix, rule
            worst = min(worst, gap)
        raise RecordError(
            f"{self.path}: softmax over q, k and the mask does not give this layer's own output (off by "
            f"{worst:.2g} times what rounding explains); its attention does something that kizuki does not know"
        )

    def _attend(self, rule: Rule) -> AttentionMatrix:
        from kizuki import attend

        return attend(
            self.query,
            self.key[:, :, : rule.stop],
            mask=rule.mask(self.query.shape[2]),
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def _gap(self, matrix: AttentionMatrix, rule: Rule) -> float:
        """The largest difference from the model's own rows, in units of √ε · max|v| (0 where there is no sample)."""
        if self.sample is None or self.sample.numel() == 0:
            return 0.0
        rows = torch.tensor(self.rows, device=self.query.device)
        weights = matrix[:, :, rows]  # [batch, heads, rows, keys]
        value = self.value[:, :, : rule.stop]
        value = value.repeat_interleave(self.query.shape[1] // value.shape[1], 1)
        mine = weights.to(torch.float64) @ value.to(torch.float64)
        # A row that sees nothing is 0 here, and in a model whatever its mask's large negative number makes of it.
        live = (weights.sum(-1) > 0) | weights.isnan().any(-1)
        gap = (mine - self.sample.to(torch.float64)).abs().amax(-1)[live]
        unit = math.sqrt(torch.finfo(self.query.dtype).eps) * max(float(value.abs().max()), 1e-30)
        if not gap.numel():
            return 0.0
        same_nan = mine.isnan().any(-1)[live] & self.sample.isnan().any(-1)[live]
        return float(gap.masked_fill(same_nan, 0).nan_to_num(nan=math.inf).max()) / unit


class Recording:
    """The attention of a model's last forward pass in a `kizuki.record` block.

    `recording[layer]` is that layer's `AttentionMatrix`, `[batch, heads, queries, keys]`, built from the
    recorded q and k and the mask's rule: O(queries + keys) memory, nothing computed before it is read.
    `len(recording)` counts the recorded layers and iterating gives their numbers.

    Attributes:
        layers: the recorded layers, counted from 0.
        heads: the recorded heads, or None for all; head h of `recording[layer]` is `heads[h]` of the model.
        passes: how many forward passes of the model ended in the block.
        model_name: the model's name, or its class where it has none.
        tokens: the last pass's text and its tokens, where somebody said them: `kizuki.models.run` does, and
            `recording.tokens = source.tokenize(text)` after a pass of your own. The next pass drops them.
        versions: of kizuki, torch and transformers when it was saved, for one from a file; else None.

    A key is what the layer was given: behind a cache that keeps a sliding window only, key 0 is the first
    key still kept and not the first token.

    Example:
        >>> import kizuki, torch, transformers
        >>> config = transformers.LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8,
        ...                                   num_hidden_layers=2, num_attention_heads=2)
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> with kizuki.record(model) as recording:
        ...     _ = model(torch.tensor([[1, 2, 3, 4, 5]]))
        >>> recording[1].shape, recording.rule(1)
        (torch.Size([1, 2, 5, 5]), 'causal')
    """

    def __init__(self, model_name: str, layers: Sequence[int], heads: Sequence[int] | None) -> None:
        self.model_name = model_name
        self.layers = tuple(layers)
        self.heads = None if heads is None else tuple(heads)
        self.passes = 0
        self.tokens: Tokens | None = None
        self.versions: dict[str, str] | None = None
        self._captures: MutableMapping[int, Capture] = {}
        self._errors: dict[int, RecordError] = {}
        self._matrices: dict[int, tuple[AttentionMatrix, Rule]] = {}
        self._missing = "no forward pass of the model ran in the block, on the thread that opened it"

    def __repr__(self) -> str:
        return (
            f"Recording({self.model_name}: {len(self.layers)} layers, {self.passes} passes, "
            f"{len(self._captures)} layers held)"
        )

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __contains__(self, layer: object) -> bool:
        return layer in self.layers

    def __getitem__(self, layer: int) -> AttentionMatrix:
        """A of a layer in the last pass.

        Before it is handed out for the first time, three of its rows times v are compared with what the
        model's own attention function returned for them.

        Raises:
            RecordError: the layer was not chosen, no pass ran, the pass went by without this layer, its
                mask has no rule, or A does not explain the layer's own output.
        """
        return self._matrix(layer)[0]

    def value(self, layer: int) -> Tensor:
        """v of a layer in the last pass, `[batch, kv_heads, keys, value_dim]`, its heads not repeated."""
        rule = self._matrix(layer)[1]
        return self._captures[layer].value[:, :, : rule.stop]

    def rule(self, layer: int) -> str:
        """The mask's rule of a layer in words, such as "causal & window(7, None) & keys"."""
        return str(self._matrix(layer)[1])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the recording into one safetensors file, which `kizuki.open` opens.

        Kept of every layer: q, k and v as they are (keys behind the mask's end, which are room in a cache, are
        left out), scale, softcap, sinks, the mask's rule, and the rows of the model's own output that A is
        checked against; and the model's name, the tokens with their places in the text, and the versions of
        kizuki, torch and transformers. A layer that cannot be handed out is kept as the error it raises.

        Args:
            path: the file, by custom `….safetensors`. One that is there is replaced, at once and only when the
                new one is complete and on the disk; a writer that is killed leaves a `….part` beside it.

        Returns:
            The path.

        Raises:
            RecordError: no layer can be handed out, `tokens` are not those of the layers, or the file cannot
                be written. What was at the path is then as it was.

        Time and memory: one writing of the bytes and the check of every layer; one tensor more than the
        recording holds.

        Example:
            >>> recording.save("mika.safetensors")                           # doctest: +SKIP
            PosixPath('mika.safetensors')
        """
        from .store import save

        return save(self, path)

    def _matrix(self, layer: int) -> tuple[AttentionMatrix, Rule]:
        if layer not in self.layers:
            raise RecordError(
                f"recording[{layer!r}]: layer {layer!r} was not recorded; recorded are {_few(self.layers)}"
            )
        if layer in self._errors:
            raise RecordError(f"recording[{layer}]: {self._errors[layer]}")
        if layer not in self._captures:
            raise RecordError(f"recording[{layer}]: {self._missing}")
        if layer not in self._matrices:
            try:
                self._matrices[layer] = self._captures[layer].matrix()
            except RecordError as error:
                raise RecordError(f"recording[{layer}]: {error}") from None
        return self._matrices[layer]

    # The rest is called by the recorder as a pass goes on.

    def _begin(self) -> None:
        """Drop the last pass, so that two are never held at once."""
        self._fail()

    def _fail(self) -> None:
        self._captures.clear()
        self._errors.clear()
        self._matrices.clear()
        self.tokens = None
        self._missing = "the last forward pass did not finish"

    def _finish(self) -> None:
        self.passes += 1
        self._missing = (
            "the last forward pass went by without this layer's attention function: its class does the "
            "attention in some other way for this configuration, or skips the layer"
        )


def _few(layers: Sequence[int]) -> str:
    if len(layers) > 8 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} … {layers[-1]}"
    return ", ".join(str(layer) for layer in layers)
