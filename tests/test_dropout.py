"""Does dropout drop the share it says, the same weights everywhere, and store no mask?"""

from __future__ import annotations

import pytest
import torch

import kizuki
from kizuki import masks

BACKENDS = ("cpu", "portable")


def kept(p: float, backend: str, queries: int = 300, keys: int = 300, heads: int = 3) -> torch.Tensor:
    """Which weights stay: uniform weights times the unit matrix, `[1, heads, queries, keys]`."""
    q = torch.zeros(1, heads, queries, 8)
    k, eye = torch.zeros(1, heads, keys, 8), torch.eye(keys).expand(1, heads, -1, -1)
    torch.manual_seed(11)
    return kizuki.attention(q, k, eye, dropout=p, backend=backend) * keys


def test_the_share_the_factor_and_the_independence() -> None:
    p = 0.3
    mask = kept(p, "cpu")
    values = mask.unique()
    assert len(values) == 2
    assert torch.allclose(values, torch.tensor([0.0, 1 / (1 - p)]), atol=1e-4)
    on = (mask > 0).double()
    share, count = on.mean(), on.numel()
    sigma = (p * (1 - p) / count) ** 0.5
    assert abs(share - (1 - p)) < 5 * sigma
    for shift in ((0, 1), (1, 0), (1, 1), (0, 8), (0, 128)):
        other = torch.roll(on, shift, (-2, -1))
        together = ((on - share) * (other - share)).mean() / (p * (1 - p))
        assert abs(together) < 5 / count**0.5, shift
    between = ((on[:, 0] - share) * (on[:, 1] - share)).mean() / (p * (1 - p))
    assert abs(between) < 5 / (count / 3) ** 0.5, "heads drop the same weights"
    assert on.mean(-1).std() < 1.3 * (p * (1 - p) / 300) ** 0.5, "rows drop more or less than their share"


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_both_backends_drop_the_same_weights(p: float) -> None:
    one, other = (kept(p, backend) > 0 for backend in BACKENDS)
    assert torch.equal(one, other)
    few = kept(p, "cpu", queries=1) > 0
    assert torch.equal(few, one[:, :, :1]), "the decoder drops others than the forward kernel"


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_backward_drop_the_same_weights(backend: str) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def run(*t: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return kizuki.attention(*t, dropout=0.4, causal=True, backend=backend)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ends_and_the_seed(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind(0)
    assert torch.equal(
        kizuki.attention(q, k, v, dropout=0.0, backend=backend), kizuki.attention(q, k, v, backend=backend)
    )
    assert not kizuki.attention(q, k, v, dropout=1.0, backend=backend).any()
    generator = torch.Generator().manual_seed(5)
    first = kizuki.attention(q, k, v, dropout=0.5, generator=generator, backend=backend)
    second = kizuki.attention(q, k, v, dropout=0.5, generator=generator, backend=backend)
    again = kizuki.attention(q, k, v, dropout=0.5, generator=generator.manual_seed(5), backend=backend)
    assert torch.equal(first, again)
    assert not torch.equal(first, second), "two calls drop the same weights"


def test_a_mean_over_many_seeds_is_the_output_without_dropout() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 32, 8).unbind(0)
    want = kizuki.attention(q, k, v, mask=masks.causal())
    runs = torch.stack([kizuki.attention(q, k, v, causal=True, dropout=0.2) for _ in range(600)])
    assert ((runs.mean(0) - want).abs() < 5 * runs.std(0) / 600**0.5 + 1e-6).all()


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan"), "a", None])
def test_a_wrong_share_is_refused_in_one_line(p: object) -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises((ValueError, TypeError), match="dropout") as caught:
        kizuki.attention(q, q, q, dropout=p)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_readings_have_no_dropout(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind(0)
    what = kizuki.Observe(entropy=True, topk=3, pool=(4, 4))
    torch.manual_seed(1)
    output, seen = kizuki.attention(q, k, v, dropout=0.5, observe=what, backend=backend)
    torch.manual_seed(1)
    assert torch.equal(output, kizuki.attention(q, k, v, dropout=0.5, backend=backend))
    want = kizuki.attend(q, k, backend=backend).observe(what)
    assert torch.equal(seen.entropy, want.entropy)
    assert torch.equal(seen.pool, want.pool)
    assert all(torch.equal(a, b) for a, b in zip(seen.topk, want.topk, strict=True))
