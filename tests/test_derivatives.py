"""Derivatives beyond the first, forward mode, a learned scale, and torch.func: `differentiable.py` and its seams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import BACKENDS, INF, NAN, causal, orders, plain, randn, window
from tolerance import assert_accurate
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import kizuki
from kizuki import library, masks, rules

F64 = torch.float64


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


ORDERS: dict[str, dict[str, Any]] = {
    "bare": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 0.8},
    "window or key": {"mask": masks.window(1, 1) | masks.keys(torch.tensor([True, False, False, False]))},
    "lengths": {"mask": masks.lengths(query=2, key=3)},
    "score": {"score": lambda s, b, h, i, j: torch.where(j <= i + 1, s * s * 0.5 + 0.1 * (i - j), -INF)},
    "dropout": {"dropout": 0.4},
}


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_and_mode(name: str) -> None:
    """PT#116350: reverse, forward, reverse over reverse and forward over reverse, for all six inputs at once."""
    inputs = leaves(*(randn(1, h, 4, 3, seed=s, dtype=F64) for s, h in enumerate((2, 1, 2))))
    inputs += leaves(
        randn(2, 1, 4, seed=7, dtype=F64), randn(2, seed=8, dtype=F64), torch.tensor(0.7, dtype=F64)
    )

    def run(*t: Tensor) -> Tensor:
        options = dict(ORDERS[name])
        if "dropout" in options:
            options["generator"] = torch.Generator().manual_seed(3)
        named = {"bias": t[3], "sinks": t[4], "scale": t[5]}
        return kizuki.attention(*t[:3], **named, **options, backend="portable")

    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)
    forward = {"check_fwd_over_rev": True, "check_rev_over_rev": False, "check_undefined_grad": False}
    assert torch.autograd.gradgradcheck(run, inputs, **forward, fast_mode=True)


