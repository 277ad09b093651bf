"""Contract 1–4, 6, 7 and the faults people met ("Masks" and "Numbers" of faults.md), against the brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from oracle import BACKENDS, INF, NAN, brute, causal, documents, grid, randn, window
from tolerance import assert_agrees
from torch import Tensor

import kizuki
from kizuki import masks

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def qkv(queries: int, keys: int, *lead: int, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    lead = lead or (1, 2)
    return randn(*lead, queries, dim), randn(*lead, keys, dim, seed=1), randn(*lead, keys, dim, seed=2)


def boolean(*shape: int, seed: int = 0, share: float = 0.6) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) < share


# -- contract 1: the order ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.37},
        {"scale": 0.0},
        {"scale": -1.5},
        {"scale": 3},
        {"softcap": 0.5},
        {"softcap": 50.0},
        {"bias": randn(2, 6, 9, seed=5)},
        {"sinks": torch.tensor([0.3, -INF])},
        {"sinks": torch.tensor([90.0, -90.0])},
        {"scale": 2.0, "softcap": 1.5, "bias": 3 * randn(6, 1, seed=6), "sinks": torch.tensor([0.5, -2.0])},
    ],
    ids=str,
)
def test_scale_then_cap_then_bias_then_mask_then_sinks(options: dict[str, Any], backend: str) -> None:
    visible = window(6, 9, 2, 1, "lower_right")
    rule = masks.window(2, 1, align="lower_right")
    assert_agrees(*qkv(6, 9), backend=backend, options=options)
    assert_agrees(*qkv(6, 9), backend=backend, visible=visible, options=options | {"mask": rule})


def test_softcap_is_before_bias_and_mask(backend: str) -> None:
    """FA#1016, FI#1193, HF#32877. A cap after the bias would hold a bias of 100 down to 1."""
    q, k, _ = qkv(2, 3, 1, 1)
    bias = torch.tensor([0.0, 100.0, 0.0])
    weights = kizuki.attend(q, k, softcap=1.0, bias=bias, backend=backend).dense()
    assert (weights[..., 1] == 1).all()


def test_softcap_off_and_softcap_huge(backend: str) -> None:
    q, k, v = qkv(5, 5)
    none = kizuki.attention(q, k, v, backend=backend)
    capped = kizuki.attention(q, k, v, softcap=0.7, backend=backend)
    assert (none - capped).abs().max() > 1e-2
    assert_agrees(q, k, v, backend=backend, options={"softcap": 1e30})


def test_a_sink_is_in_the_denominator_only(backend: str) -> None:
    q = k = torch.zeros(1, 1, 3, 4)
    matrix = kizuki.attend(q, k, sinks=torch.tensor([math.log(3.0)]), backend=backend)
    assert torch.allclose(matrix.dense(), torch.full((1, 1, 3, 3), 1 / 6))
    assert torch.allclose(matrix.lse, torch.tensor(math.log(6.0)))
    # a key that is visible to nobody gives nothing, sink or not
    hidden = kizuki.attend(
        q, k, mask=torch.zeros(3, 3, dtype=torch.bool), sinks=torch.ones(1), backend=backend
    )
    assert not (hidden @ torch.ones(1, 1, 3, 2)).any()
    assert torch.isneginf(hidden.lse).all()


# -- contract 2: absence --------------------------------------------------------------------------


def _hide(how: str, column: int, queries: int, keys: int) -> dict[str, Any]:
    seen = torch.ones(keys, dtype=torch.bool)
    seen[column] = False
    if how == "bool":
        return {"mask": seen.expand(queries, keys)}
    if how == "keys":
        return {"mask": masks.keys(seen)}
    if how == "where":
        return {"mask": masks.where(lambda b, h, i, j: j != column)}
    if how == "bias":
        return {"bias": torch.where(seen, 0.0, -INF)}
    if how == "float64 bias":
        return {"bias": torch.where(seen, 0.0, -INF).double()}
    if how == "half bias":
        return {"bias": torch.where(seen, 0.0, -INF).half().expand(1, queries, keys)}
    return {"mask": ~masks.keys(~seen)}


