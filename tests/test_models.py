"""Recording real models: is what is kept what the model read, and is the model left alone?"""

from __future__ import annotations

import copy
import threading

import numpy as np
import oracle
import pytest
import torch
import transformers as tf
from tolerance import assert_accurate
from torch.nn.attention.flex_attention import create_block_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama import modeling_llama as llama

import kizuki
from kizuki.models import RecordError, Source, load, rule
from kizuki.models import recording as recordings

SMALL = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
NARROW = {**GROUPED, "head_dim": 8}

# name: config, class, what a query at position i sees at position j in layer l (padding apart)
FAMILIES = {
    "llama": (tf.LlamaConfig(**GROUPED), tf.LlamaForCausalLM, lambda i, j, _: j <= i),
    "mistral": (
        tf.MistralConfig(**GROUPED, sliding_window=5),
        tf.MistralForCausalLM,
        lambda i, j, _: i - 5 < j <= i,
    ),
    "qwen2": (
        tf.Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=1),
        tf.Qwen2ForCausalLM,
        lambda i, j, layer: j <= i and (layer < 1 or j > i - 4),
    ),
    "qwen3": (tf.Qwen3Config(**NARROW), tf.Qwen3ForCausalLM, lambda i, j, _: j <= i),
    "gemma2": (
        tf.Gemma2Config(**NARROW, sliding_window=5, attn_logit_softcapping=2.0),
        tf.Gemma2ForCausalLM,
        lambda i, j, layer: j <= i and (layer % 2 or j > i - 5),
    ),
    "gpt_oss": (
        tf.GptOssConfig(**NARROW, sliding_window=5, num_local_experts=2, num_experts_per_tok=1),
        tf.GptOssForCausalLM,
        lambda i, j, layer: j <= i and (layer % 2 or j > i - 5),
    ),
    "llama4": (
        tf.Llama4TextConfig(
            **NARROW, attention_chunk_size=5, num_local_experts=2, intermediate_size_mlp=32, pad_token_id=0
        ),
        tf.Llama4ForCausalLM,
        None,  # its chunks begin behind the padding
    ),
    "gpt2": (
        tf.GPT2Config(vocab_size=97, n_positions=64, n_embd=24, n_layer=3, n_head=4),
        tf.GPT2LMHeadModel,
        lambda i, j, _: j <= i,
    ),
    "bert": (tf.BertConfig(**SMALL), tf.BertModel, lambda i, j, _: True),
    "modernbert": (
        tf.ModernBertConfig(**SMALL, local_attention=6, pad_token_id=0),
        tf.ModernBertModel,
        lambda i, j, layer: layer % 3 == 0 or abs(i - j) <= 3,
    ),
}
EAGER_ONLY = ("gemma2", "gpt_oss")
TOKENS = 13


def tiny(name: str, attention: str = "eager") -> torch.nn.Module:
    """A random model whose attention is not flat, so that a wrong mask shows."""
    config, cls, _ = FAMILIES[name]
    return build(cls, config, attention)


def build(cls: type, config: tf.PreTrainedConfig, attention: str = "eager") -> torch.nn.Module:
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    model = cls(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3) if weight.dim() > 1 else None
        for module in model.modules():
            if hasattr(module, "sinks"):
                module.sinks.normal_()
    return model


