"""Files that somebody made to do harm: `kizuki.open` opens what is a recording, refuses the rest, and runs nothing.

test_store.py has the kinds of damage one by one; here a recording is changed at random by somebody who knows the
format: checksums are made anew, so that only the checks of what the header says stand before the numbers.
"""

from __future__ import annotations

import copy
import json
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import kizuki
from kizuki import cli
from kizuki.models import RecordError

pytest.importorskip("transformers")
from tiny import some_ids, tiny

BIG = [0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, 1e308, float("nan"), float("inf"), True, None]
TEXT = [
    "",
    "x",
    "../../etc/passwd",
    "layers.0.key",
    "\0",
    "\ud800",
    "a" * 70_000,
    "</script><script>alert(1)</script>",
]
SHAPES = [[], [0], [2**62, 2], [-1, 4], [1] * 2000, {}, [[1]]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    model = tiny("llama")
    with torch.no_grad(), kizuki.record(model) as recording:
        model(some_ids(1, 5))
    recording.tokens = kizuki.models.Tokens(
        "abcde", [1, 2, 3, 4, 5], [(n, n + 1) for n in range(5)], list("abcde"), [False] * 5
    )
    return recording.save(tmp_path_factory.mktemp("hostile") / "a").read_bytes()


def pieces(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    entries = json.loads(data[8 : 8 + length])
    return entries, json.loads(entries["__metadata__"]["recording"]), data[8 + length :]


def together(entries: dict[str, Any], table: object, rest: bytes) -> bytes:
    text = json.dumps(table)
    about = entries.get("__metadata__", {}) | {"recording": text, "crc32": f"{zlib.crc32(text.encode()):08x}"}
    line = json.dumps({**entries, "__metadata__": about}).encode()
    return struct.pack("<Q", len(line)) + line + rest


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for name, x in inner for p in places(x, (*path, name)))]


def changed(value: Any, chance: random.Random) -> Any:
    """A JSON value with something else at one or two of its places, or a place less."""
    made = copy.deepcopy(value)
    for _ in range(chance.randint(1, 2)):
        path = chance.choice([p for p in places(made) if p])
        parent = made
        for name in path[:-1]:
            parent = parent[name]
        how = chance.randrange(6)
        if how == 0:
            del parent[path[-1]]
        elif how == 1 and isinstance(parent, dict):
            parent[chance.choice(TEXT[:5])] = parent[path[-1]]
        else:
            parent[path[-1]] = copy.deepcopy(chance.choice(BIG + TEXT + SHAPES))
    return made


def read_all(path: Path, said: list[str]) -> dict[Any, torch.Tensor]:
    """Everything a recording gives, as a reader would ask for it; what it refuses goes to `said`."""
    recording = kizuki.open(path)
    found = {}
    for layer in recording:
        try:
            matrix = recording[layer]
        except RecordError as error:
            said.append(str(error))
            continue
        found[layer] = matrix[...]
        recording.value(layer)
    return found


def test_a_header_that_says_anything_else_is_refused_or_means_the_same(file: bytes, tmp_path: Path) -> None:
    """600 headers, checksums made anew. No other exception, no crash, no weights that are not the model's own."""
    (tmp_path / "whole").write_bytes(file)
    said: list[str] = []
    truth = read_all(tmp_path / "whole", said)
    assert not said
    assert len(truth) == 3
    entries, table, rest = pieces(file)
    chance, refused, path = random.Random(0), 0, tmp_path / "a"
    for _ in range(600):
        if chance.random() < 0.7:
            data = together(entries, changed(table, chance), rest)
        else:
            tensors = {n: x for n, x in entries.items() if n != "__metadata__"}
            about = {"__metadata__": entries["__metadata__"]}
            data = together(changed(tensors, chance) | about, table, rest)
        path.write_bytes(data)
        try:
            found = read_all(path, said)
        except RecordError as error:
            refused += 1
            said.append(str(error))
            continue
        for layer, weights in found.items():
            same = [w for w in truth.values() if w.shape == weights.shape and torch.equal(w, weights)]
            assert same or not isinstance(layer, int), (
                f"layer {layer!r} has weights that the model did not have"
            )
    assert 300 < refused < 600
    assert not [line for line in said if "\n" in line or len(line) > 500 + len(str(path))]


