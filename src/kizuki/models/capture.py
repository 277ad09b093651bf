"""From what was heard of an attention call to what is kept of it: q, k, v, the mask as a rule, a few checked rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .calls import Call
from .recording import Capture
from .rule import RecordError, Rule, bias_in, derive, from_function, from_padding, from_tensor

# Options of an attention function that put something into the scores which q, k, a bias and a rule do not hold.
UNKNOWN = {
    "head_mask": "scales whole heads by a head mask",
    "cu_seq_lens_q": "is given packed sequences by their lengths",
    "block_tables": "reads its keys from a paged cache",
}

Seen = tuple[list[Rule], Tensor | None]  # the rules a mask can have been, and what it adds to the scores


class Masks:
    """The masks of one pass, each read once for all the layers that share the tensor.

    A tensor is held until the pass ends, so that no other can get its place in memory.
    """

    def __init__(self) -> None:
        self.known: dict[Any, tuple[Any, Seen | RecordError]] = {}

    def clear(self) -> None:
        self.known.clear()

    def of(self, call: Call, trim: bool) -> Seen:
        added = call.options.get("position_bias")
        if call.mask is None and added is None:
            return without_mask(call), None
        key = (_identity(call.mask), _identity(added), call.query.shape[2], call.key.shape[2])
        if key not in self.known:
            try:
                self.known[key] = ((call.mask, added), _read(call, trim))
            except RecordError as error:
                self.known[key] = ((call.mask, added), error)
        found = self.known[key][1]
        if isinstance(found, RecordError):
            raise found
        return found


def _identity(given: Any) -> Any:
    if type(given) is Tensor:  # a subclass may have no memory
        return given.data_ptr(), given.shape, given.stride(), given.dtype
    return id(given)


def capture(
    call: Call, path: str, masks: Masks, heads: list[int] | None, *, copy: bool, trim: bool
) -> Capture:
    """What is kept of a call; RecordError for what cannot be kept truly.

    `copy`: the keys stand in a cache that will be written over. `trim`: behind the keys it may have room.
    """
    for option, does in UNKNOWN.items():
        if call.options.get(option) is not None:
            raise RecordError(f"{type(call.module).__name__} {does}, which is not recorded")
    query, key, value = call.query.detach(), call.key.detach(), call.value.detach()
    if query.dim() != 4 or key.dim() != 4:
        raise RecordError(f"its query has {query.dim()} axes, expected [batch, heads, queries, head_dim]")
    rules, bias = masks.of(call, trim)
    sinks = call.options.get("s_aux")
    rows = sorted({0, query.shape[2] // 2, query.shape[2] - 1}) if query.shape[2] else []
    kept = Capture(
        path=path,
        query=query,
        key=key,
        value=value,
        scale=_number("scaling", call.options.get("scaling")),
        softcap=_number("softcap", call.options.get("softcap")),
        sinks=None if sinks is None else sinks.detach(),
        rules=rules,
        rows=rows,
        sample=None,
        bias=bias,
    )
    if call.output is not None and not call.random:  # dropout makes the output random
        if isinstance(call.output, Tensor):
            kept.sample = _sample(call, rows)
        else:
            mixed = kept.mixed(kept.rules[0])
            gap = call.output.gap(rows, mixed)
            if gap > 1:
                raise RecordError(kept.unlike(gap))
            kept.sample = mixed.to(query.dtype)
    if heads is not None:
        _pick_heads(kept, heads)
    elif copy:
        kept.key, kept.value = key.clone(), value.clone()
    kept.versions = kept.now()
    return kept


def _read(call: Call, trim: bool) -> Seen:
    """The rule of a call's mask, and its bias."""
    batch = max(call.query.shape[0], call.key.shape[0])
    queries, keys = call.query.shape[2], call.key.shape[2]
    added = call.options.get("position_bias")
    rules, bias = without_mask(call), None
    if isinstance(call.mask, Tensor):
        if call.mask.dim() == 2:  # flash: the padding by itself, and causality by flag
            rules = [from_padding(call.mask, rule) for rule in rules]
        else:
            causal = call.implementation == "note" and bool(call.options.get("is_causal"))
            mask = call.mask[:, None] if call.mask.dim() == 3 else call.mask
            rules = [from_tensor(mask, batch, queries, keys, numbers=True, causal=causal, trim=trim)]
            bias = bias_in(mask.detach(), queries, keys)
    elif callable(getattr(call.mask, "mask_mod", None)):
        rules = [from_function(call.mask.mask_mod, batch, queries, keys, call.query.device)]
    elif callable(getattr(call.mask, "visible", None)):  # a rule of kizuki.masks, given to `note`
        rules = [_of_rule(call.mask, batch, call.query.shape[1], queries, keys, call.query.device)]
    elif call.mask is not None:
        raise RecordError(f"its mask is a {type(call.mask).__name__}, which has no rule")
    if added is not None:
        given = added.detach() if bool(added.any()) else None
        # Falcon's eager attention adds its ALiBi by both ways.
        bias = given if bias is None else bias if given is None else bias + given
    if bias is not None and (bias.dim() != 4 or bias.shape[3] not in (1, keys)):
        raise RecordError(
            f"its bias has shape {list(bias.shape)}, which is not [batch, heads, {queries}, {keys}]"
        )
    return rules, bias


