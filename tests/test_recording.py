"""What a recording holds and refuses: caches, packed documents, masks, heads, memory, training."""

from __future__ import annotations

import oracle
import pytest
import torch
import transformers as tf
from tiny import GROUPED, SMALL, TOKENS, behind, build, some_ids, tiny
from tolerance import assert_accurate
from torch.nn.attention.flex_attention import create_block_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import kizuki
from kizuki.models import RecordError, rule
from kizuki.models import recording as recordings


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [tf.StaticCache, tf.DynamicCache])
def test_one_more_step_behind_a_cache(kind, mode):
    model, ids = tiny("llama", "sdpa"), some_ids()
    with mode():
        cache = (
            kind(config=model.config, max_cache_len=32)
            if kind is tf.StaticCache
            else kind(config=model.config)
        )
        with kizuki.record(model) as recording:
            model(ids, **behind(cache))
            prompt, rows = recording[1], recording[1][...].clone()
            model(ids[:, :1], **behind(cache))
            step, keys = recording[1], recording[1].key
            assert step.shape == (3, 4, 1, TOKENS + 1)
            assert torch.equal(keys[:, :, :TOKENS], prompt.key)
            truth = oracle.plain(step.query, keys, dtype=torch.float64)[0]
            assert_accurate(step[...], truth, oracle.plain(step.query, keys)[0])
            model(ids[:, 1:4], **behind(cache))  # three at once: lower right
            assert recording.rule(1) == "causal"
            assert recording[1].shape == (3, 4, 3, TOKENS + 4)
            assert torch.equal(
                recording[1][...] > 0,
                torch.as_tensor(oracle.causal(3, TOKENS + 4, "lower_right")).expand(3, 4, -1, -1),
            )
        cache.reset()
        model(ids + 1, **behind(cache))
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
        for shape in (
            j <= own,
            j >= own - left,
            (j >= own - left) & (j <= own),
            (j >= own - left) & (j <= own + right),
        ):
            for pad in (real, torch.ones_like(real)):
                mask = shape & pad
                absent = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
                for given in (mask, absent):
                    found = rule.from_tensor(given, 2, queries, keys)
                    matrix = kizuki.attend(
                        torch.ones(2, 1, queries, 1),
                        torch.ones(2, 1, found.stop, 1),
                        mask=found.mask(queries),
                    )
                    assert torch.equal(matrix[...] > 0, mask[..., : found.stop])
                    assert not mask[..., found.stop :].any()


def test_flex_block_masks_have_a_rule():
    mask = create_block_mask(lambda b, h, q, k: (k <= q) & (k > q - 4), 2, None, 9, 9, device="cpu")
    assert str(rule.from_function(mask.mask_mod, 2, 9, 9, "cpu")) == "causal & window(3, 0)"


def custom(**changes):
    def attention(module, query, key, value, mask, **kwargs):
        kwargs |= {k: v for k, v in changes.items() if k != "factor"}
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value * changes.get("factor", 1), mask, **kwargs
        )

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
        (torch.where(torch.arange(162).reshape(2, 1, 9, 9) % 5 > 0, 0, -torch.inf), "none of causal, window"),
        (
            torch.where(torch.arange(324).reshape(1, 4, 9, 9) % 5 > 0, 0, -torch.inf),
            "differs from head to head",
        ),
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


def test_a_mask_that_adds_numbers_is_a_bias():
    """Numbers in a mask stay, on the keys it leaves visible; what adds the same to a key in every row is kept once."""
    model, ids = tiny("llama"), some_ids(2, 9)
    seen = torch.as_tensor(oracle.causal(9, 9))
    for bias, rows in (
        (oracle.randn(2, 1, 9, 9), 9),
        (oracle.randn(2, 1, 1, 9), 1),
        (oracle.randn(1, 4, 9, 9), 9),
    ):
        mask = bias.expand(-1, -1, 9, 9).masked_fill(~seen, torch.finfo(torch.float32).min)
        with torch.no_grad():
            with kizuki.record(model) as recording:
                model(ids, attention_mask=mask)
            own = model(ids, attention_mask=mask, output_attentions=True).attentions
        for layer in recording:
            matrix = recording[layer]
            truth = oracle.plain(matrix.query, matrix.key, visible=seen, bias=bias, dtype=torch.float64)[0]
            plain = oracle.plain(matrix.query, matrix.key, visible=seen, bias=bias)[0]
            assert_accurate(matrix[...], truth, plain, "A")
            assert_accurate(own[layer], truth, plain, "the model's own weights")
            assert matrix.problem.bias.shape[2] == rows


