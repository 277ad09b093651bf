"""Where the page opens: on a word that reads another word from some way off, found among real weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kizuki import AttentionMatrix
    from kizuki.models import Tokens

REACH = 200  # tokens from the beginning among which both words are looked for: what is on the first screen
WORDS = 24  # words tried
LAYERS = 8  # layers tried
APART = 8  # how far off the word that is read must be, so that it is not merely the one before


def choose(
    tokens: Tokens, full: Sequence[int], matrices: Mapping[int, AttentionMatrix], heads: Sequence[int]
) -> dict[str, int]:
    """The layer, head, query and key of the largest weight between two words apart, among a sample of `full` layers.

    Time: WORDS rows of A a head in LAYERS layers at most, whatever the length of the text beyond them."""
    tried = full[:: -(-len(full) // LAYERS)]
    end = min(REACH, len(tokens.ids))
    words = [i for i in range(end) if not tokens.special[i] and _is_word(tokens.labels[i])]
    queries = [i for i in words if i >= APART]
    queries = queries[:: -(-len(queries) // WORDS) or 1]
    best, found = (
        0.0,
        {"layer": full[len(full) // 2], "head": heads[0], "query": len(tokens.ids) // 2, "key": 0},
    )
    if not queries:
        return found
    asked, keys = torch.tensor(queries), torch.arange(end)
    hidden = torch.ones(end, dtype=torch.bool)
    hidden[[i for i in words if i > 0]] = False
    hidden = hidden | ((keys - asked[:, None]).abs() < APART)  # [asked, keys]
    for layer in tried:
        rows = matrices[layer][0, :, asked, :end].cpu()  # [heads, asked, keys]
        rows = rows.masked_fill(hidden | rows.isnan(), 0.0)
        peak = float(rows.max())
        if peak > best:
            at, key = divmod(int(rows.argmax()), end)
            slot, which = divmod(at, len(queries))
            best, found = peak, {"layer": layer, "head": heads[slot], "query": queries[which], "key": key}
    return found


def _is_word(label: str) -> bool:
    """Letters only, and more than one of them, or one that is not ASCII (a kanji is a word)."""
    bare = label.strip()
    return bare.isalpha() and (len(bare) > 1 or not bare.isascii())
