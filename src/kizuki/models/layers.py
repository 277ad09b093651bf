"""Which modules of a model do attention, and what they are called: numbers in one stack, names in several.

A module is found by its class: one of its methods names transformers' attention interface, one of PyTorch's attention
functions, `kizuki.attention` or `kizuki.models.note` (read off the byte code, so nothing runs; functions of its own
that it calls are followed), or it is `nn.MultiheadAttention`, or a class of `written`. What is found by none of these
and does attention all the same is met as it runs.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from . import written
from .recording import Layer, _few
from .rule import RecordError

CROSS = (
    "encoder_attn", "crossattention", "cross_attn", "cross_attention", "EncDecAttention", "multihead_attn",
)  # fmt: skip
ENTRIES = frozenset({"get_interface", "scaled_dot_product_attention", "multi_head_attention_forward"})
FOLLOWED = 3  # calls from a method to a function that calls an entry


@dataclass
class Layers:
    """The attention modules of a model by layer: `{layer: (path, module)}`, in the model's order."""

    found: dict[Layer, tuple[str, nn.Module]]
    modules: dict[int, str]  # id -> path, of every module of the model
    quiet: set[Layer] = field(default_factory=set)  # cross-attention that may never run, listed once it has
    cross: set[Layer] = field(default_factory=set)

    def listed(self) -> list[Layer]:
        return [layer for layer in self.found if layer not in self.quiet]


def find(model: nn.Module) -> Layers:
    """The attention modules of a model.

    Raises RecordError for what is no module or is compiled, and for a model of torch's and transformers' own
    classes none of which does attention in a way that can be heard.
    """
    if not isinstance(model, nn.Module):
        raise RecordError(f"kizuki.record: model is a {type(model).__name__} but must be a torch.nn.Module")
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise RecordError(
            f"kizuki.record: {type(model).__name__} is compiled by torch.compile, which attention does not "
            "pass by; record the model before compiling it"
        )
    modules = {id(module): path for path, module in model.named_modules()}
    found = [(path, module) for path, module in model.named_modules() if does_attention(module)]
    if not found and all(_is_a_librarys(type(module)) for module in model.modules()):
        raise RecordError(
            f"kizuki.record: {type(model).__name__} has no attention layer that goes through transformers' attention "
            "interface or PyTorch's functions, and none written out that kizuki knows, so there is nothing to record; "
            "see the list of models in kizuki.models"
        )
    return _named(found, modules)


def does_attention(module: nn.Module) -> bool:
    """Whether a module's own class does attention in a way that is heard."""
    if isinstance(module, nn.MultiheadAttention) or written.knows(module):
        return True
    if type(module).__module__.startswith("torch."):
        return False
    return _calls_an_entry(type(module))


def is_cross(path: str, module: nn.Module) -> bool:
    """Whether a module attends from one sequence to another."""
    return bool(getattr(module, "is_cross_attention", False)) or any(
        part in CROSS for part in path.split(".")
    )


def choose(layers: Any, found: Layers) -> list[Layer] | None:
    """The chosen layers in the model's order and once each, None for all, or an error that says which there are."""
    if layers is None:
        return None
    try:
        given: list[Any] = [layers] if isinstance(layers, int | str) else list(layers)
    except TypeError:
        raise RecordError(
            f"kizuki.record: layers is a {type(layers).__name__} but must be a whole number or a name, or several"
        ) from None
    if not given:
        raise RecordError("kizuki.record: layers is empty; name at least one, or give None for all")
    known = list(found.found)
    chosen: list[Layer] = []
    for layer in given:
        if isinstance(layer, bool) or not isinstance(layer, int | str):
            raise RecordError(
                f"kizuki.record: layers holds {layer!r} but must hold whole numbers counted from 0, or names"
            )
        inside = [layer] if layer in known else [k for k in known if str(k).startswith(f"{layer}.")]
        once = (
            known == [0] and isinstance(layer, int) and layer >= 0
        )  # one module, which may attend several times
        if not inside and known and not once:
            raise RecordError(
                f"kizuki.record: layers holds {layer!r} but the model has {len(found.listed())} layers, "
                f"{_few(found.listed())}"
            )
        chosen += inside or [layer]
    return sorted(set(chosen), key=known.index) if set(chosen) <= set(known) else list(dict.fromkeys(chosen))


