"""Every body that is emitted for a target, beside its twin."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import numba.extending

from kizuki.cpu.kernels import best, few, pack, rows, scalar, tile, views
from kizuki.cpu.target import Target

from .bodies import INTRINSIC, Body
from .registry import MAKERS, Twin, name_of, twin_of


class Emitted(NamedTuple):
    """One body: its name, what it was made for, and both forms of it."""

    name: str
    given: dict[str, Any]
    body: Callable[..., Any]
    twin: Twin


class Collector:
    """Stands in `intrinsic`'s place and notes what is decorated."""

    def __init__(self) -> None:
        self.found: dict[str, Emitted] = {}

    def __call__(self, function: Any) -> Any:
        known, name = dict(sys._getframe(1).f_locals), name_of(function)
        given = {n: known[n] for n in inspect.signature(MAKERS[name]).parameters} if name in MAKERS else {}
        key = f"{name} " + " ".join(f"{n}={value}" for n, value in given.items() if n != "t")
        if key not in self.found:
            self.found[key] = Emitted(name, given, Body(function), twin_of(function, known))
        return INTRINSIC(function)


@cache
def of(t: Target) -> dict[str, list[Emitted]]:
    """Name of a body: it, for every kind of memory, number of rows … that the kernels of a target have it for."""
    collector = Collector()
    with mock.patch.object(numba.extending, "intrinsic", collector):
        # What is emitted when the module is read: from a copy of it that nobody else has.
        spec = importlib.util.spec_from_file_location(f"{scalar.__package__}.scalar", scalar.__file__)
        assert spec is not None
        assert spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        with mock.patch.dict(sys.modules):
            sys.modules[f"{scalar.__package__}.scalar"] = copy  # where its dataclasses look for themselves
            spec.loader.exec_module(copy)
    patches = [
        mock.patch.object(module, "intrinsic", collector) for module in (tile, rows, pack, few, views, best)
    ]
    for patch in patches:
        patch.start()
    try:
        for make in (tile.emit, rows.emit, pack.panels, few.build, views.emit, best.emit):
            make(t)
    finally:
        for patch in patches:
            patch.stop()
    made: dict[str, list[Emitted]] = {}
    for each in collector.found.values():
        made.setdefault(each.name, []).append(each)
    return made
