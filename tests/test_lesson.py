"""The lesson: are its numbers the model's own, does each open down to its products, does the page agree?"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lessons import names_of, random_lesson, source_of

import kizuki
from kizuki.lesson import Book, LessonError, Material, formula, gather, shipped, spread
from kizuki.lesson import example as packaged
from kizuki.lesson.language import table
from kizuki.lesson.material import LIMIT, beyond, word_of
from kizuki.lesson.page import html, packed

FOLDER = Path(packaged.__file__).parent


@pytest.fixture(scope="module")
def lesson() -> Material:
    return shipped()


# -- the shipped example -----------------------------------------------------------------------------


def test_the_example_is_a_recording_and_its_weights_are_kizukis(lesson: Material) -> None:
    recording = kizuki.open(FOLDER / "example" / packaged.RECORDING)
    (layer,) = recording.layers
    assert (layer, recording.rule(layer)) == (packaged.LAYER, "causal")
    A = recording[layer]
    assert np.array_equal(lesson.query, A.query[0].numpy())
    assert np.array_equal(lesson.value, recording.value(layer)[0].numpy())
    weights = np.stack([lesson.weights(h) for h in range(lesson.heads)])
    gap = np.abs(weights - A[0].double().numpy()).max()
    assert gap == pytest.approx(lesson.gap, rel=0.5, abs=1e-6)
    assert gap < 3e-6
    output = np.stack([lesson.output(h) for h in range(lesson.heads)])
    assert np.abs(output - (A @ recording.value(layer))[0].numpy()).max() < 1e-5


def test_the_example_is_small_and_opens_without_torch() -> None:
    sizes = {path.name: path.stat().st_size for path in (FOLDER / "example").iterdir()}
    assert sizes.keys() == {packaged.RECORDING, packaged.AROUND}
    assert sum(sizes.values()) < 800_000
    code = (
        "import sys; from kizuki.lesson import shipped, Book; Book(shipped()).open('z[7,3]');"
        "sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_playing_looks_at_the_dog(lesson: Material) -> None:
    assert lesson.labels[lesson.word] == " playing"
    assert int(lesson.weights()[lesson.word].argmax()) == lesson.labels.index(" dog")
    other = shipped(head=3, word="it")
    assert (other.head, other.labels[other.word], other.projection, other.why) == (
        3,
        " it",
        None,
        "closed_example",
    )


# -- any number, opened ------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
def test_every_number_is_the_sum_of_its_products(masked: bool) -> None:
    made = random_lesson(masked)
    for switches in ({}, {"scale": False, "mask": not masked, "temperature": 2.0}):
        book = Book(made, **switches)
        for name in names_of(made):
            it = book.open(name)
            assert it.name == name
            assert it.total() == pytest.approx(it.value, rel=1e-5, abs=1e-5), name


def test_parts_that_have_names_open_to_their_own_values(lesson: Material) -> None:
    book = Book(lesson)
    for name in (
        "z[7,3]",
        "weight[7,1]",
        "scaled[7,1]",
        "dot[7,1]",
        "q[7,62]",
        "q[7,2]",
        "raw_q[7,62]",
        "o[7,100]",
        "out[7,100]",
    ):
        it = book.open(name)
        parts = [(t.left, t.a) for t in it.terms] + [(t.right, t.b) for t in it.terms] + list(it.plus)
        opened = [
            (part, value)
            for part, value in parts
            if re.fullmatch(r"(dot|exp|weight|q|k|v|raw_q|z|o|x)\[[\d,]+\]", part)
        ]
        assert opened, name
        for part, value in opened:
            assert book.open(part).value == pytest.approx(value, rel=1e-12), (name, part)


def test_opened_numbers_are_those_of_A_steps(lesson: Material) -> None:
    A = kizuki.open(FOLDER / "example" / packaged.RECORDING)[packaged.LAYER]
    book = Book(lesson)
    for i, j in ((7, 1), (5, 1), (12, 0), (3, 9)):
        truth, h = A.steps(query=i, key=j), lesson.head
        assert book.open(f"dot[{i},{j}]").value == pytest.approx(float(truth.dot[0, h]), rel=2e-6)
        assert book.open(f"scaled[{i},{j}]").value == pytest.approx(float(truth.scaled[0, h]), rel=2e-6)
        assert book.open(f"weight[{i},{j}]").value == pytest.approx(float(truth.weight[0, h]), rel=2e-5)
        terms = [t.product for t in book.open(f"dot[{i},{j}]").terms]
        assert terms == pytest.approx(truth.products[0, h].tolist(), rel=1e-6, abs=1e-9)
    assert formula.lse(lesson.scores())[7] == pytest.approx(float(A.lse[0, lesson.head, 7]), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("qq[1]", "names no number"),
        ("weight", "names no number"),
        ("lesson[1]", "names no number"),
        ("weight[7]", "1 places but weight has 2"),
        ("weight[7,13]", "13 is not in 0 … 12"),
        ("sum[-14]", "-14 is not in"),
    ],
)
def test_a_name_that_is_none_is_one_line(lesson: Material, name: str, says: str) -> None:
    with pytest.raises(LessonError, match=re.escape(says)) as caught:
        Book(lesson).open(name)
    assert "\n" not in str(caught.value)


def test_what_is_not_held_is_refused_and_not_made_up() -> None:
    with pytest.raises(LessonError, match="not held for this head"):
        Book(shipped(head=0)).open("q[7,3]")


# -- a live model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "bert"])
def test_x_w_gives_the_models_q_k_v_and_w_o_its_output(name: str) -> None:
    for head in range(4):
        made = gather(source_of(name), "w", layer=1, head=head)
        around = made.projection
        assert around is not None, made.why
        assert np.abs(around.rotated("q") - made.q()).max() < 1e-4
        assert np.abs(around.rotated("k") - made.k()).max() < 1e-4
        assert np.abs(around.raw("v") - made.v()).max() < 1e-4
        assert (around.bq is not None) == (name in ("bert", "qwen2"))
        assert (around.cos is not None) == (name != "bert")
        assert made.masked == (name != "bert")
        assert made.gap < 1e-5


def test_all_heads_together_are_what_the_model_adds() -> None:
    total = 0
    for head in range(4):
        made = gather(source_of("llama"), "w", layer=2, head=head)
        assert made.projection is not None
        total = total + made.output() @ made.projection.wo.T.astype(np.float64)
    assert np.abs(total - made.projection.attention).max() < 1e-4
    assert not np.allclose(made.projection.residual, made.projection.x)  # the norm lies between them


@pytest.mark.parametrize(("name", "why"), [("gpt2", "closed_fused"), ("qwen3", "closed_other")])
def test_a_model_that_does_more_is_shown_without_what_cannot_be_opened(name: str, why: str) -> None:
    made = gather(source_of(name), "w", layer=1)
    assert (made.projection, made.why) == (None, why)
    assert why in table("en")
    assert np.allclose(made.weights().sum(-1), 1)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("gemma2", {}, "softcap"),
        ("gpt_oss", {}, "sinks"),
        ("llama", {"layer": 3}, "layer is 3 but the model's layers are 0 … 2"),
        ("llama", {"head": 4}, "head is 4 but layer 1 has the heads 0 … 3"),
        ("llama", {"word": "zebra"}, "'zebra' is no token"),
        ("llama", {"word": "9"}, "word is 9 but the tokens are 0 … 8"),
    ],
)
def test_what_a_lesson_cannot_be_made_of_is_one_line(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(LessonError, match=re.escape(says)) as caught:
        gather(source_of(name), "w", **options)
    assert "\n" not in str(caught.value)


def test_a_long_text_is_refused_and_pointed_to_look() -> None:
    with pytest.raises(LessonError, match=f"65 tokens and a lesson shows at most {LIMIT}.*kizuki look"):
        gather(source_of("llama", LIMIT + 1), "w")


def test_watching_leaves_the_model_as_it_was() -> None:
    source = source_of("llama")
    gather(source, "w")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in source.model.modules())


# -- the page ----------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_names_no_network_address(lesson: Material) -> None:
    hostile = replace(
        lesson,
        labels=["</script><img src=x onerror=alert(1)>", *lesson.labels[1:]],
        text='</script> "{word}"',
    )
    text = html(hostile, "en")
    assert text.count("</script>") == 2
    assert "<img" not in text
    assert not re.findall(r"\b(?:https?|wss?|ftp)://|@import|url\(", text)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert len(text) < 1_300_000
    assert not re.search(r"^\s*(import|export)\b", text, re.M)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("shape", [{}, {"masked": False, "rotation": False}, {"bias": False}])
def test_the_pages_arithmetic_agrees_to_float32(tmp_path: Path, shape: dict[str, bool]) -> None:
    made = random_lesson(**shape)
    cases = []
    for scale, mask, temperature in (
        (True, made.masked, 1.0),
        (False, not made.masked, 1.0),
        (True, True, 0.25),
    ):
        options = {"scale": scale, "mask": mask, "temperature": temperature}
        book = Book(made, **options)
        numbers = {
            name: {
                "value": it.value,
                "formula": it.formula,
                "wrap": it.wrap,
                "terms": [[t.left, t.a, t.right, t.b] for t in it.terms],
                "plus": [[label, None if np.isneginf(value) else value] for label, value in it.plus],
            }
            for name in names_of(made)
            for it in [book.open(name)]
        }
        weights = [made.weights(h, **options).tolist() for h in range(made.heads)]
        rows = [
            {"entropy": float(formula.entropy(w)), "slope": float(formula.slope(w))} for w in book.weights
        ]
        cases.append({"switches": options, "numbers": numbers, "rows": rows, "weights": weights})
    measured = [
        [scale, asdict(line)] for scale, line in zip((None, made.scale), spread.real(made), strict=True)
    ]
    fixture = tmp_path / "lesson.json"
    fixture.write_text(json.dumps({"packed": packed(made, "en"), "cases": cases, "measured": measured}))
    script = Path(__file__).parent / "js" / "lesson" / "agree.mjs"
    done = subprocess.run(["node", script, fixture], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 3000


def test_the_word_to_follow_is_a_word_that_reads_another() -> None:
    weights = np.full((6, 6), 0.01)
    weights[4, 2], weights[3, 1], weights[2, 5], weights[5, 2], weights[1, 0], weights[0, 0] = (
        0.5,
        0.6,
        0.9,
        0.9,
        0.95,
        1,
    )
    labels = ["[CLS]", " a", " b", " c", " d", ","]
    quiet = [True, False, False, False, False, True]
    assert word_of(labels, None, beyond(weights, quiet)) == 3
    assert word_of([" a", " b", " A"], "a", weights) == 2  # the last that has the text, whatever its case
    assert word_of(labels, "-1", weights) == 5
