"""Do the kernels' loops stay inside memory, and are their numbers right? As plain Python (interpreted.py).

The emitted bodies are their NumPy twins (twins/), so that every access is looked at, those of the bodies too, and
nothing at all is compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A few of the program's problems that together run most of the loops; the others take a minute.
PROBLEMS = (
    "causal, capped, sinks",
    "odd values",
    "two splits",
    "few queries",
    "decoding, odd torch.float16",
    "pairs, decoding odd values",
    "a score function",
)


def run(*arguments: str) -> dict[str, Any]:
    program = Path(__file__).parent / "interpreted.py"
    done = subprocess.run(
        [sys.executable, str(program), *arguments], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_loop_reads_and_writes_its_own_memory_alone() -> None:
    """An address that is nobody's ends the program, so that a loop one step too long is seen."""
    found = run(*PROBLEMS)
    assert not found["wrong"]
    assert found["astray"].endswith("which is nobody's memory"), (
        "the test of the test: such an address is an error"
    )
    assert found["checked"] > 20_000
    missed = sum(map(len, found["missed"].values()))
    assert missed < 0.5 * found["lines"], found["missed"]
