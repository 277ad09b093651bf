"""Sums, multiples, transposes, products and means of attention matrices, against the same done on dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import BACKENDS, INF, randn
from tolerance import assert_accurate
from torch import Tensor

import kizuki
from kizuki import Identity

F64 = torch.float64
N = 7


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def operands(seed: int, dtype: torch.dtype) -> list[Tensor]:
    return [randn(2, 4, N, 8, seed=2 * seed + at, dtype=dtype) for at in range(2)]


def matrices(backend: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Three layers, the second without a causal mask."""
    return [kizuki.attend(*operands(n, dtype), causal=n != 1, backend=backend) for n in range(3)]


def dense(dtype: torch.dtype) -> list[Tensor]:
    """The same by the plain formula; the operands are those of float32."""
    made = []
    for n in range(3):
        q, k = (t.to(dtype) for t in operands(n, torch.float32))
        scores = q @ k.mT / 8**0.5
        hidden = torch.ones(N, N, dtype=torch.bool).triu(1) if n != 1 else torch.zeros(N, N, dtype=torch.bool)
        made.append(torch.softmax(scores.masked_fill(hidden, -INF), -1))
    return made


def eye(like: Tensor) -> Tensor:
    return torch.eye(N, dtype=like.dtype)


# Each as a map of ours, and as the dense matrix it stands for.
MAPS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "half of a residual": (
        lambda a, b, c: 0.5 * a + 0.5 * Identity(N),
        lambda a, b, c: 0.5 * a + 0.5 * eye(a),
    ),
    "difference": (lambda a, b, c: (a - b) / 3, lambda a, b, c: (a - b) / 3),
    "negative": (lambda a, b, c: -a * 2, lambda a, b, c: -2 * a),
    "chain": (lambda a, b, c: a @ b @ c, lambda a, b, c: a @ b @ c),
    "chain of sums": (
        lambda a, b, c: (a + Identity(N)) @ (b - c),
        lambda a, b, c: (a + eye(a)) @ (b - c),
    ),
    "transpose": (lambda a, b, c: (0.5 * a @ b + c).T, lambda a, b, c: (0.5 * a @ b + c).mT),
    "transpose twice": (lambda a, b, c: (a @ b).T.T, lambda a, b, c: a @ b),
}


@pytest.mark.parametrize("name", MAPS)
def test_maps_are_what_they_stand_for(name: str, backend: str) -> None:
    ours, theirs = MAPS[name]
    x = randn(2, 4, N, 5, seed=9)
    made = ours(*matrices(backend))
    truth, plain = (theirs(*dense(dtype)) @ x.to(dtype) for dtype in (F64, torch.float32))
    assert tuple(made.shape) == (2, 4, N, N)
    assert_accurate(made @ x, truth, plain)


def test_a_rollout_in_one_line(backend: str) -> None:
    """r ← ½ r + ½ r·mean_h A, from the last layer down: the row of a token, for every token before it."""
    row = torch.zeros(2, N, 1)
    row[:, 4] = 1
    for A in reversed(matrices(backend)):
        row = (0.5 * A.mean_heads() + 0.5 * Identity(N)).T @ row

    def whole(dtype: torch.dtype) -> Tensor:
        made = torch.eye(N, dtype=dtype).expand(2, N, N)
        for A in dense(dtype):
            made = (0.5 * A.mean(1) + 0.5 * eye(A)) @ made
        return made[:, 4, :, None]

    assert_accurate(row, whole(F64), whole(torch.float32))


def test_gradients_pass_through_what_is_multiplied() -> None:
    a, b, _ = matrices("portable", F64)
    x = randn(2, 4, N, 3, seed=3, dtype=F64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: (0.3 * a @ b + Identity(N) - b) @ x, (x,))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda a: a + kizuki.Identity(3), ["A2 + A1", "[2, 4, 7, 7]", "[3, 3]"]),
        (lambda a: a @ kizuki.Identity(3), ["A2 @ A1", "7 keys", "3 queries"]),
        (lambda a: True * a, ["factor", "bool", "number"]),
        (lambda a: float("inf") * a, ["factor", "inf", "finite"]),
        (lambda a: a / 0, ["divisor", "0", "other than 0"]),
        (lambda a: kizuki.Identity(-1), ["length", "-1"]),
        (lambda a: kizuki.Identity(3) @ torch.ones(4, 2), ["I @ x", "[4, 2]", "[..., 3, width]"]),
        (lambda a: a.mean_heads() @ torch.ones(4, 2), ["mean_heads", "[4, 2]", "[..., 7, width]"]),
        (lambda a: a.mean_heads() @ 3, ["mean_heads", "int", "tensor"]),
        (lambda a: kizuki.attend(torch.ones(2, 2), torch.ones(2, 2)).mean_heads(), ["no axis of heads"]),
        (
            lambda a: a + kizuki.attend(torch.ones(3, 4, N, 2), torch.ones(3, 4, N, 2)),
            ["A2 + A1", "[2, 4, 7, 7]", "[3, 4, 7, 7]"],
        ),
    ],
)
def test_wrong_shapes_are_one_line(make: Callable[[Any], Any], words: list[str]) -> None:
    a = matrices("portable")[0]
    with pytest.raises((ValueError, TypeError)) as caught:
        make(a)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_thing_that_is_no_map_is_not_added() -> None:
    with pytest.raises(TypeError):
        matrices("portable")[0] + 3
