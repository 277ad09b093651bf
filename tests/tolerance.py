"""The one helper of accuracy: every comparison with float64 in these tests goes through here.

The rule itself is `kizuki.accuracy.compare`; test_tolerance.py feeds it wrong results.
"""

from __future__ import annotations

from typing import Any

import torch
from oracle import brute, plains
from torch import Tensor

import kizuki
from kizuki.accuracy import compare


def assert_accurate(got: Tensor, truth: Tensor, plain: Tensor | list[Tensor], what: str = "result") -> None:
    """Fail unless `got` errs at most twice as much as `plain` does, plus its rounding."""
    several = [plain] if isinstance(plain, Tensor) else plain
    report = compare(got, truth.reshape(got.shape), [each.reshape(got.shape) for each in several], what)
    assert report.ok, str(report)


def assert_agrees(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    backend: str,
    visible: Any = None,
    options: dict[str, Any] | None = None,
    yardstick: torch.dtype | None = None,
) -> kizuki.AttentionMatrix:
    """Output, lse and dense weights of one call against the brute force over `visible`; returns the matrix.

    `options` go to `attend`; of them only bias, scale, softcap and sinks reach the oracle: what the masks mean
    is said by `visible` alone.
    """
    options = options or {}
    numbers = {name: options.get(name) for name in ("bias", "scale", "softcap", "sinks")}
    truth = brute(query, key, value, visible=visible, **numbers)
    weights, lse, output = plains(query, key, value, visible=visible, dtype=yardstick, **numbers)
    matrix = kizuki.attend(query, key, backend=backend, **options)
    got = matrix @ value
    assert got.dtype is query.dtype
    assert tuple(got.shape) == tuple(truth.output.shape)
    assert_accurate(got, truth.output, output, "output")
    assert_accurate(matrix.lse, truth.lse, lse, "lse")
    assert_accurate(matrix.dense(), truth.weights, weights, "weights")
    assert not matrix.dense()[~truth.seen.reshape(matrix.shape)].any(), "an absent key has weight"
    return matrix
