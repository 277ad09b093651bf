"""Surveys: the numbers of the measures, one row a head, and no text lost or repeated however a run ends."""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers as tk
import torch
import transformers as tf
from made import VOCAB, made
from tiny import tiny

from kizuki import cli
from kizuki.models import Source, SurveyError, TextError, measures, parquet, run, survey
from kizuki.models.survey import MEASURES

WORDS = [f"w{n}" for n in range(VOCAB)]
TEXTS = {
    "one": "w1 w2 w3 w1 w2 w3",
    "two": "w4 w4 w5",
    "three": "w7 w8 w9 w10",
    "four": "w1",
    "five": "w1 w2 w3 w1 w2 w3",  # the same text under another name is another text
}


def source(model: torch.nn.Module | None = None) -> Source:
    """A model that reads words w0 … w11."""
    model = made() if model is None else model
    vocabulary = tk.Tokenizer(tk.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="w0"))
    vocabulary.pre_tokenizer = tk.pre_tokenizers.Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=vocabulary, unk_token="w0")
    return Source("built by hand", model, tokenizer, "decoder", 32, "tests")


def test_rows_are_the_measures():
    read = source()
    rows = survey(TEXTS, read).columns()
    assert len(rows["text"]) == len(TEXTS) * 4
    assert rows["text"][:5] == ["one"] * 4 + ["two"]
    assert rows["layer"][:4] == [0, 0, 1, 1]
    assert rows["head"][:4] == [0, 1, 0, 1]
    assert rows["tokens"][::4] == [6, 3, 4, 1, 6]
    W = measures.output_weights(read.model)
    for number, text in enumerate(TEXTS.values()):
        recording = run(read, text, k=0).recording
        for name in MEASURES:
            more = (W,) if name == "contribution" else ()
            one = getattr(measures, name)(recording, *more)
            at = slice(4 * number, 4 * number + 4)
            for column, tensor in ((name, one.value), (f"{name}_control", one.control)):
                got = torch.tensor(rows[column][at], dtype=torch.float64)
                assert torch.equal(got.nan_to_num(-1), tensor.flatten().nan_to_num(-1)), (text, column)
            assert MEASURES[name].against == one.against


def test_known_heads_stand_out():
    rows = survey([TEXTS["one"]], source(), ["induction", "previous"]).columns()
    assert list(rows) == [
        "text",
        "tokens",
        "layer",
        "head",
        "previous",
        "previous_control",
        "induction",
        "induction_control",
    ]
    assert rows["previous"][0] == pytest.approx(1.0, abs=1e-4)
    assert rows["induction"][2] > 0.8


def test_layers_heads_and_first():
    model = tiny("llama")
    rows = survey(
        [TEXTS["one"]], source(model), ["contribution", "entropy"], layers=[2, 0], heads=[3], first=4
    )
    columns = rows.columns()
    assert (columns["layer"], columns["head"], columns["tokens"]) == ([0, 2], [3, 3], [4, 4])
    recording = run(source(model), "w1 w2 w3 w1", k=0).recording
    whole = measures.contribution(recording, model).value[0, [0, 2], 3]
    torch.testing.assert_close(
        torch.tensor(columns["contribution"], dtype=torch.float64), whole, rtol=1e-5, atol=1e-7
    )


# -- on disk -----------------------------------------------------------------------------------------


@pytest.fixture
def arrow():
    return pytest.importorskip("pyarrow", reason="not installed: pyarrow (make env installs it)")


def same(one, other) -> bool:
    return json.dumps(one) == json.dumps(other)  # NaN is NaN there


def test_the_file_holds_the_rows_and_says_what_they_are(arrow, tmp_path):
    read = source()
    done = survey(TEXTS, read, out=tmp_path / "s.parquet")
    assert (done.texts, done.done) == (5, 5)
    assert same(done.columns(), survey(TEXTS, read).columns())
    assert [p.name for p in tmp_path.iterdir()] == ["s.parquet"]
    file = arrow.parquet.ParquetFile(tmp_path / "s.parquet")
    assert file.num_row_groups == 5
    about = parquet.read_about(tmp_path / "s.parquet")
    assert about["model"] == "built by hand"
    assert about["measures"]["entropy"] == "ln of the keys each row sees"
    assert [name for name, _ in about["texts"]] == list(TEXTS)


class Killed(BaseException):
    """As sudden as a test can be inside its process."""


