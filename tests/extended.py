"""The formula and its derivatives in extended precision: what float64 problems are measured against.

Beside a truth evaluated in float64 itself, another evaluation in float64 can have no error at all where both round
alike, and nothing would be allowed. Where `numpy.longdouble` has no more digits than float64 (Windows, Arm) this is one
more evaluation in float64, written out by hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Wide = NDArray[np.longdouble]


def _wide(tensor: Tensor) -> Wide:
    return tensor.detach().to(torch.float64).numpy().astype(np.longdouble)


def _narrow(array: Wide) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array.astype(np.float64)))


def _summed_to(array: Wide, shape: tuple[int, ...]) -> Wide:
    """The gradient of a tensor of this shape from that of its broadcast."""
    array = array.sum(tuple(range(array.ndim - len(shape))))
    wide = tuple(axis for axis, n in enumerate(shape) if n == 1)
    return np.asarray(array.sum(wide, keepdims=True), np.longdouble)


def evaluate(
    leaves: dict[str, Tensor], seen: Tensor, upstream: Tensor, scale: float | None, softcap: float | None
) -> dict[str, Tensor]:
    """weights, lse, output, and the gradient of every one of `leaves` (query, key, value, bias, sinks) for `upstream`.

    `seen` is `[*lead, heads, queries, keys]`, True where a pair takes part, the bias' −Inf reckoned in.
    """
    sees, up = seen.numpy(), _wide(upstream)
    *lead, heads, _, keys = sees.shape
    factor = np.longdouble(1) / np.sqrt(np.longdouble(leaves["query"].shape[-1])) if scale is None else scale

    def shared(tensor: Tensor) -> Wide:
        found = np.repeat(_wide(tensor), heads // tensor.shape[-3], -3)
        return np.broadcast_to(found, (*lead, *found.shape[-3:]))

    used = sees.any(-2)[..., None]  # a key that nobody sees may hold anything
    q = shared(leaves["query"])
    k, v = (np.where(used, shared(leaves[n]), np.longdouble(0)) for n in ("key", "value"))
    raw = factor * np.einsum("...id,...jd->...ij", q, k)
    bent = np.ones_like(raw)
    if softcap is not None:
        turned = np.tanh(raw / softcap)
        raw, bent = softcap * turned, 1 - turned**2
    if "bias" in leaves:
        bias = np.broadcast_to(_wide(leaves["bias"]), sees.shape)
        raw = raw + np.where(sees, bias, 0)
    scores = np.where(sees, raw, -np.inf)
    top = np.max(scores, -1, keepdims=True) if keys else np.full((*sees.shape[:-1], 1), -np.inf)
    sink = np.full_like(top, -np.inf)
    if "sinks" in leaves:
        sink = np.broadcast_to(_wide(leaves["sinks"])[:, None, None], top.shape)
    live = sees.any(-1, keepdims=True)
    top = np.where(live, np.maximum(top, sink), 0)
    raised, own = np.exp(scores - top), np.exp(np.where(live, sink, -np.inf) - top)
    total = np.where(live, raised.sum(-1, keepdims=True) + own, 1)
    weights, share = raised / total, own / total
    output = weights @ v
    lse = np.where(live, top + np.log(total), -np.inf)[..., 0]

    inner = up @ np.swapaxes(v, -1, -2)
    delta = (inner * weights).sum(-1, keepdims=True)
    of_scores = weights * (inner - delta)
    of_raw = of_scores * bent * factor

    def gathered(name: str, gradient: Wide) -> Wide:
        shape = tuple(leaves[name].shape)
        parts = gradient.reshape(*lead, shape[-3], heads // shape[-3], *gradient.shape[-2:])
        return _summed_to(parts.sum(-3), shape)

    made: dict[str, Any] = {
        "query": lambda: gathered("query", of_raw @ k),
        "key": lambda: gathered("key", np.swapaxes(of_raw, -1, -2) @ q),
        "value": lambda: gathered("value", np.swapaxes(weights, -1, -2) @ up),
        "bias": lambda: _summed_to(of_scores, tuple(leaves["bias"].shape)),
        "sinks": lambda: _summed_to(-(share * delta)[..., 0].sum(-1), (heads,)),
    }
    found = {"weights": weights, "lse": lse, "output": output} | {n: made[n]() for n in leaves}
    return {n: _narrow(np.asarray(x)) for n, x in found.items()}
