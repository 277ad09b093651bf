"""kizuki as operators of `torch.library`: what torch.compile, torch.export and fake tensors see of a call.

`kizuki::attention` and its two backwards take a mask as `rules.encode` writes it, so that a rule stays a rule in
a graph and is never expanded. Their fake kernels read shapes only; values (lengths, a scale) are checked when the
operator runs. Eager calls do not come this way: they need neither the dispatcher nor its time.

An exported program that holds these operators is loaded after `import kizuki.library`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd, register_fake, register_vmap

from . import portable
from .autograd import first_gradients, gradients, stack
from .backends import Portable, choose
from .differentiable import Recipe, evaluate, one_by_one, pullback
from .dropout import check as check_dropout
from .dropout import seed
from .errors import OptionError, ShapeError, show
from .mask import Mask
from .problem import Problem, build, check_value, join_masks
from .rules import decode, encode

CALLER = "kizuki.attention"

# Functions of masks.where and of scores stand in a graph as numbers of this process; they live as long as it does,
# as the graph may.
_functions: list[Callable[..., Any]] = []
_numbers: dict[int, int] = {}
_lock = threading.Lock()


def number_of(fn: Callable[..., Any]) -> int:
    """The number that stands for `fn` in this process, the same for the same function."""
    with _lock:
        if id(fn) not in _numbers:
            _functions.append(fn)
            _numbers[id(fn)] = len(_functions) - 1
        return _numbers[id(fn)]


# What torch.compiler.assume_constant_result sets; calling that would load all of dynamo at import.
number_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _function(number: int) -> Callable[..., Any]:
    if not 0 <= number < len(_functions):
        raise OptionError(
            f"kizuki::attention: the rule holds function {number}, which this process does not know; Python functions "
            "cannot leave the process they were traced in"
        )
    return _functions[number]


def _keep(fn: Callable[..., Any], where: str = "masks.where") -> int:
    if torch.compiler.is_exporting():
        raise OptionError(
            f"{CALLER}: {where} holds a Python function, which torch.export cannot write down; say the same "
            "with the rules of kizuki.masks, a boolean tensor or bias="
        )
    id(fn)  # the tracer guards on the identity it reads here, so that another function is traced again
    return number_of(fn)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    bias: Tensor | None,
    scale: float | Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    score: Callable[..., Any] | None,
    backend: str,
    dropout: float,
    generator: torch.Generator | None,
) -> Tensor:
    """`kizuki.attention` for a tracer: one call of the operator, its mask written down."""
    check_dropout(dropout, generator, CALLER)
    rule = encode(join_masks(CALLER, mask, causal, window), _keep)
    learned = scale if isinstance(scale, Tensor) else None
    number = None if scale is None or isinstance(scale, Tensor) else float(scale)
    output, _ = torch.ops.kizuki.attention(
        _covering(query, key, value),
        key,
        value,
        bias,
        sinks,
        learned,
        list(rule.tensors),
        rule.text,
        list(rule.numbers),
        number,
        softcap,
        backend,
        None if score is None else _keep(score, "score"),
        float(dropout),
        None if dropout == 0 else seed(generator),
    )
    return cast(Tensor, output)


def _covering(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The query, expanded by the batch axes and heads that only the value has."""
    own = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    q, k, v = (t.shape[-3] if t.dim() > 2 else 1 for t in (query, key, value))
    lead = torch.broadcast_shapes(own, value.shape[:-3])
    heads = v if q == 1 and k == 1 else q
    if lead == own and heads == q and not (value.dim() > 2 and query.dim() == key.dim() == 2):
        return query
    return query.expand(*lead, heads, *query.shape[-2:])


