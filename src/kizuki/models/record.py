"""`kizuki.record`: keep the attention of a loaded Hugging Face model while it runs as it always does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import hf
from .recording import Capture, Recording
from .rule import RecordError, Rule, from_function, from_padding, from_tensor

# Options of an attention function that put something into the scores which q, k and a rule do not hold.
UNKNOWN = {
    "position_bias": "adds a learned position bias to the scores",
    "head_mask": "scales whole heads by a head mask",
    "cu_seq_lens_q": "is given packed sequences by their lengths",
    "block_tables": "reads its keys from a paged cache",
}
ROWS = 3  # rows of the model's own output that are kept for the check


@contextmanager
def record(
    model: nn.Module,
    *,
    layers: int | Iterable[int] | None = None,
    heads: int | Iterable[int] | None = None,
) -> Iterator[Recording]:
    """Record the attention of a loaded Hugging Face model during the block.

    Kept of every chosen layer, for the last forward pass: q and k as they enter
    `A = softmax(scale · q kᵀ + mask)` (after the rotary embedding, key heads not repeated), v, scale,
    softcap, sinks, and the mask as a rule (causal, window, padding, documents), never as n × n numbers.
    The model's own attention function runs, whatever it is (eager, sdpa, flash, flex, custom), so its
    output has the same bits as without recording.

    Args:
        model: a `transformers.PreTrainedModel`, or a module that holds one.
        layers: which layers, counted from 0; one number or several. `None` = all.
        heads: which query heads, the same in every layer; `None` = all.

    Returns:
        A context manager giving a `Recording`; `recording[layer]` is the layer's `AttentionMatrix`. It
        stays valid after the block, and holds no reference to the model.

    Raises:
        RecordError: no attention layer that transformers' attention interface serves (BLOOM, Falcon,
            DeBERTa and others do their attention themselves), several stacks of layers (record one:
            `kizuki.record(model.encoder)`), a compiled model, a layer or head that does not exist. What only a
            pass can show (a bias in the mask, layers that share one module) is raised by
            `recording[layer]`; the pass itself is never disturbed.

    Only passes on the thread that opened the block are recorded. Blocks may be nested and overlap; other
    models running meanwhile are not touched. After the block, also after an exception, the model and
    transformers' tables are what they were.

    Time and memory: three rows of output and, for a mask given as a tensor, one reading of it a pass; the
    memory of q, k and v of the chosen layers, which are the model's own tensors and not copies (k and v
    are copied from a cache that is written in place, chosen heads are copied).

    Example:
        >>> import torch, kizuki, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with kizuki.record(model, layers=[0, 2]) as recording:
        ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
        >>> recording[2][0, 1, 4].shape          # what the last token reads in layer 2, head 1
        torch.Size([5])
    """
    with recorder(model, layers=layers, heads=heads) as recording:
        yield recording


@contextmanager
def recorder(
    model: nn.Module,
    *,
    layers: int | Iterable[int] | None = None,
    heads: int | Iterable[int] | None = None,
    name: str | None = None,
    on_layer: Callable[[int, int], None] | None = None,
) -> Iterator[Recording]:
    """`record` under a name of the caller's; calls `on_layer(done, total)` as each layer of a pass has run."""
    hf.interface()
    found = hf.attention_layers(model)
    config = getattr(model, "config", None)
    total = getattr(config, "num_attention_heads", None)
    recording = Recording(
        name or _name(model),
        _chosen("layers", layers, sorted(found)) or sorted(found),
        _chosen("heads", heads, range(total) if isinstance(total, int) else None),
    )
    watcher = _Recorder(recording, found, on_layer)
    handles: list[Any] = []
    hf.install()
    try:
        for module in _tops(model, [path for path, _ in found.values()]):
            handles += watcher.attach(module)
        yield recording
    finally:
        for handle in handles:
            handle.remove()
        watcher.close()
        hf.uninstall()


