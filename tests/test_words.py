"""Tokens joined into words and characters: do they read as people write them, and do rows still sum to 1?"""

from __future__ import annotations

import builtins
import re

import oracle
import pytest
import regex
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerance import assert_accurate

import kizuki
from kizuki.models import Source, TextError, Tokens, join, load, run
from kizuki.models.tokens import visible
from kizuki.models.words import _cuts, _units


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    return {name: load(name) for name in ("smollm2", "minilm")}


E, GA, GI = "e\u0301", "か\u3099", "き\u3099"  # letters with a mark of its own character

# text: words, characters. Between / each is one group; · is a space.
SMOLLM2 = {
    "Don't internationalize 3.14!": (
        "Don't/internationalize/·/3.14/!",
        "Don/'t/international/ize/·/3/./1/4/!",
    ),
    f"naïve caf{E}s": (f"naïve/caf{E}s", f"na/ïve/ca/f{E}/s"),
    "東京メトロで働いた。": ("東京/メトロ/で/働/いた/。", "東/京/メ/ト/ロ/で/働/い/た/。"),
    "人々は𠮷野家へ": ("人々/は/𠮷野家/へ", "人/々/は/𠮷/野/家/へ"),
    "「カレー」とらーめん": ("「/カレー/」/とらーめん", "「/カ/レ/ー/」/と/ら/ー/め/ん"),
    "我喜欢猫。": ("我/喜/欢/猫/。", "我/喜/欢/猫/。"),
    f"{GA}{GI} 👩‍👩‍👧🇯🇵🇫🇷": (f"{GA}{GI}/👩‍👩‍👧/🇯🇵/🇫🇷", f"{GA}/{GI}/👩‍👩‍👧/🇯🇵/🇫🇷"),
    "👍🏽 ❤️‍🔥": ("👍🏽/❤️‍🔥", "👍🏽/❤️‍🔥"),
    "<|im_start|>user": ("<|im_start|>/user", "<|im_start|>/user"),
    "def f():\n    return  x": ("def/f/():/⏎/return/·/x", "def/f/():/⏎/return/·/x"),
}
MINILM = {
    "Don't internationalize 3.14!": ("Don't/internationalize/3.14/!", "Don/'/t/international/ize/3/./14/!"),
    f"naïve caf{E}s, {E}t{E}": (f"naïve/caf{E}s/,/{E}t{E}", f"naïve/caf{E}s/,/{E}t/{E}"),
    "東京メトロで働いた。": ("東京/メトロ/で/働 [UNK]/いた/。", "東/京/メ/ト/ロ/で/働 [UNK]/い/た/。"),
    "「カレー」とらーめん": ("「/カレー/」/とらーめん", "「/カ/レ/ー/」/と/ら/ー/め/ん"),
    f"{GA}{GI} 👩‍👩‍👧": (f"{GA}{GI}/👩‍👩‍👧 [UNK]", f"{GA}/{GI}/👩‍👩‍👧 [UNK]"),
    "❤️ 한국어": ("❤️ [UNK]/한국어", "❤️ [UNK]/한/국/어"),
    "unhappiness": ("unhappiness", "un/ha/pp/iness"),
}


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "text"), [("smollm2", t) for t in SMOLLM2] + [("minilm", t) for t in MINILM]
)
def test_words_and_characters_read_as_people_write_them(sources, name, text):
    tokens = sources[name].tokenize(text)
    for unit, expected in zip(
        ("word", "character"), {"smollm2": SMOLLM2, "minilm": MINILM}[name][text], strict=True
    ):
        words = join(tokens, unit)
        labels = [
            label for label, special in zip(words.labels, words.special, strict=True) if label != "[CLS]"
        ]
        labels = labels[:-1] if name == "minilm" else labels  # without its [SEP]
        assert "/".join(labels).replace("␣", "·") == expected