@pytest.mark.parametrize(
    ("how", "column"),
    [
        ("bool", 0),
        ("bool", 1),
        ("keys", 1),
        ("keys", 9),
        ("where", 1),
        ("bias", 1),
        ("bias", 9),
        ("float64 bias", 1),
        ("half bias", 0),
        ("not", 1),
    ],
)
def test_what_is_behind_a_mask_is_not_read(how: str, column: int, backend: str) -> None:
    """PT#101967: `k[:, 1] = NaN` and `v[:, 1] = Inf` behind column 1 change no bit of anything."""
    q, k, v = qkv(7, 10, 2, 3)
    options = _hide(how, column, 7, 10)
    clean = kizuki.attend(q, k, **options, backend=backend)
    readings = _readings(clean, v)
    for bad_k, bad_v in ((NAN, INF), (INF, NAN), (-INF, -INF), (3e38, 3e38)):
        k[:, :, column], v[:, :, column] = bad_k, bad_v
        v[:, :, column, 1] = NAN
        dirty = kizuki.attend(q, k, **options, backend=backend)
        for name, now in _readings(dirty, v).items():
            assert torch.equal(now, readings[name]), name
    visible = np.ones((7, 10), dtype=bool)
    visible[:, column] = False
    assert_agrees(q, k, v, backend=backend, visible=visible, options=options)


def _readings(matrix: kizuki.AttentionMatrix, v: Tensor) -> dict[str, Tensor]:
    return {
        "output": matrix @ v,
        "lse": matrix.lse,
        "dense": matrix.dense(),
        "rows": matrix[:, 1, 2:5],
        "entropy": matrix.entropy(),
        "max": matrix.max(),
        "max_score": matrix.max_score(),
        "topk": matrix.topk(3)[0],
        "topk keys": matrix.topk(3)[1].double(),
        "received": matrix.received(),
        "received mean": matrix.received("mean"),
        "pool": matrix.pool(3, 4),
        "peak": matrix.pool(2, 5, "peak"),
        "distance": matrix.distance(),
        "mass": matrix.mass(torch.arange(matrix.shape[-1]) % 3),
        "transposed": matrix.T @ torch.ones(*matrix.shape[:-1], 2),
    }


def test_values_visible_to_some_rows_only(backend: str) -> None:
    """A NaN or Inf value reaches exactly the rows that see it, with the sign arithmetic gives it."""
    q, k, v = qkv(8, 8, 2, 2)
    v[0, 0, 3, 0], v[0, 1, 2], v[1, 0, 5, 1], v[1, 0, 6, 1] = INF, NAN, INF, -INF
    v[1, 1, :4] = -INF
    truth = brute(q, k, v, visible=causal(8, 8)).output
    got = kizuki.attention(q, k, v, causal=True, backend=backend)
    assert torch.equal(got.isnan(), truth.isnan())
    assert torch.equal(got.isposinf(), truth.isposinf())
    assert torch.equal(got.isneginf(), truth.isneginf())
    finite = truth.isfinite()
    assert (got.double() - truth)[finite].abs().max() < 1e-5


