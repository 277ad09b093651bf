"""Every reading of A against the same thing read off the dense matrix of the brute force."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from oracle import BACKENDS, INF, Truth, brute, causal, plains, randn, window
from tolerance import assert_accurate
from torch import Tensor

import kizuki
from kizuki import masks, portable

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small cases cross the seams between the tiles of the portable pass."""
    monkeypatch.setattr(portable, "TILE", 1 << 10)


def ragged(*shape: int, seed: int = 0) -> Tensor:
    """A random mask with an empty row, a full row and a hidden column."""
    seen = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    seen[..., 1, :], seen[..., 2, :], seen[..., 3] = False, True, False
    return seen


# name: query, key, options, and what they show
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], Any]] = {
    "bare": ((2, 3, 13, 8), (2, 3, 29, 8), {}, None),
    "causal grouped": ((2, 6, 17, 8), (2, 2, 17, 8), {"causal": True}, causal(17, 17)),
    "ragged mask": ((2, 2, 7, 8), (2, 2, 11, 8), {"mask": ragged(2, 2, 7, 11)}, ragged(2, 2, 7, 11)),
    "bias with -inf": (
        (2, 2, 7, 8),
        (2, 2, 11, 8),
        {"bias": torch.where(ragged(7, 11, seed=4), randn(7, 11, seed=5), -INF)},
        None,
    ),
    "sinks and softcap": (
        (1, 2, 9, 8),
        (1, 2, 9, 8),
        {"sinks": torch.tensor([1.0, -INF]), "softcap": 2.0, "mask": masks.window(2, 1)},
        window(9, 9, 2, 1),
    ),
    "rank 2": ((7, 8), (11, 8), {}, None),
    "rank 3": ((2, 7, 8), (1, 11, 8), {"mask": masks.causal("lower_right")}, causal(7, 11, "lower_right")),
    "rank 5": ((2, 1, 4, 7, 8), (1, 3, 2, 11, 8), {"bias": randn(3, 1, 7, 11, seed=3)}, None),
    "more queries than keys": (
        (1, 2, 11, 8),
        (1, 2, 5, 8),
        {"mask": masks.causal("lower_right")},
        causal(11, 5, "lower_right"),
    ),
    "many tiles": (
        (1, 1, 150, 4),
        (1, 1, 301, 4),
        {"mask": masks.causal("lower_right")},
        causal(150, 301, "lower_right"),
    ),
}


@lru_cache
def oracle(name: str) -> tuple[Truth, list[Tensor], list[Tensor]]:
    query, key, options, visible = CASES[name]
    numbers = {n: options[n] for n in ("bias", "softcap", "sinks") if n in options}
    q, k = randn(*query), randn(*key, seed=1)
    weights, lse, _ = plains(q, k, visible=visible, **numbers)
    return brute(q, k, visible=visible, **numbers), weights, lse


class Pair:
    """One case: the matrix, the truth, and the plain formula's weights as yardsticks."""

    def __init__(self, name: str, backend: str) -> None:
        query, key, options, _ = CASES[name]
        self.truth, self.weights, self.lse = oracle(name)
        self.matrix = kizuki.attend(randn(*query), randn(*key, seed=1), backend=backend, **options)
        self.shape = tuple(self.matrix.shape)

    def agrees(self, got: Tensor, read: Callable[[Tensor], Tensor], what: str = "reading") -> None:
        """`got` is `read` of the weights, by the rule of accuracy, with float32 arithmetic as the yardstick."""
        truth = read(self.truth.weights)
        assert tuple(got.shape) == tuple(truth.shape), what
        assert got.dtype is torch.float32
        assert_accurate(got, truth, [read(w) for w in self.weights], what)


named = pytest.mark.parametrize("name", CASES)


def _entropy(a: Tensor) -> Tensor:
    return torch.special.entr(a).sum(-1)


