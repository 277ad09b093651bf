"""The command line: does it do its job, and does each thing a careless user gives it get one clear line?"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kizuki import cli
from kizuki.look import InputError, sample, saved_recording
from kizuki.models.tokens import cut

COMMAND = [sys.executable, "-m", "kizuki"]


@pytest.fixture
def kizuki(monkeypatch, capsys, tmp_path):
    """Run the command in this process, in an empty folder: `code, out, err = kizuki("look", "hi")`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # main sets it; put it back

    def run(*args: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as stopped:
            cli.main(args)
        code = stopped.value.code
        assert isinstance(code, int)
        return (code, *capsys.readouterr())

    return run


# What is wrong with each: the arguments, the standard input, and what the line must say.
BAD = {
    "empty text": (["look", ""], b"", "text is empty"),
    "white space": (["look", " \n\t"], b"", "only white space"),
    "empty standard input": (["look", "-"], b"", "text is empty"),
    "empty file": (["look", "--file", "empty.txt"], b"", "text is empty"),
    "binary file": (["look", "--file", "binary.bin"], b"", "binary.bin is a binary file (byte 3 is 0)"),
    "UTF-16 file": (["look", "--file", "utf16.txt"], b"", "utf16.txt is UTF-16; save it as UTF-8"),
    "Shift-JIS file": (["look", "--file", "sjis.txt"], b"", "sjis.txt is not UTF-8 (byte 0 is 0x8b)"),
    "binary standard input": (["look"], b"\0\1", "standard input is a binary file"),
    "missing file": (["look", "--file", "nosuch.txt"], b"", "nosuch.txt does not exist"),
    "folder as file": (["look", "--file", "folder"], b"", "folder is a folder; give a text file"),
    "text without an end": (["look", "--file", "/dev/zero"], b"", "more than 16 MB"),
    "text and file": (["look", "hi", "--file", "empty.txt"], b"", "use one of them"),
    "text and sample": (["look", "hi", "--sample"], b"", "use one of them"),
    "out in no folder": (["look", "hi", "--out", "nosuch/page.html"], b"", "no folder nosuch; make it"),
    "out is a folder": (["look", "hi", "--out", "folder"], b"", "--out folder: is a folder"),
    "out cannot be written": (["look", "hi", "--out", "/proc/page.html"], b"", "cannot be written"),
    "out is a device": (["look", "hi", "--out", "/dev/null"], b"", "not an ordinary file"),
    "out has too long a name": (["look", "hi", "--out", "a" * 300], b"", "cannot be written"),
    "layers are words": (["look", "hi", "--layers", "first"], b"", "write 0,5,10-12"),
    "layers backwards": (["look", "hi", "--layers", "5-3"], b"", "write 0,5,10-12"),
    "heads are negative": (["look", "hi", "--heads", "-1"], b"", "write 0,5,10-12"),
    "first is 0": (["look", "hi", "--first", "0"], b"", "--first"),
    "page of no size": (["look", "hi", "--limit-mb", "nan"], b"", "limit_mb is nan"),
    "topk is 0": (["look", "hi", "--topk", "0"], b"", "--topk"),
    "save under a name for something else": (["look", "hi", "--save", "a.txt"], b"", "ends in .safetensors"),
    "save in no folder": (
        ["look", "hi", "--save", "no/a.safetensors"],
        b"",
        "--save .*there is no folder no",
    ),
    "save where the page goes": (
        ["look", "hi", "--save", "a.safetensors", "-o", "a.safetensors"],
        b"",
        "is where the",
    ),
    "no such recording": (["look", "nosuch.safetensors"], b"", "nosuch.safetensors: there is no such file"),
    "no recording": (
        ["look", "foreign.safetensors"],
        b"",
        "foreign.safetensors: is cut short, damaged or no",
    ),
    "no recording as file": (["look", "--file", "foreign.safetensors"], b"", "cut short, damaged or no"),
    "recording and text": (["look", "hi", "--file", "foreign.safetensors"], b"", "use one of them"),
    "recording and sample": (["look", "foreign.safetensors", "--sample"], b"", "use one of them"),
    "recording and model": (
        ["look", "foreign.safetensors", "--model", "minilm"],
        b"",
        "--model is for a text",
    ),
    "recording and first": (["look", "foreign.safetensors", "--first", "9"], b"", "--first is for a text"),
    "recording and heads": (["look", "foreign.safetensors", "--heads", "0"], b"", "--heads is for a text"),
    "unknown option": (["look", "hi", "--nosuch"], b"", "--nosuch"),
    "unknown command": (["nosuch"], b"", "nosuch"),
}
BAD_WITH_MODEL = {
    "unknown model": (["look", "hi", "--model", "no-such-model"], b"", "no-such-model"),
    "unknown layer": (["look", "hi", "--layers", "0,30"], b"", "30"),
    "unknown head": (["look", "hi", "--heads", "9"], b"", "9"),
    "longer than the positions": (
        ["look", "--file", "long.txt"],
        b"",
        "reads at most 8,192; .* --first 8192",
    ),
}


@pytest.mark.parametrize(
    "name", [*BAD, *(pytest.param(name, marks=pytest.mark.model) for name in BAD_WITH_MODEL)]
)
def test_bad_input_is_one_line_and_exit_code_2_and_leaves_nothing(kizuki, tmp_path, name):
    (tmp_path / "empty.txt").write_bytes(b"\n")
    (tmp_path / "binary.bin").write_bytes(b"ELF\0\1\2")
    (tmp_path / "utf16.txt").write_bytes("気づき".encode("utf-16"))
    (tmp_path / "sjis.txt").write_bytes("気づき".encode("shift-jis"))
    (tmp_path / "foreign.safetensors").write_bytes(b"PK" * 99)
    (tmp_path / "long.txt").write_text("one two three " * 3000, encoding="utf-8")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    args, stdin, expected = (BAD | BAD_WITH_MODEL)[name]
    for folder in ("/dev", "/proc"):
        if any(arg.startswith(f"{folder}/") for arg in args) and not Path(folder).is_dir():
            pytest.skip(f"no {folder} on this system")

    code, out, err = kizuki(*args, stdin=stdin)

    lines = [line for line in err.splitlines() if not re.match(r"looking at|loading|[\w ()]+: done in", line)]
    assert code == 2
    assert out == ""
    assert len(lines) == 1, err
    assert lines[0].startswith("kizuki")
    assert re.search(expected.replace("(", r"\(").replace(")", r"\)"), lines[0]), lines[0]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.posix
def test_a_terminal_without_text_is_told_how_to_give_one():
    import pty  # not there on Windows

    control, terminal = pty.openpty()
    try:
        done = subprocess.run([*COMMAND, "look"], stdin=terminal, capture_output=True, text=True, timeout=120)
    finally:
        os.close(control)
        os.close(terminal)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--sample" in done.stderr


@pytest.mark.model
@pytest.mark.parametrize(("text", "tokens"), [("the", 1), ("🦙 and 京都", 9)])
def test_look_writes_one_page_and_prints_its_path(kizuki, tmp_path, text, tokens):
    code, out, err = kizuki(
        "look", text, "--layers", "0,2-3", "--heads", "1", "--out", "page.html", "--no-open"
    )
    assert code == 0, err
    assert out == "page.html\n"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert f"smollm2: {tokens} tokens, 3 layers × 1 heads" in err


@pytest.mark.model
def test_a_saved_recording_gives_the_same_page_again_but_for_the_predictions(kizuki, tmp_path):
    def facts(page: str) -> dict[str, object]:
        text = (tmp_path / page).read_text(encoding="utf-8")
        return json.loads(re.search(r'id="kz-meta">(.*?)</script>', text)[1])

    def blocks(page: str, layer: int) -> dict[str, str]:
        text = (tmp_path / page).read_text(encoding="utf-8")
        return dict(re.findall(rf'id="kz-(\w+-{layer}(?:-\d+)?)">(.*?)</script>', text))

    common = ("--no-open", "--out")
    words = ("Mika laughed 東京.", "--layers", "0,7", "--heads", "1-3")
    code, out, err = kizuki("look", *words, "--save", "a.safetensors", *common, "a.html")
    assert (code, out) == (0, "a.html\na.safetensors\n"), err
    code, out, err = kizuki("look", "a.safetensors", *common, "b.html")
    assert (code, out) == (0, "b.html\n"), err
    assert re.search(r"smollm2: \d+ tokens, 2 layers × 3 heads", err)
    first, again = facts("a.html"), facts("b.html")
    for name in ("model", "tokens", "heads", "layers", "means", "kv_of", "start", "missing"):
        assert again[name] == first[name], name
    assert first["predictions"] is not None
    assert (again["predictions"], again["has_head"]) == (None, True)
    assert "Recorded with" in [fact["en"] for fact in again["provenance"]]
    assert blocks("a.html", 7) == blocks("b.html", 7)
    assert len(blocks("b.html", 7)) > 5
    code, _, err = kizuki("look", "--file", "a.safetensors", "--layers", "7", *common, "c.html")
    assert code == 0, err
    assert "1 layers × 3 heads" in err
    code, _, err = kizuki("look", "a.safetensors", "--layers", "3", *common, "d.html")
    assert code == 2
    assert "layer 3 is not in it; saved are 0, 7" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.safetensors", "b.html", "c.html"]


def test_a_sentence_that_ends_with_a_files_name_is_a_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert saved_recording("I saved it as mika.safetensors", None) is None
    assert saved_recording("mika.safetensors", None) == Path("mika.safetensors")
    (tmp_path / "my own.safetensors").write_bytes(b"")
    assert saved_recording("my own.safetensors", None) == Path("my own.safetensors")
    assert saved_recording(None, tmp_path / "letter.txt") is None


def test_a_recording_without_tokens_has_no_page(kizuki, tmp_path):
    import torch
    import transformers as tf

    import kizuki as package

    model = tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=2, n_head=2)
    ).eval()
    with torch.no_grad(), package.record(model) as recording:
        model(torch.tensor([[3, 1, 4, 1, 5]]))
    recording.save(tmp_path / "a.safetensors")
    code, _, err = kizuki("look", "a.safetensors", "--no-open")
    assert code == 2
    assert err.splitlines()[-1].startswith(
        "kizuki: a.safetensors holds no tokens to show; set recording.tokens"
    )


