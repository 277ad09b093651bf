"""Recording model.generate: one view over prompt and answer, against the eager weights of one full pass over it."""

from __future__ import annotations

import copy

import oracle
import pytest
import torch
import transformers as tf
from test_families import BART, BLOOM, T5, falcon
from tiny import CACHE, FAMILIES, behind, build, skip_what_fails_by_itself, some_ids, tiny
from tolerance import assert_accurate

import kizuki
from kizuki.models import RecordError

IDS = some_ids(2, 7)
PADDED = torch.ones(2, 7, dtype=torch.int64)
PADDED[0, :3] = 0


def generate(model, ids=IDS, mask=PADDED, **options):
    """The output, the same as without recording, and its recording."""
    given = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    torch.manual_seed(5)
    plain = model.generate(ids, attention_mask=mask, **given)
    torch.manual_seed(5)
    with kizuki.record(model) as recording:
        output = model.generate(ids, attention_mask=mask, **given)
    assert torch.equal(getattr(output, "sequences", output), getattr(plain, "sequences", plain))
    return recording, output


def full(model, tokens, dtype, **encoder):
    """The eager weights of one pass over a whole text, by layer."""
    model = copy.deepcopy(model).to(dtype)
    if any("GptOss" in type(module).__name__ for module in model.modules()):
        model.set_experts_implementation("eager")  # the grouped product knows no float64
    tokens = {"decoder_input_ids": tokens[None]} if encoder else {"input_ids": tokens[None]}
    with torch.no_grad():
        own = model(**tokens, **encoder, output_attentions=True, use_cache=False)
    if not encoder:
        return dict(enumerate(own.attentions))
    made = {}
    for n in range(len(own.decoder_attentions)):
        made[f"decoder.{n}.self"], made[f"decoder.{n}.cross"] = (
            own.decoder_attentions[n],
            own.cross_attentions[n],
        )
    return made


def assert_generation(generation, model, layers, **encoder):
    """Every row of every layer is the full pass's, whose float32 error is the yardstick."""
    tokens = generation.tokens
    truth = full(model, tokens, torch.float64, **encoder)
    plains = [
        full(model, tokens, torch.float32, **encoder),
        full(model, tokens[:-1], torch.float32, **encoder),
    ]
    assert generation.layers == tuple(layers)
    n = len(tokens) - 1
    for layer in generation:
        got = generation[layer].matrix[...]
        keys = got.shape[-1]
        cut = [weights[layer][:, :, :n, :keys] for weights in plains]
        assert_accurate(got, truth[layer][:, :, :n, :keys], cut, f"layer {layer}")


def assert_names(generation, sequence, given):
    """Rows are named by what they read and what they produced."""
    ids = sequence.tolist()
    start = len(ids) - len(generation.tokens)
    assert generation.tokens.tolist() == ids[start:]
    assert generation.prompt == given
    assert [row.position for row in generation.rows] == list(range(len(generation.tokens) - 1))
    for row in generation.rows:
        assert row.read == ids[start + row.position]
        follows = ids[start + row.position + 1]
        assert row.produced == (None if row.position < given - 1 else follows)


@pytest.mark.parametrize(
    ("name", "cache"),
    [(name, None) for name in FAMILIES if name not in ("bert", "modernbert")]
    + [(name, "static") for name in ("llama", "mistral", "gpt_oss", "llama4")],
)
def test_greedy_with_every_cache_and_window(name, cache):
    skip_what_fails_by_itself(name, cache)
    model = tiny(name)
    recording, output = generate(model, cache_implementation=cache)
    assert recording.passes == 9
    for sequence, given in ((0, 4), (1, 7)):
        generation = recording.generation(output, sequence=sequence)
        assert_names(generation, output[sequence], given)
        assert_generation(generation, model, range(3))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(
    "make",
    [lambda: build(tf.BloomForCausalLM, BLOOM), lambda: build(tf.FalconForCausalLM, falcon())],
    ids=["bloom", "falcon"],
)
def test_greedy_with_attention_written_out(make, cache):
    model = make()
    recording, output = generate(model, cache_implementation=cache)
    for sequence in range(2):
        assert_generation(recording.generation(output, sequence=sequence), model, range(2))


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_sdpa_models_generate_the_same_view(name):
    model = tiny(name, "sdpa")
    recording, output = generate(model)
    model.set_attn_implementation("eager")
    for sequence in range(2):
        assert_generation(recording.generation(output, sequence=sequence), model, range(3))


