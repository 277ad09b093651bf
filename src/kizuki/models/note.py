"""`note`: one line that names query, key and value where a model writes its attention out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .calls import Call, listening, tell
from .rule import RecordError

if TYPE_CHECKING:
    from ..mask import Mask


def note(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | Mask | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    output: Tensor | None = None,
) -> None:
    """Name q, k and v of attention written out by hand, for a recording of the model; else do nothing.

    To be called in the forward of the module that does `softmax(scale · query keyᵀ + bias + mask) value`. Outside a
    `kizuki.record` block of the model, on another thread, or under torch.compile, it returns at once. Nothing is
    changed or copied but a few rows of `output`.

    Args:
        query: `[batch, heads, queries, head_dim]`, after any rotary embedding.
        key, value: `[batch, kv_heads, keys, head_dim]`, heads not repeated, the cache's keys included.
        mask: bool (True = visible), or floating and added to the scores (0 = visible, −inf or a large negative number
            = absent, any other number a bias); broadcasts to `[batch, heads, queries, keys]`; or a rule of
            `kizuki.masks`, by itself. None: all keys.
        causal: each query sees the keys up to its own, the last query standing at the last key.
        bias: added to the scores in natural units, after scale and softcap (ALiBi, T5's); broadcasts likewise.
        scale: multiplies the scores; None means 1/√head_dim.
        softcap: scores become cap · tanh(score / cap); None is off.
        sinks: `[heads]`, one more logit a head in the denominator only.
        output: what the model made of them, `[batch, heads, queries, value_dim]`, before any output projection. With
            it, the recording compares rows of A v with it before it shows A, and refuses what differs; without it,
            the numbers are taken at their word (`recording.checked(layer)` is then False).

    Raises: nothing here; `recording[layer]` raises RecordError for what does not fit together.

    Cost: a few look-ups outside a recording; in one, that of a layer in `kizuki.record`.

    Example:
        >>> import torch, kizuki
        >>> from kizuki.models import note
        >>> class Plain(torch.nn.Module):
        ...     def forward(self, x):                       # x: [batch, heads, length, dim]
        ...         weights = (x @ x.mT / x.shape[-1] ** 0.5).softmax(-1)
        ...         out = weights @ x
        ...         note(x, x, x, output=out)
        ...         return out
        >>> model = Plain()
        >>> with kizuki.record(model) as recording:
        ...     _ = model(torch.eye(4)[None, None])
        >>> recording[0].shape, recording.checked(0)
        (torch.Size([1, 1, 4, 4]), True)
    """
    if torch.compiler.is_compiling():
        return
    heard = listening()
    if not heard:
        return

    def call(module: nn.Module) -> Call:
        options: dict[str, Any] = {
            "scaling": scale,
            "softcap": softcap,
            "s_aux": sinks,
            "position_bias": bias,
            "is_causal": causal,
        }
        for name, given in (("query", query), ("key", key), ("value", value)):
            if not isinstance(given, Tensor) or given.dim() != 4:
                axes = f"{given.dim()} axes" if isinstance(given, Tensor) else f"type {type(given).__name__}"
                raise RecordError(
                    f"kizuki.models.note: {name} has {axes} but must be a tensor [batch, heads, length, dim]"
                )
        given_mask = mask
        if isinstance(given_mask, Tensor):
            given_mask = given_mask.reshape((1,) * (4 - given_mask.dim()) + tuple(given_mask.shape))
        elif given_mask is not None and causal:
            raise RecordError(
                "kizuki.models.note: mask is a rule and causal is True; join them: mask & masks.causal()"
            )
        return Call(
            module,
            "note",
            query,
            key,
            value,
            given_mask,
            options,
            None if output is None else output.transpose(1, 2),
        )

    tell(heard, call)
