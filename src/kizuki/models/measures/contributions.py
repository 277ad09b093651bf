"""Weights times the size of what they carry: the norms of the value vectors behind the model's own W_O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..record import record
from ..recording import Recording
from ..rule import RecordError
from .heads import UNIFORM
from .reader import Measure, Reader, check, measured

if TYPE_CHECKING:
    from kizuki import AttentionMatrix

NAMES = ("o_proj", "out_proj", "c_proj", "Wo", "out_lin", "dense", "proj")  # what models call W_O
WITHIN = 4  # times √ε · max |v| by which W_O's input may differ from A v


@dataclass(frozen=True, eq=False)
class Contributions:
    """What each key sends into the residual stream, `a_ij · ‖v_j W_O‖`, of one layer.

    Attributes:
        norms: `‖v_j W_O‖`, float64 `[batch, heads, keys]`, in units of the stream; W_O the head's own rows of it, no
            bias.
        A: the layer's attention matrix, the control: bare weights.
        shares: each row of contributions divided by its sum, as an attention matrix: `shares[0, h, i]`,
            `shares.topk(8)`, `shares.received()` read as those of A do. It is A with `ln ‖v_j W_O‖` added to the
            scores, and without sinks.

    Example:
        >>> import kizuki, torch, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with kizuki.record(model) as recording:
        ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
        >>> found = kizuki.models.measures.contributions(recording, 0, model)
        >>> torch.allclose(found.row(0, 4).sum(-1), found.total()[0, :, 4])
        True
    """

    norms: Tensor
    A: AttentionMatrix
    shares: AttentionMatrix

    def total(self) -> Tensor:
        """Σ_j a_ij · ‖v_j W_O‖ of each row, float64 `[batch, heads, queries]`: a bound of ‖Σ_j a_ij v_j W_O‖."""
        # What the norms put on top of the scores is what the denominator has more.
        return (self.shares.lse.to(torch.float64) - self.A.lse.to(torch.float64)).exp()

    def row(self, batch: int, query: int) -> Tensor:
        """`a_ij · ‖v_j W_O‖` of one query, float64 `[heads, keys]`."""
        return self.A[batch, :, query].to(torch.float64) * self.norms[batch]

    def received(self) -> Tensor:
        """`Σ_i a_ij · ‖v_j W_O‖` of each key, float64 `[batch, heads, keys]`."""
        return self.A.received().to(torch.float64) * self.norms


def contributions(recording: Recording, layer: Any, weight: Tensor | nn.Module) -> Contributions:
    """Norm-weighted attention of one layer: `a_ij · ‖v_j W_O‖` instead of the bare `a_ij`.

    A large weight on a key whose value is small moves nothing, which is what sinks are made of.

    Args:
        recording: what `kizuki.record` or `kizuki.open` gave.
        layer: one of its layers.
        weight: the layer's W_O, `[width, heads · value_dim]` as `nn.Linear` holds it, all of the model's heads; or the
            recorded model, whose own is found and checked on two tokens (`output_weights`).

    Returns `Contributions`.

    Raises ShapeError for a weight of another size, RecordError where the model's W_O cannot be found.

    Cost: keys · value_dim² a head for the norms; their readings cost what those of A do.

    Source: Kobayashi et al. 2020 (Attention is not only a weight), section 2.

    Example:
        >>> import kizuki, torch, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with kizuki.record(model) as recording:
        ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
        >>> found = kizuki.models.measures.contributions(recording, 2, model)
        >>> found.total().shape, found.shares[0, 1, 4].sum().round(decimals=4)
        (torch.Size([1, 2, 5]), tensor(1.))
    """
    check(recording, "measures.contributions")
    reader = Reader(recording, layer)
    if isinstance(weight, nn.Module):
        weight = output_weights(weight, [layer])[layer]
    norms = read_norms(reader, weight)
    return Contributions(norms, reader.A, _shares(reader, norms))


def _shares(reader: Reader, norms: Tensor) -> AttentionMatrix:
    return reader.with_scores(bias=norms.log().to(reader.wide.dtype).unsqueeze(-2))


def read_norms(reader: Reader, weight: Tensor) -> Tensor:
    """`‖v_j W_O‖` of the recorded heads, float64 `[batch, heads, keys]`."""
    from kizuki import KizukiTypeError, ShapeError
    from kizuki.errors import show

    if not isinstance(weight, Tensor) or not weight.dtype.is_floating_point:
        kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise KizukiTypeError(
            f"measures.contributions: weight is {kind} but must be a floating tensor [width, heads · value_dim], "
            "or the model"
        )
    dim, last = reader.value.shape[-1], max(reader.heads) + 1
    if weight.dim() != 2 or weight.shape[1] % dim or weight.shape[1] < last * dim:
        raise ShapeError(
            f"measures.contributions: weight is {show(weight)} but must be [width, heads · {dim}] for at least {last} "
            "heads; give it as nn.Linear holds it"
        )
    heads = weight.detach().to(reader.value.device, torch.float64).unflatten(1, (-1, dim)).movedim(1, 0)
    heads = heads[list(reader.heads)]  # [heads, width, value_dim]
    gram = heads.mT @ heads  # ‖v W‖² = v (W Wᵀ) vᵀ, without keys × width numbers
    value = reader.value.detach().to(torch.float64)
    value = value.repeat_interleave(reader.head_count // value.shape[1], 1)
    return ((value @ gram) * value).sum(-1).clamp(min=0).sqrt()


def read_norm(reader: Reader, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of Σ_j a_ij ‖v_j W_O‖, and the same for equal weights."""
    norms = read_norms(reader, weight)
    bias = norms.log().to(reader.wide.dtype).unsqueeze(-2)
    total = (reader.with_scores(bias=bias).lse.to(torch.float64) - reader.A.lse.to(torch.float64)).exp()
    plain = reader.uniform @ norms.mT.to(reader.uniform.dtype).unsqueeze(1)  # [batch, 1, queries, heads]
    return reader.mean(total), reader.mean(plain[:, 0].mT)