def test_tensors_with_nan_are_shown_as_nan_or_refused(file: bytes, tmp_path: Path) -> None:
    """A NaN in the numbers is no crash and no number: the rows that see it are NaN, or the layer is refused."""
    tensors = safetensors.torch.load(file)
    entries, table, _ = pieces(file)
    for name in (table["layers"][1]["query"], table["layers"][1]["key"], table["layers"][1]["value"]):
        spoiled = {n: t.clone() for n, t in tensors.items()}
        spoiled[name].view(-1)[3] = float("nan")
        begin = entries[name]["data_offsets"][0]
        rest = bytearray(pieces(file)[2])
        raw = spoiled[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        rest[begin : begin + len(raw)] = raw
        sums = table | {"crc32": table["crc32"] | {name: f"{zlib.crc32(raw):08x}"}}
        (tmp_path / "a").write_bytes(together(entries, sums, bytes(rest)))
        recording = kizuki.open(tmp_path / "a")
        with pytest.raises(RecordError, match="does not give this layer's own output"):
            recording[1]
        assert torch.isfinite(recording[0][...]).all()


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
        b'{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"O","shape":[1],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"format":7}}',
        b"[" * 5000,
        b"\xff\xfe{}",
        b"null",
        b"{}" + b" " * 5000 + b"}",
    ],
    ids=[
        "twice",
        "negative",
        "before",
        "backwards",
        "overflow",
        "object",
        "number",
        "deep",
        "bytes",
        "null",
        "more",
    ],
)
def test_headers_that_are_none(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(RecordError, match=r"^kizuki\.open: ") as error:
        kizuki.open(path)
    assert "\n" not in str(error.value)


def test_a_huge_header_takes_no_memory(tmp_path: Path) -> None:
    """A file that says its header has 2^40 bytes, in a process that has 300 MB more and no more."""
    path = tmp_path / "a"
    with path.open("wb") as out:
        out.write(struct.pack("<Q", 2**40))
        out.truncate(2**41)  # a hole: the file is that long, and takes no disk
    code = """
import resource, sys, kizuki
from kizuki.models import RecordError
import safetensors.torch
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
if used:
    resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20) + (1 << 42),) * 2)
    resource.setrlimit(resource.RLIMIT_DATA, (used + (300 << 20),) * 2)
try:
    kizuki.open(sys.argv[1])
except RecordError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.startswith(f"kizuki.open: {path}: is cut short, damaged or no safetensors file")


def test_nothing_in_the_package_unpickles_or_evaluates() -> None:
    """No pickle, no eval, no exec, and torch.load nowhere: what is read is JSON and numbers."""
    source = Path(kizuki.__file__).parent
    words = ("pickle", "torch.load(", "marshal", "shelve", "joblib", "yaml.load", "os.system", "shell=True")
    for path in source.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        code = "\n".join(line.split("#")[0] for line in text.splitlines())
        for word in words:
            assert f"import {word}" not in code, path
            assert word == "pickle" or word not in code, f"{path}: {word}"
        for call in ("eval(", "exec("):
            at = code.find(call)
            while at >= 0:
                assert code[max(0, at - 1)] in "._" or code[max(0, at - 1)].isalnum(), f"{path}: {call}"
                at = code.find(call, at + 1)


MARKUP = "</script><img src=x onerror=alert(1)>\u2028<!--<script>"


def test_markup_in_a_recordings_tokens_is_text_on_the_page(
    file: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text, labels, the model's name and versions, all from the file: none may end the script it stands in."""
    entries, table, rest = pieces(file)
    tags = []
    for number, words in enumerate(("abcde", MARKUP)):
        table["tokens"]["text"] = words
        table["tokens"]["labels"] = [words] * 5
        table["model"] = words
        table["versions"] = {"kizuki": words, "torch": words}
        path, page = tmp_path / f"{number}.safetensors", tmp_path / f"{number}.html"
        path.write_bytes(together(entries, table, rest))
        with pytest.raises(SystemExit) as stopped:
            cli.main(["look", str(path), "--out", str(page), "--no-open"])
        assert stopped.value.code == 0, capsys.readouterr().err
        html = page.read_text(encoding="utf-8").lower()
        tags.append([html.count(tag) for tag in ("<script", "</script", "<img", "<!--", "\u2028")])
    assert tags[0] == tags[1]
