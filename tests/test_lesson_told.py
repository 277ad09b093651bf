"""The lesson as it is told: does every word exist twice, does it fit a terminal, is bad input one line?"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from lessons import source_of
from rich.cells import cell_len
from rich.console import Console

from kizuki import cli
from kizuki.lesson import Material, gather, shipped
from kizuki.lesson import example as packaged
from kizuki.lesson.language import preferred, put, table
from kizuki.lesson.terminal import Terminal
from kizuki.lesson.wrap import NOT_FIRST, NOT_LAST, wrap

FOLDER = Path(packaged.__file__).parent


@pytest.fixture(scope="module")
def lesson() -> Material:
    return shipped()


# -- both languages ----------------------------------------------------------------------------------


def test_both_languages_have_the_same_words_and_places() -> None:
    en, ja = table("en"), table("ja")
    assert en.keys() == ja.keys()
    for key in en:
        assert set(re.findall(r"\{(\w+)\}", en[key])) == set(re.findall(r"\{(\w+)\}", ja[key])), key
        assert en[key].strip()
        assert ja[key].strip()
        assert not re.search("[ぁ-んァ-ヶ一-龯]", en[key]) or key == "switch_language", key


def test_japanese_is_japanese() -> None:
    ja = table("ja")
    shared = {"id", "switch_language", "write_size"}
    for key, words in ja.items():
        if key not in shared:
            assert re.search("[ぁ-んァ-ヶ一-龯]", words), key
    text = "".join(ja.values())
    for word in (
        "行列",
        "内積",
        "重み",
        "トークン",
        "クエリ",
        "キー",
        "バリュー",
        "残差",
        "マスク",
        "勾配",
        "飽和",
    ):
        assert word in text
    assert not re.search(r"[ぁ-んァ-ヶ一-龯][,.!?]", text)  # Japanese takes 、。！？


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({"LANG": "ja_JP.UTF-8"}, "ja"),
        ({"LANG": "ja_JP.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({}, "en"),
    ],
)
def test_the_language_is_the_locales(monkeypatch: Any, environment: dict[str, str], want: str) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert preferred() == want


def test_what_is_put_into_a_sentence_is_text() -> None:
    assert put("“{word}” of {n}", word="{n}", n=3) == "“{n}” of 3"


def test_japanese_lines_break_where_they_may() -> None:
    text = "".join(table("ja")[f"step{k}_text"] for k in range(1, 9))
    for width in (20, 41, 80):
        lines = wrap(text, width)
        assert "".join("".join(lines).split()) == "".join(text.split())
        for line in lines:
            assert cell_len(line) <= width + 2  # a stop hangs over rather than begin a line
            assert line[0] not in NOT_FIRST
            assert line[-1] not in NOT_LAST


# -- the terminal ------------------------------------------------------------------------------------


def written(made: Material, language: str, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    Terminal(made, language, console).lesson_in_full()
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("language", ["en", "ja"])
def test_the_terminal_shows_eight_steps_within_its_width(lesson: Material, language: str, width: int) -> None:
    text = written(lesson, language, width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    for step in range(1, 9):
        assert table(language)[f"step{step}_title"] in text
    assert table(language)["caution"][:20] in text
    assert "{" not in text
    for number in ("0.7656", "66.0", "0.9895, 0.0105", "1.49e-10", "22.627", "6.334782", "17.1 %", "150.87"):
        assert number in text, number
    for d in (4, 16, 64, 128, 512):
        assert re.search(rf"^ +{d} ", text, re.M)


def test_a_number_is_opened_in_full(lesson: Material) -> None:
    console = Console(width=100, file=io.StringIO())
    Terminal(lesson, "en", console).number("dot[7,1]")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    products = [float(line.rsplit("=", 1)[1]) for line in lines if "×" in line]
    assert len(products) == lesson.head_dim
    assert sum(products) == pytest.approx(66.0176, abs=2e-3)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_a_long_sentence_says_what_it_leaves_out(name: str) -> None:
    text = written(gather(source_of(name, 40), "w", layer=1, word=39), "en", 80)
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    assert "matrix is wider than this terminal" in text
    cut = re.findall(r"Shown are the 12 largest of 40 weights: (\d+\.\d) % of the row", text)
    assert len(cut) == 4  # of steps 3, 5, 6 and 7
    assert all(0 < float(share) < 100 for share in cut)


# -- the command -------------------------------------------------------------------------------------


@pytest.fixture
def explain(monkeypatch: Any, capsys: Any, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LANG", "C")

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["explain", *args])
        return (stopped.value.code, *capsys.readouterr())  # type: ignore[return-value]

    return run


def test_without_a_sentence_the_example_is_explained(explain: Any) -> None:
    code, out, err = explain("--lang", "ja")
    assert (code, err) == (0, "")
    assert "バリューを混ぜる" in out
    code, out, _ = explain("--number", "weight[7,1]")
    assert code == 0
    assert "weight[7,1] = exp / sum = 0.765642" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--model", "minilm"], "--model is for a sentence"),
        (["--layer", "3"], "--layer is for a sentence"),
        (["--head", "9"], "head is 9 but layer 13 has the heads 0 … 8"),
        (["--word", "cat"], "word 'cat' is no token"),
        (["--lang", "fr"], "lang is 'fr'"),
        (["--number", "weight[7]"], "1 places but weight has 2"),
        (["--number", "sum[1]", "--html", "a.html"], "use one of them"),
        (["--html", "nosuch/a.html"], "there is no folder nosuch"),
        ([" \n"], "only white space"),
        (["nosuch.safetensors"], "nosuch.safetensors"),
    ],
)
def test_bad_input_to_explain_is_one_line_and_leaves_nothing(
    explain: Any, tmp_path: Path, args: list[str], says: str
) -> None:
    code, out, err = explain(*args)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert says in err
    assert list(tmp_path.iterdir()) == []


def test_a_saved_recording_is_explained_without_its_model(explain: Any) -> None:
    file = str(FOLDER / "example" / packaged.RECORDING)
    code, out, err = explain(file, "--head", "8", "--word", "it")
    assert (code, err) == (0, "")
    assert "0.8166" in out
    assert "not in this recording" in " ".join(out.split())


@pytest.mark.model
@pytest.mark.parametrize(
    ("model", "args", "language"),
    [("smollm2", [], "en"), ("minilm", ["--layer", "2", "--head", "5"], "ja")],
)
def test_a_real_sentence_in_the_terminal(explain: Any, model: str, args: list[str], language: str) -> None:
    code, out, err = explain(
        "Mika saw the goat, and she laughed at it.", "--model", model, *args, "--lang", language
    )
    assert code == 0, err
    assert max(cell_len(line) for line in out.splitlines()) <= 80
    for step in range(1, 9):
        assert table(language)[f"step{step}_title"] in out
    assert "residual + o + rest" in out
    assert "goat" in out
