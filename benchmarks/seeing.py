"""What looking costs: readings folded into the forward pass, beside the pass alone and beside built scores in torch.

    python benchmarks/seeing.py [--only fold,built,memory,rows,block] [--rounds 7]

One JSON line a row. Ratios are medians over rounds in which every contestant ran once, in turn, in one process; their
spread is the quartiles. The readings are compared with the built matrix before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import kizuki

ROWS = kizuki.Observe(topk=8, entropy=True, max=True, max_score=True)
ALL = kizuki.Observe(topk=8, entropy=True, max=True, max_score=True, received=True, pool=(512, 512))
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def in_turn(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, every round running each once; one round before does not count."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for at in range(rounds + 1):
        for name, run in contestants.items():
            begun = time.perf_counter()
            run()
            if at:
                times[name].append(time.perf_counter() - begun)
    return times


def row(what: str, of: list[float], against: list[float], bar: float, **more: object) -> None:
    ratios = sorted(a / b for a, b in zip(of, against, strict=True))
    first, _, third = statistics.quantiles(ratios, n=4)
    made = {
        "what": what,
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(first, 3), round(third, 3)],
        "bar": bar,
        "seconds": round(statistics.median(of), 5),
    }
    print(json.dumps({**made, **more}), flush=True)


def operands(heads: int, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, tokens, 64, generator=generator).to(dtype) for _ in range(3)]


def passes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    return {
        "forward": lambda: kizuki.attention(q, k, v, causal=True),
        "rows": lambda: kizuki.attention(q, k, v, causal=True, observe=ROWS),
        "all": lambda: kizuki.attention(q, k, v, causal=True, observe=ALL),
    }


def fold(rounds: int) -> None:
    """Readings in passing, `[1, 8, 8192, 64]` causal."""
    for kind, dtype in DTYPES.items():
        times = in_turn(passes(*operands(8, 8192, dtype)), rounds)
        row(f"{kind} forward + top-8 + entropy + max / forward", times["rows"], times["forward"], 1.2)
        row(f"{kind} … + received + 512×512 pool / forward", times["all"], times["forward"], 1.6)


def built(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
    """The same from scores that are built, as one would write it in torch."""
    scores = (q @ k.mT).float() * (q.shape[-1] ** -0.5)
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    top = weights.topk(8)
    n = q.shape[-2]
    picture = weights.reshape(*q.shape[:2], 512, n // 512, 512, n // 512).sum(-1).mean(-2)
    entropy = torch.special.entr(weights).sum(-1)
    output = weights.to(v.dtype) @ v
    return output, top.values, entropy, weights.amax(-1), scores.amax((-1, -2)), weights.sum(-2), picture


def agree(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> None:
    """Stop unless the readings are those of the built matrix, whose scores are rounded as the inputs are."""
    read = kizuki.attention(q, k, v, causal=True, observe=ALL)[1]
    _, top, entropy, most, _, received, picture = built(q, k, v, seen)
    bound = 1e-4 if q.dtype is torch.float32 else 0.05
    best = None if read.topk is None else read.topk[0]
    pairs = {"top": (best, top), "entropy": (read.entropy, entropy), "max": (read.max, most)}
    pairs |= {"received": (read.received, received), "pool": (read.pool, picture)}
    for name, (mine, theirs) in pairs.items():
        if mine is None or not torch.allclose(mine, theirs, atol=bound, rtol=bound):
            raise SystemExit(f"{name} differs from that of the built matrix")


def against_built(rounds: int) -> None:
    """4,096 tokens, eight heads: everything at once, beside torch with A built."""
    seen = torch.ones(4096, 4096, dtype=torch.bool).tril()
    for kind, dtype in DTYPES.items():
        q, k, v = operands(8, 4096, dtype)
        agree(q, k, v, seen)
        contestants = {"ours": passes(q, k, v)["all"], "built": partial(built, q, k, v, seen)}
        times = in_turn(contestants, max(3, rounds // 2))
        row(f"{kind} scores built in torch / ours, 4,096 tokens", times["built"], times["ours"], 5.0)


MEMORY = """
import sys, torch, kizuki
tokens, dtype, what = int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3]
def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
see = kizuki.Observe(topk=8, entropy=True, max=True, received=True, pool=(512, 512))
def use(n):
    q, k, v = (torch.randn(1, 1, n, 64, dtype=dtype) for _ in range(3))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = peak()
    if what == "readings":
        made = kizuki.attend(q, k, causal=True).observe(see)
    elif what == "forward":
        made = kizuki.attention(q, k, v, causal=True)
    else:
        made = kizuki.attention(q, k, v, causal=True, observe=see)
    after = peak()
    tensors = [made] if what == "forward" else []
    if what == "both":
        tensors, made = [made[0]], made[1]
    if what != "forward":
        tensors += [made.lse, *made.topk, made.entropy, made.max, made.received, made.pool]
    return after - before - sum(t.numel() * t.element_size() for t in tensors) / 2**20