def some_ids(batch: int = 3, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(1, 90, (batch, tokens), generator=torch.Generator().manual_seed(1))


def padding(side: str) -> torch.Tensor:
    """An attention mask, `[3, 13]`, with 4, 1 and 0 places of padding."""
    real = torch.ones(3, TOKENS, dtype=torch.int64)
    if side == "left":
        real[0, :4], real[1, :1] = 0, 0
    if side == "right":
        real[0, -4:], real[1, -1:] = 0, 0
    return real


def assert_weights(got: torch.Tensor, models_own: torch.Tensor, matrix: kizuki.AttentionMatrix, seen, **numbers):
    """Both A and the model's own weights are the formula over the recorded q and k, seen from outside."""
    truth = oracle.plain(matrix.query, matrix.key, visible=seen, dtype=torch.float64, **numbers)[0]
    plain = oracle.plain(matrix.query, matrix.key, visible=seen, **numbers)[0]
    assert_accurate(models_own, truth, plain, "the model's own weights")
    assert_accurate(got, truth, plain, "A")


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_the_weights_that_the_eager_model_gives(name, side):
    model, real, sees = tiny(name), padding(side), FAMILIES[name][2]
    ids = some_ids()
    with torch.no_grad():
        plain = model(ids, attention_mask=real)[0]
        with kizuki.record(model) as recording:
            recorded = model(ids, attention_mask=real)[0]
        weights = model(ids, attention_mask=real, output_attentions=True).attentions
    assert torch.equal(recorded, plain)
    assert recording.layers == tuple(range(3))
    assert recording.passes == 1
    for layer, matrix in enumerate(map(recording.__getitem__, recording)):
        if sees is None:  # chunks of 5 from the first real token; every fourth layer has none
            start = real.argmax(-1).tolist()
            grid = np.stack([oracle.grid(TOKENS, TOKENS, lambda i, j, s=s: j <= i and (j - s) // 5 == (i - s) // 5) for s in start])
        else:
            grid = oracle.grid(TOKENS, TOKENS, lambda i, j, at=layer: sees(i, j, at))[None]
        seen = grid[:, None] & real.bool().numpy()[:, None, None, :]
        live = torch.as_tensor(seen.any(-1)).expand(3, 4, TOKENS)[..., None]
        config = model.config
        numbers = {
            "scale": matrix.scale,
            "softcap": getattr(config, "attn_logit_softcapping", None),
            "sinks": model.model.layers[layer].self_attn.sinks if name == "gpt_oss" else None,
        }
        got = matrix[...]
        # A row of padding that sees nothing is 0; the model spreads it over its mask's large negative number.
        assert not got[~live.expand_as(got)].any()
        assert_weights(got, torch.where(live, weights[layer], 0), matrix, seen, **numbers)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in EAGER_ONLY])
def test_sdpa_models_record_the_mask_that_eager_models_do(name, side):
    ids, real = some_ids(), padding(side)
    found = []
    for attention in ("eager", "sdpa"):
        model = tiny(name, attention)
        with torch.no_grad():
            plain = model(ids, attention_mask=real)[0]
            with kizuki.record(model) as recording:
                recorded = model(ids, attention_mask=real)[0]
        assert torch.equal(recorded, plain)
        found.append(recording)
    eager, sdpa = found
    for layer in eager:
        assert eager.rule(layer) == sdpa.rule(layer)
        assert torch.equal(eager[layer][...] > 0, sdpa[layer][...] > 0)


def inputs_of(model, suffix):
    """Hooks that keep what enters the modules whose name ends so: the attention output, heads joined."""
    kept = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        for name, module in model.named_modules()
        if name.endswith(suffix)
    ]
    return kept, hooks


@pytest.fixture(scope="module")
def smollm2() -> Source:
    return load("smollm2")


@pytest.fixture(scope="module")
def minilm() -> Source:
    return load("minilm")


@pytest.mark.model
def test_smollm2_every_layer(smollm2, sample_text):
    model = smollm2.model
    ids = torch.tensor([smollm2.tokenize(sample_text).ids])
    ids = torch.cat([ids[:, :50], ids[:, -50:]], 1)  # English and Japanese
    kept, hooks = inputs_of(model, "o_proj")
    with torch.no_grad():
        with kizuki.record(model) as recording:
            recorded = model(ids).logits
        joined = list(kept)
        plain = model(ids).logits
    for hook in hooks:
        hook.remove()
    assert torch.equal(recorded, plain)
    assert recording.layers == tuple(range(30))
    assert {recording.rule(layer) for layer in recording} == {"causal"}
    seen = oracle.causal(100, 100)
    for layer in recording:
        matrix, value = recording[layer], recording.value(layer)
        assert (matrix.key.shape[1], value.shape[1]) == (3, 3)
        truth = oracle.plain(matrix.query, matrix.key, value, visible=seen, dtype=torch.float64)[2]
        own = joined[layer].view(1, 100, 9, 64).transpose(1, 2)
        assert_accurate(matrix @ value, truth, own, f"output of layer {layer}")


@pytest.mark.model
def test_smollm2_rows_equal_output_attentions(smollm2):
    model = smollm2.model
    ids = torch.tensor([smollm2.tokenize("Mika saw that the bird had seen her first. 東京メトロに乗る。").ids])
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad(), kizuki.record(model) as recording:
            weights = model(ids, output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    seen = oracle.causal(ids.shape[1], ids.shape[1])
    for layer in recording:
        matrix = recording[layer]
        rows = matrix[...]
        assert_weights(rows, weights[layer], matrix, seen)
        for h, i in ((0, 0), (4, 7), (8, ids.shape[1] - 1)):
            assert torch.equal(matrix[0, h, i], rows[0, h, i])


@pytest.mark.model
@pytest.mark.parametrize("side", ["left", "right"])
def test_minilm_padded_batch_rows_equal_output_attentions(minilm, side):
    model, tokenizer = minilm.model, copy.deepcopy(minilm.tokenizer)
    tokenizer.padding_side = side
    texts = ["A page holds hundreds of words.", "She knew.", "東京メトロ: a reader cannot hold them all at once"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert not bool(batch["attention_mask"].all())
    with torch.no_grad():
        plain = model(**batch).last_hidden_state
        with kizuki.record(model) as recording:
            recorded = model(**batch).last_hidden_state
        model.set_attn_implementation("eager")
        try:
            with kizuki.record(model) as eager:
                weights = model(**batch, output_attentions=True).attentions
        finally:
            model.set_attn_implementation("sdpa")
    assert torch.equal(recorded, plain)
    real = batch["attention_mask"].bool()[:, None, None, :].numpy()
    for layer in eager:
        assert recording.rule(layer) == eager.rule(layer) == "keys"
        assert_weights(eager[layer][...], weights[layer], eager[layer], real)
        assert not recording[layer][...][~torch.as_tensor(real).expand(*recording[layer].shape)].any()


@pytest.mark.model
def test_a_token_is_read_by_no_earlier_one_in_a_decoder_and_by_all_in_an_encoder(smollm2, minilm):
    for source, changes in ((smollm2, False), (minilm, True)):
        ids = torch.tensor([source.tokenize("one two three four five").ids])
        other = ids.clone()
        other[0, -2 if changes else -1] = int(ids[0, 1])
        found = []
        with torch.no_grad():
            for given in (ids, other):
                with kizuki.record(source.model) as recording:
                    source.model(given)
                found.append(recording)
        rows = slice(0, ids.shape[1] - 2)
        same = all(torch.equal(found[0][layer][:, :, rows], found[1][layer][:, :, rows]) for layer in found[0])
        assert same is not changes


def state(model):
    """Everything a recording could leave behind."""
    hooks = [
        (name, len(module._forward_hooks), len(module._forward_pre_hooks), len(module._forward_hooks_always_called))
        for name, module in model.named_modules()
    ]
    table = AttentionInterface.__dict__["get_interface"]
    entries = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS}
    return hooks, table, entries, model.config.to_dict(), [vars(m).keys() for m in model.modules()]


class Boom(RuntimeError):
    pass


@pytest.mark.parametrize("where", ["block", "forward", "nowhere"])
def test_model_and_tables_are_as_they_were(where):
    model, ids = tiny("llama"), some_ids()
    before = state(model)

    def burst(*_):
        raise Boom

    if where == "forward":
        handle = model.model.layers[2].mlp.register_forward_pre_hook(burst)
        before = state(model)
    try:
        with kizuki.record(model) as recording, torch.no_grad():
            assert state(model) != before
            model(ids)
            if where == "block":
                raise Boom
    except Boom:
        assert where != "nowhere"
    assert state(model) == before
    if where == "forward":
        with pytest.raises(RecordError, match="did not finish"):
            recording[0]
        handle.remove()
    else:
        assert recording[2].shape == (3, 4, TOKENS, TOKENS)
    with torch.no_grad(), kizuki.record(model) as again:  # and recording still works
        model(ids)
    assert again.passes == 1
    assert again[0].shape == (3, 4, TOKENS, TOKENS)


def test_other_models_in_the_block_are_not_recorded_and_get_their_own_function():
    mine, other, ids = tiny("llama"), tiny("llama"), some_ids()
    eager = llama.eager_attention_forward
    with torch.no_grad(), kizuki.record(mine) as recording:
        mine(ids)
        kept = recording[0]
        other(ids + 1)
        given = ALL_ATTENTION_FUNCTIONS.get_interface("eager", eager)
    assert recording.passes == 1
    assert recording[0] is kept
    assert given is eager


def test_nested_and_overlapping_recordings():
    a, b, ids = tiny("llama"), tiny("gpt2"), some_ids()
    with torch.no_grad(), kizuki.record(a, layers=1) as outer:
        with kizuki.record(a, layers=[0, 2]) as inner, kizuki.record(b) as second:
            a(ids)
            b(ids[:1])
        a(ids[:, :5])
    assert (outer.passes, inner.passes, second.passes) == (2, 1, 1)
    assert (outer[1].shape, inner[2].shape) == ((3, 4, 5, 5), (3, 4, TOKENS, TOKENS))
    assert second[2].shape == (1, 4, TOKENS, TOKENS)
    assert not getattr(AttentionInterface.get_interface, "_kizuki", False)


def test_two_threads_record_the_same_model_each_its_own_passes():
    model, ids, found = tiny("llama"), some_ids(), {}
    together = threading.Barrier(2, timeout=20)

    def work(tokens):
        with torch.no_grad(), kizuki.record(model) as recording:
            together.wait()
            for _ in range(20):
                model(ids[:, :tokens])
            together.wait()
        found[tokens] = (recording.passes, recording[2].shape[-1], recording[2][...].sum().item())

    threads = [threading.Thread(target=work, args=(n,)) for n in (5, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: found[n][:2] for n in found} == {5: (20, 5), 11: (20, 11)}
    assert found[11][2] == pytest.approx(3 * 4 * 11)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [tf.StaticCache, tf.DynamicCache])
def test_one_more_step_behind_a_cache(kind, mode):
    model, ids = tiny("llama", "sdpa"), some_ids()
    with mode():
        cache = kind(config=model.config, max_cache_len=32) if kind is tf.StaticCache else kind(config=model.config)
        with kizuki.record(model) as recording:
            model(ids, cache=cache)
            prompt, rows = recording[1], recording[1][...].clone()
            model(ids[:, :1], cache=cache)
            step, keys = recording[1], recording[1].key
            assert step.shape == (3, 4, 1, TOKENS + 1)
            assert torch.equal(keys[:, :, :TOKENS], prompt.key)
            truth = oracle.plain(step.query, keys, dtype=torch.float64)[0]
            assert_accurate(step[...], truth, oracle.plain(step.query, keys)[0])
            model(ids[:, 1:4], cache=cache)  # three at once: lower right
            assert recording.rule(1) == "causal"
            assert recording[1].shape == (3, 4, 3, TOKENS + 4)
            assert torch.equal(recording[1][...] > 0, torch.as_tensor(oracle.causal(3, TOKENS + 4, "lower_right")).expand(3, 4, -1, -1))
        assert torch.equal(prompt[...], rows)  # a cache written in place did not reach what was kept


def test_generate_leaves_its_last_step():
    model = tiny("llama", "sdpa")
    with kizuki.record(model) as recording:
        model.generate(some_ids(2, 6), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert recording.passes == 3
    assert recording[0].shape == (2, 4, 1, 8)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_documents_do_not_leak(attention):
    model, ids = tiny("llama", attention), some_ids(2, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6, 0, 1]])
    with torch.no_grad(), kizuki.record(model) as recording:
        model(ids, position_ids=positions, use_cache=False)
    assert recording.rule(0) == "causal & documents"
    documents = (positions == 0).cumsum(-1)
    seen = (documents[:, :, None] == documents[:, None]) & torch.as_tensor(oracle.causal(9, 9))
    assert torch.equal(recording[0][...] > 0, seen[:, None].expand(2, 4, 9, 9))


def test_rules_of_masks_by_brute_force():
    torch.manual_seed(2)
    for _ in range(15):
        queries, keys = (int(n) for n in torch.randint(1, 9, (2,)))
        queries = min(queries, keys)
        own = torch.arange(queries)[:, None] + keys - queries
        j = torch.arange(keys)[None]
        left, right = (int(n) for n in torch.randint(0, 9, (2,)))
        real = torch.rand(2, 1, 1, keys) < 0.7
        for shape in (j <= own, j >= own - left, (j >= own - left) & (j <= own), (j >= own - left) & (j <= own + right)):
            for pad in (real, torch.ones_like(real)):
                mask = shape & pad
                absent = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
                for given in (mask, absent):
                    found = rule.from_tensor(given, 2, queries, keys)
                    matrix = kizuki.attend(
                        torch.ones(2, 1, queries, 1), torch.ones(2, 1, found.stop, 1), mask=found.mask(queries)
                    )
                    assert torch.equal(matrix[...] > 0, mask[..., : found.stop])
                    assert not mask[..., found.stop :].any()


def test_flex_block_masks_have_a_rule():
    mask = create_block_mask(lambda b, h, q, k: (k <= q) & (k > q - 4), 2, None, 9, 9, device="cpu")
    assert str(rule.from_function(mask.mask_mod, 2, 9, 9, "cpu")) == "causal & window(3, 0)"


def custom(**changes):
    def attention(module, query, key, value, mask, **kwargs):
        kwargs |= {k: v for k, v in changes.items() if k != "factor"}
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value * changes.get("factor", 1), mask, **kwargs)

    return attention


