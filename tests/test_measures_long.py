"""Measures of 8,192 tokens hold no array of queries × keys: a process of its own, its peak memory measured."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

TOKENS = 8_192
ALLOWED_MB = 128  # one head's A alone would be 268 MB

PROGRAM = """
import json, sys, torch, transformers
import kizuki
from kizuki.models import measures
torch.set_num_threads(2)

def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

def record(tokens):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=500, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=8192, attn_implementation="sdpa")
    model = transformers.LlamaModel(config).eval()
    ids = torch.randint(0, 500, (1, tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), kizuki.record(model) as recording:
        model(ids, use_cache=False)
    return model, recording, ids

def use(model, recording, ids):
    W = measures.output_weights(model)
    n = ids.shape[1]
    return {
        "rollout": measures.rollout(recording, [-1, n // 2]).weights.sum(-1).flatten().tolist(),
        "segments": measures.segments(recording, {"a": (0, n // 3), "b": (n // 2, n)}).mass.sum(-1).flatten().tolist(),
        "induction": measures.induction(recording, ids).value.flatten().tolist(),
        "previous": measures.previous(recording).value.flatten().tolist(),
        "first": measures.first_key(recording).value.flatten().tolist(),
        "distance": measures.distance_rest(recording).value.flatten().tolist(),
        "contribution": measures.contribution(recording, W).value.flatten().tolist(),
        "leaks": str(kizuki.models.leaks(recording)),
    }

use(*record(64))
held = record(int(sys.argv[1]))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = peak()
found = use(*held)
print(json.dumps({"mb": peak() - before, **found}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
def test_peak_memory_of_8192_tokens():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TOKENS)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mb"] < ALLOWED_MB
    assert found["rollout"] == pytest.approx([1.0, 1.0], abs=1e-4)
    assert found["segments"] == pytest.approx([1.0] * 12, abs=1e-4)
    assert found["leaks"] == "future: none"
    for name in ("induction", "previous", "first"):
        assert all(0 < number < 0.1 for number in found[name]), name