def _named(found: list[tuple[str, nn.Module]], modules: dict[int, str]) -> Layers:
    """Names for what was found, as `Recording` describes them."""
    stacks: dict[str, list[tuple[str, nn.Module]]] = defaultdict(list)
    for path, module in found:
        stacks[re.sub(r"(?<![^.])\d+(?![^.])", "*", path)].append((path, module))
    heads = {pattern: [part for part in pattern.split("*")[0].split(".") if part] for pattern in stacks}
    shared = set.intersection(*(set(parts) for parts in heads.values())) if len(heads) > 1 else set()
    labels = {
        pattern: ".".join(part for part in parts if part not in shared) if len(heads) > 1 else ""
        for pattern, parts in heads.items()
    }
    named: dict[str, Layer] = {}  # path -> layer
    quiet: set[Layer] = set()
    cross: set[Layer] = set()
    for pattern, members in stacks.items():
        label = labels[pattern]
        crosses = is_cross(*members[0])
        beside = [p for p in stacks if labels[p] == label]
        role = ("cross" if crosses else "self") if len(beside) > 1 else ""
        if sum(is_cross(*stacks[p][0]) == crosses for p in beside) > 1:  # two of one kind
            role = pattern.rpartition("*")[2].strip(".") or role
        elif not label and not crosses:
            role = ""
        for number, (path, _) in numbered(members).items():
            counted = [str(number)] if "*" in pattern or not label else []
            parts = [part for part in (label, *counted, role) if part]
            layer: Layer = number if parts == [str(number)] else ".".join(parts)
            named[path] = layer
            if crosses:
                cross.add(layer)
                if not label and len(beside) > 1:
                    quiet.add(layer)
    return Layers({named[path]: (path, module) for path, module in found}, modules, quiet, cross)


def numbered(found: list[tuple[str, nn.Module]]) -> dict[int, tuple[str, nn.Module]]:
    """By the one number in the path that differs; in order where several do (stages of blocks)."""
    numbers = [[int(part) for part in path.split(".") if part.isdigit()] for path, _ in found]
    differing = [place for place in range(len(numbers[0])) if len({n[place] for n in numbers}) > 1]
    if len(differing) == 1 or (not differing and len(numbers[0]) == 1):
        place = differing[0] if differing else 0
        return {n[place]: item for n, item in zip(numbers, found, strict=True)}
    return dict(enumerate(found))


def _is_a_librarys(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", "transformers")


def _calls_an_entry(cls: type) -> bool:
    """Whether a method of a module's class, or a function it calls, names an attention entry."""
    for base in cls.__mro__:
        if base is nn.Module or base.__name__ == "PreTrainedModel":
            break
        if any(
            isinstance(method, FunctionType) and _names_entry(method, FOLLOWED)
            for method in vars(base).values()
        ):
            return True
    return False


def _names_entry(function: FunctionType, depth: int) -> bool:
    inner: Any = inspect.unwrap(function)
    if not isinstance(inner, FunctionType):
        return False
    function = inner
    for code in _codes(function.__code__):
        if ENTRIES & set(code.co_names) or _names_kizukis(function, code):
            return True
        if depth and not _is_a_librarys_function(function):
            called = (function.__globals__.get(name) for name in code.co_names)
            if any(
                isinstance(other, FunctionType) and other is not function and _names_entry(other, depth - 1)
                for other in called
            ):
                return True
    return False


def _names_kizukis(function: FunctionType, code: CodeType) -> bool:
    """Whether a function's code names `note` or `attention` as kizuki's."""
    for name, home in (("note", "kizuki.models.note"), ("attention", "kizuki.functional")):
        if name in code.co_names:
            held = function.__globals__.get(name)
            if getattr(held, "__module__", None) == home or "kizuki" in code.co_names:
                return True
    return False


def _is_a_librarys_function(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in ("torch", "transformers", "kizuki")


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The byte code of a function, and of the functions inside it."""
    waiting = [code]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [const for const in code.co_consts if isinstance(const, CodeType)]
