"""`attn_implementation="kizuki"`: is it the model's own attention, with every mask, cache and option?"""

from __future__ import annotations

import copy
import inspect
import random
import subprocess
import sys

import pytest
import torch
import transformers as tf
from tiny import (
    FAMILIES,
    NARROW,
    SMALL,
    TOKENS,
    behind,
    build,
    padding,
    skip_what_fails_by_itself,
    some_ids,
    tiny,
)
from tolerance import assert_accurate
from transformers import masking_utils as hf

import kizuki
from kizuki.models import hfmask, implementation, install
from kizuki.models.hfmask import Plan, Reader, RuleMask, Scene

install()

ALL = {
    **{name: (config, cls) for name, (config, cls, _) in FAMILIES.items()},
    "gemma3": (tf.Gemma3TextConfig(**NARROW, sliding_window=5), tf.Gemma3ForCausalLM),
}
DECODERS = [name for name in ALL if name not in ("bert", "modernbert")]
GREEDY = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def models(name: str) -> list[torch.nn.Module]:
    """The eager model and the same with kizuki."""
    config, cls = ALL[name]
    return [build(cls, config, "eager"), build(cls, config, "kizuki")]


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    wide = copy.deepcopy(model).double()
    if "gpt_oss" in model.config.model_type:
        wide.set_experts_implementation("eager")  # the usual one has no float64
    return wide


@pytest.fixture
def no_numbers(monkeypatch):
    """Fail where a mask is expanded to queries × keys."""

    def tile(self, rows, cols):
        raise AssertionError("a mask that has a rule was expanded")

    monkeypatch.setattr(Scene, "tile", tile)


# -- masks -----------------------------------------------------------------------------------------

WINDOW = hf.sliding_window_causal_mask_function(5)
BOTH = hf.sliding_window_bidirectional_mask_function(3)
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7 + [2], [0] * 13, [0] * 2 + [1] * 11])
PLACES = torch.cat([torch.arange(n) for n in (5, 7, 1, 13, 2, 11)]).view(3, 13)


def remapped(inner, places):
    """transformers' own where it has one (newer than 5.21), else as any model could write it: then it is evaluated."""
    own = getattr(hf, "remap_positions_for_packed_sequence", None)
    return own(inner, places) if own else lambda b, h, i, j: inner(b, h, places[b, i], places[b, j])


def packed(inner):
    return hf.and_masks(remapped(inner, PLACES), hf.packed_sequence_mask_function(DOCUMENTS))


def odd(b, h, i, j):
    return j % 2 == 1


def holes() -> torch.Tensor:
    real = padding("left")
    real[2, 5:7] = 0
    return real


def scene(function, queries, keys, q_offset=0, kv_offset=0, real=None, vmap=False) -> Scene:
    return Scene(
        3, queries, keys, q_offset, kv_offset, function, None if real is None else real.bool(), vmap, "cpu"
    )


