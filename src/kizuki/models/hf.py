"""Where transformers' attention passes by: finding a model's attention layers, and watching them run.

Every attention module of transformers asks `AttentionInterface.get_interface(name, eager_function)` for
the function that will do its attention, eager included, and calls it as `function(module, query, key,
value, attention_mask, scaling=…, **kwargs)`: after the rotary embedding and the cache, before key heads
are repeated. While a recording is open that one method is wrapped. The wrapper hands out the model's own
function, unchanged, to everybody but a recorded model that is in the middle of a forward pass on the
recording's thread; there it hands out a function that calls the model's own and then tells what went in
and what came out.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from .rule import RecordError

if TYPE_CHECKING:
    from collections.abc import Iterator

CROSS = ("encoder_attn", "crossattention", "cross_attn", "cross_attention", "EncDecAttention")


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call of a model: what its function was given and what it returned."""

    module: nn.Module
    implementation: str
    query: Tensor  # [batch, heads, queries, head_dim]
    key: Tensor  # [batch, kv_heads, keys, head_dim]
    value: Tensor  # [batch, kv_heads, keys, value_dim]
    mask: Any  # None, a tensor, or flex attention's BlockMask
    options: dict[str, Any]  # scaling, softcap, s_aux, sliding_window, is_causal, …
    output: Any


class Watcher(Protocol):
    """Something that wants to hear of a model's attention calls while a forward pass of it runs."""

    def wants(self, module: nn.Module) -> bool: ...

    def heard(self, call: Call) -> None: ...


# One patch for all open recordings: who installs first installs it, who leaves last removes it.
_lock = threading.Lock()
_installed = 0
_original: Callable[..., Any] | None = None
_here = threading.local()  # .watchers: those with a forward pass running on this thread


def interface() -> Any:
    """transformers' AttentionInterface class, or an error that says what to install."""
    try:
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise RecordError(
            "kizuki.record: needs transformers 5.0 or later; pip install 'kizuki[models]'"
        ) from error
    if not hasattr(AttentionInterface, "get_interface"):
        raise RecordError("kizuki.record: needs transformers 5.0 or later; pip install -U transformers")
    return AttentionInterface


def install() -> None:
    """Wrap `AttentionInterface.get_interface`; counts, so that recordings may overlap."""
    global _installed, _original
    cls = interface()
    with _lock:
        if _installed == 0:
            _original = cls.get_interface
            cls.get_interface = _wrapper(_original)
        _installed += 1


def uninstall() -> None:
    """Undo one `install`; the last one puts the original method back."""
    global _installed
    cls = interface()
    with _lock:
        _installed -= 1
        if _installed == 0 and getattr(cls.get_interface, "_kizuki", False):
            cls.get_interface = _original


def watchers() -> list[Watcher]:
    """Those whose model is in a forward pass on this thread, innermost last."""
    if not hasattr(_here, "watchers"):
        _here.watchers = []
    found: list[Watcher] = _here.watchers
    return found


def _wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        function = original(self, attn_implementation, *args, **kwargs)
        listening = tuple(watchers())
        if not listening or getattr(function, "_kizuki", False):  # already watched, under another's patch
            return function
        return _heard(function, str(attn_implementation), listening)

    get_interface._kizuki = True  # type: ignore[attr-defined]
    return get_interface


def _heard(
    function: Callable[..., Any], implementation: str, listening: tuple[Watcher, ...]
) -> Callable[..., Any]:
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = function(module, *args, **kwargs)
        interested = [w for w in listening if w.wants(module)]
        if interested:
            names = ("query", "key", "value", "attention_mask")
            given = dict(zip(names, args, strict=False))
            options = {name: value for name, value in kwargs.items() if name not in names}
            given |= {name: value for name, value in kwargs.items() if name in names}
            call = Call(
                module,
                implementation,
                given["query"],
                given["key"],
                given["value"],
                given.get("attention_mask"),
                options,
                output[0] if isinstance(output, tuple) else output,
            )
            for watcher in interested:
                watcher.heard(call)
        return output

    attention._kizuki = True  # type: ignore[attr-defined]
    return attention


def attention_layers(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """The self-attention modules of a model by layer number: `{layer: (path, module)}`.

    Raises RecordError when there is none that transformers' attention interface serves, or when they
    belong to more than one stack (an encoder and a decoder, a vision tower), whose layers would share
    numbers.
    """
    if not isinstance(model, nn.Module):
        raise RecordError(
            f"kizuki.record: model is a {type(model).__name__} but must be a loaded Hugging Face model"
        )
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise RecordError(
            f"kizuki.record: {type(model).__name__} is compiled by torch.compile, which attention does not "
            "pass by; record the model before compiling it"
        )
    stacks: dict[str, list[tuple[str, nn.Module]]] = defaultdict(list)
    for path, module in model.named_modules():
        if _asks_for_interface(type(module)) and not _is_cross(path, module):
            stacks[re.sub(r"(?<![^.])\d+(?![^.])", "*", path)].append((path, module))
    if not stacks:
        raise RecordError(
            f"kizuki.record: {type(model).__name__} has no attention layer that goes through transformers' "
            "attention interface, so there is nothing to record; see the list of models in kizuki.models"
        )
    if len(stacks) > 1:
        names = ", ".join(f"{name} ({len(found)})" for name, found in stacks.items())
        raise RecordError(
            f"kizuki.record: {type(model).__name__} has {len(stacks)} stacks of attention layers: {names}; "
            "record one part of the model, such as kizuki.record(model.encoder)"
        )
    ((_, found),) = stacks.items()
    return _numbered(found)


def _numbered(found: list[tuple[str, nn.Module]]) -> dict[int, tuple[str, nn.Module]]:
    """By the one number in the path that differs; in order where several do (stages of blocks)."""
    numbers = [[int(part) for part in path.split(".") if part.isdigit()] for path, _ in found]
    differing = [place for place in range(len(numbers[0])) if len({n[place] for n in numbers}) > 1]
    if len(differing) == 1 or (not differing and len(numbers[0]) == 1):
        place = differing[0] if differing else 0
        return {n[place]: item for n, item in zip(numbers, found, strict=True)}
    return dict(enumerate(found))


def _is_cross(path: str, module: nn.Module) -> bool:
    """Whether a module attends from one sequence to another."""
    return bool(getattr(module, "is_cross_attention", False)) or any(
        part in CROSS for part in path.split(".")
    )


def _asks_for_interface(cls: type) -> bool:
    """Whether a method of a module's class calls `get_interface`: read off its byte code, so nothing runs."""
    if any(base.__name__ == "PreTrainedModel" for base in cls.__mro__):
        return False
    for base in cls.__mro__:
        if base is nn.Module:
            break
        for attribute in vars(base).values():
            if isinstance(attribute, FunctionType) and any(
                "get_interface" in code.co_names for code in _codes(attribute)
            ):
                return True
    return False


def _codes(function: FunctionType) -> Iterator[CodeType]:
    """The byte code of a function under its decorators, and of the functions inside it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    waiting = [] if code is None else [code]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [const for const in code.co_consts if isinstance(const, CodeType)]