@pytest.fixture
def registered():
    """Names under which a test's own attention functions stand in transformers' table, for its time."""
    names = {"kz_open": custom(is_causal=False), "kz_causal": custom(), "kz_odd": custom(factor=1.05)}
    for name, function in names.items():
        AttentionInterface.register(name, function)
    yield
    for name in names:
        del AttentionInterface._global_mapping[name]


@pytest.mark.parametrize(("name", "expected"), [("kz_open", "all keys"), ("kz_causal", "causal")])
def test_a_custom_function_without_a_mask_is_asked_by_its_output(registered, name, expected):
    model = tiny("llama", "sdpa")
    model.set_attn_implementation(name)
    with torch.no_grad(), kizuki.record(model) as recording:
        model(some_ids())
    assert recording.rule(1) == expected


def refusal(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_attention_that_is_not_the_formula_is_refused(registered):
    model = tiny("llama", "sdpa")
    model.set_attn_implementation("kz_odd")
    with torch.no_grad(), kizuki.record(model) as recording:
        model(some_ids())
    with pytest.raises(RecordError, match="does not give this layer's own output") as error:
        recording[1]
    assert refusal(error).startswith("recording[1]: model.layers.1.self_attn: ")


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.linspace(-1, 1, 81).reshape(1, 1, 9, 9).expand(2, 1, 9, 9), "adds numbers to the scores"),
        (torch.where(torch.arange(162).reshape(2, 1, 9, 9) % 5 > 0, 0, -torch.inf), "none of causal, window"),
        (torch.where(torch.arange(324).reshape(1, 4, 9, 9) % 5 > 0, 0, -torch.inf), "differs from head to head"),
        (torch.ones(2, 1, 9, 9, dtype=torch.int64), "is torch.int64"),
    ],
)
def test_masks_without_a_rule_are_refused_and_the_pass_goes_on(mask, says):
    model, ids = tiny("llama"), some_ids(2, 9)
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
        with kizuki.record(model) as recording:
            assert torch.equal(model(ids, attention_mask=mask).logits, plain)
    with pytest.raises(RecordError, match=says) as error:
        recording[0]
    refusal(error)


