"""Which twin belongs to which emitted body.

A body is known by its module and the functions it is written in: `rows.emit.scaled.scale_panel`. Its maker takes, by
name, what was given where the body was written (`t`, `kind`, `rows` …), and returns the twin: the same arguments, the
same meaning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

Twin = Callable[..., Any]

MAKERS: dict[str, Callable[..., Twin]] = {}


class ContractError(AssertionError):
    """A body was called with what its contract rules out: the loop that called it is wrong."""


def twin(name: str) -> Callable[[Callable[..., Twin]], Callable[..., Twin]]:
    """Register the maker of a body's twin."""

    def register(maker: Callable[..., Twin]) -> Callable[..., Twin]:
        if name in MAKERS:
            raise ValueError(f"{name} has a twin already")
        MAKERS[name] = maker
        return maker

    return register


def name_of(function: Any) -> str:
    """`module.function.inner` of a body as it is written in the sources."""
    return f"{function.__module__.rpartition('.')[2]}.{function.__qualname__.replace('<locals>.', '')}"


def twin_of(function: Any, given: Mapping[str, Any]) -> Twin:
    """The twin of a body; `given`: the names known where the body was written."""
    name = name_of(function)
    if name not in MAKERS:
        raise LookupError(f"{name} is emitted and has no twin; write one in tests/twins/")
    maker = MAKERS[name]
    return maker(**{wanted: given[wanted] for wanted in inspect.signature(maker).parameters})


def needs(holds: bool, what: str) -> None:
    """What a body's contract asks of whoever calls it."""
    if not holds:
        raise ContractError(f"called against its contract: {what}")
