"""The examples: do they run, and is what they state true?"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

import kizuki


@pytest.fixture(scope="module")
def gpt():
    path = Path(__file__).parents[1] / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("example_gpt", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["example_gpt"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["example_gpt"]


@pytest.fixture(scope="module")
def text(gpt):
    return gpt.sample_text()


@pytest.mark.slow
def test_the_gpt_reaches_the_loss_it_states(gpt, text):
    run = gpt.train(text, gpt.Size(), ("selfattention",), 60)["selfattention"]
    assert abs(run.losses[0] - math.log(len(text.characters))) < 0.3
    assert run.loss < gpt.STATED[60]


def test_it_is_the_same_computation_with_kizuki_s_layers_as_with_torch_s(gpt, text):
    size = gpt.Size(width=32, heads=4, depth=2, context=24, batch=4)
    runs = gpt.train(text, size, ("multihead", "torch"), 4)
    ours, theirs = runs["multihead"], runs["torch"]
    assert isinstance(ours.model.blocks[0].attention, kizuki.nn.MultiheadAttention)
    assert type(theirs.model.blocks[0].attention) is torch.nn.MultiheadAttention
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert len(ours.seconds) == 4


def test_what_it_says_one_by_one_is_what_it_says_of_the_whole(gpt, text):
    size = gpt.Size(width=32, heads=4, depth=2, context=24, batch=4)
    model = gpt.train(text, size, ("selfattention",), 4)["selfattention"].model
    said = text.encode(gpt.recite(model, text, "Mika kept", 8))
    assert len(said) == 17
    with torch.no_grad():
        likeliest = model(said[None])[0].argmax(-1)
    assert said[9:].tolist() == likeliest[8:-1].tolist()
    lines = gpt.most_read(model, text, "Mika kept", k=2)
    assert len(lines) == size.heads
    assert all(line.count(" at ") == 2 for line in lines)
