"""Do masks compose? Any tree of rules with &, | and ~ shows what its parts say (contract 7)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import BACKENDS, INF, NAN, brute, causal, documents, grid, plains, randn, window
from tolerance import assert_accurate

import kizuki
from kizuki import masks
from kizuki.mask import Packed

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

Leaf = tuple[Any, Any]
B, H, Q, K = 2, 2, 7, 9


def _leaf(kind: str, seed: int) -> tuple[masks.Mask, np.ndarray]:
    """One rule and, from its definition, what it shows: `[B, H, Q, K]`."""
    random = np.random.default_rng(seed)
    if kind == "causal":
        align = ["lower_right", "upper_left"][seed % 2]
        rule, sees = masks.causal(align), causal(Q, K, align)
    elif kind == "window":
        left, right = (None if n > 4 else n for n in random.integers(0, 7, 2).tolist())
        align = ["lower_right", "upper_left"][seed % 2]
        rule, sees = masks.window(left, right, align), window(Q, K, left, right, align)
    elif kind == "documents":
        ids, key_ids = sorted(random.integers(0, 3, Q).tolist()), random.integers(0, 3, K).tolist()
        key_ids = sorted(key_ids) if seed % 2 else key_ids
        rule = masks.documents(ids=torch.tensor(ids), key_ids=torch.tensor(key_ids))
        sees = documents(ids, key_ids)
    elif kind == "packed":  # what documents are to a tracer: other lengths in each batch entry
        own, other = np.sort(random.integers(0, Q + 1, (B, 2))), np.sort(random.integers(0, K + 1, (B, 2)))
        places = [
            np.pad(at, ((0, 0), (1, 1)), constant_values=((0, 0), (0, n))) for at, n in ((own, Q), (other, K))
        ]
        rule = Packed("offsets", *(torch.from_numpy(at) for at in places))
        rows = [[np.repeat(np.arange(3), np.diff(row)) for row in at] for at in places]
        sees = np.stack([documents(*pair) for pair in zip(*rows, strict=True)])[:, None]
    elif kind == "keys":
        seen = random.random((B, K)) < 0.6
        rule, sees = masks.keys(torch.from_numpy(seen)), seen[:, None, None]
    elif kind == "lengths":
        n, m = random.integers(0, K + 1, B).tolist(), int(random.integers(0, Q + 1))
        rule = masks.lengths(query=m, key=n)
        sees = np.stack([grid(Q, K, lambda i, j, b=b: j < n[b] and i < m) for b in range(B)])[:, None]
    elif kind == "dense":
        seen = random.random([(B, H, Q, K), (1, H, 1, K), (B, 1, Q, 1)][seed % 3]) < 0.6
        rule, sees = masks.dense(torch.from_numpy(seen)), seen
    else:
        step = 2 + seed % 3
        rule = masks.where(lambda b, h, i, j: (i + j + h + b) % step != 0)
        sees = np.array(
            [
                [grid(Q, K, lambda i, j, b=b, h=h: (i + j + h + b) % step != 0) for h in range(H)]
                for b in range(B)
            ]
        )
    return rule, np.broadcast_to(sees, (B, H, Q, K))


leaves = st.builds(
    _leaf,
    st.sampled_from(["causal", "window", "documents", "packed", "keys", "lengths", "dense", "where"]),
    st.integers(0, 11),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda a, b: (a[0] & b[0], a[1] & b[1]), inner, inner),
        st.builds(lambda a, b: (a[0] | b[0], a[1] | b[1]), inner, inner),
        st.builds(lambda a: (~a[0], ~a[1]), inner),
    ),
    max_leaves=5,
)


@settings(derandomize=True, max_examples=120, deadline=None, database=None)
@given(tree=trees, extra=st.sampled_from(["", "bias", "poison"]))
def test_any_combination_of_masks(tree: tuple[masks.Mask, np.ndarray], extra: str, backend: str) -> None:
    """PT#101531, PT#100709, PT#118972: what a combination shows is what its parts say, for weights to the pair."""
    rule, visible = tree
    q, k, v = (randn(B, H, n, 4, seed=seed) for seed, n in enumerate((Q, K, K)))
    bias = None
    if extra == "bias":
        bias = torch.where(randn(Q, K, seed=6) > -0.8, 0.0, -INF) + randn(H, 1, K)
    if extra == "poison":
        unseen = ~torch.from_numpy(np.array(visible)).any(-2)
        k[unseen], v[unseen] = NAN, INF
    weights, _, output = plains(q, k, v, visible=visible, bias=bias)
    truth = brute(q, k, v, visible=visible, bias=bias)
    matrix = kizuki.attend(q, k, mask=rule, bias=bias, backend=backend)
    assert torch.equal(matrix.dense() != 0, truth.seen), "the visible pairs differ"
    assert_accurate(matrix @ v, truth.output, output, "output")
    assert_accurate(matrix[...], truth.weights, weights, "weights")
    shown = matrix.visible_range()
    if shown is not None:
        first, stop = (x.expand(B, H, Q)[..., None] for x in shown)
        j = torch.arange(K)
        assert torch.equal((j >= first) & (j < stop), truth.seen)