@pytest.mark.parametrize(
    ("args", "stdin"),
    [(["Mika 京"], ""), (["-"], "Mika 京"), ([], "Mika 京"), (["--file", "x"], "")],
)
def test_text_file_and_pipe_give_the_same_text(kizuki, monkeypatch, tmp_path, args, stdin):
    (tmp_path / "x").write_text("Mika 京", encoding="utf-8-sig")  # a byte order mark is no text
    seen = []

    def stop(text, **options):
        seen.append(text)
        raise InputError("enough seen")

    monkeypatch.setattr("kizuki.look.look", stop)
    assert kizuki("look", *args, stdin=stdin.encode())[0] == 2
    assert seen == ["Mika 京"]


@pytest.mark.model
@pytest.mark.parametrize("model", ["smollm2", "minilm"])
def test_first_looks_at_the_beginning_and_says_how_much_is_left_out(kizuki, sample_text, model):
    code, _, err = kizuki("look", "--sample", "--model", model, "--first", "20", "--layers", "0", "--no-open")
    assert code == 0, err
    assert re.search(r"20 tokens \(the first; \d+ more were left out\)", err), err


@pytest.mark.model
def test_cut_keeps_the_text_its_tokens_cover_and_an_encoders_last_special():
    from kizuki.models import sources

    tokens = sources.load("minilm").tokenize("Mika laughed, and the goat came to her.")
    short = cut(tokens, 5)
    assert short.ids == [*tokens.ids[:4], tokens.ids[-1]]
    assert short.special == [True, False, False, False, True]
    assert short.text == tokens.text[: tokens.offsets[3][1]]
    assert len(short.labels) == len(short.offsets) == 5
    assert cut(tokens, 10_000) is tokens