@pytest.mark.parametrize("after", range(6))
def test_broken_off_after_any_text_it_goes_on(arrow, tmp_path, monkeypatch, after):
    read, out = source(), tmp_path / "s.parquet"
    whole = survey(TEXTS, read, ["entropy", "duplicate"]).columns()

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "texts" and done == after:
            raise Killed

    with pytest.raises(Killed):
        survey(TEXTS, read, ["entropy", "duplicate"], out=out, progress=stop)
    assert not out.exists()
    assert len(list(tmp_path.rglob("*.parquet"))) == after
    told = []
    again = survey(
        TEXTS,
        read,
        ["entropy", "duplicate"],
        out=out,
        progress=lambda stage, done, total: told.append((done, total)),
    )
    assert again.done == 5 - after
    assert told == [(n, 5) for n in range(after, 6)]
    assert same(again.columns(), whole)
    assert survey(TEXTS, read, ["entropy", "duplicate"], out=out).done == 0
    assert [p.name for p in tmp_path.iterdir()] == ["s.parquet"]


@pytest.mark.parametrize("step", ["part", "result", "folder"])
def test_broken_off_between_writing_and_renaming(arrow, tmp_path, monkeypatch, step):
    read, out = source(), tmp_path / "s.parquet"
    replace, count = (
        os.replace,
        {"part": 3, "result": 7, "folder": 99}[step],
    )  # the note, five parts, the result
    done = []

    def stop(a, b):
        done.append(b)
        if len(done) == count:
            raise Killed
        replace(a, b)

    def never(self):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(parquet.os, "replace", stop)
        if step == "folder":
            patch.setattr(parquet.Journal, "_clear", never)
        with pytest.raises(Killed):
            survey(TEXTS, read, ["entropy"], out=out)
    assert out.exists() == (step == "folder")
    again = survey(TEXTS, read, ["entropy"], out=out)
    assert again.done == {"part": 4, "result": 0, "folder": 0}[step]
    assert same(again.columns(), survey(TEXTS, read, ["entropy"]).columns())
    assert [p.name for p in tmp_path.iterdir()] == ["s.parquet"]


SCRIPT = """
import os, signal, sys
import test_survey as t
def die(stage, done, total):
    if done == 2:
        os.kill(os.getpid(), signal.SIGKILL)
t.survey(t.TEXTS, t.source(), ["first_key"], out=sys.argv[1], progress=die)
"""


@pytest.mark.posix
@pytest.mark.slow
def test_killed_in_earnest_it_goes_on(arrow, tmp_path):
    out = tmp_path / "s.parquet"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out)], env={**os.environ, "PYTHONPATH": paths}, timeout=300
    )
    assert ended.returncode == -signal.SIGKILL
    again = survey(TEXTS, source(), ["first_key"], out=out)
    assert again.done == 3
    assert same(again.columns(), survey(TEXTS, source(), ["first_key"]).columns())


def test_two_at_once_are_kept_apart(arrow, tmp_path):
    read, out = source(), tmp_path / "s.parquet"

    def second(stage: str, done: int, total: int) -> None:
        if done == 1:
            with pytest.raises(SurveyError, match="another process is writing"):
                survey(TEXTS, read, ["entropy"], out=out)

    assert survey(TEXTS, read, ["entropy"], out=out, progress=second).done == 5


