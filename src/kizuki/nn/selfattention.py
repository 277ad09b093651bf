"""`SelfAttention`: X → Q, K, V → A → Z, a layer whose A can be looked at."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import OptionError, ShapeError, show
from ..functional import attention
from ..mask import Mask
from ..operator import AttentionMatrix, attend
from .cache import KVCache
from .positions import alibi, rotary, slopes

CALLER = "kizuki.nn.SelfAttention"


class SelfAttention(nn.Module):
    """Self-attention with its projections: `Z = concat_h(A_h V_h) W_O`, `A = softmax(mask(Q Kᵀ / √head_dim))`.

    With `Q = X W_Q`, `K = X W_K`, `V = X W_V`. The residual, `X + layer(X)`, and the norm are the caller's.

    Arguments:
        width: of X, and of Z.
        heads: query heads.
        kv_heads: key and value heads, which divide `heads`; each serves heads / kv_heads of them and is never
            repeated. None: as many as heads.
        head_dim: None: width / heads.
        causal: each token sees itself and what is before it.
        window: `(left, right)`, the keys visible beyond a token's own position; None on a side = unlimited.
        rotary: the base of rotary positions (10_000.0 is usual); None: no rotary positions.
        alibi: ALiBi: scores fall with the distance, by a slope a head.
        bias: whether the projections have one.
        dropout: the probability with which a weight is dropped in training.
        device, dtype: of the parameters.

    `forward(x, mask=None, positions=None, cache=None)`: x is `[batch, length, width]` or `[length, width]`, and
    so is what returns. `mask` is that of `kizuki.attention`; `positions`, whole numbers `[length]` or
    `[batch, length]`, are where the tokens stand, None: 0, 1, 2 …. With a `KVCache` x are the next tokens of its
    sequences: their keys and values are appended and all it holds is attended to.

    `matrix(x, mask=None, positions=None)` is the layer's A for an input, `[..., heads, length, length]`, itself not
    stored: `layer.matrix(x).topk(8)`, `layer.matrix(x)[0, 3, 17]`.

    Raises OptionError and ShapeError in one line.

    Time and memory: those of `kizuki.attention`, O(length) memory, and of four matrix products. Source: Vaswani et
    al. 2017, section 3.2.2; grouped heads: Ainslie et al. 2023; for positions see positions.py.

        >>> import torch
        >>> from kizuki.nn import SelfAttention
        >>> layer = SelfAttention(32, heads=4, kv_heads=2, causal=True, rotary=10_000.0)
        >>> x = torch.randn(1, 9, 32)
        >>> (x + layer(x)).shape
        torch.Size([1, 9, 32])
        >>> layer.matrix(x).shape, layer.matrix(x)[0, 3, 0, :3].tolist()  # the first token sees itself
        (torch.Size([1, 4, 9, 9]), [1.0, 0.0, 0.0])
    """

    slopes: Tensor | None

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        rotary: float | None = None,
        alibi: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        sizes = {"width": width, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            whole = isinstance(size, int) and not isinstance(size, bool)
            if size is not None and not (whole and size >= 1):
                raise OptionError(f"{CALLER}: {name} is {size!r} but must be a whole number >= 1")
        if heads % kv_heads:
            raise OptionError(f"{CALLER}: kv_heads is {kv_heads} but must divide heads, {heads}")
        if head_dim is None:
            if width % heads:
                raise OptionError(
                    f"{CALLER}: width is {width} but must be a multiple of heads, {heads}; else name head_dim="
                )
            head_dim = width // heads
        if rotary is not None and (head_dim % 2 or not rotary > 0):
            raise OptionError(
                f"{CALLER}: rotary is {rotary} with head_dim {head_dim}; it must be above 0 and turns pairs, so that "
                "head_dim must be even"
            )
        if not 0.0 <= dropout < 1.0:
            raise OptionError(f"{CALLER}: dropout is {dropout} but must lie in 0 … 1, below 1")
        self.width, self.heads, self.kv_heads, self.head_dim = width, heads, kv_heads, head_dim
        self.causal, self.window, self.rotary, self.dropout = causal, window, rotary, dropout
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.W_Q = nn.Linear(width, heads * head_dim, **made)
        self.W_K = nn.Linear(width, kv_heads * head_dim, **made)
        self.W_V = nn.Linear(width, kv_heads * head_dim, **made)
        self.W_O = nn.Linear(heads * head_dim, width, **made)
        # Not a weight: a model that is saved and loaded has it again from `heads`.
        self.register_buffer("slopes", slopes(heads).to(device) if alibi else None, persistent=False)

    def extra_repr(self) -> str:
        told = f"width={self.width}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
        told += f", causal={self.causal}" + (f", window={self.window}" if self.window else "")
        return (
            told
            + (f", rotary={self.rotary}" if self.rotary else "")
            + (", alibi" * (self.slopes is not None))
        )

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Z, the shape of x; see the class."""
        if self.slopes is not None and torch.compiler.is_compiling():
            # A tracer cannot follow a function of scores that is made while it traces: one break around the call.
            return cast(Tensor, torch.compiler.disable(self._read)(x, mask, positions, cache))
        return self._read(x, mask, positions, cache)

    def _read(
        self, x: Tensor, mask: Mask | Tensor | None, positions: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        if cache is not None:
            return self._next(x, mask, positions, cache)
        query, key, options = self._scores(x, positions)
        value = _heads(self.W_V(x), self.kv_heads)
        dropout = self.dropout if self.training else 0.0
        output = attention(query, key, value, mask=mask, dropout=dropout, **options)
        return self._join(output)

    def matrix(
        self, x: Tensor, *, mask: Mask | Tensor | None = None, positions: Tensor | None = None
    ) -> AttentionMatrix:
        """A for an input, `[..., heads, length, length]`; see the class."""
        query, key, options = self._scores(x, positions)
        return attend(query, key, mask=mask, **options)

    def _scores(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """query, key and the options that say what A is."""
        self._check(x)
        length = x.shape[-2]
        given = None if positions is None else _check_positions(positions, x)
        query, key = _heads(self.W_Q(x), self.heads), _heads(self.W_K(x), self.kv_heads)
        if self.rotary is not None:
            at = torch.arange(length, device=x.device) if given is None else given
            query, key = rotary(query, at, self.rotary), rotary(key, at, self.rotary)
        options: dict[str, Any] = {"causal": self.causal, "window": self.window}
        if self.slopes is not None:
            batch = x.shape[0] if x.dim() == 3 else 1
            at_each = None if given is None else given.expand(batch, length).contiguous()
            options["score"] = alibi(self.slopes, at_each)
        return query, key, options

    def _next(
        self, x: Tensor, mask: Mask | Tensor | None, positions: Tensor | None, cache: KVCache
    ) -> Tensor:
        """The next tokens of a cache's sequences: each sees itself and what is before it."""
        self._check(x)
        if x.dim() != 3:
            raise ShapeError(
                f"{CALLER}: x has shape {show(x)} but with a cache must be [batch, length, width]"
            )
        left, right = self.window or (None, 0)
        window = None if left is None else left + 1
        if not self.causal or right not in (None, 0) or (window is not None and cache.window != window):
            raise OptionError(
                f"{CALLER}: cache= needs a layer made with causal=True, and for one with a window a cache made with "
                f"window=left + 1; this layer has causal={self.causal} and window={self.window}, the cache "
                f"window={cache.window}"
            )
        if self.window is None and cache.window is not None:
            raise OptionError(
                f"{CALLER}: the cache has window={cache.window} but the layer none; make the layer with "
                f"window=({cache.window - 1}, 0)"
            )
        if self.dropout and self.training:
            raise OptionError(f"{CALLER}: a cache is for generating, without dropout; call .eval() first")
        if positions is None:
            at = cache.lengths[:, None] + torch.arange(x.shape[1], device=x.device)
        else:
            at = _check_positions(positions, x)
        query, key = _heads(self.W_Q(x), self.heads), _heads(self.W_K(x), self.kv_heads)
        if self.rotary is not None:
            query, key = rotary(query, at, self.rotary), rotary(key, at, self.rotary)
        cache.append(key, _heads(self.W_V(x), self.kv_heads))
        options: dict[str, Any] = {}
        if self.slopes is not None:
            if positions is not None:
                raise OptionError(
                    f"{CALLER}: ALiBi counts the keys of a cache one after the other; leave positions out"
                )
            options["score"] = alibi(self.slopes, at, cache.first)
        return self._join(cache.attention(query, mask=mask, **options))

    def _join(self, output: Tensor) -> Tensor:
        joined: Tensor = self.W_O(output.transpose(-2, -3).flatten(-2))
        return joined

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or x.dim() not in (2, 3) or x.shape[-1] != self.width:
            given = show(x) if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(
                f"{CALLER}: x has shape {given} but must be [batch, length, {self.width}] or [length, {self.width}]"
            )


def _heads(x: Tensor, heads: int) -> Tensor:
    """`[..., length, heads · head_dim]` as `[..., heads, length, head_dim]`, a view."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def _check_positions(positions: Tensor, x: Tensor) -> Tensor:
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dtype is torch.bool:
        kind = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise OptionError(f"{CALLER}: positions is {kind} but must be a tensor of whole numbers")
    if tuple(positions.shape) not in ((x.shape[-2],), tuple(x.shape[:-1])):
        raise ShapeError(
            f"{CALLER}: positions has shape {show(positions)} but must be [{x.shape[-2]}], or one for each token, "
            f"{list(x.shape[:-1])}"
        )
    return positions.to(device=x.device, dtype=torch.int64)
