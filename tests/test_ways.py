"""Ways to run: with Numba switched off, everything still gives the right numbers, and says what computes them."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import torch, kizuki
q = torch.randn(1, 2, 9, 8, requires_grad=True)
rule = kizuki.masks.where(lambda b, h, i, j: (i + j) % 2 == 0)
for options in ({}, {"causal": True, "softcap": 2.0}, {"mask": rule}, {"score": lambda s, b, h, i, j: 2 * s}):
    assert kizuki.check(q, q, q, **options).ok
    assert kizuki.attend(q, q, **options).plan().backend == "portable"
kizuki.attention(q, q, q, causal=True).sum().backward()
try:
    kizuki.attend(q, q, backend="cpu")
except kizuki.OptionError as error:
    print(error)
"""


def test_numba_switched_off() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == (
        'kizuki.attend: backend="cpu" cannot run this: Numba is switched off (NUMBA_DISABLE_JIT is set); '
        'use backend="auto"'
    )
