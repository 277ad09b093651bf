"""What the tests of the server and the widget share: runs of given matrices, and answers unpacked."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import kizuki
from kizuki.explorer.answers import Answers


def matrix(
    count: int = 37, heads: int = 4, kv_heads: int = 2, dim: int = 6, seed: int = 1, **options: Any
) -> kizuki.AttentionMatrix:
    make = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(1, heads, count, dim, generator=make)
    key = 2 * torch.randn(1, kv_heads, count, dim, generator=make)
    return kizuki.attend(query, key, **({"causal": True} | options))


class Recorded:
    """A recording made of given matrices."""

    def __init__(self, matrices: dict[int, kizuki.AttentionMatrix]) -> None:
        self.matrices = matrices
        self.layers = tuple(matrices)
        self.heads = None
        self.model_name = "random numbers"
        self.versions = None

    def __getitem__(self, layer: int) -> kizuki.AttentionMatrix:
        return self.matrices[layer]

    def rule(self, layer: int) -> str:
        return "causal"

    def value(self, layer: int) -> torch.Tensor:
        key = self.matrices[layer].key
        return torch.randn(key.shape, generator=torch.Generator().manual_seed(layer))


def run_of(matrices: dict[int, kizuki.AttentionMatrix], words: list[str] | None = None) -> Any:
    count = next(iter(matrices.values())).shape[-1]
    labels = words or [f"w{i} " for i in range(count)]
    ends = np.cumsum([len(label) for label in labels]).tolist()
    return SimpleNamespace(
        tokens=SimpleNamespace(
            text="".join(labels),
            ids=list(range(count)),
            offsets=list(zip([0, *ends[:-1]], ends, strict=True)),
            labels=labels,
            special=[False] * count,
        ),
        recording=Recorded(matrices),
        predictions=None,
        note="",
        seconds={"forward": 0.25},
        source=SimpleNamespace(name="random", kind="decoder", origin=str(Path("somewhere").absolute())),
    )


def unpack(data: bytes) -> dict[str, Any]:
    """An answer's fields, read by the format's description and not by the code that writes it."""
    size = int.from_bytes(data[:4], "little")
    fields = json.loads(data[4 : 4 + size])
    names = fields.pop("floats", [])
    at = 4 + size
    for name, kind, length in fields.pop("arrays"):
        at += -at % 8
        fields[name] = np.frombuffer(data, f"<{kind}", length, at)
        at += fields[name].nbytes
    assert at == len(data)
    floats = fields.pop("floats", np.zeros(0)).tolist()
    return fields | dict(zip(names, floats, strict=True))


def asked(answers: Answers, what: str, **parameters: object) -> dict[str, Any]:
    return unpack(answers.ask(what, {name: str(value) for name, value in parameters.items()}))
