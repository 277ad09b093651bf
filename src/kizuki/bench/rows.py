"""One measured row, and the JSON line it becomes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .cells import Bar, Cell

Status = Literal["ok", "wrong", "cannot", "failed", "missing"]
OURS = "kizuki"
WHOLE = "kizuki, unmasked"  # our own time without the mask, which the bars of "share" are shares of


@dataclass
class Row:
    """A provider on a cell. Times in seconds; low and high are the 10th and 90th percentile of single calls."""

    cell: Cell
    provider: str
    status: Status = "ok"
    note: str = ""
    median: float | None = None
    low: float | None = None
    high: float | None = None
    calls: int = 0
    gflops: float | None = None
    gbs: float | None = None
    peak: float | None = None  # GFLOP/s, or GB/s for decoding, measured in the same run
    peak_method: str = ""
    error: float | None = None  # the largest against float64 on sampled rows
    allowed: float | None = None
    of_ours: float | None = None  # this provider's time over ours
    reached: list[tuple[Bar, float | None]] = field(default_factory=list)

    @property
    def of_peak(self) -> float | None:
        rate = self.gbs if self.cell.kind == "decode" else self.gflops
        return None if rate is None or not self.peak else rate / self.peak

    @property
    def command(self) -> str:
        return f"kizuki bench {self.cell.name}"

    def line(self, run: dict[str, Any]) -> str:
        """One JSON line, with what the whole run has in common."""
        cell = asdict(self.cell)
        del cell["bars"]
        found = {
            "cell": cell.pop("name"),
            "provider": self.provider,
            "status": self.status,
            "note": self.note,
            "median_s": self.median,
            "low_s": self.low,
            "high_s": self.high,
            "calls": self.calls,
            "gflops": self.gflops,
            "gbs": self.gbs,
            "peak": self.peak,
            "peak_method": self.peak_method,
            "of_peak": self.of_peak,
            "error": self.error,
            "allowed": self.allowed,
            "time_over_kizuki": self.of_ours,
            "bars": [
                {
                    "quantity": bar.quantity,
                    "at_most" if bar.at_most else "at_least": bar.value,
                    "got": got,
                    "met": None if got is None else bar.met(got),
                }
                for bar, got in self.reached
            ],
            "command": self.command,
            **{f"problem_{name}": value for name, value in cell.items()},
        }
        return json.dumps(found | run, ensure_ascii=False)
