"""The slots of an argument block that most calls leave empty: functions of the user's, and dropout.

`custom` loads Numba, which takes longer than most first calls; so it waits for a call that has a function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dropout import below, factor
from ..functions import survey
from ..mask import split
from ..problem import Problem
from .block import Block


def equip(block: Block, problem: Problem) -> None:
    """Fill them in; the functions are checked when the block's memory goes back."""
    functions, _ = split(problem.residual)
    if functions:
        rule = functions[0] if len(functions) == 1 else _every(functions)
        _give(block, "MASK_FN", rule, "mask", problem)
    if problem.score is not None:
        _give(block, "SCORE_FN", problem.score.fn, "score", problem)
    if problem.dropout is not None:
        p, seed = problem.dropout
        block.fill({"DROPOUT": 1, "DROP_BELOW": below(p), "SEED": seed})
        block["KEEP_FACTOR"] = factor(p)


def _give(block: Block, name: str, fn: Any, kind: str, problem: Problem) -> None:
    from . import custom

    lease = custom.lend(survey(fn, kind), problem.heads)
    block.leases.append(lease)
    block[name] = lease.code.row(problem.accumulate_dtype)


def _every(functions: Sequence[Any]) -> Any:
    """One function that says what all of them say."""
    first, *others = functions
    rest = others[0] if len(others) == 1 else _every(others)
    return lambda b, h, i, j: first(b, h, i, j) and rest(b, h, i, j)


def check(block: Block) -> None:
    """Raise if a function of this block's raised while kernels ran."""
    for lease in block.leases:
        lease.check()
