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
from typing import Any, NamedTuple, cast

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


def _check_transforms() -> None:
    """Raise inside torch.func's derivatives: operators refuse reverse mode, and would lose a tangent silently."""
    if torch._C._are_functorch_transforms_active():
        from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

        kinds = [each.key().name for each in retrieve_all_functorch_interpreters()]
        if "Grad" in kinds or "Jvp" in kinds:
            raise OptionError(
                f"{CALLER}: torch.func's derivatives (grad, vjp, jvp, …) cannot be traced through it; leave "
                "torch.compile and torch.export out around them, or call backward() on what the traced function gives"
            )


# What torch.compiler.assume_constant_result sets, so that the tracer runs these as they are; calling that would load
# all of dynamo at import.
number_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
_check_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _function(number: int) -> Callable[..., Any]:
    if not 0 <= number < len(_functions):
        raise OptionError(
            f"kizuki::attention: the rule holds function {number}, which this process does not know; Python functions "
            "cannot leave the process they were traced in"
        )
    return _functions[number]


def _exporting() -> bool:
    """Whether torch.export traces this. torch 2.6 has no name for it, but a flag that torch.export alone sets."""
    known = getattr(torch.compiler, "is_exporting", None)
    return torch.compiler._is_compiling_flag if known is None else known()


def _keep(fn: Callable[..., Any], where: str = "masks.where") -> int:
    if _exporting():
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
    _check_transforms()
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


OPERANDS = 6  # query, key, value, bias, sinks, scale_tensor


class Call(NamedTuple):
    """The arguments of `kizuki::attention` in their order, or what belongs to each of them (vmap's axes)."""

    query: Any
    key: Any
    value: Any
    bias: Any
    sinks: Any
    scale_tensor: Any
    masks: Any
    rule: Any
    numbers: Any
    scale: Any
    softcap: Any
    backend: Any
    score: Any
    dropout: Any
    seed: Any

    @property
    def operands(self) -> tuple[Any, ...]:
        """What a gradient may be asked for."""
        return tuple(self[:OPERANDS])

    @property
    def rest(self) -> tuple[Any, ...]:
        """What is no tensor: from rule to dropout."""
        return tuple(self[OPERANDS + 1 : -1])


def _problem(call: Call, values: bool) -> Problem:
    """The problem that the arguments of `kizuki::attention` describe; every user error is raised here."""
    value, scale = call.value, call.scale if values else 1.0
    problem = build(
        call.query,
        call.key,
        mask=decode(call.rule, call.numbers, call.masks, _function),
        bias=call.bias,
        scale=scale if call.scale_tensor is None else call.scale_tensor,
        softcap=call.softcap,
        sinks=call.sinks,
        score=None if call.score is None else _function(call.score),
        caller=CALLER,
        values=values,
    )
    if call.seed is not None:
        object.__setattr__(problem, "dropout", (call.dropout, int(call.seed) if values else 0))
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
    call = Call(*args)
    with torch.no_grad():
        problem = _problem(call, values=True)
        output, lse = choose(problem, call.backend, CALLER).forward(problem, call.value)
        shape = problem.result_shape(problem.queries, call.value.shape[-1])
        return output.reshape(shape).contiguous(), lse.contiguous()


@register_fake("kizuki::attention")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    call = Call(*args)
    problem, value = _problem(call, values=False), call.value
    output = value.new_empty(problem.result_shape(problem.queries, value.shape[-1]))
    kind = portable.lse_dtype(problem)
    return output, value.new_empty((problem.batch, problem.heads, problem.queries), dtype=kind)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = Call(*inputs)
    ctx.save_for_backward(*output, *call.operands, call.seed, *call.masks)
    ctx.count, ctx.rest = len(call.masks), call.rest
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    saved = len(ctx.saved_tensors) - ctx.count
    output, lse, *operands, seed = ctx.saved_tensors[:saved]
    masks, needs = list(ctx.saved_tensors[saved:]), list(ctx.needs_input_grad[:OPERANDS])
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
    copies, call, dims = info.batch_size, Call(*args), Call(*in_dims)
    # sinks and scale are one for a whole problem; with dropout every copy drops the same weights.
    if dims.sinks is not None or dims.scale_tensor is not None or call.seed is not None:
        return _each(torch.ops.kizuki.attention, in_dims, copies, args)
    problem, stacked = _stacked(call, dims, copies, expand=False)
    output, lse = torch.ops.kizuki.attention(*stacked)
    shape = problem.result_shape(problem.queries, output.shape[-1])
    return (output.reshape(copies, *shape), lse.reshape(copies, problem.batch, *lse.shape[1:])), (0, 0)