class _Recorder:
    """Follows the passes of one model on one thread and writes into one Recording."""

    def __init__(
        self,
        recording: Recording,
        found: dict[int, tuple[str, nn.Module]],
        on_layer: Callable[[int, int], None] | None,
    ) -> None:
        self.recording = recording
        self.layer_of = {id(module): layer for layer, (_, module) in found.items()}
        self.path_of = {layer: path for layer, (path, _) in found.items()}
        self.on_layer = on_layer
        self.thread = threading.get_ident()
        self.running: list[int] = []  # ids of the hooked modules a pass is inside, outermost first
        self.finished = False
        self.done = 0
        self.copy_keys = False
        self.rules: dict[int, tuple[Any, list[Rule] | RecordError]] = {}

    def attach(self, module: nn.Module) -> list[Any]:
        """Hooks that mark where a pass through this module begins and ends, however it ends."""
        return [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._finish),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        """Forget the pass, whatever state it is in."""
        open_here = hf.watchers()
        if self in open_here:
            open_here.remove(self)
        self.running.clear()
        self.rules.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self.thread:
            return
        if id(module) in self.running:  # a pass that was interrupted without its hooks being called
            self.close()
        if not self.running:
            self.recording._begin()
            self.done, self.finished = 0, False
            self.copy_keys = any(_writes_in_place(given) for given in (*args, *kwargs.values()))
            hf.watchers().append(self)
        self.running.append(id(module))

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self.thread and self.running[:1] == [id(module)]:
            self.finished = True

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self.thread or id(module) not in self.running:
            return
        del self.running[self.running.index(id(module)) :]
        if not self.running:
            if self.finished:
                self.recording._finish()
            else:
                self.recording._fail()
            self.close()

    def wants(self, module: nn.Module) -> bool:
        return id(module) in self.layer_of

    def heard(self, call: hf.Call) -> None:
        layer = self.layer_of[id(call.module)]
        recording = self.recording
        if layer in recording.layers:
            if layer in recording._captures or layer in recording._errors:
                recording._captures.pop(layer, None)
                recording._errors[layer] = RecordError(
                    f"{self.path_of[layer]} ran more than once in one pass (layers that share one module, as "
                    "ALBERT's), so there is not one attention to show"
                )
            else:
                try:
                    recording._captures[layer] = self._capture(layer, call)
                except RecordError as error:
                    recording._errors[layer] = RecordError(f"{self.path_of[layer]}: {error}")
        self.done += 1
        if self.on_layer is not None:
            self.on_layer(self.done, len(self.layer_of))

    def _capture(self, layer: int, call: hf.Call) -> Capture:
        for option, does in UNKNOWN.items():
            if call.options.get(option) is not None:
                raise RecordError(f"{type(call.module).__name__} {does}, which is not recorded")
        query, key, value = call.query.detach(), call.key.detach(), call.value.detach()
        if query.dim() != 4 or key.dim() != 4:
            raise RecordError(f"its query has {query.dim()} axes, expected [batch, heads, queries, head_dim]")
        rules = self._rules(call)
        sinks = call.options.get("s_aux")
        rows = sorted({0, query.shape[2] // 2, query.shape[2] - 1}) if query.shape[2] else []
        sample = _sample(call, rows)
        heads = self.recording.heads
        if heads is not None:
            query, key, value, sinks, sample = _pick_heads(list(heads), query, key, value, sinks, sample)
        elif self.copy_keys:
            key, value = key.clone(), value.clone()
        return Capture(
            path=self.path_of[layer],
            query=query,
            key=key,
            value=value,
            scale=_number("scaling", call.options.get("scaling")),
            softcap=_number("softcap", call.options.get("softcap")),
            sinks=None if sinks is None else sinks.detach(),
            rules=rules,
            rows=rows,
            sample=sample,
        )

    def _rules(self, call: hf.Call) -> list[Rule]:
        """The rules of this call's mask; one reading for all the layers that share the tensor.

        The tensor is held until the pass ends, so that no other can get its id.
        """
        if call.mask is None:
            return without_mask(call)
        key = id(call.mask)
        if key not in self.rules:
            try:
                self.rules[key] = (call.mask, with_mask(call))
            except RecordError as error:
                self.rules[key] = (call.mask, error)
        rules = self.rules[key][1]
        if isinstance(rules, RecordError):
            raise rules
        return rules


def with_mask(call: hf.Call) -> list[Rule]:
    """The rule of a mask that an attention function was given."""
    batch, queries, keys = call.query.shape[0], call.query.shape[2], call.key.shape[2]
    if isinstance(call.mask, Tensor):
        if call.mask.dim() == 2:  # flash: the padding by itself, and causality by flag
            return [from_padding(call.mask, rule) for rule in without_mask(call)]
        return [from_tensor(call.mask, batch, queries, keys)]
    if callable(getattr(call.mask, "mask_mod", None)):
        return [from_function(call.mask.mask_mod, batch, queries, keys, call.query.device)]
    raise RecordError(f"its mask is a {type(call.mask).__name__}, which has no rule")


def without_mask(call: hf.Call) -> list[Rule]:
    """What an attention function does when it is given no mask: what it can have been, most plausible first.

    eager adds nothing. sdpa goes by the module's `is_causal` flag, from the upper left, on the first keys
    only. flash goes by the flag from the lower right, with its window. Of a custom function only its own
    output can say (`Capture.matrix` asks it).
    """
    queries, keys = call.query.shape[2], call.key.shape[2]
    flag = call.options.get("is_causal")
    causal = bool(getattr(call.module, "is_causal", True) if flag is None else flag) and queries > 1
    everything = Rule(keys)
    name = call.implementation
    if name == "eager":
        return [everything]
    if name == "sdpa":
        return [Rule(min(queries, keys), right=0) if causal else everything]
    window = call.options.get("sliding_window")
    rules = [Rule(keys, right=0) if causal else everything]
    if isinstance(window, int) and keys > window:
        rules.insert(0, Rule(keys, left=window - 1, right=0 if causal else window - 1))
    if "flash" in name:
        return rules[:1]
    return [*rules, everything] if causal else [*rules, Rule(keys, right=0)]


def _tops(model: nn.Module, paths: list[str]) -> list[nn.Module]:
    """The modules whose forward is a pass: the model, and the models inside it that hold the layers."""
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise RecordError("kizuki.record: needs transformers; pip install 'kizuki[models]'") from error
    inside = [
        module
        for name, module in model.named_modules()
        if name and isinstance(module, PreTrainedModel) and all(path.startswith(f"{name}.") for path in paths)
    ]
    return [model, *inside]


def _name(model: nn.Module) -> str:
    """The model's name as its config gives it, and its class."""
    config = getattr(model, "config", None)
    name = str(getattr(config, "name_or_path", "") or "").rstrip("/").rsplit("/", 1)[-1]
    return name or type(model).__name__


def _chosen(what: str, given: int | Iterable[int] | None, known: Iterable[int] | None) -> list[int] | None:
    """The chosen numbers, in order and once each, or an error that says which there are."""
    if given is None:
        return None
    try:
        numbers = [given] if isinstance(given, int) else list(given)
    except TypeError:
        raise RecordError(
            f"kizuki.record: {what} is a {type(given).__name__} but must be a whole number or several"
        ) from None
    there = None if known is None else list(known)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise RecordError(
                f"kizuki.record: {what} holds {number!r} but must hold whole numbers counted from 0"
            )
        if there is not None and number not in there:
            raise RecordError(
                f"kizuki.record: {what} holds {number} but the model has {len(there)} {what}, "
                f"{there[0]} … {there[-1]}"
            )
    if not numbers:
        raise RecordError(f"kizuki.record: {what} is empty; name at least one, or give None for all")
    return sorted(set(numbers))


def _number(name: str, given: Any) -> float | None:
    if given is None:
        return None
    if isinstance(given, Tensor) and given.numel() != 1:
        raise RecordError(f"its {name} is a tensor of {given.numel()} numbers, expected one")
    return float(given)


def _sample(call: hf.Call, rows: list[int]) -> Tensor | None:
    """A few rows of the function's own output, `[batch, heads, rows, value_dim]`, copied."""
    if call.module.training and call.options.get("dropout"):
        return None  # the output is random; the weights before dropout are what is recorded
    batch, heads, queries, _ = call.query.shape
    expected = (batch, queries, heads, call.value.shape[-1])
    output = call.output
    if not isinstance(output, Tensor) or tuple(output.shape) not in (
        expected,
        (batch, queries, heads * expected[3]),
    ):
        raise RecordError(f"its attention function returned something other than {list(expected)}")
    output = output.detach().reshape(expected)
    return output[:, rows].transpose(1, 2)  # indexing with a list copies


def _pick_heads(
    heads: list[int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    sample: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The chosen query heads and the key heads they read, copied so that the rest can be freed."""
    total, kv_heads = query.shape[1], key.shape[1]
    if heads[-1] >= total:
        raise RecordError(f"heads holds {heads[-1]} but this layer has {total} heads")
    group = total // kv_heads
    read = [head // group for head in heads]
    distinct = sorted(set(read))
    # Key heads can stay shared where every one of them serves equally many of the chosen heads.
    if len({read.count(head) for head in distinct}) == 1:
        read = distinct
    at = torch.tensor(heads, device=query.device)
    kv_at = torch.tensor(read, device=query.device)
    return (
        query.index_select(1, at),
        key.index_select(1, kv_at),
        value.index_select(1, kv_at),
        None if sinks is None else sinks.index_select(0, at),
        None if sample is None else sample.index_select(1, at),
    )


def _writes_in_place(given: Any) -> bool:
    """Whether an argument is a cache that keeps its tensors and writes over them in the next step."""
    layers = getattr(given, "layers", None)
    if layers is None and hasattr(given, "self_attention_cache"):
        layers = getattr(given.self_attention_cache, "layers", None)
    return isinstance(layers, list) and any(getattr(layer, "is_compileable", False) for layer in layers)