use(1024)
print(use(tokens))
"""


def memory(_: int) -> None:
    """Peak resident memory beyond inputs and results, one head."""
    for tokens in (32_768, 131_072):
        for kind in ("float32", "bfloat16"):
            for what in ("readings", "forward", "both"):
                args = [sys.executable, "-c", MEMORY, str(tokens), kind, what]
                done = subprocess.run(args, capture_output=True, text=True, check=True)
                extra = float(done.stdout)
                print(
                    json.dumps(
                        {"what": f"{kind} {what}, {tokens:,} tokens", "extra_MiB": round(extra, 1), "bar": 64}
                    ),
                    flush=True,
                )


def rows(rounds: int) -> None:
    """1,000 single rows at 32,768 keys, beside reading their keys 1,000 times.

    Of one head, whose keys a large cache may hold from row to row, and of sixteen in turn, whose keys it does not.
    """
    for heads in (1, 16):
        for kind, dtype in DTYPES.items():
            q, k, _ = operands(heads, 32_768, dtype)
            generator = torch.Generator().manual_seed(1)
            places = [(n % heads, int(torch.randint(32_768, (1,), generator=generator))) for n in range(1000)]
            whole, half = kizuki.attend(q, k), kizuki.attend(q, k, causal=True)
            words = [k[0, h].view(torch.int64) for h in range(heads)]

            def read(a: kizuki.AttentionMatrix, places: list[tuple[int, int]] = places) -> None:
                for h, i in places:
                    a[0, h, i]

            def keys(words: list[Tensor] = words, places: list[tuple[int, int]] = places) -> None:
                for h, _ in places:
                    words[h].sum()

            contestants = {"whole": partial(read, whole), "causal": partial(read, half), "keys": keys}
            times = in_turn(contestants, max(3, rounds // 2))
            what = f"{kind} 1,000 rows of 32,768 keys, {heads} head{'s' if heads > 1 else ''}"
            row(f"{what} / reading the keys 1,000 times", times["whole"], times["keys"], 1.5)
            row(f"{what}, causal (half of the keys)", times["causal"], times["keys"], 1.5)


def block(rounds: int) -> None:
    """A 256×256 block at a random place of `[1, 8, 8192, 64]`; the bar is 10 ms."""
    generator = torch.Generator().manual_seed(2)
    for kind, dtype in DTYPES.items():
        q, k, _ = operands(8, 8192, dtype)
        a = kizuki.attend(q, k, causal=True)
        taken = []
        for _ in range(10 * rounds):
            h, i, j = (int(torch.randint(most, (1,), generator=generator)) for most in (8, 7936, 7936))
            begun = time.perf_counter()
            a[0, h, i : i + 256, j : j + 256]
            taken.append(time.perf_counter() - begun)
        row(f"{kind} a 256×256 block, in units of 10 ms", taken, [0.01] * len(taken), 1.0)


PARTS = {"fold": fold, "built": against_built, "memory": memory, "rows": rows, "block": block}


def main() -> None:
    parser = argparse.ArgumentParser(description="What looking costs.")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for name in args.only.split(","):
        PARTS[name](args.rounds)


if __name__ == "__main__":
    main()
