"""The helper of accuracy is itself given wrong results: it must refuse each of them."""

from __future__ import annotations

import pytest
import torch
from oracle import BACKENDS, INF, NAN, brute, causal, plain, randn
from tolerance import assert_accurate, assert_agrees

import kizuki
from kizuki.accuracy import compare

Q, K, V = randn(2, 3, 7, 8), randn(2, 3, 7, 8, seed=1), randn(2, 3, 7, 8, seed=2)


def good() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    visible = causal(7, 7)
    return (
        kizuki.attention(Q, K, V, causal=True, backend="portable"),
        brute(Q, K, V, visible=visible).output,
        plain(Q, K, V, visible=visible)[2],
    )


def test_a_right_result_passes() -> None:
    assert_accurate(*good())


@pytest.mark.parametrize("wrong", ["one entry", "a NaN", "an Inf", "a scale", "no mask", "float16 inside"])
def test_a_wrong_result_is_refused(wrong: str) -> None:
    got, truth, formula = good()
    if wrong == "one entry":
        got[1, 2, 3, 4] += 3e-6
    elif wrong == "a NaN":
        got[0, 0, 0, 0] = NAN
    elif wrong == "an Inf":
        got[0, 0, 0, 0] = INF
    elif wrong == "a scale":
        got *= 1.00001
    elif wrong == "no mask":
        got = kizuki.attention(Q, K, V, backend="portable")
    else:
        got = kizuki.attention(*(x.half() for x in (Q, K, V)), causal=True, backend="portable").float()
    with pytest.raises(AssertionError, match="WRONG"):
        assert_accurate(got, truth, formula)


@pytest.mark.parametrize(
    ("got", "truth"), [(0.0, NAN), (NAN, 0.0), (INF, -INF), (-INF, NAN), (1.0, INF), (-INF, 1.0)]
)
def test_patterns_of_nan_and_inf_must_be_the_same(got: float, truth: float) -> None:
    ones = torch.ones(3, dtype=torch.float64)
    right, given = ones.clone(), ones.float()
    right[1], given[1] = truth, got
    assert not compare(given, right, right.float()).ok
    given[1] = truth
    assert compare(given, right, right.float()).ok


def test_an_overflowing_yardstick_is_no_yardstick() -> None:
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="overflows"):
        compare(one.float(), one, torch.tensor([INF]))
    with pytest.raises(kizuki.ShapeError, match="truth has shape"):
        compare(one.float(), torch.ones(2), one.float())


def test_the_oracle_agrees_with_torch() -> None:
    truth = brute(Q, K, V, visible=causal(7, 7))
    want = torch.nn.functional.scaled_dot_product_attention(
        Q.double(), K.double(), V.double(), is_causal=True
    )
    assert (truth.output - want).abs().max() < 1e-14
    assert torch.allclose(truth.weights.sum(-1), torch.ones(2, 3, 7, dtype=torch.float64))


def test_a_wrong_rule_is_seen_through_the_whole_helper() -> None:
    with pytest.raises(AssertionError):
        assert_agrees(Q, K, V, backend="portable", visible=causal(7, 7), options={"window": (6, 1)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_check_says_how_far_apart(backend: str) -> None:
    report = kizuki.check(Q, K, V, causal=True, backend=backend)
    assert report.ok
    assert 0 < report.allowed < 1e-5
    assert report.error <= report.allowed
    line = str(report)
    assert "\n" not in line
    assert backend in line
    assert "ok" in line


def test_check_sees_a_broken_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from kizuki import portable

    right = portable.forward
    monkeypatch.setattr(portable, "forward", lambda p, v: (right(p, v)[0] * 1.00001, right(p, v)[1]))
    report = kizuki.check(Q, K, V, backend="portable")
    assert not report.ok
    assert report.error > report.allowed
    assert "WRONG" in str(report)
    monkeypatch.setattr(portable, "forward", lambda p, v: (right(p, v)[0], right(p, v)[1] + 0.6931))
    assert "lse: WRONG" in str(kizuki.check(Q, K, V, backend="portable"))


def test_check_takes_every_argument_and_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        q, k, v = (x.to(dtype) for x in (Q, K, V))
        report = kizuki.check(
            q,
            k,
            v,
            window=(3, 1),
            bias=randn(3, 1, 7),
            scale=0.3,
            softcap=5.0,
            sinks=torch.zeros(3),
            backend="portable",
        )
        assert report.ok, str(report)
    big = torch.full((1, 1, 2, 64), 500.0, dtype=torch.float16)
    assert kizuki.check(
        big, big * 0.7, big, backend="portable"
    ).ok  # the plain float16 formula overflows here
    with pytest.raises(kizuki.SizeError, match="above"):
        kizuki.check(torch.ones(20_000, 1), torch.ones(20_000, 1), torch.ones(20_000, 1))