RULES = {
    "prefill": scene(hf.causal_mask_function, 13, 13),
    "prefill, left padding": scene(hf.causal_mask_function, 13, 13, real=padding("left")),
    "prefill, right padding": scene(hf.causal_mask_function, 13, 13, real=padding("right")),
    "prefill, padding with holes": scene(hf.causal_mask_function, 13, 13, real=holes()),
    "prefill, one sequence is all padding": scene(
        hf.causal_mask_function, 13, 13, real=torch.ones(3, 13).mul(torch.tensor([[0], [1], [1]]))
    ),
    "prefill, all is padding": scene(hf.causal_mask_function, 13, 13, real=torch.zeros(3, 13)),
    "continued": scene(hf.causal_mask_function, 4, 13, 9, real=padding("left")),
    "decode": scene(hf.causal_mask_function, 1, 13, 12),
    "decode, left padding": scene(hf.causal_mask_function, 1, 13, 12, real=padding("left")),
    "static cache, prefill": scene(hf.causal_mask_function, 13, 20, real=padding("left")),
    "static cache, right padding": scene(hf.causal_mask_function, 13, 20, real=padding("right")),
    "static cache, decode": scene(hf.causal_mask_function, 1, 20, 13, real=torch.ones(3, 14)),
    "window": scene(WINDOW, 13, 13),
    "window, left padding": scene(WINDOW, 13, 13, real=padding("left")),
    "window wider than the text": scene(hf.sliding_window_causal_mask_function(13), 13, 13),
    "window, static cache, decode": scene(WINDOW, 1, 20, 13),
    "window, sliding cache, decode": scene(WINDOW, 1, 5, 13, 9, real=torch.ones(3, 14)),
    "window, sliding cache, continued": scene(WINDOW, 3, 7, 9, 5, real=padding("left")),
    "window, static sliding cache not yet full": scene(WINDOW, 1, 5, 2),
    "everything": scene(hf.bidirectional_mask_function, 13, 13),
    "everything, right padding": scene(hf.bidirectional_mask_function, 13, 13, real=padding("right")),
    "across": scene(hf.bidirectional_mask_function, 4, 13, real=padding("right")),
    "both sides": scene(BOTH, 13, 13, real=padding("right")),
    "chunks": scene(
        hf.chunked_causal_mask_function(5, torch.tensor([4, 1, 0])), 13, 13, real=padding("left")
    ),
    "chunks, decode": scene(hf.chunked_causal_mask_function(5, torch.tensor([4, 1, 0])), 1, 13, 12),
    "documents": scene(packed(hf.causal_mask_function), 13, 13),
    "documents, window": scene(packed(WINDOW), 13, 13),
    "no keys": scene(hf.bidirectional_mask_function, 4, 0),
    "no queries": scene(hf.causal_mask_function, 0, 13, 13),
}
NUMBERS = {
    "or": scene(hf.or_masks(hf.causal_mask_function, odd), 13, 13, real=padding("left"), vmap=True),
    "a function of the model's own": scene(hf.and_masks(hf.causal_mask_function, odd), 13, 13),
    "blocks that see each other": scene(
        hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(DOCUMENTS - 1)), 13, 13
    ),
    "both sides, not at the end": scene(BOTH, 4, 13, 5),
    "positions without documents": scene(remapped(hf.causal_mask_function, PLACES), 13, 13),
    "positions that jump": scene(
        hf.and_masks(
            remapped(WINDOW, PLACES * 2),
            hf.packed_sequence_mask_function(DOCUMENTS),
        ),
        13,
        13,
    ),
}
if not hasattr(hf, "remap_positions_for_packed_sequence"):
    NUMBERS |= {name: RULES.pop(name) for name in ("documents", "documents, window")}


def shown(plan: Plan, queries: int, keys: int, shared: bool) -> torch.Tensor:
    """Which keys the plan lets `kizuki.attention` see, `[3, queries, keys]`."""
    query, key = torch.zeros(3, 1, queries, 2), torch.zeros(3, 1, keys, 2)[:, :, plan.start : plan.stop]
    A = kizuki.attend(query, key, backend="portable", **plan.options(shared))
    return torch.nn.functional.pad(A.dense() > 0, (plan.start, keys - plan.stop))[:, 0]


@pytest.mark.parametrize("case", [*RULES, *NUMBERS])
def test_a_plan_shows_the_keys_that_transformers_says(case):
    here = {**RULES, **NUMBERS}[case]
    plan = hfmask.plan(here, Reader().read(here.function))
    truth = here.whole.expand(3, 1, here.queries, here.keys)[:, 0]
    for shared in (True, False):
        assert torch.equal(shown(plan, here.queries, here.keys, shared), truth)


@pytest.mark.parametrize("case", RULES)
def test_a_rule_is_never_expanded(case, no_numbers):
    here = copy.copy(RULES[case])
    vars(here).pop("whole", None)
    hfmask.plan(here, Reader().read(here.function))


def test_any_rule_shows_the_keys_that_transformers_says():
    draw = random.Random(0)
    for _ in range(150):
        queries, before = draw.choice([1, 1, 2, 5, 9]), draw.choice([0, 0, 1, 4, 8])
        gone, room = draw.randint(0, before), draw.choice([0, 0, 3])
        keys = before - gone + queries + room
        parts = [hf.causal_mask_function]
        if draw.random() < 0.5:
            parts.append(hf.sliding_window_overlay(draw.randint(1, 9)))
        if draw.random() < 0.3:
            parts.append(
                hf.chunked_overlay(draw.randint(1, 6), torch.tensor([draw.randint(0, 4) for _ in range(3)]))
            )
        real = None
        if draw.random() < 0.6:
            real = torch.tensor([[draw.random() < 0.7 for _ in range(before + queries)] for _ in range(3)])
        here = scene(hf.and_masks(*parts), queries, keys, before, gone, real)
        plan = hfmask.plan(here, Reader().read(here.function))
        truth = here.whole.expand(3, 1, queries, keys)[:, 0]
        assert torch.equal(shown(plan, queries, keys, shared=True), truth), here


