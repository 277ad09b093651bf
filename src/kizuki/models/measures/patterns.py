"""Heads that read what repeats: earlier same tokens, and what came after them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..predict import output_head
from ..record import record
from ..recording import Recording
from ..sources import Source
from .heads import UNIFORM
from .reader import Measure, Reader, check, measured

SHUFFLED = "the same places, second half shuffled"
RELABELLED = "the same A, tokens shuffled"


def duplicate(recording: Recording, ids: Tensor | None = None, *, seed: int = 0) -> Measure:
    """The weight on earlier same tokens: mean over rows of `Σ a_ij` over j < i with token j = token i.

    Args:
        recording: what `kizuki.record` or `kizuki.open` gave.
        ids: the tokens, integer `[tokens]` or `[batch, tokens]`; None takes `recording.tokens`.
        seed: of the shuffle.

    Returns:
        A `Measure`, 0 … 1, over the rows that have such a token; the control is the same number for the same A with
        its tokens shuffled over their places. NaN where no token occurs twice.

    Raises OptionError without ids, ShapeError for ids that are not those of the recording.

    Cost: a pass of the lse over A, and one over the same tokens for value and control each.

    Source: Wang et al. 2022 (Interpretability in the wild), section 3 (duplicate token heads).

    Example:
        >>> import kizuki
        >>> from importlib.resources import files
        >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
        >>> found = kizuki.models.measures.duplicate(recording)  # no token occurs twice but "the": The and the differ
        >>> found.value.shape
        torch.Size([1, 1, 9])
    """
    return _labelled(recording, ids, seed, "duplicate", 0)


def induction(recording: Recording, ids: Tensor | None = None, *, seed: int = 0) -> Measure:
    """The weight on what followed earlier same tokens: mean of `Σ a_ij` over j <= i with token j−1 = token i.

    Arguments, returns, raises and cost as for `duplicate`. On text a high number may come from what texts repeat;
    `repeats` asks the question on random tokens.

    Source: Elhage et al. 2021, Olsson et al. 2022 (induction heads; prefix matching).

    Example:
        >>> import kizuki
        >>> from importlib.resources import files
        >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
        >>> import torch
        >>> ids = torch.tensor([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1])  # as if the sentence repeated itself
        >>> found = kizuki.models.measures.induction(recording, ids)
        >>> found.value.shape, found.against
        (torch.Size([1, 1, 9]), 'the same A, tokens shuffled')
    """
    return _labelled(recording, ids, seed, "induction", 1)


def _labelled(recording: Recording, ids: Tensor | None, seed: int, name: str, after: int) -> Measure:
    check(recording, f"measures.{name}")
    labels = _ids(recording, ids, name)
    return measured(
        recording,
        partial(read_same, ids=labels, after=after, seed=seed, name=name),
        name,
        unit="of each row",
        against=RELABELLED,
    )


def _ids(recording: Recording, ids: Tensor | None, name: str) -> Tensor:
    from kizuki import KizukiTypeError, OptionError

    if ids is None:
        if recording.tokens is None:
            raise OptionError(
                f"measures.{name}: ids is None and the recording holds no tokens; give ids, or set recording.tokens"
            )
        ids = torch.tensor(recording.tokens.ids)
    if not isinstance(ids, Tensor) or ids.dtype.is_floating_point or ids.dtype is torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise KizukiTypeError(f"measures.{name}: ids is {kind} but must be an integer tensor, one token each")
    return ids


def read_same(reader: Reader, ids: Tensor, after: int, seed: int, name: str) -> tuple[Tensor, Tensor]:
    """`duplicate` (after = 0) or `induction` (after = 1) of one layer."""
    from kizuki import ShapeError
    from kizuki.errors import show

    fits = ids.dim() == 1 or (ids.dim() == 2 and ids.shape[0] in (1, reader.batch))
    if not fits or ids.shape[-1] != reader.keys:
        raise ShapeError(
            f"measures.{name}: ids is {show(ids)} but layer {reader.layer!r} has [{reader.batch}, {reader.keys}] keys; "
            "give the tokens that were recorded"
        )
    labels = ids.to(reader.A.device).expand(reader.batch, -1)
    made = torch.Generator().manual_seed(seed)
    order = torch.randperm(reader.keys, generator=made).to(labels.device)
    if reader.rule.keys is not None:  # padding stays where it is, or it would be read as tokens
        real = reader.rule.keys.expand(reader.batch, -1)
        shuffled = labels.clone()
        for b in range(reader.batch):
            kept = order[real[b, order]]
            shuffled[b, real[b]] = labels[b, kept]
    else:
        shuffled = labels[:, order]
    return _same(reader, labels, after), _same(reader, shuffled, after)


def _same(reader: Reader, labels: Tensor, after: int) -> Tensor:
    """The mean weight on the keys whose label, or whose left neighbour's, is the row's.

    A seen through a mask of equal labels has the denominator Σ e^s over those keys alone: their weight in A is
    e^(its lse − A's lse), and nothing larger than a row is formed.
    """
    from kizuki import masks

    keys = labels
    if after:  # the first key comes after nothing, and a number that is no token's says so
        none = labels.amax(-1, keepdim=True) + 1
        keys = torch.cat([none, labels[:, :-1]], -1)
    own = labels[:, reader.own]
    also = masks.documents(ids=own, key_ids=keys) & masks.causal("lower_right")
    seen = reader.with_scores(also=also).lse
    count = reader.with_scores(flat=True, also=also).lse.to(torch.float64).exp()
    weight = (seen.to(torch.float64) - reader.wide.lse.to(torch.float64)).exp()
    if not after:  # every row's own key is a same token, and not an earlier one
        weight = (weight - reader.on_own).clamp(min=0)
        count = count - reader.pairs(0, flat=True).gt(0).to(torch.float64)
    return reader.mean(weight, reader.live & (count > 0.5).any(1))


@dataclass(frozen=True, eq=False)
class Repeats:
    """What heads read on random tokens that occur twice in the same order.

    Attributes:
        previous: `a_{i,i−1}`; the control is equal weights.
        duplicate: `a_ij` on the same token in the first half; the control is the same places with the second half
            shuffled, so that what a head reads by place alone is in both.
        induction: likewise, on the token behind it.
        ids: the tokens, `[batch, tokens]`.
        shuffled: the tokens of the control.

    Example:
        >>> import kizuki, torch, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> found = kizuki.models.measures.repeats(model, length=4, batch=1)
        >>> found.ids[0, :4].tolist() == found.ids[0, 4:].tolist(), found.previous.value.shape
        (True, torch.Size([1, 3, 2]))
    """

    previous: Measure
    duplicate: Measure
    induction: Measure
    ids: Tensor
    shuffled: Tensor


def repeats(
    model: Source | nn.Module,
    *,
    length: int = 64,
    batch: int = 4,
    seed: int = 0,
    start: int | None = None,
    layers: Any = None,
    heads: Any = None,
) -> Repeats:
    """Previous-token, duplicate and induction scores of every head on random tokens, each sequence repeated twice.

    A sequence is `start`, then `length` tokens drawn without replacement, then the same again. At each place i of the
    second half there is one earlier same token, at i − length, and one token behind it, at i − length + 1; the scores
    are the mean weights on them, for i in the second half. The control runs the model on the same tokens with the
    second half shuffled until no token stands where it stood, and reads the same places.

    Args:
        model: a `Source`, whose special tokens are not drawn, or a loaded Hugging Face model.
        length, batch, seed: of the random sequences.
        start: a token in front; None: the tokenizer's begin of text, where a Source has one, else nothing.
        layers, heads: which to record; None = all.

    Returns `Repeats`.

    Raises OptionError for lengths that the model's positions or vocabulary cannot hold.

    Cost: one forward pass over 2 · batch sequences of 2 · length tokens, and a gather of pairs.

    Source: Olsson et al. 2022 (In-context learning and induction heads), appendix on head activation evaluators.

    Example:
        >>> import kizuki, torch, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> found = kizuki.models.measures.repeats(model, length=6, batch=2)
        >>> found.induction.value.shape, found.ids.shape
        (torch.Size([2, 3, 2]), torch.Size([2, 12]))
    """
    source = model if isinstance(model, Source) else None
    network: Any = source.model if source is not None else model
    if source is not None and start is None:
        start = source.tokenizer.bos_token_id
    ids, shuffled = _sequences(network, source, length, batch, seed, start)
    lead = 0 if start is None else 1
    base = network.base_model if output_head(network) is not None else network
    device = next(network.parameters()).device
    with record(network, layers=layers, heads=heads) as recording, torch.no_grad():
        base(input_ids=torch.cat([ids, shuffled]).to(device))

    rows = torch.arange(lead + length, lead + 2 * length, device=device)

    def places(reader: Reader, shift: int) -> tuple[Tensor, Tensor]:
        found = reader.A[:, :, rows, rows + shift].to(torch.float64).mean(-1)
        return found[:batch], found[batch:]

    def previous(reader: Reader) -> tuple[Tensor, Tensor]:
        share = reader.pairs(-1, flat=True)[..., rows].mean(-1).expand(-1, reader.head_count)
        return places(reader, -1)[0], share[:batch]

    readers = [Reader(recording, layer) for layer in recording]
    unit = "of each row"
    return Repeats(
        measured(recording, previous, "previous", unit=unit, against=UNIFORM, readers=readers),
        measured(
            recording,
            partial(places, shift=-length),
            "duplicate",
            unit=unit,
            against=SHUFFLED,
            readers=readers,
        ),
        measured(
            recording,
            partial(places, shift=1 - length),
            "induction",
            unit=unit,
            against=SHUFFLED,
            readers=readers,
        ),
        ids,
        shuffled,
    )


def _sequences(
    network: Any, source: Source | None, length: int, batch: int, seed: int, start: int | None
) -> tuple[Tensor, Tensor]:
    """The repeated sequences and their controls, each `[batch, (1) + 2 · length]`."""
    from kizuki import OptionError

    from ..sources import max_positions

    for name, number, least in (("length", length, 2), ("batch", batch, 1)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise OptionError(
                f"measures.repeats: {name} is {number!r} but must be a whole number from {least} up"
            )
    config = network.config.get_text_config()
    special = set() if source is None else set(source.tokenizer.all_special_ids)
    drawn_from = torch.tensor([token for token in range(config.vocab_size) if token not in special | {start}])
    if length > len(drawn_from):
        raise OptionError(
            f"measures.repeats: length is {length} but the vocabulary has {len(drawn_from):,} tokens to draw from, "
            "each once; give a smaller length"
        )
    limit, total = max_positions(network), 2 * length + (start is not None)
    if limit is not None and total > limit:
        raise OptionError(
            f"measures.repeats: length is {length}, which makes {total:,} tokens, but the model reads at most "
            f"{limit:,}; give a smaller length"
        )
    made = torch.Generator().manual_seed(seed)
    lines, others = [], []
    for _ in range(batch):
        half = drawn_from[torch.randperm(len(drawn_from), generator=made)[:length]]
        order = torch.randperm(length, generator=made)
        while bool((order == torch.arange(length)).any()):
            order = torch.randperm(length, generator=made)
        lead = half.new_tensor([] if start is None else [start])
        lines.append(torch.cat([lead, half, half]))
        others.append(torch.cat([lead, half, half[order]]))
    return torch.stack(lines), torch.stack(others)
