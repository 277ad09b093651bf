"""Memory that runs out: torch's RuntimeError, several lines of C++, becomes Python's MemoryError in one line."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

REFUSED = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


def told(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with MemoryError where torch's allocator for the CPU was refused memory; other errors pass."""

    @functools.wraps(function)
    def spoken(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            refused = REFUSED.search(str(error))
            if refused is None:
                raise
            raise MemoryError(
                f"kizuki: out of memory: the system refused {int(refused[1]):,} bytes more; take fewer queries, heads "
                "or batch entries at a time"
            ) from None

    return spoken


def tells(cls: C) -> C:
    """A class whose public methods are `told`."""
    for name, method in list(vars(cls).items()):
        if callable(method) and not name.startswith("_"):
            setattr(cls, name, told(method))
    return cls