def _problem(args: Sequence[Any], values: bool) -> Problem:
    """The problem that the arguments of `kizuki::attention` describe; every user error is raised here."""
    query, key, value, bias, sinks, learned, masks, text, numbers, scale, softcap, _, score, dropout, seed = (
        args
    )
    problem = build(
        query,
        key,
        mask=decode(text, numbers, masks, _function),
        bias=bias,
        scale=learned if learned is not None else scale if values else 1.0,
        softcap=softcap,
        sinks=sinks,
        score=None if score is None else _function(score),
        caller=CALLER,
        values=values,
    )
    if seed is not None:
        object.__setattr__(problem, "dropout", (dropout, int(seed) if values else 0))
    check_value(problem, value, caller=CALLER)
    own = problem.heads if problem.has_heads else 1
    heads = value.shape[-3] if value.dim() > 2 else 1
    lead = torch.broadcast_shapes(problem.lead, value.shape[:-3])
    if (
        tuple(lead) != problem.lead
        or (own == 1 and heads != 1)
        or (value.dim() > 2 and not problem.has_heads)
    ):
        raise ShapeError(
            f"kizuki::attention: value {show(value)} has axes that A {list(problem.shape)} does not; expand the "
            "query by them, or call kizuki.attention"
        )
    return problem


_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sinks, Tensor? scale_tensor, Tensor[] masks"
_OPTIONS = (
    "str rule, SymInt[] numbers, float? scale, float? softcap, str backend, SymInt? score, float dropout, "
    "Tensor? seed"
)
FORWARD = f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)"
FIRST = f"(Tensor grad, Tensor output, Tensor lse, {_TENSORS}, {_OPTIONS}, bool[] needs) -> Tensor[]"
SECOND = (
    f"(Tensor[] cotangents, bool[] wanted, Tensor grad, {_TENSORS}, {_OPTIONS}, bool[] needs) -> Tensor[]"
)


# -- forward -----------------------------------------------------------------------------------------


@custom_op("kizuki::attention", mutates_args=(), schema=FORWARD)
def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """`(output, lse)`: `[..., heads, queries, value_dim]`, `[batch, heads, queries]`, both contiguous."""
    with torch.no_grad():
        problem, value = _problem(args, values=True), args[2]
        output, lse = choose(problem, args[11], CALLER).forward(problem, value)
        shape = problem.result_shape(problem.queries, value.shape[-1])
        return output.reshape(shape).contiguous(), lse.contiguous()


@register_fake("kizuki::attention")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    problem, value = _problem(args, values=False), args[2]
    output = value.new_empty(problem.result_shape(problem.queries, value.shape[-1]))
    kind = portable.lse_dtype(problem)
    return output, value.new_empty((problem.batch, problem.heads, problem.queries), dtype=kind)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:6], inputs[14], *inputs[6])
    ctx.count, ctx.rest = len(inputs[6]), inputs[7:14]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    output, lse, *operands, seed = ctx.saved_tensors[:9]
    masks, needs = list(ctx.saved_tensors[9:]), list(ctx.needs_input_grad[:6])
    made = iter(
        torch.ops.kizuki.attention_backward(grad, output, lse, *operands, masks, *ctx.rest, seed, needs)
    )
    grads = (next(made) if need else None for need in needs)
    return (*grads, [None] * ctx.count, *_nothing(ctx.rest), None)


def _nothing(rest: Sequence[Any]) -> list[Any]:
    """No gradient for arguments that are not tensors; torch reads an empty list as a list of tensors."""
    return [[] if isinstance(each, (list, tuple)) and not each else None for each in rest]


register_autograd("kizuki::attention", _backward, setup_context=_save)


@register_vmap("kizuki::attention")
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    copies = info.batch_size
    # sinks and scale are one for a whole problem; with dropout every copy drops the same weights.
    if in_dims[4] is not None or in_dims[5] is not None or args[14] is not None:
        return _each(torch.ops.kizuki.attention, in_dims, copies, args)
    problem, operands, rule = _stacked(args, in_dims, copies, expand=False)
    output, lse = torch.ops.kizuki.attention(*operands, *rule[:3], *args[9:12], rule[3], *args[13:])
    shape = problem.result_shape(problem.queries, output.shape[-1])
    return (output.reshape(copies, *shape), lse.reshape(copies, problem.batch, *lse.shape[1:])), (0, 0)


