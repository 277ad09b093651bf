"""Running a compiled kernel on several threads: torch's OpenMP pool where it can be shared, else Python threads.

A kernel is `void kernel(int64 *args)`: every thread that enters it takes task numbers from an atomic
counter until none is left, so any number of threads may enter, and which thread does a task changes
nothing in the result.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from functools import lru_cache
from typing import Any

import torch

from . import cache
from .target import Target, select

KERNELS = ("pack", "forward", "observe", "decode", "prepare", "backward")
PAIRED = (
    "pack",
    "forward",
    "observe",
    "decode",
)  # those that bfloat16 has of its own where it is taken in pairs

_forked = False
_lock = threading.Lock()
_kernels: dict[tuple[str, str], int] = {}


def _after_fork() -> None:
    # The threads of an OpenMP pool do not exist in a forked child, and entering the pool there hangs.
    global _forked, _lock
    _forked = True
    _lock = threading.Lock()  # a thread that held it in the parent does not exist here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def kernel(name: str, target: Target) -> int:
    """The address of a compiled kernel, compiled or loaded from disk on first use."""
    known = _kernels.get((name, target.name))
    if known is not None:
        return known
    with _lock:
        if (name, target.name) not in _kernels:
            _kernels[name, target.name] = cache.kernel(name, target)
        return _kernels[name, target.name]


@lru_cache(maxsize=1)
def switched_off() -> bool:
    """Whether NUMBA_DISABLE_JIT keeps Numba from compiling anything in this process."""
    return os.environ.get("NUMBA_DISABLE_JIT", "") not in ("", "0")


@lru_cache(maxsize=1)
def openmp() -> Any | None:
    """`GOMP_parallel` of the OpenMP library torch has loaded, so that one pool serves both; None without one."""
    if not sys.platform.startswith("linux"):
        return None
    candidates: list[str | None] = [None]
    try:
        with open("/proc/self/maps") as maps:
            candidates += sorted(
                {line.split()[-1] for line in maps if "libgomp" in line or "libiomp5" in line}
            )
    except OSError:
        pass
    for path in candidates:
        try:
            entry = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        entry.restype = None
        entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        return entry
    return None


def layer() -> str:
    """How kernels are run on several threads here."""
    if _forked:
        return "single thread (forked process)"
    return "OpenMP, shared with torch" if openmp() is not None else "Python threads"


def threads() -> int:
    """How many threads a kernel may use: what `torch.set_num_threads` says, one in a forked child."""
    return 1 if _forked else max(1, torch.get_num_threads())


def run(address: int, args: int, count: int) -> None:
    """Enter the kernel at `address` with `count` threads and wait for all of them."""
    entry = openmp()
    if count <= 1:
        _call(address)(args)
    elif entry is not None:
        entry(address, args, count, 0)
    else:
        function = _call(address)
        helpers = [threading.Thread(target=function, args=(args,)) for _ in range(count - 1)]
        for helper in helpers:
            helper.start()
        function(args)
        for helper in helpers:
            helper.join()


@lru_cache(maxsize=64)
def _call(address: int) -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)


@lru_cache(maxsize=4)
def target(dtype: torch.dtype = torch.float32) -> Target:
    """The target of this process for kernels that compute in `dtype`."""
    chosen = select()
    return chosen.double if dtype is torch.float64 else chosen


__all__ = ["kernel", "layer", "openmp", "run", "switched_off", "target", "threads"]