def test_bool_mask_and_its_minus_infinity_twin_agree_to_the_bit(backend: str) -> None:
    """PT#92554, PT#147209: whatever the dtype of the float twin."""
    q, k, v = qkv(7, 11, 2, 3)
    seen = boolean(2, 1, 7, 11, seed=3)
    want = kizuki.attend(q, k, mask=seen, backend=backend)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        twin = torch.where(seen, 0.0, -INF).to(dtype)
        got = kizuki.attend(q, k, bias=twin, backend=backend)
        assert torch.equal(got @ v, want @ v)
        assert torch.equal(got.lse, want.lse)
        assert torch.equal(got.dense(), want.dense())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_finite_bias_is_a_bias(dtype: torch.dtype, backend: str) -> None:
    """PT#109517, PT#110213: a row of finfo.min is a row of equal scores, and so uniform; never NaN."""
    q, k, v = qkv(4, 6)
    lowest = torch.finfo(dtype).min
    bias = torch.zeros(4, 6, dtype=dtype)
    bias[1], bias[2, :3], bias[3] = lowest, lowest, lowest / 2
    matrix = kizuki.attend(q, k, bias=bias, backend=backend)
    if dtype is not torch.float16:
        assert torch.allclose(matrix[0, :, 1], torch.full((2, 6), 1 / 6))
        assert torch.allclose(matrix[0, :, 3], torch.full((2, 6), 1 / 6))
        assert torch.allclose((matrix @ v)[:, :, 1], v.mean(2))
    assert not matrix[0, :, 2, :3].any()
    assert torch.isfinite(matrix.lse).all()
    sums = matrix.dense().sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums))
    # two of them added are −inf, and −inf is absence
    twice = torch.full((4, 6), lowest, dtype=dtype) * 2
    assert not (kizuki.attend(q, k, bias=twice, backend=backend) @ v).any()


# -- contract 3: NaN goes where it belongs ---------------------------------------------------------


def test_nan_in_a_query_is_nan_in_its_row_only(backend: str) -> None:
    """PT#141128, and no column catches it at a key the row does not see."""
    q, k, v = qkv(9, 9, 1, 2)
    clean = kizuki.attend(q, k, causal=True, backend=backend)
    want, received = clean @ v, clean.T @ torch.ones(1, 2, 9, 1)
    q[0, 1, 3, 2] = NAN
    matrix = kizuki.attend(q, k, causal=True, backend=backend)
    got = matrix @ v
    assert got[0, 1, 3].isnan().all()
    bad = torch.zeros(1, 2, 9, dtype=torch.bool)
    bad[0, 1, 3] = True
    assert torch.equal(got[~bad], want[~bad])
    for reading in (matrix.lse, matrix.entropy(), matrix.max(), matrix.distance()):
        assert torch.equal(reading.isnan(), bad)
    weights = matrix.dense()
    assert torch.equal(weights.isnan(), bad[..., None] & torch.from_numpy(causal(9, 9)))
    assert torch.equal(matrix[0, 1].isnan(), weights[0, 1].isnan())
    column = matrix.T @ torch.ones(1, 2, 9, 1)
    assert column[0, 1, :4].isnan().all()
    assert torch.equal(column[0, 1, 4:], received[0, 1, 4:])
    assert torch.equal(matrix.received()[0, 1].isnan(), torch.arange(9) < 4)
    top, keys = matrix.topk(2)
    assert torch.equal(top.isnan().all(-1), bad)
    assert keys[0, 1, 3].tolist() == [0, 1]
    assert torch.equal(kizuki.attend(q, k, backend=backend).lse.isnan(), bad)


def test_nan_in_a_visible_key_is_nan_in_the_rows_that_see_it(backend: str) -> None:
    q, k, v = qkv(12, 12)
    want = kizuki.attention(q, k, v, causal=True, window=(3, 0), backend=backend)
    k[0, 0, 5, 1] = NAN
    got = kizuki.attention(q, k, v, causal=True, window=(3, 0), backend=backend)
    bad = torch.zeros(1, 2, 12, dtype=torch.bool)
    bad[0, 0, 5:9] = True
    assert torch.equal(got.isnan().all(-1), bad)
    assert torch.equal(got[~bad], want[~bad])


