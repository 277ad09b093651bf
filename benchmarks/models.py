"""A model with `attn_implementation="kizuki"` beside its own SDPA, in turn, in one process: prefill and generation.

    python benchmarks/models.py [--prefill 4096 8192] [--prompt 4096] [--new 128] [--cache dynamic static] [--rounds 3]
                                [--dtype float32]

First the two are compared: the logits of `--check` tokens, against attention computed in float64, and the greedy
tokens that are timed below: in float32 they must be the same, in 16 bits, where two candidates are often equal in the
digits there are, it is said where they part. Then one JSON line a row goes to stdout:

    prefill   one pass over so many tokens, the last one's logits
    generate  `model.generate`: the prompt and the new tokens, greedily, with each of the caches
    decode    the new tokens alone, one by one, after the prompt, with the dynamic cache
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

import kizuki.models
from kizuki.accuracy import compare

NAMES = ("sdpa", "kizuki")


def in_float64(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention of a causal model in float64, its key heads shared."""
    q, k, v = (t.double() for t in (query, key, value))
    output = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous().to(query.dtype), None


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """The model computing its attention so."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def last_logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False, logits_to_keep=1).logits


def greedy(model: Any, ids: Tensor, new: int, cache: str) -> list[int]:
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        cache_implementation=cache,
    )
    return made[0, ids.shape[1] :].tolist()


def decode(model: Any, cache: DynamicCache, first: Tensor, new: int) -> list[int]:
    """So many tokens one by one, the first of them given."""
    token, found = first, []
    for _ in range(new):
        found.append(int(token))
        token = model(token, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return found


def check(model: Any, ids: Tensor) -> None:
    """Contract 14 for the logits: at most twice as far from float64 attention as SDPA's are."""
    logits = {}
    for name in (*NAMES, "float64"):
        with implementation(model, name):
            logits[name] = model(ids, use_cache=False).logits
    report = compare(logits["kizuki"], logits["float64"].double(), [logits["sdpa"]], "logits")
    print(f"{report}, over {ids.shape[1]} tokens", file=sys.stderr)
    if not report.ok:
        raise SystemExit("the logits are too far from those of float64 attention")


def measure(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in turn."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - begun)
    return taken


def report(
    what: str,
    tokens: int,
    new: int,
    cache: str | None,
    taken: dict[str, list[float]],
    common: dict[str, Any],
) -> None:
    """A JSON line for each implementation, with how many times as long SDPA took."""
    for name, seconds in taken.items():
        pairs = [a / b for a, b in zip(taken["sdpa"], seconds, strict=True)]
        row = {
            "what": what,
            "tokens": tokens,
            "new": new,
            "cache": cache,
            "implementation": name,
            "median_s": statistics.median(seconds),
            "low_s": min(seconds),
            "high_s": max(seconds),
            "rounds": len(seconds),
            "sdpa_over_this": statistics.median(pairs),
            **common,
        }
        print(json.dumps(row), flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="A model with kizuki's attention beside its own SDPA.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prefill", type=int, nargs="*", default=[4096, 8192])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--cache", nargs="*", default=["dynamic", "static"], choices=["dynamic", "static"])
    parser.add_argument("--check", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()

    kizuki.models.install()
    AttentionInterface.register("float64", in_float64)
    AttentionMaskInterface.register("float64", sdpa_mask)
    source = kizuki.models.load(args.model, dtype=getattr(torch, args.dtype))
    model = source.model
    text = resources.files("kizuki").joinpath("samples/noticing.txt").read_text(encoding="utf-8")
    longest = max([*args.prefill, args.prompt, args.check])
    ids = torch.tensor([source.tokenize(text * (longest // 500 + 1)).ids[:longest]])
    common = {
        "model": args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "processor": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kizuki": kizuki.__version__,
        "command": "python benchmarks/models.py " + " ".join(sys.argv[1:]),
    }

    check(model, ids[:, : args.check])
    prompt, found, caches = ids[:, : args.prompt], {}, {}
    for name in NAMES:
        with implementation(model, name):
            for kind in args.cache:
                found[name, kind] = greedy(model, prompt, args.new, kind)
            cache = DynamicCache(config=model.config)
            first = model(prompt, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
            caches[name] = cache, first
            found[name, "steps"] = decode(model, copy.deepcopy(cache), first, args.new)
    if len({tuple(tokens) for tokens in found.values()}) == 1:
        print(f"the same {args.new} greedy tokens after {args.prompt}", file=sys.stderr)
    elif model.dtype is torch.float32:
        raise SystemExit(f"not everybody gives the same greedy tokens: {found}")
    else:
        first_way, first_found = next(iter(found.items()))
        for way, tokens in found.items():
            parted = (n for n, (a, b) in enumerate(zip(tokens, first_found, strict=True)) if a != b)
            same = next(parted, args.new)
            print(
                f"{way}: the first {same} of {args.new} greedy tokens are those of {first_way}",
                file=sys.stderr,
            )

    def named(name: str, run: Callable[[], Any]) -> Callable[[], Any]:
        def go() -> None:
            with implementation(model, name):
                run()

        return go

    for tokens in args.prefill:
        part = ids[:, :tokens]
        taken = measure(
            {name: named(name, lambda part=part: last_logits(model, part)) for name in NAMES}, args.rounds
        )
        report("prefill", tokens, 0, None, taken, common)
    for kind in args.cache:
        taken = measure(
            {name: named(name, lambda kind=kind: greedy(model, prompt, args.new, kind)) for name in NAMES},
            args.rounds,
        )
        report("generate", args.prompt, args.new, kind, taken, common)
    taken = {name: [] for name in NAMES}
    for _ in range(args.rounds):
        for name in NAMES:
            cache, first = copy.deepcopy(caches[name][0]), caches[name][1]  # copied outside of what is timed
            run = named(name, lambda cache=cache, first=first: decode(model, cache, first, args.new))
            taken[name] += measure({name: run}, 1)[name]
    report("decode", args.prompt, args.new, "dynamic", taken, common)


if __name__ == "__main__":
    main()
