"""Tokens joined into the characters or words that people write, for readings whose rows still sum to 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..extras import absent
from .tokens import TextError, Tokens, visible

if TYPE_CHECKING:
    from kizuki import AttentionMatrix

Unit = Literal["word", "character"]
Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Words:
    """Tokens in groups: neighbours that are pieces of one word (or character) are one group.

    A joined reading is the sum over a group's keys and the mean over a group's queries,

        W[g, h] = 1 / |g| · Σ_{i ∈ g} Σ_{j ∈ h} A[i, j],

    so each row of it sums to 1 where the rows of A do: every token is in exactly one group. The whole table is
    `A.mass(words.groups, rows=words.groups)`; `words.row(A, g)` gives one row of it, at any length of text.

    Attributes:
        groups: the group of each token, int64 `[tokens]`, 0, 1, 2 … from left to right without gaps.
        labels: what to show for each group.
        offsets: the characters of the text that each group is, `(first, end)`: of all its units, also where a
            tokenizer dropped a part (MiniLM drops accents). Special tokens as in `Tokens`.
        special: whether a group is a special token, such as [CLS]; each of them stands alone.
        starts: the first token of each group.

    Example:
        >>> from kizuki.models import Tokens, join
        >>> tokens = Tokens("so so", [1, 2, 3], [(0, 1), (1, 2), (2, 5)], ["s", "o", " so"], [False] * 3)
        >>> words = join(tokens, "word")
        >>> words.labels, words.groups.tolist(), words.tokens(0)
        (['so', 'so'], [0, 0, 1], range(0, 2))
    """

    groups: Tensor
    labels: list[str]
    offsets: list[Span]
    special: list[bool]
    starts: list[int]

    def __len__(self) -> int:
        return len(self.labels)

    def tokens(self, group: int) -> range:
        """The numbers of a group's tokens."""
        number = range(len(self))[group]  # as a list's index: from the end when negative, IndexError outside
        last = number + 1 == len(self)
        return range(self.starts[number], len(self.groups) if last else self.starts[number + 1])

    def row(self, matrix: AttentionMatrix, group: int) -> Tensor:
        """What one group reads of every group: `W[..., group, :]`, `[..., groups]`.

        Args:
            matrix: A of a pass over these tokens, `[..., heads, tokens, tokens]`.
            group: which, counted from 0; negative from the end.

        Returns:
            `[..., heads, groups]` in A's dtype, float32 where that has 16 bits. Each row sums to 1, or to what
            its rows of A sum to (less behind a sink; 0 where a query sees nothing).

        Raises:
            TextError: A has not one query and one key for each token.
            IndexError: there is no such group.

        Time and memory: the group's rows of A, tokens numbers each; nothing of tokens × tokens.

        Example:
            >>> import torch, kizuki
            >>> from kizuki.models import Tokens, join
            >>> tokens = Tokens("so so", [1, 2, 3], [(0, 1), (1, 2), (2, 5)], ["s", "o", " so"], [False] * 3)
            >>> A = kizuki.attend(*torch.zeros(2, 1, 1, 3, 4))
            >>> join(tokens, "word").row(A, 0)
            tensor([[[0.6667, 0.3333]]])
        """
        count = len(self.groups)
        if tuple(matrix.shape[-2:]) != (count, count):
            raise TextError(
                f"words.row: matrix has {matrix.shape[-2]} queries and {matrix.shape[-1]} keys but there are {count} "
                "tokens; give A of a pass over these tokens"
            )
        own = self.tokens(group)
        rows = matrix[..., own.start : own.stop, :]  # [..., queries of the group, tokens]
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32)).mean(-2)
        result = rows.new_zeros(*rows.shape[:-1], len(self))
        return result.index_add_(-1, self.groups.to(rows.device), rows)


def join(tokens: Tokens, unit: Unit | Sequence[Span] = "word") -> Words:
    """Join the tokens that are pieces of one word or one character, with labels from the text.

    A token is never cut. So a group is the smallest run of whole tokens that covers whole units, and holds
    several of them where a token does (" the", or "。」").

    Args:
        tokens: what `Source.tokenize` gives, or `recording.tokens`.
        unit: "character": what a reader takes for one, the extended grapheme clusters of Unicode (UAX #29): an
            e with its accent, 👩‍👧, 🇯🇵, が also as か and a mark.
            "word": the words of UAX #29, which keep "don't" and "3.14" whole. It finds none in writing without
            spaces, so for Japanese a word is a run of one script, 東京｜メトロ｜で｜働｜いた: of hiragana and katakana
            always, of kanji in a text that has kana. That is a rule one can say, and not a linguist's word.
            Chinese, Thai, Lao, Khmer and Burmese fall into characters.
            Spans `(first, end)` of `tokens.text`, in order: words that somebody else found, such as a
            morphological analyser (MeCab, Sudachi). Characters in none of them are units of their own.

    White space joins nothing: "   " and " x" are two groups. Special tokens stand alone. Labels leave out the
    spaces at both ends.

    Returns:
        A `Words`.

    Raises:
        TextError: an unknown unit, spans that overlap, go backwards or leave the text; or the package regex,
            which comes with transformers, is missing.

    Time and memory: linear in the text.
    Source: Unicode Standard Annex 29, as the package regex has it.

    Example:
        >>> from kizuki.models import Tokens, join
        >>> text = "unhappy 東"
        >>> offsets = [(0, 2), (2, 7), (7, 9), (8, 9)]
        >>> tokens = Tokens(text, [1, 2, 3, 4], offsets, ["un", "happy", "␣東 1/2", "東 2/2"], [False] * 4)
        >>> words = join(tokens, "word")
        >>> words.labels, words.groups.tolist()
        (['unhappy', '東'], [0, 0, 1, 1])
    """
    if not isinstance(tokens, Tokens):
        raise TextError(
            f"join: tokens is a {type(tokens).__name__} but must be Tokens; source.tokenize gives them"
        )
    units = _units(tokens.text, unit)
    unit_at = list(chain.from_iterable([number] * (end - first) for number, (first, end) in enumerate(units)))
    starts = _starts(tokens, unit_at)
    bounds = [*starts, len(tokens.ids)]
    labels, offsets = [], []
    for first, stop in pairwise(bounds):
        low = min(begin for begin, _ in tokens.offsets[first:stop])
        high = max(end for _, end in tokens.offsets[first:stop])
        span = (low, high)
        if low < high and not tokens.special[first]:
            span = (units[unit_at[low]][0], units[unit_at[high - 1]][1])
        offsets.append(span)
        labels.append(_label(tokens, first, stop, span))
    sizes = torch.tensor([stop - first for first, stop in pairwise(bounds)], dtype=torch.int64)
    groups = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return Words(groups, labels, offsets, [tokens.special[first] for first in starts], starts)