def test_infinite_scores_are_not_absence(backend: str) -> None:
    """A score of −inf that arithmetic made is a visible key of weight 0; a row of nothing else has no softmax."""
    q = torch.ones(1, 1, 3, 2)
    k, v = torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2)
    k[0, 0, 0] = -INF
    matrix = kizuki.attend(q, k, causal=True, backend=backend)
    got = matrix @ v
    assert got[0, 0, 0].isnan().all()
    assert matrix.lse[0, 0, 0].isnan()
    assert torch.equal(got[0, 0, 1:], torch.ones(2, 2))
    assert matrix[0, 0, 2].tolist() == [0, 0.5, 0.5]
    k[0, 0, 1] = INF
    assert kizuki.attention(q, k, v, causal=True, backend=backend)[0, 0, 1:].isnan().all()
    k[0, 0, 0], k[0, 0, 1] = -INF, 1.0
    sunk = kizuki.attend(q, k, causal=True, sinks=torch.zeros(1), backend=backend)
    assert not (sunk @ v)[0, 0, 0].any()
    assert sunk.lse[0, 0, 0] == 0


# -- contract 4: rows that see nothing -------------------------------------------------------------


@pytest.mark.parametrize("row", [0, 2, 5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -INF])], ids=["bare", "sinks"])
def test_an_empty_row_is_zero(row: int, sinks: Tensor | None, backend: str) -> None:
    """PT#103749, PT#27968: q [1, 2, 6, 8], k, v [1, 2, 10, 8], a row all False."""
    q, k, v = qkv(6, 10)
    seen = boolean(1, 1, 6, 10, seed=1)
    seen[..., row, :] = False
    for options in ({"mask": seen}, {"bias": torch.where(seen, 0.0, -INF)}):
        matrix = kizuki.attend(q, k, **options, sinks=sinks, backend=backend)
        assert not (matrix @ v)[:, :, row].any()
        assert torch.isneginf(matrix.lse[:, :, row]).all()
        assert not matrix[:, :, row].any()
        weights, keys = matrix.topk(4)
        assert not weights[:, :, row].any()
        assert (keys[:, :, row] == -1).all()
        for reading in (matrix.entropy(), matrix.max(), matrix.distance()):
            assert not reading[:, :, row].any()
        assert_agrees(q, k, v, backend=backend, visible=seen, options={**options, "sinks": sinks})


@pytest.mark.parametrize("empty", [slice(0, 600), slice(600, 1300), slice(100, 1300)])
def test_an_empty_block_of_keys_wherever_it_falls(empty: slice, backend: str) -> None:
    q, k, v = qkv(3, 1300, 1, 1, dim=4)
    seen = torch.ones(1300, dtype=torch.bool)
    seen[empty] = False
    k[:, :, empty], v[:, :, empty] = NAN, NAN
    for mask in (seen.expand(3, 1300), masks.keys(seen), ~masks.keys(~seen)):
        assert_agrees(q, k, v, backend=backend, visible=seen, options={"mask": mask})


# -- contract 6: causal and window -----------------------------------------------------------------


@pytest.mark.parametrize(("queries", "keys"), [(2, 6), (1, 9), (5, 2), (7, 7), (40, 33)])
@pytest.mark.parametrize("align", ["lower_right", "upper_left"])
def test_causal_alignments(queries: int, keys: int, align: str, backend: str) -> None:
    """PT#103082, PT#108108, FA#1298: rows that 5 × 2 leaves empty are 0."""
    visible = causal(queries, keys, align)
    matrix = assert_agrees(
        *qkv(queries, keys), backend=backend, visible=visible, options={"mask": masks.causal(align)}
    )
    assert torch.equal(matrix.dense()[0, 0] != 0, torch.from_numpy(visible))
    if queries == keys:
        assert torch.equal(
            matrix.dense(), kizuki.attend(matrix.query, matrix.key, causal=True, backend=backend).dense()
        )


