"""Do the kernels' loops stay inside memory, are their numbers right, does each line run? As plain Python.

interpreted.py runs them. The emitted bodies are their NumPy twins (twins/), so that every access is looked at, those
of the bodies too, and nothing at all is compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kizuki

# The program's problems that together run through every line; all of them take three times as long.
PROBLEMS = (
    "causal, capped, sinks",
    "a window and keys",
    "a bias",
    "a bias of each query",
    "nothing seen",
    "dropout",
    "an infinite gradient",
    "a query that is NaN",
    "bare torch.bfloat16",
    "bare torch.float16",
    "odd width torch.float64",
    "documents in two splits",
    "packed by its own task",
    "pages, packed",
    "decoding, odd torch.float16",
    "decoding head_dim 64",
    "decoding head_dim 128",
    "few queries, and a last vector",
    "pairs, odd width",
    "pairs by columns",
    "pairs, odd values",
    "pairs, decoding",
    "pairs, decoding odd values",
    "a score function that hides a row",
    "scores of −inf",
)
# Lines that no problem can run through, and why.
UNREACHED = {
    ("backward.py", "for c in range(count):"): "as the next",
    (
        "backward.py",
        "store(out + c * step, load(out + c * step) + load(grad + c * size))",
    ): "gradients.py sums a bias' gradient where one number follows another, or in one place: no other step",
}


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
    assert found["checked"] > 500_000
    folder = Path(kizuki.__file__).parent / "cpu" / "kernels"
    missed = {
        (name, (folder / name).read_text(encoding="utf-8").splitlines()[line - 1].strip())
        for name, lines in found["missed"].items()
        for line in lines
    }
    assert missed == UNREACHED.keys(), "lines of the kernels' loops that no problem ran through"
