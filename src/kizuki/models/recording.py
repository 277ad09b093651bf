"""What a recording holds: q, k, v and the mask's rule of a model's last forward pass, one A a layer."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import KizukiTypeError, OptionError, ShapeError
from .observed import widened
from .rule import RecordError, Rule
from .saves import Saves
from .shows import Shows

if TYPE_CHECKING:
    from kizuki import AttentionMatrix, Observation

    from .course import Course, Part
    from .generation import Generation
    from .tokens import Tokens

Layer = int | str  # a number in a model of one stack of layers, a name in others


@dataclass(eq=False)
class Capture:
    """One layer of one pass, as its attention function was given it.

    `rules` are what the mask can have been, most plausible first: exactly one, but for a custom
    attention function that was given no mask at all. `sample` holds the function's own output of a few
    rows, against which A is checked before anybody sees it (for a layer whose attention shows only further on, the
    rows that were carried there and found to give its output).
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
    sample: (
        Tensor | None
    )  # [batch, heads, rows, value_dim]; None where dropout makes it random or it is not known
    bias: Tensor | None = None  # broadcasts to [batch, heads, queries, keys]; the model's own tensor
    versions: tuple[int, ...] | None = field(init=False)

    def __post_init__(self) -> None:
        self.versions = self.now()

    def now(self) -> tuple[int, ...] | None:
        """The version counters of q, k, v: they move when somebody writes over them."""
        tensors = (self.query, self.key, self.value)
        # Tensors made under inference_mode carry no version counter.
        return None if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)

    def matrix(self) -> tuple[AttentionMatrix, Rule]:
        """A of this layer, checked against the model's own output, and the rule it was made with."""
        if self.now() != self.versions:
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
        raise RecordError(f"{self.path}: {self.unlike(worst)}")

    def unlike(self, gap: float) -> str:
        """The line for a layer whose own output the formula does not give."""
        odd = [name for name in ("query", "key", "value") if not bool(getattr(self, name).isfinite().all())]
        why = (
            f"there is NaN or Inf in its {' and '.join(odd)}, which its own attention carried into rows that kizuki "
            "keeps free of it"
            if odd
            else "its attention does something that kizuki does not know"
        )
        return (
            f"softmax over q, k and the mask does not give this layer's own output (off by {gap:.2g} times what "
            f"rounding explains); {why}"
        )

    def _attend(self, rule: Rule) -> AttentionMatrix:
        from kizuki import attend

        try:
            return attend(
                self.query,
                self.key[:, :, : rule.stop],
                mask=rule.mask(self.query.shape[2]),
                scale=self.scale,
                softcap=self.softcap,
                sinks=self.sinks,
                bias=None if self.bias is None else self.bias[..., : rule.stop],
            )
        except (ShapeError, OptionError, KizukiTypeError) as error:
            raise RecordError(f"{self.path}: {error}") from None

    def mixed(self, rule: Rule) -> Tensor:
        """A v of the sampled rows in float64, `[batch, heads, rows, value_dim]`."""
        return self._mix(self._attend(rule), rule)[1]

    def _mix(self, matrix: AttentionMatrix, rule: Rule) -> tuple[Tensor, Tensor]:
        """The weights of the sampled rows, `[batch, heads, rows, keys]`, and these times v in float64."""
        rows = torch.tensor(self.rows, device=self.query.device)
        weights = matrix[:, :, rows]
        value = self.value[:, :, : rule.stop]
        value = value.repeat_interleave(self.query.shape[1] // value.shape[1], 1)
        return weights, weights.to(torch.float64) @ value.to(torch.float64)

    def _gap(self, matrix: AttentionMatrix, rule: Rule) -> float:
        """The largest difference from the model's own rows, in units of √ε · max|v| (0 where there is no sample)."""
        if self.sample is None or self.sample.numel() == 0:
            return 0.0
        weights, mine = self._mix(matrix, rule)
        # A row that sees nothing is 0 here, and in a model whatever its mask's large negative number makes of it.
        live = (weights.sum(-1) > 0) | weights.isnan().any(-1)
        gap = (mine - self.sample.to(torch.float64)).abs().amax(-1)[live]
        if not gap.numel():
            return 0.0
        largest = max(float(self.value[:, :, : rule.stop].abs().max()), 1e-30)
        unit = leeway(self.query.dtype) * largest
        same_nan = mine.isnan().any(-1)[live] & self.sample.isnan().any(-1)[live]
        return float(gap.masked_fill(same_nan, 0).nan_to_num(nan=math.inf).max()) / unit


def leeway(dtype: torch.dtype) -> float:
    """√ε: how far two ways to compute one row may be apart, by its size. Models in float64 do softmax in float32."""
    return math.sqrt(max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps))