def _stacked(
    args: Sequence[Any], dims: Sequence[Any], copies: int, expand: bool
) -> tuple[Problem, list[Any], tuple[list[Tensor], str, list[int], int | None]]:
    """One problem of the `copies`, the operands that make one problem of them all, and the mask and score of that."""
    places = list(dims[6])
    one = [t if d is None else t.select(d, 0) for t, d in zip(args[:6], dims[:6], strict=True)]
    mine = [t if d is None else t.select(d, 0) for t, d in zip(args[6], places, strict=True)]
    problem = _problem([*one, mine, *args[7:]], values=False)
    recipe = Recipe(problem, Portable(), carried=True)  # the backend is chosen when the operator runs
    operands, made, _ = stack(recipe, args[:6], dims[:6], args[6], places, copies, expand)
    rule = encode(made.problem.mask, number_of)
    bent = made.problem.score
    number = None if bent is None else number_of(bent.fn)
    return problem, operands, (list(rule.tensors), rule.text, list(rule.numbers), number)


def _each(op: Callable[..., Any], dims: Sequence[Any], copies: int, args: Sequence[Any]) -> Any:
    """`one_by_one` for an operator some of whose arguments, or whose result, are lists of tensors."""
    lists = [at for at, a in enumerate(args) if isinstance(a, (list, tuple)) and isinstance(dims[at], list)]
    flat, flat_dims = list(args), list(dims)
    for at in lists:
        flat[at], flat_dims[at] = None, None
    counts = [len(args[at]) for at in lists]
    flat += [t for at in lists for t in args[at]]
    flat_dims += [d for at in lists for d in dims[at]]

    def run(*given: Any) -> tuple[Tensor, ...]:
        own, rest = list(given[: len(args)]), list(given[len(args) :])
        for at, count in zip(lists, counts, strict=True):
            own[at], rest = rest[:count], rest[count:]
        return tuple(op(*own))

    return one_by_one(run, flat_dims, copies, flat)


# -- the first gradients -----------------------------------------------------------------------------


@custom_op("kizuki::attention_backward", mutates_args=(), schema=FIRST)
def backward(*args: Any) -> list[Tensor]:
    """The gradients that `needs` asks for of (query, key, value, bias, sinks, scale), in their shapes and dtypes."""
    (grad, output, lse), call, needs = args[:3], args[3:18], args[18]
    with torch.no_grad():
        problem = _problem(call, values=True)
        chosen = choose(problem, call[11], CALLER)
        flat = _flat(problem, output), lse, _flat(problem, grad)
        with torch._C._ForceDispatchKeyGuard(*_fresh_keys()):  # a scale of 0 is differentiated
            made = gradients(problem, chosen, call[2], call[5], *flat, tuple(needs))
        return [t.contiguous() for t in made if t is not None]


def _flat(problem: Problem, tensor: Tensor) -> Tensor:
    return tensor.reshape(problem.batch, problem.heads, problem.queries, tensor.shape[-1])


@register_fake("kizuki::attention_backward")
def _(*args: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, need in zip(args[3:9], args[18], strict=True) if need]


