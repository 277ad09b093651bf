"""A cell's results against float64 on sampled rows, before anything is timed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..accuracy import Report, compare
from .cells import Cell
from .providers import Data

# Ours is held to contract 14. A peer has rules of its own (weights rounded to 16 bits before they meet the
# values, exp by a coarser polynomial) and is only wrong where it is off by more than such choices explain:
# counting it out for less would flatter us. (jax in float32 was seen at 1.12 times what we are allowed.)
PEER_SLACK = 4.0
ROWS = 6
ALL_ROWS = 1 << 22  # pairs of a head whose gradients are taken for two heads; above, for one


class Truth:
    """The exact answer on some rows of some heads (with gradients: all rows of a head or two), computed once a cell."""

    def __init__(self, cell: Cell, data: Data) -> None:
        self.cell, self.data = cell, data
        last = (cell.batch - 1, cell.heads - 1)
        middle = (cell.batch // 2, cell.heads // 2)
        few = {last} if cell.queries * cell.keys > ALL_ROWS else {(0, 0), last}
        self.heads = sorted(few if cell.backward else {(0, 0), middle, last})
        found = [self._gradients(*head) if cell.backward else self._rows(*head) for head in self.heads]
        self.truth = [[part.truth for part in parts] for parts in found]
        self.plain = [[part.plain for part in parts] for parts in found]

    def sampled(self, batch: int) -> Tensor:
        """The rows looked at: the first, the last and some between, real ones only."""
        real = self.cell.real_lengths()[batch] if self.cell.rule == "lengths" else self.cell.queries
        return torch.linspace(0, real - 1, min(ROWS, real)).long()

    def _formula(self, batch: int, head: int, rows: Tensor, parts: list[Tensor], order: Tensor) -> Tensor:
        query, key, value = parts
        scores = query @ key[order].T * self.cell.head_dim**-0.5
        if self.data.bias is not None:
            scores = scores + self.data.bias[0, head][rows][:, order].to(query.dtype)
        seen = self.cell.visible(batch, rows) if self.data.mask is None else self.data.mask[rows]
        if seen is not None:
            scores = scores.masked_fill(~seen[:, order], -torch.inf)
        return scores.softmax(-1) @ value[order]

    def _operands(self, batch: int, head: int, rows: Tensor) -> list[Tensor]:
        kv_head = head // (self.cell.heads // self.cell.kv_heads)
        data = self.data
        return [data.query[batch, head][rows], data.key[batch, kv_head], data.value[batch, kv_head]]

    def _rows(self, batch: int, head: int) -> list[_Part]:
        rows = self.sampled(batch)
        operands = self._operands(batch, head, rows)
        keys = torch.arange(self.cell.keys)
        truth = self._formula(batch, head, rows, [t.double() for t in operands], keys)
        orders = (keys, keys.flip(0), keys.roll(self.cell.keys // 2))
        return [_Part(truth, [self._formula(batch, head, rows, operands, order) for order in orders])]

    def _gradients(self, batch: int, head: int) -> list[_Part]:
        rows, keys = torch.arange(self.cell.queries), torch.arange(self.cell.keys)
        operands = self._operands(batch, head, rows)
        if self.data.grad is None:
            raise RuntimeError("a cell with gradients has no gradient of its output")
        grad = self.data.grad[batch, head]

        def every(dtype: torch.dtype) -> list[Tensor]:
            leaves = [t.to(dtype).requires_grad_() for t in operands]
            output = self._formula(batch, head, rows, leaves, keys)
            return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(dtype))]

        truth = every(torch.float64)
        # In float64 plain and truth are one: their difference is 0 and only rounding is allowed, which suits.
        return [_Part(t, [p]) for t, p in zip(truth, every(self.cell.torch_dtype), strict=True)]

    def check(self, who: str, results: tuple[Tensor, ...], slack: float = 1.0) -> Report:
        """The worst of all sampled results, `slack` times the allowed error still being right."""
        names = ("output", "query's gradient", "key's gradient", "value's gradient")
        reports = []
        for (batch, head), truths, plains in zip(self.heads, self.truth, self.plain, strict=True):
            kv_head = head // (self.cell.heads // self.cell.kv_heads)
            rows = torch.arange(self.cell.queries) if self.cell.backward else self.sampled(batch)
            for index, (truth, plain) in enumerate(zip(truths, plains, strict=True)):
                result = results[index]
                got = result[batch, head][rows] if index < 2 else result[batch, kv_head]
                if got.dtype is not self.cell.torch_dtype:
                    what = f"{who}: {names[index]} is {got.dtype}"
                    return Report(False, float("inf"), 0.0, what, f"asked for {self.cell.torch_dtype}")
                report = compare(got, truth, plain, f"{who} {names[index]}")
                allowed = report.allowed * slack
                reports.append(replace(report, allowed=allowed, ok=report.error <= allowed))
        return max(reports, key=lambda r: (not r.ok, r.error / r.allowed if r.allowed else r.error))


class _Part:
    """One sampled result: the truth, and what the plain formula gives in the cell's dtype."""

    def __init__(self, truth: Tensor, plain: list[Tensor]) -> None:
        self.truth, self.plain = truth, plain
