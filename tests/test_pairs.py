"""bfloat16 in pairs, as processors with an instruction for it compute: tried here with multiply-adds in its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import INF, NAN, brute, plains, randn
from tolerance import assert_accurate, assert_agrees
from torch import Tensor

import kizuki
from kizuki import masks
from kizuki.cpu import call, launch
from kizuki.nn import KVCache

BF16 = torch.bfloat16
SHAPES = [  # batch, heads, kv_heads, queries, keys, head_dim, value_dim
    (2, 4, 2, 40, 40, 16, 24),
    (1, 2, 1, 133, 131, 33, 17),  # nothing even
    (1, 2, 2, 100, 1200, 64, 64),  # two splits
    (2, 2, 1, 3, 1, 1, 1),
]


@pytest.fixture(autouse=True)
def paired(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = launch.target

    def target(dtype: torch.dtype = torch.float32) -> Any:
        return replace(usual(dtype), dot="" if dtype is torch.float64 else "emulated")

    monkeypatch.setattr(launch, "target", target)


def operands(shape: tuple[int, ...], dtype: torch.dtype = BF16) -> list[Tensor]:
    batch, heads, kv_heads, queries, keys, dim, width = shape
    shapes = ((batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, width))
    return [randn(*each, seed=seed, dtype=dtype) for seed, each in enumerate(shapes)]


def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that run from now on."""
    names: list[str] = []
    usual = launch.kernel
    monkeypatch.setattr(
        launch, "kernel", lambda name, target: names.append(f"{name} {target.name}") or usual(name, target)
    )
    return names


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "scale": -0.3}, {"window": (7, 2)}], ids=str)
def test_accuracy(shape: tuple[int, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands(shape)
    if "window" in options:
        rule = masks.window(7, 2, align="lower_right")
        i, j = torch.arange(shape[3])[:, None] + shape[4] - shape[3], torch.arange(shape[4])
        seen = (j >= i - 7) & (j <= i + 2)
        assert_agrees(q, k, v, backend="cpu", visible=seen, options={"mask": rule})
        return
    names = used(monkeypatch)
    assert_agrees(q, k, v, backend="cpu", options=options)
    assert any("emulated" in name for name in names)


def test_only_bfloat16_goes_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.float16, torch.float64):
        q, k, v = operands(SHAPES[0], dtype)
        names = used(monkeypatch)
        kizuki.attention(q, k, v)
        assert names
        assert not any("emulated" in name for name in names)
    assert "pairs" in str(kizuki.attend(q.bfloat16(), k.bfloat16()).plan())


@pytest.mark.parametrize("keys", [1, 2, 15, 128, 129, 1025])
@pytest.mark.parametrize("option", ["bare", "window", "dense", "dropout"])
def test_the_decoder_gives_the_same_bits(keys: int, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands((2, 6, 2, 3, keys, 32, 40))
    options: dict[str, Any] = {
        "window": {"mask": masks.window(300, 0, align="lower_right")},
        "dense": {"mask": torch.rand(3, keys, generator=torch.Generator().manual_seed(0)) > 0.3},
    }.get(option, {})

    def run() -> Tensor:
        dropout = (
            {"dropout": 0.4, "generator": torch.Generator().manual_seed(3)} if option == "dropout" else {}
        )
        return kizuki.attention(q, k, v, backend="cpu", **options, **dropout)

    decoded = run()
    monkeypatch.setattr(call, "FEW_ROWS", 0)
    assert torch.equal(decoded, run())


@pytest.mark.parametrize("queries", [3, 50])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_seen_changes_nothing(queries: int, bad: float) -> None:
    q, k, v = operands((1, 2, 1, queries, 200, 32, 20))
    seen = torch.ones(queries, 200, dtype=torch.bool)
    seen[::2, 151] = False
    want = kizuki.attention(q, k, v, mask=seen)
    v[:, :, 151, 3:] = bad
    got = kizuki.attention(q, k, v, mask=seen)
    assert torch.equal(got[:, :, ::2], want[:, :, ::2])
    assert torch.equal(got[..., :3], want[..., :3])
    assert not got[:, :, 1::2, 3:].isfinite().any()
    k[:, :, 151] = bad
    assert torch.equal(kizuki.attention(q, k, v, mask=seen)[:, :, ::2], want[:, :, ::2])


def test_any_strides() -> None:
    q, k, v = operands(SHAPES[1])
    want = kizuki.attention(q, k, v)
    for spread in (
        lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda t: torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=BF16)[..., ::2].copy_(t),
        lambda t: torch.zeros(*t.shape[:-1], t.shape[-1] + 1, dtype=BF16)[..., 1:].copy_(t),
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    ):
        assert torch.equal(kizuki.attention(spread(q), spread(k), spread(v)), want)


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("page", [1, 3, 64])
def test_pages(page: int, queries: int) -> None:
    q, k, v = operands((1, 4, 2, queries, 300, 32, 32))
    cache = KVCache(1, 2, 32, page=page, pages=-(-300 // page), dtype=BF16)
    cache.append(k, v)
    want = kizuki.attention(q, k, v, mask=masks.causal("lower_right"))
    assert torch.equal(cache.attention(q), want)


def test_gradients_follow_from_the_output_of_pairs() -> None:
    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
        return torch.softmax(scores.masked_fill(hidden, -INF), -1) @ v

    def gradients(run: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(dtype).requires_grad_() for t in operands(SHAPES[0])]
        return torch.autograd.grad(run(*leaves).square().sum(), leaves)

    made = gradients(lambda *t: kizuki.attention(*t, causal=True), BF16)
    for got, truth, plain in zip(
        made, gradients(formula, torch.float64), gradients(formula, BF16), strict=True
    ):
        assert_accurate(got, truth, plain)


def test_readings_go_with_the_lse_of_pairs() -> None:
    """They compute the scores again, by multiply-adds."""
    q, k, _ = operands(SHAPES[2])
    weights, keys = kizuki.attend(q, k).topk(1200)
    truth, plain = brute(q, k).weights, plains(q, k)[0]
    assert_accurate(torch.zeros_like(weights).scatter(-1, keys, weights), truth, plain)
