"""What recording costs: a forward pass of a real model with and without `kizuki.record`, in turn, in one process.

    python benchmarks/recording.py [--tokens 4096] [--rounds 5]

The logits of both are compared bit for bit before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from importlib import resources

import torch

import kizuki
from kizuki.models import sources


def main() -> None:
    parser = argparse.ArgumentParser(description="A forward pass with and without kizuki.record.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    source = sources.load(args.model)
    text = resources.files("kizuki").joinpath("samples/noticing.txt").read_text(encoding="utf-8")
    ids = source.tokenize(text * (args.tokens // 500 + 1)).ids[: args.tokens]
    model, tokens = source.model, torch.tensor([ids])
    decoder = model.base_model

    def plain() -> float:
        begun = time.perf_counter()
        with torch.no_grad():
            decoder(tokens, use_cache=False)
        return time.perf_counter() - begun

    def recorded() -> float:
        begun = time.perf_counter()
        with torch.no_grad(), kizuki.record(decoder):
            decoder(tokens, use_cache=False)
        return time.perf_counter() - begun

    with torch.no_grad():
        before = decoder(tokens, use_cache=False)[0]
        with kizuki.record(decoder) as recording:
            during = decoder(tokens, use_cache=False)[0]
    if not torch.equal(before, during):
        raise SystemExit("the recorded pass differs from the plain one")
    del before, during, recording
    times: dict[str, list[float]] = {"plain": [], "recorded": []}
    for _ in range(args.rounds):
        times["plain"].append(plain())
        times["recorded"].append(recorded())
    for name, taken in times.items():
        print(f"{name:<9} median {statistics.median(taken):.2f} s, {min(taken):.2f} … {max(taken):.2f}")
    pairs = [b / a for a, b in zip(times["plain"], times["recorded"], strict=True)]
    print(
        f"recorded / plain: median {statistics.median(pairs):.3f} over {args.rounds} pairs, {args.tokens} tokens"
    )


if __name__ == "__main__":
    main()
