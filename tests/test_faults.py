"""The faults people met in attention software (docs/faults.md), each as its own small input: forward and backward.

Every backend gives what the definition says, and so does the reference. The kinds of fault behind the inputs are tested
where docs/faults.md says; that what it names is there is tested here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import BACKENDS, INF, NAN, brute, causal, documents, randn, window
from problems import LUCK, Drawn, gradients, reports
from test_agreement import LAYOUTS, SHAPES
from tolerance import assert_agrees
from torch import Tensor

import kizuki
from kizuki import masks, reference
from kizuki.nn import MultiheadAttention
from kizuki.problem import build

DOCS = Path(__file__).resolve().parents[1] / "docs" / "faults.md"
Case = tuple[Tensor, Tensor, Tensor, dict[str, Any], Any]  # q, k, v, options, what they show


def qkv(queries: int, keys: int, *lead: int, dim: int = 8, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    lead = lead or (1, 2)
    return tuple(randn(*lead, n, dim, seed=s, **more) for s, n in enumerate((queries, keys, keys)))  # type: ignore[return-value]


def empty_row() -> Case:
    seen = torch.rand(6, 10, generator=torch.Generator().manual_seed(0)) < 0.6
    seen[5] = False
    return *qkv(6, 10), {"mask": seen}, seen


def empty_leading_block() -> Case:
    seen = torch.ones(700, dtype=torch.bool)
    seen[:600] = False
    return *qkv(3, 700, 1, 1, dim=4), {"mask": masks.keys(seen)}, seen


def finfo_min() -> Case:
    bias = torch.zeros(4, 6)
    bias[1], bias[2, :3] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
    return *qkv(4, 6), {"bias": bias}, None


def poisoned_column() -> Case:
    q, k, v = qkv(5, 5)
    k[:, :, 1], v[:, :, 1] = NAN, INF
    seen = torch.ones(5, 5, dtype=torch.bool)
    seen[:, 1] = False
    return q, k, v, {"mask": seen}, seen


def causal_with(extra: str) -> Callable[[], Case]:
    def made() -> Case:
        padding = torch.tensor([True] * 5 + [False] * 2)
        options: dict[str, Any] = {"causal": True}
        visible = causal(7, 7)
        if extra == "padding":
            options["mask"], visible = masks.keys(padding), visible & padding.numpy()
        elif extra == "a bias":
            options["bias"] = randn(2, 7, 7, seed=5)
        else:
            options["window"], visible = (2, 0), visible & window(7, 7, 2, 0)
        return *qkv(7, 7), options, visible

    return made


def aligned(queries: int, keys: int, align: str) -> Callable[[], Case]:
    return lambda: (
        *qkv(queries, keys),
        {"mask": masks.causal(align)},
        causal(queries, keys, align),
    )


def float_padding(dtype: torch.dtype, of_query: torch.dtype) -> Callable[[], Case]:
    def made() -> Case:
        seen = torch.tensor([True] * 5 + [False] * 2)
        return *qkv(7, 7, dtype=of_query), {"bias": torch.where(seen, 0.0, -INF).to(dtype)}, seen

    return made


def broadcast(*shape: int) -> Callable[[], Case]:
    def made() -> Case:
        q, k, v = randn(3, 2, 4, 7, 16), randn(3, 2, 4, 5, 16, seed=1), randn(3, 2, 4, 5, 16, seed=2)
        seen = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
        return q, k, v, {"mask": seen}, seen

    return made


def large_dots() -> Case:
    q, k, v = qkv(9, 9, dim=64, dtype=torch.float16)
    return q / q.abs().max() * 5.76, k / k.abs().max() * 3.83, v, {}, None


def capped() -> Case:
    q, k, v = qkv(6, 6)
    return 5 * q, k, v, {"softcap": 1.5, "causal": True, "bias": randn(6, 6, seed=4)}, causal(6, 6)


def packed() -> Case:
    ids = [1, 1, 1, 3, 3, 3, 3, 3]
    seen = causal(8, 8) & documents(ids)
    return *qkv(8, 8), {"mask": masks.documents([0, 3, 0, 5]), "causal": True}, seen


def shaped(name: str) -> Callable[[], Case]:
    return lambda: (*(randn(*shape, seed=s) for s, shape in enumerate(SHAPES[name])), {}, None)  # type: ignore[return-value]


def laid_out(name: str) -> Callable[[], Case]:
    return lambda: (*LAYOUTS[name](), {"causal": True}, causal(19, 19))  # type: ignore[return-value]


CASES: dict[str, Callable[[], Case]] = {
    "PT#103749 PT#27968": empty_row,
    "PT#103749, an empty leading block of keys": empty_leading_block,
    "PT#109517 PT#110213": finfo_min,
    "PT#101967": poisoned_column,
    **{f"PT#101531 PT#100709 PT#118972, {x}": causal_with(x) for x in ("padding", "a bias", "a window")},
    **{
        f"PT#103082 PT#108108 FA#1298, {q} by {k} {align}": aligned(q, k, align)
        for q, k in ((2, 6), (1, 9), (5, 2), (7, 7))
        for align in ("lower_right", "upper_left")
    },
    "PT#92554": float_padding(torch.float32, torch.float32),
    "PT#147209": float_padding(torch.float32, torch.bfloat16),
    "PT#120810, [1, 1, 5]": broadcast(1, 1, 5),
    "FA#17, [1, 1, N, N]": broadcast(1, 1, 7, 5),
    "FA#17, [1, 1, 1, N]": broadcast(1, 1, 1, 5),
    "HF#29623 vllm#3385": lambda: (*qkv(12, 12), {"window": (3, 0)}, window(12, 12, 3, 0)),
    "PT#119131": large_dots,
    "FA#1016 FI#1193 HF#32877": capped,
    "FA#1537": packed,
    **{f"FA#28 FA#67 FA#2427, {n}": shaped(n) for n in SHAPES if n.startswith("head_dim")},
    **{f"PT#143117, {n}": shaped(n) for n in ("9 query heads on 3", "K 8 heads, V 4")},
    "PT#133458": shaped("rank 5"),
    **{f"PT#112577 FA#355 PT#146377, {n}": laid_out(n) for n in LAYOUTS},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_each_input_gives_what_the_definition_says(name: str, backend: str) -> None:
    """Output, lse, weights and every gradient; a gradient of few numbers gets the allowance of problems.py."""
    query, key, value, options, visible = CASES[name]()
    numbers = {n: x for n, x in options.items() if n in ("bias", "scale", "softcap", "sinks")}
    rules = {n: x for n, x in options.items() if n not in numbers}
    matrix = assert_agrees(query, key, value, backend=backend, visible=visible, options=options)
    shape = (*matrix.shape[:-1], value.shape[-1])
    seen = np.ones((1, 1), dtype=bool) if visible is None else np.asarray(visible)
    up = randn(*shape, seed=9, dtype=query.dtype)
    problem = Drawn(query, key, value, rules, numbers, seen, up)
    wrong = [str(r) for r in reports(problem, backend) if not r.error <= LUCK * r.allowed]
    assert not wrong
    dead = ~problem.seen().any(-1)
    assert not gradients(problem, backend)["query"][dead].any(), "a row that sees nothing has a gradient"


@pytest.mark.parametrize("name", CASES)
def test_the_reference_gives_it_too(name: str) -> None:
    query, key, value, options, visible = CASES[name]()
    numbers = {n: options.get(n) for n in ("bias", "scale", "softcap", "sinks")}
    truth = brute(query, key, value, visible=visible, **numbers)
    exact = reference.evaluate(build(query, key, **options), value)
    for got, want in ((exact.output, truth.output), (exact.weights, truth.weights), (exact.lse, truth.lse)):
        assert np.allclose(got.reshape(want.shape), want, rtol=1e-9, atol=1e-12)


def test_33_heads_on_2_are_refused() -> None:
    """PT#143117."""
    with pytest.raises(kizuki.ShapeError, match="33"):
        kizuki.attend(randn(1, 33, 5, 8), randn(1, 2, 5, 8))


