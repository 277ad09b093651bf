"""A GGUF file expanded to float32 safetensors, once, in the user's cache.

The result is written into a temporary folder and renamed: a folder under its final name is complete.
Its manifest lists the files' sizes, so that one which lost a part later is made again. Two processes may
convert at the same time; the first to finish wins and the other takes what is there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import mmap
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from .. import caches

Progress = Callable[[str, int, int], None]

FORMAT = 1  # raise when what is written changes
MANIFEST = "kizuki.json"
STALE = 24 * 3600  # seconds after which a temporary folder has no living owner


class ConvertError(ValueError):
    """A model could not be converted or its cache not written."""


def cached(name: str, version: str, gguf: Path, progress: Progress | None = None) -> Path:
    """The folder that holds the converted model and tokenizer, made now if it is not there.

    Raises ConvertError when a package is missing or the cache cannot be written.
    """
    parent = caches.folder("models").expanduser().absolute()
    folder = parent / f"{name}-{version}-{FORMAT}"
    if complete(folder):
        return folder
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ConvertError(f"expanding its weights needs the package {module}; pip install {module}")
    temporary = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=parent))
        _convert(gguf, temporary, progress or (lambda stage, done, total: None))
        _write_manifest(temporary, gguf)
        _put(temporary, folder)
    except OSError as error:
        raise ConvertError(
            f"its weights cannot be expanded into {parent} ({error.strerror or error}); set KIZUKI_CACHE to a folder "
            "with 600 MB of room"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def complete(folder: Path) -> bool:
    """Whether a cache folder holds every file its manifest lists, at its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = manifest["files"].items()
        return manifest["format"] == FORMAT and all(
            (folder / file).stat().st_size == size for file, size in sizes
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _put(temporary: Path, folder: Path) -> None:
    """Give the folder its final name; somebody else's complete one is kept, a damaged one replaced."""
    for _ in range(2):
        try:
            os.rename(temporary, folder)
            return
        except OSError:
            if not folder.is_dir():
                raise
            if complete(folder):
                return
            aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-damaged-", dir=folder.parent))
            os.rename(folder, aside / "old")
            shutil.rmtree(aside, ignore_errors=True)
    raise OSError(f"{folder} is written by another process")


def _write_manifest(folder: Path, gguf: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "from": gguf.name, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _sweep(parent: Path) -> None:
    """Remove what processes that were killed while converting left behind."""
    for path in parent.glob(".*-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE:
                shutil.rmtree(path, ignore_errors=True)


def _convert(gguf: Path, folder: Path, report: Progress) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from .sources import quiet

    stage = "expanding weights (once)"
    report(stage, 0, 4)
    with quiet(), _no_bar():
        where, file = str(gguf.parent), gguf.name
        config = AutoConfig.from_pretrained(where, gguf_file=file)
        report(stage, 1, 4)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(where, gguf_file=file)
        _split_digits(tokenizer, gguf)
        tokenizer.save_pretrained(folder)
        report(stage, 2, 4)
        packed = AutoModelForCausalLM.from_pretrained(
            where, gguf_file=file, config=config, dtype=torch.float32
        )
        report(stage, 3, 4)
        # transformers will not save a model that came from a GGUF file, though its weights are plain
        # float32 by now; so they move, uncopied, into a model that has no such past.
        plain = {k: v for k, v in packed.config.to_dict().items() if k != "quantization_config"}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(type(config).from_dict(plain))
        model.load_state_dict(packed.state_dict(), assign=True)
        model.tie_weights()
        model.save_pretrained(folder)
    report(stage, 4, 4)


def _split_digits(tokenizer: Any, gguf: Path) -> None:
    """Cut numbers into digits, as a vocabulary of the kind "smollm" was made; transformers leaves that out."""
    if _string_field(gguf, b"tokenizer.ggml.pre") != b"smollm":
        return
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _string_field(gguf: Path, key: bytes) -> bytes | None:
    """A metadata string of a GGUF file, found without parsing the vocabulary before it (seconds in Python)."""
    with open(gguf, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(struct.pack("<Q", len(key)) + key)
        if at < 0:
            return None
        kind, length = struct.unpack_from("<IQ", data, at + 8 + len(key))
        start = at + 8 + len(key) + 12
        return data[start : start + length] if kind == 8 else None


@contextlib.contextmanager
def _no_bar() -> Iterator[None]:
    """transformers' GGUF reader draws its bar whatever it is told; give it one that draws nothing."""
    import transformers.modeling_gguf_pytorch_utils as reader

    bar = getattr(reader, "tqdm", None)

    def plain(items: Iterable[Any], *args: Any, **kwargs: Any) -> Iterable[Any]:
        return items

    if bar is not None:
        reader.tqdm = plain
    try:
        yield
    finally:
        if bar is not None:
            reader.tqdm = bar
