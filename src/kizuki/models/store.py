"""Recordings on disk: `Recording.save(path)` and `kizuki.open(path)`.

A file is safetensors as everybody's: the length of its JSON header (8 bytes, little-endian), the header, the
tensors one after another. Under `__metadata__` stand five texts:

    format    "kizuki.recording"
    version   "1", of the format
    kizuki    the version of kizuki that saved it
    recording the table that header.py describes, as JSON
    crc32     the checksum of that text, in 8 hexadecimal digits

Tensors are written one at a time, so saving needs the memory of one of them, and read from a memory map when
a layer is asked for. Nothing in a file is ever unpickled or run.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections import UserDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .. import files
from ..extras import absent
from . import header
from .header import HeaderError, Shape
from .recording import Capture, Layer, Recording
from .rule import RecordError

FORMAT = "kizuki.recording"
VERSION = 1
ALIGN = 64  # the data begin at a multiple of so many bytes, which the widest loads like
HEADER_LIMIT = 100_000_000  # bytes; readers of safetensors refuse longer headers
CALLER = "recording.save"
UNKNOWN = "0" * 8  # a checksum that is not known yet


def save(recording: Recording, path: str | os.PathLike[str]) -> Path:
    """`Recording.save`, where it is described."""
    target = check_target(path)
    if sys.byteorder != "little":
        raise RecordError(
            "recording.save: this machine is big-endian, and the file's numbers are little-endian"
        )
    table, tensors = header.table_of(recording)
    # Wide numbers first, so that each tensor begins at a multiple of its own width.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    tensors = {name: tensors[name] for name in order}
    sums = dict.fromkeys(tensors, UNKNOWN)
    begin = len(_head(table, tensors, sums))
    if begin > HEADER_LIMIT:
        raise RecordError(
            f"recording.save: the text and its tokens need a header of {begin:,} bytes, above {HEADER_LIMIT:,}; "
            "set recording.tokens to None"
        )
    with files.replacing(target, RecordError, CALLER) as part, part.open("xb") as file:
        file.seek(begin)
        for name, tensor in tensors.items():
            sums[name] = _write(file, tensor)
        file.seek(0)  # the header last: what breaks off before it is no file of any kind
        file.write(_head(table, tensors, sums))
    return target


def check_target(path: str | os.PathLike[str]) -> Path:
    """The file a recording will go to; RecordError, before any work is done, where there can be none."""
    return files.check_target(path, RecordError, CALLER)


def _head(table: dict[str, Any], tensors: dict[str, Tensor], sums: dict[str, str]) -> bytes:
    """The file up to its data; the same length whatever the checksums are."""
    text = json.dumps({**table, "crc32": sums}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise RecordError(
            "recording.save: recording.tokens holds half a surrogate pair, which is no text"
        ) from None
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "version": str(VERSION),
            "kizuki": header.versions()["kizuki"],
            "recording": text,
            "crc32": f"{zlib.crc32(data):08x}",
        }
    }
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": header.DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    line = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    line += b" " * (-(8 + len(line)) % ALIGN)
    return len(line).to_bytes(8, "little") + line


def _bytes(tensor: Tensor) -> Any:
    """A contiguous CPU tensor's memory as NumPy bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _write(file: BinaryIO, tensor: Tensor) -> str:
    """Write one tensor; its checksum."""
    data = _bytes(tensor.detach().cpu().contiguous())
    file.write(data)
    return f"{zlib.crc32(data):08x}"


def open(path: str | os.PathLike[str], *, layers: Layer | Iterable[Layer] | None = None) -> Recording:
    """Open a recording that `Recording.save` wrote.

    Its header is read and checked, and the file is mapped into memory; nothing of a layer is read before
    `recording[layer]` or `recording.value(layer)` asks for that layer. Then its bytes are compared with their
    checksums, and A with the rows of the model's own output that were saved, as in a fresh recording.

    Args:
        path: the file.
        layers: which of the saved layers to hold; one number (or name) or several. `None` = all.

    Returns:
        A `Recording` on the CPU, with its `tokens` (None where none were saved) and the `versions` it was
        saved with. It gives the same bits as the one that was saved, and can be saved again.

    Raises:
        RecordError: there is no such file; it is cut short, damaged, no recording, or of a newer format; it
            does not hold a layer of `layers`; safetensors is not installed. A layer whose own bytes are
            damaged is refused when it is asked for, the others are not touched by it. One line each.

    A file that is open may be replaced (saving does that) or deleted, but must not be shortened in place.

    Time and memory: the header (about 80 bytes a token); a layer takes one reading of its bytes, and the
    system can drop its pages again at any time.

    Example:
        >>> import kizuki, tempfile, torch, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with kizuki.record(model) as recording:
        ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = recording.save(f"{folder}/pi.safetensors")
        ...     again = kizuki.open(path)
        ...     torch.equal(again[2][...], recording[2][...])
        True
    """
    try:
        file, table = _read(Path(path))
    except TypeError:
        raise RecordError(f"kizuki.open: path is a {type(path).__name__} but must be a path") from None
    except HeaderError as error:
        raise RecordError(f"kizuki.open: {path}: {error}") from None
    entries = {entry["layer"]: entry for entry in table["layers"]}
    chosen = _chosen(path, layers, list(entries))
    recording = Recording(table["model"], chosen, table["heads"])
    recording.passes = table["passes"]
    recording.tokens = header.tokens_of(table["tokens"])
    recording.versions = table["versions"]
    recording._errors = {
        layer: RecordError(entries[layer]["error"]) for layer in chosen if "error" in entries[layer]
    }

    def tensor(name: str) -> Tensor:
        found: Tensor = file.get_tensor(name)  # a view of the map
        if f"{zlib.crc32(_bytes(found)):08x}" != table["crc32"][name]:
            raise RecordError(f"{path}: the bytes of {name} are damaged (their checksum differs)")
        return found

    held = {layer: entries[layer] for layer in chosen if "error" not in entries[layer]}
    recording._captures = _Captures(held, tensor)
    return recording


