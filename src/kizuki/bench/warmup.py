"""`kizuki warmup`: every kernel compiled for this processor, or loaded where it was compiled before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


def folder() -> Path:
    """Where they are kept."""
    from ..cpu import cache

    return cache.folder()


def _wanted() -> list[tuple[str, Any]]:
    """Every kernel by name, with the target it is compiled for: float32's and float64's."""
    import torch

    from ..cpu import launch

    targets = dict.fromkeys((launch.target(torch.float32), launch.target(torch.float64)))
    return [(name, target) for target in targets for name in launch.BUILDERS]


def warm() -> Iterator[Warmed]:
    """Compile or load each kernel for this processor, one after another. Raises CacheError."""
    from ..cpu import cache, launch

    check_folder(folder())
    place = folder() / cache.stamp()
    for name, target in _wanted():
        entry = f"{name}-{target.name}"
        there = _files(place, entry)
        begun = time.perf_counter()
        launch.kernel(name, target)
        seconds = time.perf_counter() - begun
        if not _files(place, entry):
            raise CacheError(
                f"kizuki warmup: the kernel {entry} was not kept in {place} (full, or not writable); "
                "make room, or set KIZUKI_CACHE to another folder"
            )
        yield Warmed(entry, seconds, there)


def _files(place: Path, entry: str) -> bool:
    """Whether Numba's index and its data for a kernel are there."""
    return (place / f"{entry}.nbi").exists() and any(place.glob(f"{entry}.*.nbc"))


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
