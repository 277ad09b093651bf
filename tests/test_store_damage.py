"""Damaged recordings: is every file that is none refused in one line, and does no wrong number come out?"""

from __future__ import annotations

import json
import os
import random
import struct

import pytest
import safetensors.torch
import torch
from stored import pieces, recorded, together
from tiny import TOKENS

import kizuki
from kizuki.models import RecordError


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """One small recording, the bytes of its file, and the path."""
    recording = recorded("gpt_oss", "left")
    path = recording.save(tmp_path_factory.mktemp("kept") / "kept.safetensors")
    return recording, path.read_bytes(), path


def table_with(**fields):
    def apply(data: bytes) -> bytes:
        entries, table, rest = pieces(data)
        return together(entries, table | fields, rest)

    return apply


def layer_with(where: str | None = None, **fields):
    def apply(data: bytes) -> bytes:
        entries, table, rest = pieces(data)
        layer = table["layers"][1]
        (layer if where is None else layer[where]).update(fields)
        return together(entries, table, rest)

    return apply


def about_with(**fields):
    def apply(data: bytes) -> bytes:
        entries, _, rest = pieces(data)
        entries["__metadata__"].update(fields)
        line = json.dumps(entries).encode()
        return struct.pack("<Q", len(line)) + line + rest

    return apply


def without(name: str):
    def apply(data: bytes) -> bytes:
        entries, table, rest = pieces(data)
        del table[name]
        return together(entries, table, rest)

    return apply


def moved(data: bytes) -> bytes:
    """Two tensors of one shape with each other's place: only their checksums can tell."""
    entries, table, rest = pieces(data)
    a, b = entries["layers.1.key"], entries["layers.1.value"]
    a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]
    return together(entries, table, rest)


def overlapping(data: bytes) -> bytes:
    entries, table, rest = pieces(data)
    entries["layers.1.key"]["data_offsets"] = entries["layers.0.key"]["data_offsets"]
    return together(entries, table, rest)


def one_more(data: bytes) -> bytes:
    entries, table, rest = pieces(data)
    entries["bias"] = {"dtype": "F32", "shape": [1], "data_offsets": [len(rest), len(rest) + 4]}
    return together(entries, table, rest + b"\0\0\0\0")


TEXT = {
    "text": "ab",
    "ids": [1, 2],
    "offsets": [[0, 1], [1, 2]],
    "labels": ["a", "b"],
    "special": [False, True],
}

