"""Are packed documents, given as lengths, offsets or ids, what the documents are alone?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import brute, plains
from tolerance import assert_accurate, assert_agrees

import kizuki
from kizuki import masks, portable

LENGTHS = [0, 130, 1, 0, 257, 0]
OFFSETS = [0, 0, 130, 131, 131, 388, 388]
IDS = torch.tensor([5] * 130 + [-2] + [7] * 257)
BACKENDS = ("cpu", "portable")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "rule",
    [masks.documents(LENGTHS), masks.documents(offsets=OFFSETS), masks.documents(ids=IDS)],
    ids=["lengths", "offsets", "ids"],
)
def test_every_way_to_say_it_is_the_same(rule: masks.Mask, backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 388, 16).unbind(0)
    same = IDS[:, None] == IDS
    causal = torch.ones(388, 388, dtype=torch.bool).tril()
    A = assert_agrees(
        q, k, v, backend=backend, visible=same & causal, options={"mask": rule & masks.causal()}
    )
    got = A @ v
    for start, stop in ((0, 130), (130, 131), (131, 388)):
        alone = [t[:, :, start:stop] for t in (q, k, v)]
        truth = brute(*alone, visible=causal[start:stop, start:stop])
        plain = plains(*alone, visible=causal[start:stop, start:stop])[2]
        assert_accurate(got[:, :, start:stop], truth.output, plain, "a document as if alone")
    assert torch.equal(
        got[:, :, :130], kizuki.attention(*(t[:, :, :130] for t in (q, k, v)), causal=True, backend=backend)
    ), "the first: its blocks are the same"


def test_blocks_between_documents_cost_nothing() -> None:
    q = torch.zeros(1, 1, 4096, 8)
    scores = []
    for rule in (masks.documents(offsets=[0, 0, 1024, 1024, 2048, 3072, 4096]), None):
        tiles = portable.tiles(kizuki.attend(q, q, mask=rule).problem)
        scores.append(sum(tile.scores.numel() for tile in tiles))
    assert scores == [4 * 1024 * 1024, 4096 * 4096]


def test_gradients_stay_in_their_document() -> None:
    torch.manual_seed(0)
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 2, 388, 16).unbind(0))
    output = kizuki.attention(q, k, v, mask=masks.documents(LENGTHS))
    output[:, :, :130].sum().backward()
    for t in (q, k, v):
        assert t.grad is not None
        assert t.grad[:, :, :130].any()
        assert not t.grad[:, :, 130:].any()


def test_queries_and_keys_packed_apart() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 8), torch.randn(2, 9, 8), torch.randn(2, 9, 8)
    rule = masks.documents(offsets=[0, 2, 2, 5], key_offsets=[0, 4, 7, 9])
    got = kizuki.attention(q, k, v, mask=rule)
    visible = torch.zeros(5, 9, dtype=torch.bool)
    visible[:2, :4], visible[2:, 7:] = True, True
    truth = brute(q, k, v, visible=visible)
    assert_accurate(got, truth.output, plains(q, k, v, visible=visible)[2])
    nothing = masks.documents(offsets=[0, 2, 5], key_offsets=[0, 0, 9])
    assert not kizuki.attention(q, k, v, mask=nothing)[:, :2].any(), "queries of a document without keys"


Q = torch.zeros(1, 10, 8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: masks.documents(offsets=[1, 4]), ["begins with 1", "0"]),
        (lambda: masks.documents(offsets=[0, 5, 3, 10]), ["5", "3", "overlap"]),
        (lambda: masks.documents(offsets=[0.0, 2.0]), ["offsets", "whole"]),
        (lambda: masks.documents(offsets=[]), ["offsets"]),
        (lambda: masks.documents([3], offsets=[0, 3]), ["one of"]),
        (lambda: masks.documents(), ["one of"]),
        (lambda: masks.documents([3], key_offsets=[0, 3]), ["key_offsets"]),
        (lambda: masks.documents(offsets=[0, 1, 3], key_offsets=[0, 3]), ["1 documents", "2"]),
        (lambda: masks.documents([4, -1]), ["-1", ">= 0"]),
        (lambda: kizuki.attend(Q, Q, mask=masks.documents(offsets=[0, 3, 11])), ["11", "10"]),
        (lambda: kizuki.attend(Q, Q, mask=masks.documents([3, 4])), ["7", "10"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(call: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
