"""Compiled kernels on disk, under a key of sources, versions and processor.

Numba's own cache looks only at the file that holds the function; our kernels are emitted from several,
so the key here is a hash of every source in this folder. Set `KIZUKI_CACHE` to move the folder.
"""

from __future__ import annotations

import hashlib
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc
from numba.core.errors import NumbaWarning
from numba.core.typing.templates import Signature

from .. import caches
from . import target


def folder() -> Path:
    """Where compiled kernels are kept."""
    return caches.folder("kernels")


@lru_cache(maxsize=1)
def stamp() -> str:
    """A hash of the kernel sources, the compiler's version and the processor with its features."""
    import llvmlite
    import numba

    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    for part in (numba.__version__, llvmlite.__version__, target.processor(), *sorted(target.features())):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


class _Locator(_CacheLocator):  # type: ignore[misc]
    def __init__(self, path: str) -> None:
        self._path = path

    def get_cache_path(self) -> str:
        return self._path

    def get_source_stamp(self) -> str:
        return stamp()

    def get_disambiguator(self) -> str:
        return "k"


class _Impl(CompileResultCacheImpl):  # type: ignore[misc]
    def __init__(self, name: str, path: str) -> None:
        self._lineno = 0
        self._locator = _Locator(path)
        self._filename_base = name


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's function cache with our folder and key instead of its own."""

    def __init__(self, name: str, path: str) -> None:
        self._name = name
        self._py_func = None
        self._impl = _Impl(name, path)
        self._cache_path = path
        from numba.core.caching import IndexDataCacheFile

        self._cache_file = IndexDataCacheFile(cache_path=path, filename_base=name, source_stamp=stamp())
        self.enable()

    def _index_key(self, sig: Signature, codegen: Any) -> tuple[Any, ...]:
        return (str(sig), codegen.magic_tuple(), stamp())


def compile_kernel(name: str, function: Any, signature: Signature) -> Any:
    """Compile `function` to a C function, or load it from disk; a cache that cannot be used is survived.

    Returns Numba's CFunc; keep it alive as long as its address is used.
    """
    parts = (signature.args, signature.return_type)
    kernel = CFunc(function, parts, {}, {"nopython": True, "boundscheck": False, "error_model": "numpy"})
    path = folder() / stamp()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError:
        kernel.compile()  # read-only or full: compile in memory, every time
        return kernel
    kernel._cache = _Cache(name, str(path))
    try:
        kernel.compile()
    except (OSError, EOFError, ValueError, TypeError, AttributeError, ImportError, NumbaWarning):
        fresh = CFunc(function, parts, {}, {"nopython": True, "boundscheck": False, "error_model": "numpy"})
        fresh.compile()  # a broken entry: as if there were none
        return fresh
    return kernel
