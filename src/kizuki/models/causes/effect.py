"""`cause`: what an intervention does to the next token at one position, beside the same done elsewhere at random."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import find
from ..onepass import check_length
from ..predict import output_head
from ..sources import Progress, Source
from ..tokens import Tokens, token_label
from .edits import AblateHead, CauseError, Edit, Editor, MaskKeys, SetRow, around, check, on_head

TOP = 5

Top = list[tuple[int, str, float]]  # (id, label, probability), most probable first


@dataclass(frozen=True)
class Control:
    """The same intervention on other heads of the layer (or other keys), drawn at random.

    Attributes:
        kind: what was drawn, in words.
        drawn: the heads, or the keys, of each.
        kl: KL(before ‖ after) of each, in nats; of a model that predicts no tokens, its `moved`.
        mean, sd: of these (sample standard deviation; nan for fewer than two).
        logit_difference: how far each changed the difference of the chosen tokens' logits; () where none were chosen.
        seed: of the draw.

    Example:
        >>> import torch, transformers
        >>> from kizuki.models.causes import AblateHead, cause
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=4)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
        >>> control = cause(model, ids, AblateHead(2, 1), controls=2).control
        >>> control.kind, len(control.drawn), len(control.kl)
        ('other heads of layer 2', 2, 2)
    """

    kind: str
    drawn: tuple[int | tuple[int, ...], ...]
    kl: tuple[float, ...]
    mean: float
    sd: float
    logit_difference: tuple[float, ...]
    seed: int


@dataclass(frozen=True)
class Effect:
    """What an intervention changed at one position.

    Attributes:
        edit: the intervention.
        position: the token whose next token is predicted (of a masked language model: the token itself).
        kl: KL(before ‖ after) = Σ p ln(p / q) of the distributions over the vocabulary, in nats; None for a model that
            predicts no tokens.
        before, after: the five most probable tokens, `(id, label, probability)`; () likewise.
        tokens: the two chosen tokens, `(id, label)` each, or None.
        logit_difference: logit of the first less that of the second, before and after; None where none were chosen.
        moved: ‖h′ − h‖ / ‖h‖ of the last hidden state at the position.
        control: the same intervention elsewhere; None where `controls=0`.

    Example:
        >>> import torch, transformers
        >>> from kizuki.models.causes import AblateHead, cause
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=4)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
        >>> found = cause(model, ids, AblateHead(2, 1), tokens=(3, 4))
        >>> found.size == found.kl, [len(found.before), len(found.after)], len(found.logit_difference)
        (True, [5, 5], 2)
    """

    edit: Edit
    position: int
    kl: float | None
    before: Top
    after: Top
    tokens: tuple[tuple[int, str], tuple[int, str]] | None
    logit_difference: tuple[float, float] | None
    moved: float
    control: Control | None

    @property
    def size(self) -> float:
        """What is compared with the control: `kl`, or `moved` of a model that predicts no tokens."""
        return self.moved if self.kl is None else self.kl

    @property
    def above(self) -> int:
        """How many of the controls do as much or more."""
        return 0 if self.control is None else sum(each >= self.size for each in self.control.kl)


def cause(
    model: Source | nn.Module,
    text: str | Tokens | Tensor,
    edit: Edit,
    *,
    position: int = -1,
    tokens: tuple[int | str, int | str] | None = None,
    controls: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
) -> Effect:
    """Run a model plain and changed, and say how its next token changed; then the same with random other changes.

    Args:
        model: what `kizuki.models.load` gave, or a transformers model.
        text: the text or its tokens; for a bare model its ids, int64 `[1, tokens]`.
        edit: `AblateHead`, `MaskKeys` or `SetRow`.
        position: the token whose next token is looked at; negative from the end.
        tokens: two tokens, by id or by text of one token (" Tomas"), whose logits' difference is followed.
        controls: how many random others at most: other heads of the layer; for masked keys as many other keys that the
            position may see. Each is drawn once. 0 = none.
        seed: of that draw.
        progress: called as `progress("interventions", passes done, passes)`.

    Returns:
        An `Effect`. One text and one position are an example, not a finding; look at many.

    Raises:
        CauseError: no such position, layer, head, key, token; an encoder-decoder; a model that `intervene` refuses.
        TextError: a text without tokens, or longer than the model's positions.

    Time and memory: 2 + controls forward passes; logits of one position.

    Source: Vig et al. 2020 (Causal mediation analysis), Wang et al. 2023 (Interpretability in the wild), section 3.

    Example:
        >>> import torch, transformers
        >>> from kizuki.models.causes import AblateHead, cause
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=4)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> found = cause(model, torch.tensor([[3, 1, 4, 1, 5]]), AblateHead(2, 1))
        >>> found.kl > 0, len(found.before), found.control.drawn
        (True, 5, (0, 2, 3))
    """
    check(edit)
    network, tokenizer, ids = _given(model, text)
    count = ids.shape[1]
    if isinstance(position, bool) or not isinstance(position, int) or not -count <= position < count:
        raise CauseError(f"cause: position is {position!r} but the text has {count} tokens, 0 … {count - 1}")
    position %= count
    if isinstance(controls, bool) or not isinstance(controls, int) or controls < 0:
        raise CauseError(f"cause: controls is {controls!r} but must be a whole number from 0 up")
    chosen = None if tokens is None else _chosen(tokens, tokenizer, network)
    report = progress or (lambda stage, done, total: None)

    total = 2 + controls
    report("interventions", 0, total)
    plain, heard = _run(network, ids, position, None)
    report("interventions", 1, total)
    if heard.causal:
        _reaches(edit, position, count)
    changed, edited = _run(network, ids, position, edit)
    seen = _seen(edit, edited, heard.causal, position, count)
    others = _others(edit, heard, seen, controls, seed)
    total = 2 + len(others)
    report("interventions", 2, total)
    found = _compared(edit, position, plain, changed, chosen, tokenizer)
    if not controls:
        return found
    sizes, shifts = [], []
    for done, (_, other) in enumerate(others):
        one = _compared(other, position, plain, _run(network, ids, position, other)[0], chosen, tokenizer)
        sizes.append(one.size)
        shifts.append(_shift(one))
        report("interventions", 3 + done, total)
    kind = "other keys" if isinstance(edit, MaskKeys) else f"other heads of layer {edit.layer}"
    control = Control(
        kind,
        tuple(drawn for drawn, _ in others),
        tuple(sizes),
        statistics.fmean(sizes) if sizes else math.nan,
        statistics.stdev(sizes) if len(sizes) > 1 else math.nan,
        tuple(shift for shift in shifts if shift is not None),
        seed,
    )
    return replace(found, control=control)


@dataclass(frozen=True, eq=False)
class _Answer:
    """What one pass says at the position, in float64."""

    logits: Tensor | None  # [vocabulary]
    state: Tensor  # [width]


def _run(network: Any, ids: Tensor, position: int, edit: Edit | None) -> tuple[_Answer, Editor]:
    """One pass; its answer, and what was heard of its layers."""
    head = network.get_output_embeddings()
    held: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        held["state"] = output[0][0, position]

    def narrow(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0][:, position : position + 1], *args[1:]  # so that no [tokens, vocabulary] array is made

    editor = Editor(find(network), () if edit is None else (edit,))
    with ExitStack() as undo, torch.no_grad():
        undo.callback(network.base_model.register_forward_hook(keep).remove)
        if head is not None:
            undo.callback(head.register_forward_pre_hook(narrow).remove)
        undo.enter_context(around(network, editor))
        options = {} if output_head(network) is None else {"use_cache": False}
        output = network(input_ids=ids, **options)
    logits = None if head is None else output.logits[0, 0].to(torch.float64)
    return _Answer(logits, held["state"].to(torch.float64)), editor


def _compared(
    edit: Edit,
    position: int,
    plain: _Answer,
    changed: _Answer,
    chosen: tuple[int, int] | None,
    tokenizer: Any,
) -> Effect:
    for answer, which in ((plain, "as it is"), (changed, "with the intervention")):
        numbers = answer.state if answer.logits is None else answer.logits
        if not bool(torch.isfinite(numbers).all()):
            raise CauseError(
                f"kizuki.models.causes.cause: the model {which} gives NaN or Inf at position {position}; its next "
                "token means nothing there"
            )
    moved = float((changed.state - plain.state).norm() / plain.state.norm())
    if plain.logits is None or changed.logits is None:
        return Effect(edit, position, None, [], [], None, None, moved, None)
    before, after = plain.logits.log_softmax(-1), changed.logits.log_softmax(-1)
    kl = max(0.0, float((before.exp() * (before - after)).sum()))  # rounding may leave less than 0
    names, difference = None, None
    if chosen is not None:
        names = (chosen[0], _label(tokenizer, chosen[0])), (chosen[1], _label(tokenizer, chosen[1]))
        difference = tuple(float(x[chosen[0]] - x[chosen[1]]) for x in (plain.logits, changed.logits))
    return Effect(
        edit,
        position,
        kl,
        _top(before, tokenizer),
        _top(after, tokenizer),
        names,
        None if difference is None else (difference[0], difference[1]),
        moved,
        None,
    )


def _shift(effect: Effect) -> float | None:
    if effect.logit_difference is None:
        return None
    return effect.logit_difference[1] - effect.logit_difference[0]


def _top(log: Tensor, tokenizer: Any) -> Top:
    values, ids = log.topk(min(TOP, len(log)))
    return [
        (token, _label(tokenizer, token), math.exp(value))
        for token, value in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def _label(tokenizer: Any, token: int) -> str:
    return str(token) if tokenizer is None else token_label(tokenizer, token)


def _seen(edit: Edit, edited: Editor, causal: bool, position: int, count: int) -> list[int]:
    """The keys that can matter at the position: those up to it, and of an edit of the last layer those that it sees."""
    up_to = range(position + 1 if causal else count)
    visible = edited.visible_last(edit, position)
    if visible is None:
        return list(up_to)
    seen = [key for key in up_to if key < len(visible) and bool(visible[key])]
    if isinstance(edit, MaskKeys) and not set(_keys_of(edit)) & set(seen):
        raise CauseError(
            f"cause: position {position} never sees key {min(_keys_of(edit))} in layer {edit.layers}, behind which no "
            "layer comes, so hiding that changes nothing there; choose a key that it sees"
        )
    return seen


def _keys_of(edit: MaskKeys) -> list[int]:
    return [edit.keys] if isinstance(edit.keys, int) else sorted(set(edit.keys))


def _others(
    edit: Edit, heard: Editor, seen: list[int], controls: int, seed: int
) -> list[tuple[int | tuple[int, ...], Edit]]:
    """The random others: what was drawn, and the edit with it in place."""
    draw = random.Random(seed)
    if isinstance(edit, AblateHead | SetRow):
        there = [head for head in range(heard.heads.get(edit.layer, 0)) if head != edit.head]
        drawn = sorted(draw.sample(there, min(controls, len(there))))
        return [(head, on_head(edit, head)) for head in drawn]
    own = set(_keys_of(edit))
    there = [key for key in seen if key not in own]
    many = len(own & set(seen))  # what is hidden from nobody there needs no control
    if many == 1:
        picked = sorted(draw.sample(there, min(controls, len(there))))
        return [(key, replace(edit, keys=key)) for key in picked]
    if len(there) < many:
        return []
    sets = {tuple(sorted(draw.sample(there, many))) for _ in range(controls)}
    return [(keys, replace(edit, keys=keys)) for keys in sorted(sets)]


def _reaches(edit: Edit, position: int, count: int) -> None:
    """CauseError for an edit behind a position that sees nothing behind itself: rounding would be its whole effect."""
    if isinstance(edit, MaskKeys):
        first = min(_keys_of(edit))
        if position < first < count:
            raise CauseError(
                f"cause: position {position} sees the keys 0 … {position} and never key {first}, so hiding that "
                "changes nothing there; choose an earlier key or a later position"
            )
    elif isinstance(edit, SetRow) and position < edit.query < count:
        raise CauseError(
            f"cause: row {edit.query} is of a token behind position {position}, which never sees it; choose an earlier "
            "row or a later position"
        )


def _given(model: Source | nn.Module, text: str | Tokens | Tensor) -> tuple[Any, Any, Tensor]:
    """The network, its tokenizer where there is one, and ids `[1, tokens]` on its device."""
    if isinstance(model, Source):
        if not isinstance(text, str | Tokens):
            raise CauseError(
                f"cause: text is a {type(text).__name__} but must be a str or Tokens for a loaded model"
            )
        read = model.tokenize(text) if isinstance(text, str) else text
        check_length(model, read)
        network, tokenizer, ids = model.model, model.tokenizer, torch.tensor([read.ids])
    elif isinstance(model, nn.Module) and hasattr(model, "get_output_embeddings"):
        if not isinstance(text, Tensor) or text.dim() != 2 or text.shape[0] != 1 or not text.shape[1]:
            raise CauseError(
                "cause: text must be ids, int64 [1, tokens], for a bare model; load() gives one with words"
            )
        network, tokenizer, ids = model, None, text
    else:
        raise CauseError(
            f"cause: model is a {type(model).__name__} but must be what kizuki.models.load gave, or a model of "
            "transformers"
        )
    if network.config.is_encoder_decoder:
        raise CauseError(
            f"cause: {type(network).__name__} is an encoder-decoder; use intervene around passes of your own"
        )
    if network.training:
        raise CauseError(
            f"cause: {type(network).__name__} is in training mode, whose dropout is random; call model.eval()"
        )
    return network, tokenizer, ids.to(next(network.parameters()).device)


def _chosen(tokens: Sequence[int | str], tokenizer: Any, network: Any) -> tuple[int, int]:
    """The two tokens by id."""
    if len(tokens) != 2:
        raise CauseError(f"cause: tokens holds {len(tokens)} but must be two, whose logits are compared")
    if network.get_output_embeddings() is None:
        raise CauseError(f"cause: {type(network).__name__} predicts no tokens; leave tokens out")
    size, found = network.get_output_embeddings().weight.shape[0], []
    for token in tokens:
        if isinstance(token, str):
            if tokenizer is None:
                raise CauseError("cause: tokens are words, which a bare model has none of; give ids")
            ids = tokenizer(token, add_special_tokens=False)["input_ids"]
            if len(ids) != 1:
                pieces = ", ".join(repr(token_label(tokenizer, one)) for one in ids)
                raise CauseError(
                    f"cause: {token!r} is {len(ids)} tokens ({pieces}); name one token, or give an id"
                )
            token = ids[0]
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise CauseError(f"cause: token {token!r} is not in the vocabulary of {size}")
        found.append(token)
    return found[0], found[1]