def test_what_has_no_look_of_its_own_is_named_only_where_it_stands_alone():
    shown = {
        "👩\u200d👧": None,
        "❤\ufe0f": None,
        "#\ufe0f\u20e3": None,
        "क्\u200dष": None,
        "彼は\u3000行く": None,
    }
    shown |= {"\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f": None}
    shown |= {"\u200d": "ZWJ", "👩\u200d": "👩ZWJ", "a\u200db": "aZWJb", "\ufe0f": "VS16", "a\ufe0f": "aVS16"}
    shown |= {"\u3000": "U+3000", " ": "␣", "a\U000e0067": "aU+E0067", "👩\u200d\u200d👧": "👩ZWJZWJ👧"}
    assert {text: visible(text) for text in shown} == {text: label or text for text, label in shown.items()}


# What is joined, against brute force

LETTERS = st.text(
    st.sampled_from(
        "ab 1.'\n\r\u3000\u00a0東京々はがーメﾄｰ。「한\u1100\u1161\u11a8हि्न्ไท\u0301\u3099\u200d\ufe0f👩👧❤👍🏽🇯🇵🇫🇷🏴𠮷"
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=500, deadline=None)
@given(LETTERS)
def test_cuts_are_those_of_unicode_also_between_flags(text):
    plain = [len(part) for part in regex.findall(r"\X", text)]
    assert _cuts(text, "character") == [0, *(sum(plain[: k + 1]) for k in range(len(plain)))]
    words, characters = _cuts(text, "word"), set(_cuts(text, "character"))
    ends = {0, len(text), *(m.start() for m in regex.finditer(r"(?w)\b", text))} & characters
    extra = set(words) - ends  # Unicode's words hold two letters of a flag together over a mark between them
    marks = (
        "+" if regex.match(r"(?w)🇫\b1", "🇫1") else "*"
    )  # an older regex holds a single one and a digit, too
    held = rf"\p{{Regional_Indicator}}[\p{{WB=Extend}}\p{{WB=ZWJ}}]{marks}\Z"
    assert all(regex.search(held, text[:at]) for at in extra)
    for at in ends - set(words):  # only ever inside a run of kana, or of kanji beside kana
        assert regex.match(r"[\p{Hiragana}\p{Han}\p{M}ーｰ]", text[at])
        assert regex.search(r"[\p{Hiragana}\p{Han}][\p{M}ーｰ]*\Z", text[:at])


def groups_by_force(tokens: Tokens, unit: str) -> list[int]:
    """Neighbours that overlap one unit both, joined until nothing changes."""
    units = _units(tokens.text, unit)

    def touched(k: int) -> set[int]:
        first, end = tokens.offsets[k]
        return (
            set()
            if tokens.special[k]
            else {n for n, (a, b) in enumerate(units) if a < end and first < b and first < end}
        )

    groups, number = [0], 0
    for k in range(1, len(tokens)):
        group = [j for j in range(k) if groups[j] == number]
        number += not any(touched(j) & touched(k) for j in group)
        groups.append(number)
    return groups


@pytest.mark.model
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=LETTERS)
def test_groups_of_real_tokenizers_against_brute_force(sources, text):
    for source in sources.values():
        try:
            tokens = source.tokenize(text)
        except TextError:  # MiniLM drops all of it
            continue
        for unit in ("word", "character"):
            words = join(tokens, unit)
            assert words.groups.tolist() == groups_by_force(tokens, unit)
            assert (
                len(words)
                == len(words.labels)
                == len(words.offsets)
                == len(words.special)
                == len(words.starts)
            )
            assert [k for g in range(len(words)) for k in words.tokens(g)] == list(range(len(tokens)))
            for label in words.labels:
                assert label
                assert "\ufffd" not in label
                assert not re.search(r" \d/\d", label)  # no piece of a character is left


# What is read with them


