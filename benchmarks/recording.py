"""What recording costs: a forward pass of a real model with and without `kizuki.record`, in turn, in one process.

    python benchmarks/recording.py [--tokens 4096] [--rounds 5] [--observe]

The logits of both are compared bit for bit before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import resources

import torch

import kizuki
from kizuki.models import sources


def main() -> None:
    parser = argparse.ArgumentParser(description="A forward pass with and without kizuki.record.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--observe", action="store_true", help="also with keep=Observe(topk=8, entropy, received)"
    )
    args = parser.parse_args()
    source = sources.load(args.model)
    text = resources.files("kizuki").joinpath("samples/noticing.txt").read_text(encoding="utf-8")
    ids = source.tokenize(text * (args.tokens // 500 + 1)).ids[: args.tokens]
    model, tokens = source.model, torch.tensor([ids])
    decoder = model.base_model

    what = kizuki.Observe(topk=8, entropy=True, received=True)
    blocks: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "plain": nullcontext,
        "recorded": lambda: kizuki.record(decoder),
    }
    if args.observe:
        blocks["observed"] = lambda: kizuki.record(decoder, keep=what)

    def taken(name: str) -> float:
        begun = time.perf_counter()
        with torch.no_grad(), blocks[name]():
            decoder(tokens, use_cache=False)
        return time.perf_counter() - begun

    with torch.no_grad():
        before = decoder(tokens, use_cache=False)[0]
        for block in blocks.values():
            with block():
                during = decoder(tokens, use_cache=False)[0]
            if not torch.equal(before, during):
                raise SystemExit("the recorded pass differs from the plain one")
    del before, during
    times: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(args.rounds):
        for name in blocks:
            times[name].append(taken(name))
    for name, found in times.items():
        print(f"{name:<9} median {statistics.median(found):.2f} s, {min(found):.2f} … {max(found):.2f}")
    for name in [name for name in blocks if name != "plain"]:
        pairs = [b / a for a, b in zip(times["plain"], times[name], strict=True)]
        print(
            f"{name} / plain: median {statistics.median(pairs):.3f} over {args.rounds} pairs, {args.tokens} tokens"
        )


if __name__ == "__main__":
    main()
