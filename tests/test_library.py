"""torch.library, torch.compile, torch.export, fake tensors and autocast: what a tracer sees of kizuki."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import BACKENDS, randn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import kizuki
from kizuki import library, masks, rules
from kizuki.mask import Packed
from kizuki.problem import build

Attention = Callable[..., Tensor]
F64 = torch.float64


def qkv(
    n: int, m: int | None = None, *, grad: bool = True, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Four query heads on two, n queries and m keys."""
    shapes = ((2, 4, n, 8), (2, 2, m or n, 8), (2, 2, m or n, 8))
    return [randn(*shape, seed=seed, dtype=dtype).requires_grad_(grad) for seed, shape in enumerate(shapes)]


# -- masks written down ------------------------------------------------------------------------------

SEEN = torch.rand(2, 1, 5, 9, generator=torch.Generator().manual_seed(0)) > 0.3
RULES = {
    "causal": masks.causal("lower_right"),
    "window": masks.window(3, None, "upper_left"),
    "unlimited window": masks.window(None, None, "lower_right"),
    "documents": masks.documents(ids=torch.arange(5) // 2, key_ids=torch.arange(9) // 3),
    "packed": Packed("lengths", torch.tensor([0, 3, 3, 5]), torch.tensor([0, 3, 3, 9])),
    "packed, ids": Packed("offsets", torch.tensor([[0, 3, 5], [0, 0, 5]]), torch.arange(9) // 5, by_ids=True),
    "keys": masks.keys(SEEN[:, 0, 0]),
    "lengths": masks.lengths(key=[4, 7]),
    "both lengths": masks.lengths(query=[5, 0], key=[4, 7]),
    "dense": masks.dense(SEEN),
    "where": masks.where(lambda b, h, i, j: (b + h + i + j) % 3 != 0),
    "of three": (masks.causal("lower_right") | ~masks.dense(SEEN)) & masks.window(2, 6, "lower_right"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_the_same_written_down_and_read_again(name: str) -> None:
    query, key, _ = qkv(5, 9)
    rule = rules.encode(RULES[name], library.number_of)
    again = rules.decode(rule.text, rule.numbers, rule.tensors, library._function)
    problem = build(query, key, mask=RULES[name])
    every = slice(0, 5), slice(0, 9)
    assert torch.equal(again.tile(problem, *every), RULES[name].tile(problem, *every))
    assert rules.encode(again, library.number_of).text == rule.text
    assert sum(t.numel() for t in rule.tensors) <= SEEN.numel()  # nothing is expanded


def test_a_word_no_mask_is_written_with_is_refused() -> None:
    with pytest.raises(kizuki.OptionError, match="word 'sideways'"):
        rules.decode("causal sideways", (), (), library._function)
    with pytest.raises(kizuki.OptionError, match="which this process does not know"):
        rules.decode("where", (1 << 40,), (), library._function)


# -- the operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str) -> None:
    query, key, value = qkv(5, 9)
    bias, sinks = randn(4, 5, 1, seed=3).requires_grad_(), randn(4, seed=4).requires_grad_()
    scale = torch.tensor(0.7, requires_grad=True)
    operands = (query, key, value, bias, sinks, scale)
    seed = torch.tensor(5)
    rich = ([SEEN], "causal:lower_right dense and", [], None, 3.0, backend, None, 0.25, seed)
    forward = torch.ops.kizuki.attention.default
    opcheck(forward, (query, key, value, None, None, None, [], "", [], None, None, backend, None, 0.0, None))
    opcheck(forward, (*operands, *rich))
    window = (
        [torch.tensor([2, 9])],
        "lengths:k window:l:lower_right and",
        [3],
        0.7,
        None,
        backend,
        None,
        0.0,
        None,
    )
    opcheck(forward, (query, key, value, bias, None, None, *window))


def test_opcheck_of_the_gradients() -> None:
    operands = [
        *qkv(5, 9, dtype=F64),
        randn(4, 5, 1, dtype=F64),
        randn(4, dtype=F64),
        torch.tensor(0.7, dtype=F64),
    ]
    operands = [t.detach().requires_grad_() for t in operands]
    rest = ([SEEN], "causal:lower_right dense and", [], None, 3.0, "portable", None, 0.0, None)
    with torch.no_grad():
        output, lse = torch.ops.kizuki.attention(*operands, *rest)
    up = randn(*output.shape, seed=7, dtype=F64).requires_grad_()
    first = torch.ops.kizuki.attention_backward.default
    opcheck(first, (up, output, lse, *operands, *rest, [True] * 6))
    opcheck(first, (up.detach(), output, lse, *operands, *rest, [True, False, False, True, False, False]))
    plain = [t.detach() for t in operands]
    cotangents = [randn(*t.shape, seed=8, dtype=F64) for t in plain]
    second = torch.ops.kizuki.attention_double_backward.default
    opcheck(second, (cotangents, [True] * 7, up.detach(), *plain, *rest, [True] * 6))


def test_the_operators_gradients_are_the_eager_ones() -> None:
    """First and second, through the dispatcher: the same functions behind another door."""
    options = ([], "causal", [], None, None, "portable", None, 0.0, None)

    def both(run: Attention) -> list[Tensor]:
        inputs = qkv(5, dtype=F64)
        first = torch.autograd.grad(run(*inputs).sin().sum(), inputs, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.pow(2).sum() for g in first), inputs)]

    got = both(lambda q, k, v: torch.ops.kizuki.attention(q, k, v, None, None, None, *options)[0])
    want = both(lambda q, k, v: kizuki.attention(q, k, v, causal=True, backend="portable"))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_vmap_of_the_operators() -> None:
    """As inside a compiled vmap: any operand, its gradients too, and what only one copy at a time can take."""
    rest = ([], "window:lr:lower_right", [2, 1], None, None, "portable", None, 0.0, None)
    query, key, value = (randn(3, *t.shape, seed=n, dtype=F64) for n, t in enumerate(qkv(5, 9)))
    sinks = randn(3, 4, seed=5, dtype=F64)

    def forward(q: Tensor, k: Tensor, s: Tensor | None) -> Tensor:
        return torch.ops.kizuki.attention(q, k, value[0], None, s, None, *rest)[0]

    def backward(q: Tensor, k: Tensor, s: Tensor | None) -> list[Tensor]:
        output, lse = torch.ops.kizuki.attention(q, k, value[0], None, s, None, *rest)
        needs = [True, True, True, False, s is not None, False]
        return torch.ops.kizuki.attention_backward(
            torch.ones_like(output), output, lse, q, k, value[0], None, s, None, *rest, needs
        )

    for s, dims in ((None, (0, None, None)), (sinks, (None, 0, 0))):
        args = [query if dims[0] == 0 else query[0], key if dims[1] == 0 else key[0], s]
        rows = [[a if d is None else a[at] for a, d in zip(args, dims, strict=True)] for at in range(3)]
        assert torch.equal(torch.vmap(forward, dims)(*args), torch.stack([forward(*row) for row in rows]))
        got = torch.vmap(backward, dims)(*args)
        want = [torch.stack(parts) for parts in zip(*(backward(*row) for row in rows), strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_an_operator_checks_its_call_at_run_time() -> None:
    query, key, value = qkv(5, 9, grad=False)

    def call(value: Tensor, *rest: Any) -> None:
        torch.ops.kizuki.attention(
            query, key, value, None, None, None, *rest, None, None, "auto", None, 0.0, None
        )

    with pytest.raises(kizuki.OptionError, match="lengths key spans 99 to 99"):
        call(value, [torch.tensor(99)], "lengths:k", [])
    with pytest.raises(kizuki.ShapeError, match="value has 8 keys but key has 9"):
        call(value[:, :, :8], [], "", [])
    with pytest.raises(kizuki.ShapeError, match=r"value .* has axes that A"):
        call(value.expand(3, 2, 2, 9, 8), [], "", [])


# -- torch.compile -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


# Before it, torch.compile does not know & and | of objects; masks are put together outside of what is compiled.
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
needs_and = pytest.mark.skipif(
    TORCH < (2, 9),
    reason="torch.compile before 2.9 knows no & of objects",
)


def assert_compiles(function: Attention, *calls: list[Any], dynamic: bool | None = None) -> None:
    """One graph that gives the eager bits, output and gradients, for every call."""
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for arguments in calls:
        got, want = compiled(*arguments), function(*arguments)
        assert torch.equal(got, want)
        inputs = [t for t in arguments if isinstance(t, Tensor) and t.requires_grad]
        if inputs:
            up = randn(*want.shape, seed=6, dtype=want.dtype)
            pairs = zip(
                torch.autograd.grad(got, inputs, up), torch.autograd.grad(want, inputs, up), strict=True
            )
            assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    assert_compiles(
        lambda *t: kizuki.attention(*t, causal=True, window=(2, 0)), qkv(5), qkv(7), dynamic=dynamic
    )
    torch._dynamo.reset()
    sdpa = kizuki.scaled_dot_product_attention
    assert_compiles(
        lambda *t: sdpa(*t, is_causal=True, enable_gqa=True), qkv(5, 9), qkv(9, 4), dynamic=dynamic
    )


def test_compile_with_every_operand() -> None:
    extra = [
        randn(4, 1, 9).requires_grad_(),
        randn(4).requires_grad_(),
        torch.tensor(0.3, requires_grad=True),
    ]

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor, scale: Tensor) -> Tensor:
        return kizuki.attention(q, k, v, bias=bias, sinks=sinks, scale=scale, softcap=4.0)

    assert_compiles(run, [*qkv(5, 9), *extra])


@needs_and
def test_compile_with_masks_from_inside() -> None:
    def inside(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, lengths: Tensor) -> Tensor:
        rule = masks.causal("lower_right") & masks.dense(seen) | masks.lengths(key=lengths)
        return kizuki.attention(q, k, v, mask=rule)

    assert_compiles(inside, [*qkv(5, 9), SEEN, torch.tensor([3, 4])])
    torch._dynamo.reset()

    def hidden(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return kizuki.attention(q, k, v, mask=masks.invert(masks.window(1, 0)) & masks.invert(seen))

    assert_compiles(hidden, [*qkv(5), SEEN[:, :, :, :5]])


def test_compile_with_masks_from_outside() -> None:
    outside = [
        masks.documents([2, 0, 3]) | masks.keys(torch.arange(5) != 2),
        masks.window(1, 1),
        masks.window(2, 1),
    ]
    assert_compiles(lambda q, k, v, m: kizuki.attention(q, k, v, mask=m), *([*qkv(5), m] for m in outside))


@needs_and
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_with_documents_from_inside(dynamic: bool) -> None:
    """Their numbers are looked at when the graph runs."""

    def lengths(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
        return kizuki.attention(q, k, v, mask=masks.documents(n) & masks.causal())

    def offsets(q: Tensor, k: Tensor, v: Tensor, n: Tensor, m: Tensor) -> Tensor:
        return kizuki.attention(q, k, v, mask=masks.documents(offsets=n, key_offsets=m))

    def ids(q: Tensor, k: Tensor, v: Tensor, n: Tensor, m: Tensor) -> Tensor:
        return kizuki.attention(
            q, k, v, mask=masks.documents(n, key_ids=m) | masks.documents([2, 3], key_ids=m)
        )

    a, b = torch.tensor([2, 0, 3]), torch.tensor([4, 0, 1])
    assert_compiles(lengths, [*qkv(5), a], [*qkv(5), b], [*qkv(10), a + b], dynamic=dynamic)
    torch._dynamo.reset()
    places = torch.tensor([0, 2, 2, 9])
    assert_compiles(offsets, [*qkv(5, 9), torch.tensor([0, 1, 4, 5]), places], dynamic=dynamic)
    torch._dynamo.reset()
    assert_compiles(ids, [*qkv(5, 9), a, torch.arange(9) // 5], dynamic=dynamic)


def test_compiled_documents_are_checked_when_they_run() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, n: Tensor, offsets: bool) -> Tensor:
        return kizuki.attention(q, k, v, mask=masks.documents(**{"offsets" if offsets else "lengths": n}))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    inputs = qkv(5, grad=False)
    for numbers, offsets, words in (
        ([6, -1, 0], False, "lengths holds -1"),
        ([2, 2, 0], False, "covers 4 queries but there are 5"),
        ([1, 3, 5], True, "offsets begins with 1"),
        ([0, 4, 3], True, "offsets goes back from 4 to 3"),
        ([0, 4, 6], True, "covers 6 queries but there are 5"),
    ):
        with pytest.raises((kizuki.OptionError, kizuki.ShapeError), match=words):
            compiled(*inputs, torch.tensor(numbers), offsets)


def test_compile_refuses_what_its_operators_cannot_follow() -> None:
    """PyTorch would refuse a gradient of torch.func in its own words, and lose a tangent without any."""

    def total(*t: Tensor) -> Tensor:
        return kizuki.attention(*t, causal=True).pow(2).sum()

    inputs = qkv(5, grad=False)
    grad, tangent = torch.func.grad(total), lambda *t: torch.func.jvp(total, t, t)[1]
    for function in (grad, tangent):
        for fullgraph in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(function, fullgraph=fullgraph, backend="eager")
            with pytest.raises(RuntimeError, match=r"kizuki\.attention: torch\.func's derivatives"):
                compiled(*inputs)
        with pytest.raises(kizuki.OptionError, match="derivatives"):
            make_fx(function)(*inputs)
    # torch.autograd.grad works: there torch breaks the graph itself.

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.detach().requires_grad_()
        return torch.autograd.grad(total(q, k, v), q)[0]

    assert torch.equal(torch.compile(inside, backend="aot_eager")(*inputs), inside(*inputs))


@pytest.mark.skipif(TORCH < (2, 7), reason="torch.compile of 2.6 refuses id() of a function")
def test_compile_takes_the_function_it_is_given_and_no_older_one() -> None:
    """Two functions of one code but another closure are two functions."""

    def made(n: int) -> masks.Mask:
        return masks.where(lambda b, h, i, j: (i + j + h) % n != 0)

    assert_compiles(
        lambda q, k, v, m: kizuki.attention(q, k, v, mask=m), *([*qkv(5), made(n)] for n in (2, 3, 4))
    )
    torch._dynamo.reset()
    assert_compiles(lambda *t: kizuki.attention(*t, score=lambda s, b, h, i, j: s * 0.5 - abs(i - j)), qkv(5))


def test_compile_draws_new_dropout_each_time() -> None:
    compiled = torch.compile(
        lambda *t: kizuki.attention(*t, dropout=0.5), fullgraph=True, backend="aot_eager"
    )
    inputs = qkv(9)
    torch.manual_seed(0)
    got = compiled(*inputs)
    torch.manual_seed(0)
    want = kizuki.attention(*inputs, dropout=0.5)
    assert torch.equal(got, want)
    pairs = zip(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(want.sum(), inputs), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(compiled(*inputs), got)


def test_compile_with_values_that_have_axes_of_their_own() -> None:
    query, key, value = randn(1, 2, 3, 4), randn(1, 2, 5, 4, seed=1), randn(3, 2, 5, 7, seed=2)
    for operands in (
        (query, key, value),
        (query[0, 0], key[0, 0], value[0]),
        (query[0, 0], key[0, 0], value[0, 0]),
    ):
        compiled = torch.compile(kizuki.attention, fullgraph=True, backend="aot_eager")
        got, want = compiled(*operands), kizuki.attention(*operands)
        assert got.shape == want.shape
        assert torch.equal(got, want)


def test_compile_under_autocast_and_vmap() -> None:
    def cast(*t: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return kizuki.attention(*t, causal=True)

    assert_compiles(cast, qkv(5))
    torch._dynamo.reset()
    query, key = randn(3, 2, 5, 4), randn(2, 5, 4, seed=1)
    assert_compiles(
        lambda q, k: torch.vmap(lambda q: kizuki.attention(q, k, k, causal=True, backend="portable"))(q),
        [query, key],
    )


def test_what_a_tracer_cannot_have_is_one_line() -> None:
    query, key, value = qkv(5, grad=False)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(kizuki.OptionError, match="observe= reads numbers"),
    ):
        kizuki.attention(query, key, value, observe=kizuki.Observe(topk=1))
    with pytest.raises(RuntimeError, match="value has 3 keys but key has 5"):
        torch.compile(kizuki.attention, fullgraph=True, backend="eager")(query, key, value[:, :, :3])


# -- torch.export, fake tensors, meta ----------------------------------------------------------------


class Module(torch.nn.Module):
    def __init__(self, function: Attention) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


def exported(function: Attention, example: list[Tensor], dims: list[Any], strict: bool = False) -> Any:
    shapes = (tuple(dims),)
    return torch.export.export(Module(function), tuple(example), dynamic_shapes=shapes, strict=strict)


N, M = torch.export.Dim("n", min=2, max=512), torch.export.Dim("m", min=2, max=512)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=needs_and)])
def test_export_with_a_dynamic_length(strict: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return kizuki.attention(q, k, v, mask=masks.causal("lower_right") & masks.dense(seen), window=None)

    def seen(n: int, m: int) -> Tensor:
        return randn(n, m, seed=8) > -0.5

    dims = [{2: N}, {2: M}, {2: M}, {0: N, 1: M}]
    program = exported(run, [*qkv(5, 9, grad=False), seen(5, 9)], dims, strict)
    assert sum(str(node.target) == "kizuki.attention.default" for node in program.graph.nodes) == 1
    for n, m in ((5, 9), (3, 11), (12, 12)):
        arguments = [*qkv(n, m, grad=False), seen(n, m)]
        assert torch.equal(program.module()(*arguments), run(*arguments))


def test_export_is_saved_and_loaded_by_another_process(tmp_path: Path) -> None:
    program = exported(lambda *t: kizuki.attention(*t, causal=True), qkv(5, grad=False), [{2: N}] * 3)
    torch.export.save(program, tmp_path / "a.pt2")
    arguments = qkv(7, grad=False)
    torch.save([*arguments, kizuki.attention(*arguments, causal=True)], tmp_path / "a.pt")
    code = (
        "import sys, torch, kizuki.library\n"
        "*given, want = torch.load(sys.argv[2])\n"
        "assert torch.equal(torch.export.load(sys.argv[1]).module()(*given), want)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.pt2"), str(tmp_path / "a.pt")], check=False
    )
    assert done.returncode == 0


def test_export_checks_lengths_when_it_runs() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return kizuki.attention(q, k, v, mask=masks.lengths(key=lengths))

    dims = [{2: N}, {2: M}, {2: M}, None]
    program = exported(run, [*qkv(5, 9, grad=False), torch.tensor([2, 4])], dims).module()
    arguments = [*qkv(3, 6, grad=False), torch.tensor([6, 1])]
    assert torch.equal(program(*arguments), run(*arguments))
    with pytest.raises(kizuki.OptionError, match="lengths key spans 1 to 7"):
        program(*arguments[:3], torch.tensor([7, 1]))


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_documents_of_any_lengths(strict: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
        return kizuki.attention(q, k, v, mask=masks.documents(n))

    program = exported(
        run, [*qkv(5, grad=False), torch.tensor([2, 3])], [{2: N}, {2: N}, {2: N}, None], strict
    )
    for lengths in ([2, 3], [4, 8]):
        arguments = [*qkv(sum(lengths), grad=False), torch.tensor(lengths)]
        assert torch.equal(program.module()(*arguments), run(*arguments))


@pytest.mark.parametrize("option", ["mask", "score"])
def test_export_refuses_python_functions(option: str) -> None:
    made = {"mask": masks.where(lambda b, h, i, j: i >= j), "score": lambda s, b, h, i, j: s - j}
    with pytest.raises(
        kizuki.OptionError, match=r"holds a Python function, which torch\.export cannot write down"
    ):
        exported(lambda *t: kizuki.attention(*t, **{option: made[option]}), qkv(5, grad=False), [None] * 3)


def test_fake_and_meta_tensors_have_a_shape_and_no_numbers() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 4, 5, 8, dtype=torch.bfloat16)
        made = kizuki.attention(x, x[:, :2], x[:, :2, :, :3], causal=True)
        assert (made.shape, made.dtype) == ((2, 4, 5, 3), torch.bfloat16)
    x = torch.empty(2, 4, 5, 8, device="meta")
    assert kizuki.scaled_dot_product_attention(x, x, x, is_causal=True).device.type == "meta"
    with pytest.raises(kizuki.ShapeError, match="3 keys but key has 5"):
        kizuki.attention(x, x, x[:, :, :3])


def test_what_needs_no_numbers_is_checked_without_them() -> None:
    x = torch.empty(2, 4, 5, 8, device="meta")
    for wrong in (masks.lengths(key=[1, 2, 3]), masks.causal() & ~masks.lengths(query=[1, 2, 3])):
        with pytest.raises(kizuki.ShapeError, match="lengths"):
            kizuki.attention(x, x, x, mask=wrong)
    with FakeTensorMode():
        y = torch.empty(2, 4, 5, 8)
        for call in (kizuki.attention, kizuki.scaled_dot_product_attention):
            name = "dropout" if call is kizuki.attention else "dropout_p"
            with pytest.raises(kizuki.OptionError, match=f"{name} is 1.5"):
                call(y, y, y, **{name: 1.5})
            with pytest.raises(kizuki.KizukiTypeError, match=f"{name} is"):
                call(y, y, y, **{name: "a lot"})


def test_modes_see_one_operator() -> None:
    graph = make_fx(lambda *t: kizuki.attention(*t))(*qkv(5, grad=False))
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count("kizuki.attention.default") == 1
    assert not any("softmax" in target or "matmul" in target for target in targets)


# -- autocast ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_autocast_casts_operands_and_not_float64(kind: torch.dtype) -> None:
    query, key, value = qkv(5)
    bias = randn(5, 5)
    with torch.autocast("cpu", dtype=kind):
        got = kizuki.attention(query, key, value, bias=bias)
        mixed = kizuki.attention(query, key.bfloat16(), value.half())
        wide = kizuki.attention(query.double(), key.double(), value.double())
        with pytest.raises(kizuki.KizukiTypeError, match="key has dtype"):
            kizuki.attention(query.double(), key, value)
    assert got.dtype is mixed.dtype is kind
    assert wide.dtype is F64
    assert torch.equal(got, kizuki.attention(query.to(kind), key.to(kind), value.to(kind), bias=bias))
    got.sum().backward()
    assert query.grad is not None
    assert query.grad.dtype is torch.float32