@named
def test_rows_statistics(name: str, backend: str) -> None:
    pair = Pair(name, backend)
    matrix = pair.matrix
    pair.agrees(matrix.entropy(), _entropy, "entropy")
    pair.agrees(matrix.max(), lambda a: a.amax(-1), "max")
    pair.agrees(matrix.dense(), lambda a: a, "dense")
    queries, keys = pair.shape[-2:]
    own = torch.arange(queries)[:, None] + max(0, keys - queries)
    far = (own - torch.arange(keys)).abs()
    pair.agrees(matrix.distance(), lambda a: (a * far).sum(-1), "distance")
    assert_accurate(matrix.lse, pair.truth.lse, pair.lse, "lse")


@named
def test_received(name: str, backend: str) -> None:
    pair = Pair(name, backend)
    pair.agrees(pair.matrix.received(), lambda a: a.sum(-2), "received")
    pair.agrees(pair.matrix.received("sum"), lambda a: a.sum(-2), "received")
    count = pair.truth.seen.sum(-2).clamp(min=1)
    pair.agrees(pair.matrix.received("mean"), lambda a: a.sum(-2) / count, "received mean")
    ones = torch.ones(*pair.shape[:-1], 1)
    pair.agrees(pair.matrix.T @ ones, lambda a: a.mT @ ones.to(a.dtype), "A.T @ 1")


@named
@pytest.mark.parametrize("k", [1, 4, 40])
def test_topk(name: str, k: int, backend: str) -> None:
    """The weights are the k largest; each key names its weight; padding is weight 0 and key −1."""
    pair = Pair(name, backend)
    weights, keys = pair.matrix.topk(k)
    assert tuple(weights.shape) == tuple(keys.shape) == (*pair.shape[:-1], k)
    room = max(0, k - pair.shape[-1])

    def largest(a: Tensor) -> Tensor:
        ordered = a.sort(-1, descending=True).values[..., :k]
        return torch.nn.functional.pad(ordered, (0, room))

    pair.agrees(weights, largest, "top weights")
    count = pair.truth.seen.sum(-1, keepdim=True)
    there = torch.arange(k) < count
    assert torch.equal(keys >= 0, there)
    assert (keys[~there] == -1).all()
    assert not weights[~there].any()
    named_by_key = pair.truth.weights.float().gather(-1, keys.clamp(min=0))
    assert torch.allclose(named_by_key.where(there, 0.0), weights, atol=1e-6)
    assert (pair.truth.seen.gather(-1, keys.clamp(min=0)) | ~there).all(), "a key that is not visible"
    assert (weights[..., :-1] >= weights[..., 1:]).all()


def test_topk_ties_go_to_the_lower_key(backend: str) -> None:
    query, key = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 2500, 4)
    weights, keys = kizuki.attend(query, key, backend=backend).topk(3)
    assert (keys == torch.arange(3)).all()
    assert torch.allclose(weights, torch.tensor(1 / 2500))
    key[0, 0, [7, 2100, 2400]] = 2.0
    key[0, 0, 1300] = 3.0
    _, keys = kizuki.attend(query, key, backend=backend).topk(6)
    assert keys[0, 0].tolist() == [[1300, 7, 2100, 2400, 0, 1]] * 3
    _, keys = kizuki.attend(query, key, mask=masks.causal("lower_right"), backend=backend).topk(3)
    assert keys[0, 0].tolist() == [[1300, 7, 2100]] * 3


def test_topk_keeps_visible_keys_whose_weight_is_zero(backend: str) -> None:
    """A weight that underflows to 0 is still a visible key; an absent one is −1."""
    bias = torch.tensor([0.0, -500.0, -INF, -900.0])
    weights, keys = kizuki.attend(torch.ones(1, 2), torch.ones(4, 2), bias=bias, backend=backend).topk(4)
    assert keys[0].tolist() == [0, 1, 3, -1]
    assert weights[0].tolist() == [1, 0, 0, 0]


