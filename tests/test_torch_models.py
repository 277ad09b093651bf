"""Models of plain PyTorch: functions, modules with their fast path, attention named by `note`."""

from __future__ import annotations

import copy
import math
import sys
import threading
import types

import oracle
import pytest
import torch
from tolerance import assert_accurate
from torch import nn
from torch.nn import functional as F

import kizuki
from kizuki.models import RecordError, note

ENTRIES = [
    (F, "scaled_dot_product_attention"),
    (F, "multi_head_attention_forward"),
    (torch, "_native_multi_head_attention"),
    (torch, "_transformer_encoder_layer_fwd"),
    (sys.modules[kizuki.scaled_dot_product_attention.__module__], "scaled_dot_product_attention"),
    (kizuki, "scaled_dot_product_attention"),
    (kizuki, "attention"),
    (sys.modules[kizuki.attention.__module__], "attention"),
]
WIDTH = 16
X, Y = oracle.randn(3, 7, WIDTH), oracle.randn(3, 5, WIDTH, seed=1)
PAD = torch.zeros(3, 7, dtype=torch.bool)
PAD[0, 5:], PAD[1, 6:] = True, True
CAUSAL = nn.Transformer.generate_square_subsequent_mask(7)


def fresh(model: nn.Module) -> nn.Module:
    """In eval mode, with weights that make attention uneven."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.4, generator=generator)
    return model.eval()


def held() -> list[object]:
    return [getattr(home, name) for home, name in ENTRIES]


def run(model, *args, **given):
    """Its recording, once its output was found to have the bits of the unrecorded model."""
    before = held()
    plain = model(*args, **given)
    with kizuki.record(model) as recording:
        recorded = model(*args, **given)
    plain, recorded = (x[0] if isinstance(x, tuple) else x for x in (plain, recorded))
    assert torch.equal(recorded, plain)
    assert held() == before
    assert recording.passes == 1
    return recording


@pytest.fixture
def fused(monkeypatch):
    """How often each fused function of the fast path ran."""
    times = {"_native_multi_head_attention": 0, "_transformer_encoder_layer_fwd": 0}

    def counting(name, function):
        def counted(*args, **kwargs):
            times[name] += 1
            return function(*args, **kwargs)

        return counted

    for name in times:
        monkeypatch.setattr(torch, name, counting(name, getattr(torch, name)))
    return times


def encoder(**options):
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True, **options)
    return fresh(nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options.get("norm_first")))


def own_weights(model, x, dtype, **given):
    """The weights of each layer by nn.MultiheadAttention's own slow path, and what each layer makes of its input."""
    model, x = copy.deepcopy(model).to(dtype), x.to(dtype)
    mask, padding = given.get("mask"), given.get("src_key_padding_mask")
    made = []
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for layer in model.layers:
            inner = layer.norm1(x) if layer.norm_first else x
            made.append(
                layer.self_attn(
                    inner, inner, inner, attn_mask=mask if mask is None else mask.to(dtype), average_attn_weights=False,
                    key_padding_mask=padding if padding is None or mask is None else
                    torch.zeros_like(padding, dtype=dtype).masked_fill(padding, -torch.inf),
                )[1]
            )  # fmt: skip
            x = layer(x, src_mask=mask if mask is None else mask.to(dtype), src_key_padding_mask=padding)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    return made


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"src_key_padding_mask": PAD},
        {"mask": CAUSAL, "is_causal": True},
        {"mask": CAUSAL, "src_key_padding_mask": PAD},
    ],
)
@pytest.mark.filterwarnings("ignore:Support for mismatched", "ignore:The PyTorch API of nested")
def test_an_encoder_keeps_its_fast_path_and_shows_what_it_read(fused, options, given):
    model = encoder(**options)
    with torch.no_grad():
        recording = run(model, X, **given)
        assert fused["_transformer_encoder_layer_fwd"] == 4  # two layers, plain and recorded
        truth = own_weights(model, X, torch.float64, **given)
        plain = own_weights(model, X, torch.float32, **given)
        alone = []  # the same in float32 once more, one text at a time: sums come out rounded otherwise
        for b in range(3):
            padding = {"src_key_padding_mask": PAD[b : b + 1]} if "src_key_padding_mask" in given else {}
            alone.append(own_weights(model, X[b : b + 1], torch.float32, **{**given, **padding}))
    assert recording.layers == (0, 1)
    real = ~given.get("src_key_padding_mask", torch.zeros_like(PAD))
    nested = "src_key_padding_mask" in given and "mask" not in given and not options.get("norm_first")
    for layer in recording:
        got = recording[layer][...]
        assert recording.checked(layer)
        assert not got[~real[:, None, None].expand_as(got)].any()
        if nested:  # a row of padding does not exist in a nested tensor
            assert not got[~real[:, None, :, None].expand_as(got)].any()
        rows = real[:, None, :, None] if nested or layer else torch.ones_like(real)[:, None, :, None]
        plains = [plain[layer] * rows, torch.cat([one[layer] for one in alone]) * rows]
        assert_accurate(got * rows, truth[layer] * rows, plains, f"layer {layer}")


