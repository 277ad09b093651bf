"""Models beyond the decoders of tiny.FAMILIES: ALiBi, position bias, two stacks, pictures, shared layers; causality."""

from __future__ import annotations

import copy
import threading

import numpy as np
import oracle
import pytest
import torch
import transformers as tf
from tiny import FAMILIES, SMALL, build, padding, some_ids, tiny
from tolerance import assert_accurate
from transformers.models.falcon.modeling_falcon import build_alibi_tensor

import kizuki
from kizuki.models import RecordError

BLOOM = tf.BloomConfig(vocab_size=97, hidden_size=24, n_layer=2, n_head=4)
T5 = tf.T5Config(
    vocab_size=97, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0,
    relative_attention_num_buckets=8, relative_attention_max_distance=6,
)  # fmt: skip
BART = tf.BartConfig(
    vocab_size=97, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
    forced_eos_token_id=None,
)  # fmt: skip
WHISPER = tf.WhisperConfig(
    vocab_size=97, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=13,
    max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip
VIT = tf.ViTConfig(
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=32,
    image_size=12,
    patch_size=4,
)


def falcon(**changes):
    return tf.FalconConfig(
        vocab_size=97, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2,
        multi_query=True, **changes,
    )  # fmt: skip


def assert_layer(recording, layer, models_own, seen, **numbers):
    """A and the model's own weights are both the formula over the recorded q and k, seen as said from outside."""
    matrix = recording[layer]
    assert recording.checked(layer)
    numbers = {"scale": matrix.scale, **numbers}
    truth = oracle.plain(matrix.query, matrix.key, visible=seen, dtype=torch.float64, **numbers)[0]
    plain = oracle.plain(matrix.query, matrix.key, visible=seen, **numbers)[0]
    live = torch.as_tensor(np.broadcast_to(seen, matrix.shape).any(-1))[..., None]
    assert_accurate(matrix[...], truth, plain, f"A of layer {layer}")
    if models_own is not None:
        own = torch.where(live, models_own, 0)
        assert_accurate(own, truth, plain, f"the model's own weights of layer {layer}")


def run(model, **given):
    """The output, bit for bit that of the unrecorded model, its recording, and the model's own weights."""
    with torch.no_grad():
        plain = model(**given)
        with kizuki.record(model) as recording:
            recorded = model(**given)
        weights = model(**given, output_attentions=True)
    assert torch.equal(recorded[0], plain[0])
    return recording, weights


def visible(real, causal=True):
    pad = real.bool().numpy()[:, None, None, :]
    return pad & oracle.causal(real.shape[1], real.shape[1]) if causal else pad


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_bloom_reads_its_alibi_as_a_bias(side):
    model, real = build(tf.BloomForCausalLM, BLOOM), padding(side)
    recording, own = run(model, input_ids=some_ids(), attention_mask=real)
    slopes = torch.tensor([2.0 ** -(2 * (h + 1)) for h in range(4)])  # Press et al. 2022: 2^(-8/n · h)
    bias = slopes[None, :, None, None] * ((real.cumsum(-1) - 1) * real)[:, None, None, :]
    for layer in recording:
        assert_layer(recording, layer, own.attentions[layer], visible(real), bias=bias)
        assert recording[layer].problem.bias.shape[2] == 1  # O(keys), not queries × keys


def test_two_threads_record_bloom_each_its_own_passes():
    model, ids, found = build(tf.BloomForCausalLM, BLOOM), some_ids(), {}
    together = threading.Barrier(2, timeout=20)

    def work(tokens):
        with torch.no_grad(), kizuki.record(model) as recording:
            together.wait()
            for _ in range(10):
                model(ids[:, :tokens])
            together.wait()
        found[tokens] = (recording.layers, recording.passes, recording[1].shape[-1], recording.checked(1))

    threads = [threading.Thread(target=work, args=(n,)) for n in (5, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {5: ((0, 1), 10, 5, True), 11: ((0, 1), 10, 11, True)}


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("new", [False, True])
def test_falcon_with_rotary_embedding(side, new):
    real, ids = padding(side), some_ids()
    recording, own = run(
        build(tf.FalconForCausalLM, falcon(new_decoder_architecture=new)), input_ids=ids, attention_mask=real
    )
    for layer in recording:
        assert_layer(recording, layer, own.attentions[layer], visible(real))
    model = build(tf.FalconForCausalLM, falcon(new_decoder_architecture=new), "sdpa")
    with torch.no_grad(), kizuki.record(model) as fused:
        model(input_ids=ids, attention_mask=real)
    for layer in recording:  # PyTorch's function instead; layer 0 has the same input, to the bit
        assert_layer(fused, layer, None if layer else own.attentions[layer], visible(real))


def test_falcon_with_alibi_under_both_implementations():
    """transformers' eager Falcon adds its ALiBi twice, in the mask and by itself; sdpa once. Each is shown as it is."""
    real, ids = padding("left"), some_ids()
    alibi = build_alibi_tensor(real, 4, torch.float32).view(3, 4, 1, -1)
    for attention, times in (("eager", 2), ("sdpa", 1)):
        model = build(tf.FalconForCausalLM, falcon(alibi=True), attention)
        with torch.no_grad():
            with kizuki.record(model) as recording:
                model(input_ids=ids, attention_mask=real)
            model.set_attn_implementation("eager")
            own = model(input_ids=ids, attention_mask=real, output_attentions=True).attentions
        for layer in recording:
            matrix = recording[layer]
            seen, bias = visible(real), times * alibi / 6**0.5
            truth = oracle.plain(matrix.query, matrix.key, visible=seen, bias=bias, dtype=torch.float64)[0]
            plain = oracle.plain(matrix.query, matrix.key, visible=seen, bias=bias)[0]
            assert_accurate(matrix[...], truth, plain, f"{attention}, layer {layer}")
            if times == 2:
                assert_layer(recording, layer, own[layer], seen, bias=bias)


def parts_of(config, cls, attention="eager", side="right", **given):
    """A model of two stacks, recorded over one batch: recording, own weights by layer name, what each layer sees."""
    model = build(cls, config, attention)
    recording, own = run(model, **given)
    named = {}
    for n in range(2):
        named[f"encoder.{n}"] = own.encoder_attentions[n] if own.encoder_attentions else None
        named[f"decoder.{n}.self"] = own.decoder_attentions[n] if own.decoder_attentions else None
        named[f"decoder.{n}.cross"] = own.cross_attentions[n] if own.cross_attentions else None
    return model, recording, named


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize(("config", "cls"), [(T5, tf.T5ForConditionalGeneration), (BART, tf.BartModel)])
def test_encoder_decoder_with_cross_attention(config, cls, side):
    real, ids = padding(side), some_ids()
    model, recording, own = parts_of(
        config, cls, input_ids=ids, attention_mask=real, decoder_input_ids=ids[:, :5]
    )
    assert recording.layers == (
        "encoder.0", "encoder.1",
        "decoder.0.self", "decoder.0.cross", "decoder.1.self", "decoder.1.cross",
    )  # fmt: skip
    biases = {"encoder": None, "self": None, "cross": None}
    if config is T5:
        with torch.no_grad():
            biases["encoder"] = model.encoder.block[0].layer[0].SelfAttention.compute_bias(13, 13)
            biases["self"] = model.decoder.block[0].layer[0].SelfAttention.compute_bias(5, 5)
    for layer in recording:
        kind = layer.rpartition(".")[2] if "decoder" in layer else "encoder"
        seen = oracle.causal(5, 5)[None, None] if kind == "self" else visible(real, causal=False)
        assert_layer(recording, layer, own[layer], seen, bias=biases[kind])
    assert recording["decoder.1.cross"].shape == (3, 4, 5, 13)


def test_whisper_reads_sound_by_cross_attention():
    sound = torch.randn(2, 8, 26, generator=torch.Generator().manual_seed(4))
    _, recording, own = parts_of(
        WHISPER, tf.WhisperModel, input_features=sound, decoder_input_ids=some_ids(2, 5)
    )
    for layer in recording:
        seen = oracle.causal(5, 5)[None, None] if layer.endswith("self") else np.ones((1, 1, 1, 13), bool)
        assert_layer(recording, layer, own[layer], seen)


def test_a_stack_or_one_of_its_layers_is_chosen_by_name():
    model, ids = build(tf.BartModel, BART), some_ids(2, 9)
    for layers, expected in (
        ("encoder", ("encoder.0", "encoder.1")),
        (["decoder.1.cross", "encoder.0"], ("encoder.0", "decoder.1.cross")),
        ("decoder.0", ("decoder.0.self", "decoder.0.cross")),
    ):
        with torch.no_grad(), kizuki.record(model, layers=layers) as recording:
            model(input_ids=ids, decoder_input_ids=ids[:, :5])
        assert recording.layers == expected
        assert all(recording[layer].shape[0] == 2 for layer in recording)
    with pytest.raises(
        RecordError, match=r"layers holds 0 but the model has 6 layers, encoder.0, encoder.1, dec"
    ):
        kizuki.record(model, layers=0).__enter__()


def test_text_and_picture_towers_have_their_names():
    part = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = tf.CLIPModel(
        tf.CLIPConfig(
            text_config={**part, "vocab_size": 97, "max_position_embeddings": 32},
            vision_config={**part, "image_size": 12, "patch_size": 4},
        )
    ).eval()
    with torch.no_grad(), kizuki.record(model) as recording:
        model(input_ids=some_ids(3, 9), pixel_values=torch.ones(2, 3, 12, 12))
    assert {layer: (tuple(recording[layer].shape), recording.rule(layer)) for layer in recording} == {
        "text_model.0": ((3, 4, 9, 9), "causal"),
        "text_model.1": ((3, 4, 9, 9), "causal"),
        "vision_model.0": ((2, 4, 10, 10), "all keys"),
        "vision_model.1": ((2, 4, 10, 10), "all keys"),
    }


def test_a_picture_model_has_plain_numbers():
    model = build(tf.ViTModel, VIT)
    recording, own = run(
        model, pixel_values=torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(5))
    )
    assert recording.layers == (0, 1, 2)
    for layer in recording:
        assert_layer(recording, layer, own.attentions[layer], np.ones((1, 1, 1, 10), bool))


def test_layers_that_share_one_module_are_each_a_layer():
    model, real = build(tf.AlbertModel, tf.AlbertConfig(**SMALL, embedding_size=12)), padding("right")
    recording, own = run(model, input_ids=some_ids(), attention_mask=real)
    assert recording.layers == (0, 1, 2)
    for layer in recording:
        assert_layer(recording, layer, own.attentions[layer], visible(real, causal=False))


# -- causality: a token is read by no earlier one --------------------------------------------------

DECODERS = {
    **{name: lambda name=name: tiny(name) for name in FAMILIES if name not in ("bert", "modernbert")},
    "bloom": lambda: build(tf.BloomForCausalLM, BLOOM),
    "falcon": lambda: build(tf.FalconForCausalLM, falcon(), "sdpa"),
}


@pytest.mark.parametrize("name", DECODERS)
def test_the_last_token_moves_no_earlier_row(name):
    model, ids = DECODERS[name](), some_ids(2, 12)
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 7) % 90 + 1
    if name == "gpt_oss":
        model.set_experts_implementation("eager")  # the grouped product knows no float64
    found = []
    with torch.no_grad():
        for given, dtype in ((ids, torch.float32), (other, torch.float32), (ids, torch.float64)):
            with kizuki.record(model.to(dtype)) as recording:
                model(given)
            found.append(recording)
    for layer in found[0]:
        before, after, exact = (recording[layer][...] for recording in found)
        # Experts get other tokens, so that sums may come out rounded otherwise.
        assert_accurate(after[:, :, :-1], exact[:, :, :-1], before[:, :, :-1], f"rows of layer {layer}")
        assert not after[:, :, :-1, -1].any()
        assert not torch.allclose(before[:, :, -1], after[:, :, -1])  # the last row does move


def test_the_last_token_of_an_encoder_decoder_moves_the_decoders_last_row_only():
    for config, cls in ((T5, tf.T5ForConditionalGeneration), (BART, tf.BartModel)):
        model, ids = build(cls, copy.deepcopy(config)).double(), some_ids(2, 9)
        other = ids[:, :5].clone()
        other[:, -1] += 1
        found = []
        with torch.no_grad():
            for given in (ids[:, :5], other):
                with kizuki.record(model) as recording:
                    model(input_ids=ids, decoder_input_ids=given)
                found.append(recording)
        for layer in found[0]:
            before, after = (recording[layer][...] for recording in found)
            rows = slice(None) if "encoder" in layer else slice(0, -1)
            assert torch.equal(before[:, :, rows], after[:, :, rows])