def test_a_window_of_four_shows_four(backend: str) -> None:
    """HF#29623, vllm#3385: (3, 0) over 12 tokens is 4 keys a row in every way of saying it."""
    q, k, _ = qkv(12, 12)
    for options in ({"window": (3, 0)}, {"mask": masks.window(3, 0)}, {"window": [3, None], "causal": True}):
        counts = (kizuki.attend(q, k, **options, backend=backend).dense()[0, 0] > 0).sum(-1)
        assert counts.tolist() == [1, 2, 3] + [4] * 9


@pytest.mark.parametrize(
    ("left", "right"), [(0, 0), (3, 0), (0, 2), (2, 3), (None, 1), (1, None), (None, None), (99, 99)]
)
@pytest.mark.parametrize(
    ("queries", "keys", "align"),
    [(9, 9, None), (4, 9, "lower_right"), (9, 4, "lower_right"), (4, 9, "upper_left")],
)
def test_windows(
    left: int | None, right: int | None, queries: int, keys: int, align: str | None, backend: str
) -> None:
    visible = window(queries, keys, left, right, align or "upper_left")
    rule = masks.window(left, right, align)
    assert_agrees(*qkv(queries, keys), backend=backend, visible=visible, options={"mask": rule})


def test_a_window_wider_than_int64(backend: str) -> None:
    q, k, v = qkv(5, 5)
    want = kizuki.attention(q, k, v, backend=backend)
    for far in (2**63 - 1, 2**70):
        assert torch.equal(kizuki.attention(q, k, v, window=(far, far), backend=backend), want)


# -- contract 7: masks compose ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 5),
        (1, 1, 1, 1, 5),
        (7, 1),
        (3, 2, 4, 7, 5),
        (3, 1, 1, 7, 5),
        (1, 2, 1, 1, 5),
        (4, 1, 5),
        (2, 1, 7, 1),
        (),
    ],
    ids=str,
)
def test_masks_and_biases_broadcast(shape: tuple[int, ...], backend: str) -> None:
    """PT#120810, FA#17: q [3, 2, 4, 7, 16] with every broadcast shape of mask and of bias."""
    q, k, v = randn(3, 2, 4, 7, 16), randn(3, 2, 2, 5, 16, seed=1), randn(3, 2, 2, 5, 16, seed=2)
    seen, bias = boolean(*shape, seed=4), randn(*shape, seed=5)
    assert_agrees(q, k, v, backend=backend, visible=seen, options={"mask": seen})
    assert_agrees(q, k, v, backend=backend, options={"bias": bias})
    assert_agrees(
        q,
        k,
        v,
        backend=backend,
        visible=seen,
        options={"mask": masks.dense(seen), "bias": bias, "scale": 0.2},
    )


def test_batched_rules(backend: str) -> None:
    q, k, v = qkv(6, 9, 3, 2)
    key_lengths, query_lengths = torch.tensor([9, 0, 4]), torch.tensor([6, 3, 2])
    sees = np.stack(
        [grid(6, 9, lambda i, j, b=b: i < query_lengths[b] and j < key_lengths[b]) for b in range(3)]
    )
    rule = masks.lengths(query=query_lengths, key=[9, 0, 4])
    matrix = assert_agrees(q, k, v, backend=backend, visible=sees[:, None], options={"mask": rule})
    assert not matrix.dense()[1].any()
    seen = boolean(3, 9, seed=8)
    assert_agrees(q, k, v, backend=backend, visible=seen[:, None, None], options={"mask": masks.keys(seen)})
    ids, key_ids = torch.randint(0, 3, (3, 6)), torch.randint(0, 3, (3, 9))
    sees = np.stack([documents(ids[b].tolist(), key_ids[b].tolist()) for b in range(3)])
    rule = masks.documents(ids=ids, key_ids=key_ids)
    assert_agrees(q, k, v, backend=backend, visible=sees[:, None], options={"mask": rule})
    one = documents(ids[0].tolist(), key_ids[0].tolist())
    rule = masks.documents(ids=ids[0], key_ids=key_ids[0])
    assert_agrees(q, k, v, backend=backend, visible=one, options={"mask": rule})


