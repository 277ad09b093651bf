"""What a recording weighs on disk, and how long saving, opening and reading it take, beside the bare disk.

    python benchmarks/disk.py [--tokens 8192] [--tiny-tokens 32768] [--folder FOLDER] [--rounds 3]

Two recordings: SmolLM2 with all its layers, and a tiny random Llama on a long sequence. Each is saved, opened
and read from the file, and every layer's readings are compared bit for bit with those of the recording in memory
before a time is printed. One JSON line a recording, with --json.

"bare" writes and reads as many bytes as the file has, without looking at them: what the folder's disk takes
alone. Pages of the file are in the system's cache when it is read, as after any save; `--cold` asks the system
to drop this file's pages first (Linux).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch

import kizuki
from kizuki.models import Recording, run, sources
from kizuki.models.tokens import cut

MB = 1e6
CHUNK = 2**24
NOISE = memoryview(os.urandom(CHUNK))


def main() -> None:
    parser = argparse.ArgumentParser(description="Recordings on disk: size and times.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8192, help="of the model; 0 leaves it out")
    parser.add_argument("--tiny-tokens", type=int, default=32768, help="of the tiny model; 0 leaves it out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files go; a new temporary folder by default")
    parser.add_argument("--cold", action="store_true", help="drop the file's pages before it is read")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    made: list[Callable[[], tuple[str, Recording, float]]] = []
    if args.tokens:
        made.append(lambda: real(args.model, args.tokens))
    if args.tiny_tokens:
        made.append(lambda: tiny(args.tiny_tokens))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for make in made:
            name, recording, forward = make()
            row = {
                "recording": name,
                "forward_s": forward,
                **measure(recording, Path(folder), args.rounds, args.cold),
            }
            print(json.dumps(row) if args.json else told(row))


def real(model: str, count: int) -> tuple[str, Recording, float]:
    """A pass over so many tokens of the sample text, again and again."""
    source = sources.load(model)
    text = resources.files("kizuki").joinpath("samples/noticing.txt").read_text(encoding="utf-8")
    tokens = cut(source.tokenize(text * (count // 500 + 1)), count)
    done = run(source, tokens, k=0)
    return f"{model}, {count:,} tokens", done.recording, done.seconds["forward"]


def tiny(count: int) -> tuple[str, Recording, float]:
    """A random Llama of two layers on a long sequence of random tokens."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=count,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaModel(config).eval()
    ids = torch.randint(3, 101, (1, count))
    begun = time.perf_counter()
    with torch.no_grad(), kizuki.record(model) as recording:
        model(ids, use_cache=False)
    return f"a tiny Llama, {count:,} tokens", recording, time.perf_counter() - begun


def measure(recording: Recording, folder: Path, rounds: int, cold: bool) -> dict[str, Any]:
    """Size and median times; stops the program where what is read differs from what was recorded."""
    for layer in recording:
        recording[layer]  # the check of a layer when it is first handed out belongs to no time below
    path = folder / "recording.safetensors"
    compare(recording, kizuki.open(recording.save(path)))
    size = path.stat().st_size
    taken: dict[str, list[float]] = {
        name: [] for name in ("save", "bare_write", "open", "layer", "all", "bare_read")
    }

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = work()
        taken[name].append(time.perf_counter() - begun)
        return result

    for _ in range(rounds):
        timed("save", lambda: recording.save(path))
        timed("bare_write", lambda: bare_write(folder / "bare", size))
        drop(path, cold)
        again = timed("open", lambda: kizuki.open(path))
        middle = recording.layers[len(recording.layers) // 2]
        timed("layer", lambda again=again, middle=middle: again[middle])
        del again  # mapped pages are not dropped
        drop(path, cold)
        again = kizuki.open(path)
        timed("all", lambda again=again: [again[layer] for layer in again])
        del again
        drop(path, cold)
        timed("bare_read", lambda: bare_read(path))
    held = sum(t.numel() * t.element_size() for layer in recording for t in tensors(recording, layer))
    return {
        "layers": len(recording),
        "bytes": size,
        "bytes_of_q_k_v": held,
        "pages": "cold" if cold else "cached",
        "rounds": rounds,
        **{f"{name}_s": statistics.median(times) for name, times in taken.items()},
    }


def tensors(recording: Recording, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return recording[layer].query, recording[layer].key, recording.value(layer)


def compare(recording: Recording, again: Recording) -> None:
    """q, k and v of every layer, and the row sums of one, bit for bit."""
    for layer in recording:
        for mine, theirs in zip(tensors(recording, layer), tensors(again, layer), strict=True):
            if not torch.equal(mine, theirs):
                raise SystemExit(f"layer {layer} differs after opening")
        if again.rule(layer) != recording.rule(layer):
            raise SystemExit(f"the mask of layer {layer} differs after opening")
    last = recording.layers[-1]
    if not torch.equal(recording[last].lse, again[last].lse):
        raise SystemExit(f"the lse of layer {last} differs after opening")
    if again.tokens != recording.tokens:
        raise SystemExit("the tokens differ after opening")


def bare_write(path: Path, size: int) -> None:
    with path.open("wb") as file:
        for start in range(0, size, CHUNK):
            file.write(NOISE[: size - start])
        file.flush()
        os.fsync(file.fileno())


def bare_read(path: Path) -> None:
    block = bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


def drop(path: Path, cold: bool) -> None:
    if cold:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def told(row: dict[str, Any]) -> str:
    return (
        f"{row['recording']}, {row['layers']} layers (forward pass {row['forward_s']:.2f} s)\n"
        f"  size    {row['bytes'] / MB:8.1f} MB, of which q, k, v {row['bytes_of_q_k_v'] / MB:.1f} MB\n"
        f"  save    {row['save_s'] * 1e3:8.1f} ms; {row['bare_write_s'] * 1e3:.1f} ms for the bare bytes\n"
        f"  open    {row['open_s'] * 1e3:8.1f} ms, then {row['layer_s'] * 1e3:.1f} ms for one layer with its check\n"
        f"  read    {row['all_s'] * 1e3:8.1f} ms for all layers; {row['bare_read_s'] * 1e3:.1f} ms for the bare bytes"
        f" ({row['pages']} pages)"
    )


if __name__ == "__main__":
    main()