def test_sampling_several_sequences():
    model = tiny("llama")
    recording, output = generate(model, do_sample=True, num_return_sequences=3)
    assert len({tuple(row) for row in output.tolist()}) > 3
    for sequence in (1, 5):
        assert_generation(recording.generation(output, sequence=sequence), model, range(3))


@pytest.mark.parametrize(("name", "cache"), [("llama", None), ("mistral", None), ("mistral", "static")])
def test_beams_are_followed_to_each_returned_sequence(name, cache):
    model = tiny(name)
    options = {"num_beams": 4, "num_return_sequences": 3, "cache_implementation": cache}
    recording, output = generate(model, return_dict_in_generate=True, output_scores=True, **options)
    crossed = output.beam_indices[:, 1:] != output.beam_indices[:, :-1]
    assert crossed.any()  # else following them shows nothing
    for sequence in (0, 2, 4):
        generation = recording.generation(output, sequence=sequence)
        assert_names(generation, output.sequences[sequence], 4 if sequence < 3 else 7)
        assert_generation(generation, model, range(3))
    with pytest.raises(RecordError, match=r"did not read this sequence's tokens .* beam_indices"):
        recording.generation(output.sequences[1:2].repeat(2, 1), sequence=0)


def test_beams_that_end_early():
    model = tiny("llama")
    probe = generate(model, num_beams=3, return_dict_in_generate=True, output_scores=True)[1]
    end = int(probe.sequences[0, 10])  # a token that the best beam does write
    options = {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": end}
    recording, output = generate(model, return_dict_in_generate=True, output_scores=True, **options)
    lengths = (output.beam_indices >= 0).sum(-1)
    assert len(set(lengths.tolist())) > 1
    for sequence in range(6):
        generation = recording.generation(output, sequence=sequence)
        assert_names(
            generation, output.sequences[sequence][: 7 + lengths[sequence]], 4 if sequence < 3 else 7
        )
        assert len(generation.tokens) - generation.prompt == lengths[sequence]
        if sequence in (int(lengths.argmin()), 4):
            assert_generation(generation, model, range(3))


def test_what_stands_behind_the_end_is_left_out():
    model = tiny("llama")
    answer = generate(model)[1][0, 7:].tolist()
    step = max(at for at, token in enumerate(answer[:7]) if token not in answer[:at])
    end = answer[step]  # at this step for the first time
    recording, output = generate(model, eos_token_id=end)
    assert output[0, 7:].tolist() == answer[: step + 1] + [0] * (output.shape[1] - 8 - step)
    assert output.shape[1] > 8 + step
    generation = recording.generation(output, sequence=0, eos=end)
    assert generation.tokens.tolist() == output[0, 3 : 8 + step].tolist()
    assert_generation(generation, model, range(3))
    other = recording.generation(output, sequence=1, eos=[end, 96])
    assert_generation(other, model, range(3))


@pytest.mark.parametrize(("beams", "cache"), [(1, None), (1, "static"), (3, None)])
@pytest.mark.parametrize(
    ("config", "cls"), [(T5, tf.T5ForConditionalGeneration), (BART, tf.BartForConditionalGeneration)]
)
def test_an_encoder_decoder_writes_with_both_of_its_attentions(config, cls, beams, cache):
    model = build(cls, config)
    mask = PADDED.flip(1)
    options = {"num_beams": beams, "cache_implementation": cache}
    recording, output = generate(
        model, IDS, mask, return_dict_in_generate=True, output_scores=True, **options
    )
    layers = ["decoder.0.self", "decoder.0.cross", "decoder.1.self", "decoder.1.cross"]
    for sequence in range(2):
        generation = recording.generation(output, sequence=sequence)
        part = slice(sequence, sequence + 1)
        assert_generation(generation, model, layers, input_ids=IDS[part], attention_mask=mask[part])
        assert generation["decoder.1.cross"][0].shape == (4, 7)
        assert generation["decoder.1.self"][2].shape == (4, 3)
    with pytest.raises(
        RecordError, match=r"generation\['encoder.0'\]: it ran once, .*; read recording\['enc"
    ):
        generation["encoder.0"]
    assert recording["encoder.1"].shape[2:] == (
        7,
        7,
    )  # the encoder ran once, before the passes that are counted
    assert recording.passes == 9


def test_drafts_that_were_not_accepted_leave_no_row():
    model = tiny("llama")
    recording, output = generate(model, IDS[:1], None, max_new_tokens=20, prompt_lookup_num_tokens=3)
    generation = recording.generation(output)
    assert recording.passes < 20  # some drafts were accepted
    assert recording._course.length >= 26
    assert_generation(generation, model, range(3))


def test_a_loop_of_ones_own_and_a_model_without_cache():
    model, ids = tiny("mistral"), IDS[1:]
    with torch.no_grad(), kizuki.record(model) as recording:
        output = model(ids, use_cache=True)
        for _ in range(5):
            token = output.logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, token], 1)
            output = model(token, **behind(getattr(output, CACHE)))
    ids = torch.cat([ids, output.logits[:, -1:].argmax(-1)], 1)
    assert_generation(recording.generation(ids), model, range(3))
    with pytest.raises(RecordError, match=r"12 tokens were read .* but the sequence has 14"):
        recording.generation(torch.cat([ids, ids[:, :1]], 1))
    recording, output = generate(model, IDS[1:], None, use_cache=False)
    with pytest.raises(RecordError, match=r"without a cache .* prompt="):
        recording.generation(output)
    generation = recording.generation(output, prompt=7)
    assert_names(generation, output[0], 7)
    assert_generation(generation, model, range(3))