def _save_first(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(inputs[0], *inputs[3:9], inputs[17], *inputs[9])
    ctx.count, ctx.rest, ctx.needs = len(inputs[9]), inputs[10:17], inputs[18]


def _backward_first(ctx: Any, cotangents: list[Tensor | None]) -> tuple[Any, ...]:
    first, seed, masks = ctx.saved_tensors[:7], ctx.saved_tensors[7], list(ctx.saved_tensors[8:])
    needed = [t for t, need in zip(first[1:], ctx.needs, strict=True) if need]
    given = [torch.zeros_like(t) if c is None else c for c, t in zip(cotangents, needed, strict=True)]
    wanted = [ctx.needs_input_grad[at] for at in (0, *range(3, 9))]
    made = iter(
        torch.ops.kizuki.attention_double_backward(given, wanted, *first, masks, *ctx.rest, seed, ctx.needs)
    )
    back = [next(made) if want else None for want in wanted]
    return (back[0], None, None, *back[1:], [None] * ctx.count, *_nothing(ctx.rest), None, None)


register_autograd("kizuki::attention_backward", _backward_first, setup_context=_save_first)


@register_vmap("kizuki::attention_backward")
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    copies, call, dims, needs = info.batch_size, args[3:18], in_dims[3:18], args[18]
    if dims[4] is not None or dims[5] is not None or needs[4] or needs[5] or call[14] is not None:
        made, places = _each(torch.ops.kizuki.attention_backward, in_dims, copies, args)
        return list(made), list(places)
    problem, operands, rule = _stacked(call, dims, copies, expand=True)
    grad, output, lse = (
        (t.unsqueeze(0) if d is None else t.movedim(d, 0)).expand(copies, *shape)
        for t, d, shape in zip(
            args[:3],
            in_dims[:3],
            (*((*problem.result_shape(problem.queries), -1),) * 2, (-1, -1, -1)),
            strict=True,
        )
    )
    wide = (copies, *problem.lead, problem.heads, problem.queries, grad.shape[-1])
    flat = grad.reshape(wide), output.reshape(wide), lse.flatten(0, 1)
    options = *call[9:12], rule[3], *call[13:]
    made = torch.ops.kizuki.attention_backward(*flat, *operands, *rule[:3], *options, needs)
    kept = [
        t.shape if d is None else t.select(d, 0).shape
        for t, d, need in zip(call[:6], dims[:6], needs, strict=True)
        if need
    ]
    shaped = [t.reshape(copies, *shape) for t, shape in zip(made, kept, strict=True)]
    return shaped, [0] * len(shaped)


# -- the second gradients ----------------------------------------------------------------------------


@custom_op("kizuki::attention_double_backward", mutates_args=(), schema=SECOND)
def double_backward(*args: Any) -> list[Tensor]:
    """Gradients of `kizuki::attention_backward` for those of (grad, query, …, scale) that `wanted` names."""
    cotangents, wanted, grad, call, needs = args[0], args[1], args[2], args[3:18], args[18]
    problem = _problem(call, values=True)
    recipe = Recipe(problem, choose(problem, call[11], CALLER))
    first = (_flat(problem, grad), *call[:6])
    program, places = first_gradients(recipe, first, tuple(needs))
    chosen = [at for at in range(7) if wanted[at]]
    second = pullback(program, [places.index(at) for at in chosen])
    with torch._C._ForceDispatchKeyGuard(*_fresh_keys()):
        made = evaluate(second, [*(first[at] for at in places), *cotangents])
    shapes = [(grad, *call[:6])[at].shape for at in chosen]
    return [t.reshape(shape).contiguous() for t, shape in zip(made, shapes, strict=True)]


@lru_cache(maxsize=1)
def _fresh_keys() -> tuple[Any, Any]:
    """What a thread that does nothing dispatches on: inside an operator, autograd and transforms are switched off.

    The second gradients are derived with `torch.func`, which needs them on.
    """
    found: list[Any] = []

    def read() -> None:
        found.append(torch._C._dispatch_tls_local_include_set())
        found.append(torch._C._dispatch_tls_local_exclude_set())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return found[0], found[1]


@register_fake("kizuki::attention_double_backward")
def _(*args: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, want in zip(args[2:9], args[1], strict=True) if want]


@register_vmap("kizuki::attention_double_backward")
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    made, places = _each(torch.ops.kizuki.attention_double_backward, in_dims, info.batch_size, args)
    return list(made), list(places)
