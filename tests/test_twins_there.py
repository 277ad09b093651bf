"""Has every emitted body a twin, of the same arguments? (tests/twins/; test_twins.py compares the two.)"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import twins

import kizuki

SOURCES = Path(kizuki.__file__).parent
ELSEWHERE = {
    "peak.chains.spin": "bench/peak.py: a chain of multiply-adds to be timed; no result of it is used"
}


def emitted(path: Path) -> Iterator[tuple[str, list[str]]]:
    """`(name, arguments)` of each `@intrinsic` of a source file, functions it is written in before its own name."""

    def within(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
        for inner in ast.iter_child_nodes(node):
            if not isinstance(inner, ast.FunctionDef):
                yield from within(inner, names)
                continue
            here = (*names, inner.name)
            if any(ast.unparse(d).partition("(")[0].endswith("intrinsic") for d in inner.decorator_list):
                yield ".".join(here), [a.arg for a in inner.args.args][1:]
            yield from within(inner, here)

    yield from within(ast.parse(path.read_text(encoding="utf-8")), (path.stem,))


BODIES = dict(body for path in sorted(SOURCES.rglob("*.py")) for body in emitted(path))


def test_every_emitted_body_has_a_twin() -> None:
    missing = sorted(BODIES.keys() - twins.MAKERS.keys() - ELSEWHERE.keys())
    assert not missing, f"emitted, and without a twin in tests/twins/: {', '.join(missing)}"


def test_every_twin_has_its_body() -> None:
    assert not sorted(twins.MAKERS.keys() - BODIES.keys()), "twins of what is not emitted any more"
    assert len(BODIES) > 45


def test_a_body_without_a_twin_is_refused_by_name() -> None:
    def body(typingctx: object, row: int) -> None: ...

    body.__module__, body.__qualname__ = "kizuki.cpu.kernels.rows", "emit.<locals>.unheard_of"
    with pytest.raises(LookupError, match=r"rows\.emit\.unheard_of is emitted and has no twin"):
        twins.twin_of(body, {})


def test_a_twin_refuses_what_the_contract_rules_out() -> None:
    from kizuki.cpu.target import TARGETS

    t = TARGETS["generic"]
    with pytest.raises(twins.ContractError, match="multiple of 4 vectors"):
        twins.MAKERS["rows.emit.raise_row"](t)(0, 3 * t.lanes, 0.0, 0)
    with pytest.raises(twins.ContractError, match="at least one step"):
        twins.MAKERS["tile.emit.scores"](t)(0, 0, 0, 0)


GIVEN = {
    "t",
    "kind",
    "rows",
    "squares",
    "known",
    "vectors",
    "source_kind",
    "out_kind",
    "reach_too",
    "combine",
}


@pytest.mark.parametrize("name", sorted(twins.MAKERS))
def test_a_twin_takes_what_its_body_takes(name: str) -> None:
    """As many arguments, in the same order, of the same names where the twin's own would not hide a function's."""
    maker = twins.MAKERS[name]
    wanted = inspect.signature(maker).parameters
    given = dict.fromkeys(wanted)
    if "numba_type" in given:
        from numba import types

        given["numba_type"] = types.float32
    if "t" in given:
        from kizuki.cpu.target import TARGETS

        given["t"] = TARGETS["generic"]
    given |= {n: 1 for n in given if given[n] is None}
    made = inspect.signature(inspect.unwrap(maker(**given))).parameters
    assert [n.rstrip("_") for n in made] == BODIES[name]
    assert wanted.keys() <= GIVEN | {"numba_type"}
