"""Calls like one before take a short way: do they give the same bits, and does nothing of the first call remain?"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from oracle import randn
from torch import Tensor

import kizuki
from kizuki.cpu import again
from kizuki.models.hfmask import Known

KINDS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = {
    "one token": ((1, 1, 1, 8), (1, 1, 1, 8), 8, {}),
    "decoding": ((2, 6, 1, 16), (2, 2, 300, 16), 24, {"scale": 0.3}),
    "causal": ((2, 4, 40, 16), (2, 2, 40, 16), 8, {"causal": True, "softcap": 3.0}),
    "window": ((1, 2, 200, 16), (1, 2, 200, 16), 16, {"window": (30, 0)}),
    "no batch": ((3, 30, 8), (3, 50, 8), 8, {"backend": "cpu"}),
    "several batches": ((2, 3, 2, 9, 8), (2, 3, 1, 9, 8), 8, {}),
    "many planes": ((40, 3, 5, 8), (40, 3, 7, 8), 8, {}),
}


def operands(name: str, dtype: torch.dtype, seed: int) -> list[Tensor]:
    query, key, width, _ = KINDS[name]
    shapes = (query, key, (*key[:-1], width))
    return [randn(*shape, seed=seed + at, dtype=dtype) for at, shape in enumerate(shapes)]


def known(like: Any) -> bool:
    return like is not None and like in again._kinds()


@pytest.fixture(autouse=True)
def forgotten() -> None:
    again._mine.__dict__.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_the_short_way_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    options = KINDS[name][3]
    asked = {"causal": False, "window": None, "scale": None, "softcap": None, "backend": "auto"} | options
    for seed in range(4):
        q, k, v = operands(name, dtype, 10 * seed)
        again_now = known(again.kind(q, k, v, *asked.values()))
        assert again_now == (seed >= 2), "the second call of a kind is the one that is kept"
        got = kizuki.attention(q, k, v, **options)
        want = kizuki.attend(q, k, **options) @ v
        assert torch.equal(got, want)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)


def test_other_strides_are_another_kind() -> None:
    for seed in range(3):
        q, k, v = operands("causal", torch.float32, seed)
        want = kizuki.attend(q, k) @ v
        assert torch.equal(kizuki.attention(q, k, v), want)
        turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        assert torch.equal(kizuki.attention(*turned), want)
        spread = torch.zeros(*v.shape[:-1], 2 * v.shape[-1])[..., ::2].copy_(v)
        assert torch.equal(kizuki.attention(q, k, spread), want)
        negative = torch.complex(v, -v).conj().imag  # the same numbers, their sign a bit beside them
        assert torch.equal(kizuki.attention(q, k, negative), want)


def test_other_ranks_are_described_each_time() -> None:
    q, k, v = (randn(*shape, seed=at) for at, shape in enumerate(((4, 5, 8), (7, 8), (7, 6))))
    want = kizuki.attend(q, k) @ v
    for _ in range(3):
        assert torch.equal(kizuki.attention(q, k, v), want)
        assert kizuki.attention(q[0], k, v).shape == (5, 6)
    assert not again._kinds()


def test_what_a_call_refused_is_refused_for_ever() -> None:
    q, k, v = operands("causal", torch.float32, 0)
    for _ in range(3):
        kizuki.attention(q, k, v)
        with pytest.raises(kizuki.ShapeError, match="value has 39 keys"):
            kizuki.attention(q, k, v[:, :, :39])
        with pytest.raises(kizuki.KizukiTypeError, match="dtype"):
            kizuki.attention(q, k, v.double())
        with pytest.raises(kizuki.OptionError, match="scale"):
            kizuki.attention(q, k, v, scale=float("nan"))
        with pytest.raises(kizuki.OptionError, match="dropout"):
            kizuki.attention(q, k, v, dropout=-0.5)


def test_gradients_and_transforms_go_the_long_way() -> None:
    q, k, v = operands("causal", torch.float32, 0)
    for _ in range(3):
        kizuki.attention(q, k, v)
    leaf = q.clone().requires_grad_()
    output = kizuki.attention(leaf, k, v)
    assert output.grad_fn is not None
    output.sum().backward()
    assert leaf.grad is not None
    assert torch.func.vmap(kizuki.attention)(q[None], k[None], v[None]).shape == (1, *output.shape)
    tangent = torch.func.jvp(lambda x: kizuki.attention(x, k, v), (q,), (q,))[1]
    assert tangent.abs().sum() > 0
    with torch.no_grad():
        assert kizuki.attention(leaf, k, v).grad_fn is None


def test_a_mask_that_never_changes_is_known_by_its_sign() -> None:
    hidden = torch.ones(2, 50, dtype=torch.bool)
    hidden[1, :20] = False
    calls = []
    for _ in range(2):
        mask = Known(kizuki.masks.keys(hidden) & kizuki.masks.causal("lower_right"))
        for seed in range(4):
            q, k, v = (randn(2, 4, s, 16, seed=4 * seed + at) for at, s in enumerate((3, 50, 50)))
            like = again.kind(q, k, v, False, None, None, None, "auto", mask.sign)
            assert known(like) == (seed >= 2)
            calls.append(like)
            assert torch.equal(kizuki.attention(q, k, v, mask=mask), kizuki.attend(q, k, mask=mask.rule) @ v)
        hidden = hidden.flip(0)
    assert len(set(calls)) == 2
    forgotten_mask = weakref.ref(mask)
    del mask
    gc.collect()
    assert forgotten_mask() is None, "the kind keeps a sign, not the mask"


def test_no_operand_is_kept() -> None:
    alive = []
    for seed in range(3):
        q, k, v = operands("decoding", torch.float32, seed)
        alive += [weakref.ref(t) for t in (q, k, v, kizuki.attention(q, k, v))]
        del q, k, v
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


def test_few_kinds_are_kept_and_no_large_one() -> None:
    for n in range(1, again.KEPT + 20):
        x = randn(1, 1, n, 8)
        for _ in range(3):
            kizuki.attention(x, x, x)
    assert len(again._kinds()) == again.KEPT
    x = randn(1, 1, 20_000, 4)
    for _ in range(3):
        kizuki.attention(x, x, x, window=(3, 0))
    assert not any(20_000 in kind[0] for kind in again._kinds())


def test_threads_have_their_own() -> None:
    sets = [operands("decoding", torch.float32, seed) for seed in range(4)]
    want = [kizuki.attend(q, k) @ v for q, k, v in sets]
    wrong: list[int] = []

    def work(at: int) -> None:
        for _ in range(200):
            if not torch.equal(kizuki.attention(*sets[at]), want[at]):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
