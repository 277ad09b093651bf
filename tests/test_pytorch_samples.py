"""PyTorch's own sample inputs for its attention, passed through kizuki's: the same numbers and the same gradients.

The samples are those that PyTorch tests itself with (`torch.testing._internal`); they need the package expecttest.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tolerance import assert_accurate
from torch import Tensor
from torch.nn.functional import multi_head_attention_forward

import kizuki
from kizuki.nn import MultiheadAttention

DTYPES = (torch.float32, torch.float64)


@cache
def samples(name: str, dtype: torch.dtype) -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    (op,) = (op for op in op_db if op.name == f"nn.functional.{name}")
    return list(op.sample_inputs("cpu", dtype, requires_grad=False))


def wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def derived(function: Any, leaves: list[Tensor]) -> list[Tensor]:
    """What a function gives, and its gradients for all leaves."""
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad((output * output.detach().cos()).sum(), leaves)]


Triple = tuple[Tensor, Tensor, Tensor]  # kizuki's, PyTorch's in float64, PyTorch's


def assert_same(found: dict[str, Triple]) -> None:
    """The same in float64, by the measure PyTorch's tests have; in float32 by the rule of accuracy.

    A sample is a few numbers, whose errors are luck: the rule looks at all samples as one result.
    """
    for name, (got, truth, plain) in found.items():
        assert (got.shape, got.dtype) == (plain.shape, plain.dtype), name
        if got.dtype is torch.float64:
            torch.testing.assert_close(got, truth, msg=lambda said, name=name: f"{name}: {said}")
    if got.dtype is not torch.float64:
        got, truth, plain = (
            torch.cat([t.flatten() for t in each]) for each in zip(*found.values(), strict=True)
        )
        assert_accurate(got, truth, plain, "all samples together")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaled_dot_product_attention(dtype: torch.dtype) -> None:
    theirs, mine = torch.nn.functional.scaled_dot_product_attention, kizuki.scaled_dot_product_attention
    found: dict[str, Triple] = {}
    for at, sample in enumerate(samples("scaled_dot_product_attention", dtype)):
        operands, options = [sample.input, *sample.args], dict(sample.kwargs)
        dropped = options.pop("dropout_p", 0.0)
        if dropped:
            assert mine(*operands, dropout_p=dropped, **options).shape == theirs(*operands, **options).shape
        truth = theirs(*map(wide, operands), **{n: wide(x) for n, x in options.items()})
        found[f"sample {at}"] = mine(*operands, **options), truth, theirs(*operands, **options)
        if dtype is torch.float64:
            up = torch.linspace(-1, 1, truth.numel(), dtype=dtype).reshape(truth.shape)
            pair = []
            for function in (mine, theirs):
                leaves = [t.detach().clone().requires_grad_() for t in operands]
                pair.append(torch.autograd.grad(function(*leaves, **options), leaves, up))
            for name, got, want in zip(("query", "key", "value"), *pair, strict=True):
                found[f"sample {at}, gradient of {name}"] = got, want, want
    assert len(found) >= 20
    assert_same(found)


NAMES = (
    "query",
    "key",
    "value",
    "embed_dim_to_check",
    "num_heads",
    "in_proj_weight",
    "in_proj_bias",
    "bias_k",
    "bias_v",
    "add_zero_attn",
    "dropout_p",
    "out_proj_weight",
    "out_proj_bias",
)


def layer_of(call: dict[str, Any]) -> MultiheadAttention:
    """kizuki's layer with the weights that a call of the function names."""
    separate = call.get("use_separate_proj_weight", False)
    made = MultiheadAttention(
        call["embed_dim_to_check"],
        call["num_heads"],
        dropout=call["dropout_p"],
        bias=call["in_proj_bias"] is not None,
        add_bias_kv=call["bias_k"] is not None,
        add_zero_attn=call["add_zero_attn"],
        kdim=call["key"].shape[-1] if separate else None,
        vdim=call["value"].shape[-1] if separate else None,
        dtype=call["query"].dtype,
    )
    state = {
        "in_proj_weight": call["in_proj_weight"],
        "in_proj_bias": call["in_proj_bias"],
        "bias_k": call["bias_k"],
        "bias_v": call["bias_v"],
        "out_proj.weight": call["out_proj_weight"],
        "out_proj.bias": call["out_proj_bias"],
    }
    if separate and made.in_proj_weight is None:
        state |= {f"{n}_proj_weight": call[f"{n}_proj_weight"] for n in "qkv"}
        del state["in_proj_weight"]
    elif separate:
        state["in_proj_weight"] = torch.cat([call[f"{n}_proj_weight"] for n in "qkv"])
    known = made.state_dict()
    made.load_state_dict(
        {n: known[n] if t is None else t.reshape(known[n].shape) for n, t in state.items() if n in known}
    )
    return made.eval()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_multi_head_attention(dtype: torch.dtype) -> None:
    """In evaluation: where a sample asks for dropout, that it is off is part of what is tested (PT#124464)."""
    found: dict[str, Triple] = {}
    met = set[str]()
    for at, sample in enumerate(samples("multi_head_attention_forward", dtype)):
        call = dict(zip(NAMES, [sample.input, *sample.args], strict=True)) | sample.kwargs
        call["training"] = False
        met |= {n for n, x in call.items() if isinstance(x, Tensor)}
        output, weights = multi_head_attention_forward(**call)
        truth, truths = multi_head_attention_forward(**{n: wide(x) for n, x in call.items()})
        with torch.no_grad():
            got, gots = layer_of(call)(
                *(call[n] for n in ("query", "key", "value")), attn_mask=call["attn_mask"]
            )
        found[f"output of sample {at}"] = got, truth, output
        found[f"weights of sample {at}"] = gots, truths, weights
    assert len(found) >= 200
    assert_same(found)
    assert {"attn_mask", "bias_k", "q_proj_weight"} <= met, "the samples no longer have what is tested here"
