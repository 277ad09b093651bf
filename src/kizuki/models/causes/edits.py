"""Changes to a model's attention while it runs: a head's output, the keys a head sees, one row of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .. import hf
from ..calls import Call, told, watchers
from ..capture import Masks, capture
from ..layers import Layers, find
from ..recording import Capture, Layer
from ..rule import RecordError, Rule

if TYPE_CHECKING:
    from kizuki import AttentionMatrix


class CauseError(ValueError):
    """An intervention that cannot be made on this model or text; the message is one line."""


@dataclass(frozen=True)
class AblateHead:
    """Replace the output of one head, its slice before W_O, at every query.

    `to`: "zero", or "mean": the mean of the head's output over the queries of the same pass, which keeps what the head
    always writes and takes away what it writes where.

    >>> import torch, transformers
    >>> from kizuki.models.causes import AblateHead, cause
    >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=4)
    >>> model = transformers.GPT2LMHeadModel(config).eval()
    >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
    >>> print(cause(model, ids, AblateHead(2, 1, to="mean"), controls=0).edit)
    layer 2, head 1 → its mean
    """

    layer: Layer
    head: int
    to: Literal["zero", "mean"] = "zero"

    def __str__(self) -> str:
        return f"layer {self.layer}, head {self.head} → {'0' if self.to == 'zero' else 'its mean'}"


@dataclass(frozen=True)
class MaskKeys:
    """Hide keys from some heads of some layers (None = all): their softmax runs over the other keys.

    A query that sees no other key (query 0 of a decoder, where key 0 is hidden) gets an output of 0.

    >>> import torch, transformers
    >>> from kizuki.models.causes import MaskKeys, cause
    >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=4)
    >>> model = transformers.GPT2LMHeadModel(config).eval()
    >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
    >>> found = cause(model, ids, MaskKeys((1, 3), layers=0), controls=0)  # the two tokens 1, from layer 0
    >>> found.moved > 0, found.position
    (True, 4)
    """

    keys: int | tuple[int, ...]
    layers: Layer | tuple[Layer, ...] | None = None
    heads: int | tuple[int, ...] | None = None

    def __str__(self) -> str:
        keys = _tuple(self.keys)
        hidden = f"key{'s' if len(keys) > 1 else ''} {', '.join(map(str, keys))} hidden"
        where = [
            f"{name} {', '.join(map(str, _tuple(chosen)))}"
            for name, chosen in (("layer", self.layers), ("head", self.heads))
            if chosen is not None
        ]
        return f"{hidden} in {', '.join(where) or 'all layers'}"


@dataclass(frozen=True)
class SetRow:
    """Set weights of one query in one head: `{key: weight}`; the others keep theirs.

    The row is used as it then is, whatever it sums to; `renormalise=True` divides it by its sum.

    >>> import torch, transformers
    >>> from kizuki.models.causes import SetRow, cause
    >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=4)
    >>> model = transformers.GPT2LMHeadModel(config).eval()
    >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
    >>> found = cause(model, ids, SetRow(1, 0, query=4, weights={0: 0.9}, renormalise=True), controls=0)
    >>> print(found.edit)
    layer 1, head 0: a[4,0] = 0.9, renormalised
    """

    layer: Layer
    head: int
    query: int
    weights: Mapping[int, float]
    renormalise: bool = False

    def __str__(self) -> str:
        row = ", ".join(f"a[{self.query},{key}] = {weight:g}" for key, weight in self.weights.items())
        return f"layer {self.layer}, head {self.head}: {row}{', renormalised' if self.renormalise else ''}"


Edit = AblateHead | MaskKeys | SetRow


@contextmanager
def intervene(model: nn.Module, *edits: Edit) -> Iterator[None]:
    """Run a model changed: in the block, on this thread, its attention layers do what the edits say.

    The model's own function runs first, whatever it is; then the outputs of the edited heads, and of no other, are
    replaced. Masked and edited rows are computed from the call's own q, k, v and mask, after A v was compared with the
    model's output as in a recording. A recording around or inside the block holds what the model's function gave.

    Args:
        model: a transformers model whose attention goes by its attention interface (Llama, SmolLM2, GPT-2, BERT and
            most others; not BLOOM or Falcon). Passes read a whole text: `use_cache=False`.
        edits: `AblateHead`, `MaskKeys`, `SetRow`; the same for every text of a batch. Edits of one head must not
            contradict each other.

    Raises:
        CauseError: a layer, head, key or query that is not there, a weight on a key that its query does not see, two
            edits of one head that contradict each other; at the end of the block, an edit that no pass met.
        RecordError: the layer's attention does something that kizuki does not know.

    Time and memory: a copy of an edited layer's output; for masked keys one more attention of the layer. Gradients do
    not flow through what is replaced.

    Example:
        >>> import torch, transformers
        >>> from kizuki.models.causes import AblateHead, intervene
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
        >>> plain = model(ids, use_cache=False).logits
        >>> with intervene(model, AblateHead(2, 1)):
        ...     changed = model(ids, use_cache=False).logits
        >>> torch.equal(plain, changed), torch.equal(plain, model(ids, use_cache=False).logits)
        (False, True)
    """
    with around(model, Editor(find(model), edits)):
        yield


@contextmanager
def around(model: nn.Module, editor: Editor) -> Iterator[None]:
    """`intervene` with an editor of the caller's own."""
    tops = {id(each): each for each in (model, getattr(model, "base_model", model))}.values()
    hooks = [top.register_forward_pre_hook(lambda *_: editor.begin()) for top in tops]
    hf.install()
    watchers().append(editor)
    try:
        yield
    finally:
        watchers().remove(editor)
        hf.uninstall()
        for hook in hooks:
            hook.remove()
    editor.check_met()