class Recording(Saves, Shows):
    """The attention of a model's forward passes in a `kizuki.record` block: of the last, or of each.

    `recording[layer]` is that layer's `AttentionMatrix`, `[batch, heads, queries, keys]`, built from the
    recorded q and k and the mask's rule: O(queries + keys) memory, nothing computed before it is read.
    `len(recording)` counts the recorded layers and iterating gives their names.

    A layer is called by its number from 0 where the model has one stack of them; where it has several, by the stack and
    the number: "encoder.3", "decoder.3.self", "decoder.3.cross", "vision_model.3". Cross-attention beside one stack is
    "3.cross". A module that attends several times in one pass (ALBERT's shared layer) gives one layer each time.

    Attributes:
        layers: the recorded layers, in the model's order; those met only as they run come at the end.
        heads: the recorded heads, or None for all; head h of `recording[layer]` is `heads[h]` of the model.
        passes: how many forward passes of the model ended in the block; `pass_(n)` shows one where all are kept.
        model_name: the model's name, or its class where it has none.
        tokens: the last pass's text and its tokens, where somebody said them: `kizuki.models.run` does, and
            `recording.tokens = source.tokenize(text)` after a pass of your own. The next pass drops them.
        versions: of kizuki, torch and transformers when it was saved, for one from a file; else None.

    A key is what the layer was given: behind a cache that keeps a sliding window only, key 0 is the first
    key still kept and not the first token (`generation` counts from the first token). An encoder that a model runs once
    for several passes of its decoder stays what it was.

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

    def __init__(self, model_name: str, layers: Sequence[Layer], heads: Sequence[int] | None) -> None:
        self.model_name = model_name
        self.layers = tuple(layers)
        self.heads = None if heads is None else tuple(heads)
        self.passes = 0
        self.tokens: Tokens | None = None
        self.versions: dict[str, str] | None = None
        self._captures: MutableMapping[Layer, Capture] = {}
        self._errors: dict[Layer, RecordError] = {}
        self._matrices: dict[Layer, tuple[AttentionMatrix, Rule]] = {}
        self._observations: dict[Layer, Observation] = {}
        self._kept: list[Recording] | None = None  # every pass, where all are kept
        self._course: Course | None = None  # the passes through one cache that the last one goes on with
        self._cross: set[Layer] = set()
        self._apart: set[Layer] = (
            set()
        )  # layers of a part (an encoder) that ran by itself, before the model's passes
        self._eos: Any = None  # what the model's own settings say ends a text
        self._missing = "no forward pass of the model ran in the block, on the thread that opened it"

    def __repr__(self) -> str:
        return (
            f"Recording({self.model_name}: {len(self.layers)} layers, {self.passes} passes, "
            f"{len(self._captures)} layers held)"
        )

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __contains__(self, layer: object) -> bool:
        return layer in self.layers

    def __getitem__(self, layer: Layer) -> AttentionMatrix:
        """A of a layer in the last pass.

        Before it is handed out for the first time, three of its rows times v are compared with what the
        model's own attention function returned for them.

        Raises:
            RecordError: the layer was not chosen, no pass ran, the pass went by without this layer, its
                mask has no rule, or A does not explain the layer's own output.
        """
        return self._matrix(layer)[0]

    def value(self, layer: Layer) -> Tensor:
        """v of a layer in the last pass, `[batch, kv_heads, keys, value_dim]`, its heads not repeated."""
        rule = self._matrix(layer)[1]
        return self._captures[layer].value[:, :, : rule.stop]

    def rule(self, layer: Layer) -> str:
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
            >>> import kizuki, torch, transformers
            >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
            >>> model = transformers.GPT2LMHeadModel(config).eval()
            >>> with kizuki.record(model) as recording:
            ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
            >>> path = recording.save("five.safetensors")
            >>> torch.equal(kizuki.open(path)[2][...], recording[2][...])
            True
        """
        from .store import save

        return save(self, path)

    def checked(self, layer: Layer) -> bool:
        """Whether A of a layer was compared with the model's own output: not under dropout, nor for a bare `note`."""
        self._matrix(layer)
        return self._captures[layer].sample is not None

    def observation(self, layer: Layer) -> Observation:
        """What `keep=kizuki.Observe(...)` read of a layer as it ran, in the last pass.

        Raises RecordError where the block was opened without it, and for the same reasons as `recording[layer]`.
        """
        self._held(layer)
        if layer not in self._observations:
            raise RecordError(
                f"recording.observation({layer!r}): nothing was read during the pass; open the block with "
                "kizuki.record(model, keep=kizuki.Observe(...))"
            )
        return widened(self._observations[layer])

    def pass_(self, number: int) -> Recording:
        """Pass `number` of the block by itself, counted from 0 (negative from the end), where all are kept.

        The last pass is held always; the others under `kizuki.record(model, keep="all")`, whose memory is that of q,
        k and v of every pass (behind a cache, each pass has all its keys: `generation` holds them once).

        Raises RecordError for a pass that was not, or is not kept.
        """
        there = f"{self.passes} passes ended in the block" + (
            f", 0 … {self.passes - 1}" if self.passes else ""
        )
        if (
            isinstance(number, bool)
            or not isinstance(number, int)
            or not -self.passes <= number < self.passes
        ):
            raise RecordError(f"recording.pass_({number!r}): {there}")
        number %= self.passes
        if self._kept is not None:
            return self._kept[number]
        if number != self.passes - 1:
            raise RecordError(
                f"recording.pass_({number}): only the last pass is held; open the block with "
                'kizuki.record(model, keep="all")'
            )
        return self

    def generation(
        self,
        output: Any,
        *,
        sequence: int | None = None,
        prompt: int | None = None,
        eos: int | Sequence[int] | None = None,
    ) -> Generation:
        """One view over prompt and answer of a sequence that `model.generate` wrote in the block.

        Arguments:
            output: what `model.generate` returned. Beam search needs
                `model.generate(..., return_dict_in_generate=True, output_scores=True)`, whose beam_indices say which
                beams led to a sequence.
            sequence: which of the returned sequences; may be None where there is one.
            prompt: how many tokens were given; None: those of the first pass.
            eos: the token or tokens that end a text; None: what the model's generation settings say. What stands
                behind the first of them, all one token, is padding and left out.

        Returns a `Generation`: `.rows` by name, `[layer][step]` the weights that wrote answer token `step`.

        Raises RecordError: no pass finished, the passes did not read this sequence, no beam_indices.

        Memory: during the run, q of every token read and k and v of every token once (and of the last pass, whose keys
        are the cache's own); behind the model's own forward nothing grows with the square of the text.

        Example:
            >>> import kizuki, torch, transformers
            >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=2, n_head=2,
            ...                                  bos_token_id=0, eos_token_id=0)
            >>> model = transformers.GPT2LMHeadModel(config).eval()
            >>> with kizuki.record(model) as recording:
            ...     output = model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=3, do_sample=False,
            ...                             pad_token_id=0, eos_token_id=None)
            >>> generation = recording.generation(output)
            >>> [row.position for row in generation.rows], generation[1][0].shape      # [heads, tokens seen]
            ([0, 1, 2, 3, 4], torch.Size([2, 3]))
        """
        from .generation import Generation

        return Generation(self, output, sequence, prompt, self._eos if eos is None else eos)

    def _held(self, layer: Layer) -> None:
        """Raise unless something of this layer was kept."""
        if isinstance(layer, bool) or not isinstance(layer, (str, Integral)):  # True would stand for layer 1
            raise RecordError(
                f"recording[{layer!r}]: a layer is a number or a name; recorded are {_few(self.layers)}"
            )
        if layer in self._errors:
            raise RecordError(f"recording[{layer!r}]: {self._errors[layer]}")
        if layer in self._captures or layer in self._observations:
            return
        if layer not in self.layers:
            recorded = f"recorded are {_few(self.layers)}" if self.layers else self._missing
            raise RecordError(f"recording[{layer!r}]: layer {layer!r} was not recorded; {recorded}")
        raise RecordError(f"recording[{layer!r}]: {self._missing}")

    def _matrix(self, layer: Layer) -> tuple[AttentionMatrix, Rule]:
        self._held(layer)
        if layer not in self._captures:
            raise RecordError(
                f"recording[{layer!r}]: its q and k were not kept, only what Observe reads: "
                f"recording.observation({layer!r})"
            )
        if layer not in self._matrices:
            try:
                self._matrices[layer] = self._captures[layer].matrix()
            except RecordError as error:
                raise RecordError(f"recording[{layer!r}]: {error}") from None
        return self._matrices[layer]

    def _parts(self) -> tuple[dict[Layer, list[Part]], dict[Layer, RecordError]]:
        """What the passes through the cache left, the last one's included, and why a layer is missing."""
        if self._course is None:
            return {}, {}
        errors = dict(self._course.errors)
        last = self._course.parts_of(self._in_course(), self._errors, self._cross, errors)
        return {layer: [*self._course.parts.get(layer, []), part] for layer, part in last.items()}, errors

    def _in_course(self) -> dict[Layer, Capture]:
        """What the last pass itself left."""
        return {layer: kept for layer, kept in self._captures.items() if layer not in self._apart}

    # The rest is called by the recorder as a pass goes on.

    def _begin(self, staying: Collection[Layer] = ()) -> None:
        """Drop the last pass, so that two are never held at once, but for the layers that it shall stay in."""
        for held in (self._captures, self._errors, self._matrices, self._observations):
            for layer in [layer for layer in held if layer not in staying]:
                del held[layer]
        self.tokens = None
        self._missing = "the last forward pass did not finish"

    def _fail(self) -> None:
        self._begin()
        self._course = None

    def _finish(self) -> None:
        self.passes += 1
        self._missing = (
            "the last forward pass went by without this layer's attention function: its class does the "
            "attention in some other way for this configuration, or skips the layer"
        )
        if self._kept is not None:
            alone = Recording(self.model_name, self.layers, self.heads)
            alone.passes = 1
            alone._captures, alone._errors = dict(self._captures), dict(self._errors)
            alone._observations = dict(self._observations)
            alone.tokens = self.tokens
            alone._missing, alone._cross, alone._eos = self._missing, self._cross, self._eos
            self._kept.append(alone)

    def _grow(self, layer: Layer) -> None:
        """A layer that was met as it ran."""
        if layer not in self.layers:
            self.layers = (*self.layers, layer)


def _few(layers: Sequence[Layer]) -> str:
    """Layers in one line: a run of numbers by its ends, many by the first and the last."""
    numbers = [layer for layer in layers if isinstance(layer, int)]
    if len(layers) > 2 and list(layers) == list(
        range(numbers[0] if numbers else 0, (numbers or [0])[-1] + 1)
    ):
        return f"{layers[0]} … {layers[-1]}"
    if len(layers) > 8:
        return f"{layers[0]}, {layers[1]}, … {layers[-1]}"
    return ", ".join(str(layer) for layer in layers)
