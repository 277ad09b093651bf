"""What kizuki is compared with: the definitions, written as loops, and the plain dense formula in torch.

Nothing here uses kizuki's masks, reference or tiles. Visibility is a boolean array made by asking, for each
query and key, the sentence that defines the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kizuki import backends
from kizuki.errors import OptionError
from kizuki.problem import build

NAN, INF = float("nan"), float("inf")


def _available() -> list[str]:
    x = torch.ones(1, 1, 2, 4)
    names = ["portable"]
    try:
        backends.choose(build(x, x), "cpu")
    except (OptionError, ImportError):
        return names
    return [*names, "cpu"]


BACKENDS = _available()


def grid(queries: int, keys: int, sees: Callable[[int, int], bool]) -> np.ndarray:
    """`[queries, keys]`, True where `sees(i, j)`."""
    made = np.zeros((queries, keys), dtype=bool)
    for i in range(queries):
        for j in range(keys):
            made[i, j] = sees(i, j)
    return made


def causal(queries: int, keys: int, align: str = "upper_left") -> np.ndarray:
    shift = keys - queries if align == "lower_right" else 0
    return grid(queries, keys, lambda i, j: j <= i + shift)


def window(
    queries: int, keys: int, left: int | None, right: int | None, align: str = "upper_left"
) -> np.ndarray:
    shift = keys - queries if align == "lower_right" else 0

    def sees(i: int, j: int) -> bool:
        own = i + shift
        return (left is None or own - j <= left) and (right is None or j - own <= right)

    return grid(queries, keys, sees)


def documents(ids: list[int], key_ids: list[int] | None = None) -> np.ndarray:
    others = ids if key_ids is None else key_ids
    return grid(len(ids), len(others), lambda i, j: ids[i] == others[j])


@dataclass(frozen=True)
class Truth:
    """float64: weights `[..., heads, queries, keys]`, lse, output, and which pairs take part."""

    weights: Tensor
    lse: Tensor
    output: Tensor
    seen: Tensor


def _plain_array(visible: np.ndarray | Tensor) -> np.ndarray:
    return visible.numpy() if isinstance(visible, Tensor) else visible


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64).numpy()


def brute(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    visible: np.ndarray | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Truth:
    """Contract 1–4, row by row in float64. Only the keys a row sees are ever touched."""
    value = key if value is None else value
    flat = query.dim() == key.dim() == 2
    q, k, v = (_array(t if t.dim() > 2 else t[None]) for t in (query, key, value))
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads = next((n for n in (q.shape[-3], k.shape[-3], v.shape[-3]) if n != 1), 1)
    queries, keys = q.shape[-2], k.shape[-2]
    q = np.broadcast_to(q, (*lead, heads, *q.shape[-2:]))
    k, v = (np.broadcast_to(x, (*lead, *x.shape[-3:])) for x in (k, v))
    full = (*lead, heads, queries, keys)
    seen = np.ones(full, dtype=bool) if visible is None else np.broadcast_to(_plain_array(visible), full)
    add = np.zeros(full) if bias is None else np.broadcast_to(_array(bias), full)
    seen = seen & (add != -INF)
    factor = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    weights, output = np.zeros(full), np.zeros((*full[:-1], v.shape[-1]))
    lse = np.full(full[:-1], -INF)
    with np.errstate(all="ignore"):
        for at in np.ndindex(*full[:-1]):
            *b, h, i = at
            cols = np.nonzero(seen[at])[0]
            if not len(cols):
                continue
            rows_k = k[(*b, h * k.shape[-3] // heads)][cols]
            rows_v = v[(*b, h * v.shape[-3] // heads)][cols]
            s = factor * (rows_k @ q[(*b, h, i)])
            if softcap is not None:
                s = softcap * np.tanh(s / softcap)
            s = s + add[at][cols]
            sink = -INF if sinks is None else float(sinks[h])
            top = np.max(np.append(s, sink))
            if top == -INF:
                weights[(*at, cols)], lse[at], output[at] = NAN, NAN, NAN
                continue
            raised = np.exp(s - top)
            total = raised.sum() + np.exp(sink - top)
            weights[(*at, cols)] = raised / total
            lse[at] = top + np.log(total)
            output[at] = ((raised / total)[:, None] * rows_v).sum(0)
    made = (torch.from_numpy(np.ascontiguousarray(x)) for x in (weights, lse, output, seen))
    return Truth(*((x[0] if flat and value.dim() == 2 else x) for x in made))


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    visible: np.ndarray | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype | None = None,
    order: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(weights, lse, output)` as anyone would write it, all of A built, every step in `dtype`; differentiable.

    Keys that no query sees are taken out first, so that it can be asked about NaN behind a mask. `order` puts
    the keys in another order first, and the weights back.
    """
    if order is not None:

        def moved(columns: Any) -> Any:
            return (
                columns
                if columns is None or not columns.ndim or columns.shape[-1] == 1
                else columns[..., order]
            )

        others = {"scale": scale, "softcap": softcap, "sinks": sinks, "dtype": dtype}
        value = key if value is None else value
        k, v = key[..., order, :], value[..., order, :]
        weights, lse, output = plain(query, k, v, visible=moved(visible), bias=moved(bias), **others)
        return weights[..., torch.argsort(order)], lse, output
    value = key if value is None else value
    dtype = query.dtype if dtype is None else dtype
    q, k, v = (t.to(dtype) for t in (query, key, value))
    heads = max((t.shape[-3] for t in (q, k) if t.dim() > 2), default=1)
    k, v = (
        t if t.dim() < 3 or t.shape[-3] in (1, heads) or heads == 1 else _repeat(t, heads) for t in (k, v)
    )
    seen = (
        torch.ones((), dtype=torch.bool)
        if visible is None
        else torch.from_numpy(np.array(_plain_array(visible)))
    )
    if bias is not None:
        seen = seen & (bias != -INF)
    full = torch.broadcast_shapes(
        (*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])
    )
    seen = seen.expand(full)
    used = seen.any(-2).unsqueeze(-1)
    k = torch.where(used, k, 0.0)
    v = torch.where(used, v, 0.0)
    s = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + torch.where(bias == -INF, 0.0, bias.to(dtype))
    live = seen.any(-1, keepdim=True)
    s = torch.where(seen, s, -INF)
    s = torch.where(live, s, 0.0)  # softmax of nothing but −inf would be NaN, also in its gradient
    if sinks is not None:
        s = torch.cat([s, sinks.to(dtype).view(-1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    weights = torch.softmax(s, -1)[..., : full[-1]]
    weights = torch.where(seen & live, weights, 0.0)
    lse = torch.where(live[..., 0], torch.logsumexp(s, -1), -INF)
    return weights, lse, weights @ v


def orders(keys: int) -> list[Tensor]:
    """The keys as they are, backwards, and from the middle on: three plain evaluations of one formula."""
    line = torch.arange(keys)
    return [line, line.flip(0), line.roll(keys // 2)]


def plains(query: Tensor, key: Tensor, value: Tensor | None = None, **options: Any) -> list[list[Tensor]]:
    """`[weights], [lse], [output]` of `plain` in each order of the keys."""
    made = [plain(query, key, value, order=order, **options) for order in orders(key.shape[-2])]
    return [list(part) for part in zip(*made, strict=True)]


def _repeat(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[-3], -3)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that depend on shape and seed only."""
    generator = torch.Generator().manual_seed(
        seed + 7919 * sum((n + 1) * (at + 1) for at, n in enumerate(shape))
    )
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
