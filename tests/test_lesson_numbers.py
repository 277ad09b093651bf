"""The lesson's arithmetic: are its numbers the articles', and the formula's?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kizuki
from kizuki.lesson import Material, exact, formula, shipped, spread
from kizuki.lesson.language import table
from kizuki.lesson.plane import plane


@pytest.fixture(scope="module")
def lesson() -> Material:
    return shipped()


# -- the articles' numbers ---------------------------------------------------------------------------

THREE = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1]], dtype=torch.float64)
VALUES = torch.tensor([[10.0, 0, 0, 0], [0, 10, 0, 0], [5, 5, 0, 0]], dtype=torch.float64)
FULL = [[0.422319, 0.155362, 0.422319], [0.155362, 0.422319, 0.422319], [0.211942, 0.211942, 0.576117]]
CAUSAL = [[1, 0, 0], [0.268941, 0.731059, 0], FULL[2]]
OUTPUT = [[6.334782, 3.665218, 0, 0], [3.665218, 6.334782, 0, 0], [5, 5, 0, 0]]
OUTPUT_CAUSAL = [[10, 0, 0, 0], [2.689414, 7.310586, 0, 0], [5, 5, 0, 0]]


@pytest.mark.parametrize(
    ("causal", "weights", "output"), [(False, FULL, OUTPUT), (True, CAUSAL, OUTPUT_CAUSAL)]
)
def test_three_tokens_of_the_walk_through(causal: bool, weights: Any, output: Any) -> None:
    A = kizuki.attend(THREE, THREE, scale=0.5, causal=causal)
    mine = exact.weights(THREE.numpy(), THREE.numpy(), 0.5, causal)
    for got in (A.dense().numpy(), mine):
        assert np.abs(got - weights).max() < 5.1e-7
    for got in ((A @ VALUES).numpy(), formula.mix(mine, VALUES.numpy())):
        assert np.abs(got - output).max() < 5.1e-7


def test_two_keys_and_ones() -> None:
    q, k = np.array([[1.0, 0.0]]), np.eye(2)
    for scale, want in ((1.0, [0.7311, 0.2689]), (2**-0.5, [0.6698, 0.3302])):
        assert np.abs(exact.weights(q, k, scale)[0] - want).max() < 5.1e-5
    for d in (4, 512):
        assert formula.dots(np.ones((1, d)), np.ones((1, d)))[0, 0] == d


def test_the_article_that_is_wrong_is_corrected_in_both_languages() -> None:
    score, weight = exact.large()
    assert [round(s, 3) for s in score.tolist()] == [22.627, 0]
    assert f"{weight[1]:.3g}" == "1.49e-10"
    assert 1 - weight[0] == pytest.approx(1.4867e-10, rel=1e-4)
    q = torch.ones(1, 512)
    k = torch.stack([torch.ones(512), torch.zeros(512)])
    assert kizuki.attend(q, k, scale=1.0)[0].tolist() == [1, 0]
    wrong = next(each for each in exact.examples() if each.key == "exact_wrong")
    assert dict(wrong.lines) == {
        "@scores": "[512, 0]",
        "@unscaled": "[1, 0]",
        "@scaled": "[22.627, 0]",
        "@weights": "[1 − 1.49e-10, 1.49e-10]",
        "@article": "[0.9895, 0.0105]",
    }
    assert "correction" in table("en")["exact_wrong"]
    assert "訂正" in table("ja")["exact_wrong"]


def test_a_mask_is_absence_and_not_a_large_number() -> None:
    made = exact.masked_with_a_number()
    assert np.isneginf(made["half"]).all()
    assert np.isnan(made["half_weights"]).all()
    scores = torch.tensor([3.0, -1.0, 0.5, 2.0])
    everything = torch.ones(4, dtype=torch.bool)
    filled = scores.masked_fill(everything, -1e9).softmax(-1)
    assert filled.tolist() == made["weights"].tolist() == [0.25] * 4
    assert (scores.half() + -1e9).isneginf().all()
    hidden = kizuki.attend(torch.ones(1, 4), torch.ones(4, 4), mask=~everything[None])
    assert hidden.dense().tolist() == [[0.0] * 4] == [made["absent"].tolist()]


def test_every_example_of_the_articles_is_shown_and_named() -> None:
    shown = exact.examples()
    assert [each.key for each in shown] == [
        "exact_ones", "exact_two", "exact_wrong", "exact_number", "exact_three", "exact_causal"
    ]  # fmt: skip
    for each in shown:
        assert each.key in table("en")
        for label, _ in each.lines:
            assert not label.startswith("@") or f"label_{label[1:]}" in table("en")
    lines = dict(shown[4].lines)
    assert lines["@weights"] == ", ".join("[" + ", ".join(f"{w:.6f}" for w in row) + "]" for row in FULL)
    assert lines["@output"].startswith("[6.334782, 3.665218, 0, 0], [3.665218, 6.334782, 0, 0], [5, 5, 0, 0]")


# -- the arithmetic ----------------------------------------------------------------------------------


def test_slope_is_the_size_of_softmaxs_jacobian() -> None:
    score = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), score)
    weight = score.softmax(-1).numpy()
    assert formula.slope(weight) == pytest.approx(float(jacobian.norm()), rel=1e-12)
    assert formula.slope(np.array([1.0, 0, 0])) == 0
    assert formula.entropy(weight) == pytest.approx(float(torch.special.entr(torch.tensor(weight)).sum()))


def test_a_row_that_sees_nothing_has_no_weight_and_huge_scores_do_not_overflow() -> None:
    score = np.array([[-np.inf] * 3, [9000.0, 8999.0, -np.inf]])
    weight = formula.softmax(score)
    assert weight[0].tolist() == [0, 0, 0]
    assert weight[1] == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.e), 0])
    assert formula.lse(score)[1] == pytest.approx(9000 + np.log(1 + np.exp(-1)))


def test_scores_spread_like_the_root_of_d_and_the_scale_takes_it_back() -> None:
    lines = spread.drawn()
    assert [line.dim for line in lines[::2]] == [4, 16, 64, 128, 512]
    for off, on in zip(lines[::2], lines[1::2], strict=True):
        assert off.spread == pytest.approx(np.sqrt(off.dim), rel=0.05)
        assert on.spread == pytest.approx(1, rel=0.05)
        assert off.spread / on.spread == pytest.approx(np.sqrt(off.dim))
    assert [line.largest for line in lines[::2]] == sorted(line.largest for line in lines[::2])
    assert lines[-2].saturated > 0.5 > lines[-1].saturated == 0
    assert lines[-2].slope < 0.6 * lines[-1].slope
    assert lines[-2].entropy < 0.1 * lines[-1].entropy


def test_the_plane_keeps_scores_exactly_and_says_what_it_drops(lesson: Material) -> None:
    q, k = lesson.q()[lesson.word], lesson.k()
    flat = plane(q, k)
    assert np.allclose(flat.along * flat.query, k @ q, rtol=1e-12)
    forward = q / np.linalg.norm(q)
    rest = k - np.outer(k @ forward, forward)
    best = np.linalg.eigvalsh(rest.T @ rest)[-1]
    assert (flat.beside**2).sum() == pytest.approx(best, rel=1e-9)
    dropped = (k**2).sum() - (flat.along**2).sum() - best
    assert flat.residual == pytest.approx(dropped / (k**2).sum(), rel=1e-9)
    assert plane(np.zeros(3), np.eye(3)).query == 0
    assert plane(np.array([1.0, 0]), np.array([[2.0, 1.0], [0.5, -3.0]])).residual == pytest.approx(
        0, abs=1e-12
    )
