"""Whole problems for the interpreted kernels, each beside its answer in float64 by brute force (tests/oracle.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import oracle
import torch
from torch import Tensor

import kizuki
from kizuki.accuracy import compare
from kizuki.cpu import call
from kizuki.nn import paged_attention

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
INF, NAN = torch.inf, torch.nan
TAKEN = ("bias", "scale", "softcap", "sinks")  # what the oracle knows too


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@dataclass
class Problem:
    """One call: operands, what kizuki is told, which pairs there are (None = all), and what is computed of it."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    visible: Any = None
    same_as: dict[str, Any] = field(default_factory=dict)  # what the oracle is told instead of a function
    asks: str = "output gradient observed"
    observe: kizuki.Observe | None = None
    paired: bool = False  # bfloat16 in pairs
    local: bool = False  # each key block packed when its thread comes to it

    def numbers(self) -> dict[str, Any]:
        return {n: self.options[n] for n in TAKEN if n in self.options} | self.same_as

    def truth(self) -> oracle.Truth:
        found = oracle.brute(self.query, self.key, self.value, visible=self.visible, **self.numbers())
        return found

    def plains(self) -> list[list[Tensor]]:
        """The plain formula in the type the kernel computes in, rounded where bfloat16 meets bfloat16."""
        wide = self.query.dtype if self.paired or self.query.dtype is F64 else F32
        value = self.value.nan_to_num(0.0, 0.0, 0.0)  # only rows that see none are compared with these
        return oracle.plains(self.query, self.key, value, visible=self.visible, dtype=wide, **self.numbers())


class Wrong(Exception):
    """A result that is not what it must be."""


def near(got: Tensor, truth: Tensor, plain: list[Tensor], what: str) -> None:
    report = compare(got, truth.reshape(got.shape), [each.reshape(got.shape) for each in plain], what)
    if not report.ok:
        raise Wrong(str(report))


def answer(problem: Problem) -> None:
    """Compute everything that a problem asks for, and compare it; raises Wrong."""
    with mock.patch.object(call, "LOCAL", 0 if problem.local else call.LOCAL):
        for ask in problem.asks.split():
            ASKS[ask](problem)


def output(p: Problem) -> None:
    got = kizuki.attention(p.query, p.key, p.value, backend="cpu", **p.options)
    near(got, p.truth().output, p.plains()[2], "output")


def readings(weights: Tensor, lse: Tensor, p: Problem) -> dict[str, Tensor]:
    """What is read of A, from all its weights `[batch, heads, queries, keys]`."""
    assert p.observe is not None
    *_, queries, keys = weights.shape
    own = torch.arange(queries)[:, None] + max(0, keys - queries)
    found = {
        "entropy": -torch.xlogy(weights, weights).sum(-1),
        "distance": (weights * (own - torch.arange(keys)).abs()).sum(-1),
        "max": weights.amax(-1),
        "received": weights[..., -p.observe.last if p.observe.last else 0 :, :].sum(-2),
        "topk": weights.sort(-1, descending=True)[0][..., : p.observe.topk],
        "max_score": (weights.log() + lse[..., None]).flatten(-2).amax(-1),
    }
    if p.observe.pool is not None:
        rows, cols, *how = p.observe.pool
        lines, columns = torch.arange(queries) * rows // queries, torch.arange(keys) * cols // keys
        made = weights.new_zeros(*weights.shape[:-2], rows, cols)
        for r in range(rows):
            for c in range(cols):
                block = weights[..., lines == r, :][..., columns == c]
                made[..., r, c] = block.amax((-2, -1)) if how == ["peak"] else block.sum(-1).mean(-1)
        found["pool"] = made
    return found