@pytest.mark.parametrize("lengths", [[0, 3, 0, 5], [8], [1] * 8, [3, 5, 0], [0, 8, 0, 0]])
def test_packed_documents(lengths: list[int], backend: str) -> None:
    """PT#141219, FA#1537: packed lengths [0, 3, 0, 5]; between documents the mass is exactly 0."""
    q, k, v = qkv(8, 8)
    ids = [d for d, n in enumerate(lengths) for _ in range(n)]
    both = causal(8, 8) & documents(ids)
    matrix = assert_agrees(
        q, k, v, backend=backend, visible=both, options={"mask": masks.documents(lengths), "causal": True}
    )
    assert not matrix.dense()[0, 0][torch.from_numpy(~documents(ids))].any()
    by_id = kizuki.attend(q, k, mask=masks.documents(ids=torch.tensor(ids)) & masks.causal(), backend=backend)
    assert torch.equal(by_id.dense(), matrix.dense())


def test_where_sees_batch_head_query_and_key(backend: str) -> None:
    q, k, v = qkv(7, 9, 2, 3)
    table = boolean(2, 3, 7, 9, seed=2)
    rule = masks.where(lambda b, h, i, j: table[b, h, i, j])
    assert_agrees(q, k, v, backend=backend, visible=table, options={"mask": rule})
    assert_agrees(q, k, v, backend=backend, options={"mask": masks.where(lambda b, h, i, j: True)})
    odd = torch.tensor([[h % 2 == 1] for h in range(3)])[:, :, None]
    assert_agrees(
        q, k, v, backend=backend, visible=odd, options={"mask": masks.where(lambda b, h, i, j: h % 2 == 1)}
    )


def test_masks_and_tensors_mix(backend: str) -> None:
    q, k, v = qkv(6, 6)
    seen = boolean(6, 6, seed=3)
    tri = torch.from_numpy(causal(6, 6))
    for rule, visible in (
        (masks.causal() & seen, tri & seen),
        (seen & masks.causal(), tri & seen),
        (masks.causal() | seen, tri | seen),
        (seen | masks.causal(), tri | seen),
    ):
        assert_agrees(q, k, v, backend=backend, visible=visible, options={"mask": rule})


def test_empty_blocks_cost_nothing(backend: str) -> None:
    """A rule empties blocks: keys outside it are never read, so memory that cannot be read there is no error."""
    from kizuki import portable

    if backend != "portable":
        pytest.skip("the tiles of the portable backend are counted; kizuki bench times the compiled ones")
    q, k, _ = qkv(4096, 4096, 1, 1, dim=2)
    problem = kizuki.attend(q, k, window=(64, 0), backend="portable").problem
    full = kizuki.attend(q, k, backend="portable").problem
    assert sum(1 for _ in portable.tiles(problem)) * 2 <= sum(1 for _ in portable.tiles(full))
    # the hull of an "or" is not widened by a part that shows nothing
    for rule in (masks.window(64, 0) | masks.lengths(key=0), masks.lengths(key=0) | masks.window(64, 0)):
        either = kizuki.attend(q, k, mask=rule, backend="portable").problem
        assert sum(1 for _ in portable.tiles(either)) == sum(1 for _ in portable.tiles(problem))
    padded = kizuki.attend(q, k, mask=masks.lengths(key=10), backend="portable").problem
    assert sum(1 for _ in portable.tiles(padded)) == sum(1 for _ in portable.row_blocks(padded))


# -- numbers ---------------------------------------------------------------------------------------


def test_float16_dot_products_may_overflow_before_scaling(backend: str) -> None:
    """PT#119131: max |q| 576, max |k| 383, head_dim 64 in float16."""
    q, k, v = (randn(1, 2, 9, 64, seed=s, dtype=torch.float16) for s in range(3))
    q, k = q / q.abs().max() * 576, k / k.abs().max() * 383
    q[..., 0, :], k[..., 3, :] = 576, 383
    assert_agrees(q, k, v, backend=backend, yardstick=torch.float32)