def test_readings_of_a_generation():
    model = tiny("gemma2")
    recording, output = generate(model)
    generation = recording.generation(output, sequence=0)
    layer = generation[1]
    matrix = layer.matrix
    numbers = {"scale": matrix.scale, "softcap": 2.0, "visible": oracle.causal(12, 12)}
    truth = oracle.plain(matrix.query, matrix.key, dtype=torch.float64, **numbers)[0][0]
    plain = oracle.plain(matrix.query, matrix.key, **numbers)[0][0]
    assert len(layer) == 9
    assert layer.rows == generation.rows
    for step in range(9):  # step 0 is the row of the last token given
        cut = (slice(None), 3 + step, slice(0, 4 + step))
        assert_accurate(layer[step], truth[cut], plain[cut], f"step {step}")
    assert torch.equal(layer[-1], layer[8])
    assert torch.equal(layer.row(-1), layer[8])
    assert torch.equal(layer.row(0), torch.ones(4, 1))
    assert [len(step[0]) for step in layer] == list(range(4, 13))
    weights, keys = layer.topk(2)
    assert torch.equal(keys[:, 3:], truth.topk(2).indices[:, 3:])
    assert_accurate(weights, truth.topk(2).values, plain.topk(2).values, "the largest weights")
    assert_accurate(layer.received(), truth.sum(1), plain.sum(1), "received")
    readers = torch.arange(12, 0, -1)  # the mean is over the rows that see a key
    assert_accurate(layer.received("mean"), truth.sum(1) / readers, plain.sum(1) / readers, "received")
    assert generation[0].rule == "causal & window(4, 0)"
    assert layer.value.shape[2] == 12
    for bad, error in ((9, IndexError), (-10, IndexError), (True, RecordError), (slice(2), RecordError)):
        with pytest.raises(error):
            layer[bad]
    with pytest.raises(IndexError):
        layer.row(12)


def test_chosen_layers_and_heads_of_a_generation():
    model = tiny("llama")
    torch.manual_seed(5)
    with kizuki.record(model, layers=[2], heads=[1, 3]) as recording:
        output = model.generate(IDS[1:], max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    generation = recording.generation(output)
    truth, plain = (full(model, generation.tokens, dtype)[2] for dtype in (torch.float64, torch.float32))
    cut = (slice(None), [1, 3], slice(0, 11), slice(0, 11))
    assert_accurate(generation[2].matrix[...], truth[cut], plain[cut], "chosen heads")
    with pytest.raises(RecordError, match=r"generation\[0\]: it was not recorded"):
        generation[0]


def storage(recording):
    """Bytes behind the tensors that the passes through the cache left, each storage once."""
    held = {}
    parts, _ = recording._parts()
    for layer in parts.values():
        for part in layer[:-1]:  # the last pass's is made as it is asked for
            for tensor in (
                part.query,
                part.key,
                part.value,
                part.bias,
                part.sample,
                *vars(part.lines).values(),
            ):
                if tensor is not None:
                    held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(held.values())


@pytest.mark.parametrize(
    "make", [lambda: tiny("llama"), lambda: build(tf.BloomForCausalLM, BLOOM), lambda: tiny("mistral")]
)
@pytest.mark.parametrize("cache", [None, "static"])
def test_memory_grows_with_the_tokens_and_not_with_their_square(make, cache):
    model, sizes = make(), []
    for steps in (4, 8, 16):
        options = {"max_new_tokens": steps, "cache_implementation": cache}
        sizes.append(storage(generate(model, **options)[0]))
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])