class Editor:
    """Hears a model's attention calls, as a recorder does, and says what each gives instead."""

    def __init__(self, found: Layers, edits: Sequence[Edit]) -> None:
        self.paths = {id(module): (layer, path) for layer, (path, module) in found.found.items()}
        self.edits: dict[Layer, list[Edit]] = {layer: [] for layer in found.found}
        self.passes = 0
        self.heads: dict[Layer, int] = {}  # how many each layer has, of those that ran
        self.causal = False  # whether its queries see what is before them only
        self.met: dict[Layer, int] = {}  # how often each attended in this pass
        self.masks = Masks()
        self.seen: dict[Layer, _Seen] = {}  # the calls of this pass whose A an edit needed
        for edit in edits:
            if not isinstance(edit, AblateHead | MaskKeys | SetRow):
                raise CauseError(
                    f"intervene: {edit!r} is a {type(edit).__name__} but must be AblateHead, MaskKeys or SetRow"
                )
            check(edit)
            for layer in _layers_of(edit, self.edits):
                self.edits[layer].append(edit)
        for layer, several in self.edits.items():
            for one, other in combinations(several, 2):
                if _clash(one, other):
                    raise CauseError(
                        f"intervene: ({one}) and ({other}) both change one head of layer {layer}; give keys together, "
                        "and one edit a head or row"
                    )

    def begin(self) -> None:
        """A pass of the model begins."""
        self.passes += 1
        self.met.clear()
        self.seen.clear()
        self.masks.clear()

    def check_met(self) -> None:
        """Raise where an edit was for a layer that passes went by without."""
        missed = [layer for layer, edits in self.edits.items() if edits and layer not in self.heads]
        if self.passes and missed:
            raise CauseError(
                f"intervene: the attention of layer {missed[0]} did not go by transformers' attention interface, so "
                "nothing of it was changed; this model's interventions are not supported"
            )

    # -- as a watcher ------------------------------------------------------------------------------

    def wants(self, module: nn.Module) -> bool:
        return id(module) in self.paths

    def hear(self, module: nn.Module, make: Callable[[nn.Module], Call]) -> None:
        """Nothing is kept."""

    def edit(self, call: Call) -> Any:
        """What the call gives instead of its output."""
        layer, path = self.paths[id(call.module)]
        self.heads[layer] = call.query.shape[1]
        self.causal = bool(getattr(call.module, "is_causal", False))
        edits = self.edits[layer]
        self.met[layer] = self.met.get(layer, 0) + 1
        if not edits:
            return call.output
        if self.met[layer] > 1:
            raise CauseError(
                f"intervene: layer {layer} attends several times in one pass (it is shared); not supported"
            )
        if call.query.shape[2] != call.key.shape[2]:
            raise CauseError(
                f"intervene: layer {layer} reads {call.key.shape[2]} keys with {call.query.shape[2]} queries; run a "
                "whole text at once, with use_cache=False"
            )
        with told(), torch.no_grad():
            output = call.output.clone()  # [batch, queries, heads, value_dim]
            seen = self.seen[layer] = _Seen(call, path, self.masks)
            for edit in edits:
                _apply(edit, output, seen, layer)
        return output

    def visible_last(self, edit: Edit, query: int) -> Tensor | None:
        """The keys that a query sees, bool `[keys]`, where an edit of hidden keys is of the last layer that ran alone.

        None elsewhere: what a query does not see itself may reach it through the layers behind.
        """
        last = next(reversed(self.heads), None)
        if not isinstance(edit, MaskKeys) or last not in self.seen or _layers_of(edit, self.edits) != [last]:
            return None
        held, _, rule = self.seen[last].kept()
        return _visible(held, rule, query)[0]