class _Captures(UserDict[Layer, Any]):
    """The layers of a file: each is its table until somebody asks for it, and a Capture from then on."""

    def __init__(self, entries: dict[Layer, dict[str, Any]], tensor: Callable[[str], Tensor]) -> None:
        super().__init__(entries)
        self.tensor = tensor

    def __getitem__(self, layer: Layer) -> Capture:
        found = self.data[layer]
        if not isinstance(found, Capture):
            found = self.data[layer] = self._load(found)
        return found

    def _load(self, entry: dict[str, Any]) -> Capture:
        def maybe(name: str) -> Tensor | None:
            return None if entry[name] is None else self.tensor(entry[name])

        return Capture(
            path=entry["path"],
            query=self.tensor(entry["query"]),
            key=self.tensor(entry["key"]),
            value=self.tensor(entry["value"]),
            scale=entry["scale"],
            softcap=entry["softcap"],
            sinks=maybe("sinks"),
            bias=maybe("bias"),
            rules=[header.rule_of(entry["rule"], self.tensor)],
            rows=entry["rows"],
            sample=maybe("sample"),
        )


def _read(path: Path) -> tuple[Any, dict[str, Any]]:
    """The open file and its checked table; raises HeaderError."""
    try:
        from safetensors import SafetensorError, safe_open
    except (ImportError, OSError) as error:
        raise HeaderError(absent(error, "needs the package safetensors", "models")) from None
    try:
        if path.is_dir():
            raise HeaderError("is a folder; give the file that recording.save wrote")
        if path.exists() and not path.is_file():
            raise HeaderError("is not an ordinary file, which a memory map needs")
        file = safe_open(path, framework="pt")
        shapes: dict[str, Shape] = {
            name: (part.get_dtype(), list(part.get_shape()))
            for name, part in ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118
        }
        about = file.metadata() or {}
    except FileNotFoundError:
        raise HeaderError("there is no such file") from None
    except OSError as error:
        raise HeaderError(f"cannot be read ({error.strerror or error})") from None
    except SafetensorError as error:
        reason = " ".join(str(error).split())[:120]
        raise HeaderError(
            f"is cut short, damaged or no safetensors file ({reason}); save the recording again"
        ) from None
    if about.get("format") != FORMAT:
        raise HeaderError(
            "is a safetensors file but no recording of kizuki's; give one that recording.save wrote"
        )
    version, saved_by = about.get("version", ""), about.get("kizuki", "an unknown version")[:20]
    if version != str(VERSION):
        if version.isascii() and version.isdigit() and len(version) < 10 and int(version) > VERSION:
            raise HeaderError(
                f"is of format {version}, saved by kizuki {saved_by!r}; this one reads format {VERSION}: upgrade kizuki"
            )
        raise HeaderError(f"has the format version {version[:20]!r}, which there never was")
    text = about.get("recording", "")
    if about.get("crc32") != f"{zlib.crc32(text.encode()):08x}":
        raise HeaderError("its header is damaged (the checksum differs); save the recording again")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        raise HeaderError("its header is damaged (it is no JSON); save the recording again") from None
    header.check_table(table, shapes)
    return file, table


def _chosen(path: Any, layers: Layer | Iterable[Layer] | None, saved: list[Layer]) -> list[Layer]:
    """The layers to hold, in the file's order; RecordError for one that is not there."""
    if layers is None:
        return saved
    try:
        wanted = [layers] if isinstance(layers, int | str) else list(layers)
    except TypeError:
        kind = type(layers).__name__
        raise RecordError(f"kizuki.open: layers is a {kind} but must be a whole number or several") from None
    for layer in wanted:
        if layer not in saved:
            there = ", ".join(map(str, saved))
            raise RecordError(f"kizuki.open: {path}: layer {layer!r} is not in it; saved are {there}")
    if not wanted:
        raise RecordError("kizuki.open: layers is empty; name at least one, or give None for all")
    return [layer for layer in saved if layer in wanted]
