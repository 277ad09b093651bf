"""One head of a recorded layer, opened to be looked at: q, k, the mask's rule and L, and any block of its weights.

A weight is a_ij = exp(score_ij − L_i). Where the mask is a range of keys for each query and nothing bends the scores,
blocks come straight from q, k and L, a few million numbers at a time; elsewhere from A's own indexing, which is exact
and slower. L is A's (`A.lse`), computed for the rows that are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kizuki import AttentionMatrix, attend, masks

from .page import near

CELLS = 2**22  # weights held at once: 16 MB
LSE_ROWS = 256  # rows whose L is computed together: those of a tile at full zoom
AT_ONCE = 2**24  # pairs below which L of all rows is computed together

Gone = Callable[[], bool]


class Stale(Exception):
    """Whoever asked is gone or looks at something else; work stops here."""


def nobody_left() -> bool:
    """For callers that always wait."""
    return False


@dataclass(frozen=True)
class Check:
    """L of one row from float64 beside the L that its weights use."""

    recorded: float
    recomputed: float
    tolerance: float

    @property
    def ok(self) -> bool:
        if self.recomputed == self.recorded:  # also both −inf
            return True
        return abs(self.recomputed - self.recorded) <= self.tolerance  # False for NaN


class Head:
    """Head number `slot` of a layer's A, `[1, heads, queries, keys]`.

    Time and memory: a copy of q and k where they are no float32 (float64) already, and L; blocks cost what they hold.
    """

    def __init__(self, matrix: AttentionMatrix, slot: int) -> None:
        problem = matrix.problem
        self.whole, self.slot = matrix, slot
        self.queries, self.keys, self.dim = problem.queries, problem.keys, problem.head_dim
        self.scale, self.softcap = matrix.scale, problem.softcap
        self.sink = None if problem.sinks is None else float(problem.sinks[slot])
        dtype = problem.accumulate_dtype
        self.q = matrix.query[0, slot].to(dtype).cpu()  # [queries, head_dim]
        self.k = matrix.key[0, slot * problem.kv_heads // problem.heads].to(dtype).cpu()
        rule = matrix.visible_range()
        alike = rule is not None and all(end.shape[1] == 1 for end in rule)
        self.first = self.stop = None
        if alike and rule is not None:
            self.first, self.stop = (end[0, 0].expand(self.queries).cpu() for end in rule)
        self.direct = alike and problem.bias is None and problem.score is None
        self.alone = self._alone() if self.direct else matrix
        self.lane = 0 if self.direct else slot  # where this head is in `alone`
        self._lse = torch.full((self.queries,), math.nan, dtype=dtype)
        self._known = torch.zeros(-(-self.queries // LSE_ROWS), dtype=torch.bool)
        self.sliceable = self.direct and self._sliceable()
        self.key_norm = self._reaches()

    def _reaches(self) -> Tensor:
        """The largest norm of a key up to the last that each query sees, float64 `[queries]`: what bounds its scores.

        Of the keys that some query sees: what the mask hides may hold anything (contract 2). NaN and Inf bound nothing;
        the row that sees one has no finite L, and is refused for that.
        """
        norm = torch.linalg.vector_norm(self.k.to(torch.float64), dim=-1).nan_to_num(0.0, 0.0, 0.0)
        if self.first is None or self.stop is None:
            return norm.max().expand(self.queries) if self.keys else norm.new_zeros(self.queries)
        some = self.stop > self.first
        edges = torch.zeros(self.keys + 1, dtype=torch.int64)
        for ends, by in ((self.first, 1), (self.stop, -1)):
            edges.index_add_(0, ends[some].to(torch.int64), torch.full((int(some.sum()),), by))
        up = torch.zeros(self.keys + 1, dtype=torch.float64)
        if self.keys:
            up[1:] = norm.masked_fill(edges[:-1].cumsum(0) == 0, 0.0).cummax(0).values
        return up[self.stop.to(torch.int64)]

    @property
    def size(self) -> int:
        """Bytes of its own: L, and q and k (which may be views of the recording's)."""
        return sum(t.numel() * t.element_size() for t in (self.q, self.k, self._lse))

    def _alone(self) -> AttentionMatrix:
        """A of this head by itself: 1/heads of the work of every reading."""
        matrix, problem = self.whole, self.whole.problem
        kv = self.slot * problem.kv_heads // problem.heads
        return attend(
            matrix.query[:, self.slot : self.slot + 1],
            matrix.key[:, kv : kv + 1],
            mask=problem.mask,
            scale=matrix.scale,
            softcap=problem.softcap,
            sinks=None if problem.sinks is None else problem.sinks[self.slot : self.slot + 1],
            backend=matrix.plan().backend,
        )

    # -- L ---------------------------------------------------------------------------------------

    def lse(self, i0: int, i1: int, gone: Gone = nobody_left) -> Tensor:
        """L of rows i0 … i1, `[i1 − i0]`, natural logarithm."""
        if self.queries * self.keys <= AT_ONCE or not self.sliceable:
            if not bool(self._known.all()):
                self._lse.copy_(self.alone.lse[0, self.lane])
                self._known.fill_(True)
            return self._lse[i0:i1]
        if i1 - i0 == 1 and not bool(self._known[i0 // LSE_ROWS]):
            return self.part(i0, i1).lse[0, 0].cpu()
        for block in range(i0 // LSE_ROWS, -(-i1 // LSE_ROWS)):
            if bool(self._known[block]):
                continue
            if gone():
                raise Stale
            low, high = block * LSE_ROWS, min(self.queries, (block + 1) * LSE_ROWS)
            self._lse[low:high] = self.part(low, high).lse[0, 0].cpu()
            self._known[block] = True
        return self._lse[i0:i1]

    def _sliceable(self) -> bool:
        """Whether rows can be read as an A of their own: all keys visible, or causal from key 0 on."""
        if self.first is None or self.stop is None or bool(self.first.any()):
            return False
        step = self.stop[1:] - self.stop[:-1]
        return bool((step == 0).all()) or bool((step == 1).all())

    def part(self, i0: int, i1: int) -> AttentionMatrix:
        """A of rows i0 … i1 of a sliceable head, over the keys that the last of them sees."""
        if self.stop is None:
            raise ValueError("heads: a part of a head without ranges was asked for; ask for all rows")
        stop = int(self.stop[i1 - 1])
        causal = int(self.stop[i0]) != stop
        problem = self.alone.problem
        return attend(
            self.alone.query[:, :, i0:i1],
            self.alone.key[:, :, :stop],
            mask=masks.causal("lower_right") if causal else None,
            scale=self.scale,
            softcap=self.softcap,
            sinks=problem.sinks,
            backend=self.alone.plan().backend,
        )

    def learn(self, i0: int, part: AttentionMatrix) -> None:
        """Keep L of the rows from i0 on, which `part(i0, …)` has read."""
        lse = part.lse[0, 0].cpu()
        self._lse[i0 : i0 + len(lse)] = lse
        first, stop = -(-i0 // LSE_ROWS), (i0 + len(lse)) // LSE_ROWS
        self._known[first : len(self._known) if i0 + len(lse) == self.queries else stop] = True

    def near(self, step: int | None) -> Tensor:
        """Weight of every query on key 0 (`step` None) or on its neighbour `step` away, `[queries]`: `page.near`."""
        if self.first is None or self.stop is None:
            raise ValueError("heads: a neighbour of a head without ranges was asked for; ask A")
        lse, rule = self.lse(0, self.queries), (self.first, self.stop)
        return near(self.q[None], self.k[None], lse[None], rule, self.scale, self.softcap, step)[0]

    # -- weights ---------------------------------------------------------------------------------

    def span(self, i0: int, i1: int, j0: int, j1: int) -> tuple[int, int]:
        """The keys of j0 … j1 between the first and the last that any row of i0 … i1 sees."""
        if self.first is None or self.stop is None:
            return j0, j1
        first, stop = self.first[i0:i1], self.stop[i0:i1]
        some = stop > first
        if not bool(some.any()):
            return j0, j0
        low = max(j0, int(first[some].min()))
        return low, max(low, min(j1, int(stop[some].max())))

    def weights(self, i0: int, i1: int, j0: int, j1: int, gone: Gone = nobody_left) -> Tensor:
        """Weights of rows i0 … i1 on keys j0 … j1, `[i1 − i0, j1 − j0]`, 0 where not visible."""
        if not self.direct:
            return self.alone[0, self.lane, i0:i1, j0:j1].cpu()
        lse = self.lse(i0, i1, gone)
        lse = lse.masked_fill(lse == -math.inf, 0.0)  # such a row sees nothing, and exp(−inf) is its 0
        return self._logits(self.q[i0:i1], i0, j0, j1).sub_(lse[:, None]).exp_()

    def _logits(self, q: Tensor, i0: int, j0: int, j1: int) -> Tensor:
        """Scores of consecutive queries from i0 on, −inf where not visible, in the dtype of q."""
        scores = self._products(q, self.k[j0:j1])
        if self.first is None or self.stop is None:
            return scores
        first, stop = self.first[i0 : i0 + len(q), None], self.stop[i0 : i0 + len(q), None]
        if len(q):  # only the keys that some of these rows see and others do not need a look at each
            left, right = max(j0, min(j1, int(first.max()))), min(j1, max(j0, int(stop.min())))
            for low, high in ((j0, j1),) if left > right else ((j0, left), (right, j1)):
                key = torch.arange(low, high)
                scores[:, low - j0 : high - j0].masked_fill_((key < first) | (key >= stop), -math.inf)
        return scores

    def _products(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores before the mask, in the dtype of q."""
        scores = (q @ k.to(q.dtype).T).mul_(self.scale)
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def logits_of(self, i0: int, i1: int, keys: Tensor) -> Tensor:
        """Scores of rows i0 … i1 for these keys, `[i1 − i0, len(keys)]`, −inf where not visible; of a direct head."""
        scores = self._products(self.q[i0:i1], self.k[keys])
        if self.first is not None and self.stop is not None:
            scores.masked_fill_(
                (keys < self.first[i0:i1, None]) | (keys >= self.stop[i0:i1, None]), -math.inf
            )
        return scores

    def chunks(self, i0: int, i1: int, width: int, block: int) -> Iterator[tuple[int, int]]:
        """Rows i0 … i1 in pieces of at most CELLS weights, none of which crosses a border of `block` rows by a part."""
        rows = max(1, CELLS // max(1, width))
        rows = rows // block * block if rows >= block else rows
        at = i0
        while at < i1:
            border = i0 + ((at - i0) // block + 1) * block
            end = min(i1, at + rows if rows >= block else min(at + rows, border))
            yield at, end
            at = end

    # -- one row, one column, one cell -----------------------------------------------------------

    def row(self, i: int) -> tuple[Tensor, Tensor, Check]:
        """Weights and scores of row i in float64, `[keys]` each, 0 and −inf where not visible; the check of its L."""
        recorded = float(self.lse(i, i + 1)[0])
        if not self.direct:
            weights = self.alone[0, self.lane, i].cpu().to(torch.float64)
            scores = weights.log() + recorded  # what the weight says: its score may be bent in any way
            return weights, scores, Check(recorded, self._lse_again(i), self.tolerance(i, recorded))
        scores = torch.full((self.keys,), -math.inf, dtype=torch.float64)
        low, high = self.span(i, i + 1, 0, self.keys)
        scores[low:high] = self._logits(self.q[i : i + 1].to(torch.float64), i, low, high)[0]
        again = self._sum(scores)
        weights = torch.exp(scores - (recorded if recorded != -math.inf else 0.0))
        return weights, scores, Check(recorded, again, self.tolerance(i, recorded))

    def check(self, i: int) -> Check:
        """The check of one row's L."""
        if self.direct:
            return self.row(i)[2]
        recorded = float(self.lse(i, i + 1)[0])
        return Check(recorded, self._lse_again(i), self.tolerance(i, recorded))

    def _sum(self, scores: Tensor) -> float:
        """log Σ exp, the sink in it; −inf for a row that sees nothing."""
        top = float(scores.max()) if len(scores) else -math.inf
        if top == -math.inf:
            return -math.inf
        sink = scores.new_full((1,), -math.inf if self.sink is None else self.sink)
        return float(torch.cat((scores, sink)).logsumexp(0))

    def _lse_again(self, i: int) -> float:
        return float(self.alone.steps(i, 0).lse[0, self.lane])

    def column(self, j: int, gone: Gone = nobody_left) -> tuple[Tensor, Tensor]:
        """Weights and scores of key j for every query, float64 `[queries]` each. Needs L of every row."""
        lse = self.lse(0, self.queries, gone).to(torch.float64)
        if not self.direct:
            weights = self.alone[0, self.lane, :, j].cpu().to(torch.float64)
            return weights, weights.log() + lse
        scores = self.scale * (self.q.to(torch.float64) @ self.k[j].to(torch.float64))
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.first is not None and self.stop is not None:
            scores.masked_fill_((j < self.first) | (j >= self.stop), -math.inf)
        return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)), scores

    def sum_errors(self, i0: int, i1: int, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """|recomputed L − L| of rows i0 … i1 from the sums of their weights; inf where only one of them is −inf."""
        lse = self.lse(i0, i1).to(torch.float64).numpy()
        total = sums if self.sink is None else sums + np.exp(self.sink - lse)
        empty = np.isneginf(lse)
        if self.first is not None and self.stop is not None:
            none = (self.stop[i0:i1] <= self.first[i0:i1]).numpy()
        else:
            none = empty
        with np.errstate(divide="ignore", invalid="ignore"):
            error: NDArray[np.float64] = np.abs(np.log(total))
        error[empty] = np.where(none[empty], 0.0, np.inf)
        return error

    def tolerance(self, i: int, lse: float) -> float:
        """How far float32 (float64) arithmetic may lawfully move L of row i: the same bound as the page's head.js."""
        unit = torch.finfo(self.q.dtype).eps / 2
        norm = float(torch.linalg.vector_norm(self.q[i]))
        seen = self.keys if self.first is None or self.stop is None else int(self.stop[i] - self.first[i])
        size = abs(lse) if math.isfinite(lse) else 0.0
        return unit * (
            (self.dim + 4) * abs(self.scale) * norm * float(self.key_norm[i])
            + math.sqrt(max(1, seen))
            + 16
            + 4 * size
        )

    def tolerances(self, i0: int, i1: int) -> Tensor:
        """The same of rows i0 … i1, `[i1 − i0]`, float64."""
        unit = torch.finfo(self.q.dtype).eps / 2
        norm = torch.linalg.vector_norm(self.q[i0:i1].to(torch.float64), dim=-1)
        lse = self.lse(i0, i1).to(torch.float64).nan_to_num(0.0, 0.0, 0.0).abs()
        seen = torch.full((i1 - i0,), self.keys, dtype=torch.float64)
        if self.first is not None and self.stop is not None:
            seen = (self.stop[i0:i1] - self.first[i0:i1]).clamp(min=1).to(torch.float64)
        return unit * (
            (self.dim + 4) * abs(self.scale) * norm * self.key_norm[i0:i1] + seen.sqrt() + 16 + 4 * lse
        )