def test_true_is_visible_but_where_pytorch_says_hidden() -> None:
    """LLMs-from-scratch#1061, x-transformers#160: one convention; the layer that is PyTorch's flips it."""
    q, k, v = qkv(4, 4, 1, 1)
    mask = torch.tensor([True, True, False, True]).expand(4, 4)
    for output in (
        kizuki.attend(q, k, mask=mask).dense(),
        kizuki.attend(q, k, mask=masks.keys(mask[0])).dense(),
        kizuki.scaled_dot_product_attention(q, k, torch.eye(4)[None, None], attn_mask=mask),
    ):
        assert torch.equal(output[0, 0] > 0, mask)
    layer = MultiheadAttention(8, 1, batch_first=True).eval()
    for hidden in ({"attn_mask": ~mask}, {"key_padding_mask": ~mask[:1]}):
        assert torch.equal(layer(q[0], k[0], v[0], **hidden)[1][0] > 0, mask)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_rank_runs_the_same_kernel(backend: str) -> None:
    """PT#133458: five axes are no slow path."""
    flat, deep = (
        kizuki.attend(randn(*lead, 4, 9, 8), randn(*lead, 2, 9, 8), backend=backend)
        for lead in ((6,), (2, 3))
    )
    assert flat.plan() == deep.plan()


# -- the table -------------------------------------------------------------------------------------


def rows() -> list[list[str]]:
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in lines
        if re.match(r"\| \S+#", line)
    ]


def test_every_test_that_the_table_names_is_there() -> None:
    found = rows()
    assert len(found) >= 35
    here = Path(__file__).parent
    for ids, _, tests in found:
        named = re.findall(r"`(\w+)::(\w+)`", tests)
        assert named or tests.startswith("none:"), f"{ids} has neither a test nor the reason why not"
        for module, name in named:
            text = (here / f"{module}.py").read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{ids}: {module}.py has no {name}"


def test_every_input_here_is_in_the_table() -> None:
    known = set(re.findall(r"[A-Za-z]+#\d+", DOCS.read_text(encoding="utf-8")))
    assert set(re.findall(r"[A-Za-z]+#\d+", " ".join(CASES))) <= known
