"""What torch's elementwise functions mean for one number, told to Numba: `torch.where(i >= j, s, 0.0)` compiles.

So that a function written for tensors is compiled as it is. Only what has one meaning for a number is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": lambda x: abs(x),
    "neg": lambda x: -x,
    "exp": lambda x: math.exp(x),
    "expm1": lambda x: math.expm1(x),
    "log": lambda x: math.log(x),
    "log1p": lambda x: math.log1p(x),
    "sqrt": lambda x: math.sqrt(x),
    "sin": lambda x: math.sin(x),
    "cos": lambda x: math.cos(x),
    "tan": lambda x: math.tan(x),
    "atan": lambda x: math.atan(x),
    "sinh": lambda x: math.sinh(x),
    "cosh": lambda x: math.cosh(x),
    "tanh": lambda x: math.tanh(x),
    "erf": lambda x: math.erf(x),
    "floor": lambda x: math.floor(x) + 0.0,
    "ceil": lambda x: math.ceil(x) + 0.0,
    "square": lambda x: x * x,
    "sigmoid": lambda x: 1.0 / (1.0 + math.exp(-x)),
    "relu": lambda x: 0.0 if x <= 0 else x,
    "isnan": lambda x: math.isnan(x),
    "isinf": lambda x: math.isinf(x),
    "isfinite": lambda x: math.isfinite(x),
    "logical_not": lambda x: not x,
}
# NaN in either operand is the answer, as it is in torch; Python's max and min would pass it over.
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "maximum": lambda x, y: x if x != x or x > y else y,
    "minimum": lambda x, y: x if x != x or x < y else y,
    "logical_and": lambda x, y: bool(x) and bool(y),
    "logical_or": lambda x, y: bool(x) or bool(y),
    "logical_xor": lambda x, y: bool(x) != bool(y),
}
METHODS = ("abs", "exp", "log", "sqrt", "sin", "cos", "tanh", "square", "sigmoid", "relu")


@lru_cache(maxsize=1)
def teach() -> None:
    """Tell Numba, once."""
    from numba import types
    from numba.extending import overload, overload_method

    for name, meaning in UNARY.items():
        overload(getattr(torch, name), strict=False)(_one(meaning))
        if name in METHODS:
            for kind in (types.Float, types.Integer):
                overload_method(kind, name, strict=False)(_one(meaning))
    for name, meaning2 in BINARY.items():
        overload(getattr(torch, name), strict=False)(_two(meaning2))
    overload(torch.where, strict=False)(_three)


def _one(meaning: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def typed(x: Any) -> Any:
        return meaning

    return typed


def _two(meaning: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def typed(x: Any, y: Any) -> Any:
        return meaning

    return typed


def _three(condition: Any, x: Any, y: Any) -> Any:
    return lambda condition, x, y: x if condition else y
