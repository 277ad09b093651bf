"""Where tokens stand, told to the scores: rotary positions turn q and k, ALiBi lowers scores with the distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def rotary(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """`x` turned by its positions: the pair (x_m, x_{m + d/2}) by the angle position · base^(−2m/d).

    x: `[..., heads, length, head_dim]`, head_dim even; positions `[length]` or `[batch, length]`. The dot product
    of two vectors turned so depends on their positions' difference alone. The angles are computed in float32 (float64
    for float64) and the result has the dtype of x. Source: Su et al. 2021 (RoFormer), section 3.2; the halves are
    paired as in Llama.

        >>> x = torch.tensor([[[1.0, 0.0]]])
        >>> rotary(x, torch.tensor([0]), 10_000.0)
        tensor([[[1., 0.]]])
        >>> rotary(x, torch.tensor([1]), 10_000.0)  # by one radian
        tensor([[[0.5403, 0.8415]]])
    """
    half, wide = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    rate = base ** (-torch.arange(half, dtype=wide, device=x.device) / half)
    angle = (positions.to(device=x.device, dtype=wide)[..., None] * rate).unsqueeze(
        -3
    )  # [..., 1, length, half]
    cos, sin = angle.cos(), angle.sin()
    a, c = x[..., :half], x[..., half:]
    return torch.cat([a * cos - c * sin, c * cos + a * sin], -1).to(x.dtype)


def slopes(heads: int) -> Tensor:
    """The slope of each head in ALiBi, `[heads]`: 2^(−8/heads), its square, its cube, …

    Where the heads are no power of two, those of the next lower one, and then every other of twice as many.
    Source: Press et al. 2022, section 3, and its code.

        >>> slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    lower = 1 << (heads.bit_length() - 1)
    first = 2.0 ** (-8.0 / lower * torch.arange(1, lower + 1))
    more = 2.0 ** (-4.0 / lower * torch.arange(1, 2 * (heads - lower) + 1, 2))
    return torch.cat([first, more])


def alibi(slopes: Tensor, positions: Tensor | None = None, first: Tensor | None = None) -> Callable[..., Any]:
    """`score − slope · |distance|` as a function of a score, which `kizuki.attention(score=)` compiles.

    positions: of queries and keys, int64 `[batch, length]`; None: their indices. `first`, int64 `[batch]`: the keys
    are those of a cache, one after the other from there, and positions are the queries' own.
    """
    if positions is None:

        def by_index(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s - slopes[h] * abs(i - j)

        return by_index
    at = positions
    if first is None:

        def by_position(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s - slopes[h] * abs(at[b, i] - at[b, j])

        return by_position
    start = first

    def by_cache(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slopes[h] * abs(at[b, i] - start[b] - j)

    return by_cache