def test_a_sequence_that_was_not_written_here_is_refused():
    model = tiny("llama")
    recording, output = generate(model)
    for given, options, says in (
        (output, {}, "output has 2 sequences; say which: sequence=0 … 1"),
        (output, {"sequence": 2}, "sequence is 2 but output has 2 sequences"),
        (output[:, :5], {"sequence": 0}, "the prompt has 7 tokens but the output 5"),
        (output + 1, {"sequence": 0}, "pass 0 did not read this sequence's tokens in row 0"),
        ("text", {}, "output is not what model.generate returned"),
    ):
        with pytest.raises(RecordError, match=says) as error:
            recording.generation(given, **options)
        assert "\n" not in str(error.value)
    with kizuki.record(model) as empty:
        pass
    with pytest.raises(RecordError, match="no forward pass of the model ran"):
        empty.generation(output)


def test_keys_that_were_read_wrongly_are_found_out():
    model = tiny("llama")
    recording, output = generate(model)
    parts = recording._course.parts[1]
    parts[4].key.add_(1.0)
    with pytest.raises(
        RecordError, match=r"generation\[1\]: A v over the whole text is not what the layer returned"
    ):
        recording.generation(output, sequence=1)[1]


def test_a_model_that_sees_a_picture_first():
    part = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**part, image_size=12, patch_size=4),
        text_config=tf.LlamaConfig(**part, vocab_size=99, max_position_embeddings=64),
        image_token_index=98, vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    model, picture = build(tf.LlavaForConditionalGeneration, config), oracle.randn(1, 3, 12, 12)
    ids = torch.cat([torch.full((1, 10), 98), IDS[:1]], 1)
    recording, output = generate(model, ids, None, pixel_values=picture)
    generation = recording.generation(output)
    assert_names(generation, output[0], 17)
    assert generation.layers == ("language_model.0", "language_model.1")
    tower = "vision_tower.encoder.0"
    says = r"ran once, before the passes .* read recording\['vision_tower.encoder.0'\]"
    if CACHE != "cache":  # older transformers may run the tower within the first pass, and in no later one
        says += "|read 10 places in a pass over 17 tokens"
    with pytest.raises(RecordError, match=says) as refused:
        generation[tower]
    if CACHE == "cache" or "ran once" in str(refused.value):
        assert recording[tower].shape == (1, 4, 10, 10)
    truth, plain = [], []
    for made, dtype in ((truth, torch.float64), (plain, torch.float32)):
        same = copy.deepcopy(model).to(dtype)
        with torch.no_grad():
            made += same(
                generation.tokens[None], pixel_values=picture.to(dtype), output_attentions=True
            ).attentions
    cut = (slice(None), slice(None), slice(0, 25), slice(0, 25))
    for n, layer in enumerate(generation):
        assert_accurate(generation[layer].matrix[...], truth[n][cut], plain[n][cut], layer)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_cache_that_was_filled_before_the_block(name):
    """Rows begin where recording did; keys are all there, unless the cache has dropped some of them."""
    model, ids = tiny(name), IDS[1:]
    cache = tf.DynamicCache(config=model.config)
    before = 3 if name == "llama" else 6  # the window is 5
    with torch.no_grad():
        model(ids[:, :before], **behind(cache))
        with kizuki.record(model) as recording:
            output = model(ids[:, before:], **behind(cache))
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, **behind(cache))
    text = torch.cat([ids, token, output.logits[:, -1:].argmax(-1)], 1)
    generation = recording.generation(text)
    assert [row.position for row in generation.rows] == list(range(before, 8))
    assert generation.prompt == 7
    if name == "mistral":
        with pytest.raises(RecordError, match=r"generation\[0\]: its cache had dropped the first 2 tokens"):
            generation[0]
        return
    truth, plain = (
        full(model, text[0], dtype)[1][:, :, before:8, :8] for dtype in (torch.float64, torch.float32)
    )
    assert_accurate(generation[1].matrix[...], truth, plain, "rows behind what was read before")
    assert generation[1][0].shape == (4, 7)
    assert generation[1].row(0).shape == (4, before + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models(dtype):
    model = tiny("gemma2").to(dtype)
    recording, output = generate(model)
    generation = recording.generation(output, sequence=0)
    layer = generation[1]
    assert layer.matrix.dtype is dtype
    assert layer.matrix.shape == (1, 4, 12, 12)
    assert layer[3].float().sum(-1) == pytest.approx(torch.ones(4), abs=0.02)
