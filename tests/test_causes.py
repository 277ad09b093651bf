"""Interventions on live models: is what is changed exactly what was asked for, and is its size right?"""

from __future__ import annotations

import copy
import json
import math
import statistics

import pytest
import torch
import transformers as tf
from tiny import GROUPED, SMALL, build, some_ids
from tolerance import assert_accurate
from transformers.models.bert import modeling_bert as bert
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.llama import modeling_llama as llama

import kizuki
from kizuki.models.causes import AblateHead, CauseError, MaskKeys, SetRow, cause, intervene

MODELS = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig(**GROUPED), llama),
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config(vocab_size=97, n_positions=64, n_embd=24, n_layer=3, n_head=4), gpt2),
    "bert": (tf.BertForMaskedLM, tf.BertConfig(**SMALL), bert),
}  # fmt: skip
IDS = some_ids(2)
WIDTH = 6  # of a head


def model_of(name: str, attention: str = "eager") -> torch.nn.Module:
    return build(*MODELS[name][:2], attention)


def logits(model: torch.nn.Module, **options) -> torch.Tensor:
    with torch.no_grad():
        cached = {} if isinstance(model, tf.BertForMaskedLM) else {"use_cache": False}
        return model(IDS, **cached, **options).logits


def close(got: torch.Tensor, model: torch.nn.Module, expected) -> None:
    """`got` is what `expected(model)` gives, which is taken in float64 and in float32."""
    wide = copy.deepcopy(model).to(torch.float64)
    assert_accurate(got, expected(wide), expected(model), "the changed logits")


