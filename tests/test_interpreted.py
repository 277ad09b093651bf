"""Do the kernels' loops stay inside memory, and does each of them run? As plain Python (interpreted.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# A few of the program's problems that together run most of the loops; the others take a minute.
PROBLEMS = ("causal, capped, sinks", "decoding, odd torch.float32", "odd width torch.float16")


@pytest.mark.slow
def test_every_loop_reads_and_writes_its_own_memory_alone() -> None:
    """An address that is nobody's ends the program, so that a loop one step too long is seen."""
    program = Path(__file__).parent / "interpreted.py"
    done = subprocess.run(
        [sys.executable, str(program), *PROBLEMS], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert not found["wrong"]
    assert found["astray"].endswith("which is nobody's memory"), (
        "the test of the test: such an address is an error"
    )
    assert found["checked"] > 20_000
    missed = sum(map(len, found["missed"].values()))
    assert missed < 0.5 * found["lines"], found["missed"]