def test_a_function_that_transformers_changed_is_evaluated(monkeypatch):
    def overlay(sliding_window):
        def inner_mask(b, h, i, j):
            return j >= i - sliding_window  # one more key than before

        return inner_mask

    monkeypatch.setattr(hf, "sliding_window_overlay", overlay)
    reader = Reader()
    changed = hf.and_masks(overlay(5), hf.causal_mask_function)
    assert reader.read(hf.causal_mask_function) is not None
    assert reader.read(changed) is None
    here = scene(changed, 13, 13)
    assert torch.equal(shown(hfmask.plan(here, reader.read(changed)), 13, 13, True), here.whole[:, 0])


def test_a_mask_is_carried_through_what_models_do_with_it():
    made = implementation.mask(
        3, 13, 13, mask_function=hf.causal_mask_function, attention_mask=padding("left").bool()
    )
    truth = RULES["prefill, left padding"].whole
    assert isinstance(made, RuleMask)
    for whole in (
        made.contiguous(),
        made.to("cpu"),
        made.detach(),
        made[:, :, :, :13],
        torch.ops.aten.slice.Tensor(made, 0, 0, 2**63 - 1),  # what torch 2.6 makes of an axis taken whole
        torch.ops.aten.slice.Tensor(made, -3, 0, 1),
        made.expand(3, 1, 13, 13),
    ):
        assert isinstance(whole, RuleMask)
        assert whole.plan_for(13) is made.plan
    part = made[:, :, 3:9, :7]
    assert part.plan_for(7) is None
    assert torch.equal(part.numbers(), truth[:, :, 3:9, :7])
    other = torch.rand(3, 1, 13, 13) > 0.5
    for changed, numbers in (
        (~made, ~truth),
        (made & other, truth & other),
        (torch.cat([made, other], -1), torch.cat([truth, other], -1)),
        (made[:, 0, None], truth[:, 0, None]),
        (made.unsqueeze(1), truth.unsqueeze(1)),
    ):
        assert isinstance(changed, RuleMask)  # and so still refuses to be added
        assert torch.equal(changed.numbers(), numbers)
        with pytest.raises(kizuki.OptionError, match="adds its mask"):
            torch.zeros(changed.shape) + changed
    assert torch.equal(made.sum(-1), truth.sum(-1))
    assert torch.equal(torch.where(made, 1.0, 2.0), torch.where(truth, 1.0, 2.0))
    assert bool(made.any()) is True


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_each_text_alone(name, side, no_numbers):
    eager, ours = models(name)
    ids, real = some_ids(), padding(side)
    places = (real.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        got = ours(ids, attention_mask=real, position_ids=places)[0]
        wide = in_float64(eager)
        for b in range(3):
            text = ids[b : b + 1, real[b] == 1]
            assert_accurate(got[b : b + 1, real[b] == 1], wide(text)[0], eager(text)[0], f"text {b}")
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_are_the_eager_model_s(name, cache, no_numbers):
    skip_what_fails_by_itself(name, cache)
    eager, ours = models(name)
    for real in (padding("none"), padding("left")):
        given = {**GREEDY, "attention_mask": real, "cache_implementation": cache}
        assert torch.equal(ours.generate(some_ids(), **given), eager.generate(some_ids(), **given))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "llama4"])
def test_a_prompt_in_pieces_and_beams(name, no_numbers):
    found, real = [], padding("left")
    for model in models(name):
        cache = tf.DynamicCache(config=model.config)
        with torch.no_grad():
            for start, stop in ((0, 6), (6, 11), (11, 13)):
                logits = model(
                    some_ids()[:, start:stop], attention_mask=real[:, :stop], use_cache=True, **behind(cache)
                ).logits
        found.append((logits, model.generate(some_ids(), attention_mask=real, num_beams=3, **GREEDY)))
    assert torch.allclose(found[0][0], found[1][0], atol=2e-5)
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("name", ["llama", "mistral", "llama4"])
def test_packed_documents_do_not_see_each_other(name):
    eager, ours = models(name)
    ids = some_ids(batch=1)
    with torch.no_grad():
        got = ours(ids, position_ids=PLACES[:1], use_cache=False).logits
        wide, start = in_float64(eager), 0
        for n in (5, 7, 1):
            alone = ids[:, start : start + n]
            part = got[:, start : start + n]
            assert_accurate(part, wide(alone).logits, eager(alone).logits, "a document")
            start += n