def test_topk_zero_and_wider_types(backend: str) -> None:
    query, key = randn(1, 2, 5, 4), randn(1, 2, 7, 4, seed=1)
    weights, keys = kizuki.attend(query, key, backend=backend).topk(0)
    assert tuple(weights.shape) == tuple(keys.shape) == (1, 2, 5, 0)
    single = kizuki.attend(query, key, backend=backend).topk(4)[1]
    double = kizuki.attend(query.double(), key.double(), backend="portable").topk(4)
    assert torch.equal(single, double[1])
    assert double[0].dtype is torch.float64


@named
@pytest.mark.parametrize("picture", [(1, 1), (3, 4), (5, 5)])
def test_pool(name: str, picture: tuple[int, int], backend: str) -> None:
    pair = Pair(name, backend)
    (rows, cols), (queries, keys) = picture, pair.shape[-2:]
    row_of, col_of = torch.arange(queries) * rows // queries, torch.arange(keys) * cols // keys

    def blocks(a: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        lines = [
            torch.stack([how(a[..., row_of == r, :][..., col_of == c]) for c in range(cols)], -1)
            for r in range(rows)
        ]
        return torch.stack(lines, -2)

    pair.agrees(pair.matrix.pool(rows, cols), lambda a: blocks(a, lambda x: x.sum(-1).mean(-1)), "mass")
    pair.agrees(pair.matrix.pool(rows, cols, "peak"), lambda a: blocks(a, lambda x: x.amax((-1, -2))), "peak")
    whole = pair.matrix.pool(queries, keys)
    assert tuple(whole.shape) == pair.shape
    pair.agrees(whole, lambda a: a, "pool at full size")


@named
def test_mass_in_groups(name: str, backend: str) -> None:
    pair = Pair(name, backend)
    keys = pair.shape[-1]
    groups = torch.arange(keys) % 4 - 1
    one_hot = torch.stack([groups == g for g in range(3)], -1).double()
    pair.agrees(pair.matrix.mass(groups), lambda a: a @ one_hot.to(a.dtype), "mass")
    if keys < 100:
        each = pair.matrix.mass(torch.arange(keys).flip(0))
        pair.agrees(each, lambda a: a.flip(-1), "every key its own group")
    rows = torch.arange(pair.shape[-2]) % 3 - 1
    belongs = torch.stack([rows == g for g in range(2)]).double()
    mean = belongs / belongs.sum(-1, keepdim=True).clamp(min=1)
    count = int(rows.max()) + 1 if len(rows) else 0
    pair.agrees(
        pair.matrix.mass(groups, rows=rows),
        lambda a: mean[:count].to(a.dtype) @ a @ one_hot.to(a.dtype),
        "segments on segments",
    )
    nobody = pair.matrix.mass(torch.full((keys,), -1))
    assert tuple(nobody.shape) == (*pair.shape[:-1], 0)


def test_max_score(backend: str) -> None:
    query, key = randn(2, 3, 7, 8), randn(2, 3, 9, 8, seed=1)
    scores = query.double() @ key.double().mT / 8**0.5
    got = kizuki.attend(query, key, backend=backend).max_score()
    assert_accurate(got, scores.amax((-1, -2)), (query @ key.mT / 8**0.5).amax((-1, -2)))
    bias = torch.full((3, 1, 9), -INF)
    bias[1:] = 0.5
    bias[1, :, 4] = 40.0
    got = kizuki.attend(query, key, bias=bias, backend=backend).max_score()
    assert torch.isneginf(got[:, 0]).all()
    assert torch.allclose(got[:, 1], (scores[:, 1, :, 4].amax(-1) + 40).float())
    alone = kizuki.attend(query[0, 0], key[0, 0], backend=backend).max_score()
    assert alone.shape == ()


@named
def test_products_from_the_right_and_the_left(name: str, backend: str) -> None:
    pair = Pair(name, backend)
    y = randn(*pair.shape[:-1], 3, seed=6)
    pair.agrees(pair.matrix.T @ y, lambda a: a.mT @ y.to(a.dtype), "A.T @ y")
    assert tuple(pair.matrix.T.shape) == (*pair.shape[:-2], pair.shape[-1], pair.shape[-2])
    assert pair.matrix.T.T is pair.matrix
    line = randn(pair.shape[-2], 2, seed=7)
    pair.agrees(pair.matrix.T @ line, lambda a: a.mT @ line.to(a.dtype), "A.T @ y, y broadcast")


def test_products_of_matrices(backend: str) -> None:
    query, key = randn(2, 3, 7, 8), randn(2, 3, 7, 8, seed=1)
    first = kizuki.attend(query, key, causal=True, backend=backend)
    second = kizuki.attend(key, query, backend=backend)
    x = randn(2, 3, 7, 4, seed=2)
    product = second @ first @ second
    assert tuple(product.shape) == (2, 3, 7, 7)
    a, b = brute(query, key, visible=causal(7, 7)).weights, brute(key, query).weights
    assert ((product @ x).double() - b @ a @ b @ x.double()).abs().max() < 1e-6
    assert torch.equal((second @ (first @ second)) @ x, product @ x)
    assert torch.equal(product @ x, second @ (first @ (second @ x)))


INDICES: dict[str, Any] = {
    "row": (1, 2, 5),
    "entry": (1, 2, 5, 7),
    "last entry": (-1, -1, -1, -1),
    "one axis": 1,
    "two axes": (0, 1),
    "column": (slice(None), 1, slice(None), 3),
    "slices": (slice(0, 2), slice(1, None), slice(2, 9, 3), slice(None, -2)),
    "empty slice": (0, slice(3, 3)),
    "empty key slice": (0, 0, slice(None), slice(5, 5)),
    "dots": (..., 4),
    "dots and slice": (0, ..., slice(2, 5)),
    "dots alone": ...,
    "dots at the end": (1, ...),
    "dots in the middle": (1, ..., 2, slice(1, 4)),
    "dots that stand for nothing": (1, 2, ..., 3, 4),
    "nothing": (),
    "index tensor of rows": (0, 1, torch.tensor([5, 0, 5, -1])),
    "index tensor of keys": (0, 1, 2, torch.tensor([[3, 0], [10, -1]])),
    "pairs": (0, 1, torch.tensor([0, 4, 6]), torch.tensor([1, 1, 8])),
    "pairs of everything": tuple(torch.tensor(x) for x in ([0, 1, 1], [2, 0, 1], [6, 3, 0], [10, 9, 0])),
    "outer product": (0, 1, torch.tensor([[0], [4]]), torch.tensor([1, 2, 3])),
    "tensors apart": (torch.tensor([0, 1]), slice(None), torch.tensor([3, 4])),
    "tensors apart with keys": (torch.tensor([0, 1]), slice(1, 3), torch.tensor([3, 4]), slice(0, 5, 2)),
    "tensor and key int": (torch.tensor([0, 1]), slice(None), torch.tensor([3, 4]), 2),
    "tensor, slice, tensor": (0, torch.tensor([0, 2]), slice(None), torch.tensor([3, 4])),
    "int then tensor": (0, slice(None), torch.tensor([3, 4]), slice(None)),
    "bool rows": (1, 1, torch.arange(7) % 2 == 0),
    "bool keys": (1, 1, 2, torch.arange(11) % 3 == 0),
    "bool pairs": (1, 1, (torch.arange(77) % 5 == 0).view(7, 11)),
    "bool heads": (slice(None), torch.tensor([True, False, True])),
    "bool of everything": (torch.arange(2 * 3 * 7 * 11) % 17 == 0).view(2, 3, 7, 11),
    "bool of the first two": ((torch.arange(6) % 2 == 0).view(2, 3), slice(1, 3)),
    "no True": (1, 1, torch.zeros(7, dtype=torch.bool)),
    "lists": (0, [0, 2], 3),
    "a list of keys": (0, 0, 0, [4, 4, 1]),
    "0-dim tensor": (torch.tensor(1), 0, torch.tensor(3)),
    "new axis": (0, None, 1),
    "new axis at the end": (0, 1, 2, slice(None), None),
}


@pytest.mark.parametrize("name", INDICES)
def test_indexing_is_torchs(name: str, backend: str) -> None:
    pair = Pair("ragged mask", backend)
    query, key = randn(2, 3, 7, 8), randn(2, 1, 11, 8, seed=1)
    seen = ragged(2, 3, 7, 11, seed=2)
    truth = brute(query, key, visible=seen).weights
    weights, _, _ = plains(query, key, visible=seen)
    pair.truth, pair.weights = Truth(truth, truth, truth, seen), weights
    index = INDICES[name]
    matrix = kizuki.attend(query, key, mask=seen, backend=backend)
    try:
        truth[index]
    except IndexError:  # torch 2.6 counts the axes of a boolean tensor before a slice wrongly, and says so
        assert torch.__version__.startswith("2.6."), "only there"
        pytest.skip("this torch cannot do it itself")
    pair.agrees(matrix[index], lambda a: a[index], name)


@pytest.mark.parametrize("name", ["rank 2", "rank 3", "rank 5"])
def test_indexing_at_other_ranks(name: str, backend: str) -> None:
    pair = Pair(name, backend)
    for index in (0, -1, (0, 1), (..., 2), (..., 3, slice(1, 4)), torch.tensor([0, 1]), slice(0, 2), ...):
        pair.agrees(pair.matrix[index], lambda a, index=index: a[index], str(index))
    pair.agrees(pair.matrix[(0,) * (len(pair.shape) - 1)], lambda a: a[(0,) * (a.dim() - 1)], "a row")
    rows = list(pair.matrix)
    assert len(rows) == len(pair.matrix) == pair.shape[0]


@pytest.mark.parametrize(
    "index",
    [
        7,
        (0, 3),
        (0, 0, 7),
        (0, 0, 0, 11),
        (0, 0, 0, -12),
        (0, 0, 0, 0, 0),
        (0, 0, torch.tensor([7])),
        (0, 0, 0, torch.tensor([11])),
        (0, 0, torch.ones(6, dtype=torch.bool)),
        (0, 0, torch.tensor([0.5])),
    ],
    ids=str,
)
def test_index_errors_are_torchs(index: Any, backend: str) -> None:
    matrix = kizuki.attend(randn(2, 3, 7, 8), randn(2, 3, 11, 8), backend=backend)
    with pytest.raises(IndexError):
        torch.zeros(2, 3, 7, 11)[index]
    with pytest.raises(IndexError):
        matrix[index]


@named
def test_a_row_of_a_is_the_row_alone(name: str, backend: str) -> None:
    """Reading one row, several, or all of A gives the same weights, to the rounding of the matrix product."""
    pair = Pair(name, backend)
    whole = pair.matrix.dense()
    for row in ((0,) * (len(pair.shape) - 1), (-1,) * (len(pair.shape) - 1)):
        assert torch.allclose(pair.matrix[row], whole[row], atol=3e-7, rtol=3e-6)
        alone = pair.matrix[(*row[:-1], torch.tensor([row[-1]]))]
        assert torch.equal(pair.matrix[row], alone[0])


def test_visible_range(backend: str) -> None:
    """first <= j < stop says exactly what is visible, or None is given."""
    query, key = randn(2, 3, 7, 4), randn(2, 3, 9, 4)
    rows, j = torch.arange(7), torch.arange(9)
    cases = {
        "none": ({}, torch.ones(7, 9, dtype=torch.bool)),
        "causal": ({"mask": masks.causal("lower_right")}, torch.from_numpy(causal(7, 9, "lower_right"))),
        "window": (
            {"mask": masks.window(1, 2, align="upper_left")},
            (rows[:, None] - j <= 1) & (j - rows[:, None] <= 2),
        ),
        "lengths": ({"mask": masks.lengths(key=[4, 0])}, (j < torch.tensor([4, 0])[:, None])[:, None, None]),
        "keys": ({"mask": masks.keys((j > 1) & (j < 5))}, ((j > 1) & (j < 5)).expand(7, 9)),
        "nobody": ({"mask": masks.keys(j > 20)}, torch.zeros(7, 9, dtype=torch.bool)),
        "finite bias": ({"bias": randn(7, 9)}, torch.ones(7, 9, dtype=torch.bool)),
    }
    for name, (options, visible) in cases.items():
        shown = kizuki.attend(query, key, **options, backend=backend).visible_range()
        assert shown is not None, name
        first, stop = (x.expand(2, 3, 7)[..., None] for x in shown)
        assert first.dtype is torch.int64
        assert torch.equal((j >= first) & (j < stop), visible.expand(2, 3, 7, 9)), name
    holes = masks.keys(j % 2 == 0)
    for options in (
        {"mask": holes},
        {"mask": ~holes},
        {"bias": torch.where(j == 3, -INF, 0.0)},
        {"mask": ragged(7, 9)},
    ):
        assert kizuki.attend(query, key, **options, backend=backend).visible_range() is None


def test_dense_has_a_limit(backend: str) -> None:
    matrix = kizuki.attend(randn(1, 2, 30, 4), randn(1, 2, 40, 4), backend=backend)
    assert matrix.dense(limit=2400).shape == (1, 2, 30, 40)
    with pytest.raises(kizuki.SizeError, match=r"2,400 weights .* above limit=2,399; .*A.topk"):
        matrix.dense(limit=2399)
    huge = kizuki.attend(torch.ones(100_000, 1), torch.ones(100_000, 1), backend=backend)
    with pytest.raises(kizuki.SizeError, match="10,000,000,000 weights"):
        huge.dense()
    for index in (
        ...,
        slice(None),
        (slice(None), torch.arange(100_000)),
        torch.ones(100_000, dtype=torch.bool),
    ):
        with pytest.raises(kizuki.SizeError, match="above"):
            huge[index]
    assert huge[99_999, 5] == pytest.approx(1e-5)


@pytest.mark.parametrize(
    "shape", [((0, 2, 5, 4), (0, 2, 7, 4)), ((2, 2, 0, 4), (2, 2, 7, 4)), ((2, 2, 5, 4), (2, 2, 0, 4))]
)
def test_readings_of_nothing(shape: tuple[tuple[int, ...], tuple[int, ...]], backend: str) -> None:
    matrix = kizuki.attend(randn(*shape[0]), randn(*shape[1]), backend=backend)
    batch, heads, queries, keys = matrix.shape
    assert matrix.entropy().shape == matrix.max().shape == matrix.distance().shape == (batch, heads, queries)
    weights, columns = matrix.topk(3)
    assert weights.shape == columns.shape == (batch, heads, queries, 3)
    assert (columns == -1).all()
    assert not weights.any()
    assert matrix.received().shape == matrix.received("mean").shape == (batch, heads, keys)
    assert not matrix.received().any()
    assert torch.isneginf(matrix.max_score()).all()
    assert matrix.pool(1, 1).shape == matrix.pool(1, 1, "peak").shape == (batch, heads, 1, 1)
    assert matrix.mass(torch.zeros(keys, dtype=torch.int64)).shape == (
        batch,
        heads,
        queries,
        1 if keys else 0,
    )
    assert matrix[...].shape == matrix.dense().shape == matrix.shape
    assert (matrix.T @ torch.ones(batch, heads, queries, 2)).shape == (batch, heads, keys, 2)


def test_what_a_matrix_says_of_itself(backend: str) -> None:
    query, key = randn(2, 3, 7, 8), randn(2, 3, 9, 8)
    matrix = kizuki.attend(query, key, scale=0.25, backend=backend)
    assert matrix.query is query
    assert matrix.key is key
    assert matrix.scale == 0.25
    assert matrix.shape == torch.Size([2, 3, 7, 9])
    assert repr(matrix) == f"AttentionMatrix([2, 3, 7, 9], float32, cpu, backend={backend})"
    plan = matrix.plan()
    assert plan.backend == backend
    assert "\n" not in str(plan)
    assert str(plan).startswith(f"{backend}: ")


def test_several_readings_in_one_pass(backend: str) -> None:
    """observe() gives the same numbers as the readings one by one."""
    matrix = kizuki.attend(randn(2, 3, 33, 8), randn(2, 3, 33, 8, seed=1), causal=True, backend=backend)
    groups = torch.arange(33) // 7
    asked = kizuki.Observe(
        topk=3,
        entropy=True,
        received="mean",
        max=True,
        max_score=True,
        distance=True,
        groups=groups,
        pool=(4, 5),
    )
    seen = matrix.observe(asked)
    assert torch.equal(seen.entropy, matrix.entropy())
    assert torch.equal(seen.received, matrix.received("mean"))
    assert torch.equal(seen.max, matrix.max())
    assert torch.equal(seen.max_score, matrix.max_score())
    assert torch.equal(seen.distance, matrix.distance())
    assert torch.equal(seen.mass, matrix.mass(groups))
    assert torch.equal(seen.pool, matrix.pool(4, 5))
    assert torch.equal(seen.lse, matrix.lse)
    for got, want in zip(seen.topk, matrix.topk(3), strict=True):
        assert torch.equal(got, want)
    nothing = matrix.observe(kizuki.Observe())
    assert nothing.entropy is nothing.topk is nothing.received is nothing.pool is nothing.mass is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (5, 2), "softcap": 3.0},
        {"mask": ~masks.documents([20, 0, 17]) | masks.causal()},
    ],
    ids=["plain", "causal", "window and cap", "a mask without a range"],
)
def test_asking_to_see_never_changes_the_answer(options: dict[str, Any], backend: str) -> None:
    """Contract 9, and the readings are those of the matrix itself."""
    q, k, v = (torch.randn(2, 4, 37, 8, generator=torch.Generator().manual_seed(s)) for s in range(3))
    what = kizuki.Observe(
        topk=3, entropy=True, received="mean", max=True, max_score=True, distance=True, pool=(5, 7)
    )
    output, seen = kizuki.attention(q, k, v, backend=backend, observe=what, **options)
    assert torch.equal(output, kizuki.attention(q, k, v, backend=backend, **options))
    matrix = kizuki.attend(q, k, backend=backend, **options)
    assert seen.topk is not None
    assert torch.equal(seen.topk[1], matrix.topk(3)[1])
    for got, want in (
        (seen.topk[0], matrix.topk(3)[0]),
        (seen.entropy, matrix.entropy()),
        (seen.received, matrix.received("mean")),
        (seen.max, matrix.max()),
        (seen.max_score, matrix.max_score()),
        (seen.distance, matrix.distance()),
        (seen.pool, matrix.pool(5, 7)),
    ):
        assert got is not None
        assert torch.equal(got, want)
    assert seen.mass is None, "nobody asked"


def test_observe_must_be_an_observe(backend: str) -> None:
    x = torch.eye(3)
    with pytest.raises(kizuki.KizukiTypeError, match=r"observe is a bool but must be kizuki\.Observe"):
        kizuki.attention(x, x, x, backend=backend, observe=True)  # type: ignore[call-overload]


def test_each_backend_computes_the_gradients_of_what_it_computed(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan names one backend, so there may be nobody else to compute them."""
    q, k = torch.randn(2, 1, 2, 5, 4).unbind(0)
    plan = str(kizuki.attend(q, k, backend=backend).plan())
    assert str(kizuki.attend(q.requires_grad_(), k, backend=backend).plan()) == plan
    assert plan.startswith(backend)
    called = []

    def counted(*args: Any, **options: Any) -> Any:
        called.append("portable")
        return actual(*args, **options)

    actual = portable.backward
    monkeypatch.setattr(portable, "backward", counted)
    kizuki.attention(q, k, k, backend=backend).sum().backward()
    assert called == (["portable"] if backend == "portable" else [])
