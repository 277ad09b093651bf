"""Time and memory as the text grows, each point in a new process, until a provider fails."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .providers import Provider, memory
from .rows import OURS

TOKENS = tuple(1 << n for n in range(8, 18))  # 256 … 131,072
QUICK = TOKENS[:4]
SECONDS = 60.0  # the most a call may take
START = 120.0  # the most until the inputs are there: importing, compiling
BYTES = min(8_000_000_000, memory() * 6 // 10)  # the most a process may hold
POLL = 0.02


@dataclass(frozen=True)
class Point:
    """A provider at a length: seconds a call and bytes of peak extra memory, or why there is no more."""

    provider: str
    tokens: int
    seconds: float | None = None
    extra_bytes: int | None = None
    memory_method: str = ""
    calls: int = 0
    note: str = ""
    failed: str = ""

    def line(self, run: dict[str, Any]) -> str:
        found = asdict(self) | {
            "cell": f"growth/{self.tokens}",
            "problem": f"[1, 1, {self.tokens}, 64] float32 causal",
            "limit_seconds": SECONDS,
            "limit_bytes": BYTES,
            "command": f"kizuki bench growth --only {self.provider}",
        }
        return json.dumps(found | run, ensure_ascii=False)


def measure(
    providers: Sequence[Provider],
    threads: int,
    lengths: Sequence[int] = TOKENS,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Point]:
    """Every provider at every length, shortest first; one that fails is not tried at a longer one."""
    for provider in providers:
        for tokens in lengths:
            say(f"{provider.name} at {tokens:,} tokens")
            point = run(provider.name, tokens, threads)
            yield point
            if point.failed:
                break


def run(name: str, tokens: int, threads: int, seconds: float = SECONDS, most: int = BYTES) -> Point:
    """One point: a new process, watched from here and stopped when it takes too long or too much memory."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as complaints:
        child = subprocess.Popen(
            [sys.executable, "-m", "kizuki.bench.point", name, str(tokens), str(threads)],
            stdout=out,
            stderr=complaints,
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        )
        try:
            stopped = _watch(child, out, seconds, most)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
        told = _told(out)
        complaints.seek(0)
        last = (complaints.read().strip().splitlines() or [""])[-1]
    first, done = told.get("first", {}), told.get("done", {})
    failed = stopped
    for stage in ("cannot", "failed", "wrong"):
        failed = failed or told.get(stage, {}).get("why", "")
    if not failed and not done:
        killed = child.returncode == -signal.SIGKILL
        failed = "killed by the system, out of memory" if killed else f"exit code {child.returncode}: {last}"
    if failed:
        return Point(name, tokens, failed=failed)
    return Point(
        name,
        tokens,
        done["median_s"],
        first["extra_bytes"],
        first["memory_method"],
        done["calls"],
        done["note"],
    )


def _watch(child: subprocess.Popen[bytes], out: Any, seconds: float, most: int) -> str:
    """Wait for a process; why it was stopped, or "" when it ended by itself."""
    begun = time.monotonic()
    ready: float | None = None
    while child.poll() is None:
        time.sleep(POLL)
        held = _resident(child.pid)
        if held > most:
            return f"more than {most / 1e9:.0f} GB"
        told = _told(out)
        now = time.monotonic()
        if ready is None and "ready" in told:
            ready = now
        if ready is None:
            if now - begun > START:
                return f"not ready after {START:.0f} s"
        # After the first call come its check against float64 and at least one call more.
        elif now - ready > (seconds if "first" not in told else 3 * seconds + 30):
            return f"more than {seconds:.0f} s a call"
    return ""


def _told(out: Any) -> dict[str, dict[str, Any]]:
    """What the process has said so far, by stage; a line that is still being written is left for later."""
    size = os.fstat(out.fileno()).st_size
    text = os.pread(out.fileno(), size, 0).decode()
    lines = [json.loads(line) for line in text.split("\n")[:-1] if line.startswith("{")]
    return {line["stage"]: line for line in lines}


def _resident(pid: int) -> int:
    """Bytes a process holds; 0 where the system does not say, so that only the time is limited there."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def slope(points: Sequence[Point], provider: str = OURS) -> float | None:
    """How the extra memory grows: the exponent between the last point and the one 16 times shorter."""
    ours = {point.tokens: point for point in points if point.provider == provider and not point.failed}
    if not ours or max(ours) // 16 not in ours:
        return None
    long, short = ours[max(ours)].extra_bytes, ours[max(ours) // 16].extra_bytes
    return math.log(long / short, 16) if long and short else None