@pytest.mark.posix
def test_a_page_behind_a_link_is_replaced_and_the_link_stays(tmp_path):
    from kizuki.look import check_out

    (tmp_path / "real.html").write_text("old", encoding="utf-8")
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    assert check_out(tmp_path / "link.html") == (tmp_path / "real.html").resolve()


def test_numbers():
    assert cli.numbers("0,5,10-12", "--layers") == (0, 5, 10, 11, 12)
    assert cli.numbers(" 3 , 1-2,2", "--layers") == (1, 2, 3)
    assert cli.numbers(None, "--layers") is None
    with pytest.raises(InputError, match="99999"):
        cli.numbers("0-99999", "--layers")


def test_the_page_is_opened_only_where_there_is_a_screen(monkeypatch, tmp_path):
    import webbrowser

    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    assert not cli.open_page(tmp_path / "page.html")
    monkeypatch.setenv("DISPLAY", ":0")
    assert cli.open_page(tmp_path / "page.html")
    assert opened == [(tmp_path / "page.html").as_uri()]


FAULT = """
import kizuki.cli, kizuki.look
def broken(*args, **options): raise RuntimeError("lamp\\nbroke")
kizuki.look.look = broken
kizuki.cli.main(["look", "hi"])
"""


@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_fault_of_kizukis_own_is_one_line_and_code_1_and_debug_shows_where(debug):
    done = subprocess.run(
        [sys.executable, "-c", FAULT],
        capture_output=True,
        text=True,
        env=os.environ | {"KIZUKI_DEBUG": debug},
        timeout=120,
    )
    assert done.returncode == 1
    assert ("Traceback" in done.stderr) == (debug == "1")
    if debug == "0":
        last = done.stderr.splitlines()[-1]
        assert last == "kizuki: a fault of its own, RuntimeError: lamp broke (KIZUKI_DEBUG=1 shows where)"


