"""`MultiheadAttention`: torch.nn's layer, its weights and its arguments, on kizuki's kernels."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from .. import masks
from ..errors import KizukiTypeError, OptionError, ShapeError, show
from ..functional import attention
from ..mask import Mask
from ..operator import AttentionMatrix, attend

CALLER = "kizuki.nn.MultiheadAttention"


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`: the same constructor, parameters, `state_dict` and `forward`, the same numbers.

    It is one, too: `isinstance(layer, torch.nn.MultiheadAttention)`. What differs:

    - `need_weights` never changes the output. The weights are the probabilities before dropout (torch gives those
      after it, which do not sum to 1), and carry a gradient where one is asked for.
    - A query that no key is visible to gives 0 before the output projection, and weights of 0, with and without
      `need_weights`; torch gives NaN with them. A NaN behind a mask stays there.
    - `need_weights=True`, torch's default, builds the weights, heads × queries × keys numbers: say
      `need_weights=False`, and read what you want to know of `layer.matrix(query, key, ...)`, which is not stored.
    - `is_causal=True` without `attn_mask` is the causal rule itself (torch raises). With one, the mask must be
      causal, or it raises; torch drops it.
    - `key_padding_mask` as booleans is a rule and costs nothing; masks may differ in type.

    `forward(query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, average_attn_weights=True,
    is_causal=False)`, shapes and polarity as torch documents them: True in a boolean mask hides, a float mask is
    added, `[queries, keys]` or `[batch · heads, queries, keys]`. Returns `(output, weights or None)`.

    Raises ShapeError, OptionError or KizukiTypeError in one line; a nested tensor among them.

    Cost: four matrix products and `kizuki.attention`.

        >>> import torch, kizuki
        >>> theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
        >>> ours = kizuki.nn.MultiheadAttention(16, 4, batch_first=True).eval()
        >>> ours.load_state_dict(theirs.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 5, 16)
        >>> (output, weights), (same, again) = ours(x, x, x), theirs(x, x, x)
        >>> torch.allclose(output, same, atol=1e-6), torch.allclose(weights, again, atol=1e-6)
        (True, True)
    """

    def __init__(self, embed_dim: int, num_heads: int, *args: Any, **kwargs: Any) -> None:
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise OptionError(
                f"kizuki.nn.MultiheadAttention: embed_dim is {embed_dim} but must be a positive multiple of "
                f"num_heads, {num_heads}"
            )
        super().__init__(embed_dim, num_heads, *args, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """`(output, weights or None)`; see the class and `torch.nn.MultiheadAttention`."""
        batched = self._check(query, key, value)
        q, k, v = self._project(*self._batch_first(query, key, value))
        options = self._options(q, k, key_padding_mask, attn_mask, is_causal)
        dropout = self.dropout if self.training else 0.0
        mixed = attention(q, k, v, dropout=dropout, **options)  # [batch, heads, queries, head_dim]
        output: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        weights = None
        if need_weights:
            weights = _weights(q, k, options)
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def matrix(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> AttentionMatrix:
        """A for an input, `[batch, heads, queries, keys]` (1 for a batch that was not given), itself not stored."""
        self._check(query, key, None)
        q, k, _ = self._project(*self._batch_first(query, key, None))
        return attend(q, k, **self._options(q, k, key_padding_mask, attn_mask, is_causal))

    def _batch_first(self, *given: Tensor | None) -> list[Tensor | None]:
        """`[batch, length, width]`, whatever axis the batch came on; what was one tensor stays one."""

        def turned(t: Tensor) -> Tensor:
            return t[None] if t.dim() == 2 else t if self.batch_first else t.transpose(0, 1)

        known = {id(t): turned(t) for t in given if t is not None}
        return [None if t is None else known[id(t)] for t in given]

    def _project(self, query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, `[batch, heads, length, head_dim]`, with the keys the layer adds; v is None without a value."""
        width, heads = self.embed_dim, self.num_heads
        packed = cast("Tensor | None", self.in_proj_weight)
        if packed is None:
            many = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        else:
            many = list(packed.split(width))
        biases = [None] * 3 if self.in_proj_bias is None else list(self.in_proj_bias.split(width))
        if packed is not None and query is key is value:  # one product instead of three
            made: list[Any] = list(linear(query, packed, self.in_proj_bias).split(width, -1))
        else:
            made = [
                None if t is None else linear(t, weight, bias)
                for t, weight, bias in zip((query, key, value), many, biases, strict=True)
            ]
        batch = query.shape[0]
        for place, more in ((1, self.bias_k), (2, self.bias_v)):
            if more is not None and made[place] is not None:
                made[place] = torch.cat([made[place], more.expand(batch, 1, width)], 1)
            if self.add_zero_attn and made[place] is not None:
                made[place] = pad(made[place], (0, 0, 0, 1))
        q, k, v = (None if t is None else t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in made)
        return cast(Tensor, q), cast(Tensor, k), cast(Tensor, v)

    def _options(
        self, q: Tensor, k: Tensor, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool
    ) -> dict[str, Any]:
        """mask and bias of `kizuki.attention`: what torch hides is not visible, what it adds is added."""
        batch, heads, queries, keys = *q.shape[:3], k.shape[2]
        added = (self.bias_k is not None) + self.add_zero_attn  # keys that every query sees
        given = keys - added
        rules: list[Mask] = []
        bias: Tensor | None = None
        if attn_mask is not None:
            _check_kind("attn_mask", attn_mask)
            shapes = ((queries, given), (batch * heads, queries, given))
            if tuple(attn_mask.shape) not in shapes:
                raise ShapeError(
                    f"{CALLER}: attn_mask has shape {show(attn_mask)} but must be [{queries}, {given}] or "
                    f"[batch · heads, queries, keys], [{batch * heads}, {queries}, {given}]"
                )
            if is_causal:
                _check_causal(attn_mask)
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (batch, heads))
            attn_mask = pad(attn_mask, (0, added))
            if attn_mask.dtype is torch.bool:
                rules.append(masks.dense(~attn_mask))
            else:
                bias = attn_mask
        if is_causal:
            causal = masks.causal("upper_left" if attn_mask is not None else None)
            extra = torch.arange(keys, device=k.device) >= given
            rules.append(masks.causal("upper_left") | masks.keys(extra) if added else causal)
        if padding is not None:
            _check_kind("key_padding_mask", padding)
            if tuple(padding.shape) not in ((batch, given), *(((given,),) if batch == 1 else ())):
                raise ShapeError(
                    f"{CALLER}: key_padding_mask has shape {show(padding)} but must be [{batch}, {given}], one for "
                    "each key"
                )
            padding = pad(padding.reshape(batch, given), (0, added))
            if padding.dtype is torch.bool:
                rules.append(masks.keys(~padding))
            else:
                more = padding[:, None, None]
                bias = more if bias is None else bias + more
        mask: Mask | None = None
        for rule in rules:
            mask = rule if mask is None else mask & rule
        return {"mask": mask, "bias": bias}

    def _check(self, query: Tensor, key: Tensor, value: Tensor | None) -> bool:
        """Raise for what cannot be attended to; whether there is a batch axis."""
        sizes = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for name, t in (("query", query), ("key", key), ("value", value)):
            if t is None and name == "value":
                continue
            if not isinstance(t, Tensor) or t.is_nested:
                kind = "a nested tensor" if isinstance(t, Tensor) else f"a {type(t).__name__}"
                raise KizukiTypeError(
                    f"{CALLER}: {name} is {kind} but must be a tensor; pad it and say so in key_padding_mask"
                )
            if t.dim() not in (2, 3) or t.dim() != query.dim() or t.shape[-1] != sizes[name]:
                axes = "[batch, length, width]" if self.batch_first else "[length, batch, width]"
                raise ShapeError(
                    f"{CALLER}: {name} has shape {show(t)} but must be {axes}, width {sizes[name]}, or "
                    "[length, width] where all three are"
                )
        if value is not None and value.shape[:-1] != key.shape[:-1]:
            raise ShapeError(
                f"{CALLER}: value has shape {show(value)} but key {show(key)}; give both the same length and batch"
            )
        if query.dim() == 3 and query.shape[not self.batch_first] != key.shape[not self.batch_first]:
            raise ShapeError(
                f"{CALLER}: key has shape {show(key)} but query {show(query)}; give both the same batch"
            )
        return query.dim() == 3


def _weights(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """A as numbers, `[batch, heads, queries, keys]`, in the dtype of q."""
    matrix = attend(q, k, **options)
    bias = options["bias"]
    learns = any(t is not None and t.requires_grad for t in (q, k, bias))
    if not (torch.is_grad_enabled() and learns):
        return matrix.dense(limit=math.prod(matrix.shape)).to(q.dtype)
    # Readings carry no gradient; these are the weights as torch computes them.
    scores = q @ k.transpose(-1, -2) * matrix.scale
    scores = scores if bias is None else scores + bias
    seen = torch.ones(scores.shape, dtype=torch.bool, device=q.device)
    if options["mask"] is not None:
        zeros = torch.zeros_like(q[..., :1]), torch.zeros_like(k[..., :1])
        seen = attend(*zeros, mask=options["mask"]).dense(limit=scores.numel()) > 0
    seen = seen & (scores != -math.inf)
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
    return weights.masked_fill(~seen, 0.0)


def _check_kind(name: str, mask: Any) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype is torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise KizukiTypeError(
            f"{CALLER}: {name} is {kind} but must be boolean, True = hidden, or floating, which is added; call .bool()"
        )


def _check_causal(mask: Tensor) -> None:
    """Raise where `is_causal` and the mask it is a hint about contradict each other."""
    hides = mask if mask.dtype is torch.bool else mask == -math.inf
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    if not bool((hides | ~later).all()):
        raise OptionError(
            f"{CALLER}: is_causal is True but attn_mask shows a query a later key; leave is_causal out, or give the "
            "causal mask, or none"
        )
