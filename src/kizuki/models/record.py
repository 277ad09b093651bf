"""`kizuki.record`: keep the attention of a model while it runs as it always does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..errors import OptionError, SizeError
from . import hf, torch_native, written
from .calls import Call, told, watchers
from .capture import Masks, capture
from .course import Course
from .layers import Layers, choose, find
from .observed import Shelf
from .recording import Layer, Recording
from .rule import RecordError

NO_TOPS = (
    nn.ModuleList,
    nn.ModuleDict,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.MultiheadAttention,
)

if TYPE_CHECKING:
    from kizuki import Observe


@contextmanager
def record(
    model: nn.Module,
    *,
    layers: Layer | Iterable[Layer] | None = None,
    heads: int | Iterable[int] | None = None,
    keep: str | Observe = "last",
) -> Iterator[Recording]:
    """Record the attention of a model during the block.

    Kept of every chosen layer, for the last forward pass: q and k as they enter
    `A = softmax(scale · q kᵀ + bias + mask)` (after the rotary embedding, key heads not repeated), v, scale,
    softcap, sinks, bias, and the mask as a rule (causal, window, padding, documents), never as n × n numbers.
    The model's own attention function runs, whatever it is, so its output has the same bits as without
    recording. It is heard where it passes by: transformers' attention interface (eager, sdpa, flash, flex, custom),
    `F.scaled_dot_product_attention`, `nn.MultiheadAttention` and `nn.TransformerEncoder` (also on their fast path),
    BLOOM's and Falcon's own attention, `kizuki.attention` and its like, and `kizuki.models.note`, one line in code of
    your own.

    Args:
        model: any `torch.nn.Module` that is not compiled.
        layers: which layers, counted from 0, or by name in a model of several stacks ("decoder.3.cross", or
            "decoder" for all of them); one or several. `None` = all.
        heads: which query heads, the same in every layer; `None` = all.
        keep: "last" = the last pass, and of the passes before it that filled its cache what `Recording.generation`
            needs; "all" = every pass (`Recording.pass_`); a `kizuki.Observe` = no q, k or v, but what it names, read
            as each layer runs (`Recording.observation`), of the last pass.

    Returns:
        A context manager giving a `Recording`; `recording[layer]` is the layer's `AttentionMatrix`. It
        stays valid after the block, and holds no reference to the model.

    Raises:
        RecordError: a model of library classes that has no attention which is heard (DeBERTa, MPNet and others write
            theirs out), a compiled model, a layer or head that does not exist; at the end of a block in whose passes no
            attention was heard. What only a pass can show (a mask without a rule, output that A does not explain) is
            raised by `recording[layer]`; the pass itself is never disturbed.

    Only passes on the thread that opened the block are recorded. Blocks may be nested and overlap; other
    models running meanwhile are not touched. After the block, also after an exception, the model, transformers'
    tables and PyTorch's functions are what they were.

    Time and memory: three rows of output and, for a mask given as a tensor, a few readings of it a pass; the
    memory of q, k and v of the chosen layers, which are the model's own tensors and not copies (k and v
    are copied from a cache that is written in place, chosen heads are copied). A bias is the model's own tensor,
    one for all layers that share it: as many numbers as keys where it depends on the key alone (BLOOM), queries × keys
    where the model lays it out so (T5). Where the fast path or returned weights hide q, k and v, they are projected
    once more.

    Example:
        >>> import torch, kizuki, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with kizuki.record(model, layers=[0, 2]) as recording:
        ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
        >>> recording[2][0, 1, 4].shape          # what the last token reads in layer 2, head 1
        torch.Size([5])
        >>> plain = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> with kizuki.record(torch.nn.TransformerEncoder(plain, 3).eval(), keep="all") as recording:
        ...     pass
        >>> len(recording), recording.passes
        (3, 0)
    """
    with recorder(model, layers=layers, heads=heads, keep=keep) as recording:
        yield recording


@contextmanager
def recorder(
    model: nn.Module,
    *,
    layers: Layer | Iterable[Layer] | None = None,
    heads: int | Iterable[int] | None = None,
    keep: str | Observe = "last",
    name: str | None = None,
    on_layer: Callable[[int, int], None] | None = None,
) -> Iterator[Recording]:
    """`record` under a name of the caller's; calls `on_layer(done, total)` as each layer of a pass has run."""
    found = find(model)
    total = getattr(getattr(model, "config", None), "num_attention_heads", None)
    chosen = choose(layers, found)
    recording = Recording(
        name or _name(model),
        found.listed() if chosen is None else chosen,
        _chosen("heads", heads, range(total) if isinstance(total, int) else None),
    )
    recording._cross = found.cross
    recording._eos = _end_of_text(model)
    watcher = _Recorder(recording, found, chosen is None, _what(keep), on_layer)
    if keep == "all":
        recording._kept = []
    with ExitStack() as undo:
        if _needs_table(model):
            hf.install()
            undo.callback(hf.uninstall)
        torch_native.install()
        undo.callback(torch_native.uninstall)
        undo.callback(watcher.close)
        whole, parts = _tops(model, [path for path, _ in found.found.values()])
        watcher.parts = {id(module) for module in parts}
        for module in [*whole, *parts]:
            watcher.attach(module, undo)
        for _, module in found.found.values():
            if written.knows(module):
                written.Written(module, watcher, watcher.heard_of).attach(undo)
        yield recording
        if not recording.layers and recording.passes:
            raise RecordError(
                f"kizuki.record: {type(model).__name__} ran {recording.passes} times and no attention was heard: it is "
                "written out by hand; name q, k and v in its forward with kizuki.models.note(query, key, value)"
            )


