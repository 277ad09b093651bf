"""Compiled kernels on disk, under a key of sources, versions and processor.

Numba's own cache looks only at the file that holds the function; our kernels are emitted from several,
so the key here is a hash of every source in this folder. Set `KIZUKI_CACHE` to move the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc
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

    def load_overload(self, sig: Signature, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # noqa: BLE001 - see below
            # Unpickling a file that was cut short or overwritten may raise anything; whatever it is, the
            # entry is worth nothing: it goes, and the kernel is compiled as if there had been none.
            for path in Path(self._cache_path).glob(f"{self._impl.filename_base}.*"):
                path.unlink(missing_ok=True)
            return None

    def save_overload(self, sig: Signature, data: Any) -> None:
        with contextlib.suppress(OSError):  # read-only, or full: the kernel is compiled again next time
            super().save_overload(sig, data)


def _rename(function: Any, name: str, done: set[int]) -> None:
    """Give a kernel's own helpers symbols of their own.

    Numba tells functions of one name apart by a counter that starts anew in each process, so that the helpers of two
    kernels compiled in two processes may bear one symbol; the linker of a third, which loads both from disk, would
    take the first for both.
    """
    plain = getattr(function, "py_func", function)
    if id(plain) in done or not isinstance(plain, FunctionType):
        return
    done.add(id(plain))
    plain.__qualname__ = f"{plain.__qualname__}@{name}"
    for cell in plain.__closure__ or ():
        _rename(cell.cell_contents, name, done)


def compile_kernel(name: str, function: Any, signature: Signature) -> Any:
    """Compile `function` to a C function, or load it from disk; a cache that cannot be used is survived.

    Returns Numba's CFunc; keep it alive as long as its address is used.
    """
    _rename(function, name, set())
    parts = (signature.args, signature.return_type)
    kernel = CFunc(function, parts, {}, {"nopython": True, "boundscheck": False, "error_model": "numpy"})
    path = folder() / stamp()
    with contextlib.suppress(OSError):  # then nothing is found there, and nothing kept
        path.mkdir(parents=True, exist_ok=True)
        kernel._cache = _Cache(name, str(path))
    kernel.compile()
    return kernel