def second(run: Callable[..., Tensor], made: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The gradients of a gradient penalty."""
    inputs = [t.to(dtype).requires_grad_() for t in made]
    first = torch.autograd.grad(run(*inputs).sin().sum(), inputs, create_graph=True)
    return torch.autograd.grad(sum(g.pow(2).sum() for g in first), inputs)


def assert_second(got: tuple[Tensor, ...], made: list[Tensor], **options: Any) -> None:
    """Second gradients in float32 against float64 autograd of the plain formula, by the rule of accuracy."""

    def formula(order: Tensor | None) -> Callable[..., Tensor]:
        return lambda *t: plain(*t, order=order, **options)[2]

    truth = second(formula(None), made, F64)
    same = [second(formula(order), made, torch.float32) for order in orders(made[1].shape[-2])]
    for at, each in enumerate(got):
        assert_accurate(each, truth[at], [one[at] for one in same])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_gradient_in_float32(backend: str) -> None:
    """Through the backend's own first gradients."""
    made = [randn(2, h, n, 8, seed=s) for s, (h, n) in enumerate(((4, 13), (2, 17), (2, 17)))]
    rule = masks.causal("lower_right")
    got = second(lambda *t: kizuki.attention(*t, mask=rule, backend=backend), made, torch.float32)
    assert_second(got, made, visible=causal(13, 17, "lower_right"))


def test_second_gradients_hold_a_block_and_never_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from kizuki import differentiable

    made = [randn(1, 2, 29, 4, seed=s) for s in range(3)]
    sizes: list[int] = []
    inside = differentiable._plain

    def watched(problem: Any, block: Any, *rest: Any) -> Tensor:
        sizes.append((block.rows.stop - block.rows.start) * (block.cols.stop - block.cols.start))
        return inside(problem, block, *rest)

    monkeypatch.setattr(differentiable, "_plain", watched)
    monkeypatch.setattr(differentiable, "BLOCK", 2 * 29 * 4)
    got = second(lambda *t: kizuki.attention(*t, window=(3, 0), backend="portable"), made, torch.float32)
    assert max(sizes) == 4 * (4 + 3)  # four queries, and the keys that their windows show
    assert_second(got, made, visible=window(29, 29, 3, 0))


def test_nan_behind_a_mask_touches_no_second_gradient() -> None:
    made = [randn(1, 2, 7, 4, seed=s) for s in range(3)]
    seen = torch.rand(7, 7, generator=torch.Generator().manual_seed(1)) < 0.6
    seen[:, 1], seen[4] = False, False
    for bad in (NAN, INF):
        q, k, v = (t.clone() for t in made)
        k[:, :, 1], v[:, :, 1], q[:, :, 4] = bad, -bad, bad
        got = second(lambda *t: kizuki.attention(*t, mask=seen, backend="portable"), [q, k, v], torch.float32)
        assert_second(got, made, visible=seen)


def test_a_score_that_only_compiles_has_no_second_derivative() -> None:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if j <= i:
            return s * 2.0
        return s

    q, k, v = leaves(*(randn(1, 1, 3, 2, seed=s) for s in range(3)))
    (first,) = torch.autograd.grad(kizuki.attention(q, k, v, score=score).sum(), q, create_graph=True)
    with pytest.raises(kizuki.OptionError, match=r"score .* cannot be differentiated twice"):
        first.sum().backward()


# -- a learned scale ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [0.7, -0.3, 0.0, 1e-25])
def test_a_learned_scale(number: float, backend: str) -> None:
    """Σ q∘dq / scale; at 0, where that is 0/0, from the formula."""
    q, k, v = randn(2, 4, 7, 8), randn(2, 2, 9, 8, seed=1), randn(2, 2, 9, 5, seed=2)
    up = randn(2, 4, 7, 5, seed=3)

    def slope(run: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        scale = torch.tensor(number, dtype=dtype, requires_grad=True)
        return torch.autograd.grad(run(*(t.to(dtype) for t in (q, k, v)), scale), scale, up.to(dtype))[0]

    def formula(order: Tensor | None) -> Callable[..., Tensor]:
        return lambda q, k, v, scale: plain(q, k, v, scale=scale, softcap=5.0, order=order)[2]

    def ours(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return kizuki.attention(q, k, v, scale=scale, softcap=5.0, backend=backend)

    got = slope(ours, torch.float32)
    assert got.shape == ()
    assert_accurate(got, slope(formula(None), F64), [slope(formula(o), torch.float32) for o in orders(9)])


def test_a_scale_that_changes_under_a_held_matrix_is_refused() -> None:
    q, k, v = (randn(1, 1, 3, 2, seed=s) for s in range(3))
    scale = torch.tensor(0.5, requires_grad=True)
    matrix = kizuki.attend(q, k, scale=scale)
    with torch.no_grad():
        scale.mul_(2)
    with pytest.raises(kizuki.OptionError, match=r"scale was 0.5 when A was made and is 1.0 now"):
        matrix @ v


def test_scales_of_another_kind_are_refused() -> None:
    x = torch.ones(2, 2)
    for scale in (torch.tensor([0.5]), torch.tensor(2)):
        with pytest.raises(kizuki.KizukiTypeError, match="scale is"):
            kizuki.attend(x, x, scale=scale)
    with pytest.raises(kizuki.OptionError, match="must be finite"):
        kizuki.attend(x, x, scale=torch.tensor(NAN))


# -- torch.func --------------------------------------------------------------------------------------


def ours(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: Any = None, m: Any = None
) -> Tensor:
    return kizuki.attention(q, k, v, bias=bias, scale=scale, mask=m, causal=m is None, backend="portable")


def formula(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: Any = None, m: Any = None
) -> Tensor:
    """The plain formula, transformable: no value is looked at."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if m is None else m
    return torch.softmax(torch.where(seen, scores, -INF), -1) @ v


def narrow(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`run` in float32 on float64 arguments."""
    return lambda *t: run(*(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in t))


def assert_transforms(way: Callable[[Callable[..., Tensor]], Any]) -> None:
    """`way` of ours in float64 is nearer to `way` of the formula than that is in float32.

    How well one backward rounds is asked elsewhere; here, whether a transform reaches it as it should.
    """
    got, truth, same = (torch.utils._pytree.tree_leaves(way(run)) for run in (ours, formula, narrow(formula)))
    assert len(got) == len(truth) > 0
    for at, each in enumerate(got):
        assert each.shape == truth[at].shape
        assert_accurate(each, truth[at], same[at].double())


Q, K, V, BIAS = (
    randn(*s, seed=n, dtype=F64) for n, s in enumerate(((2, 7, 4), (2, 7, 4), (2, 7, 4), (7, 7)))
)
SCALE = torch.tensor(0.7, dtype=F64)
MANY = [
    randn(*s, seed=9 + n, dtype=F64)
    for n, s in enumerate(((5, 2, 7, 4), (2, 5, 7, 4), (2, 7, 5, 4), (7, 7, 5)))
]
ALL = (0, 1, 2, 3)

WAYS: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "grad": lambda f: grad(lambda *t: f(*t).pow(2).sum(), argnums=ALL)(Q, K, V, BIAS),
    "vjp": lambda f: vjp(f, Q, K, V, BIAS)[1](torch.ones(2, 7, 4, dtype=F64)),
    "jvp": lambda f: jvp(lambda q, b: f(q, K, V, b), (Q, BIAS), (K, BIAS + 1)),
    "jacrev": lambda f: jacrev(lambda *t: f(Q, *t), argnums=(0, 1, 2))(K, V, BIAS),
    "jacfwd": lambda f: jacfwd(f)(Q, K, V, BIAS),
    "hessian": lambda f: hessian(lambda q: f(q, K[:1, :2], V[:1, :2]).pow(3).sum())(Q[:1, :2]),
    "third": lambda f: jacrev(jacrev(jacrev(lambda q: f(q, K[:1, :1], V[:1, :1]).pow(3).sum())))(Q[:1, :1]),
    "scale": lambda f: hessian(lambda s: f(Q, K, V, BIAS, s).pow(2).sum())(SCALE),
    "vmap of scale": lambda f: vmap(lambda s: f(Q, K, V, BIAS, s))(torch.stack([SCALE, 2 * SCALE])),
    "vmap of vmap": lambda f: vmap(lambda k: vmap(lambda q: f(q, k, V, BIAS))(MANY[0]), in_dims=1)(MANY[1]),
    "vmap of grad of grad": lambda f: vmap(
        grad(lambda q: grad(lambda q: f(q, K, V).pow(2).sum())(q).pow(2).sum())
    )(MANY[0][:2]),
}


@pytest.mark.parametrize("name", WAYS)
def test_transforms(name: str) -> None:
    assert_transforms(WAYS[name])


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (3,), (0, 2), (0, 1, 2, 3)], ids=str)
def test_vmap_over_any_operand(which: tuple[int, ...]) -> None:
    """PT#98164: from any axis, with its gradients inside and outside."""
    args = [
        many if at in which else one for at, (many, one) in enumerate(zip(MANY, (Q, K, V, BIAS), strict=True))
    ]
    dims = tuple((0, 1, 2, 2)[at] if at in which else None for at in range(4))
    assert_transforms(lambda f: vmap(f, in_dims=dims)(*args))
    assert_transforms(lambda f: vmap(grad(lambda *t: f(*t).pow(2).sum(), argnums=ALL), in_dims=dims)(*args))
    assert_transforms(lambda f: grad(lambda *t: vmap(f, in_dims=dims)(*t).pow(2).sum(), argnums=ALL)(*args))


