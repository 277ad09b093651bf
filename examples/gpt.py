"""A small GPT learns a text by heart with kizuki's layers, beside the same GPT with torch's.

    python examples/gpt.py                     # about two minutes on two cores
    python examples/gpt.py --steps 60 --layers selfattention

It reads the sample text of `kizuki look`, one character a token, and is trained to say the next one. The text is
short, so what it can show is that the layers learn, not that they generalise: with SelfAttention the loss, about
ln 103 = 4.6 nats a character at first, is below 2.5 after 60 steps and below 0.15 after 400, and what the model says
next is mostly the text's own words. Three models with as many weights in their attention:

    selfattention   kizuki.nn.SelfAttention, rotary positions
    multihead       kizuki.nn.MultiheadAttention, learned positions
    torch           torch.nn.MultiheadAttention, learned positions

The last two begin with the same weights and see the same text, so they are the same computation twice: their losses
are equal at first and drift apart as training amplifies roundings, and their times can be compared. At the end the
first says what its heads read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import kizuki
from kizuki.nn import KVCache, MultiheadAttention, SelfAttention

LAYERS = ("selfattention", "multihead", "torch")
RATE, WARMUP = 2e-3, 30  # the learning rate, and the steps over which it rises to it
STATED = {60: 2.5, 400: 0.15}  # nats a character that the loss is below after so many steps


@dataclass(frozen=True)
class Size:
    width: int = 128
    heads: int = 4
    depth: int = 3
    context: int = 128  # characters it sees
    batch: int = 12


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, size: Size, layers: str) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention: nn.Module
        if layers == "selfattention":
            self.attention = SelfAttention(size.width, size.heads, causal=True, rotary=10_000.0)
        elif layers == "multihead":
            self.attention = MultiheadAttention(size.width, size.heads, batch_first=True)
        else:
            self.attention = nn.MultiheadAttention(size.width, size.heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor, later: Tensor | None, cache: KVCache | None = None) -> Tensor:
        normed: Tensor = self.before(x)
        if isinstance(self.attention, SelfAttention):
            read: Tensor = self.attention(normed, cache=cache)
        else:
            read, _ = self.attention(
                normed, normed, normed, attn_mask=later, is_causal=True, need_weights=False
            )
        x = x + read
        result: Tensor = x + self.mlp(self.after(x))
        return result


class GPT(nn.Module):
    """Characters in, the logits of the next one out: `[batch, length]` to `[batch, length, characters]`."""

    def __init__(self, characters: int, size: Size, layers: str) -> None:
        super().__init__()
        self.size, self.layers = size, layers
        self.tokens = nn.Embedding(characters, size.width)
        self.places = None if layers == "selfattention" else nn.Embedding(size.context, size.width)
        self.blocks: Any = nn.ModuleList(Block(size, layers) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, characters, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        x = self.tokens(ids)  # [batch, length, width]
        if self.places is not None:
            x = x + self.places(torch.arange(ids.shape[1]))
        later = None
        if self.layers == "torch":  # which needs the mask in numbers; kizuki's have a rule for it
            later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for at, block in enumerate(self.blocks):
            x = block(x, later, None if caches is None else caches[at])
        logits: Tensor = self.head(self.norm(x))
        return logits


class Text:
    """A text as numbers, one for each of its characters."""

    def __init__(self, text: str) -> None:
        self.characters = sorted(set(text))
        self.ids = self.encode(text)

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self.characters.index(character) for character in text])

    def decode(self, ids: list[int]) -> str:
        return "".join(self.characters[n] for n in ids)

    def batch(self, size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pieces of the text from anywhere, and the same one character on; `[batch, context]` each."""
        starts = torch.randint(len(self.ids) - size.context, (size.batch,), generator=generator)
        pieces = self.ids[starts[:, None] + torch.arange(size.context + 1)]
        return pieces[:, :-1], pieces[:, 1:]


def sample_text() -> Text:
    """The text of `kizuki look --sample`, which the project wrote."""
    return Text(resources.files("kizuki").joinpath("samples/noticing.txt").read_text(encoding="utf-8"))


@dataclass
class Run:
    """A model in training, what it lost at each step and how long that took."""

    model: GPT
    losses: list[float]
    seconds: list[float]

    @property
    def loss(self) -> float:
        """The mean of the last ten, which one lucky batch does not decide."""
        return statistics.mean(self.losses[-10:])


def train(text: Text, size: Size, layers: tuple[str, ...], steps: int, report: int = 0) -> dict[str, Run]:
    """One model of each kind, a step of each in turn on the same pieces of the text."""
    runs: dict[str, Run] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name in layers:
        torch.manual_seed(0)
        model = GPT(len(text.characters), size, name)
        runs[name] = Run(model, [], [])
        optimizers[name] = torch.optim.AdamW(
            model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01
        )
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = RATE * min(1.0, step / WARMUP)
        given, wanted = text.batch(size, generator)
        for name, run in runs.items():
            begun = time.perf_counter()
            loss = cross_entropy(run.model(given).flatten(0, 1), wanted.flatten())
            optimizers[name].zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            optimizers[name].step()
            run.seconds.append(time.perf_counter() - begun)
            run.losses.append(loss.item())
        if report and (step % report == 0 or step == steps):
            print(f"step {step:>4}  " + "  ".join(f"{name} {run.loss:.3f}" for name, run in runs.items()))
    return runs


@torch.no_grad()
def recite(model: GPT, text: Text, begun: str, length: int) -> str:
    """The likeliest continuation, one character after another, keys and values kept in a cache."""
    model.eval()
    size = model.size
    caches = [KVCache(1, size.heads, size.width // size.heads, capacity=size.context) for _ in model.blocks]
    ids = text.encode(begun).tolist()
    logits = model(torch.tensor([ids]), caches)
    for _ in range(min(length, size.context - len(ids))):
        ids.append(int(logits[0, -1].argmax()))
        logits = model(torch.tensor([ids[-1:]]), caches)
    return text.decode(ids)


@torch.no_grad()
def most_read(model: GPT, text: Text, sentence: str, k: int = 3) -> list[str]:
    """For the last character of a sentence, what each head of the first layer reads most."""
    block = model.blocks[0]
    x = block.before(model.tokens(text.encode(sentence)[None]))
    A = block.attention.matrix(x)  # [1, heads, length, length], and nothing is stored
    weights, keys = A.topk(k)
    lines = []
    for head in range(model.size.heads):
        found = zip(keys[0, head, -1].tolist(), weights[0, head, -1].tolist(), strict=True)
        lines.append(
            f"head {head}: " + ", ".join(f"{sentence[j]!r} at {j} {w:.2f}" for j, w in found if j >= 0)
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="A small GPT with kizuki's layers beside torch's.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", nargs="*", choices=LAYERS, default=list(LAYERS))
    args = parser.parse_args()
    text, size = sample_text(), Size()
    print(f"{len(text.ids):,} characters, {len(text.characters)} different ones; kizuki {kizuki.__version__}")
    runs = train(text, size, tuple(args.layers), args.steps, report=50)
    for name, run in runs.items():
        middle = statistics.median(run.seconds)
        print(f"{name:<14} loss {run.loss:.3f} nats a character, {1000 * middle:.0f} ms a step (median)")
    if "selfattention" in runs:
        model = runs["selfattention"].model
        print("\n" + recite(model, text, "Mika kept the lighthouse at Cape Sora. Every evening ", 70) + "\n")
        print("\n".join(most_read(model, text, "Mika kept the lighthouse")))


if __name__ == "__main__":
    main()
