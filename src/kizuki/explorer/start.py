"""Where the page opens: on a word that reads another word from some way off, found among real weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kizuki import AttentionMatrix
    from kizuki.models import Tokens

REACH = 200  # tokens from the beginning among which a word is looked for: what is on the first screen
WORDS = 24  # words tried
LAYERS = 8  # layers tried
APART = 8  # how far off the word that is read must be, so that it is not merely the one before


def choose(
    tokens: Tokens, full: Sequence[int], matrices: Mapping[int, AttentionMatrix], heads: Sequence[int]
) -> dict[str, int]:
    """The layer, head, query and key of the largest weight between two words apart, among a sample of `full` layers."""
    tried = full[:: -(-len(full) // LAYERS)]
    words = [i for i, label in enumerate(tokens.labels) if not tokens.special[i] and _is_word(label)]
    queries = [i for i in words if APART <= i < REACH]
    queries = queries[:: -(-len(queries) // WORDS) or 1]
    best, found = (
        0.0,
        {"layer": full[len(full) // 2], "head": heads[0], "query": len(tokens.ids) // 2, "key": 0},
    )
    if not queries:
        return found
    keys = torch.arange(len(tokens.ids))
    wanted = torch.zeros(len(tokens.ids), dtype=torch.bool)
    wanted[[i for i in words if i > 0]] = True
    for layer in tried:
        for query in queries:
            row = matrices[layer][0, :, query].cpu()  # [heads, keys]
            row = row.masked_fill(~wanted | ((keys - query).abs() < APART), 0.0)
            peak = float(row.max())
            if peak > best:
                slot, key = divmod(int(row.argmax()), len(tokens.ids))
                best, found = peak, {"layer": layer, "head": heads[slot], "query": query, "key": key}
    return found


def _is_word(label: str) -> bool:
    """Letters only, and more than one of them, or one that is not ASCII (a kanji is a word)."""
    bare = label.strip()
    return bare.isalpha() and (len(bare) > 1 or not bare.isascii())
