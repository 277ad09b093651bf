"""Any problem: shapes, layouts, dtypes, masks, options and poison drawn from a `random.Random`, and the check of one.

What a mask shows is worked out here from the sentence that defines it; nothing of kizuki's is asked. The same problems
are drawn by hypothesis in test_any_problem.py, and by number in benchmarks/fuzz.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import extended
import numpy as np
import torch
from oracle import INF, NAN, brute, orders, plain
from torch import Tensor

import kizuki
from kizuki import masks
from kizuki.accuracy import Report, compare

Seen = np.ndarray  # bool, broadcasts to [*lead, heads, queries, keys]
LUCK = 8
DTYPES = [torch.float32] * 4 + [torch.float64] * 2 + [torch.float16, torch.bfloat16]


@dataclass
class Drawn:
    """One problem: what goes to kizuki, and what its masks show."""

    query: Tensor
    key: Tensor
    value: Tensor
    rules: dict[str, Any]  # mask, causal, window
    numbers: dict[str, Any]  # bias, scale, softcap, sinks
    visible: Seen
    upstream: Tensor
    said: list[str] = field(default_factory=list)  # what was drawn, in words

    def seen(self) -> Tensor:
        """`[*lead, heads, queries, keys]`: which pairs take part."""
        lead = np.broadcast_shapes(self.query.shape[:-3], self.key.shape[:-3])
        full = (*lead, self.query.shape[-3], self.query.shape[-2], self.key.shape[-2])
        seen = _with_bias(self.visible, self.numbers.get("bias"))
        return torch.from_numpy(np.broadcast_to(seen, full).copy())

    def __str__(self) -> str:
        shapes = ", ".join(f"{n} {list(getattr(self, n).shape)}" for n in ("query", "key", "value"))
        return f"{self.query.dtype} {shapes}: {'; '.join(self.said) or 'bare'}"


def draw(chance: random.Random, largest: int = 40, again: int = 0) -> Drawn:
    """A problem; equal numbers from `chance` give an equal problem, but for its normal numbers with another `again`."""
    seed = chance.randrange(2**32)
    noise, normal = np.random.default_rng(seed), np.random.default_rng([seed, again])
    lead = tuple(chance.choice([1, 2, 3]) for _ in range(chance.choice([0, 1, 1, 1, 2])))
    heads = chance.choice([1, 2, 3, 4, 6])
    kv_heads = chance.choice([n for n in range(1, heads + 1) if heads % n == 0])
    value_heads = chance.choice([n for n in range(1, heads + 1) if heads % n == 0])
    queries, keys = (chance.choice([1, 2, 5, chance.randint(1, largest), largest]) for _ in range(2))
    if chance.random() < 0.3:
        keys = queries
    dim, width = (chance.choice([1, 2, 3, 4, 8, 16, 17, 32, chance.randint(1, 70)]) for _ in range(2))
    dtype, said = chance.choice(DTYPES), []

    def operand(*shape: int) -> Tensor:
        return _laid_out(normal.standard_normal(shape), chance, said).to(dtype)

    def axes() -> tuple[int, ...]:
        return tuple(n if chance.random() < 0.85 else 1 for n in lead)

    query = operand(*axes(), heads, queries, dim)
    key, value = operand(*axes(), kv_heads, keys, dim), operand(*axes(), value_heads, keys, width)
    lead = tuple(np.broadcast_shapes(*(t.shape[:-3] for t in (query, key))))
    value = value.expand(*np.broadcast_shapes(lead, value.shape[:-3]), *value.shape[-3:])
    if value.shape[:-3] != lead:  # a value with batch axes of its own has a test of its own
        value = value[tuple(slice(n) for n in lead)]
    full = (*lead, heads, queries, keys)
    rules, visible = _masks(chance, noise, full, said)
    numbers = _numbers(chance, noise, normal, full, dtype, said)
    if chance.random() < 0.25:
        hidden = ~np.broadcast_to(_with_bias(visible, numbers.get("bias")), full).any(-2)
        key, value = (_poisoned(t, hidden, lead, heads, chance) for t in (key, value))
        said.append("poison behind the masks")
    up = torch.from_numpy(normal.standard_normal((*full[:-1], width))).to(dtype)
    return Drawn(query, key, value, rules, numbers, visible, up, said)


def _laid_out(made: np.ndarray, chance: random.Random, said: list[str]) -> Tensor:
    """The same numbers in one of the memory layouts that people pass."""
    plainly, how = torch.from_numpy(made), chance.randrange(8)
    if how == 0:
        said.append("heads last")
        return plainly.transpose(-3, -2).contiguous().transpose(-3, -2)
    if how == 1:
        said.append("width first")
        return plainly.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == 2:
        said.append("every other row")
        room = torch.zeros(*plainly.shape[:-2], 2 * plainly.shape[-2], plainly.shape[-1], dtype=plainly.dtype)
        room[..., ::2, :] = plainly
        return room[..., ::2, :]
    if how == 3:
        said.append("every other number")
        room = torch.zeros(*plainly.shape[:-1], 2 * plainly.shape[-1] + 1, dtype=plainly.dtype)
        room[..., 1::2] = plainly
        return room[..., 1::2]
    if how == 4:
        said.append("one row, expanded")
        return plainly[..., :1, :].expand(plainly.shape)
    return plainly


def _leaf(chance: random.Random, noise: Any, full: tuple[int, ...]) -> tuple[masks.Mask, Seen, str]:
    queries, keys = full[-2:]
    i, j = np.arange(queries)[:, None], np.arange(keys)
    align = chance.choice(["lower_right", "upper_left"])
    own = i + (keys - queries if align == "lower_right" else 0)
    kind = chance.choice(["causal", "window", "documents", "keys", "lengths", "dense", "where"])
    if kind == "causal":
        return masks.causal(align), j <= own, f"causal {align}"
    if kind == "window":
        left, right = (chance.choice([None, 0, 1, 3, 9]) for _ in range(2))
        seen = np.ones((queries, keys), dtype=bool)
        if left is not None:
            seen &= own - j <= left
        if right is not None:
            seen &= j - own <= right
        return masks.window(left, right, align), seen, f"window {left} {right} {align}"
    if kind == "documents":
        mine, theirs = (np.sort(noise.integers(0, 3, n)) for n in (queries, keys))
        rule = masks.documents(ids=torch.from_numpy(mine), key_ids=torch.from_numpy(theirs))
        return rule, mine[:, None] == theirs, "documents"
    if kind == "keys":
        seen = noise.random(keys) < 0.6
        return masks.keys(torch.from_numpy(seen)), seen[None, :], "keys"
    if kind == "lengths":
        n, m = chance.randint(0, queries), chance.randint(0, keys)
        return masks.lengths(query=n, key=m), (i < n) & (j < m), f"lengths {n} {m}"
    if kind == "dense":
        shape = tuple(n if chance.random() < 0.6 else 1 for n in full)
        shape = shape[chance.randrange(len(shape) - 1) :]
        seen = noise.random(shape) < 0.6
        return masks.dense(torch.from_numpy(seen)), seen, f"dense {list(shape)}"
    step = chance.choice([2, 3, 5])
    h = np.arange(full[-3])[:, None, None]
    return masks.where(lambda _, h, i, j: (i + 2 * j + h) % step != 0), (i + 2 * j + h) % step != 0, "where"


def _tree(
    chance: random.Random, noise: Any, full: tuple[int, ...], depth: int
) -> tuple[masks.Mask, Seen, str]:
    if not depth or chance.random() < 0.4:
        return _leaf(chance, noise, full)
    a = _tree(chance, noise, full, depth - 1)
    how = chance.choice(["&", "|", "~"])
    if how == "~":
        return ~a[0], ~a[1], f"~({a[2]})"
    b = _tree(chance, noise, full, depth - 1)
    if how == "&":
        return a[0] & b[0], a[1] & b[1], f"({a[2]} & {b[2]})"
    return a[0] | b[0], a[1] | b[1], f"({a[2]} | {b[2]})"


def _masks(
    chance: random.Random, noise: Any, full: tuple[int, ...], said: list[str]
) -> tuple[dict[str, Any], Seen]:
    queries, keys = full[-2:]
    i, j = np.arange(queries)[:, None], np.arange(keys)
    rules: dict[str, Any] = {}
    visible = np.ones((queries, keys), dtype=bool)
    if queries == keys and chance.random() < 0.3:
        rules["causal"], visible = True, visible & (j <= i)
        said.append("causal=True")
    if queries == keys and chance.random() < 0.2:
        left, right = chance.choice([None, 0, 2]), chance.choice([None, 0, 2])
        rules["window"] = (left, right)
        visible = visible & ((left is None) | (i - j <= (left or 0)))
        visible = visible & ((right is None) | (j - i <= (right or 0)))
        said.append(f"window={left, right}")
    if chance.random() < 0.6:
        rules["mask"], seen, words = _tree(chance, noise, full, 2)
        visible = visible & seen
        said.append(words)
    return rules, visible


def _numbers(
    chance: random.Random,
    noise: Any,
    normal: Any,
    full: tuple[int, ...],
    dtype: torch.dtype,
    said: list[str],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if chance.random() < 0.4:
        shape = tuple(n if chance.random() < 0.6 else 1 for n in full)
        shape = shape[chance.randrange(len(shape)) :]
        bias = normal.standard_normal(shape)
        if chance.random() < 0.4:
            bias[noise.random(shape) < 0.3] = -INF
        kind = chance.choice([dtype, dtype, torch.float32])
        found["bias"] = torch.from_numpy(bias).to(kind)
        said.append(f"bias {list(shape)} {kind}")
    if chance.random() < 0.3:
        found["scale"] = chance.choice([0.0, 0.1, 1.0, -0.5, 3])
    if chance.random() < 0.3:
        found["softcap"] = chance.choice([0.5, 2.0, 50.0])
    if chance.random() < 0.25:
        sinks = normal.standard_normal(full[-3]) * chance.choice([1, 20])
        if chance.random() < 0.2:
            sinks[0] = -INF
        found["sinks"] = torch.from_numpy(sinks).to(dtype)
    said.extend(f"{n} {found[n]}" for n in ("scale", "softcap") if n in found)
    said.extend(["sinks"] if "sinks" in found else [])
    return found


def _with_bias(visible: Seen, bias: Tensor | None) -> Seen:
    return visible if bias is None else visible & (bias != -INF).numpy()


def _poisoned(
    tensor: Tensor, hidden: Seen, lead: tuple[int, ...], heads: int, chance: random.Random
) -> Tensor:
    """NaN or an infinity in every key that no query of any head or batch that reads it sees."""
    own = tensor.shape[-3]
    alone = hidden.reshape(*lead, own, heads // own, hidden.shape[-1]).all(-2)  # [*lead, own, keys]
    missing = len(lead) - (tensor.dim() - 3)
    alone = alone.all(tuple(range(missing)))
    for axis, n in enumerate(tensor.shape[:-3]):
        if n == 1:
            alone = alone.all(axis, keepdims=True)
    made = tensor.clone()
    made[torch.from_numpy(np.ascontiguousarray(alone))] = chance.choice([NAN, INF, -INF])
    return made


def reports(problem: Drawn, backend: str) -> list[Report]:
    """Output, lse, weights and every gradient against float64, by the one rule of accuracy."""
    q, k = problem.query, problem.key
    matrix = kizuki.attend(q, k, backend=backend, **problem.rules, **problem.numbers)
    dense = matrix.dense()
    got = {"output": matrix @ problem.value, "lse": matrix.lse, "weights": dense}
    got |= gradients(problem, backend)
    truth = _truth(problem)
    line, backwards, _ = orders(k.shape[-2])
    several = [*_evaluated(problem, q.dtype, line, scaled=True), *_evaluated(problem, q.dtype, backwards)]
    found = [
        compare(x, truth[n].reshape(x.shape), [each[n].to(x.dtype).reshape(x.shape) for each in several], n)
        for n, x in got.items()
    ]
    absent = bool(dense[~problem.seen().reshape(dense.shape)].any())
    odd = [n for n, t in _leaves(problem).items() if got[n].dtype is not t.dtype or got[n].shape != t.shape]
    odd += ["weights: an absent key has one"] if absent else []
    return found + [Report(False, INF, 0.0, n) for n in odd]


def _truth(problem: Drawn) -> dict[str, Tensor]:
    """Everything in float64; of a float64 problem in more digits first, or the plain formula might show no error."""
    if problem.query.dtype is not torch.float64:
        return _evaluated(problem, torch.float64, None)[0]
    plain_numbers = {n: problem.numbers.get(n) for n in ("scale", "softcap")}
    return extended.evaluate(_leaves(problem), problem.seen(), problem.upstream, **plain_numbers)


def check(seed: int | random.Random, backend: str, largest: int = 40) -> float:
    """Draw a problem and check it; AssertionError says what is wrong. Returns the largest error over what is allowed.

    The error of a few numbers is luck, and here hundreds of thousands of them are compared. So what breaks the rule is
    drawn again, twice, with other numbers, and is a fault where it errs beyond `LUCK` times what the three allow.
    """
    chance = random.Random(seed) if isinstance(seed, int) else seed
    state, worst = chance.getstate(), dict[str, tuple[float, float]]()
    for again in range(3):
        chance.setstate(state)
        problem = draw(chance, largest, again)
        found = reports(problem, backend)
        if not worst and all(report.ok for report in found):
            return max(r.error / r.allowed if r.error else 0.0 for r in found)
        for report in found:
            error, allowed = worst.get(report.what, (0.0, 0.0))
            worst[report.what] = max(error, report.error), max(allowed, report.allowed)
    wrong = [f"{n}: error {e:.3g}, allowed {a:.3g}" for n, (e, a) in worst.items() if not e <= LUCK * a]
    assert not wrong, f"{problem}: {'; '.join(wrong)}"
    return max(e / a if e else 0.0 for e, a in worst.values())


def brute_agrees(problem: Drawn) -> bool:
    """Whether the two oracles, row by row and dense, say the same: neither knows the other."""
    rows = brute(problem.query, problem.key, problem.value, visible=problem.visible, **problem.numbers)
    dense = _evaluated(problem, torch.float64, None)[0]
    pairs = [(dense["weights"], rows.weights), (dense["lse"], rows.lse), (dense["output"], rows.output)]
    same = [torch.allclose(a.reshape(b.shape), b, rtol=1e-9, atol=1e-12) for a, b in pairs]
    return all(same) and torch.equal(problem.seen().reshape(rows.seen.shape), rows.seen)


def _leaves(problem: Drawn) -> dict[str, Tensor]:
    found = {"query": problem.query, "key": problem.key, "value": problem.value}
    return found | {n: t for n, t in problem.numbers.items() if isinstance(t, Tensor)}


def gradients(problem: Drawn, backend: str) -> dict[str, Tensor]:
    """kizuki's gradients of every tensor of the problem."""
    leaves = {n: t.detach().requires_grad_() for n, t in _leaves(problem).items()}
    output = kizuki.attention(**leaves, **(problem.rules | _plain_numbers(problem)), backend=backend)
    made = torch.autograd.grad(output, list(leaves.values()), problem.upstream)
    return dict(zip(leaves, made, strict=True))