def _stacked(call: Call, dims: Call, copies: int, expand: bool) -> tuple[Problem, Call]:
    """One problem of the `copies`, and the call that makes one problem of them all."""
    places = list(dims.masks)
    one = [t if d is None else t.select(d, 0) for t, d in zip(call.operands, dims.operands, strict=True)]
    mine = [t if d is None else t.select(d, 0) for t, d in zip(call.masks, places, strict=True)]
    problem = _problem(Call._make((*one, mine, *call.rest, call.seed)), values=False)
    recipe = Recipe(problem, Portable(), carried=True)  # the backend is chosen when the operator runs
    operands, made, _ = stack(recipe, call.operands, dims.operands, call.masks, places, copies, expand)
    rule, bent = encode(made.problem.mask, number_of), made.problem.score
    stacked = Call._make((*operands, list(rule.tensors), *call.rest, call.seed))._replace(
        rule=rule.text,
        numbers=list(rule.numbers),
        score=None if bent is None else number_of(bent.fn),
    )
    return problem, stacked


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
    grad, output, lse, *own, needs = args
    call = Call(*own)
    with torch.no_grad():
        problem = _problem(call, values=True)
        chosen = choose(problem, call.backend, CALLER)
        flat = _flat(problem, output), lse, _flat(problem, grad)
        with torch._C._ForceDispatchKeyGuard(*_fresh_keys()):  # a scale of 0 is differentiated
            made = gradients(problem, chosen, call.value, call.scale_tensor, *flat, tuple(needs))
        return [t.contiguous() for t in made if t is not None]


def _flat(problem: Problem, tensor: Tensor) -> Tensor:
    return tensor.reshape(problem.batch, problem.heads, problem.queries, tensor.shape[-1])


@register_fake("kizuki::attention_backward")
def _(*args: Any) -> list[Tensor]:
    _, _, _, *own, needs = args
    return [t.new_empty(t.shape) for t, need in zip(Call(*own).operands, needs, strict=True) if need]


def _save_first(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    grad, _, _, *own, needs = inputs
    call = Call(*own)
    ctx.save_for_backward(grad, *call.operands, call.seed, *call.masks)
    ctx.count, ctx.rest, ctx.needs = len(call.masks), call.rest, needs


def _backward_first(ctx: Any, cotangents: list[Tensor | None]) -> tuple[Any, ...]:
    saved = len(ctx.saved_tensors) - ctx.count
    *first, seed = ctx.saved_tensors[:saved]
    masks = list(ctx.saved_tensors[saved:])
    needed = [t for t, need in zip(first[1:], ctx.needs, strict=True) if need]
    given = [torch.zeros_like(t) if c is None else c for c, t in zip(cotangents, needed, strict=True)]
    of_grad, _, _, *of_operands = ctx.needs_input_grad[: 3 + OPERANDS]
    wanted = [of_grad, *of_operands]
    made = iter(
        torch.ops.kizuki.attention_double_backward(given, wanted, *first, masks, *ctx.rest, seed, ctx.needs)
    )
    back = [next(made) if want else None for want in wanted]
    return (back[0], None, None, *back[1:], [None] * ctx.count, *_nothing(ctx.rest), None, None)


register_autograd("kizuki::attention_backward", _backward_first, setup_context=_save_first)


@register_vmap("kizuki::attention_backward")
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    copies, needs = info.batch_size, args[-1]
    call, dims = Call(*args[3:-1]), Call(*in_dims[3:-1])
    *_, need_sinks, need_scale = needs
    batched = dims.sinks is not None or dims.scale_tensor is not None
    if batched or need_sinks or need_scale or call.seed is not None:
        made, places = _each(torch.ops.kizuki.attention_backward, in_dims, copies, args)
        return list(made), list(places)
    problem, stacked = _stacked(call, dims, copies, expand=True)
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
    made = torch.ops.kizuki.attention_backward(*flat, *stacked, needs)
    kept = [
        t.shape if d is None else t.select(d, 0).shape
        for t, d, need in zip(call.operands, dims.operands, needs, strict=True)
        if need
    ]
    shaped = [t.reshape(copies, *shape) for t, shape in zip(made, kept, strict=True)]
    return shaped, [0] * len(shaped)


# -- the second gradients ----------------------------------------------------------------------------


@custom_op("kizuki::attention_double_backward", mutates_args=(), schema=SECOND)
def double_backward(*args: Any) -> list[Tensor]:
    """Gradients of `kizuki::attention_backward` for those of (grad, query, …, scale) that `wanted` names."""
    cotangents, wanted, grad, *own, needs = args
    call = Call(*own)
    problem = _problem(call, values=True)
    recipe = Recipe(problem, choose(problem, call.backend, CALLER))
    first = (_flat(problem, grad), *call.operands)
    program, places = first_gradients(recipe, first, tuple(needs))
    chosen = [at for at in range(len(first)) if wanted[at]]
    second = pullback(program, [places.index(at) for at in chosen])
    with torch._C._ForceDispatchKeyGuard(*_fresh_keys()):
        made = evaluate(second, [*(first[at] for at in places), *cotangents])
    shapes = [(grad, *call.operands)[at].shape for at in chosen]
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
    _, wanted, grad, *own, _ = args
    first = (grad, *Call(*own).operands)
    return [t.new_empty(t.shape) for t, want in zip(first, wanted, strict=True) if want]


@register_vmap("kizuki::attention_double_backward")
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    made, places = _each(torch.ops.kizuki.attention_double_backward, in_dims, info.batch_size, args)
    return list(made), list(places)
