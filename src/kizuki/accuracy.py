"""`check`: how far a result is from float64, and how far it may be. The one rule of accuracy lives here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import reference
from .errors import OptionError, ShapeError, SizeError, show
from .functions import places
from .observation import DENSE_LIMIT
from .operator import make
from .problem import Problem, check_value, in_dtype


@dataclass(frozen=True)
class Report:
    """The largest error of a result against float64, beside the largest allowed. Prints as one line.

    >>> import torch, kizuki
    >>> x = torch.randn(2, 5, 8)
    >>> report = kizuki.check(x, x, x)
    >>> report.ok, report.error <= report.allowed
    (True, True)
    """

    ok: bool
    error: float
    allowed: float
    what: str
    note: str = ""

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "WRONG"
        tail = f"; {self.note}" if self.note else ""
        return f"{self.what}: {verdict}, error {self.error:.3g} against float64, allowed {self.allowed:.3g}{tail}"


def compare(got: Tensor, truth: Tensor, plain: Tensor | Sequence[Tensor], what: str = "result") -> Report:
    """Compare `got` with `truth` (float64), `plain` being the plain formula's answer in the same dtype.

    Allowed: 2 · max|plain − truth| + eps · max|truth|, eps the spacing of the dtype of `got` at 1. NaN, +Inf
    and −Inf must stand exactly where they stand in `truth`. Nothing else is a tolerance in this project.

    The error of one evaluation of a small problem is luck, so that `plain` may be several: the same formula
    with its keys in other orders.
    """
    several = (plain,) if isinstance(plain, Tensor) else tuple(plain)
    for name, tensor in (("truth", truth), *(("plain", each) for each in several)):
        if tensor.shape != got.shape:
            raise ShapeError(f"kizuki.check: {name} has shape {show(tensor)} but {what} has {show(got)}")
    finite = torch.isfinite(truth)
    if not all(bool(torch.isfinite(each)[finite].all()) for each in several):
        raise OptionError(
            f"kizuki.check: the plain formula overflows where {what} does not; take it in a wider dtype"
        )
    got64 = got.detach().to(truth.dtype)
    size = _largest(truth[finite])
    own = max(_largest((each.detach().to(truth.dtype) - truth)[finite]) for each in several)
    allowed = 2 * own + torch.finfo(got.dtype).eps * size
    same = torch.where(truth.isnan(), got64.isnan(), got64 == truth)
    if not bool(same[~finite].all()) or not bool(torch.isfinite(got64)[finite].all()):
        wrong = int((~same[~finite]).sum()) + int((~torch.isfinite(got64)[finite]).sum())
        return Report(False, math.inf, allowed, what, f"{wrong} of {got.numel()} differ in NaN or Inf")
    error = _largest((got64 - truth)[finite])
    return Report(error <= allowed, error, allowed, what)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def check(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Report:
    """Run `attention(query, key, value, **options)` and say how far it is from the formula in float64.

    The output and the log-sum-exp are both compared; the worse of the two is reported. Allowed is twice the
    error of the plain formula evaluated in the same dtype, plus the rounding of the output.

    Arguments: those of `kizuki.attention`. Returns a `Report` with ok, error, allowed; `str(report)` is a line.

    Raises what `attention` raises, and SizeError where queries × keys is too large to be built.

    Cost: queries × keys numbers in float64 and some; it is for small problems and for doubt.

        >>> import torch, kizuki
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
        >>> kizuki.check(q, k, v, causal=True).ok
        True
    """
    matrix = make("kizuki.check", query, key, **options)
    problem = matrix.problem
    check_value(problem, value, caller="kizuki.check")
    count = math.prod(problem.shape)
    if count > DENSE_LIMIT:
        raise SizeError(
            f"kizuki.check: {list(problem.shape)} is {count:,} weights to build, above {DENSE_LIMIT:,}; "
            "check a part of the queries, heads or batch"
        )
    with torch.no_grad():
        output, lse = matrix @ value, matrix.lse
        truth = reference.evaluate(problem, value)
        out64 = torch.from_numpy(truth.output).reshape(output.shape)
        lse64 = torch.from_numpy(truth.lse).reshape(lse.shape)
        plain, plain_lse = _plains(problem, value, problem.dtype)
        finite = torch.isfinite(out64).reshape(plain[0].shape).to(plain[0].device)
        if not all(bool(torch.isfinite(each)[finite].all()) for each in plain):
            # float16 scores overflow where the contract accumulates in float32: that is then the yardstick.
            plain, plain_lse = _plains(problem, value, problem.accumulate_dtype)
        name = f"kizuki.check: {matrix.backend.name} output"
        reports = (
            compare(output.cpu(), out64, [t.cpu().reshape(output.shape) for t in plain], name),
            compare(
                lse.cpu(),
                lse64,
                [t.cpu().reshape(lse.shape) for t in plain_lse],
                name.replace("output", "lse"),
            ),
        )
    return max(reports, key=lambda r: (not r.ok, r.error / r.allowed if r.allowed else r.error))


def _plains(problem: Problem, value: Tensor, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and log-sum-exps of the plain formula with its keys in three orders."""
    keys = torch.arange(problem.keys, device=problem.device)
    made = [
        _plain(problem, value, dtype, order) for order in (keys, keys.flip(0), keys.roll(problem.keys // 2))
    ]
    return [output for output, _ in made], [lse for _, lse in made]


def _plain(problem: Problem, value: Tensor, dtype: torch.dtype, order: Tensor) -> tuple[Tensor, Tensor]:
    """The formula as one would write it, with all of A built, every step in `dtype`."""
    every = slice(None)
    group = problem.heads // problem.kv_heads if problem.kv_heads else 1
    query = problem.flat_query().to(dtype)
    key = problem.flat_key().to(dtype).repeat_interleave(group, 1)
    flat = problem.flat(value).to(dtype)
    flat = flat.repeat_interleave(problem.heads // flat.shape[1] if flat.shape[1] else 1, 1)
    scores = query @ key.transpose(-1, -2) * problem.scale
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if problem.score is not None:
        at = places(problem, slice(0, problem.queries), slice(0, problem.keys))
        scores = problem.score.apply(scores, at)
    seen = problem.visible(slice(0, problem.queries), slice(0, problem.keys))
    seen = torch.ones_like(scores, dtype=torch.bool) if seen is None else seen.expand(scores.shape)
    if problem.bias is not None:
        bias = problem.pairs(problem.bias, every, every)
        seen = seen & (bias != float("-inf"))
        scores = scores + in_dtype(bias, dtype)
    if problem.score is not None:
        seen = seen & (scores != float("-inf"))
    seen, flat = seen[..., order], flat[:, :, order]
    scores = scores[..., order].masked_fill(~seen, float("-inf"))
    if problem.sinks is not None:
        sink = in_dtype(problem.sinks, dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    live = seen.any(-1, keepdim=True)
    weights = torch.softmax(scores, -1)[..., : problem.keys]
    weights = weights.masked_fill(~seen, 0.0)
    hidden = ~seen.any(-2).unsqueeze(-1)
    output = (weights @ flat.masked_fill(hidden, 0.0)).masked_fill(~live, 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(~live[..., 0], float("-inf"))
    return output, lse