def test_one_encoder_layer_by_itself_keeps_its_fast_path(fused):
    model = encoder().layers[0]
    with torch.no_grad():
        recording = run(model, X, src_key_padding_mask=PAD)
    assert fused["_transformer_encoder_layer_fwd"] == 2
    assert recording.rule(0) == "keys"
    assert recording.layers == (0,)


def test_the_slow_path_of_an_encoder_is_pytorchs_function():
    recording = run(encoder(), X, mask=CAUSAL, is_causal=True)  # grad is on
    assert {recording.rule(layer) for layer in recording} == {"causal"}
    assert recording[1].shape == (3, 4, 7, 7)


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 8, "vdim": 12}]
)
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_shows_the_weights_it_returns(options, need_weights):
    model = fresh(nn.MultiheadAttention(WIDTH, 4, batch_first=True, **options))
    key, value = (oracle.randn(3, 7, options.get(name, WIDTH), seed=2) for name in ("kdim", "vdim"))
    given = {"need_weights": need_weights, "average_attn_weights": False, "key_padding_mask": PAD}
    with torch.no_grad():
        recording = run(model, Y, key, value, **given)
        given["need_weights"] = True
        plain = model(Y, key, value, **given)[1]
        double = copy.deepcopy(model).double()
        truth = double(Y.double(), key.double(), value.double(), **given)[1]
    assert recording.checked(0)
    assert_accurate(recording[0][...], truth, plain, "A")


def test_multihead_attention_on_its_fast_path_unbatched_and_with_a_mask_a_head(fused):
    model = fresh(nn.MultiheadAttention(WIDTH, 4, batch_first=True))
    with torch.no_grad():
        recording = run(model, X, X, X, key_padding_mask=PAD)
        assert fused["_native_multi_head_attention"] == 2
        assert recording.rule(0) == "keys"
        plain = model(X, X, X, key_padding_mask=PAD, average_attn_weights=False)[1]
        double, x = copy.deepcopy(model).double(), X.double()
        assert_accurate(
            recording[0][...],
            double(x, x, x, key_padding_mask=PAD, average_attn_weights=False)[1],
            plain,
            "A",
        )
        assert run(model, X[0], X[0], X[0])[0].shape == (1, 4, 7, 7)
        mask = oracle.randn(12, 7, 7)  # [batch · heads, queries, keys], added to the scores
        recording = run(model, X, X, X, attn_mask=mask)
        plain = model(X, X, X, attn_mask=mask, average_attn_weights=False)[1]
        truth = double(x, x, x, attn_mask=mask.double(), average_attn_weights=False)[1]
        assert_accurate(recording[0][...], truth, plain, "A")


