"""A selection of tokens: the rows of several queries, or the columns of several keys, summed where A is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .heads import LSE_ROWS, Check, Gone, Head, Stale

MOST = 256  # tokens a question, so that its address stays short and an answer comes soon
WRITTEN = re.compile(r"\d{1,9}(-\d{1,9})?(\.\d{1,9}(-\d{1,9})?)*", re.ASCII)


def parse(text: object, count: int) -> list[int] | None:
    """ "3-7.12" as [3, 4, 5, 6, 7, 12]: rising, each once, below `count`, at most `MOST`; None for anything else."""
    if not isinstance(text, str) or WRITTEN.fullmatch(text) is None:
        return None
    found: list[int] = []
    for part in text.split("."):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if begin > end or end >= count or (found and begin <= found[-1]) or len(found) + end - begin >= MOST:
            return None
        found += range(begin, end + 1)
    return found


def _runs(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rising tokens as [first, stop) of neighbours."""
    begin = 0
    for at in range(1, len(tokens) + 1):
        if at == len(tokens) or tokens[at] != tokens[at - 1] + 1:
            yield tokens[begin], tokens[at - 1] + 1
            begin = at


def rows(head: Head, tokens: Sequence[int], gone: Gone) -> tuple[Tensor, Check | None]:
    """Σ over the rows of these queries, float64 `[keys]`; and the check of the first row whose L is wrong."""
    total = torch.zeros(head.keys, dtype=torch.float64)
    for begin, stop in _runs(tokens):
        for i0, i1 in head.chunks(begin, stop, head.keys, LSE_ROWS):
            if gone():
                raise Stale
            low, high = head.span(i0, i1, 0, head.keys)
            weights = head.weights(i0, i1, low, high, gone)
            error = head.sum_errors(i0, i1, weights.sum(-1, dtype=torch.float64).numpy())
            refused = ~(error <= head.tolerances(i0, i1).numpy())
            for i in (i0 + np.flatnonzero(refused)).tolist():
                check = head.check(i)
                if not check.ok:
                    return total, check
            total[low:high] += weights.sum(0, dtype=torch.float64)
    return total, None


def columns(head: Head, tokens: Sequence[int], gone: Gone) -> Tensor:
    """Σ over the columns of these keys, float64 `[queries]`. Needs L of every row."""
    picked = torch.tensor(tokens)
    lse = head.lse(0, head.queries, gone)
    lse = lse.masked_fill(lse == -math.inf, 0.0)  # such a row sees nothing, and exp(−inf) is its 0
    total = torch.zeros(head.queries, dtype=torch.float64)
    for i0, i1 in head.chunks(0, head.queries, len(tokens), LSE_ROWS):
        if gone():
            raise Stale
        if head.direct:
            weights = head.logits_of(i0, i1, picked).sub_(lse[i0:i1, None]).exp_()
        else:
            weights = head.alone[0, head.lane, i0:i1][:, picked].cpu()
        total[i0:i1] = weights.sum(-1, dtype=torch.float64)
    return total