class _Recorder:
    """Follows the passes of one model on one thread and writes into one Recording."""

    def __init__(
        self,
        recording: Recording,
        found: Layers,
        everything: bool,
        observe: Observe | None,
        on_layer: Callable[[int, int], None] | None,
    ) -> None:
        self.recording = recording
        self.found = found
        self.everything = everything
        self.observe, self.shelf = observe, Shelf(len(recording.layers))
        self.layer_of = {id(module): layer for layer, (_, module) in found.found.items()}
        self.alone = len(found.found) == 1  # one module for all layers
        self.numbers = len(found.found)  # of layers, where they are numbered as they are met
        self.on_layer = on_layer
        self.thread = threading.get_ident()
        self.running: list[int] = []  # ids of the hooked modules a pass is inside, outermost first
        self.parts: set[int] = set()  # ids of the tops that hold some of the layers only
        self.finished = False
        self.names: dict[tuple[int, int], Layer] = {}  # (id of a module, which of its calls) -> layer
        self.copies = False  # the cache is written over in place
        self.times: dict[int, int] = {}  # id of a module -> how often it attended in this pass
        self.apart = False  # the pass is one of a part
        self.waits = False  # a part has run and the model not yet
        self.cache: Any = None
        self.past = 0
        self.ids: Tensor | None = None
        self.masks = Masks()

    def attach(self, module: nn.Module, undo: ExitStack) -> None:
        """Hooks that mark where a pass through this module begins and ends, however it ends."""
        if isinstance(module, nn.TransformerEncoderLayer):
            # A hook on the layer itself would switch its fast path off: listen to every module, hear this one.
            before, after = register_module_forward_pre_hook, register_module_forward_hook
            hooks = [
                before(lambda m, args: self._enter(m, args, {}) if m is module else None),
                after(lambda m, args, out: self._finish(m, args, out) if m is module else None),
                after(
                    lambda m, args, out: self._leave(m, args, out) if m is module else None, always_call=True
                ),
            ]
        else:
            hooks = [
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._finish),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        for hook in hooks:
            undo.callback(hook.remove)

    def close(self) -> None:
        """Forget the pass, whatever state it is in."""
        open_here = watchers()
        if self in open_here:
            open_here.remove(self)
        self.running.clear()
        self.masks.clear()
        self.cache = None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self.thread:
            return
        if id(module) in self.running:  # a pass that was interrupted without its hooks being called
            self.close()
        if not self.running:
            self._begin(module, args, kwargs)
            watchers().append(self)
        self.running.append(id(module))

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recording, given = self.recording, (*args, *kwargs.values())
        self.times, self.finished = {}, False
        self.copies = any(_writes_in_place(each) for each in given)
        if id(module) in self.parts:  # an encoder by itself, before the decoder's passes
            inside = self._inside(module)
            recording._begin([layer for layer in self.found.found if layer not in inside])
            recording._apart, self.apart, self.waits = recording._apart | inside, True, True
            return
        self.apart = False
        self.cache = next((each for each in given if _is_cache(each)), None)
        self.past = _length(self.cache)
        self.ids = next(
            (
                each
                for each in (kwargs.get("decoder_input_ids"), kwargs.get("input_ids"), *args[:1])
                if isinstance(each, Tensor) and each.dim() == 2 and not each.is_floating_point()
            ),
            None,
        )
        course = recording._course
        if course is not None and course.goes_on(self.cache, self.past):
            course.take(recording._in_course(), recording._errors, self.found.cross)
            if self.past < course.length:
                course.crop(self.past)
        else:
            recording._course = None
            if not self.waits and kwargs.get("encoder_outputs") is None:
                recording._apart = set()
        self.waits = False
        recording._begin(recording._apart)

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self.thread and self.running[:1] == [id(module)]:
            self.finished = True
            if id(module) not in self.parts and self.observe is None:
                self._follow(output)

    def _follow(self, output: Any) -> None:
        """Put the finished pass into its course."""
        recording = self.recording
        cache = self.cache
        if cache is None:  # the model may have made one
            values = (
                output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
            )
            cache = next((each for each in values if _is_cache(each)), None)
        if recording._course is None:
            recording._course = Course(cache, self.past)
        queries = _length(cache) - self.past
        if queries <= 0:
            queries = max(
                (
                    kept.query.shape[2]
                    for layer, kept in recording._captures.items()
                    if layer not in recording._apart
                ),
                default=0,
            )
        recording._course.add(queries, self.ids)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self.thread or id(module) not in self.running:
            return
        del self.running[self.running.index(id(module)) :]
        if not self.running:
            if not self.finished:
                self.recording._fail()
            elif id(module) not in self.parts:
                self.recording._finish()
            self.close()

    def _inside(self, module: nn.Module) -> set[Layer]:
        path = self.found.modules[id(module)]
        return {layer for layer, (at, _) in self.found.found.items() if at.startswith(f"{path}.") or not path}

    # -- what is heard -----------------------------------------------------------------------------

    def wants(self, module: nn.Module) -> bool:
        return id(module) in self.found.modules

    def heard_of(self, module: nn.Module) -> bool:
        """Whether a module has attended in this pass."""
        return id(module) in self.times

    def hear(self, module: nn.Module, make: Callable[[nn.Module], Call]) -> None:
        """A module has attended: keep what was chosen of it, and leave the pass alone whatever is wrong with it."""
        layer, recording = self._layer(module), self.recording
        if layer is not None:
            for held in (
                recording._captures,
                recording._errors,
                recording._matrices,
                recording._observations,
            ):
                held.pop(layer, None)
            path = self.found.modules[id(module)] or type(module).__name__
            try:
                with told(), torch.no_grad():  # what is computed to look is no attention of the model's
                    self._keep(layer, path, make(module))
            except (RecordError, SizeError, OptionError) as error:  # the last two of what Observe asks for
                text = str(error)
                recording._errors[layer] = RecordError(text if text.startswith(path) else f"{path}: {text}")
        if self.on_layer is not None:
            done = sum(self.times.values())
            self.on_layer(done, max(done, len(self.found.found)))

    def _keep(self, layer: Layer, path: str, call: Call) -> None:
        heads = self.recording.heads
        kept = capture(
            call,
            path,
            self.masks,
            None if heads is None else list(heads),
            copy=self.copies,
            trim=self.copies and layer not in self.found.cross,
        )
        if self.observe is None:
            self.recording._captures[layer] = kept
        else:
            read = call.seen.observation if call.seen and call.seen.what is self.observe else None
            seen = kept.matrix()[0].observe(self.observe) if read is None else read
            self.recording._observations[layer] = self.shelf.put(seen)

    def reads(self, module: nn.Module) -> Observe | None:
        """What is to be read of a layer as it runs: where all its heads are, and its name is known beforehand."""
        number = self.times.get(id(module), 0)
        layer = self.names.get((id(module), number), None if number else self.layer_of.get(id(module)))
        return self.observe if self.recording.heads is None and layer in self.recording.layers else None

    def _layer(self, module: nn.Module) -> Layer | None:
        """The layer that a module attends for now, None where it was not chosen; what is new is named."""
        number = self.times.get(id(module), 0)
        self.times[id(module)] = number + 1
        key = (id(module), number)
        if key not in self.names:
            self.names[key] = self._name(module, number)
        layer = self.names[key]
        if self.everything:
            self.recording._grow(layer)
        if not self.apart:
            self.recording._apart.discard(layer)
        return layer if layer in self.recording.layers else None

    def _name(self, module: nn.Module, number: int) -> Layer:
        """Its number or name where its class told; else the next number, or the module's path, and which time."""
        known = self.layer_of.get(id(module))
        if known is not None and not number:
            return known
        if not self.layer_of or (self.alone and known == 0):
            self.numbers += 1
            return self.numbers - 1
        base = known if known is not None else self.found.modules[id(module)] or "model"
        return f"{base}.{number}" if number else base