def test_an_error_that_kizuki_did_not_write_is_a_fault_and_not_bad_input(monkeypatch):
    def broken(*args, **options):
        raise ValueError("not meant for the user")

    monkeypatch.setattr("kizuki.look.look", broken)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ValueError, match="not meant"):
        cli.main(["look", "hi"])


@pytest.mark.parametrize(
    "error", ["MemoryError()", 'RuntimeError("DefaultCPUAllocator: can\'t allocate memory")']
)
def test_running_out_of_memory_is_told_in_one_line(kizuki, monkeypatch, error):
    def broken(*args, **options):
        raise eval(error)

    monkeypatch.setattr("kizuki.look.look", broken)
    code, _, err = kizuki("look", "hi")
    assert code == 1
    assert err.splitlines()[-1] == "kizuki: out of memory; look at less with --first, --layers or --heads"


@pytest.mark.model
def test_ctrl_c_stops_with_130_and_leaves_nothing(tmp_path, sample_text):
    text = tmp_path / "text.txt"
    text.write_text(sample_text * 5, encoding="utf-8")
    job = subprocess.Popen(
        [*COMMAND, "look", "--file", str(text), "--out", str(tmp_path / "page.html"), "--no-open"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stderr is not None
    line = job.stderr.readline()
    while line and "done in" not in line:  # the model is loaded: it is in the middle of its work
        line = job.stderr.readline()
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 130, err
    assert err.splitlines()[-1] == "kizuki: stopped"
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_help_and_version():
    runner = CliRunner()
    helped = runner.invoke(cli.app, ["look", "--help"])
    assert helped.exit_code == 0
    for option in ("--file", "--model", "--layers", "--heads", "--out", "--first", "--topk", "--no-open"):
        assert option in helped.output
    from kizuki import __version__

    assert runner.invoke(cli.app, ["--version"]).output == f"kizuki {__version__}\n"


def test_doctor_prints_each_section_without_colour_codes(kizuki):
    code, out, err = kizuki("doctor")
    assert (code, err) == (0, "")
    for word in ("versions", "torch", "LLVM", "processor", "features", "threads", "cache", "models", "peers"):
        assert word in out
    assert "\x1b" not in out


def test_a_terminal_that_knows_only_ascii_loses_signs_and_no_work():
    done = subprocess.run(
        [*COMMAND, "doctor"], capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"register tile" in done.stdout


def test_doctor_in_json(kizuki):
    code, out, _ = kizuki("doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["versions"]["torch"].startswith("2.")
    assert found["threads"]["cores"] == os.cpu_count()
    assert set(found["peers"]) == {"onnxruntime", "onnx", "openvino", "jax", "matplotlib"}


def test_doctor_does_without_everything_optional(monkeypatch, tmp_path):
    from importlib import metadata, util

    from kizuki import doctor

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    find = util.find_spec
    monkeypatch.setattr(doctor.metadata, "version", absent)
    monkeypatch.setattr(util, "find_spec", lambda name: None if "_" in name else find(name))
    monkeypatch.setenv("KIZUKI_CACHE", str(tmp_path / "nowhere"))
    found = doctor.report()
    assert found["models"] == {"smollm2": None, "minilm": None}
    assert found["versions"]["transformers"] is None


def test_the_sample_is_plain_text_in_english_and_japanese():
    text = sample()
    assert all(character.isprintable() or character == "\n" for character in text)
    assert re.search("[ぁ-ん]{2}", text)
    assert re.search("[a-z]{2}", text)


@pytest.mark.model
def test_the_sample_is_about_600_tokens(sample_text):
    from kizuki.models import sources

    assert 550 <= len(sources.load("smollm2").tokenize(sample_text).ids) <= 650


def test_the_command_is_installed():
    assert (Path(sys.executable).parent / "kizuki").exists()