def test_cu_seq_lens_are_heeded_where_a_cache_hides_the_positions():
    _, ours = models("llama")
    ids, ends = some_ids(batch=1), torch.tensor([0, 5, 12, 13], dtype=torch.int32)
    with torch.no_grad():
        leaking = ours(ids, position_ids=PLACES[:1]).logits  # with a cache transformers looks at no positions
        apart = ours(ids, position_ids=PLACES[:1], use_cache=False).logits
        said = ours(ids, position_ids=PLACES[:1], cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits
    assert torch.equal(said, apart)
    assert not torch.allclose(leaking, apart, atol=1e-2)
    with pytest.raises(kizuki.OptionError, match="continuous batching"):
        ours(ids, cu_seq_lens_q=ends, cu_seq_lens_k=torch.tensor([0, 5, 12, 20]))


SIZES = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_model": 24,
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
PAIRS = {
    "t5": (
        tf.T5Config(
            vocab_size=97, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
        tf.T5ForConditionalGeneration,
    ),
    "bart": (tf.BartConfig(**SIZES, max_position_embeddings=64), tf.BartForConditionalGeneration),
    "whisper": (
        tf.WhisperConfig(
            **SIZES,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=40,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        tf.WhisperForConditionalGeneration,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_encoder_decoders(name):
    config, cls = PAIRS[name]
    eager, ours = build(cls, config, "eager"), build(cls, config, "kizuki")
    source = {"input_ids": some_ids(), "attention_mask": padding("right")}
    if name == "whisper":
        source = {"input_features": torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(2))}
    given = {**source, "decoder_input_ids": some_ids(tokens=7)}
    with torch.no_grad():
        wide = {key: t.double() if t.is_floating_point() else t for key, t in given.items()}
        truth = in_float64(eager)(**wide).logits
        assert_accurate(ours(**given).logits, truth, [eager(**given).logits], name)
    for cache in () if name == "whisper" else ("dynamic", "static"):
        given = {**source, **GREEDY, "max_new_tokens": 6, "cache_implementation": cache}
        assert torch.equal(eager.generate(**given), ours.generate(**given))


def test_vision():
    config = tf.ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
    )
    eager, ours = (build(tf.ViTModel, config, attention) for attention in ("eager", "kizuki"))
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        truth = in_float64(eager)(pixels.double())[0]
        assert_accurate(ours(pixels)[0], truth, [eager(pixels)[0]], "ViT")


def test_key_heads_are_not_repeated_and_the_output_lies_as_the_others_do(monkeypatch):
    given = []

    def spy(query, key, value, **options):
        given.append((query.shape[1], key.shape[1], value.shape[1]))
        return kizuki.attention(query, key, value, **options)

    monkeypatch.setattr(implementation, "mix", spy)
    with torch.no_grad():
        tiny("llama", "kizuki")(some_ids())
    assert given == [(4, 2, 2)] * 3
    module = torch.nn.Module()
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)
    output, weights = implementation.attention(module, q, k, v, None)
    assert output.shape == (2, 5, 4, 6)
    assert output.is_contiguous()
    assert weights is None


def test_four_dimensional_masks_of_the_caller():
    eager, ours = models("llama")
    seen = torch.rand(3, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) > 0.4
    seen |= torch.eye(TOKENS, dtype=torch.bool)
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        truth = eager(some_ids(), attention_mask=added).logits
        bias = ours(some_ids(), attention_mask=added).logits
        boolean = ours(some_ids(), attention_mask=seen).logits
    assert torch.allclose(bias, truth, atol=2e-5)
    assert torch.allclose(boolean, truth, atol=2e-5)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "bert"])
def test_weights_that_are_asked_for_are_the_eager_model_s(name):
    eager, ours = models(name)
    real = padding("left")
    live = real.bool()[:, None, :, None]
    with torch.no_grad():
        truth = eager(some_ids(), attention_mask=real, output_attentions=True).attentions
        got = ours(some_ids(), attention_mask=real, output_attentions=True).attentions
    assert len(got) == len(truth)
    for a, b in zip(got, truth, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(torch.where(live, a, 0), torch.where(live, b, 0), atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "gpt2"])
def test_training_gives_the_eager_model_s_gradients(name):
    real = padding("right")
    labels = some_ids().masked_fill(real == 0, -100)
    found = []
    for model in (*models(name), in_float64(models(name)[0])):
        model(some_ids(), attention_mask=real, labels=labels).loss.backward()
        found.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    eager, ours, wide = found
    assert eager.keys() == ours.keys()
    for key, grad in ours.items():
        scale = float(wide[key].abs().max())
        assert float((grad - wide[key]).abs().max()) <= 1e-4 * scale + 1e-7, key


def test_dropout_is_on_in_training_and_off_in_evaluation():
    config = copy.deepcopy(ALL["gpt2"][0])
    config.attn_pdrop, config.resid_pdrop, config.embd_pdrop = 0.5, 0.0, 0.0
    model = build(tf.GPT2LMHeadModel, config, "kizuki")
    with torch.no_grad():
        still = model(some_ids()).logits
        assert torch.equal(model(some_ids()).logits, still)
        model.train()
        assert not torch.equal(model(some_ids()).logits, still)