def _of_rule(mask: Any, batch: int, heads: int, queries: int, keys: int, device: torch.device) -> Rule:
    """The rule of a `kizuki.masks` mask: where scores of 0 leave weight."""
    from kizuki import attend

    query, key = (torch.zeros(1, device=device).expand(batch, heads, length, 1) for length in (queries, keys))
    matrix = attend(query, key, mask=mask)
    return derive(lambda start, stop: matrix[:, :, start:stop] > 0, queries, keys, trim=False)


def without_mask(call: Call) -> list[Rule]:
    """What an attention function does when it is given no mask: what it can have been, most plausible first.

    eager adds nothing. PyTorch's function goes by the `is_causal` flag, from the upper left, on the first keys
    only; transformers' sdpa takes the flag from the module. flash goes by the flag from the lower right, with its
    window. Of a custom function only its own output can say (`Capture.matrix` asks it).
    """
    queries, keys = call.query.shape[2], call.key.shape[2]
    name, flag = call.implementation, call.options.get("is_causal")
    lengths = call.options.get("lengths")
    everything = Rule(keys)
    if lengths is not None:  # nested tensors: what is padding to us does not exist for the model
        return [everything if bool(lengths.all()) else Rule(keys, keys=lengths, documents=(~lengths).long())]
    if name == "eager":
        return [everything]
    if name == "note":
        return [Rule(keys, right=0) if flag else everything]
    if name == "torch":
        first = min(queries, keys)
        return [Rule(first, right=queries - first) if flag else everything]
    causal = bool(getattr(call.module, "is_causal", True) if flag is None else flag) and queries > 1
    if name in ("sdpa", "kizuki"):
        first = min(queries, keys)
        return [Rule(first, right=queries - first) if causal else everything]
    window = call.options.get("sliding_window")
    rules = [Rule(keys, right=0) if causal else everything]
    if isinstance(window, int) and keys > window:
        rules.insert(0, Rule(keys, left=window - 1, right=0 if causal else window - 1))
    if "flash" in name:
        return rules[:1]
    return [*rules, everything] if causal else [*rules, Rule(keys, right=0)]


def _number(name: str, given: Any) -> float | None:
    if given is None:
        return None
    if isinstance(given, Tensor) and given.numel() != 1:
        raise RecordError(f"its {name} is a tensor of {given.numel()} numbers, expected one")
    return float(given)


def _sample(call: Call, rows: list[int]) -> Tensor:
    """A few rows of the function's own output, `[batch, heads, rows, value_dim]`, copied."""
    batch, heads, queries, _ = call.query.shape
    expected = (max(batch, call.key.shape[0]), queries, heads, call.value.shape[-1])
    output = call.output
    if tuple(output.shape) not in (expected, (*expected[:2], heads * expected[3])):
        raise RecordError(f"its attention function returned something other than {list(expected)}")
    output = output.detach().reshape(expected)
    return output[:, rows].transpose(1, 2)  # indexing with a list copies


def _pick_heads(kept: Capture, heads: list[int]) -> None:
    """Leave the chosen query heads and the key heads they read, copied so that the rest can be freed."""
    total, kv_heads = kept.query.shape[1], kept.key.shape[1]
    if heads[-1] >= total:
        raise RecordError(f"heads holds {heads[-1]} but this layer has {total} heads")
    group = total // kv_heads
    read = [head // group for head in heads]
    distinct = sorted(set(read))
    # Key heads can stay shared where every one of them serves equally many of the chosen heads.
    if len({read.count(head) for head in distinct}) == 1:
        read = distinct
    at = torch.tensor(heads, device=kept.query.device)
    kv_at = torch.tensor(read, device=kept.query.device)
    kept.query = kept.query.index_select(1, at)
    kept.key, kept.value = kept.key.index_select(1, kv_at), kept.value.index_select(1, kv_at)
    kept.sinks = None if kept.sinks is None else kept.sinks.index_select(0, at)
    kept.sample = None if kept.sample is None else kept.sample.index_select(1, at)
    if kept.bias is not None and kept.bias.shape[1] > 1:
        kept.bias = kept.bias.index_select(1, at)