def observed(p: Problem) -> None:
    if p.observe is None:
        return
    got, seen = kizuki.attention(p.query, p.key, p.value, backend="cpu", observe=p.observe, **p.options)
    alone = kizuki.attention(p.query, p.key, p.value, backend="cpu", **p.options)
    if not torch.equal(got.nan_to_num(), alone.nan_to_num()) or not torch.equal(got.isnan(), alone.isnan()):
        raise Wrong("looking changes the output")
    truth = p.truth()
    weights, lse, _ = oracle.plains(
        p.query, p.key, p.value, visible=p.visible, dtype=p.query.dtype if p.paired else None, **p.numbers()
    )
    true = readings(truth.weights, truth.lse, p)
    plain = [readings(w, each, p) for w, each in zip(weights, lse, strict=True)]
    for name, want in true.items():
        found = getattr(seen, name)
        if found is None:
            continue
        near(found[0] if name == "topk" else found, want, [each[name] for each in plain], name)
    if p.observe.topk:
        shares, keys = seen.topk
        there = truth.weights.gather(-1, keys.clamp(min=0)).masked_fill(keys < 0, 0.0)
        near(shares, there, [each["topk"] for each in plain], "weights at the keys of topk")


def gradient(p: Problem) -> None:
    """Of query, key, value, and of a bias that asks for it."""
    names = ["query", "key", "value", *[n for n in ("bias",) if n in p.options]]

    def of(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        told = {"query": p.query, "key": p.key, "value": p.value} | p.options
        leaves = {n: told[n].detach().to(dtype).requires_grad_() for n in names}
        made = function(**leaves)
        line = torch.linspace(-1, 1, made.numel(), dtype=F64)
        return list(torch.autograd.grad(made, list(leaves.values()), line.view(made.shape).to(made.dtype)))

    def ours(**leaves: Tensor) -> Tensor:
        return kizuki.attention(**(p.options | leaves), backend="cpu")

    def plain(order: Tensor | None = None) -> Callable[..., Tensor]:
        def formula(**leaves: Tensor) -> Tensor:
            told = p.numbers() | leaves
            return oracle.plain(visible=p.visible, order=order, **told)[2]

        return formula

    wide = F64 if p.query.dtype is F64 else F32
    got, want = of(ours, p.query.dtype), of(plain(), F64)
    several = [of(plain(order), wide) for order in oracle.orders(p.key.shape[-2])]
    for at, name in enumerate(names):
        near(got[at], want[at], [each[at] for each in several], f"gradient of {name}")


def rows(p: Problem) -> None:
    """Rows of A: one, one after another, a stretch, some, all."""
    a = kizuki.attend(p.query, p.key, backend="cpu", **p.options)
    truth, plain = p.truth(), p.plains()[0]
    batch, heads, queries, keys = truth.weights.shape
    places: list[tuple[Any, ...]] = [(0, heads - 1, i) for i in range(min(queries, 3))]
    places += [(0, 0, slice(1, queries)), (batch - 1, 0, queries - 1, slice(2, keys - 1))]
    places += [(0, 0, torch.tensor([0, queries - 1])), (slice(None),) * 4]
    for place in places:
        near(a[place], truth.weights[place], [each[place] for each in plain], f"A[{place}]")
    near(a.dense(), truth.weights, plain, "all of A")
    near(a.lse, truth.lse, p.plains()[1], "lse")


def dropped(p: Problem) -> None:
    """Values that are the identity: the output is the weights as they were dropped."""
    share, keys = 0.3, p.key.shape[-2]
    told = {"dropout": share, "backend": "cpu", **p.options}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kizuki.attention(q, k, v, generator=torch.Generator().manual_seed(5), **told)

    one = torch.eye(keys, dtype=p.query.dtype).expand(*p.key.shape[:-2], keys, keys)
    shown = run(p.query, p.key, one)
    truth, plain = p.truth(), p.plains()[0]
    kept = (shown != 0) | (truth.weights < 1e-30)
    factor = kept / (1 - share)
    near(shown, truth.weights * factor, [each * factor for each in plain], "weights as dropped")
    part = float(kept[truth.seen].double().mean())
    if not abs(part - (1 - share)) < 0.1:
        raise Wrong(f"{part:.2f} of the weights stayed, not {1 - share}")
    again = run(p.query, p.key, p.value)
    values = oracle._repeat(p.value, p.query.shape[-3])
    near(
        again,
        (truth.weights * factor) @ values.double(),
        [(w * factor).to(w.dtype) @ values for w in plain],
        "out",
    )

    def gradients(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (p.query, p.key, p.value)]
        made = function(*leaves)
        line = torch.linspace(-1, 1, made.numel(), dtype=F64).view(made.shape).to(made.dtype)
        return list(torch.autograd.grad(made, leaves, line))

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = oracle.plain(q, k, v, visible=p.visible, **p.numbers())[0]
        return (weights * factor.to(weights.dtype)) @ oracle._repeat(v, q.shape[-3])

    got, want, near_by = (
        gradients(run, p.query.dtype),
        gradients(formula, F64),
        gradients(formula, p.query.dtype),
    )
    for name, mine, true, other in zip(("query", "key", "value"), got, want, near_by, strict=True):
        near(mine, true, [other], f"gradient of {name} with dropout")


def paged(p: Problem) -> None:
    """The same keys and values on pages in any order."""
    size, (*_, heads, keys, _) = 5, p.key.shape
    count = -(-keys // size)
    order = torch.randperm(count + 2, generator=torch.Generator().manual_seed(3))[:count]
    pools = []
    for x in (p.key, p.value):
        pages = torch.full((count + 2, heads, size, x.shape[-1]), NAN, dtype=x.dtype)
        for n, page in enumerate(order.tolist()):
            own = x[0, :, n * size : (n + 1) * size]
            pages[page, :, : own.shape[1]] = own
        pools.append(pages)
    got = paged_attention(p.query, *pools, order[None], torch.tensor([keys]), backend="cpu", **p.options)
    near(got, p.truth().output, p.plains()[2], "output from pages")


def odd_gradient(p: Problem) -> None:
    """An infinite gradient of one output: the kernel hands over, and the portable formula's answer is the answer."""
    found = []
    for backend in ("cpu", "portable"):
        leaves = [x.detach().requires_grad_() for x in (p.query, p.key, p.value)]
        made = kizuki.attention(*leaves, backend=backend, **p.options)
        up = torch.ones_like(made)
        up[0, 0, 2, 1] = INF
        found.append(torch.autograd.grad(made, leaves, up))
    for mine, other in zip(*found, strict=True):
        if not torch.allclose(mine, other, equal_nan=True):
            raise Wrong("an infinite gradient")


ASKS = {
    "odd_gradient": odd_gradient,
    "output": output,
    "observed": observed,
    "gradient": gradient,
    "rows": rows,
    "dropped": dropped,
    "paged": paged,
}


# -- the problems ------------------------------------------------------------------------------------


def problems() -> dict[str, Problem]:
    return dict(_problems())


def _operands(
    *lengths: int, heads: int = 2, kv_heads: int = 0, dim: int = 8, dtype: torch.dtype = F32
) -> list[Tensor]:
    queries, keys = lengths[0], lengths[-1]
    q = randn(1, heads, queries, dim, dtype=dtype)
    return [q, *(randn(1, kv_heads or heads, keys, dim, seed=s, dtype=dtype) for s in (1, 2))]


def _problems() -> Iterator[tuple[str, Problem]]:
    masks = kizuki.masks
    everything = kizuki.Observe(
        topk=3, entropy=True, received=True, max=True, max_score=True, distance=True, pool=(3, 4)
    )
    peaks = kizuki.Observe(topk=9, entropy=True, received=True, pool=(5, 3, "peak"), last=7)
    seen = torch.rand(37, 37, generator=torch.Generator().manual_seed(0)) < 0.6
    seen[5] = False
    causal = oracle.causal(37, 37)

    for dtype in (F32, F64, BF16, F16):
        q, k, v = _operands(19, 37, dtype=dtype)
        yield f"bare {dtype}", Problem(q, k, v, observe=everything)
        yield f"odd width {dtype}", Problem(q[..., :5], k[..., :5], v[..., :3], observe=everything)
    q, k, v = _operands(37, heads=2, kv_heads=1)
    capped = {"softcap": 2.0, "sinks": torch.tensor([-1.0, 30.0])}
    yield (
        "causal, capped, sinks",
        Problem(
            q,
            k,
            v,
            {"causal": True, **capped},
            causal,
            asks="output gradient observed rows",
            observe=everything,
        ),
    )
    window = oracle.window(37, 37, 9, 2) & (np.arange(37) % 5 > 0)
    options = {"window": (9, 2), "mask": masks.keys(torch.arange(37) % 5 > 0)}
    yield "a window and keys", Problem(q, k, v, options, window, observe=peaks)
    yield (
        "a dense mask",
        Problem(q, k, v, {"mask": seen}, seen, asks="output gradient observed rows", observe=peaks),
    )
    turned = seen.T.contiguous().T
    yield "a mask by columns", Problem(q, k, v, {"mask": turned}, seen, asks="output rows")
    bias = torch.where(seen, randn(37, 37, seed=5), -INF)
    yield "a bias", Problem(q, k, v, {"bias": bias, "scale": -0.4}, observe=everything)
    several = randn(2, 1, 37, seed=5)
    yield "a bias of each key", Problem(q, k, v, {"bias": several}, asks="output gradient")
    yield "a bias of each query", Problem(q, k, v, {"bias": randn(2, 37, 1, seed=5)}, asks="output gradient")
    yield "dropout", Problem(q, k, v, {"causal": True}, causal, asks="dropped")
    odd = v.clone()
    odd[0, 0, 3, 2], odd[0, 0, 30] = INF, NAN
    yield "odd values", Problem(q, k, odd, {"causal": True}, causal, asks="output")
    poison = k.clone()
    poison[:, :, 7] = NAN
    there = np.arange(37) != 7
    yield (
        "poison",
        Problem(q, poison, v, {"mask": masks.keys(torch.from_numpy(there))}, there, observe=everything),
    )
    yield "columns", Problem(*(randn(1, 2, 8, 19, seed=s).transpose(-1, -2) for s in range(3)))
    yield (
        "nothing seen",
        Problem(
            *(x[..., :9, :] for x in (q, k, v)),
            {"mask": torch.zeros(9, 9, dtype=torch.bool)},
            np.zeros((9, 9), bool),
        ),
    )

    for dtype in (F32, F64, BF16, F16):
        one, many, more = (randn(1, h, n, 8, seed=n, dtype=dtype) for h, n in ((4, 1), (2, 300), (2, 300)))
        yield f"decoding {dtype}", Problem(one, many, more, asks="output rows paged")
        third = np.arange(300) % 3 > 0
        yield (
            f"decoding, masked {dtype}",
            Problem(one, many, more, {"mask": torch.from_numpy(third), "softcap": 3.0}, third, asks="output"),
        )
        spoiled, there = more.clone(), np.arange(300) != 5
        spoiled[0, 0, 5], spoiled[0, 1, 7, 1] = NAN, INF
        yield (
            f"decoding, odd {dtype}",
            Problem(one, many, spoiled, {"mask": torch.from_numpy(there)}, there, asks="output"),
        )
    for dim in (64, 128):
        one, many, more = (randn(1, 2, n, dim, seed=n) for n in (1, 40, 40))
        yield f"decoding head_dim {dim}", Problem(one, many, more, asks="output")
    q, k, v = _operands(3, 40, heads=2, kv_heads=1)
    last = oracle.causal(3, 40, "lower_right")
    yield (
        "few queries, and a last vector",
        Problem(q, k, randn(1, 1, 40, 12), asks="output"),
    )
    yield (
        "few queries",
        Problem(q, k, v, {"mask": masks.causal("lower_right")}, last, asks="output rows paged"),
    )

    q, k, v = (randn(1, 2, n, 10, seed=s, dtype=BF16) for s, n in enumerate((19, 37, 37)))
    yield "pairs", Problem(q, k, v, {"softcap": 3.0}, paired=True, asks="output observed", observe=everything)
    yield "pairs, odd width", Problem(q[..., :5], k[..., :5], v[..., :3], paired=True, asks="output")
    apart = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    yield "pairs by columns", Problem(*apart, paired=True, asks="output")
    odd, there = v[..., :8].clone(), np.arange(37) != 3
    odd[0, 0, 3, 2] = INF
    yield (
        "pairs, odd values",
        Problem(q, k, odd, {"mask": torch.from_numpy(there)}, there, paired=True, asks="output"),
    )
    one = randn(1, 2, 1, 8, dtype=BF16)
    yield "pairs, decoding", Problem(one, k[..., :8], v[..., :8], paired=True, asks="output paged")
    odd[0, 1, 30, 1] = INF
    yield (
        "pairs, decoding odd values",
        Problem(one, k[..., :8], odd, {"mask": torch.from_numpy(there)}, there, paired=True, asks="output"),
    )

    q, k, v = (randn(1, 5, n, 6, seed=n) for n in (7, 20, 20))
    yield "packed by its own task", Problem(q, k, v, asks="output")
    q, k, v = _operands(19, 70)
    yield "packed block by block", Problem(q, k, v, local=True, asks="output observed", observe=everything)
    q, k, v = _operands(5, 300, heads=1)
    wide = oracle.window(5, 300, 280, 2, "lower_right")
    options = {"mask": masks.window(280, 2, align="lower_right")}
    yield "two splits", Problem(q, k, v, options, wide, asks="output observed", observe=everything)
    documents = (torch.arange(3), torch.tensor([0] * 100 + [1] * 170 + [2] * 30))
    q, k, v = _operands(3, 300, heads=1)
    own = documents[0][:, None] == documents[1]
    options = {"mask": masks.documents(ids=documents[0], key_ids=documents[1])}
    yield (
        "documents in two splits",
        Problem(q, k, v, options, own.numpy(), asks="output observed rows", observe=everything),
    )
    q, k, v = _operands(19, 37)
    last, odd = oracle.causal(19, 37, "lower_right"), v.clone()
    odd[0, 1, 30, 3] = INF
    options = {"mask": masks.causal("lower_right")}
    yield "pages, packed", Problem(q, k, odd, options, last, asks="paged")
    q, k, v = _operands(11, 11)
    spoiled = q.clone()
    spoiled[0, 1, 4, 2] = NAN
    yield (
        "a query that is NaN",
        Problem(
            spoiled, k, v, {"causal": True}, oracle.causal(11, 11), asks="output observed", observe=everything
        ),
    )
    yield "an infinite gradient", Problem(q, k, v, asks="odd_gradient")
    q, k, v = _operands(9, 18, heads=2)
    i, j = torch.arange(9)[:, None], torch.arange(18)
    options = {"score": lambda s, b, h, i, j: 2 * s + 0.25 * (i - j), "scale": 0.3}
    yield (
        "a score function",
        Problem(q, k, v, options, same_as={"scale": 0.6, "bias": 0.25 * (i - j).float()}, observe=everything),
    )
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2] * 2)
    rule = {"mask": masks.where(lambda b, h, i, j: (i + j) % 3 != h), "softcap": 4.0}
    sees = np.stack([((i + j) % 3 != h).numpy() for h in range(2)])
    yield "a mask function", Problem(q, k, v, rule, sees, asks="output gradient rows")
    yield (
        "a score function that hides a row",
        Problem(
            q,
            k,
            v,
            {"score": lambda s, b, h, i, j: s if i != 3 else -INF},
            i.numpy() != 3,
            asks="output",
        ),
    )
    below, all_below = k.clone(), q.clone()
    below[..., 0], all_below[:, :, 2] = -1, 0
    all_below[:, :, 2, 0] = INF  # every score of this row is −inf, and it sees its keys all the same
    yield "scores of −inf", Problem(all_below, below, v, {"mask": rule["mask"]}, sees, asks="output")
    reads = {"mask": masks.where(lambda b, h, i, j: ids[j] == ids[i - 9])}
    yield (
        "a mask function of a tensor",
        Problem(q, k, v, reads, (ids[j] == ids[i - 9]).numpy(), asks="output"),
    )