@pytest.mark.parametrize("shift", [-3000.0, -80.0, 80.0, 3000.0])
def test_large_scores(shift: float, backend: str) -> None:
    """Softmax is about differences: scores far from 0 lose only the rounding of the scores themselves."""
    q, k, v = qkv(5, 700, 1, 1)
    assert_agrees(q, k, v, backend=backend, options={"bias": torch.full((5, 1), shift)})
    ramp = torch.linspace(0, shift, 700)
    assert_agrees(q, k, v, backend=backend, options={"bias": ramp})
    assert_agrees(q, k, v, backend=backend, options={"bias": ramp.flip(0), "sinks": torch.tensor([shift])})


def test_lse_is_the_natural_logarithm(backend: str) -> None:
    """PT#181645: off by ln 2 where the base is 2."""
    q = k = torch.zeros(1, 1, 4, 8)
    assert torch.allclose(kizuki.attend(q, k, backend=backend).lse, torch.tensor(math.log(4.0)), atol=1e-7)


def test_the_lessons_numbers(backend: str) -> None:
    """lesson.md: 0.7311 and 0.2689 without the scale; the three-token example, causal and not."""
    q, k = torch.tensor([[1.0, 0.0]]), torch.eye(2)
    got = kizuki.attend(q, k, scale=1.0, backend=backend)[0]
    assert torch.allclose(got, torch.tensor([0.7310586, 0.2689414]), atol=1e-7)
    got = kizuki.attend(q, k, backend=backend)[0]
    assert torch.allclose(got, torch.tensor([0.6697615, 0.3302385]), atol=1e-6)
    x = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1]])
    v = torch.tensor([[10.0, 0, 0, 0], [0, 10, 0, 0], [5, 5, 0, 0]])
    want = torch.tensor([[6.334782, 3.665218, 0, 0], [3.665218, 6.334782, 0, 0], [5, 5, 0, 0]])
    assert torch.allclose(kizuki.attention(x, x, v, scale=0.5, backend=backend), want, atol=2e-6)
    want = torch.tensor([[10.0, 0, 0, 0], [2.689414, 7.310586, 0, 0], [5, 5, 0, 0]])
    assert torch.allclose(kizuki.attention(x, x, v, scale=0.5, causal=True, backend=backend), want, atol=2e-6)
    far = torch.tensor([[512.0, 0.0]])
    assert kizuki.attend(torch.ones(1, 1), far.T, scale=1.0, backend=backend)[0].tolist() == [1, 0]
    rare = kizuki.attend(torch.ones(1, 1), far.T, scale=1 / math.sqrt(512), backend=backend)[0, 1]
    assert abs(float(rare) / 1.48948e-10 - 1) < 1e-5


def test_reading_does_not_change_the_answer(backend: str) -> None:
    """PT#160064, PT#99282, contract 9: bit for bit the same with and without looking, for every mask."""
    q, k, v = qkv(33, 33, 2, 2)
    seen = boolean(2, 1, 33, 33, seed=5, share=0.3)
    seen[:, :, 4] = False
    for options in (
        {},
        {"causal": True},
        {"mask": seen},
        {"mask": masks.keys(seen[:, 0, 0]), "window": (5, 2)},
    ):
        matrix = kizuki.attend(q, k, **options, backend=backend)
        first = matrix @ v
        _readings(matrix, v)
        assert torch.equal(matrix @ v, first)
        looked = kizuki.attend(q, k, **options, backend=backend)
        _readings(looked, v)
        assert torch.equal(looked @ v, first)
        assert not matrix.dense().isnan().any()
        assert not matrix.dense()[~looked.dense().bool()].any()
