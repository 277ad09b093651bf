"""Every user error of the core: the right class, one line, naming the argument, what was expected and what came.

Nothing may run first: the tests make every kernel fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import randn

import kizuki
from kizuki import KizukiTypeError, OptionError, ShapeError, SizeError, backends, masks, portable

Q, K, V = randn(2, 4, 5, 8), randn(2, 2, 5, 8), randn(2, 2, 5, 6)
LONG = randn(2, 2, 9, 8)
META = torch.empty(2, 4, 5, 8, device="meta")


def attend(query: Any = Q, key: Any = K, **options: Any) -> kizuki.AttentionMatrix:
    return kizuki.attend(query, key, **{"backend": "portable", **options})


def matrix() -> kizuki.AttentionMatrix:
    return attend()


def _asserts(*_: Any) -> Any:
    raise AssertionError("not today\nnor tomorrow")


Error = tuple[type[Exception], Callable[[], Any], list[str]]
S, O, T = ShapeError, OptionError, KizukiTypeError  # noqa: E741 - three letters for a table of three classes

# name: class, call, what the line must hold: the argument, what came, what was expected or the mend
ERRORS: dict[str, Error] = {
    # query and key
    "query a list": (T, lambda: attend([[1.0]]), ["query", "list", "torch.Tensor", "as_tensor"]),
    "key an array": (T, lambda: attend(Q, K.numpy()), ["key", "ndarray", "torch.Tensor"]),
    "query None": (T, lambda: attend(None), ["query", "NoneType"]),
    "query integer": (T, lambda: attend(Q.long(), K.long()), ["query", "int64", "float32"]),
    "query complex": (T, lambda: attend(Q.to(torch.complex64), K), ["query", "complex64"]),
    "query sparse": (T, lambda: attend(Q.to_sparse(), K), ["query", "sparse", "to_dense"]),
    "dtypes differ": (T, lambda: attend(Q, K.double()), ["key", "float64", "query", "float32", "convert"]),
    "devices differ": (T, lambda: attend(META, K), ["key", "cpu", "query", "meta", "move"]),
    "query of one axis": (S, lambda: attend(torch.ones(3), K), ["query", "1 axes", "at least 2", "[3]"]),
    "head_dim differs": (S, lambda: attend(Q, K[..., :7]), ["key", "head_dim 7", "8", "[2, 2, 5, 7]"]),
    "head_dim 0": (S, lambda: attend(Q[..., :0], K[..., :0]), ["query", "head_dim 0", "at least 1"]),
    "33 heads on 2": (
        S,
        lambda: attend(randn(1, 33, 5, 8), randn(1, 2, 5, 8)),
        ["key", "2 heads", "33", "divide"],
    ),
    "more key heads than query heads": (S, lambda: attend(K, Q), ["key", "4 heads", "2", "divide"]),
    "no key heads": (S, lambda: attend(Q, K[:, :0]), ["key", "0 heads", "4"]),
    "batches differ": (S, lambda: attend(Q, randn(3, 2, 5, 8)), ["key", "[3]", "query", "[2]", "equal or 1"]),
    # value
    "value None": (T, lambda: matrix() @ None, ["value", "NoneType"]),
    "value of another length": (
        S,
        lambda: matrix() @ V[:, :, :3],
        ["value", "3 keys", "key", "5", "same length"],
    ),
    "value of another dtype": (T, lambda: matrix() @ V.half(), ["value", "float16", "float32"]),
    "value on another device": (T, lambda: matrix() @ V.to("meta"), ["value", "meta", "cpu"]),
    "value heads": (S, lambda: matrix() @ randn(2, 3, 5, 6), ["value", "3 heads", "4", "divide"]),
    "value batch": (S, lambda: matrix() @ randn(3, 2, 5, 6), ["value", "[3]", "A has [2]", "equal or 1"]),
    "attention value": (
        S,
        lambda: kizuki.attention(Q, K, V[:, :, :3]),
        ["kizuki.attention", "value", "3 keys"],
    ),
    "y of another length": (S, lambda: attend(Q, LONG).T @ LONG, ["y", "9 queries", "5"]),
    "y an array": (T, lambda: matrix().T @ V.numpy(), ["y", "ndarray"]),
    "a product that does not meet": (S, lambda: attend(Q, LONG) @ attend(Q, LONG), ["9 keys", "5 queries"]),
    # options
    "scale a string": (T, lambda: attend(scale="1"), ["scale", "str", "number"]),
    "scale True": (T, lambda: attend(scale=True), ["scale", "bool"]),
    "scale NaN": (O, lambda: attend(scale=float("nan")), ["scale", "nan", "finite"]),
    "scale infinite": (O, lambda: attend(scale=float("inf")), ["scale", "inf", "finite"]),
    "scale too large": (O, lambda: attend(scale=1e39), ["scale", "1e+39", "±1.7e+38", "float32"]),
    "scale too low": (O, lambda: attend(Q.half(), K.half(), scale=-1e39), ["scale", "-1e+39", "float32"]),
    "scale a tensor, too large": (
        O,
        lambda: attend(scale=torch.tensor(1e39, dtype=torch.float64)),
        ["scale", "1e+39", "float32"],
    ),
    "scale too large for float64": (O, lambda: attend(Q.double(), K.double(), scale=1.5e308), ["±8.99e+307"]),
    "scale of 400 digits": (O, lambda: attend(scale=10**400), ["scale", "inf", "finite"]),
    "softcap 0": (O, lambda: attend(softcap=0), ["softcap", "0", "above 0", "None"]),
    "softcap negative": (O, lambda: attend(softcap=-2.0), ["softcap", "-2.0", "above 0"]),
    "softcap a string": (T, lambda: attend(softcap="30"), ["softcap", "str", "number"]),
    "causal an alignment": (T, lambda: attend(causal="lower_right"), ["causal", "str", "masks.causal"]),
    "causal None": (T, lambda: attend(causal=None), ["causal", "NoneType", "True or False"]),
    "window a number": (T, lambda: attend(window=4), ["window", "4", "(left, right)"]),
    "window of three": (T, lambda: attend(window=(1, 2, 3)), ["window", "(1, 2, 3)", "(left, right)"]),
    "window negative": (O, lambda: attend(window=(-1, 0)), ["left", "-1", ">= 0"]),
    "window a float": (O, lambda: attend(window=(1, 2.0)), ["right", "2.0", "whole number"]),
    "backend unknown": (O, lambda: attend(backend="cuda"), ["backend", "cuda", "auto", "cpu", "portable"]),
    "backend cpu, elsewhere": (
        O,
        lambda: attend(META, META, backend="cpu"),
        ["backend", "cpu", "meta", "auto"],
    ),
    # causal and window with queries ≠ keys
    "causal 5 by 9": (
        O,
        lambda: attend(Q, LONG, causal=True),
        ["causal", "5 and 9", "lower_right", "upper_left"],
    ),
    "window 5 by 9": (
        O,
        lambda: attend(Q, LONG, window=(1, 0)),
        ["window", "5 and 9", "masks.window(1, 0, align="],
    ),
    "causal inside a combination": (
        O,
        lambda: attend(Q, LONG, mask=~(masks.causal() | masks.window(1, 0, "lower_right"))),
        ["causal", "5 and 9"],
    ),
    # bias and sinks
    "bias boolean": (T, lambda: attend(bias=torch.ones(5, 5, dtype=torch.bool)), ["bias", "bool", "mask="]),
    "bias integer": (T, lambda: attend(bias=torch.ones(5, 5).long()), ["bias", "int64", "floating"]),
    "bias a number": (T, lambda: attend(bias=1.0), ["bias", "float", "floating tensor"]),
    "bias of another length": (S, lambda: attend(bias=randn(5, 4)), ["bias", "[5, 4]", "[2, 4, 5, 5]"]),
    "bias that would enlarge A": (
        S,
        lambda: attend(bias=randn(3, 2, 4, 5, 5)),
        ["bias", "[3, 2, 4, 5, 5]", "broadcast"],
    ),
    "bias of key heads": (S, lambda: attend(bias=randn(2, 5, 5)), ["bias", "[2, 5, 5]", "[2, 4, 5, 5]"]),
    "bias elsewhere": (T, lambda: attend(bias=randn(5, 5).to("meta")), ["bias", "meta", "cpu"]),
    "sinks a list": (T, lambda: attend(sinks=[0.0] * 4), ["sinks is a list", "tensor", "[4]"]),
    "sinks integer": (T, lambda: attend(sinks=torch.zeros(4).long()), ["sinks is torch.int64", "floating"]),
    "sinks of key heads": (S, lambda: attend(sinks=torch.zeros(2)), ["sinks", "[2]", "[4]", "query head"]),
    "sinks elsewhere": (T, lambda: attend(sinks=torch.zeros(4, device="meta")), ["sinks", "meta", "cpu"]),
    # masks
    "mask float": (T, lambda: attend(mask=torch.zeros(5, 5)), ["mask", "float32", "True = visible", "bias="]),
    "mask 0 and 1": (T, lambda: attend(mask=torch.ones(5, 5).long()), ["mask", "int64", ".bool()"]),
    "mask a list": (T, lambda: attend(mask=[[True]]), ["mask", "list", "boolean tensor"]),
    "mask a function": (T, lambda: attend(mask=lambda b, h, i, j: j <= i), ["mask", "function"]),
    "mask of another length": (
        S,
        lambda: attend(mask=torch.ones(5, 4).bool()),
        ["mask", "[5, 4]", "[2, 4, 5, 5]"],
    ),
    "mask elsewhere": (T, lambda: attend(mask=torch.ones(5, 5).bool().to("meta")), ["mask", "meta", "cpu"]),
    "mask and": (T, lambda: masks.causal() and masks.window(1, 0), ["truth value", "&, | and ~"]),
    "mask & a float": (T, lambda: masks.causal() & torch.ones(5, 5), ["float32", "boolean"]),
    "float & mask": (T, lambda: torch.ones(5, 5) & masks.causal(), ["float32", "boolean"]),
    "mask | None": (T, lambda: masks.causal() | None, ["NoneType", "boolean tensor"]),
    "alignment unknown": (
        O,
        lambda: masks.causal("bottom"),
        ["align", "bottom", "lower_right", "upper_left"],
    ),
    "window alignment": (O, lambda: masks.window(1, 0, "left"), ["align", "left", "lower_right"]),
    "documents of nothing": (O, lambda: masks.documents(), ["documents", "lengths", "ids"]),
    "documents of both": (O, lambda: masks.documents([5], ids=torch.zeros(5).long()), ["lengths", "ids"]),
    "documents of floats": (T, lambda: masks.documents([2.5, 2.5]), ["lengths", "whole numbers"]),
    "documents negative": (O, lambda: masks.documents([6, -1]), ["lengths", "-1", ">= 0"]),
    "documents too short": (
        S,
        lambda: attend(mask=masks.documents([2, 2])),
        ["documents", "4", "5", "sum to 5"],
    ),
    "document ids float": (T, lambda: masks.documents(ids=torch.zeros(5)), ["ids", "integer tensor"]),
    "document ids of a wrong batch": (
        S,
        lambda: attend(mask=masks.documents(ids=torch.zeros(3, 5).long())),
        ["documents", "[3, 5]", "[2, queries]"],
    ),
    "document key_ids too short": (
        S,
        lambda: attend(Q, LONG, mask=masks.documents(ids=torch.zeros(5).long())),
        ["documents", "5 keys", "9"],
    ),
    "keys float": (T, lambda: masks.keys(torch.ones(5)), ["keys", "float32", "boolean", "True = visible"]),
    "keys too short": (S, lambda: attend(mask=masks.keys(torch.ones(4).bool())), ["keys", "4", "5"]),
    "keys of a wrong batch": (
        S,
        lambda: attend(mask=masks.keys(torch.ones(3, 5).bool())),
        ["keys", "[3, 5]", "[2, keys]"],
    ),
    "keys elsewhere": (
        T,
        lambda: attend(mask=masks.keys(torch.ones(5).bool().to("meta"))),
        ["keys", "meta", "cpu"],
    ),
    "lengths of nothing": (O, lambda: masks.lengths(), ["lengths", "query=", "key="]),
    "lengths float": (T, lambda: masks.lengths(key=[1.5]), ["key", "float32", "whole numbers"]),
    "lengths too long": (O, lambda: attend(mask=masks.lengths(key=[5, 6])), ["lengths key", "6", "0 … 5"]),
    "lengths negative": (O, lambda: attend(mask=masks.lengths(query=-1)), ["lengths query", "-1", "0 … 5"]),
    "lengths of a wrong batch": (
        S,
        lambda: attend(mask=masks.lengths(key=[1, 2, 3])),
        ["lengths key", "[3]", "[2]"],
    ),
    "dense float": (T, lambda: masks.dense(torch.ones(5, 5)), ["dense", "float32", "boolean"]),
    "where not callable": (T, lambda: masks.where(True), ["fn", "bool", "callable"]),
    "where of floats": (
        T,
        lambda: attend(mask=masks.where(lambda b, h, i, j: i - j)),
        ["fn", "int64", "boolean"],
    ),
    "where of another shape": (
        S,
        lambda: attend(mask=masks.where(lambda b, h, i, j: torch.ones(7, 7).bool())),
        ["fn", "[7, 7]", "broadcast"],
    ),
    "where that raises": (
        O,
        lambda: attend(mask=masks.where(lambda b, h, i, j: 1 // 0)),
        ["masks.where", "<lambda>", "ZeroDivisionError", "by zero"],
    ),
    "where that asserts": (
        O,
        lambda: attend(mask=masks.where(_asserts)),
        ["masks.where", "_asserts", "takes *args", "AssertionError: not today"],
    ),
    "score that asserts": (
        O,
        lambda: attend(score=_asserts),
        ["kizuki.attend: score _asserts", "takes *args", "AssertionError: not today"],
    ),
    # readings
    "topk negative": (O, lambda: matrix().topk(-1), ["k", "-1", ">= 0"]),
    "topk a float": (O, lambda: matrix().topk(2.0), ["k", "2.0", "whole number"]),
    "topk True": (O, lambda: matrix().topk(True), ["k", "True", "whole number"]),
    "received": (O, lambda: matrix().received("max"), ["reduce", "max", "sum", "mean"]),
    "pool of 0 rows": (O, lambda: matrix().pool(0, 1), ["rows", "0", "1 … 5"]),
    "pool of too many columns": (O, lambda: matrix().pool(1, 6), ["cols", "6", "1 … 5"]),
    "pool of floats": (O, lambda: matrix().pool(1.0, 1), ["rows", "1.0", "whole number"]),
    "pool reduce": (O, lambda: matrix().pool(1, 1, "mean"), ["reduce", "mean", "mass", "peak"]),
    "mass of floats": (T, lambda: matrix().mass(torch.zeros(5)), ["groups", "float32", "integer"]),
    "mass of a list": (T, lambda: matrix().mass([0] * 5), ["groups", "list", "integer"]),
    "mass of rows of another length": (
        S,
        lambda: matrix().mass(torch.zeros(5).long(), rows=torch.zeros(9).long()),
        ["rows", "[9]", "a query"],
    ),
    "mass of another length": (S, lambda: matrix().mass(torch.zeros(4).long()), ["groups", "[4]", "[5]"]),
    "mass of a negative group": (
        O,
        lambda: matrix().mass(torch.tensor([0, 1, 2, -2, 0])),
        ["groups", "-2", "−1"],
    ),
    "mass of a huge group": (
        SizeError,
        lambda: matrix().mass(torch.tensor([0, 1, 2, 3, 1 << 40])),
        ["groups", "1,099,511,627,777", "above"],
    ),
    "mass elsewhere": (
        T,
        lambda: matrix().mass(torch.zeros(5, device="meta").long()),
        ["groups", "meta", "cpu"],
    ),
    "observe a dict": (T, lambda: matrix().observe({"topk": 3}), ["what", "dict", "kizuki.Observe"]),
    "dense above its limit": (SizeError, lambda: matrix().dense(limit=10), ["200", "limit=10", "topk"]),
    "check of another length": (
        S,
        lambda: kizuki.check(Q, K, V[:, :, :3]),
        ["kizuki.check", "value", "3 keys"],
    ),
}


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a kernel ran before the error")

    for name in ("forward", "transposed", "backward", "dense", "row_weights", "fold"):
        monkeypatch.setattr(portable, name, never)
    monkeypatch.setattr(backends.Portable, "observe", never)


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_says_it_in_one_line(name: str) -> None:
    kind, call, parts = ERRORS[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert type(caught.value) is kind
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 300, "one line a person reads"
    for part in parts:
        assert part in line, f"{part!r} is not in: {line}"
    assert line.startswith(("kizuki.", "A", "mask", "other")), line


def test_the_classes_are_the_builtin_ones() -> None:
    assert issubclass(ShapeError, ValueError)
    assert issubclass(OptionError, ValueError)
    assert issubclass(SizeError, ValueError)
    assert issubclass(KizukiTypeError, TypeError)


def test_errors_of_attend_name_what_the_caller_called() -> None:
    with pytest.raises(ShapeError, match=r"^kizuki\.attend: key"):
        kizuki.attend(Q, K[..., :7])
    for broken in (
        {"key": K[..., :7]},
        {"scale": "x"},
        {"mask": torch.ones(5, 5)},
        {"bias": 1},
        {"causal": 1},
    ):
        with pytest.raises((ValueError, TypeError), match=r"^kizuki\.attention: "):
            kizuki.attention(**{"query": Q, "key": K, "value": V, **broken})
        with pytest.raises((ValueError, TypeError), match=r"^kizuki\.check: "):
            kizuki.check(**{"query": Q, "key": K, "value": V, **broken})