@pytest.mark.model
@pytest.mark.parametrize("unit", ["word", "character"])
@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_rows_of_a_joined_reading_sum_to_1_and_are_sums_and_means(sources, name, unit):
    text = f"Mika's caf{E} 東京メトロで働いた。 👩‍👩‍👧 한국어, unbelievable!"
    done = run(sources[name], text, layers=[1, 4], k=0)
    words = join(done.tokens, unit)
    assert len(words) < len(done.tokens)
    member = torch.nn.functional.one_hot(words.groups).to(torch.float64)  # [tokens, groups]
    for layer in done.recording:
        matrix = done.recording[layer]
        table = matrix.mass(words.groups, rows=words.groups)
        assert table.shape == (1, matrix.shape[1], len(words), len(words))
        seen = oracle.causal(len(done.tokens), len(done.tokens)) if name == "smollm2" else None
        truth, plain = (
            oracle.plain(matrix.query, matrix.key, visible=seen, dtype=dtype)[0]
            for dtype in (torch.float64, None)
        )
        truth, plain = (
            ((member / member.sum(0)).T.to(each.dtype) @ each @ member.to(each.dtype))
            for each in (truth, plain)
        )
        assert_accurate(table, truth, plain, "the joined table")
        ones = torch.ones_like(truth.sum(-1))
        assert_accurate(table.sum(-1), ones, plain.sum(-1), "row sums")
        for group in (0, len(words) // 2, -1):
            row = words.row(matrix, group)
            assert_accurate(row, truth[..., group, :], plain[..., group, :], "one row")
            assert_accurate(row.sum(-1), ones[..., group], plain[..., group, :].sum(-1), "its sum")


def some_tokens(text: str = "so so") -> Tokens:
    return Tokens(text, [1, 2, 3], [(0, 1), (1, 2), (2, 5)], ["s", "o", " so"], [False] * 3)


def test_words_that_somebody_else_found():
    tokens = Tokens("食べる人", [1, 2, 3, 4], [(k, k + 1) for k in range(4)], list("食べる人"), [False] * 4)
    assert join(tokens).labels == ["食", "べる", "人"]
    assert join(tokens, [(0, 3), (3, 4)]).labels == ["食べる", "人"]
    assert join(tokens, [(1, 3)]).labels == ["食", "べる", "人"]
    assert join(tokens, []).labels == list("食べる人")
    for spans, says in (
        ([(0, 2), (1, 3)], "go on from 2"),
        ([(2, 2)], r"holds \(2, 2\)"),
        ([(3, 5)], "the 4 characters"),
        ([(-1, 2)], "go on from 0"),
        ([3], "must hold pairs"),
        ([(0, 1.5)], "must hold pairs"),
        ("line", "unit is 'line' but must be \"word\""),
    ):
        with pytest.raises(TextError, match=says):
            join(tokens, spans)


def test_tokens_without_a_place_in_the_text_stand_alone():
    tokens = Tokens(
        "ab", [1, 2, 3, 4], [(0, 0), (0, 1), (1, 1), (1, 2)], ["<s>", "a", "␣", "b"], [True] + [False] * 3
    )
    words = join(tokens)
    assert words.groups.tolist() == [0, 1, 1, 1]  # but between two pieces of a word
    assert words.labels == ["<s>", "ab"]
    words = join(tokens, "character")
    assert words.groups.tolist() == [0, 1, 2, 3]
    assert words.labels == ["<s>", "a", "␣", "b"]
    none = join(Tokens("", [], [], [], []))
    assert (len(none), none.groups.dtype) == (0, torch.int64)


def test_a_row_needs_the_matrix_of_these_tokens():
    query = torch.randn(1, 2, 3, 4)
    words = join(some_tokens())
    with pytest.raises(TextError, match="3 queries and 2 keys but there are 3 tokens"):
        words.row(kizuki.attend(query, query[:, :, :2]), 0)
    with pytest.raises(IndexError):
        words.row(kizuki.attend(query, query), 2)
    assert words.row(kizuki.attend(query.bfloat16(), query.bfloat16()), 1).dtype is torch.float32


def test_long_texts_of_anything_are_cut_in_linear_time():
    """A hundred thousand flags in a row took a minute when each was counted from the first."""
    for text in ("🇯🇵", "a b ", "東京メトロ", GA, " ", "\u0301", "👩\u200d"):
        long = text * (100_000 // len(text))
        assert _cuts(long, "word")[-1] == _cuts(long, "character")[-1] == len(long)
    assert len(_cuts("🇯🇵" * 50_000, "word")) == 50_001


def test_without_regex_it_says_what_to_install(monkeypatch):
    plain = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "regex":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(TextError, match=r"needs the package regex; pip install 'kizuki\[models\]'"):
        join(some_tokens())
