"""The header of a saved recording: everything that is not a tensor, as one JSON table, and the check of it.

    {"model": "smollm2", "passes": 1, "heads": null, "versions": {"kizuki": …, "torch": …, "transformers": …},
     "layers": [{"layer": 0, "path": "model.layers.0.self_attn", "mask": "causal",
                 "rule": {"stop": 7, "left": null, "right": 0, "keys": null, "documents": null},
                 "scale": 0.125, "softcap": null, "sinks": null, "bias": null, "dtype": "float32",
                 "query": "layers.0.query", "key": "layers.0.key", "value": "layers.0.value",
                 "rows": [0, 3, 6], "sample": "layers.0.sample"},
                {"layer": 1, "error": "its mask is a function that has no rule"}],
     "tokens": {"text": …, "ids": […], "offsets": [[0, 4], …], "labels": […], "special": […]},
     "crc32": {"layers.0.query": "8c736521", …}}

Where a value is a tensor the table has the tensor's name in the file. A file is read as a whole or refused:
a field that is not listed here may change what A is (a bias would), so there are none that are skipped, and
whatever is added to the table makes a new version of the format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import MISSING, fields
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .rule import RecordError, Rule
from .tokens import Tokens

if TYPE_CHECKING:
    from .recording import Capture, Recording

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
FLOATS = ("F64", "F32", "F16", "BF16")
# What this version of the format holds of a layer and of its rule. A class that has more fields than these
# is not saved while it uses them.
CAPTURE = {"path", "query", "key", "value", "scale", "softcap", "sinks", "bias", "rules", "rows", "sample"}
RULE = {"stop", "left", "right", "keys", "documents"}

Shape = tuple[str, list[int]]  # a tensor's dtype and shape as the file gives them


class HeaderError(ValueError):
    """A table is not what a recording's header must be; the message is one line without the file's name."""


# Writing


def table_of(recording: Recording) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The table of a recording, without its checksums, and the tensors that it names.

    Every layer goes through the check that handing it out makes; one that fails it is saved as the error it
    raises. Raises RecordError when no layer is left, a layer holds what the format has no place for, or the
    tokens are not those of the layers.
    """
    names = _Names()
    layers, keys, batch = [], 0, 1
    for layer in recording.layers:
        entry: dict[str, Any] = {"layer": layer}
        try:
            if layer in recording._errors:
                raise recording._errors[layer]
            if layer not in recording._captures:
                raise RecordError(
                    "keep=Observe(...) keeps no q and k, of which a file is made; record without it"
                    if layer in recording._observations
                    else recording._missing
                )
            capture = recording._captures[layer]
            rule = capture.matrix()[1]
        except RecordError as error:
            entry["error"] = str(error)
        else:
            _only(capture, CAPTURE, layer)
            _only(rule, RULE, layer)
            entry |= _entry(capture, rule, f"layers.{layer}", names)
            keys, batch = max(keys, rule.stop), capture.query.shape[0]
        layers.append(entry)
    if not names.tensors:
        why = layers[0]["error"] if layers else "none was chosen"
        raise RecordError(f"recording.save: there is no layer to save; {why}")
    if recording.tokens is not None:
        check_tokens(recording.tokens, keys, batch)
    table = {
        "model": recording.model_name,
        "passes": recording.passes,
        "heads": None if recording.heads is None else list(recording.heads),
        "versions": recording.versions or versions(),
        "layers": layers,
        "tokens": None if recording.tokens is None else _plain(recording.tokens),
    }
    return table, names.tensors


class _Names:
    """The tensors of a file by name. One that several layers share (a rule's, a cache's) is held once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.known: dict[Any, str] = {}

    def add(self, name: str, tensor: Tensor | None) -> str | None:
        if tensor is None:
            return None
        if tensor.dtype not in DTYPES:
            raise RecordError(f"recording.save: {name} is {tensor.dtype}, which the file cannot hold")
        # All of them are alive, so what lies at one address in one layout is one tensor.
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in self.known:
            self.known[place] = name
            self.tensors[name] = tensor
        return self.known[place]


def _entry(capture: Capture, rule: Rule, prefix: str, names: _Names) -> dict[str, Any]:
    """One layer; of keys behind the rule's end (room in a cache) nothing is read, and nothing is kept."""
    return {
        "path": capture.path,
        "mask": str(rule),
        "rule": {
            "stop": rule.stop,
            "left": rule.left,
            "right": rule.right,
            "keys": names.add(f"{prefix}.rule.keys", rule.keys),
            "documents": names.add(f"{prefix}.rule.documents", rule.documents),
        },
        "scale": capture.scale,
        "softcap": capture.softcap,
        "sinks": names.add(f"{prefix}.sinks", capture.sinks),
        "bias": names.add(f"{prefix}.bias", _narrow(capture.bias, rule.stop)),
        "dtype": str(capture.query.dtype).removeprefix("torch."),
        "query": names.add(f"{prefix}.query", capture.query),
        "key": names.add(f"{prefix}.key", capture.key[:, :, : rule.stop]),
        "value": names.add(f"{prefix}.value", capture.value[:, :, : rule.stop]),
        "rows": list(capture.rows),
        "sample": names.add(f"{prefix}.sample", capture.sample),
    }