def _tops(model: nn.Module, paths: list[str]) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules whose forward is a pass: the model and what in it holds all the layers; and what holds some.

    Not the layers themselves: one is not a pass, and a hook would switch the fast path of torch's off.
    """
    whole, parts = [model], []
    for name, module in model.named_modules():
        if not name or isinstance(module, NO_TOPS) or any(part.isdigit() for part in name.split(".")):
            continue
        held = sum(path.startswith(f"{name}.") for path in paths)
        if held == len(paths) and paths:
            whole.append(module)
        elif held:
            parts.append(module)
    return whole, parts


def _needs_table(model: nn.Module) -> bool:
    """Whether the model's attention can pass by transformers' table."""
    if "transformers" not in sys.modules:
        return False
    try:
        hf.interface()
    except RecordError:
        if any(
            cls.__module__.startswith("transformers.") for m in model.modules() for cls in type(m).__mro__
        ):
            raise
        return False
    return True


def _what(keep: str | Observe) -> Observe | None:
    """What to read as the layers run, None to keep q, k and v; RecordError for anything else."""
    from kizuki import Observe

    if isinstance(keep, Observe):
        return keep
    if keep not in ("last", "all"):
        raise RecordError(f'kizuki.record: keep is {keep!r} but must be "last", "all" or kizuki.Observe(...)')
    return None


def _end_of_text(model: nn.Module) -> Any:
    """The token or tokens that end a text by the model's own settings."""
    for settings in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        end = getattr(settings, "eos_token_id", None)
        if end is not None:
            return end
    return None


def _is_cache(given: Any) -> bool:
    return callable(getattr(given, "get_seq_length", None))


def _length(cache: Any) -> int:
    """How many tokens a cache has seen."""
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except ValueError:  # of a model without an attention layer
        return 0


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


def _writes_in_place(given: Any) -> bool:
    """Whether an argument is a cache that keeps its tensors and writes over them in the next step."""
    layers = getattr(given, "layers", None)
    if layers is None and hasattr(given, "self_attention_cache"):
        layers = getattr(given.self_attention_cache, "layers", None)
    return isinstance(layers, list) and any(getattr(layer, "is_compileable", False) for layer in layers)
