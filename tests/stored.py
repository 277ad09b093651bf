"""What the tests of saved recordings share: one made of a random model, and a file's header taken apart."""

from __future__ import annotations

import json
import struct
import zlib

import torch
from tiny import padding, some_ids, tiny

import kizuki


def recorded(name: str = "llama", side: str = "none", **options) -> kizuki.models.Recording:
    model = tiny(name)
    with torch.no_grad(), kizuki.record(model, **options) as recording:
        model(some_ids(), attention_mask=padding(side))
    return recording


def assert_same(again: kizuki.models.Recording, recording: kizuki.models.Recording) -> None:
    assert (again.layers, again.heads) == (recording.layers, recording.heads)
    assert (again.passes, again.model_name) == (recording.passes, recording.model_name)
    for layer in recording:
        assert again.rule(layer) == recording.rule(layer)
        assert again[layer].dtype == recording[layer].dtype
        assert torch.equal(again[layer][...], recording[layer][...])
        assert torch.equal(again.value(layer), recording.value(layer))


def pieces(data: bytes) -> tuple[dict, dict, bytes]:
    """The safetensors header of a file, kizuki's own table in it, and the tensors' bytes."""
    length = struct.unpack("<Q", data[:8])[0]
    entries = json.loads(data[8 : 8 + length])
    return entries, json.loads(entries["__metadata__"]["recording"]), data[8 + length :]


def together(entries: dict, table: object, rest: bytes) -> bytes:
    """The reverse, with the table's checksum made anew."""
    text = table if isinstance(table, str) else json.dumps(table)
    about = entries.get("__metadata__", {}) | {"recording": text, "crc32": f"{zlib.crc32(text.encode()):08x}"}
    line = json.dumps({**entries, "__metadata__": about}).encode()
    return struct.pack("<Q", len(line)) + line + rest