def _plain_numbers(problem: Drawn) -> dict[str, Any]:
    return {n: x for n, x in problem.numbers.items() if not isinstance(x, Tensor)}


def _evaluated(
    problem: Drawn, dtype: torch.dtype, order: Tensor | None, scaled: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The plain formula in `dtype` with torch's own derivatives of it, and with the derivatives that kernels use.

    The second takes dS = P ∘ (dO Vᵀ − Σ dO∘O) from the output (Dao et al. 2022): where the two terms cancel, as for a
    row of one key, their rounding stays, and softmax's own formula has none of it.
    """
    leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in _leaves(problem).items()}
    numbers, operands = _plain_numbers(problem), dict(leaves)
    if scaled:  # half of the world multiplies the query by it and half the scores
        operands["query"] = leaves["query"] * numbers.get("scale", problem.query.shape[-1] ** -0.5)
        numbers["scale"] = 1.0
    weights, lse, output = plain(**operands, visible=problem.visible, dtype=dtype, order=order, **numbers)
    up = problem.upstream.to(dtype)
    made = torch.autograd.grad(output, list(leaves.values()), up)
    first = {"weights": weights, "lse": lse, "output": output} | dict(zip(leaves, made, strict=True))
    first = {n: t.detach() for n, t in first.items()}
    return first, first if dtype is torch.float64 and order is None else first | _by_delta(
        problem, leaves, first
    )


def _by_delta(problem: Drawn, leaves: dict[str, Tensor], first: dict[str, Tensor]) -> dict[str, Tensor]:
    seen, heads, dtype = problem.seen(), problem.query.shape[-3], first["output"].dtype
    used = seen.any(-2)[..., None]
    k, v = (
        torch.where(used, t.repeat_interleave(heads // t.shape[-3], -3), 0.0)
        for t in (leaves["key"], leaves["value"])
    )
    scores = (
        leaves["query"] @ k.transpose(-1, -2) * problem.numbers.get("scale", problem.query.shape[-1] ** -0.5)
    )
    cap = problem.numbers.get("softcap")
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    if "bias" in leaves:
        scores = scores + torch.where(leaves["bias"] == -INF, 0.0, leaves["bias"])
    up = problem.upstream.to(dtype)
    products = up * first["output"]
    # Another order of this sum would move it by about one unit in the last place of its terms taken absolutely.
    delta = products.sum(-1, keepdim=True) + torch.finfo(dtype).eps * products.abs().sum(-1, keepdim=True)
    inner = torch.where(seen, first["weights"] * (up @ v.detach().transpose(-1, -2) - delta), 0.0)
    names = [n for n in ("query", "key", "bias") if n in leaves]
    found = dict(zip(names, torch.autograd.grad(scores, [leaves[n] for n in names], inner), strict=True))
    if "sinks" in leaves:
        share = torch.where(seen.any(-1), torch.exp(leaves["sinks"].detach()[:, None] - first["lse"]), 0.0)
        gone = -(share * delta[..., 0])
        found["sinks"] = gone.sum([axis for axis in range(gone.dim()) if axis != gone.dim() - 2])
    return found