def broken_off(read: Source, out: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        survey(TEXTS, read, ["entropy"], out=out, progress=stop)


def test_an_unfinished_survey_is_not_mixed_with_another(arrow, tmp_path):
    read, out = source(), tmp_path / "s.parquet"
    broken_off(read, out)
    edited = {**TEXTS, "two": "w5 w5 w5"}
    for texts, chosen, other in ((edited, ["entropy"], "texts"), (TEXTS, ["distance"], "measures")):
        with pytest.raises(SurveyError, match=f"unfinished survey with other {other}"):
            survey(texts, read, chosen, out=out)
    assert survey(TEXTS, read, ["entropy"], out=out).done == 3
    with pytest.raises(SurveyError, match="is there already and is not this survey"):
        survey(edited, read, ["entropy"], out=out)


def test_what_is_somebody_elses_stays(arrow, tmp_path):
    read, out = source(), tmp_path / "s.parquet"
    (tmp_path / "s.parquet.parts").mkdir()
    (tmp_path / "s.parquet.parts" / "thesis.txt").write_text("years of work")
    with pytest.raises(SurveyError, match=r"holds files and no survey\.json"):
        survey(TEXTS, read, out=out)
    assert (tmp_path / "s.parquet.parts" / "thesis.txt").read_text() == "years of work"
    other = tmp_path / "other.parquet"
    other.write_bytes(b"PAR1 not so")
    with pytest.raises(SurveyError, match="is no survey of kizuki's"):
        survey(TEXTS, read, out=other)
    assert other.read_bytes() == b"PAR1 not so"


def test_a_survey_that_cannot_begin_leaves_nothing(arrow, tmp_path):
    with pytest.raises(ValueError, match="layers holds 7"):
        survey(TEXTS, source(), ["entropy"], layers=[7], out=tmp_path / "s.parquet")
    assert not list(tmp_path.iterdir())


BAD = {
    "no texts": (({},), {}, "texts is empty"),
    "one text": (("w1 w2",), {}, "texts is one str"),
    "a number": ((3,), {}, "texts is a int"),
    "no name": (({"": "w1"},), {}, "a text is named ''"),
    "unknown measure": ((TEXTS,), {"measures": ["entropie"]}, "holds 'entropie'"),
    "measures a str": ((TEXTS,), {"measures": "entropy"}, "measures is one str"),
    "no measures": ((TEXTS,), {"measures": []}, "measures is empty"),
    "first": ((TEXTS,), {"first": 0}, "first is 0"),
    "folder": ((TEXTS,), {"out": "."}, "is a folder"),
    "no folder": ((TEXTS,), {"out": "nosuch/s.parquet"}, "there is no folder"),
    "no path": ((TEXTS,), {"out": 3}, "out is a int"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line(name):
    (texts,), options, expected = BAD[name]
    with pytest.raises(SurveyError, match=expected) as error:
        survey(texts, source(), **options)
    assert "\n" not in str(error.value)


def test_a_bad_text_is_named_before_any_is_read():
    told: list[int] = []
    with pytest.raises(TextError, match="text 'b': text is empty"):
        survey({"a": "w1", "b": ""}, source(), progress=lambda stage, done, total: told.append(done))
    with pytest.raises(TextError, match="text 'long': text has 33 tokens"):
        survey({"a": "w1", "long": "w1 " * 33}, source())
    assert not told


def test_without_pyarrow_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SurveyError, match=r"pip install 'kizuki\[survey\]'"):
        survey(TEXTS, source(), out=tmp_path / "s.parquet")
    assert survey(TEXTS, source(), ["entropy"]).done == 5


def test_a_pyarrow_that_does_not_load_says_why(monkeypatch, tmp_path):
    """One built for another NumPy is there, and installing it once more would change nothing."""
    plain = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "pyarrow":
            raise ImportError("pyarrow requires NumPy 2.0 or newer\nand more")
        return plain(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "pyarrow", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(SurveyError, match=r"is here does not load: pyarrow requires NumPy 2.0 or newer$"):
        survey(TEXTS, source(), out=tmp_path / "s.parquet")


# -- the command -------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """`code, out, err = command("a.txt", ...)` in an empty folder, with the built model for any name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("kizuki.models.load", lambda name, progress=None: source())

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        with pytest.raises(SystemExit) as stopped:
            cli.main(["survey", *args])
        assert isinstance(stopped.value.code, int)
        return (stopped.value.code, *capsys.readouterr())

    return call


def test_the_command_writes_the_file_and_prints_its_path(arrow, command, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(TEXTS[name], encoding="utf-8")
    code, out, err = command(
        "one.txt", "two.txt", "-o", "s.parquet", "--measures", "entropy,previous", "--layers", "1"
    )
    assert (code, out) == (0, "s.parquet\n")
    assert "built by hand: 2 texts\n" in err
    rows = arrow.parquet.read_table(tmp_path / "s.parquet").to_pydict()
    assert rows["text"] == ["one.txt"] * 2 + ["two.txt"] * 2
    assert set(rows["layer"]) == {1}
    code, _, err = command(
        "one.txt", "two.txt", "-o", "s.parquet", "--measures", "entropy,previous", "--layers", "1"
    )
    assert code == 0
    assert "2 texts, 2 of them before" in err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "Missing argument"),
        (["nosuch.txt"], "nosuch.txt does not exist"),
        (["one.txt", "one.txt"], "one.txt is given twice"),
        (["one.txt", "--measures", "entropie"], "there are previous, duplicate"),
        (["one.txt", "--layers", "x"], "write 0,5,10-12"),
        (["one.txt", "-o", "no/s.parquet"], "there is no folder"),
    ],
    ids=str,
)
def test_bad_commands_get_one_line(arrow, command, tmp_path, args, expected):
    (tmp_path / "one.txt").write_text(TEXTS["one"], encoding="utf-8")
    code, out, err = command(*args)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert expected in err
    assert [p.name for p in tmp_path.iterdir()] == ["one.txt"]