def test_a_recording_holds_what_the_eager_model_s_does():
    for side in ("none", "left"):
        real, found = padding(side), []
        for model in models("gemma2"):
            with torch.no_grad():
                plain = model(some_ids(), attention_mask=real).logits
                with kizuki.record(model) as recording:
                    recorded = model(some_ids(), attention_mask=real).logits
            assert torch.equal(plain, recorded)
            found.append(recording)
        eager, ours = found
        for layer in eager:
            assert str(ours.rule(layer)) == str(eager.rule(layer))
            assert torch.allclose(ours[layer][...], eager[layer][...], atol=1e-5)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7),
    reason="torch 2.6 cannot trace transformers' models",
)
def test_compiled_in_one_graph():
    ours = tiny("mistral", "kizuki")
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    real = padding("left")
    with torch.no_grad():
        plain = ours(some_ids(), attention_mask=real, use_cache=False).logits
        graph = compiled(some_ids(), attention_mask=real, use_cache=False).logits
    live = real.bool()
    assert torch.allclose(graph[live], plain[live], atol=2e-5)


# -- how it is switched on -------------------------------------------------------------------------


def test_by_name_on_loading_and_afterwards(tmp_path):
    tiny("qwen3").save_pretrained(tmp_path)
    named = tf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="kizuki").eval()
    later = tf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        before = later(some_ids()).logits
        later.set_attn_implementation("kizuki")
        assert torch.equal(named(some_ids()).logits, later(some_ids()).logits)
    assert named.config._attn_implementation == later.config._attn_implementation == "kizuki"
    assert not torch.equal(before, later(some_ids()).logits)  # other kernels, other roundings


def test_importing_registers_nothing():
    code = "import sys, kizuki.models; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# -- what is refused, in one line ------------------------------------------------------------------

BY_THEMSELVES = {
    "bloom": (tf.BloomConfig(vocab_size=97, hidden_size=24, n_layer=2, n_head=4), tf.BloomModel, "adds"),
    "mpt": (tf.MptConfig(vocab_size=97, d_model=24, n_layers=2, n_heads=4), tf.MptModel, "fills"),
    "mpnet": (tf.MPNetConfig(**SMALL), tf.MPNetModel, "adds"),
    "canine": (
        tf.CanineConfig(
            hidden_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=32,
            num_hash_buckets=64,
        ),
        tf.CanineModel,
        "makes numbers",
    ),
}


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_models_that_do_their_attention_by_themselves(name):
    config, cls, does = BY_THEMSELVES[name]
    with pytest.raises(kizuki.OptionError, match=does) as error:
        build(cls, config, "kizuki")(some_ids())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"indices": torch.zeros(1)}, "sparse attention"),
        ({"head_mask": torch.ones(4)}, "head mask"),
        ({"block_table": torch.zeros(1)}, "continuous batching"),
        ({"sliding_window": 3}, "sliding window of 3 and 5 keys"),
        ({"attention_mask": torch.ones(2, 5)}, r"shape \[2, 5\] but must be"),
        ({"attention_mask": torch.ones(2, 1, 5, 9)}, r"shape \[2, 1, 5, 9\] but must be"),
        ({"attention_mask": object()}, "is a object but must be"),
        ({"attention_mask": torch.ones(2, 1, 5, 5, dtype=torch.int64)}, "bias is torch.int64"),
        ({"softcap": 0.0}, "softcap is 0.0"),
    ],
)
def test_what_it_does_not_do_is_said(options, says):
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    given = {"attention_mask": None, **options}
    with pytest.raises((ValueError, TypeError), match=says) as error:
        implementation.attention(torch.nn.Module(), q, k, v, **given)
    assert "\n" not in str(error.value)


def test_a_mask_with_three_axes_is_said():
    with pytest.raises(kizuki.ShapeError, match=r"shape \[3, 13, 13\]"):
        implementation.mask(3, 13, 13, attention_mask=torch.ones(3, 13, 13, dtype=torch.bool))


def test_writing_into_a_mask_is_said():
    made = implementation.mask(3, 13, 13)
    with pytest.raises(kizuki.OptionError, match="writes into its mask"):
        made[:, :, 0] = False


def test_a_transformers_that_says_its_masks_otherwise(monkeypatch):
    def older(batch_size, cache_position, kv_length, **kwargs): ...

    assert "q_offset" in inspect.signature(hf.sdpa_mask).parameters
    monkeypatch.setattr(hf, "sdpa_mask", older)
    with pytest.raises(kizuki.OptionError, match="pip install -U transformers"):
        install()
