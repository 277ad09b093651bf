"""Forward attention in float32 beside PyTorch's own, in one process and one run.

    python benchmarks/forward.py [--out results.jsonl] [CASE ...]

Each case is checked against the float64 reference on sampled rows before it is timed. Providers take turns
in groups of calls after a warm-up; a row shows the median, the spread (10th to 90th percentile), the share
of this machine's multiply-add peak measured in the same run, and the command that repeats it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from peak import fma_gflops
from torch import Tensor

import kizuki
from kizuki.cpu import launch


@dataclass(frozen=True)
class Case:
    """One shape `[batch, heads, length, head_dim]`."""

    name: str
    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool

    @property
    def operations(self) -> float:
        """2·n²·(d + d) over the visible pairs."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 4.0 * self.batch * self.heads * pairs * self.head_dim


SHAPES = {
    "8x3840x64": (1, 8, 3840, 64),
    "8x3840x128": (1, 8, 3840, 128),
    "12x768x64": (1, 12, 768, 64),
    "64x12x128x32": (64, 12, 128, 32),
}
CASES = {
    f"{name}{'-causal' if causal else ''}": Case(f"{name}{'-causal' if causal else ''}", *shape, causal)
    for name, shape in SHAPES.items()
    for causal in (False, True)
}


def providers(case: Case, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Who computes the case."""
    return {
        "kizuki": lambda: kizuki.attention(q, k, v, causal=case.causal),
        "torch sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal),
    }


def verify(case: Case, q: Tensor, k: Tensor, v: Tensor, output: Tensor, who: str) -> float:
    """The largest error against float64 on sampled rows; raises when it is out of float32's reach."""
    rows = torch.linspace(0, case.length - 1, 5).long()
    worst = 0.0
    for i in rows.tolist():
        scores = (q[:, :, i : i + 1].double() @ k.double().transpose(-1, -2)) / case.head_dim**0.5
        if case.causal:
            scores[..., i + 1 :] = -torch.inf
        truth = scores.softmax(-1) @ v.double()
        worst = max(worst, float((output[:, :, i : i + 1].double() - truth).abs().max()))
    if not worst < 1e-5:
        raise SystemExit(f"{who} is wrong on {case.name}: error {worst:.2e} against float64")
    return worst


def measure(case: Case, seconds: float, peak: float) -> list[dict[str, object]]:
    """One row a provider."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, case.batch, case.heads, case.length, case.head_dim).unbind(0)
    calls = providers(case, q, k, v)
    errors = {who: verify(case, q, k, v, call(), who) for who, call in calls.items()}
    once = {who: _time(call, 1) for who, call in calls.items()}
    group = {who: max(1, int(seconds / 5 / taken)) for who, taken in once.items()}
    times: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(5):
        for who, call in calls.items():
            call()  # warm-up: the caches and the thread pool are this provider's again
            times[who] += [_time(call, 1) for _ in range(group[who])]
    rows = []
    for who, taken in times.items():
        taken.sort()
        median = statistics.median(taken)
        rows.append(
            {
                "case": case.name,
                "provider": who,
                "median_ms": round(median * 1e3, 3),
                "low_ms": round(taken[len(taken) // 10] * 1e3, 3),
                "high_ms": round(taken[-1 - len(taken) // 10] * 1e3, 3),
                "gflops": round(case.operations / median / 1e9, 1),
                "of_peak": round(case.operations / median / 1e9 / peak, 3),
                "against_torch": round(statistics.median(times["torch sdpa"]) / median, 2),
                "error": errors[who],
                "calls": len(taken),
                "peak_gflops": round(peak, 1),
                "command": f"python benchmarks/forward.py {case.name}",
            }
        )
    return rows


def _time(call: Callable[[], Tensor], count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count


def main() -> None:
    parser = argparse.ArgumentParser(description="Forward attention in float32 beside PyTorch's own.")
    parser.add_argument("case", nargs="*", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--seconds", type=float, default=4.0, help="time for one provider on one case")
    parser.add_argument("--out", type=Path, help="append the rows to this file as JSON lines")
    args = parser.parse_args()
    unknown = [name for name in args.case if name not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; choose from {', '.join(CASES)}")
    peak = fma_gflops()
    print(
        f"{launch.target().name}, {torch.get_num_threads()} threads, multiply-add peak {peak:.0f} GFLOP/s, "
        f"torch {torch.__version__}, python {platform.python_version()}"
    )
    print(
        f"{'case':<20} {'provider':<12} {'median ms':>10} {'spread':>17} {'GFLOP/s':>8} {'peak':>6} {'ratio':>6}"
    )
    for name in args.case or CASES:
        for row in measure(CASES[name], args.seconds, peak):
            spread = f"{row['low_ms']:.1f} … {row['high_ms']:.1f}"
            print(
                f"{row['case']:<20} {row['provider']:<12} {row['median_ms']:>10.2f} {spread:>17} {row['gflops']:>8} "
                f"{row['of_peak']:>6.0%} {row['against_torch']:>5.2f}×"
            )
            if args.out:
                with args.out.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