def _narrow(bias: Tensor | None, stop: int) -> Tensor | None:
    """A bias on the keys before `stop`; one number for all keys stays one."""
    return bias if bias is None or bias.shape[-1] == 1 else bias[..., :stop]


def _only(thing: Capture | Rule, known: set[str], layer: int | str) -> None:
    """Raise when a layer holds something that the format has no place for, so that no file leaves it out."""
    for field in fields(thing):
        if not field.init or field.name in known:
            continue
        value = getattr(thing, field.name)
        unused = value is None or (field.default is not MISSING and value is field.default)
        if not unused:
            raise RecordError(
                f"recording.save: layer {layer} has a {field.name}, for which the file has no place, and A would be "
                "wrong without it"
            )


def versions() -> dict[str, str]:
    """The versions a file is saved with."""
    from kizuki import __version__

    found = {"kizuki": __version__, "torch": torch.__version__}
    with suppress(metadata.PackageNotFoundError):  # a Recording that was opened can be saved without it
        found["transformers"] = metadata.version("transformers")
    return found


def check_tokens(tokens: Tokens, keys: int, batch: int) -> None:
    """Raise RecordError unless the tokens can be those of `keys` keys; behind a sliding cache there are more."""
    if not isinstance(tokens, Tokens):
        raise RecordError(
            f"recording.save: recording.tokens is a {type(tokens).__name__} but must be a kizuki.models.Tokens or None"
        )
    count = len(tokens.ids)
    lengths = {len(tokens.offsets), len(tokens.labels), len(tokens.special)}
    if lengths != {count}:
        raise RecordError(
            f"recording.save: recording.tokens has {count} ids but offsets, labels and special of other lengths"
        )
    if batch != 1:
        raise RecordError(
            f"recording.save: recording.tokens is one text but the recording is a batch of {batch}; set it to None"
        )
    if count < keys:
        raise RecordError(
            f"recording.save: recording.tokens has {count} tokens but there are {keys} keys; give this pass's tokens"
        )


def _plain(tokens: Tokens) -> dict[str, Any]:
    return {
        "text": tokens.text,
        "ids": list(tokens.ids),
        "offsets": [list(span) for span in tokens.offsets],
        "labels": list(tokens.labels),
        "special": list(tokens.special),
    }


