"""What the lesson's tests share: a lesson of random numbers, the names of its numbers, a random model's source."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
from tiny import tiny

from kizuki.lesson import Material, Projection
from kizuki.lesson.material import build
from kizuki.models import Tokens


def random_lesson(masked: bool = True, rotation: bool = True, bias: bool = True) -> Material:
    """Six tokens, four heads on two, d = 4, values of 3; its q, k, v follow from its own x and W."""
    draw = np.random.default_rng(5)
    heads, kv, n, d, dv, width = 4, 2, 6, 4, 3, 10
    angle = draw.uniform(0, 6, (n, d // 2))

    def numbers(*shape: int) -> Any:
        return draw.standard_normal(shape).astype(np.float32)

    around = Projection(
        x=numbers(n, width),
        wq=numbers(d, width),
        wk=numbers(d, width),
        wv=numbers(dv, width),
        wo=numbers(width, dv),
        bq=numbers(d) if bias else None,
        bk=numbers(d) if bias else None,
        bv=numbers(dv) if bias else None,
        cos=np.tile(np.cos(angle), 2).astype(np.float32) if rotation else None,
        sin=np.tile(np.sin(angle), 2).astype(np.float32) if rotation else None,
        attention=numbers(n, width),
        residual=numbers(n, width),
        shares=np.abs(numbers(heads, n)),
    )
    query, key, value = numbers(heads, n, d), numbers(kv, n, d), numbers(kv, n, dv)
    query[3], key[1], value[1] = around.rotated("q"), around.rotated("k"), around.raw("v")
    own = np.tril(np.ones((n, n), dtype=bool)) if masked else np.ones((n, n), dtype=bool)
    made = build(
        text="a b",
        labels=[f" t{i}" for i in range(n)],
        ids=list(range(n)),
        model="random",
        layer=2,
        layers=3,
        query=query,
        key=key,
        value=value,
        scale=0.4,
        own=own,
        head=3,
    )
    return replace(made, projection=around, why="")


def names_of(made: Material) -> list[str]:
    n, d, dv = len(made), made.head_dim, made.value.shape[2]
    names = [
        f"{kind}[{i},{j}]"
        for kind, i, j in product(("dot", "scaled", "exp", "weight", "cosine"), range(n), range(n))
    ]
    names += [f"{kind}[{i}]" for kind, i in product(("sum", "size_q", "size_k"), range(n))]
    names += [f"{kind}[{i},{c}]" for kind, i, c in product(("q", "k", "raw_q", "raw_k"), range(n), range(d))]
    names += [f"{kind}[{i},{c}]" for kind, i, c in product(("v", "z"), range(n), range(dv))]
    width = 0 if made.projection is None else made.projection.x.shape[1]
    return names + [
        f"{kind}[{i},{m}]" for kind, i, m in product(("x", "o", "out"), range(n), range(0, width, 3))
    ]


def source_of(name: str, count: int = 9) -> Any:
    tokens = Tokens(
        "w" * count,
        [(7 * i + 3) % 90 for i in range(count)],
        [(i, i + 1) for i in range(count)],
        [f"w{i}" for i in range(count)],
        [False] * count,
    )
    kind = "encoder" if "bert" in name else "decoder"
    return SimpleNamespace(
        name=name,
        model=tiny(name),
        kind=kind,
        max_positions=64,
        origin="random numbers",
        tokenize=lambda _: tokens,
    )