@pytest.mark.parametrize(
    ("cls", "config", "says"),
    [
        (
            tf.GPT2LMHeadModel,
            tf.GPT2Config(vocab_size=97, n_embd=24, n_layer=2, n_head=4, reorder_and_upcast_attn=True),
            "went by without this layer's attention function",
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
        (lambda: build(tf.MPNetModel, tf.MPNetConfig(**SMALL)), {}, "MPNetModel has no attention layer"),
        (lambda: build(tf.BartModel, BART), {"layers": "tower"}, "layers holds 'tower' but the model has 6 layers"),
        (lambda: torch.nn.Linear(2, 2), {}, "Linear has no attention layer"),
        (lambda: "smollm2", {}, "model is a str"),
        (lambda: torch.compile(torch.nn.Linear(2, 2)), {}, "compiled"),
        (lambda: tiny("llama"), {"layers": 3}, "layers holds 3 but the model has 3 layers, 0 … 2"),
        (lambda: tiny("llama"), {"layers": []}, "layers is empty"),
        (lambda: tiny("llama"), {"layers": [True]}, "layers holds True"),
        (lambda: tiny("llama"), {"heads": -1}, "heads holds -1 but the model has 4 heads, 0 … 3"),
        (lambda: tiny("llama"), {"heads": 1.5}, "heads is a float"),
        (lambda: tiny("llama"), {"keep": "first"}, 'keep is .first. but must be "last", "all" or kizuki.Observe'),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_refused_at_once(make, options, says):
    with pytest.raises(RecordError, match=says) as error, kizuki.record(make(), **options):
        pass
    refusal(error)
    assert not getattr(AttentionInterface.get_interface, "_kizuki", False)


def test_a_part_of_an_encoder_decoder_is_recorded_by_itself():
    model, ids = build(tf.BartModel, BART), some_ids(2, 9)
    own, cross = (2, 4, 5, 5), (2, 4, 5, 9)
    for part, shapes in (
        (model.encoder, {0: (2, 4, 9, 9), 1: (2, 4, 9, 9)}),
        (model.decoder, {0: own, 1: own, "0.cross": cross, "1.cross": cross}),
    ):
        with torch.no_grad(), kizuki.record(part) as recording:
            model(input_ids=ids, decoder_input_ids=ids[:, :5])
        assert {layer: tuple(recording[layer].shape) for layer in recording} == shapes
    # A decoder that is given no encoder has none of the second kind.
    alone = build(tf.BartForCausalLM, BART)
    with torch.no_grad(), kizuki.record(alone) as recording:
        alone(ids)
    assert recording.layers == (0, 1)
    assert recording[1].shape == (2, 4, 9, 9)


def test_every_pass_is_kept_where_asked_for_and_the_last_otherwise():
    model, ids = tiny("llama"), some_ids()
    alone = []
    with torch.no_grad():
        with kizuki.record(model, keep="all") as recording, kizuki.record(model, heads=[1]) as last:
            for tokens in (5, 9, 4):
                model(ids[:, :tokens])
        for tokens in (5, 9, 4):
            with kizuki.record(model) as one:
                model(ids[:, :tokens])
            alone.append(one)
    assert recording.passes == last.passes == 3
    for number, one in enumerate(alone):
        for layer in recording:
            assert torch.equal(recording.pass_(number)[layer][...], one[layer][...])
    assert torch.equal(recording.pass_(-1)[2][...], recording[2][...])
    assert last.pass_(2)[2] is last[2]
    for number, says in (
        (1, "only the last pass is held"),
        (3, "3 passes ended in the block, 0 … 2"),
        (True, "0 … 2"),
    ):
        with pytest.raises(RecordError, match=says):
            last.pass_(number)
    with pytest.raises(RecordError, match=r"pass_\(-4\): 3 passes"):
        recording.pass_(-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_observing_reads_as_the_layers_run_and_keeps_no_query_or_key(mode):
    model, ids, real = tiny("mistral"), some_ids(), torch.ones(3, TOKENS, dtype=torch.int64)
    real[0, :4] = 0
    what = kizuki.Observe(topk=3, entropy=True, received=True)
    with mode():
        plain = model(ids, attention_mask=real).logits
        with kizuki.record(model, keep=what) as seen, kizuki.record(model) as held:
            assert torch.equal(model(ids, attention_mask=real).logits, plain)
    assert seen.passes == 1
    assert not seen._captures
    for layer in held:
        read, matrix = seen.observation(layer), held[layer]
        weights, keys = matrix.topk(3)
        assert torch.equal(read.topk[0], weights)
        assert torch.equal(read.topk[1], keys)
        assert torch.equal(read.entropy, matrix.entropy())
        assert torch.equal(read.received, matrix.received())
        assert not read.entropy.requires_grad
    with pytest.raises(RecordError, match=r"only what Observe reads: recording.observation\(0\)"):
        seen[0]
    with pytest.raises(RecordError, match=r"nothing was read during the pass; open the block with .*Observe"):
        held.observation(0)
    with pytest.raises(RecordError, match="layer 7 was not recorded"):
        seen.observation(7)


def test_observing_what_cannot_be_read_leaves_the_pass_alone():
    model, ids = tiny("llama"), some_ids()
    with torch.no_grad(), kizuki.record(model, keep=kizuki.Observe(pool=(99, 99))) as recording:
        model(ids)
    with pytest.raises(RecordError, match="rows is 99 but must be a whole number in 1 … 13"):
        recording.observation(0)


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
