"""Tokens with labels a person can read: the text itself, and for pieces of a character which piece it is.

A byte-level tokenizer cuts 京 into tokens that are no text at all. Their labels come from the text and
the bytes each token stands for: "京 1/3", "京 2/3", "京 3/3". Never U+FFFD.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

SIGNS = {
    "\n": "⏎",
    "\r": "␍",
    "\t": "⇥",
    "\u200d": "ZWJ",
    "\ufe0e": "VS15",
    "\ufe0f": "VS16",
    "\u00a0": "NBSP",
}
# Where a character without a look of its own makes one sign of its neighbours: a joiner between two emoji (or
# letters that join), a variation selector behind a character that varies, the letters of a flag's region.
JOINED = re.compile(
    "(?<=[^\x00-\u024f\\s\u200d])\u200d(?=[^\x00-\u024f\\s\u200d])"
    "|(?<=[0-9#*©®\u0250-\u200c\u200e-\U0001faff])[\ufe0e\ufe0f]"
    "|\U0001f3f4[\U000e0020-\U000e007e]{1,6}\U000e007f"
)
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class TextError(ValueError):
    """A text cannot be tokenized, or does not fit the model."""


@dataclass(frozen=True)
class Tokens:
    """A text as a model reads it, one entry a token.

    Attributes:
        text: the text itself.
        ids: the tokens' numbers in the model's vocabulary.
        offsets: the characters each token covers, `(first, end)`, end exclusive. Pieces of one character
            cover that character each; tokens the tokenizer adds are `(k, k)` at the place they stand.
        labels: what to show for each token.
        special: whether a token is special: one that the tokenizer adds, such as [CLS], or one of its
            special tokens written in the text.

    Example:
        >>> from kizuki.models import Tokens
        >>> tokens = Tokens("so so", [1, 2, 3], [(0, 1), (1, 2), (2, 5)], ["s", "o", " so"], [False] * 3)
        >>> len(tokens), [tokens.text[first:end] for first, end in tokens.offsets]
        (3, ['s', 'o', ' so'])
    """

    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]
    labels: list[str]
    special: list[bool]

    def __len__(self) -> int:
        return len(self.ids)


def tokenize(tokenizer: Any, text: str) -> Tokens:
    """The tokens of a text, special tokens included as the tokenizer adds them; any length.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        text: at least one character that becomes a token.

    Raises:
        TextError: the text is empty, gives no tokens, or is not Unicode text; the tokenizer has no offsets.
    """
    if not isinstance(text, str):
        raise TextError(f"text is a {type(text).__name__} but must be a str")
    if not text:
        raise TextError("text is empty; give at least one word")
    if not getattr(tokenizer, "is_fast", False):
        raise TextError(
            f"{type(tokenizer).__name__} gives no character offsets; use the model's fast tokenizer"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(
            f"text is not Unicode text (half a surrogate pair at character {error.start})"
        ) from None
    coded = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    ids: list[int] = list(coded["input_ids"])
    added = [bool(flag) for flag in coded["special_tokens_mask"]]
    reported = [(int(a), int(b)) for a, b in coded["offset_mapping"]]
    # A special token written in the text is marked as well; only those without text were added.
    added = [flag and a == b for flag, (a, b) in zip(added, reported, strict=True)]
    if all(added):
        raise TextError(f"text {text[:20]!r} gives no tokens; the tokenizer drops all of its characters")
    names: list[str] = tokenizer.convert_ids_to_tokens(ids)
    pieces = _byte_pieces(tokenizer, text, ids, names, added)
    if pieces is not None:
        offsets, labels = _from_bytes(text, pieces)
    else:
        offsets, labels = _from_offsets(text, reported, names, ids, tokenizer.unk_token_id, added)
    for k, is_added in enumerate(added):
        if is_added:
            offsets[k] = (offsets[k - 1][1],) * 2 if k else (0, 0)
            labels[k] = names[k]
    known = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    special = [flag or token in known for flag, token in zip(added, ids, strict=True)]
    return Tokens(text, ids, offsets, labels, special)


def cut(tokens: Tokens, first: int) -> Tokens:
    """The first tokens of a text. Special tokens that close it (an encoder's [SEP]) stay at its end."""
    if first >= len(tokens.ids):
        return tokens
    closing = 0
    while closing < len(tokens.ids) and tokens.special[-1 - closing]:
        closing += 1
    kept = max(first - closing, 1)
    end = max(stop for _, stop in tokens.offsets[:kept])
    tail = len(tokens.ids) - closing
    return replace(
        tokens,
        text=tokens.text[:end],
        ids=tokens.ids[:kept] + tokens.ids[tail:],
        offsets=tokens.offsets[:kept] + [(end, end)] * closing,
        labels=tokens.labels[:kept] + tokens.labels[tail:],
        special=tokens.special[:kept] + tokens.special[tail:],
    )


def token_label(tokenizer: Any, token: int) -> str:
    """What to show for a token by itself, outside any text: its characters, or its bytes where it has none."""
    name = tokenizer.convert_ids_to_tokens(int(token))
    if name is None:
        return f"token {int(token)}"  # a row of the head that the vocabulary does not use
    if int(token) in set(tokenizer.all_special_ids) or int(token) in tokenizer.get_added_vocab():
        return str(name)
    data = _token_bytes(tokenizer, name)
    if data is None:
        return visible(str(name).replace("▁", " "))
    try:
        return visible(data.decode("utf-8"))
    except UnicodeDecodeError:
        return "bytes " + data.hex(" ").upper()


def visible(text: str) -> str:
    """`text` with what cannot be seen replaced by a sign or a name; inner spaces stay.

    So does what makes one sign of several characters: 👩‍👧 and ❤️ are shown as people write them.
    """
    if text and not text.strip(" "):
        return "␣" * len(text)
    if text.isascii() and text.isprintable():
        return text  # most tokens of most texts: nothing in it is unseen or joins anything
    blank = not text.strip(" \u3000")
    joined = {place for found in JOINED.finditer(text) for place in range(*found.span())}
    shown = []
    for place, char in enumerate(text):
        kind = unicodedata.category(char)
        if place in joined:
            shown.append(char)
        elif char in SIGNS:
            shown.append(SIGNS[char])
        elif kind in ("Cc", "Cf", "Zl", "Zp", "Co", "Cn") or (
            kind == "Zs" and (char != " " if blank else char not in " \u3000")
        ):
            shown.append(f"U+{ord(char):04X}")
        elif kind in ("Mn", "Me", "Mc") and (place == 0 or not text[place - 1].strip()):
            shown.append("◌" + char)  # a mark alone needs something to sit on
        else:
            shown.append(char)
    return "".join(shown)


@functools.lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """The byte each letter of the byte-level alphabet stands for (GPT-2's table, by its construction)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + k): b for k, b in enumerate(rest)}


def _is_byte_level(tokenizer: Any) -> bool:
    return "ByteLevel" in repr(getattr(tokenizer.backend_tokenizer, "pre_tokenizer", None))


def _token_bytes(tokenizer: Any, name: str) -> bytes | None:
    """The bytes a token stands for: all of a byte-level token, the one of a `<0x..>` token, else None."""
    if _is_byte_level(tokenizer):
        table = _byte_of()
        if all(char in table for char in name):
            return bytes(table[char] for char in name)
        return None
    single = BYTE.match(name)
    return bytes([int(single.group(1), 16)]) if single else None


def _byte_pieces(
    tokenizer: Any, text: str, ids: list[int], names: list[str], added: list[bool]
) -> list[tuple[int, int]] | None:
    """The bytes of the text each token covers, where a byte-level tokenizer's tokens spell the text exactly."""
    if not _is_byte_level(tokenizer):
        return None
    whole = text.encode("utf-8")
    extra = tokenizer.get_added_vocab()
    spans, at = [], 0
    for name, is_added in zip(names, added, strict=True):
        if is_added:
            spans.append((at, at))
            continue
        data = name.encode("utf-8") if name in extra else _token_bytes(tokenizer, name)
        if data is None or whole[at : at + len(data)] != data:
            return None  # a normalizer changed the text, or a space was put before it
        spans.append((at, at + len(data)))
        at += len(data)
    return spans if at == len(whole) else None


def _from_bytes(text: str, spans: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[str]]:
    """Character offsets and labels from byte spans that follow one another."""
    char_at = [k for k, char in enumerate(text) for _ in range(len(char.encode("utf-8")))]
    first_byte = [0] * len(text)
    for byte in range(len(char_at) - 1, -1, -1):
        first_byte[char_at[byte]] = byte
    first_byte.append(len(char_at))
    # How many tokens each character is cut into, and how many of them came before.
    cut: Counter[int] = Counter()
    for start, stop in spans:
        cut.update({char_at[b] for b in (start, stop - 1) if start < stop})
    passed: Counter[int] = Counter()
    offsets, labels = [], []
    for start, stop in spans:
        if start == stop:
            place = char_at[start] if start < len(char_at) else len(text)
            offsets.append((place, place))
            labels.append("")
            continue
        low, high = char_at[start], char_at[stop - 1] + 1
        offsets.append((low, high))
        parts: list[str] = []
        inner_low, inner_high = low, high
        if cut[low] > 1:
            passed[low] += 1
            parts.append(_piece(text[low], passed[low], cut[low]))
            inner_low = low + 1
        tail = high - 1
        cut_tail = tail > low and cut[tail] > 1
        if cut_tail:
            inner_high = tail
        if inner_low < inner_high:
            parts.append(visible(text[inner_low:inner_high]))
        if cut_tail:
            passed[tail] += 1
            parts.append(_piece(text[tail], passed[tail], cut[tail]))
        labels.append(" · ".join(parts) if cut[low] > 1 else "".join(parts))
    return offsets, labels


def _from_offsets(
    text: str,
    reported: list[tuple[int, int]],
    names: list[str],
    ids: list[int],
    unknown: int | None,
    added: list[bool],
) -> tuple[list[tuple[int, int]], list[str]]:
    """Labels from the tokenizer's own offsets; tokens that share one span are its pieces."""
    # Tokens with one span are pieces of what it covers: bytes of a character, or of a character that the
    # normalizer took apart.
    total = Counter(
        span for span, skip in zip(reported, added, strict=True) if not skip and span[0] < span[1]
    )
    passed: Counter[tuple[int, int]] = Counter()
    labels = []
    for (a, b), name, token in zip(reported, names, ids, strict=True):
        if a == b:
            labels.append(visible(name.replace("▁", " ")) or name)
            continue
        label = visible(text[a:b])
        if total[a, b] > 1:
            passed[a, b] += 1
            label = _piece(text[a:b], passed[a, b], total[a, b])
        labels.append(f"{label} {name}" if token == unknown else label)
    return list(reported), labels


def _piece(char: str, number: int, total: int) -> str:
    return f"{visible(char)} {number}/{total}"