def test_a_transformer_names_its_stacks():
    model = fresh(nn.Transformer(WIDTH, 4, 1, 2, 32, batch_first=True))
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        recording = run(model, X, Y, tgt_mask=mask, memory_key_padding_mask=PAD)
    assert {layer: (tuple(recording[layer].shape), recording.rule(layer)) for layer in recording} == {
        "encoder.0": ((3, 4, 7, 7), "all keys"),
        "decoder.0.self": ((3, 4, 5, 5), "causal"),
        "decoder.0.cross": ((3, 4, 5, 7), "keys"),
        "decoder.1.self": ((3, 4, 5, 5), "causal"),
        "decoder.1.cross": ((3, 4, 5, 7), "keys"),
    }


# -- models that call the function -----------------------------------------------------------------


class Block(nn.Module):
    """A layer as many write it; `kind` says what it calls."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.out, self.kind = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if self.kind == "module":
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.kind == "name":
            z = imported.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.kind == "kizuki":
            z = kizuki.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.kind == "attention":
            z = kizuki.attention(q, k, v, causal=True)
        elif self.kind == "masks":
            z = kizuki.attention(
                q, k, v, mask=kizuki.masks.causal(), window=(6, None), observe=kizuki.Observe()
            )[0]
        elif self.kind == "five":
            z = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        elif self.kind == "grouped":
            z = F.scaled_dot_product_attention(q, k[:, ::2], v[:, ::2], is_causal=True, enable_gqa=True)
        elif self.kind == "helper":
            z = helper(q, k, v)
        else:
            weights = (q @ k.mT / 2).masked_fill(CAUSAL < 0, -torch.inf).softmax(-1)
            z = weights @ v
            if self.kind == "note":
                note(q, k, v, causal=True, output=z)
            elif self.kind == "rule":
                note(q, k, v, mask=kizuki.masks.causal(), output=z)
            elif self.kind == "tensor":
                note(q, k, v, mask=CAUSAL == 0, bias=None, scale=0.5, output=z)
            elif self.kind == "bare":
                note(q, k, v, causal=True)
            elif self.kind == "wrong":
                note(q, k, v, output=z)
            elif self.kind == "ranks":
                note(q[0], k, v)
            elif self.kind == "heads":
                note(q, k[:, :3], v[:, :3], causal=True)
        return x + self.out(z.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def helper(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


imported = types.ModuleType("a_module_of_its_own")  # as `from torch.nn.functional import …` leaves it
imported.scaled_dot_product_attention = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, imported.__name__, imported)


def truth_of(model, x, dtype, **options):
    """The weights of each layer of a Net, written out once more."""
    model, x, made = copy.deepcopy(model).to(dtype), x.to(dtype), []
    for block in model.blocks:
        q, k, v = block.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if block.kind == "grouped":
            k, v = (y[:, ::2].repeat_interleave(2, 1) for y in (k, v))
        weights = (q @ k.mT / 2).masked_fill(CAUSAL < 0, -torch.inf).softmax(-1)
        made.append(weights)
        x = x + block.out((weights @ v).transpose(1, 2).flatten(2))
    return made


@pytest.mark.parametrize(
    "kind",
    [
        "module",
        "name",
        "kizuki",
        "attention",
        "masks",
        "five",
        "grouped",
        "helper",
        "note",
        "rule",
        "tensor",
        "bare",
    ],
)
def test_a_model_that_calls_the_function_or_names_q_k_v(kind):
    model = fresh(Net(kind))
    with torch.no_grad():
        recording = run(model, X)
        truth, plain = truth_of(model, X, torch.float64), truth_of(model, X, torch.float32)
    assert imported.scaled_dot_product_attention is F.scaled_dot_product_attention
    assert recording.layers == (0, 1, 2)
    for layer in recording:
        assert recording.rule(layer) == "causal"
        assert recording.checked(layer) is (kind != "bare")
        assert_accurate(recording[layer][...], truth[layer], plain[layer], f"layer {layer}")
    if kind == "grouped":
        assert recording[0].key.shape[1] == 2


def test_one_module_for_all_layers_and_layers_met_as_they_run():
    class Loop(nn.Module):
        """Attention in a loop, through a function that no look at the class finds."""

        def __init__(self):
            super().__init__()
            self.weights, self.function = nn.ParameterList(torch.eye(WIDTH) for _ in range(3)), helper

        def forward(self, x):
            for weight in self.weights:
                q = (x @ weight).unflatten(-1, (4, -1)).transpose(1, 2)
                x = x + self.function(q, q, q).transpose(1, 2).flatten(2)
            return x

    with torch.no_grad():
        recording = run(Loop(), X)
        assert recording.layers == (0, 1, 2)
        assert recording[2].shape == (3, 4, 7, 7)
        assert not torch.equal(recording[0][...], recording[2][...])
        model = Loop()
        with kizuki.record(model, layers=[2, 5]) as one:
            model(X)
    assert torch.equal(one[2][...], recording[2][...])
    with pytest.raises(RecordError, match="went by without this layer"):
        one[5]
    with pytest.raises(RecordError, match="layer 0 was not recorded"):
        one[0]


def test_flat_attention_has_one_head():
    class Flat(nn.Module):
        def forward(self, x, mask=None):
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, scale=0.3)

    with torch.no_grad():
        recording = run(Flat(), X, ~PAD[:, None])
        assert recording[0].shape == (3, 1, 7, 7)
        assert recording.rule(0) == "keys"
        assert recording[0].scale == 0.3
        bias = oracle.randn(7, 7)
        recording = run(Flat(), X[0], bias)
        matrix = recording[0]
        truth = oracle.plain(X[:1, None], X[:1, None], scale=0.3, bias=bias, dtype=torch.float64)[0]
        plain = oracle.plain(X[:1, None], X[:1, None], scale=0.3, bias=bias)[0]
        assert_accurate(matrix[...], truth, plain, "A")


def test_several_batch_axes_are_one():
    class Deep(nn.Module):
        def forward(self, q, k, mask):
            return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    q, k = oracle.randn(2, 3, 4, 5, 8), oracle.randn(2, 3, 4, 7, 8, seed=1)
    bias = oracle.randn(3, 1, 5, 7)  # for each of the inner batch
    recording = run(Deep(), q, k, bias)
    flat = (q.flatten(0, 1), k.flatten(0, 1))
    wide = bias.expand(2, 3, 1, 5, 7).flatten(0, 1)
    truth = oracle.plain(*flat, bias=wide, dtype=torch.float64)[0]
    assert_accurate(recording[0][...], truth, oracle.plain(*flat, bias=wide)[0], "A")


def test_only_chosen_layers_are_projected_once_more(monkeypatch):
    model, times = encoder(), []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *args: times.append(1) or linear(*args))
    for layers, expected in (([0], 4), (None, 8)):  # q, k, v at once; W_O and two more for the check
        times.clear()
        with torch.no_grad(), kizuki.record(model, layers=layers):
            model(X)
        assert len(times) == expected


def test_causal_from_the_upper_left_with_more_queries_than_keys():
    class Tall(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    q, k = oracle.randn(2, 3, 9, 4), oracle.randn(2, 3, 5, 4, seed=1)
    for queries, keys in ((q, k), (k, q)):
        recording = run(Tall(), queries, keys)
        n, m = queries.shape[2], keys.shape[2]
        seen = torch.as_tensor(oracle.causal(n, m))[:, : recording[0].shape[3]]
        assert not torch.as_tensor(oracle.causal(n, m))[:, recording[0].shape[3] :].any()
        assert torch.equal(recording[0][...] > 0, seen.expand(2, 3, -1, -1))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("wrong", "does not give this layer's own output"),
        ("ranks", "note: query has 3 axes but must be a tensor"),
        ("heads", "key has 3 heads|4 heads"),
    ],
)
def test_what_a_note_cannot_explain_is_refused_by_name_and_the_pass_goes_on(kind, says):
    with torch.no_grad():
        recording = run(fresh(Net(kind)), X)
    with pytest.raises(RecordError, match=says) as error:
        recording[1]
    assert str(error.value).startswith("recording[1]: blocks.1: ")
    assert "\n" not in str(error.value)


def test_attention_that_nobody_hears_is_an_error_and_not_an_empty_recording():
    class Silent(nn.Module):
        def forward(self, x):
            return (x @ x.mT).softmax(-1) @ x

    model = Silent()
    block = kizuki.record(model)
    block.__enter__()
    model(X)
    model(X)
    with pytest.raises(RecordError, match=r"Silent ran 2 times and no attention was heard: .*models.note"):
        block.__exit__(None, None, None)
    # A class that might have been heard says so where it is read.
    with torch.no_grad():
        recording = run(fresh(Net("silent")), X)
    with pytest.raises(RecordError, match="went by without this layer's attention function"):
        recording[0]


def test_a_note_outside_a_recording_does_nothing():
    q = torch.ones(1, 1, 2, 2)
    assert note(q, q, q) is None
    assert note("nothing", None, 3) is None  # it is not even looked at


class Boom(RuntimeError):
    pass


def test_functions_are_put_back_after_an_exception_and_when_recordings_overlap():
    before, model = held(), fresh(Net("module"))
    handle = model.blocks[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Boom()))
    inside = kizuki.record(model)
    recording = inside.__enter__()
    assert held() != before
    with pytest.raises(Boom) as error, torch.no_grad():
        model(X)
    assert not inside.__exit__(Boom, error.value, error.tb)
    assert held() == before
    with pytest.raises(RecordError, match="did not finish"):
        recording[0]
    handle.remove()
    first, second = kizuki.record(model), kizuki.record(model, layers=1)
    with torch.no_grad():
        a, b = first.__enter__(), second.__enter__()
        model(X)
        first.__exit__(None, None, None)
        assert held() != before
        model(X[:1])
        second.__exit__(None, None, None)
    assert held() == before
    assert (a[1].shape[0], b[1].shape[0]) == (3, 1)


def test_another_thread_is_not_heard():
    model, shapes = fresh(Net("module")), []
    with torch.no_grad(), kizuki.record(model) as recording:
        other = threading.Thread(target=lambda: shapes.append(model(X[:1]).shape))
        other.start()
        other.join()
        assert recording.passes == 0
        model(X)
    assert shapes == [(1, 7, WIDTH)]
    assert (recording.passes, recording[0].shape[0]) == (1, 3)


def test_under_dropout_weights_are_shown_before_it_and_not_checked():
    model = fresh(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.5, batch_first=True), 2)
    ).train()
    torch.manual_seed(0)
    plain = model(X)
    torch.manual_seed(0)
    with kizuki.record(model) as recording:
        assert torch.equal(model(X), plain)
    assert not recording.checked(0)
    assert recording[0][...].sum(-1) == pytest.approx(torch.ones(3, 4, 7))


def test_a_plain_model_needs_no_transformers(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with torch.no_grad():
        assert run(fresh(Net("module")), X).passes == 1


def test_a_layer_with_nan_in_its_values_says_so():
    """PyTorch carries NaN of a hidden value into rows that do not see it; A v does not (contract 2)."""

    class Plain(torch.nn.Module):
        def forward(self, query, value):
            return torch.nn.functional.scaled_dot_product_attention(query, query, value, is_causal=True)

    query = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    value = query.clone()
    value[0, 0, 30] = math.nan
    with kizuki.record(model := Plain()) as recording:
        output = model(query, value)
    assert bool(output[0, 0, 0].isnan().any()), "what is refused here would be shown"
    with pytest.raises(kizuki.models.RecordError, match="there is NaN or Inf in its value, which"):
        recording[0]
