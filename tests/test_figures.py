"""Figures without a browser: are the numbers A's own, the colours the page's, and is nothing lost on the way?"""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import TOKENS, padding, some_ids, tiny

import kizuki
from kizuki.explorer import colour
from kizuki.explorer.figures import FigureError, cells, figure
from kizuki.models import RecordError, Tokens
from kizuki.models.saves import one_head

STATIC = Path(colour.__file__).with_name("static")
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = [
    "<b>",
    "&amp;",
    '"',
    "]]>",
    "\x00",
    "\ud83d",
    "東 1/3",
    "😀",
    "a\u0301",
    "=1+1",
    "x" * 60,
    " ",
    "end",
]


def recorded(name: str = "llama", side: str = "none", batch: int = 3) -> kizuki.models.Recording:
    model = tiny(name)
    with torch.no_grad(), kizuki.record(model) as recording:
        model(some_ids()[:batch], attention_mask=padding(side)[:batch])
    return recording


@pytest.fixture(scope="module")
def one() -> kizuki.models.Recording:
    """One text of 13 tokens, whose names would break a careless writer."""
    recording = recorded(batch=1)
    places = [(k, k + 1) for k in range(TOKENS)]
    recording.tokens = Tokens("x" * TOKENS, list(range(TOKENS)), places, HOSTILE, [False] * TOKENS)
    return recording


@pytest.fixture(scope="module")
def long() -> kizuki.AttentionMatrix:
    torch.manual_seed(0)
    return kizuki.attend(
        torch.randn(2, 131, 8), torch.randn(2, 151, 8) * 2, mask=kizuki.masks.causal("lower_right")
    )


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_colours_and_scales_are_the_page_s_byte_for_byte():
    weights = [0.0, 1e-5, 1e-4, 0.0039, 1 / 256, 0.01, 0.2, 1.0, 1.5]
    code = (
        f'import {{ colourTable, weightScale }} from "{(STATIC / "colour.js").as_uri()}";'
        f"const w = {weights};"
        "console.log(JSON.stringify([[...colourTable(false)], [...colourTable(true)],"
        'w.map(weightScale("log").at), w.map(weightScale("linear").at),'
        '...["log", "linear"].map((kind) => weightScale(kind).ticks)]));'
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", code], capture_output=True, text=True, timeout=60
    )
    light, dark, log, linear, *ticks = json.loads(done.stdout)
    assert colour.table(False).ravel().tolist() == light
    assert colour.table(True).ravel().tolist() == dark
    assert colour.Scale("log").at(weights).tolist() == pytest.approx(log, abs=1e-12)
    assert (
        colour.Scale("linear").at(weights).tolist()[:-1] == linear[:-1]
    )  # above 1 the page clips as it paints
    assert [list(colour.Scale(kind).ticks) for kind in ("log", "linear")] == ticks


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "bert"])
def test_one_head_has_the_bits_it_has_among_all(name, side):
    recording = recorded(name, side)
    for layer in (0, 2):
        whole = recording[layer].dense()
        for batch, head in ((0, 0), (1, 3), (2, 2)):
            assert torch.equal(one_head(recording, layer, head, batch).dense()[0, 0], whole[batch, head])