def _label(tokens: Tokens, first: int, stop: int, span: Span) -> str:
    """The text of a group; a token by itself keeps what its own label says beyond it, as in "👍 [UNK]"."""
    text = tokens.text[slice(*span)]
    shown = visible(text.strip(" ") or text)
    if stop - first > 1:
        return shown
    own, label = visible(tokens.text[slice(*tokens.offsets[first])]), tokens.labels[first]
    if tokens.special[first] or not own or not label.startswith(own):
        return label
    return shown + label[len(own) :]


def _starts(tokens: Tokens, unit_at: list[int]) -> list[int]:
    """The first token of each group: one that shares no unit with the tokens of the group before it."""
    starts: list[int] = []
    count = 0  # groups up to the one that is open
    reached = -1  # the last unit that it has a part of
    for number, ((first, end), alone) in enumerate(zip(tokens.offsets, tokens.special, strict=True)):
        if not alone and first < end and unit_at[first] <= reached:
            del starts[count:]  # a token without a place, between two pieces, is one of them
        else:
            starts.append(number)
            count = len(starts) if alone or first < end else count
        reached = -1 if alone else max(reached, unit_at[end - 1]) if first < end else reached
    return starts


def _units(text: str, unit: Unit | Sequence[Span]) -> list[Span]:
    """The units of a text, each `(first, end)`, one after another without a gap."""
    if isinstance(unit, str):
        if unit not in ("word", "character"):
            raise TextError(
                f'join: unit is {unit!r} but must be "word", "character" or a list of (first, end)'
            )
        cuts = _cuts(text, unit)
    else:
        cuts = _given(text, unit)
    return list(_apart(text, cuts))


def _apart(text: str, cuts: Sequence[int]) -> Iterator[Span]:
    """The units between cuts; of white space each character is one."""
    for first, end in pairwise(cuts):
        if text[first:end].isspace():
            yield from ((at, at + 1) for at in range(first, end))
        else:
            yield first, end


def _cuts(text: str, unit: str) -> list[int]:
    """Where units end, from 0 to the text's length."""
    regex = _regex()
    # Which flag a letter belongs to is counted from the first letter of a row of flags, each time anew: over a
    # long row that is quadratic. Pairs that stand for them are found in one go, and are cut alike.
    text = regex.sub(r"\p{Regional_Indicator}{1,2}", lambda pair: "。\u0301"[: len(pair[0])], text)
    characters = [0, *(match.end() for match in regex.finditer(r"\X", text))]
    if unit == "character":
        return characters
    kana = regex.search(r"[\p{Hiragana}\p{Katakana}]", text) is not None
    runs = r"\p{Hiragana}[\p{Hiragana}\p{M}ーｰ]+" + (r"|\p{Han}[\p{Han}\p{M}]+" if kana else "")
    inside: set[int] = set()
    for run in regex.finditer(runs, text):
        inside.update(range(run.start() + 1, run.end()))
    found = {0, len(text), *(match.start() for match in regex.finditer(r"(?w)\b", text))}
    # No word ends inside a character, also where the newer rules for characters (conjuncts) know of more.
    return [at for at in characters if at in found and at not in inside]


def _given(text: str, spans: Sequence[Span]) -> list[int]:
    """Cuts from spans that somebody gives; between them every character is cut off."""
    cuts = [0]
    for span in spans:
        try:
            first, end = map(index, span)
        except (TypeError, ValueError):
            raise TextError(f"join: unit holds {span!r} but must hold pairs (first, end)") from None
        if not cuts[-1] <= first < end <= len(text):
            raise TextError(
                f"join: unit holds ({first}, {end}) but spans must go on from {cuts[-1]}, hold a character and stay in "
                f"the {len(text)} characters of the text"
            )
        cuts.extend(range(cuts[-1] + 1, first + 1))
        cuts.append(end)
    cuts.extend(range(cuts[-1] + 1, len(text) + 1))
    return cuts


def _regex() -> Any:
    try:
        import regex
    except (ImportError, OSError) as error:
        raise TextError(absent(error, "join: needs the package regex", "models")) from None
    return regex
