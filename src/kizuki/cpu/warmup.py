"""`kizuki warmup`: every kernel compiled for this processor, or loaded where it was compiled before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from . import cache, launch
from .target import Target


class CacheError(OSError):
    """The cache folder cannot be written, so that warming up would be forgotten at once."""


@dataclass(frozen=True)
class Warmed:
    """One kernel: its name, how long it took, and whether it lay in the cache already."""

    name: str
    seconds: float
    loaded: bool


def count() -> int:
    """How many kernels `warm` goes through."""
    return len(_wanted())


def _wanted() -> list[tuple[str, Target]]:
    """Every kernel by name, with the target it is compiled for; bfloat16 may have some of its own."""
    single, double = launch.target(torch.float32), launch.target(torch.float64)
    wanted = [(name, target) for target in (single, double) for name in launch.KERNELS]
    return wanted + [(name, single.paired) for name in launch.PAIRED if single.dot]


def warm() -> Iterator[Warmed]:
    """Compile or load each kernel for this processor, one after another. Raises CacheError."""
    check_folder(cache.folder())
    for name, target in _wanted():
        path = cache.place(name, target)
        there = path.exists()
        begun = time.perf_counter()
        launch.kernel(name, target)
        seconds = time.perf_counter() - begun
        if not path.exists():
            raise CacheError(
                f"kizuki warmup: the kernel {path.stem} was not kept in {path.parent} (full, or not writable); "
                "make room, or set KIZUKI_CACHE to another folder"
            )
        yield Warmed(path.stem, seconds, there)


def check_folder(folder: Path) -> None:
    """Raise CacheError unless a file can be written below `folder`, which is made if need be."""
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise CacheError(
            f"kizuki warmup: the cache folder {folder} cannot be written ({error.strerror}); "
            "set KIZUKI_CACHE to one that can"
        ) from None