def test_one_head_of_a_bias():
    import transformers as tf

    torch.manual_seed(0)
    config = tf.T5Config(
        vocab_size=97, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    model = tf.T5EncoderModel(config).eval()
    with torch.no_grad(), kizuki.record(model) as recording:
        model(some_ids())
    layer = recording.layers[1]
    assert torch.equal(one_head(recording, layer, 2, 1).dense()[0, 0], recording[layer].dense()[1, 2])


def pooled(weights: np.ndarray, rows: int, cols: int, pool: str) -> np.ndarray:
    """Pooling as its rule says, entry by entry."""
    made, counts = np.zeros((rows, cols)), np.zeros(rows)
    for i, row in enumerate(weights):
        r = i * rows // len(weights)
        counts[r] += 1
        for j, weight in enumerate(row):
            c = j * cols // len(row)
            made[r, c] = made[r, c] + weight if pool == "mass" else max(made[r, c], weight)
    return made / counts[:, None] if pool == "mass" else made


@pytest.mark.parametrize("pool", ["mass", "peak"])
@pytest.mark.parametrize("span", [(None, None), ((3, 120), (1, 77)), ((130, 131), None)])
def test_pooled_cells_are_the_blocks_of_the_weights(long, pool, span, monkeypatch):
    monkeypatch.setattr(cells, "BLOCK", 200)  # a row or two at a time
    made = figure(long, 1, queries=span[0], keys=span[1], pool=pool, pixels=40).cells
    rows, cols = slice(*(span[0] or (0, 131))), slice(*(span[1] or (0, 151)))
    weights = long.dense()[1].double().numpy()
    part = weights[rows, cols]
    assert made.values.shape[1] <= 40
    np.testing.assert_allclose(made.values, pooled(part, *made.values.shape, pool), rtol=1e-5, atol=1e-9)
    assert [made.rows.span(0)[0], made.rows.span(len(made.rows) - 1)[1]] == [rows.start, rows.stop]
    if span[1] is None:
        assert made.shown is None
    else:
        assert made.shown == pytest.approx(part.sum(1).mean(), rel=1e-6)
        shown = f"{100 * part.sum(1).mean():.1f}\u00a0% of the weight shown"
        assert shown in all_text(figure(long, 1, queries=span[0], keys=span[1]).svg())


@pytest.mark.parametrize("span", [None, (1, 4)])
def test_joined_cells_are_the_rows_of_the_words(span):
    spans = [(0, 1)] * 3 + [(1, 2)] * 2 + [(2, 3), (3, 4)] + [(4, 5)] * 2 + [(5, 8), (8, 10)] + [(9, 10)] * 2
    labels = ["?"] * 9 + ["ok"] + ["?"] * 3
    tokens = Tokens("東京メトロ ok 😀", list(range(13)), spans, labels, [False] * 13)
    recording = recorded(batch=1)
    recording.tokens = tokens
    words = kizuki.models.join(tokens, "word")
    assert words.labels == ["東京", "メトロ", "ok", "😀"]
    made = recording.figure(1, 2, unit="word", keys=span)
    first, end = span or (0, 4)
    rows = torch.stack([words.row(recording[1], g)[0, 2] for g in range(4)])
    np.testing.assert_allclose(made.cells.values, rows[:, first:end].numpy(), rtol=1e-5, atol=1e-8)
    assert [made.cells.cols.label(cell) for cell in range(end - first)] == words.labels[first:end]
    text = all_text(made.svg())
    assert "tokens joined (sum over keys, mean over queries)" in text
    if span is not None:
        left = recording[1][0, 2][:, words.starts[1] :].sum(1).mean()
        assert made.cells.shown == pytest.approx(float(left), rel=1e-5)
        assert f"{100 * left:.1f}\u00a0% of the weight shown" in text
    with pytest.raises(FigureError, match="4 words are more than pixels=3"):
        recording.figure(1, 2, unit="word", pixels=3)
    with pytest.raises(FigureError, match="pool is 'peak', and words are joined by mass"):
        recording.figure(1, 2, unit="word", pool="peak")
    recording.tokens = None
    with pytest.raises(RecordError, match="the recording has no tokens of this text"):
        recording.figure(1, 2, unit="word")


def all_text(svg: str) -> str:
    return " ".join(node.text or "" for node in ET.fromstring(svg.encode()).iter(f"{SVG}text"))


def test_the_svg_is_xml_with_every_cell_where_it_belongs(one):
    made = one.figure(1, 2, width="120mm", language="ja")
    root = ET.fromstring(made.svg().encode())
    assert root.get("width") == "120mm"
    assert not [node for node in root.iter() if node.tag == f"{SVG}script" or node.tag.endswith("}b")]
    words = [node.text for node in root.iter(f"{SVG}text")]
    odd = ("<b>", "&amp;", '"', "]]>", "U+0000", "U+D83D", "東 1/3", "😀", "a\u0301")
    assert set(odd) < set(words)
    assert "キー（読まれる側）" in words
    assert any(word and word.startswith("xxx") and word.endswith("…") for word in words)

    weights = one[1][0, 2].numpy()
    table = colour.table(False)
    group = next(root.iter(f"{SVG}g"))
    left, top = (min(float(rect.get(axis)) for rect in group) for axis in "xy")
    high = float(group[0].get("height"))
    side = max(float(rect.get("x")) + float(rect.get("width")) for rect in group) - left
    seen = np.zeros((13, 13), int)
    for rect in group:
        row = round((float(rect.get("y")) - top) / high)
        first = round((float(rect.get("x")) - left) / (side / 13))
        for col in range(first, first + round(float(rect.get("width")) / (side / 13))):
            expected = bytes(table[colour.Scale("log").steps(weights[row, col])]).hex()
            assert rect.get("fill") == f"#{expected}"
            seen[row, col] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("width", ["40mm", "50mm", "60mm", "85mm", "170mm"])
@pytest.mark.parametrize("count", [1, 3, 30, 40])
def test_names_stand_in_full_or_there_are_numbers(width, count):
    """At no size is a name cut to nothing: both axes have names, or both numbers."""
    torch.manual_seed(2)
    x = torch.randn(1, 40, 4)
    names = [f"word{k:02}" for k in range(40)]
    made = figure(kizuki.attend(x, x), labels=names, queries=(0, count), width=width, font_pt=5, title="")
    shown = [node.text for node in ET.fromstring(made.svg().encode()).iter(f"{SVG}text")]
    beside, below = (sum(text in names for text in shown), 0)
    below = sum(shown.count(name) for name in names[count:])
    assert (beside, below) in ((0, 0), (count, 0), (40 + count, 40 - count))
    assert "…" not in shown
    assert (beside, below) == (0, 0) or "word00" in shown


@pytest.mark.parametrize(("tokens", "embedded"), [(64, False), (65, True)])
def test_cells_are_vector_up_to_64_and_one_exact_picture_above(tokens, embedded):
    from PIL import Image

    torch.manual_seed(1)
    x = torch.randn(1, tokens, 4)
    made = figure(kizuki.attend(x, x), 0, dark=True)
    svg = made.svg()
    assert ("<image" in svg) is embedded
    if embedded:
        data = base64.b64decode(re.search(r"base64,([^\"]+)", svg)[1])
        pixels = np.asarray(Image.open(io.BytesIO(data)))
        assert (pixels == colour.table(True)[colour.Scale("log").steps(made.cells.values)]).all()


def test_the_png_has_its_size_its_colours_and_its_words(one, tmp_path):
    from PIL import Image

    path = one.save_png(tmp_path / "a.png", 1, 2, width="3in", dpi=200, scale="linear", title="\u0378")
    image = Image.open(path)
    assert image.size[0] == 600
    assert image.info["dpi"] == pytest.approx((200, 200), abs=0.1)
    about = json.loads(image.text["kizuki"])
    assert about["drawn_by_number"] == ["\x00", "\u0378"]  # no font has these
    assert "does not say why" in image.text["Description"]
    assert (about["layer"], about["head"], about["mask"]) == (1, 2, "causal")
    pixels = np.asarray(image.convert("RGB")).astype(int)
    table = colour.table(False).astype(int)
    weights = one[1][0, 2].numpy()
    # Where the grid is: from the first row's one weight of 1, a cell of the darkest colour, left of the legend.
    rows, cols = np.nonzero((pixels == table[255]).all(-1) & (np.arange(600) < 450))
    top, left = rows.min(), cols[rows == rows.min()].min()
    wide = np.count_nonzero((pixels[top, left:450] == table[255]).all(-1))
    for i in range(13):
        for j in range(13):
            at = pixels[top + round((i + 0.5) * wide), left + round((j + 0.5) * wide)]
            assert (at == table[colour.Scale("linear").steps(weights[i, j])]).all(), (i, j)


def test_tables_give_back_every_number(one, tmp_path):
    pyarrow = pytest.importorskip("pyarrow.parquet")
    weights = one[1][0, 2].numpy()
    with one.save_csv(tmp_path / "a.csv", 1, 2).open(encoding="utf-8", newline="") as file:
        unread = "\0" if sys.version_info < (3, 11) else None  # Python 3.10 writes it, and cannot read it
        text = file.read()
        lines = list(csv.DictReader(io.StringIO(text.replace(unread, "U+0000") if unread else text)))
    assert (np.asarray([line["weight"] for line in lines], np.float32).reshape(13, 13) == weights).all()
    names = ["U+D83D" if name == "\ud83d" else "U+0000" if name == unread else name for name in HOSTILE]
    assert [line["key_text"] for line in lines[:13]] == names
    whole = json.loads(one.save_json(tmp_path / "a.json", 1, 2).read_text(encoding="utf-8"))
    assert (np.asarray(whole["values"], np.float32) == weights).all()
    assert whole["model"] == "LlamaForCausalLM"
    table = pyarrow.read_table(one.save_parquet(tmp_path / "a.parquet", 1, 2, pixels=5, pool="peak"))
    assert table.column_names[-1] == "peak"
    assert np.asarray(table["peak"]).max() == weights.max()
    assert np.asarray(table["query_last"]).max() == 12
    assert table["key_text"][0].as_py() == '<b> … "'
    assert "does not say why" in json.loads(table.schema.metadata[b"kizuki.figure"])["caution"]


def test_not_a_number_is_grey_and_counted():
    x = torch.eye(3)
    x[1, 0] = torch.nan
    made = figure(kizuki.attend(x, torch.eye(3)))
    assert "grey: not a number" in all_text(made.svg())
    assert "#808080" in made.svg()
    text = made._data(".json")
    assert json.loads(text)["not_a_number"] == 3


def test_the_same_figure_twice_has_the_same_bytes(one, tmp_path):
    for kind in ("svg", "png", "csv", "json"):
        twice = [getattr(one, f"save_{kind}")(tmp_path / f"{k}.{kind}", 0, 1).read_bytes() for k in (1, 2)]
        assert twice[0] == twice[1]


BAD = {
    "another ending": ({"path": "a.pdf"}, "ends in none of .svg, .png"),
    "the wrong ending": ({"path": "a.png"}, "save_svg: .*a.png: give a name that ends in .svg"),
    "no folder": ({"path": "no/a.svg"}, "there is no folder"),
    "an unknown head": ({"head": 4}, "head 4 was not recorded; recorded are 0, 1, 2, 3"),
    "an unknown layer": ({"layer": 9}, "layer 9 was not recorded"),
    "an unknown batch": ({"batch": 1}, "batch is 1 but the pass read 1 texts"),
    "queries backwards": ({"queries": (5, 3)}, r"queries is \(5, 3\) but must lie inside"),
    "keys behind the end": ({"keys": (0, 14)}, r"keys is \(0, 14\) but must lie inside \(0, 13\)"),
    "keys of another kind": ({"keys": 3}, "keys is 3 but must be"),
    "an unknown pool": ({"pool": "mean"}, "pool is 'mean' but must be 'mass' or 'peak'"),
    "an unknown scale": ({"scale": "sqrt"}, "scale is 'sqrt'"),
    "an unknown language": ({"language": "fr"}, "language is 'fr'"),
    "no pixels": ({"pixels": 0}, "pixels is 0"),
    "a width without a unit that is known": ({"width": "85 parsecs"}, "width is '85 parsecs'"),
    "a narrow width": ({"width": "15mm"}, "leaves no room for the cells"),
    "a font of no size": ({"font_pt": 0}, "font_pt is 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line_and_leaves_nothing(one, tmp_path, name):
    given, expected = BAD[name]
    given = {"path": "a.svg", "layer": 0, "head": 0, **given}
    with pytest.raises((FigureError, RecordError), match=expected) as error:
        one.save_svg(tmp_path / given.pop("path"), given.pop("layer"), given.pop("head"), **given)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_png_too_small_for_its_cells_is_refused(long):
    with pytest.raises(FigureError, match=r"131 × 151 cells do not fit into \d+ × \d+ pixels.* pixels="):
        figure(long, 0, width="40mm", font_pt=4, dpi=72).png()


def test_the_command_line_writes_the_same_file(one, tmp_path, monkeypatch, capsys):
    from kizuki import cli

    one.tokens, kept = None, one.tokens
    one.save(tmp_path / "one.safetensors")
    expected = one.save_svg(tmp_path / "a.svg", 1, 2, queries=(4, 9), dark=True).read_bytes()
    one.tokens = kept
    monkeypatch.chdir(tmp_path)
    for args, code in (
        (["one.safetensors", "--queries", "4-8", "--out", "b.svg"], 0),
        (["one.safetensors", "--queries", "8-4"], 2),
        (["nosuch.safetensors"], 2),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["figure", *args, "--layer", "1", "--head", "2", "--dark"])
        assert stopped.value.code == code
    out, err = capsys.readouterr()
    assert out == "b.svg\n"
    assert len(err.splitlines()) == 2
    assert b"recorded_with" in (tmp_path / "b.svg").read_bytes()
    strip = re.compile(rb"<metadata>.*</metadata>")
    assert strip.sub(b"", (tmp_path / "b.svg").read_bytes()) == strip.sub(b"", expected)


def test_a_line_that_ends_in_a_label_ends_no_line_of_the_file(tmp_path):
    labels = ["a\rb", "c\nd", "e\r\nf", "\u2028", "\t", '"\r"']
    matrix = kizuki.attend(torch.ones(6, 4), torch.ones(6, 4))
    made = figure(matrix, labels=labels)
    with made.save(tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["key_text"] for line in lines[:6]] == labels
    assert len(lines) == 36
    assert made.save(tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(FigureError, match="labels holds 7 but must hold a text"):
        figure(matrix, labels=[*labels[:5], 7])