REFUSED = {
    "nothing": (lambda data: b"", "cut short, damaged"),
    "seven bytes": (lambda data: data[:7], "cut short, damaged"),
    "half the header": (lambda data: data[:900], "cut short, damaged"),
    "half the data": (lambda data: data[: len(data) * 3 // 4], "cut short, damaged"),
    "a byte less": (lambda data: data[:-1], "cut short, damaged"),
    "a byte more": (lambda data: data + b"x", "cut short, damaged"),
    "a header of 2⁶³ bytes": (lambda data: struct.pack("<Q", 2**63) + data[8:], "cut short, damaged"),
    "a header of 90 MB": (lambda data: struct.pack("<Q", 90_000_000) + data[8:], "cut short, damaged"),
    "text": (lambda data: "東京メトロ".encode() * 99, "no safetensors file"),
    "JSON without end": (lambda data: struct.pack("<Q", 200_000) + b"[" * 200_000, "cut short, damaged"),
    "overlapping tensors": (overlapping, "cut short, damaged"),
    "another safetensors file": (lambda data: safetensors.torch.save({"a": torch.ones(2)}), "no recording"),
    "another format": (about_with(format="pt"), "no recording of kizuki's"),
    "a newer format": (
        about_with(version="2", kizuki="9.9"),
        "format 2, saved by kizuki '9.9'.*upgrade kizuki",
    ),
    "no format version": (about_with(version="x"), "format version 'x', which there never was"),
    "a header of one other letter": (about_with(recording="{}"), "its header is damaged"),
    "no JSON": (lambda data: together(pieces(data)[0], "{", b""), "cut short, damaged"),
    "no JSON inside": (lambda data: together(pieces(data)[0], "{", pieces(data)[2]), "no JSON"),
    "nested JSON": (lambda data: together(pieces(data)[0], "[" * 99_999, pieces(data)[2]), "no JSON"),
    "a list": (lambda data: together(pieces(data)[0], [], pieces(data)[2]), "is a list, not a table"),
    "an unknown field": (table_with(bias="layers.0.query"), "the field 'bias'"),
    "an unknown field of a layer": (layer_with(gate=None), "layer 1 has the field 'gate'"),
    "an unknown field of a rule": (layer_with("rule", chunk=4), "layer 1, rule has the field 'chunk'"),
    "a field less": (without("passes"), "its header has no passes"),
    "no model": (table_with(model=None), "a model that cannot be"),
    "a negative number": (table_with(passes=-1), "a passes that cannot be"),
    "other heads": (table_with(heads=[0, 1]), "do not fit its 2 key heads or the recorded heads"),
    "a tensor that is not there": (layer_with(query="layers.9.query"), "no tensor 'layers.9.query'"),
    "another layer's tensor": (layer_with(query="layers.0.query"), "named on one side only"),
    "a tensor of another shape": (layer_with(key="layers.1.query"), "F32 .*, which does not fit its query"),
    "one tensor more": (one_more, "'bias' is named on one side only"),
    "another dtype": (layer_with(dtype="float16"), "its query is F32 but its dtype says float16"),
    "another rule": (layer_with("rule", right=None), "its mask and its rule say different things"),
    "another end": (layer_with("rule", stop=12), "its key is F32"),
    "a row behind the end": (layer_with(rows=[0, 6, TOKENS]), "rows names a query that is not there"),
    "a softcap of 0": (layer_with(softcap=0), "a softcap that cannot be"),
    "a scale that is text": (layer_with(scale="1"), "a scale that cannot be"),
    "a layer twice": (layer_with(layer=0), "a layer is there twice"),
    "no checksums": (table_with(crc32={}), "their checksums"),
    "tokens without ids": (table_with(tokens={**TEXT, "ids": [1]}), "lists of different lengths"),
    "offsets behind the text": (table_with(tokens={**TEXT, "text": "a"}), "offsets behind the end"),
    "labels that are none": (table_with(tokens={**TEXT, "labels": [1, 2]}), "a labels that cannot be"),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_a_file_that_is_none_is_refused_in_one_line(damage, kept, tmp_path):
    make, says = REFUSED[damage]
    path = tmp_path / "a.safetensors"
    path.write_bytes(make(kept[1]))
    with pytest.raises(RecordError, match=says) as caught:
        kizuki.open(path)
    message = str(caught.value)
    assert message.startswith(f"kizuki.open: {path}: ")
    assert "\n" not in message
    assert len(message) < 320 + len(str(path))


def test_no_pickle_is_loaded(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save({"a": Trap()}, tmp_path / "a.safetensors")
    with pytest.raises(RecordError, match="no safetensors file"):
        kizuki.open(tmp_path / "a.safetensors")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.posix
def test_paths_that_are_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, says in (
        (tmp_path / "nosuch", "no such file"),
        (tmp_path, "folder"),
        (tmp_path / "pipe", "ordinary"),
    ):
        with pytest.raises(RecordError, match=f"^kizuki.open: {path}: .*{says}"):
            kizuki.open(path)
    with pytest.raises(RecordError, match="path is a int"):
        kizuki.open(3)


def test_tensors_in_each_others_place_are_found_out(kept, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(moved(kept[1]))
    with pytest.raises(RecordError, match="damaged"):
        kizuki.open(path)[1]


def test_whatever_byte_is_damaged_no_wrong_number_comes_out(kept, tmp_path):
    recording, data, _ = kept
    weights = {layer: recording[layer][...] for layer in recording}
    chance = random.Random(0)
    begin = len(data) - len(pieces(data)[2])
    path = tmp_path / "a"
    places = [chance.randrange(begin) for _ in range(150)] + [
        chance.randrange(begin, len(data)) for _ in range(50)
    ]
    refused = 0
    for place in places:
        broken = bytearray(data)
        broken[place] ^= 1 << chance.randrange(8)
        path.write_bytes(broken)
        try:
            again = kizuki.open(path)
        except RecordError:
            refused += 1
            continue
        for layer in weights:
            try:
                same = torch.equal(again[layer][...], weights[layer])
            except RecordError:
                refused += 1
                continue
            assert same
    assert refused > 180