def test_vmap_over_a_dense_mask() -> None:
    seen = torch.rand(5, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.3
    seen[..., 0] = True
    assert_transforms(lambda f: vmap(lambda q, m: f(q, K, V, BIAS, None, m))(MANY[0], seen))
    assert_transforms(
        lambda f: vmap(grad(lambda q, m: f(q, K, V, None, None, m).pow(2).sum()))(MANY[0], seen)
    )
    assert_transforms(
        lambda f: vmap(lambda q, m: jvp(lambda q: f(q, K, V, None, None, m), (q,), (q,)))(MANY[0], seen)
    )


def test_vmap_over_rules_and_functions() -> None:
    """Each copy sees its own lengths and keys, and functions go on seeing the batch they were written for."""
    query, key = randn(3, 2, 2, 3, 4, dtype=F64), randn(2, 2, 3, 4, seed=1, dtype=F64)
    lengths = torch.tensor([[1, 2], [3, 0], [2, 2]])
    seen = randn(3, 2, 3, seed=2) > -0.5

    def run(q: Tensor, own: Tensor, keys: Tensor) -> Tensor:
        rule = masks.lengths(key=own) | masks.keys(keys) & masks.where(
            lambda b, h, i, j: (b + h + i + j) % 2 == 0
        )
        return kizuki.attention(
            q, key, key, mask=rule, score=lambda s, b, h, i, j: s * (b + 1.0), backend="portable"
        )

    one_by_one = torch.stack([run(*each) for each in zip(query, lengths, seen, strict=True)])
    assert torch.equal(vmap(run)(query, lengths, seen), one_by_one)
    with pytest.raises(kizuki.OptionError, match="lengths key spans"):
        vmap(run)(query, lengths + 5, seen)


def test_vmap_over_documents() -> None:
    """Each copy has its own; those that all share are one for a batch of two."""
    query, key = randn(3, 2, 2, 5, 4, dtype=F64), randn(2, 2, 5, 4, seed=1, dtype=F64)
    lengths = torch.tensor([[1, 2, 2], [3, 0, 2], [0, 5, 0]])

    def run(q: Tensor, own: Tensor) -> Tensor:
        rule = masks.documents(own) | ~masks.documents([2, 3]) & masks.causal()
        return kizuki.attention(q, key, key, mask=rule, backend="portable")

    want = torch.stack([run(*each) for each in zip(query, lengths, strict=True)])
    assert torch.equal(vmap(run)(query, lengths), want)
    assert torch.equal(vmap(run)(query, torch.cat([torch.zeros(3, 1).long(), lengths], 1)), want)
    for wrong, words in (
        (lengths - 1, "lengths holds -1"),
        (lengths + 5, "covers 20 queries but there are 5"),
    ):
        with pytest.raises(ValueError, match=words):
            vmap(run)(query, wrong)


def test_vmap_keeps_one_function_for_one_function() -> None:
    """A graph keeps the functions it holds, so a new wrapper for each call would be kept for ever."""
    query = randn(3, 1, 2, 5, 4)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * (b + 1)

    def run(q: Tensor) -> Tensor:
        rule = rules.encode(masks.where(odd), library.number_of)
        kept = library.number_of(score)
        options = list(rule.tensors), rule.text, list(rule.numbers), None, None, "portable", kept, 0.0, None
        return torch.ops.kizuki.attention(q, q, q, None, None, None, *options)[0]

    def odd(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (b + i + j) % 2 == 0

    first = vmap(run)(query)
    known = len(library._functions)
    for _ in range(3):
        assert torch.equal(vmap(run)(query), first)
    assert len(library._functions) == known


def test_vmap_drops_the_same_weights_in_every_copy() -> None:
    query, key = randn(3, 1, 2, 9, 4, dtype=F64), randn(1, 2, 9, 4, seed=1, dtype=F64)

    def run(q: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        return kizuki.attention(q, key, key, dropout=0.5, generator=generator, backend="portable")

    assert torch.equal(vmap(run, randomness="same")(query), torch.stack([run(q) for q in query]))
