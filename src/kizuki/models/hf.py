"""Where transformers' attention passes by.

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
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from .calls import Call, Editor, Watcher, listening, told, wanted
from .rule import RecordError

# One patch for all open recordings: who installs first installs it, who leaves last removes it.
_lock = threading.Lock()
_installed = 0
_original: Callable[..., Any] | None = None


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


def _wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        function = original(self, attn_implementation, *args, **kwargs)
        heard = listening()
        if not heard or getattr(function, "_kizuki", False):  # already watched, under another's patch
            return function
        return _heard(function, str(attn_implementation), heard)

    get_interface._kizuki = True  # type: ignore[attr-defined]
    return get_interface


def _heard(
    function: Callable[..., Any], implementation: str, heard: tuple[Watcher, ...]
) -> Callable[..., Any]:
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        interested = [w for w in heard if w.wants(module)]
        if not interested:
            return function(module, *args, **kwargs)
        with told(), wanted(interested, module) as seen:  # PyTorch's function inside it is the same call
            output = function(module, *args, **kwargs)
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
            random=bool(module.training and options.get("dropout")),
            seen=seen,
        )
        for watcher in interested:
            watcher.hear(module, lambda _: call)
        for editor in interested:
            if isinstance(editor, Editor):
                changed = editor.edit(call)
                if changed is not call.output:
                    call = replace(call, output=changed)
                    output = (changed, *output[1:]) if isinstance(output, tuple) else changed
        return output

    attention._kizuki = True  # type: ignore[attr-defined]
    return attention