def contribution(recording: Recording, model: nn.Module | Mapping[Any, Tensor]) -> Measure:
    """How much each head sends into the stream: mean over rows of `Σ_j a_ij · ‖v_j W_O‖`.

    Args:
        recording: what `kizuki.record` or `kizuki.open` gave.
        model: the recorded model, or layer → W_O as `output_weights` gives them.

    Returns:
        A `Measure` in units of the stream; the control is the same for equal weights on the keys each row sees. A head
        below its control reads keys whose values are small.

    Raises and source as for `contributions`.

    Example:
        >>> import kizuki, torch, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with kizuki.record(model) as recording:
        ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
        >>> kizuki.models.measures.contribution(recording, model).value.shape  # [batch, layers, heads]
        torch.Size([1, 3, 2])
    """
    weights = output_weights(model, list(recording)) if isinstance(model, nn.Module) else model
    return measured(
        recording,
        lambda reader: read_norm(reader, weights[reader.layer]),
        "contribution",
        unit="of the stream",
        against=UNIFORM,
    )


def output_weights(model: Any, layers: Any = None) -> dict[Any, Tensor]:
    """W_O of each layer, `[width, heads · value_dim]`, found by name and checked: it is given A v of all heads.

    Args:
        model: a loaded Hugging Face model that takes token ids, in eval mode.
        layers: which; None = all.

    Raises RecordError where no module, or more than one, can be W_O, or where what it is given is not A v (a norm or a
    gate stands between): give the weight by hand then.

    Cost: two forward passes over two tokens.

    Example:
        >>> import kizuki, torch, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> weights = kizuki.models.measures.output_weights(model)
        >>> sorted(weights), torch.equal(weights[1], model.transformer.h[1].attn.c_proj.weight.T)
        ([0, 1, 2], True)
    """
    if model.training:
        raise RecordError("measures.output_weights: the model is in training mode; call model.eval()")
    ids = (
        torch.tensor([[0, 1]], device=next(model.parameters()).device)
        % model.config.get_text_config().vocab_size
    )
    with torch.no_grad():
        with record(model, layers=layers) as recording:
            _pass(model, ids)
        found = {layer: _projection(model, Reader(recording, layer)) for layer in recording}
        given: dict[int, Tensor] = {}
        hooks = [
            module.register_forward_pre_hook(lambda m, args: given.__setitem__(id(m), args[0]))
            for module, _ in found.values()
        ]
        try:
            with record(model, layers=layers) as recording:
                _pass(model, ids)
        finally:
            for hook in hooks:
                hook.remove()
        for layer, (module, _) in found.items():
            _check(Reader(recording, layer), given.get(id(module)))
    return {layer: weight for layer, (_, weight) in found.items()}


def _pass(model: Any, ids: Tensor) -> None:
    try:
        model(input_ids=ids)
    except (TypeError, ValueError) as error:
        raise RecordError(
            f"measures.output_weights: {type(model).__name__} does not run on token ids alone "
            f"({' '.join(str(error).split())[:100]}); give W_O by hand as weight="
        ) from None


def _projection(model: nn.Module, reader: Reader) -> tuple[nn.Module, Tensor]:
    """The module that can be W_O of a layer, and its weight."""
    path = reader.capture.path
    width = reader.head_count * reader.value.shape[-1]
    parent = path.rpartition(".")[0]
    own = model.get_submodule(path)
    candidates = dict(own.named_children())
    beside = getattr(model.get_submodule(parent), "output", None)  # BERT keeps it beside the attention
    if isinstance(beside, nn.Module):
        candidates |= dict(beside.named_children())
    fitting = {}
    for name, module in candidates.items():
        weight = getattr(module, "weight", None)
        if name not in NAMES or not isinstance(weight, Tensor) or weight.dim() != 2:
            continue
        if type(module).__name__ == "Conv1D":  # GPT-2's layers hold the transpose
            weight = weight.mT
        if weight.shape[1] == width and weight.dtype.is_floating_point:
            fitting[name] = (module, weight.detach())
    if len(fitting) != 1:
        raise RecordError(
            f"measures.output_weights: {path} has {len(fitting)} modules that can be its W_O (looked for "
            f"{', '.join(NAMES)} with {width} inputs); give it by hand as weight="
        )
    (result,) = fitting.values()
    return result


def _check(reader: Reader, given: Tensor | None) -> None:
    """Raise unless W_O was given the heads' outputs, one after another."""
    value = reader.value.to(reader.wide.dtype)
    mine = (reader.wide @ value).transpose(1, 2).flatten(2)
    near = WITHIN * torch.finfo(reader.A.dtype).eps ** 0.5 * float(value.abs().max())
    if given is None or given.shape != mine.shape or float((given.to(mine.dtype) - mine).abs().max()) > near:
        raise RecordError(
            f"measures.output_weights: {reader.capture.path} does something between its heads and its W_O (a norm, a "
            "gate), or that is another module; give the effective weight by hand as weight="
        )
