"""What changes under a matrix that is held: is it read as it is now, or refused?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import BACKENDS, randn
from test_semantics import boolean, qkv

import kizuki
from kizuki import masks

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def test_a_mask_written_to_after_attend_is_read_as_it_is_now(backend: str) -> None:
    """The kept log-sum-exp and the mask must never be of two different times."""
    q, k, v = qkv(40, 40)
    seen = boolean(40, 40, seed=5)
    matrix = kizuki.attend(q, k, mask=seen, backend=backend)
    assert torch.isfinite(matrix.lse).all()
    seen.logical_not_()
    again = kizuki.attend(q, k, mask=seen, backend=backend)
    assert torch.equal(matrix.received(), again.received())
    assert torch.equal(matrix @ v, again @ v)


def test_a_rule_keeps_what_it_was_made_of(backend: str) -> None:
    q, k, v = qkv(40, 40)
    for make in (masks.keys, lambda t: masks.documents(ids=t.long())):
        given = torch.arange(40) % 3 == 0
        held = given.clone() if make is masks.keys else given.long()
        matrix = kizuki.attend(q, k, mask=make(held), backend=backend)
        before = matrix @ v
        held.zero_()
        assert torch.equal(matrix @ v, before)


def test_a_mask_written_to_before_backward_is_an_error(backend: str) -> None:
    q, k, v = qkv(20, 20)
    v.requires_grad_()
    seen = boolean(20, 20, seed=5)
    output = kizuki.attention(q, k, v, mask=seen, backend=backend)
    seen.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_inference_tensors_are_never_read_stale(backend: str) -> None:
    with torch.inference_mode():
        q, k, _ = (t.clone() for t in qkv(20, 20))
        matrix = kizuki.attend(q, k, backend=backend)
        assert torch.isfinite(matrix.lse).all()
        k.mul_(-3)
        assert float(matrix.max().max()) <= 1 + 1e-6


def test_operands_with_a_sign_kept_beside_them(backend: str) -> None:
    """A view with torch's negative bit has other numbers in memory than it has."""
    q, k, v = qkv(20, 20)
    views = [torch.complex(torch.zeros_like(t), -t).conj().imag for t in (q, k, v)]
    assert all(view.is_neg() for view in views)
    assert torch.equal(kizuki.attention(*views, backend=backend), kizuki.attention(q, k, v, backend=backend))


def test_a_mask_function_may_compute_attention_itself(backend: str) -> None:
    q, k, v = qkv(60, 60)
    other = randn(1, 2, 90, 16, seed=8)

    def plain(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i + j) % 3 != 0

    def busy(b: Any, h: Any, i: Any, j: Any) -> Any:
        kizuki.attention(other, other, other, backend=backend)
        return plain(b, h, i, j)

    want = kizuki.attention(q, k, v, mask=masks.where(plain), backend=backend)
    assert torch.equal(kizuki.attention(q, k, v, mask=masks.where(busy), backend=backend), want)