# Reading

Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return type(value) is str


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _layer(value: Any) -> bool:
    return _count(value) or (_text(value) and value != "")


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def _span(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and all(map(_count, value)) and value[0] <= value[1]


def _texts(value: Any) -> bool:
    return type(value) is dict and all(map(_text, value.values()))


def _any(value: Any) -> bool:
    return True


TABLE: dict[str, Check] = {
    "model": _text,
    "passes": _count,
    "heads": _maybe(_list(_count)),
    "versions": _texts,
    "layers": _list(lambda entry: type(entry) is dict),
    "tokens": _any,
    "crc32": _texts,
}
FAILED: dict[str, Check] = {"layer": _layer, "error": _text}
LAYER: dict[str, Check] = {
    "layer": _layer,
    "path": _text,
    "mask": _text,
    "rule": _any,
    "scale": _maybe(_number),
    "softcap": _maybe(lambda value: _number(value) and value > 0),
    "sinks": _maybe(_text),
    "bias": _maybe(_text),
    "dtype": _text,
    "query": _text,
    "key": _text,
    "value": _text,
    "rows": _list(_count),
    "sample": _maybe(_text),
}
RULES: dict[str, Check] = {
    "stop": _count,
    "left": _maybe(_count),
    "right": _maybe(_count),
    "keys": _maybe(_text),
    "documents": _maybe(_text),
}
TOKENS: dict[str, Check] = {
    "text": _text,
    "ids": _list(_count),
    "offsets": _list(_span),
    "labels": _list(_text),
    "special": _list(lambda value: type(value) is bool),
}


def check_table(table: Any, tensors: dict[str, Shape]) -> None:
    """Raise HeaderError unless a table is complete, knows all of the file's tensors and fits their shapes."""
    _fields(table, TABLE, "its header")
    numbers = [entry.get("layer") for entry in table["layers"]]
    if len(set(map(repr, numbers))) != len(numbers):
        raise HeaderError("a layer is there twice")
    named: set[str] = set()
    for entry in table["layers"]:
        where = f"layer {entry.get('layer')!r}"
        if "error" in entry:
            _fields(entry, FAILED, where)
        else:
            named |= _check_layer(entry, where, table["heads"], tensors)
    if named != set(tensors):
        raise HeaderError(f"tensor {min(named ^ set(tensors))!r} is named on one side only, header or data")
    if named != set(table["crc32"]):
        raise HeaderError("its tensors and their checksums are not the same ones")
    if table["tokens"] is not None:
        tokens = table["tokens"]
        _fields(tokens, TOKENS, "tokens")
        if len({len(tokens[name]) for name in TOKENS if name != "text"}) != 1:
            raise HeaderError("tokens has lists of different lengths")
        if any(end > len(tokens["text"]) for _, end in tokens["offsets"]):
            raise HeaderError("tokens has offsets behind the end of the text")


def _fields(given: Any, checks: dict[str, Check], where: str) -> None:
    if type(given) is not dict:
        raise HeaderError(f"{where} is a {type(given).__name__}, not a table")
    for name in given.keys() - checks.keys():
        raise HeaderError(
            f"{where} has the field {name[:40]!r}, which this version of the format does not have"
        )
    for name, check in checks.items():
        if name not in given:
            raise HeaderError(f"{where} has no {name}")
        if not check(given[name]):
            raise HeaderError(f"{where} has a {name} that cannot be")


def _check_layer(
    entry: dict[str, Any], where: str, heads: list[int] | None, tensors: dict[str, Shape]
) -> set[str]:
    """The names of a layer's tensors; raises HeaderError unless they are there and fit one another."""
    _fields(entry, LAYER, where)
    _fields(entry["rule"], RULES, f"{where}, rule")
    rule = entry["rule"]
    named = {name: entry[name] for name in ("query", "key", "value", "sinks", "bias", "sample")}
    named |= {name: rule[name] for name in ("keys", "documents")}
    named = {name: value for name, value in named.items() if value is not None}
    for name, tensor in named.items():
        if tensor not in tensors:
            raise HeaderError(f"{where}: there is no tensor {tensor[:60]!r} for its {name}")
    kinds = {name: tensors[tensor][0] for name, tensor in named.items()}
    shapes = {name: tensors[tensor][1] for name, tensor in named.items()}
    if any(len(shapes[name]) != 4 for name in ("query", "key", "value")):
        raise HeaderError(f"{where}: query, key and value do not have 4 axes each")
    batch, count, queries, head_dim = shapes["query"]
    kv_heads, width, stop = shapes["key"][1], shapes["value"][3], rule["stop"]
    expected: dict[str, tuple[list[int], Iterable[str]]] = {
        "key": ([batch, kv_heads, stop, head_dim], (kinds["query"],)),
        "value": ([batch, kv_heads, stop, width], (kinds["query"],)),
        "sinks": ([count], FLOATS),
        "sample": ([batch, count, len(entry["rows"]), width], FLOATS),
        "keys": ([batch, stop], ("BOOL",)),
        "documents": ([batch, stop], ("I64",)),
    }
    for name, (shape, allowed) in expected.items():
        if name not in named:
            continue
        free = (
            1 if name in ("keys", "documents") and shapes[name][:1] == [1] else 0
        )  # one for the whole batch
        if shapes[name][free:] != shape[free:] or kinds[name] not in allowed:
            raise HeaderError(
                f"{where}: its {name} is {kinds[name]} {shapes[name]}, which does not fit its query"
            )
    if "bias" in named:
        full, got = [batch, count, queries, stop], shapes["bias"]
        fits = len(got) <= 4 and all(a in (1, b) for a, b in zip(got[::-1], full[::-1], strict=False))
        if not fits or kinds["bias"] not in FLOATS:
            raise HeaderError(f"{where}: its bias is {kinds['bias']} {got}, which does not fit its query")
    if kinds["query"] not in FLOATS or entry["dtype"] != _dtype_name(kinds["query"]):
        raise HeaderError(f"{where}: its query is {kinds['query']} but its dtype says {entry['dtype'][:20]}")
    if (kv_heads and count % kv_heads) or (heads is not None and len(heads) != count):
        raise HeaderError(
            f"{where}: its {count} heads do not fit its {kv_heads} key heads or the recorded heads"
        )
    if any(row >= queries for row in entry["rows"]):
        raise HeaderError(f"{where}: rows names a query that is not there")
    if rule["documents"] is not None and queries > stop:
        raise HeaderError(f"{where}: it has more queries than documents say anything about")
    if str(rule_of(rule, lambda name: torch.empty(0))) != entry["mask"]:
        raise HeaderError(f"{where}: its mask and its rule say different things")
    return set(named.values())


def _dtype_name(kind: str) -> str:
    return next(str(dtype).removeprefix("torch.") for dtype, name in DTYPES.items() if name == kind)


def rule_of(table: dict[str, Any], tensor: Callable[[str], Tensor]) -> Rule:
    """The rule of a layer's table; `tensor(name)` reads one."""
    keys, documents = (None if table[name] is None else tensor(table[name]) for name in ("keys", "documents"))
    return Rule(table["stop"], table["left"], table["right"], keys, documents)


def tokens_of(table: dict[str, Any] | None) -> Tokens | None:
    """The tokens of a checked table."""
    if table is None:
        return None
    offsets = [(first, end) for first, end in table["offsets"]]
    return Tokens(table["text"], table["ids"], offsets, table["labels"], table["special"])