class _Seen:
    """One call as a recording sees it, made when an edit needs A."""

    def __init__(self, call: Call, path: str, masks: Masks) -> None:
        self.call, self.path, self.masks = call, path, masks
        self._kept: tuple[Capture, AttentionMatrix, Rule] | None = None

    def kept(self) -> tuple[Capture, AttentionMatrix, Rule]:
        """q, k, v, A and the mask's rule, once A v has been found to be the layer's own output."""
        if self._kept is None:
            try:
                held = capture(self.call, self.path, self.masks, None, copy=False, trim=False)
            except RecordError as error:
                raise RecordError(f"intervene: {self.path}: {error}") from None
            self._kept = (held, *held.matrix())
        return self._kept


def _apply(edit: Edit, output: Tensor, seen: _Seen, layer: Layer) -> None:
    """Write what an edit says into the output of its layer."""
    count = output.shape[2]
    heads = range(count) if isinstance(edit, MaskKeys) and edit.heads is None else _heads_of(edit)
    for head in heads:
        if head >= count:
            raise CauseError(
                f"intervene: head is {head} but layer {layer} has {count} heads, 0 … {count - 1}"
            )
    if isinstance(edit, AblateHead):
        own = output[:, :, edit.head]
        output[:, :, edit.head] = own.mean(1, keepdim=True) if edit.to == "mean" else 0
    elif isinstance(edit, MaskKeys):
        chosen = torch.tensor(list(heads), device=output.device)
        output[:, :, chosen] = _without(_tuple(edit.keys), seen)[:, :, chosen].to(output.dtype)
    else:
        output[:, edit.query, edit.head] = _row(edit, seen).to(output.dtype)


def _without(keys: tuple[int, ...], seen: _Seen) -> Tensor:
    """The output with keys hidden, `[batch, queries, heads, value_dim]`."""
    from kizuki import attend, masks

    held, matrix, rule = seen.kept()
    _inside("key", max(keys), rule.stop)
    left = torch.ones(rule.stop, dtype=torch.bool, device=matrix.device)
    left[list(keys)] = False
    own = rule.mask(held.query.shape[2])
    others = masks.keys(left)
    hidden = attend(
        held.query,
        held.key[:, :, : rule.stop],
        mask=others if own is None else own & others,
        scale=held.scale,
        softcap=held.softcap,
        sinks=held.sinks,
        bias=None if held.bias is None else held.bias[..., : rule.stop],
    )
    mixed: Tensor = hidden @ held.value[:, :, : rule.stop]
    return mixed.transpose(1, 2)


