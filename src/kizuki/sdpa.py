"""`scaled_dot_product_attention`: PyTorch's signature and semantics on kizuki's kernels, for a one-line swap."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import KizukiTypeError, OptionError, ShapeError, show
from .functional import attention, autocast
from .mask import Mask
from .masks import causal as causal_mask

CALLER = "kizuki.scaled_dot_product_attention"


# PyTorch raises RuntimeError for what kizuki calls a wrong shape, option or dtype: after the swap a handler
# written for either still catches it.
class SdpaShapeError(ShapeError, RuntimeError):
    """A ShapeError where PyTorch raises RuntimeError."""


class SdpaOptionError(OptionError, RuntimeError):
    """An OptionError where PyTorch raises RuntimeError."""


class SdpaTypeError(KizukiTypeError, RuntimeError):
    """A KizukiTypeError where PyTorch raises RuntimeError, or TypeError for what is no tensor at all."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale · Q Kᵀ + mask) V with the arguments and the meaning of `torch.nn.functional`'s function.

    Arguments:
        query: `[..., heads, queries, head_dim]`, rank 2 or more; key `[..., heads, keys, head_dim]`; value
            `[..., heads, keys, value_dim]`, one dtype and device. All axes before the last two broadcast.
        attn_mask: broadcasts to `[..., heads, queries, keys]`. Boolean: True takes part. Floating (float32 or the
            dtype of the query): added to the scores, −inf takes no part.
        dropout_p: the probability with which a weight is dropped. It is applied whenever it is above 0.
        is_causal: query i sees keys 0 … i, also where there are more or fewer keys than queries (upper left).
            Together with attn_mask it is an error, as PyTorch documents.
        scale: multiplies the scores; None means 1/√head_dim.
        enable_gqa: key and value may have fewer heads than the query, each shared by heads/kv_heads of them in a
            row. Without it different numbers of heads are an error, unless one is 1.

    Returns `[..., heads, queries, value_dim]` in the dtype of the query, contiguous. A query that no key takes
    part for gives 0, for both kinds of mask, as PyTorch 2.5 and later do.

    Raises ShapeError, OptionError or KizukiTypeError, each of which is here a RuntimeError as well. Stricter than
    PyTorch's CPU kernels where those read past an operand or drop an argument: key and value of different length,
    is_causal with attn_mask, a scale that is not finite, a head_dim of 0.

    Under autocast query, key and value are cast as PyTorch casts them; a float mask keeps its precision.

    Cost: as `kizuki.attention`; no mask is expanded and no head repeated.

        >>> import torch, kizuki
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
        >>> mine = kizuki.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(mine, theirs, atol=1e-6)
        True
    """
    if torch.compiler.is_compiling():
        return _call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    try:
        return _call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except (ShapeError, OptionError, KizukiTypeError) as error:
        kinds = ((ShapeError, SdpaShapeError), (OptionError, SdpaOptionError), (TypeError, SdpaTypeError))
        made = next(theirs for ours, theirs in kinds if isinstance(error, ours))
        text = str(error).replace("kizuki.attention: ", f"{CALLER}: ", 1)
        for own, ours in (("attn_mask", "mask"), ("attn_mask", "bias"), ("dropout_p", "dropout")):
            text = text.replace(f"{CALLER}: {ours} ", f"{CALLER}: {own} ", 1)
        raise made(text) from None


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise KizukiTypeError(f"{CALLER}: {name} is a {type(tensor).__name__} but must be a torch.Tensor")
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise KizukiTypeError(f"{CALLER}: {name} is a {type(flag).__name__} but must be True or False")
    _check_heads(query, key, value, enable_gqa)
    mask: Mask | Tensor | None = None
    bias: Tensor | None = None
    if is_causal:
        if attn_mask is not None:
            raise OptionError(
                f"{CALLER}: attn_mask is given and is_causal is True; give one of them, or kizuki.attention both "
                "(mask=, causal=)"
            )
        mask = causal_mask("upper_left")
    elif attn_mask is not None:
        _check_mask(attn_mask, query)
        mask, bias = (attn_mask, None) if attn_mask.dtype is torch.bool else (None, attn_mask)
    return attention(query, key, value, mask=mask, bias=bias, scale=scale, dropout=dropout_p)


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Heads are an axis that broadcasts, or with `enable_gqa` one that key and value divide."""

    def shapes() -> str:  # only for an error: a tracer cannot print a length it leaves open
        return f"(query {show(query)}, key {show(key)}, value {show(value)})"

    if enable_gqa and min(query.dim(), key.dim(), value.dim()) < 3:
        raise ShapeError(
            f"{CALLER}: enable_gqa needs a heads axis in query, key and value; add it {shapes()}"
        )
    heads = [t.shape[-3] if t.dim() > 2 else 1 for t in (query, key, value)]
    for name, count in (("key", heads[1]), ("value", heads[2])):
        if enable_gqa:
            if count == 0 or heads[0] % count:
                raise ShapeError(
                    f"{CALLER}: {name} has {count} heads but query has {heads[0]}; the heads of {name} must divide "
                    f"those of query {shapes()}"
                )
        elif 1 not in (count, heads[0]) and count != heads[0]:
            raise ShapeError(
                f"{CALLER}: {name} has {count} heads but query has {heads[0]}; give both the same, or "
                f"enable_gqa=True {shapes()}"
            )
    if not enable_gqa and 1 not in heads[1:] and heads[1] != heads[2]:
        raise ShapeError(
            f"{CALLER}: value has {heads[2]} heads but key has {heads[1]}; give both the same {shapes()}"
        )


def _check_mask(attn_mask: Tensor, query: Tensor) -> None:
    if not isinstance(attn_mask, Tensor):
        raise KizukiTypeError(
            f"{CALLER}: attn_mask is a {type(attn_mask).__name__} but must be a torch.Tensor or None; rules of "
            "kizuki.masks go into kizuki.attention(mask=...)"
        )
    known = {torch.bool, torch.float32, query.dtype}
    if autocast(query.device.type):  # where PyTorch casts the mask too
        known |= {torch.float16, torch.bfloat16}
    if attn_mask.dtype not in known:
        raise KizukiTypeError(
            f"{CALLER}: attn_mask has dtype {attn_mask.dtype} but must be bool (True takes part), float32 or the "
            f"query's {query.dtype}; convert it"
        )


__all__ = ["scaled_dot_product_attention"]
