"""What recording costs: a forward pass of a real model with and without `kizuki.record`, in turn, in one process.

    python benchmarks/recording.py [--tokens 8192] [--rounds 3] [--memory]

Three passes: `plain`, the model with PyTorch's SDPA; `recorded`, the same while q, k and v of every head are kept;
`observed`, `attn_implementation="kizuki"` with keep=Observe(topk=8, entropy=True, received=True), where no q and no k
is kept. Before anything is timed, the hidden states of `recorded` are compared bit for bit with those of `plain`, those
of `observed` with the same model unobserved, and the two attentions with each other (printed).
With --memory the peak of resident memory of `plain` and `observed` as well, each in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import resources
from typing import Any

import torch
from torch import Tensor

import kizuki
import kizuki.models

KEEP = kizuki.Observe(topk=8, entropy=True, received=True)


def prepared(name: str, tokens: int) -> tuple[Any, Tensor]:
    """The model without its head, and so many tokens."""
    kizuki.models.install()
    source = kizuki.models.load(name)
    text = resources.files("kizuki").joinpath("samples/noticing.txt").read_text(encoding="utf-8")
    ids = source.tokenize(text * (tokens // 500 + 1)).ids[:tokens]
    return source.model, torch.tensor([ids])


def passes(model: Any, tokens: Tensor) -> dict[str, Callable[[], Tensor]]:
    decoder = model.base_model

    def under(implementation: str, record: Callable[[], Any] | None) -> Tensor:
        model.set_attn_implementation(implementation)
        try:
            if record is None:
                return decoder(tokens, use_cache=False)[0]
            with record():
                return decoder(tokens, use_cache=False)[0]
        finally:
            model.set_attn_implementation("sdpa")

    return {
        "plain": lambda: under("sdpa", None),
        "recorded": lambda: under("sdpa", lambda: kizuki.record(decoder)),
        "kizuki": lambda: under("kizuki", None),
        "observed": lambda: under("kizuki", lambda: kizuki.record(decoder, keep=KEEP)),
    }


def peak() -> float:
    """The highest resident memory since it was last cleared, in MB."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def memory_of(model: str, tokens: int, name: str) -> None:
    run = passes(*prepared(model, tokens))[name]
    run()  # kernels, and what allocators keep
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    run()
    print(peak())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="A forward pass with and without kizuki.record.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        memory_of(args.model, args.tokens, args.memory_of)
        return
    if args.memory:
        found = {}
        for name in ("plain", "kizuki", "observed"):
            command = [sys.executable, __file__, "--model", args.model, "--tokens", str(args.tokens)]
            done = subprocess.run([*command, "--memory-of", name], capture_output=True, text=True, check=True)
            found[name] = float(done.stdout)
            print(f"{name:<9} peak {found[name]:,.0f} MB")
        print(f"observed above plain: {found['observed'] - found['plain']:,.0f} MB", flush=True)

    run = passes(*prepared(args.model, args.tokens))
    want, alone = run["plain"](), run["kizuki"]()
    if not torch.equal(want, run["recorded"]()):
        raise SystemExit("the recorded pass differs from the plain one")
    if not torch.equal(alone, run["observed"]()):
        raise SystemExit("the observed pass differs from the one that nobody looked at")
    print(f"kizuki's hidden states differ from SDPA's by at most {(alone - want).abs().max():.2e}")
    del want, alone
    times: dict[str, list[float]] = {name: [] for name in run}
    for _ in range(args.rounds):
        for name, go in run.items():
            begun = time.perf_counter()
            go()
            times[name].append(time.perf_counter() - begun)
    for name, found in times.items():
        pairs = [b / a for a, b in zip(times["plain"], found, strict=True)]
        print(
            f"{name:<9} median {statistics.median(found):.2f} s, {min(found):.2f} … {max(found):.2f}; "
            f"over plain {statistics.median(pairs):.3f}, {min(pairs):.3f} … {max(pairs):.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
