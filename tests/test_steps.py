"""Do the steps to a weight lead to that weight, and are they the numbers of the founding articles?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import BACKENDS, INF, brute, plains, randn
from tolerance import assert_accurate

import kizuki
from kizuki import masks

F64 = torch.float64


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64], ids=str)
def test_each_step_follows_from_the_one_before(dtype: torch.dtype, backend: str) -> None:
    q, k = randn(2, 4, 5, 8, dtype=dtype), randn(2, 2, 9, 8, seed=1, dtype=dtype)
    bias = randn(4, 1, 9, seed=2).masked_fill(torch.arange(9) == 7, -INF)
    sinks, seen = randn(4, seed=3, dtype=dtype), torch.arange(9) != 3
    options: dict[str, Any] = {"scale": 0.3, "softcap": 2.0, "bias": bias, "sinks": sinks}
    A = kizuki.attend(q, k, mask=seen, backend=backend, **options)
    truth = brute(q, k, visible=seen.expand(5, 9), **options)
    weights, lse, _ = plains(q, k, visible=seen.expand(5, 9), **options)
    for i, j in ((0, 0), (4, 8), (2, 3), (1, 7), (-1, -5)):
        made = A.steps(query=i, key=j)
        assert torch.equal(made.query, q[:, :, i].to(made.query.dtype))
        assert torch.equal(made.key, k[:, :, j].repeat_interleave(2, 1).to(made.key.dtype))
        assert torch.equal(made.products, made.query * made.key)
        assert torch.equal(made.dot, made.products.sum(-1))
        assert torch.equal(made.scaled, 0.3 * made.dot)
        assert made.capped is not None
        assert made.bias is not None
        assert torch.equal(made.visible, torch.full((2, 4), j not in (3, 7)))
        assert torch.equal(made.score[made.visible], (made.capped + made.bias)[made.visible])
        assert bool((made.score[~made.visible] == -INF).all())
        assert_accurate(made.weight, truth.weights[:, :, i, j], [w[:, :, i, j] for w in weights])
        assert_accurate(made.lse, truth.lse[:, :, i], [x[:, :, i] for x in lse])


def test_the_numbers_of_the_articles() -> None:
    q, k = torch.tensor([[1.0, 0.0]]), torch.eye(2)
    for scale, want in ((1.0, (0.7311, 0.2689)), (None, (0.6698, 0.3302))):
        A = kizuki.attend(q, k, scale=scale)
        assert [round(A.steps(0, j).weight.item(), 4) for j in range(2)] == list(want)
    for d in (4, 512):
        assert kizuki.attend(torch.ones(1, d), torch.ones(1, d)).steps(0, 0).dot.item() == d
    x = torch.zeros(2, 512, dtype=F64)
    x[0], q = 1.0, torch.ones(1, 512, dtype=F64)
    made = [kizuki.attend(q, x).steps(0, j) for j in range(2)]
    assert round(made[0].scaled.item(), 3) == 22.627
    assert f"{made[1].weight.item():.3g}" == "1.49e-10"
    assert [kizuki.attend(q.float(), x.float(), scale=1.0).steps(0, j).weight.item() for j in range(2)] == [
        1,
        0,
    ]


def test_functions_and_causal_rows() -> None:
    x = randn(1, 2, 6, 4)
    A = kizuki.attend(x, x, causal=True, score=lambda s, b, h, i, j: s - 0.5 * (i - j))
    made = A.steps(4, 1)
    assert made.bent is not None
    assert torch.allclose(made.bent, made.scaled - 1.5)
    assert torch.allclose(made.weight, A[..., 4, 1], rtol=1e-6, atol=0)
    later = A.steps(1, 4)
    assert not later.visible.any()
    assert not later.weight.any()
    empty = kizuki.attend(x, x, mask=masks.lengths(key=0)).steps(2, 2)
    assert not empty.weight.any()
    assert bool((empty.lse == -INF).all())


@pytest.mark.parametrize(("i", "j", "words"), [(6, 0, ["query", "6", "-6 … 5"]), (0, 1.0, ["key", "1.0"])])
def test_places_out_of_range_are_one_line(i: Any, j: Any, words: list[str]) -> None:
    x = randn(1, 2, 6, 4)
    with pytest.raises(kizuki.OptionError) as caught:
        kizuki.attend(x, x).steps(i, j)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