@pytest.mark.parametrize(
    ("cls", "config", "says"),
    [
        (tf.AlbertModel, tf.AlbertConfig(**SMALL, embedding_size=12), "ran more than once in one pass"),
        (
            tf.GPT2LMHeadModel,
            tf.GPT2Config(vocab_size=97, n_embd=24, n_layer=2, n_head=4, reorder_and_upcast_attn=True),
            "went by without this layer's attention function",
        ),
        (
            tf.T5EncoderModel,
            tf.T5Config(vocab_size=97, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4),
            "learned position bias",
        ),
    ],
)
def test_layers_that_cannot_be_shown_say_so_when_read(cls, config, says):
    model = build(cls, config)
    with torch.no_grad(), kizuki.record(model) as recording:
        model(some_ids())
    with pytest.raises(RecordError, match=says) as error:
        recording[0]
    refusal(error)


BART = tf.BartConfig(
    vocab_size=97, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (lambda: build(tf.BloomForCausalLM, tf.BloomConfig(vocab_size=97, hidden_size=24, n_layer=2, n_head=4)), {}, "BloomForCausalLM has no attention layer"),
        (lambda: build(tf.BartModel, BART), {}, r"2 stacks .* kizuki.record\(model.encoder\)"),
        (lambda: torch.nn.Linear(2, 2), {}, "Linear has no attention layer"),
        (lambda: "smollm2", {}, "model is a str"),
        (lambda: torch.compile(torch.nn.Linear(2, 2)), {}, "compiled"),
        (lambda: tiny("llama"), {"layers": 3}, "layers holds 3 but the model has 3 layers, 0 … 2"),
        (lambda: tiny("llama"), {"layers": []}, "layers is empty"),
        (lambda: tiny("llama"), {"layers": [True]}, "layers holds True"),
        (lambda: tiny("llama"), {"heads": -1}, "heads holds -1 but the model has 4 heads, 0 … 3"),
        (lambda: tiny("llama"), {"heads": 1.5}, "heads is a float"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_refused_at_once(make, options, says):
    with pytest.raises(RecordError, match=says) as error, kizuki.record(make(), **options):
        pass
    refusal(error)
    assert not getattr(AttentionInterface.get_interface, "_kizuki", False)


def test_a_part_of_an_encoder_decoder_is_recorded_by_itself():
    model, ids = build(tf.BartModel, BART), some_ids(2, 9)
    for part, shape in ((model.encoder, (2, 4, 9, 9)), (model.decoder, (2, 4, 5, 5))):
        with torch.no_grad(), kizuki.record(part) as recording:
            model(input_ids=ids, decoder_input_ids=ids[:, :5])
        assert [recording[layer].shape for layer in recording] == [shape, shape]


def test_what_was_not_recorded_cannot_be_read():
    model = tiny("llama")
    with kizuki.record(model, layers=[0, 2]) as recording:
        pass
    with pytest.raises(RecordError, match="no forward pass"):
        recording[0]
    with pytest.raises(RecordError, match="layer 1 was not recorded; recorded are 0, 2"):
        recording[1]
    assert (len(recording), list(recording), 1 in recording) == (2, [0, 2], False)


@pytest.mark.parametrize("heads", [[0], [1, 2], [0, 1], [0, 2], [0, 1, 2], [3]])
def test_chosen_heads_are_those_of_the_whole(heads):
    model, ids = tiny("llama"), some_ids()
    with torch.no_grad(), kizuki.record(model) as whole, kizuki.record(model, heads=heads) as part:
        model(ids)
    assert part.heads == tuple(heads)
    assert torch.equal(part[1][...], whole[1][...][:, heads])
    group = 4 // whole.value(1).shape[1]
    per = len(heads) // part.value(1).shape[1]
    for k, head in enumerate(heads):
        assert torch.equal(part.value(1)[:, k // per], whole.value(1)[:, head // group])


def test_memory_grows_with_the_tokens_and_tensors_are_the_models_own():
    model, n = tiny("mistral"), 60
    real = torch.ones(2, n, dtype=torch.int64)
    real[0, :7] = 0
    kept, hooks = [], []
    for layer in model.model.layers:
        hooks.append(layer.self_attn.v_proj.register_forward_hook(lambda m, a, out: kept.append(out)))
    with torch.no_grad(), kizuki.record(model) as recording:
        model(some_ids(2, n), attention_mask=real, use_cache=False)
    for layer in recording:
        capture = recording._captures[layer]
        assert isinstance(capture, recordings.Capture)
        assert capture.value.data_ptr() == kept[layer].data_ptr()
        (found,) = capture.rules
        held = [t for t in (capture.sample, found.keys, found.documents) if t is not None]
        assert sum(t.numel() for t in held) <= 2 * 4 * 3 * 6 + 2 * n
    assert str(recording.rule(0)) == "causal & window(4, 0) & keys"


def test_training_keeps_its_gradients_and_dropout_is_not_in_the_weights():
    config = tf.LlamaConfig(**GROUPED, attention_dropout=0.5)
    model, ids = build(tf.LlamaForCausalLM, config).train(), some_ids()
    torch.manual_seed(3)
    model(ids, labels=ids).loss.backward()
    plain = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    torch.manual_seed(3)
    with kizuki.record(model) as recording:
        model(ids, labels=ids).loss.backward()
    assert all(torch.equal(weight.grad, plain[name]) for name, weight in model.named_parameters())
    assert float(recording[0][...].max()) <= 1
    assert recording[0][...].sum(-1) == pytest.approx(torch.ones(3, 4, TOKENS))


def test_tensors_that_were_written_over_are_refused():
    model = tiny("llama")
    with torch.no_grad(), kizuki.record(model) as recording:
        model(some_ids())
        recording._captures[0].key.zero_()
        with pytest.raises(RecordError, match="written over"):
            recording[0]
