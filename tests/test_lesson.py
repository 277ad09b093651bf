"""The lesson: are its numbers the articles' and the model's, does each open, and does every word exist twice?"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from tiny import tiny

import kizuki
from kizuki import cli
from kizuki.lesson import Book, LessonError, Material, Projection, exact, formula, gather, shipped, spread
from kizuki.lesson import example as packaged
from kizuki.lesson.language import preferred, put, table
from kizuki.lesson.material import LIMIT, beyond, build, word_of
from kizuki.lesson.page import html, packed
from kizuki.lesson.plane import plane
from kizuki.lesson.terminal import Terminal
from kizuki.lesson.wrap import NOT_FIRST, NOT_LAST, wrap
from kizuki.models import Tokens

FOLDER = Path(packaged.__file__).parent


@pytest.fixture(scope="module")
def lesson() -> Material:
    return shipped()


def random_lesson(masked: bool = True, rotation: bool = True, bias: bool = True) -> Material:
    """Six tokens, four heads on two, d = 4, values of 3; its q, k, v follow from its own x and W."""
    draw = np.random.default_rng(5)
    heads, kv, n, d, dv, width = 4, 2, 6, 4, 3, 10
    angle = draw.uniform(0, 6, (n, d // 2))

    def numbers(*shape: int) -> Any:
        return draw.standard_normal(shape).astype(np.float32)

    around = Projection(
        x=numbers(n, width),
        wq=numbers(d, width),
        wk=numbers(d, width),
        wv=numbers(dv, width),
        wo=numbers(width, dv),
        bq=numbers(d) if bias else None,
        bk=numbers(d) if bias else None,
        bv=numbers(dv) if bias else None,
        cos=np.tile(np.cos(angle), 2).astype(np.float32) if rotation else None,
        sin=np.tile(np.sin(angle), 2).astype(np.float32) if rotation else None,
        attention=numbers(n, width),
        residual=numbers(n, width),
        shares=np.abs(numbers(heads, n)),
    )
    query, key, value = numbers(heads, n, d), numbers(kv, n, d), numbers(kv, n, dv)
    query[3], key[1], value[1] = around.rotated("q"), around.rotated("k"), around.raw("v")
    own = np.tril(np.ones((n, n), dtype=bool)) if masked else np.ones((n, n), dtype=bool)
    made = build(
        text="a b",
        labels=[f" t{i}" for i in range(n)],
        ids=list(range(n)),
        model="random",
        layer=2,
        layers=3,
        query=query,
        key=key,
        value=value,
        scale=0.4,
        own=own,
        head=3,
    )
    return replace(made, projection=around, why="")


# -- the articles' numbers ---------------------------------------------------------------------------

THREE = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1]], dtype=torch.float64)
VALUES = torch.tensor([[10.0, 0, 0, 0], [0, 10, 0, 0], [5, 5, 0, 0]], dtype=torch.float64)
FULL = [[0.422319, 0.155362, 0.422319], [0.155362, 0.422319, 0.422319], [0.211942, 0.211942, 0.576117]]
CAUSAL = [[1, 0, 0], [0.268941, 0.731059, 0], FULL[2]]
OUTPUT = [[6.334782, 3.665218, 0, 0], [3.665218, 6.334782, 0, 0], [5, 5, 0, 0]]
OUTPUT_CAUSAL = [[10, 0, 0, 0], [2.689414, 7.310586, 0, 0], [5, 5, 0, 0]]


@pytest.mark.parametrize(
    ("causal", "weights", "output"), [(False, FULL, OUTPUT), (True, CAUSAL, OUTPUT_CAUSAL)]
)
def test_three_tokens_of_the_walk_through(causal: bool, weights: Any, output: Any) -> None:
    A = kizuki.attend(THREE, THREE, scale=0.5, causal=causal)
    mine = exact.weights(THREE.numpy(), THREE.numpy(), 0.5, causal)
    for got in (A.dense().numpy(), mine):
        assert np.abs(got - weights).max() < 5.1e-7
    for got in ((A @ VALUES).numpy(), formula.mix(mine, VALUES.numpy())):
        assert np.abs(got - output).max() < 5.1e-7


def test_two_keys_and_ones() -> None:
    q, k = np.array([[1.0, 0.0]]), np.eye(2)
    for scale, want in ((1.0, [0.7311, 0.2689]), (2**-0.5, [0.6698, 0.3302])):
        assert np.abs(exact.weights(q, k, scale)[0] - want).max() < 5.1e-5
    for d in (4, 512):
        assert formula.dots(np.ones((1, d)), np.ones((1, d)))[0, 0] == d


def test_the_article_that_is_wrong_is_corrected_in_both_languages() -> None:
    score, weight = exact.large()
    assert [round(s, 3) for s in score.tolist()] == [22.627, 0]
    assert f"{weight[1]:.3g}" == "1.49e-10"
    assert 1 - weight[0] == pytest.approx(1.4867e-10, rel=1e-4)
    q = torch.ones(1, 512)
    k = torch.stack([torch.ones(512), torch.zeros(512)])
    assert kizuki.attend(q, k, scale=1.0)[0].tolist() == [1, 0]
    wrong = next(each for each in exact.examples() if each.key == "exact_wrong")
    assert dict(wrong.lines) == {
        "@scores": "[512, 0]",
        "@unscaled": "[1, 0]",
        "@scaled": "[22.627, 0]",
        "@weights": "[1 − 1.49e-10, 1.49e-10]",
        "@article": "[0.9895, 0.0105]",
    }
    assert "correction" in table("en")["exact_wrong"]
    assert "訂正" in table("ja")["exact_wrong"]


def test_a_mask_is_absence_and_not_a_large_number() -> None:
    made = exact.masked_with_a_number()
    assert np.isneginf(made["half"]).all()
    assert np.isnan(made["half_weights"]).all()
    scores = torch.tensor([3.0, -1.0, 0.5, 2.0])
    everything = torch.ones(4, dtype=torch.bool)
    filled = scores.masked_fill(everything, -1e9).softmax(-1)
    assert filled.tolist() == made["weights"].tolist() == [0.25] * 4
    assert (scores.half() + -1e9).isneginf().all()
    hidden = kizuki.attend(torch.ones(1, 4), torch.ones(4, 4), mask=~everything[None])
    assert hidden.dense().tolist() == [[0.0] * 4] == [made["absent"].tolist()]


def test_every_example_of_the_articles_is_shown_and_named() -> None:
    shown = exact.examples()
    assert [each.key for each in shown] == [
        "exact_ones", "exact_two", "exact_wrong", "exact_number", "exact_three", "exact_causal"
    ]  # fmt: skip
    for each in shown:
        assert each.key in table("en")
        for label, _ in each.lines:
            assert not label.startswith("@") or f"label_{label[1:]}" in table("en")
    lines = dict(shown[4].lines)
    assert lines["@weights"] == ", ".join("[" + ", ".join(f"{w:.6f}" for w in row) + "]" for row in FULL)
    assert lines["@output"].startswith("[6.334782, 3.665218, 0, 0], [3.665218, 6.334782, 0, 0], [5, 5, 0, 0]")


# -- the arithmetic ----------------------------------------------------------------------------------


def test_slope_is_the_size_of_softmaxs_jacobian() -> None:
    score = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), score)
    weight = score.softmax(-1).numpy()
    assert formula.slope(weight) == pytest.approx(float(jacobian.norm()), rel=1e-12)
    assert formula.slope(np.array([1.0, 0, 0])) == 0
    assert formula.entropy(weight) == pytest.approx(float(torch.special.entr(torch.tensor(weight)).sum()))


def test_a_row_that_sees_nothing_has_no_weight_and_huge_scores_do_not_overflow() -> None:
    score = np.array([[-np.inf] * 3, [9000.0, 8999.0, -np.inf]])
    weight = formula.softmax(score)
    assert weight[0].tolist() == [0, 0, 0]
    assert weight[1] == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.e), 0])
    assert formula.lse(score)[1] == pytest.approx(9000 + np.log(1 + np.exp(-1)))


def test_scores_spread_like_the_root_of_d_and_the_scale_takes_it_back() -> None:
    lines = spread.drawn()
    assert [line.dim for line in lines[::2]] == [4, 16, 64, 128, 512]
    for off, on in zip(lines[::2], lines[1::2], strict=True):
        assert off.spread == pytest.approx(np.sqrt(off.dim), rel=0.05)
        assert on.spread == pytest.approx(1, rel=0.05)
        assert off.spread / on.spread == pytest.approx(np.sqrt(off.dim))
    assert [line.largest for line in lines[::2]] == sorted(line.largest for line in lines[::2])
    assert lines[-2].saturated > 0.5 > lines[-1].saturated == 0
    assert lines[-2].slope < 0.6 * lines[-1].slope
    assert lines[-2].entropy < 0.1 * lines[-1].entropy


def test_the_plane_keeps_scores_exactly_and_says_what_it_drops(lesson: Material) -> None:
    q, k = lesson.q()[lesson.word], lesson.k()
    flat = plane(q, k)
    assert np.allclose(flat.along * flat.query, k @ q, rtol=1e-12)
    forward = q / np.linalg.norm(q)
    rest = k - np.outer(k @ forward, forward)
    best = np.linalg.eigvalsh(rest.T @ rest)[-1]
    assert (flat.beside**2).sum() == pytest.approx(best, rel=1e-9)
    dropped = (k**2).sum() - (flat.along**2).sum() - best
    assert flat.residual == pytest.approx(dropped / (k**2).sum(), rel=1e-9)
    assert plane(np.zeros(3), np.eye(3)).query == 0
    assert plane(np.array([1.0, 0]), np.array([[2.0, 1.0], [0.5, -3.0]])).residual == pytest.approx(
        0, abs=1e-12
    )


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


def names_of(made: Material) -> list[str]:
    n, d, dv = len(made), made.head_dim, made.value.shape[2]
    names = [
        f"{kind}[{i},{j}]"
        for kind, i, j in product(("dot", "scaled", "exp", "weight", "cosine"), range(n), range(n))
    ]
    names += [f"{kind}[{i}]" for kind, i in product(("sum", "size_q", "size_k"), range(n))]
    names += [f"{kind}[{i},{c}]" for kind, i, c in product(("q", "k", "raw_q", "raw_k"), range(n), range(d))]
    names += [f"{kind}[{i},{c}]" for kind, i, c in product(("v", "z"), range(n), range(dv))]
    width = 0 if made.projection is None else made.projection.x.shape[1]
    return names + [
        f"{kind}[{i},{m}]" for kind, i, m in product(("x", "o", "out"), range(n), range(0, width, 3))
    ]


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


def source_of(name: str, count: int = 9) -> Any:
    tokens = Tokens(
        "w" * count,
        [(7 * i + 3) % 90 for i in range(count)],
        [(i, i + 1) for i in range(count)],
        [f"w{i}" for i in range(count)],
        [False] * count,
    )
    kind = "encoder" if "bert" in name else "decoder"
    return SimpleNamespace(
        name=name,
        model=tiny(name),
        kind=kind,
        max_positions=64,
        origin="random numbers",
        tokenize=lambda _: tokens,
    )


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


# -- both languages ----------------------------------------------------------------------------------


def test_both_languages_have_the_same_words_and_places() -> None:
    en, ja = table("en"), table("ja")
    assert en.keys() == ja.keys()
    for key in en:
        assert set(re.findall(r"\{(\w+)\}", en[key])) == set(re.findall(r"\{(\w+)\}", ja[key])), key
        assert en[key].strip()
        assert ja[key].strip()
        assert not re.search("[ぁ-んァ-ヶ一-龯]", en[key]) or key == "switch_language", key


def test_japanese_is_japanese() -> None:
    ja = table("ja")
    shared = {"id", "switch_language", "write_size"}
    for key, words in ja.items():
        if key not in shared:
            assert re.search("[ぁ-んァ-ヶ一-龯]", words), key
    text = "".join(ja.values())
    for word in (
        "行列",
        "内積",
        "重み",
        "トークン",
        "クエリ",
        "キー",
        "バリュー",
        "残差",
        "マスク",
        "勾配",
        "飽和",
    ):
        assert word in text
    assert not re.search(r"[ぁ-んァ-ヶ一-龯][,.!?]", text)  # Japanese takes 、。！？


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({"LANG": "ja_JP.UTF-8"}, "ja"),
        ({"LANG": "ja_JP.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({}, "en"),
    ],
)
def test_the_language_is_the_locales(monkeypatch: Any, environment: dict[str, str], want: str) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert preferred() == want


def test_what_is_put_into_a_sentence_is_text() -> None:
    assert put("“{word}” of {n}", word="{n}", n=3) == "“{n}” of 3"


def test_japanese_lines_break_where_they_may() -> None:
    text = "".join(table("ja")[f"step{k}_text"] for k in range(1, 9))
    for width in (20, 41, 80):
        lines = wrap(text, width)
        assert "".join("".join(lines).split()) == "".join(text.split())
        for line in lines:
            assert cell_len(line) <= width + 2  # a stop hangs over rather than begin a line
            assert line[0] not in NOT_FIRST
            assert line[-1] not in NOT_LAST


# -- the terminal ------------------------------------------------------------------------------------


def written(made: Material, language: str, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    Terminal(made, language, console).lesson_in_full()
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("language", ["en", "ja"])
def test_the_terminal_shows_eight_steps_within_its_width(lesson: Material, language: str, width: int) -> None:
    text = written(lesson, language, width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    for step in range(1, 9):
        assert table(language)[f"step{step}_title"] in text
    assert table(language)["caution"][:20] in text
    assert "{" not in text
    for number in ("0.7656", "66.0", "0.9895, 0.0105", "1.49e-10", "22.627", "6.334782", "17.1 %", "150.87"):
        assert number in text, number
    for d in (4, 16, 64, 128, 512):
        assert re.search(rf"^ +{d} ", text, re.M)


def test_a_number_is_opened_in_full(lesson: Material) -> None:
    console = Console(width=100, file=io.StringIO())
    Terminal(lesson, "en", console).number("dot[7,1]")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    products = [float(line.rsplit("=", 1)[1]) for line in lines if "×" in line]
    assert len(products) == lesson.head_dim
    assert sum(products) == pytest.approx(66.0176, abs=2e-3)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_a_long_sentence_says_what_it_leaves_out(name: str) -> None:
    text = written(gather(source_of(name, 40), "w", layer=1, word=39), "en", 80)
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    assert "matrix is wider than this terminal" in text
    cut = re.findall(r"Shown are the 12 largest of 40 weights: (\d+\.\d) % of the row", text)
    assert len(cut) == 4  # of steps 3, 5, 6 and 7
    assert all(0 < float(share) < 100 for share in cut)


# -- the command -------------------------------------------------------------------------------------


@pytest.fixture
def explain(monkeypatch: Any, capsys: Any, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LANG", "C")

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["explain", *args])
        return (stopped.value.code, *capsys.readouterr())  # type: ignore[return-value]

    return run


def test_without_a_sentence_the_example_is_explained(explain: Any) -> None:
    code, out, err = explain("--lang", "ja")
    assert (code, err) == (0, "")
    assert "バリューを混ぜる" in out
    code, out, _ = explain("--number", "weight[7,1]")
    assert code == 0
    assert "weight[7,1] = exp / sum = 0.765642" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--model", "minilm"], "--model is for a sentence"),
        (["--layer", "3"], "--layer is for a sentence"),
        (["--head", "9"], "head is 9 but layer 13 has the heads 0 … 8"),
        (["--word", "cat"], "word 'cat' is no token"),
        (["--lang", "fr"], "lang is 'fr'"),
        (["--number", "weight[7]"], "1 places but weight has 2"),
        (["--number", "sum[1]", "--html", "a.html"], "use one of them"),
        (["--html", "nosuch/a.html"], "there is no folder nosuch"),
        ([" \n"], "only white space"),
        (["nosuch.safetensors"], "nosuch.safetensors"),
    ],
)
def test_bad_input_to_explain_is_one_line_and_leaves_nothing(
    explain: Any, tmp_path: Path, args: list[str], says: str
) -> None:
    code, out, err = explain(*args)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert says in err
    assert list(tmp_path.iterdir()) == []


def test_a_saved_recording_is_explained_without_its_model(explain: Any) -> None:
    file = str(FOLDER / "example" / packaged.RECORDING)
    code, out, err = explain(file, "--head", "8", "--word", "it")
    assert (code, err) == (0, "")
    assert "0.8166" in out
    assert "not in this recording" in " ".join(out.split())


@pytest.mark.model
@pytest.mark.parametrize(
    ("model", "args", "language"),
    [("smollm2", [], "en"), ("minilm", ["--layer", "2", "--head", "5"], "ja")],
)
def test_a_real_sentence_in_the_terminal(explain: Any, model: str, args: list[str], language: str) -> None:
    code, out, err = explain(
        "Mika saw the goat, and she laughed at it.", "--model", model, *args, "--lang", language
    )
    assert code == 0, err
    assert max(cell_len(line) for line in out.splitlines()) <= 80
    for step in range(1, 9):
        assert table(language)[f"step{step}_title"] in out
    assert "residual + o + rest" in out
    assert "goat" in out


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