def by_hand(change, query, key, value, mask, scaling, layer):
    """Attention with its whole matrix, `change(weights, layer)` before the values are mixed."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * scaling
    if mask is not None:
        scores = scores + mask
    weights = change(scores, layer)
    return (weights @ value).transpose(1, 2).contiguous(), weights


@pytest.fixture
def hand(monkeypatch):
    """Logits of a model whose attention is written out here, its scores turned to weights by `change`."""

    def run(name, model, change):
        def attention(module, query, key, value, attention_mask, scaling=None, **_):
            scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
            where = getattr(module, "layer_idx", None)
            if where is None:  # BERT's attention knows its layer only where it may cache
                where = [m for m in model.modules() if type(m) is type(module)].index(module)
            return by_hand(change, query, key, value, attention_mask, scale, where)

        with monkeypatch.context() as patch:
            patch.setattr(MODELS[name][2], "eager_attention_forward", attention)
            return logits(model)

    return run


def output_projections(name: str, model: torch.nn.Module) -> list[torch.nn.Module]:
    ending = {"llama": "self_attn.o_proj", "gpt2": "attn.c_proj", "bert": "attention.output.dense"}[name]
    return [module for path, module in model.named_modules() if path.endswith(ending)]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_a_head_at_zero_is_its_slice_of_the_output_weights_at_zero(name, attention):
    model = model_of(name, attention)
    plain = logits(model)
    with intervene(model, AblateHead(1, 2)):
        got = logits(model)
    assert not torch.equal(got, plain)

    def expected(whole):
        whole = copy.deepcopy(whole)
        weight = output_projections(name, whole)[1].weight
        own = slice(2 * WIDTH, 3 * WIDTH)
        with torch.no_grad():
            (weight if name == "gpt2" else weight.T)[own] = 0
        return logits(whole)

    close(got, model, expected)
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("name", MODELS)
def test_a_head_at_its_mean_is_its_mean_over_the_queries_before_the_output_weights(name):
    model = model_of(name)
    with intervene(model, AblateHead(2, 0, to="mean")):
        got = logits(model)

    def flat(module, args):
        mixed = args[0].clone()
        mixed[..., :WIDTH] = mixed[..., :WIDTH].mean(1, keepdim=True)
        return (mixed,)

    def expected(whole):
        hook = output_projections(name, whole)[2].register_forward_pre_hook(flat)
        try:
            return logits(whole)
        finally:
            hook.remove()

    close(got, model, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_a_key_hidden_everywhere_is_the_model_s_own_padding_there(name, attention):
    model = model_of(name, attention)
    real = torch.ones_like(IDS)
    real[:, 4] = 0
    with intervene(model, MaskKeys(4)):
        got = logits(model)
    close(got, model, lambda whole: logits(whole, attention_mask=real))


@pytest.mark.parametrize("name", MODELS)
def test_keys_hidden_from_some_heads_of_some_layers(name, hand):
    model = model_of(name)
    with intervene(model, MaskKeys((1, 5), layers=(0, 2), heads=(1, 3))):
        got = logits(model)

    def change(scores, layer):
        if layer in (0, 2):
            scores = scores.clone()
            for head in (1, 3):
                scores[:, head, :, [1, 5]] = -math.inf
        return scores.softmax(-1)

    close(got, model, lambda whole: hand(name, whole, change))


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_an_edited_row_is_mixed_as_it_stands(name, renormalise, hand):
    model = model_of(name)
    with intervene(model, SetRow(1, 3, 9, {2: 0.7, 5: 0.0}, renormalise)):
        got = logits(model)

    def change(scores, layer):
        weights = scores.softmax(-1)
        if layer == 1:
            weights[:, 3, 9, 2], weights[:, 3, 9, 5] = 0.7, 0.0
            if renormalise:
                weights[:, 3, 9] /= weights[:, 3, 9].sum(-1, keepdim=True)
        return weights

    close(got, model, lambda whole: hand(name, whole, change))


def test_several_edits_at_once(hand):
    model = model_of("llama")
    with intervene(
        model, AblateHead(1, 0), SetRow(1, 1, 6, {0: 1.0}), SetRow(1, 1, 7, {0: 0.5}), MaskKeys(3, 2)
    ):
        got = logits(model)

    def change(scores, layer):
        if layer == 2:
            scores = scores.clone()
            scores[..., 3] = -math.inf
        weights = scores.softmax(-1)
        if layer == 2:
            weights = weights.nan_to_num(0)
        if layer == 1:
            weights[:, 0] = 0
            weights[:, 1, 6, 0], weights[:, 1, 7, 0] = 1.0, 0.5
        return weights

    close(got, model, lambda whole: hand("llama", whole, change))


def test_a_query_left_without_keys_gets_nothing():
    model = model_of("llama")
    with intervene(model, MaskKeys(0, 1)), torch.no_grad():
        hooked = []
        hook = output_projections("llama", model)[1].register_forward_pre_hook(
            lambda _, args: hooked.append(args[0])
        )
        model(IDS, use_cache=False)
        hook.remove()
    assert not hooked[0][:, 0].any()
    assert hooked[0][:, 1].any()


@pytest.mark.parametrize("name", MODELS)
def test_a_head_that_writes_nothing_changes_nothing(name):
    model = model_of(name)
    with torch.no_grad():
        for path, module in model.named_modules():
            own = slice(WIDTH, 2 * WIDTH)  # of head 1; Llama's key head 1 serves heads 2 and 3
            if path.endswith(("layers.1.self_attn.v_proj", "layer.1.attention.self.value")):
                module.weight[own] = 0
                if module.bias is not None:
                    module.bias[own] = 0
            elif path.endswith("h.1.attn.c_attn"):
                module.weight[:, 2 * 24 + WIDTH : 2 * 24 + 2 * WIDTH] = 0
                module.bias[2 * 24 + WIDTH : 2 * 24 + 2 * WIDTH] = 0
    head = 2 if name == "llama" else 1
    for edit in (AblateHead(1, head), AblateHead(1, head, "mean"), SetRow(1, head, 8, {1: 0.9})):
        found = cause(model, IDS[:1], edit, position=8)
        assert (found.kl, found.moved) == (0.0, 0.0)
        assert found.before == found.after
        assert found.control.mean > 0


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_are_those_of_the_whole_logits(name):
    model = model_of(name)
    edit = AblateHead(0, 1)
    found = cause(model, IDS[:1], edit, position=7, tokens=(11, 12), controls=2, seed=3)
    before = logits(model)[0, 7].double()
    with intervene(model, edit):
        after = logits(model)[0, 7].double()
    p, q = before.softmax(-1), after.softmax(-1)
    kl = sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q, strict=True))
    assert found.kl == pytest.approx(kl, rel=1e-4)
    assert [token for token, _, _ in found.after] == after.topk(5).indices.tolist()
    assert [share for _, _, share in found.before] == pytest.approx(p.topk(5).values.tolist(), rel=1e-5)
    assert found.logit_difference == pytest.approx(
        (float(before[11] - before[12]), float(after[11] - after[12])), rel=1e-4
    )
    assert found.tokens == ((11, "11"), (12, "12"))
    assert found.control.kind == "other heads of layer 0"
    assert len(found.control.drawn) == 2
    assert 1 not in found.control.drawn
    alone = [
        cause(model, IDS[:1], AblateHead(0, head), position=7, controls=0).kl for head in found.control.drawn
    ]
    assert list(found.control.kl) == alone
    assert (found.control.mean, found.control.sd) == (statistics.fmean(alone), statistics.stdev(alone))
    assert found.above == sum(each >= found.kl for each in alone)
    again = cause(model, IDS[:1], edit, position=7, tokens=(11, 12), controls=2, seed=3)
    assert again == found


def test_control_keys_are_those_that_the_position_sees():
    model = model_of("gpt2")
    found = cause(model, IDS[:1], MaskKeys(2), position=4)
    assert (found.control.kind, found.control.drawn) == ("other keys", (0, 1, 3, 4))
    pairs = cause(model, IDS[:1], MaskKeys((2, 3)), position=4, controls=50).control.drawn
    assert set(pairs) <= {(0, 1), (0, 4), (1, 4)}
    encoder = cause(model_of("bert"), IDS[:1], MaskKeys(2, layers=1), position=4, controls=99)
    assert encoder.control.drawn == (0, 1, *range(3, 13))


def test_a_model_without_predictions_says_how_far_its_state_moved():
    model = build(tf.BertModel, tf.BertConfig(**SMALL))
    found = cause(model, IDS[:1], AblateHead(2, 1), position=0)
    with torch.no_grad():
        before = model(IDS[:1])[0][0, 0]
        with intervene(model, AblateHead(2, 1)):
            after = model(IDS[:1])[0][0, 0]
    assert found.kl is None
    assert found.before == []
    assert found.moved == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-5)
    assert found.size == found.moved
    assert found.control.mean > 0


def test_a_recording_around_holds_what_the_model_s_function_gave():
    model = model_of("llama", "sdpa")
    with torch.no_grad(), kizuki.record(model) as plain:
        model(IDS, use_cache=False)
    with torch.no_grad(), kizuki.record(model) as recording, intervene(model, AblateHead(0, 1)):
        model(IDS, use_cache=False)
    assert recording.checked(0)
    assert torch.equal(recording[0].dense(), plain[0].dense())
    assert not torch.equal(recording[1].dense(), plain[1].dense())  # it read another stream


def test_an_exception_in_the_block_leaves_everything_as_it_was():
    from transformers.modeling_utils import AttentionInterface

    model = model_of("gpt2")
    plain, table = logits(model), AttentionInterface.get_interface
    with (
        pytest.raises(CauseError, match="head is 9 but layer 1 has 4 heads"),
        intervene(model, AblateHead(1, 9)),
    ):
        logits(model)
    assert AttentionInterface.get_interface is table
    assert not model._forward_pre_hooks
    assert torch.equal(logits(model), plain)


def test_a_model_of_nan_has_no_effect_to_show():
    model = model_of("gpt2")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = float("nan")
    with pytest.raises(CauseError, match="the model as it is gives NaN or Inf at position"):
        cause(model, IDS[:1], AblateHead(1, 0), position=8, controls=2)


def test_attention_that_goes_by_another_way_is_refused():
    model = build(tf.BloomForCausalLM, tf.BloomConfig(vocab_size=97, hidden_size=24, n_layer=2, n_head=4))
    with pytest.raises(CauseError, match="layer 1 did not go by transformers' attention interface"):
        cause(model, IDS[:1], AblateHead(1, 0))


BAD = {
    "layer": (AblateHead(7, 0), {}, "layer is 7 but the model has 3 layers: 0, 1, 2"),
    "head": (AblateHead(0, 4), {}, "head is 4 but layer 0 has 4 heads"),
    "negative head": (AblateHead(0, -1), {}, "head is -1 but must be a whole number from 0 up"),
    "to": (AblateHead(0, 0, "max"), {}, "to is 'max' but must be 'zero' or 'mean'"),
    "key": (MaskKeys(13), {}, "key is 13 but the pass has 13"),
    "no keys": (MaskKeys(()), {}, "keys is empty"),
    "query": (SetRow(0, 0, 13, {0: 1.0}), {}, "query is 13 but the pass has 13"),
    "hidden key": (SetRow(0, 0, 3, {4: 0.5}), {}, "key 4 is hidden from query 3 by the model's mask"),
    "negative weight": (SetRow(0, 0, 3, {2: -0.5}), {}, "the weight of key 2 is -0.5"),
    "no weights": (SetRow(0, 0, 3, {}), {}, "weights is empty"),
    "nothing left": (SetRow(0, 0, 0, {0: 0.0}, True), {}, "sums to 0 and cannot be renormalised"),
    "position": (AblateHead(0, 0), {"position": 13}, "position is 13 but the text has 13 tokens"),
    "words": (AblateHead(0, 0), {"tokens": (" he", " she")}, "tokens are words"),
    "token": (AblateHead(0, 0), {"tokens": (3, 97)}, "token 97 is not in the vocabulary of 97"),
    "one token": (AblateHead(0, 0), {"tokens": (3,)}, "tokens holds 1 but must be two"),
    "controls": (AblateHead(0, 0), {"controls": -1}, "controls is -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line(name):
    edit, options, expected = BAD[name]
    with pytest.raises(CauseError, match=expected) as error:
        cause(model_of("gpt2"), IDS[:1], edit, **options)
    assert "\n" not in str(error.value)


def test_what_does_not_fit_together_is_refused():
    model = model_of("gpt2")
    changed = intervene(model, AblateHead(1, 0), MaskKeys(2))
    with pytest.raises(CauseError, match="both change one head of layer 1"), changed:
        pass
    with (
        pytest.raises(CauseError, match="must be AblateHead, MaskKeys or SetRow"),
        intervene(model, "head 3"),
    ):
        pass
    with torch.no_grad():
        cache = model(IDS, use_cache=True)["past_key_values"]
    with pytest.raises(CauseError, match="use_cache=False"), intervene(model, AblateHead(1, 0)):
        model(IDS[:, :1], cache)
    with pytest.raises(CauseError, match="training mode"):
        cause(model.train(), IDS[:1], AblateHead(1, 0))


@pytest.mark.model
def test_the_command_line_says_what_cause_says(capsys):
    from kizuki import cli
    from kizuki.models import load

    text = "Mika gave the key to Tomas."
    with pytest.raises(SystemExit) as stopped:
        cli.main(
            ["cause", text, "--model", "minilm", "--layer", "2", "--head", "3", "--controls", "3", "--json"]
        )
    assert stopped.value.code == 0
    said = json.loads(capsys.readouterr().out)
    found = cause(load("minilm"), text, AblateHead(2, 3), controls=3)
    assert said["moved"] == found.moved
    assert said["control"]["kl"] == list(found.control.kl)
    assert said["kl"] is None
    with pytest.raises(SystemExit) as stopped:
        cli.main(["cause", text, "--model", "minilm", "--layer", "2", "--head", "3", "--mask-key", "1,2"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert "keys 1, 2 hidden in layer 2, head 3; seen at token" in out
    assert "an example, not a finding" in out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--layer", "1"], "give both, or hide a key"),
        (["--layer", "1", "--head", "0", "--set", "nonsense"], "write QUERY,KEY=WEIGHT"),
        (["--layer", "1", "--head", "0", "--set", "1,0=1", "--set", "2,0=1"], "edits one row"),
        (["--mask-key", "1", "--mean"], "--mean is for a whole head"),
        (["--mask-key", "1", "--set", "1,0=1"], "use one of them"),
        (["--layer", "1", "--head", "0", "--renormalise"], "--renormalise is for --set"),
        (["--layer", "1", "--head", "0", "--tokens", "he"], "give two, with a comma"),
    ],
)
def test_options_that_do_not_fit_are_one_line(args, expected, capsys):
    from kizuki import cli

    with pytest.raises(SystemExit) as stopped:
        cli.main(["cause", "Mika laughed.", "--model", "no-such-model", *args])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_what_the_position_never_sees_is_no_cause(name):
    """Rounding would be all its effect; an encoder sees what stands behind, too."""
    model = model_of(name)
    ids = IDS[:1]
    for edit in (MaskKeys((5,), layers=1), SetRow(1, 0, query=6, weights={0: 1.0})):
        if name == "bert":
            assert cause(model, ids, edit, position=4, controls=0).size > 1e-9
            continue
        with pytest.raises(CauseError, match=r"position 4.* never .*choose an earlier"):
            cause(model, ids, edit, position=4, controls=0)
    assert cause(model, ids, MaskKeys((2, 5), layers=1), position=4, controls=0).size > 1e-9


def test_controls_of_hidden_keys_are_keys_that_the_position_sees():
    """In the last layer of a window of 3, position 9 sees keys 7, 8 and 9; elsewhere more reaches it."""
    config = tf.MistralConfig(**GROUPED, sliding_window=3)
    model, ids = build(tf.MistralForCausalLM, config, "eager"), IDS[:1]
    last = config.num_hidden_layers - 1
    found = cause(model, ids, MaskKeys(8, layers=last), position=9, controls=5).control
    assert found.drawn == (7, 9)
    assert min(found.kl) > 1e-9
    with pytest.raises(
        CauseError, match=f"position 9 never sees key 0 in layer {last}, behind which no layer comes"
    ):
        cause(model, ids, MaskKeys(0, layers=last), position=9)
    assert cause(model, ids, MaskKeys(6, layers=0), position=9, controls=0).size > 1e-9, (
        "by the layers behind"
    )
    assert cause(model, ids, MaskKeys((8, 8), layers=last), position=9, controls=5).control.drawn == (7, 9)
    model = model_of("llama")
    beyond = cause(model, ids, MaskKeys((2, 9), layers=0), position=4, controls=9).control
    assert beyond.drawn == (0, 1, 3, 4), "of two hidden keys it sees one"
