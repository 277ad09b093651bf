"""Compiled kernels on disk, under a key of sources, versions and processor; loaded by LLVM alone, without Numba.

Set `KIZUKI_CACHE` to move the folder. A file is a line that says what it is, the SHA-256 of the rest, and the rest:
object code. Whatever is wrong with a file, the kernel is compiled as if there had been none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import caches
from . import target
from .target import Target

MAGIC = b"kizuki kernel 1\n"
SYMBOL = "kizuki_kernel"
OLD = 3600  # seconds after which nobody can still be writing a file

_alive: list[Any] = []  # what holds the loaded code


def folder() -> Path:
    """Where compiled kernels are kept."""
    return caches.folder("kernels")


@lru_cache(maxsize=1)
def stamp() -> str:
    """A hash of what decides a kernel's code: its sources, the compiler's version, the processor and its features."""
    from importlib.metadata import version

    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in (
        *sorted((here / "kernels").glob("*.py")),
        *(here / f"{n}.py" for n in ("layout", "sizes", "target")),
    ):
        digest.update(path.read_bytes())
    for part in (version("numba"), version("llvmlite"), target.processor(), *sorted(target.features())):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def place(name: str, chosen: Target) -> Path:
    """The file of a kernel."""
    return folder() / stamp() / f"{name}-{chosen.name}.kernel"


def kernel(name: str, chosen: Target) -> int:
    """The address of a kernel, from disk or compiled now. Callers hold a lock."""
    path = place(name, chosen)
    code = _read(path)
    if code is None:
        from . import kernels

        code = kernels.compiled(name, chosen, SYMBOL)
        _keep(path, code)
    return _load(code)


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    head = len(MAGIC) + 32
    code = data[head:]
    whole = data.startswith(MAGIC) and hashlib.sha256(code).digest() == data[len(MAGIC) : head]
    return code if whole else None


def _keep(path: Path, code: bytes) -> None:
    """Write the file whole or not at all: other processes may read it now, or write it too."""
    part = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
    with contextlib.suppress(OSError):  # read-only, or full: the kernel is compiled again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(MAGIC + hashlib.sha256(code).digest() + code)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        for left in path.parent.glob(".*.kernel-*"):  # by processes that were killed while they wrote
            if time.time() - left.stat().st_mtime > OLD:
                left.unlink(missing_ok=True)


def _load(code: bytes) -> int:
    """Link object code into this process; each kernel by itself, so that no two share a symbol."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _alive.append(engine)
    return int(engine.get_function_address(SYMBOL))