def _row(edit: SetRow, seen: _Seen) -> Tensor:
    """The edited row times v, `[batch, value_dim]`."""
    held, matrix, rule = seen.kept()
    _inside("query", edit.query, held.query.shape[2])
    _inside("key", max(edit.weights), rule.stop)
    row = matrix[:, edit.head, edit.query]  # [batch, keys]
    seen_keys = _visible(held, rule, edit.query)
    for key, weight in edit.weights.items():
        if not bool(seen_keys[:, key].all()):
            raise CauseError(
                f"intervene: key {key} is hidden from query {edit.query} by the model's mask; leave it out"
            )
        row[:, key] = weight
    if edit.renormalise:
        total = row.sum(-1, keepdim=True)
        if not bool((total > 0).all()):
            raise CauseError(f"intervene: the row of query {edit.query} sums to 0 and cannot be renormalised")
        row = row / total
    slot = edit.head * held.value.shape[1] // held.query.shape[1]
    value = held.value[:, slot, : rule.stop].to(row.dtype)
    return torch.einsum("bk,bkv->bv", row.expand(value.shape[0], -1), value)


def _visible(held: Capture, rule: Rule, query: int) -> Tensor:
    """Which keys a query sees, bool `[batch, keys]`: those with weight where all scores are equal."""
    from kizuki import attend

    batch = max(held.query.shape[0], held.key.shape[0])
    zeros = held.query.new_zeros(1, dtype=torch.float32)
    flat = attend(
        zeros.expand(batch, 1, held.query.shape[2], 1),
        zeros.expand(batch, 1, rule.stop, 1),
        mask=rule.mask(held.query.shape[2]),
    )
    found: Tensor = flat[:, 0, query] > 0
    return found


def _inside(what: str, number: int, count: int) -> None:
    if number >= count:
        raise CauseError(f"intervene: {what} is {number} but the pass has {count}, 0 … {count - 1}")


def check(edit: Edit) -> None:
    """Raise for numbers that no model can have."""
    places = [("head", head) for head in _heads_of(edit)]
    if isinstance(edit, MaskKeys):
        if not _tuple(edit.keys):
            raise CauseError("MaskKeys: keys is empty; name at least one")
        places += [("key", key) for key in _tuple(edit.keys)]
    elif isinstance(edit, SetRow):
        if not edit.weights:
            raise CauseError("SetRow: weights is empty; give {key: weight}")
        places += [("query", edit.query), *(("key", key) for key in edit.weights)]
        for key, weight in edit.weights.items():
            if not isinstance(weight, (int, float)) or not math.isfinite(weight) or weight < 0:
                raise CauseError(
                    f"SetRow: the weight of key {key} is {weight!r} but must be a number from 0 up"
                )
    elif edit.to not in ("zero", "mean"):
        raise CauseError(f"AblateHead: to is {edit.to!r} but must be 'zero' or 'mean'")
    for what, number in places:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise CauseError(
                f"{type(edit).__name__}: {what} is {number!r} but must be a whole number from 0 up"
            )


def on_head(edit: AblateHead | SetRow, head: int) -> Edit:
    """The same edit on another head."""
    return replace(edit, head=head)


def _layers_of(edit: Edit, known: Mapping[Layer, Any]) -> list[Layer]:
    if isinstance(edit, MaskKeys):
        chosen = list(known) if edit.layers is None else list(_tuple(edit.layers))
    else:
        chosen = [edit.layer]
    for layer in chosen:
        if layer not in known or isinstance(layer, bool):
            there = ", ".join(map(str, list(known)[:3]))
            raise CauseError(
                f"intervene: layer is {layer!r} but the model has {len(known)} layers: {there}, …"
            )
    return chosen


def _heads_of(edit: Edit) -> tuple[int, ...]:
    """The heads an edit names; for all heads, none."""
    if isinstance(edit, MaskKeys):
        return () if edit.heads is None else _tuple(edit.heads)
    return (edit.head,)


def _clash(one: Edit, other: Edit) -> bool:
    """Whether two edits of one layer write over each other."""
    if isinstance(one, SetRow) and isinstance(other, SetRow):
        return one.head == other.head and one.query == other.query
    mine, theirs = _heads_of(one), _heads_of(other)
    everywhere = any(isinstance(edit, MaskKeys) and edit.heads is None for edit in (one, other))
    return everywhere or bool(set(mine) & set(theirs))


def _tuple(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, int | str) else tuple(given)
