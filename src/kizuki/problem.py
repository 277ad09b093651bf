"""One attention problem, checked once: shapes, dtype, scale, mask. Every user error of the core is raised here.

A `Problem` is frozen. It fixes everything but the values: the backends receive it and never check
again. Axes are named as in the field: query `[..., heads, queries, head_dim]`, key
`[..., kv_heads, keys, head_dim]`; the axes before the heads are the batch, and they broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import functions, masks
from .errors import KizukiTypeError, OptionError, ShapeError, show
from .mask import as_mask

if TYPE_CHECKING:
    from .mask import Bounds, Mask

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def accumulates(dtype: torch.dtype) -> torch.dtype:
    """float64 accumulates in itself, everything else in float32 (contract 5)."""
    return torch.float64 if dtype is torch.float64 else torch.float32


# Half of the largest number there is: kernels multiply the scale by log2(e).
LARGEST_SCALE = {dtype: torch.finfo(accumulates(dtype)).max / 2 for dtype in DTYPES}


@dataclass(frozen=True, eq=False)
class Problem:
    """Scaled dot-product attention weights, described but not computed.

    `lead` holds the broadcast batch axes, `batch` their product, so that a result is
    `[*lead, heads, queries, ...]` when `has_heads`, else `[queries, ...]`.
    """

    query: Tensor
    key: Tensor
    lead: tuple[int, ...]
    has_heads: bool
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    scale: float
    softcap: float | None
    bias: Tensor | None
    sinks: Tensor | None
    mask: Mask | None
    scale_tensor: Tensor | None = None  # where `scale` came from, if it is learned
    score: functions.Score | None = None  # a user's function of each score
    dropout: tuple[float, int] | None = None  # (p, seed), for `A @ value` alone: readings never have it
    kind: Hashable | None = None  # what calls that the cpu backend need not describe again have in common

    @property
    def batch(self) -> int:
        return math.prod(self.lead)

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The dtype of scores, weights and sums."""
        return accumulates(self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of A."""
        return self.result_shape(self.queries, self.keys)

    @cached_property
    def bounds(self) -> Bounds | None:
        """The range of keys outside which nothing is visible to each query; None when there is no mask."""
        return None if self.mask is None else self.mask.bounds(self).clamp(self.keys)

    @cached_property
    def residual(self) -> Mask | None:
        """What is left of the mask once `bounds` has been applied; None when the bounds say all."""
        return None if self.mask is None else self.mask.residual(self)

    def visible(self, rows: slice, cols: slice) -> Tensor | None:
        """The mask on one tile, `[1|batch, 1|heads, 1|rows, 1|cols]`, True where visible; None when all is."""
        if self.bounds is None:
            return None
        first, stop = self.bounds.first[..., rows], self.bounds.stop[..., rows]
        inside = None
        if not (bool((first <= cols.start).all()) and bool((stop >= cols.stop).all())):
            j = torch.arange(cols.start, cols.stop, device=self.device)
            inside = (j >= first.unsqueeze(-1)) & (j < stop.unsqueeze(-1))
        if self.residual is None:
            return inside
        rest = self.residual.tile(self, rows, cols)
        return rest if inside is None else rest & inside

    def result_shape(self, *tail: int) -> tuple[int, ...]:
        """`[*lead, heads, *tail]`, without the axes the user did not give."""
        return (*self.lead, self.heads, *tail) if self.has_heads else tail

    def flat(self, tensor: Tensor, heads: int | None = None) -> Tensor:
        """`tensor` with its batch axes broadcast and flattened: `[batch, heads, length, width]`.

        A view for up to one batch axis; more axes that no stride can flatten are copied.
        """
        full = tensor.reshape((1,) * (len(self.lead) + 3 - tensor.dim()) + tuple(tensor.shape))
        full = full.expand(*self.lead, heads if heads is not None else full.shape[-3], *full.shape[-2:])
        return full.reshape(self.batch, *full.shape[-3:])

    def flat_query(self) -> Tensor:
        """The query, `[batch, heads, queries, head_dim]`."""
        return self.flat(
            self.query, self.heads if self.query.dim() < 3 or self.query.shape[-3] == 1 else None
        )

    def flat_key(self) -> Tensor:
        """The key, `[batch, kv_heads, keys, head_dim]`, its heads not repeated."""
        return self.flat(self.key)

    def pairs(self, tensor: Tensor, rows: slice, cols: slice) -> Tensor:
        """A mask or bias on one tile, `[1|batch, 1|heads, 1|rows, 1|cols]`, broadcast axes kept at 1."""
        part = self._pairs_view(tensor, rows, cols)
        batch = part.shape[:-3]
        if all(n == 1 for n in batch):
            return part.reshape(1, *part.shape[-3:])
        # A view where strides allow it; else a copy of this tile, never of the tensor.
        return part.expand(*self.lead, *part.shape[-3:]).reshape(self.batch, *part.shape[-3:])

    def pairs_at(self, tensor: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """A mask or bias at broadcasting indices of batch, head, query and key."""
        full = tensor.reshape((1,) * (len(self.lead) + 3 - tensor.dim()) + tuple(tensor.shape))
        places: list[Tensor] = []
        for length in reversed(self.lead):
            places.insert(0, b % max(1, length))
            b = torch.div(b, max(1, length), rounding_mode="floor")
        at = (*places, h, i, j)
        return full[tuple(x if n != 1 else torch.zeros_like(h) for n, x in zip(full.shape, at, strict=True))]

    def add_pairs(self, total: Tensor, part: Tensor, rows: slice, cols: slice) -> None:
        """Add one tile `[batch, heads, rows, cols]` to `total`, shaped as a mask or bias: broadcast axes are summed."""
        target = self._pairs_view(total, rows, cols)
        target += part.reshape(*self.lead, *part.shape[1:]).sum_to_size(target.shape)

    def _pairs_view(self, tensor: Tensor, rows: slice, cols: slice) -> Tensor:
        full = tensor[(None,) * (len(self.lead) + 3 - tensor.dim())]
        full = full[..., rows, :] if full.shape[-2] != 1 else full
        return full[..., cols] if full.shape[-1] != 1 else full


def build(
    query: Tensor,
    key: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bias: Tensor | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    score: Callable[..., Any] | None = None,
    caller: str = "kizuki.attend",
    values: bool = True,
) -> Problem:
    """Check every argument of `attend` and return the frozen `Problem`.

    `values=False` checks shapes only, for tensors whose numbers cannot be read (a tracer's, a transform's):
    then a scale given as a tensor is NaN here, and whoever has the numbers builds the problem again.
    """
    _check_tensor(caller, "query", query)
    _check_tensor(caller, "key", key)
    _check_same(caller, "key", key, query)
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(
            f"{caller}: key has head_dim {key.shape[-1]} but query has {query.shape[-1]}; give both the same "
            f"last axis (query {show(query)}, key {show(key)})"
        )
    if query.shape[-1] == 0:
        raise ShapeError(f"{caller}: query has head_dim 0; scores need at least 1 (query {show(query)})")
    rank = max(query.dim(), key.dim())
    heads = query.shape[-3] if query.dim() > 2 else 1
    kv_heads = key.shape[-3] if key.dim() > 2 else 1
    if heads == 1 and kv_heads > 1:
        heads = kv_heads
    _check_heads(caller, "key", key, kv_heads, heads, query)
    lead = _broadcast_lead(caller, query, key)
    problem = Problem(
        query=query,
        key=key,
        lead=lead,
        has_heads=rank > 2,
        heads=heads,
        kv_heads=kv_heads,
        queries=query.shape[-2],
        keys=key.shape[-2],
        head_dim=query.shape[-1],
        scale=_check_scale(caller, scale, query, values),
        softcap=_check_softcap(caller, softcap),
        bias=bias,
        sinks=sinks,
        mask=None,
        scale_tensor=scale if isinstance(scale, Tensor) else None,
    )
    if bias is not None:
        _check_bias(caller, bias, problem)
    if sinks is not None:
        _check_sinks(caller, sinks, problem)
    if score is not None:
        bent = functions.Score(score)
        bent.check(problem, caller, values)
        object.__setattr__(problem, "score", bent)
    rule = join_masks(caller, mask, causal, window)
    if rule is not None:
        rule.check(problem, caller, values)
        object.__setattr__(problem, "mask", rule)
    return problem


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` converted without turning a finite number into an infinite one.

    A float64 bias of −1e300 is a very low bias and not absence, so it becomes the lowest float32.
    """
    if tensor.dtype is dtype or torch.finfo(tensor.dtype).max <= torch.finfo(dtype).max:
        return tensor.to(dtype)
    limit = torch.finfo(dtype)
    return torch.where(tensor.isinf(), tensor, tensor.clamp(limit.min, limit.max)).to(dtype)


def check_value(problem: Problem, value: Tensor, name: str = "value", caller: str = "A @ value") -> None:
    """Check that `value` fits the columns of A."""
    check_operand(problem, value, problem.keys, "keys", name, caller)


def check_operand(problem: Problem, value: Tensor, length: int, axis: str, name: str, caller: str) -> None:
    """Check a right-hand side `[..., heads, length, width]`; its batch axes broadcast with those of A."""
    _check_tensor(caller, name, value)
    _check_same(caller, name, value, problem.query)
    if value.shape[-2] != length:
        other = "key" if axis == "keys" else "query"
        tensor = problem.key if axis == "keys" else problem.query
        raise ShapeError(
            f"{caller}: {name} has {value.shape[-2]} {axis} but {other} has {length}; give both the same length "
            f"({name} {show(value)}, {other} {show(tensor)})"
        )
    if problem.heads != 1 and value.dim() > 2:
        _check_heads(caller, name, value, value.shape[-3], problem.heads, problem.query)
    try:
        broadcast(value.shape[:-3], problem.lead)
    except RuntimeError:
        raise ShapeError(
            f"{caller}: {name} has batch axes {list(value.shape[:-3])} but A has {list(problem.lead)}; they must be "
            f"equal or 1 ({name} {show(value)}, A {list(problem.shape)})"
        ) from None


def widened(problem: Problem, value: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """`value` with the axes that A does not have moved into its width, and what moves them back in the result.

    A is the same for all of them, so `A @ value` with 5 batches of values is one product 5 times as wide.
    """
    own = (*problem.lead, problem.heads) if problem.has_heads else ()
    if len(own) == value.dim() - 2 and own == tuple(value.shape[:-2]):
        return value, lambda result: result
    rank = max(len(own), value.dim() - 2)
    first = rank - len(own)  # axes before this one A does not have at all
    own = (1,) * first + own
    given = value.reshape((1,) * (rank + 2 - value.dim()) + tuple(value.shape))
    more = [at for at in range(rank) if at < first or (own[at] == 1 and given.shape[at] != 1)]
    if not more:
        return value, lambda result: result
    rest = [at for at in range(rank) if at not in more]
    counts, (length, width) = [given.shape[at] for at in more], given.shape[-2:]
    kept = [1 if at in more else given.shape[at] for at in range(first, rank)]
    wide = given.permute(*rest, rank, *more, rank + 1).reshape(*kept, length, math.prod(counts) * width)

    def restore(result: Tensor) -> Tensor:
        rows = result.shape[-2]
        apart = result.reshape(*(own[at] for at in rest), rows, *counts, width)
        places = [len(rest) + 1 + more.index(at) if at in more else rest.index(at) for at in range(rank)]
        return apart.permute(*places, len(rest), -1)

    return wide, restore


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that `shapes` broadcast to; RuntimeError where they do not.

    Plain ints, because every call of every size pays for it (torch.broadcast_shapes takes 30 µs).
    """
    result: list[int] = []
    for shape in shapes:
        missing = len(shape) - len(result)
        if missing > 0:
            result = [1] * missing + result
        first = len(result) - len(shape)
        for at, size in enumerate(shape, first):
            if result[at] == 1:
                result[at] = size
            elif size not in (1, result[at]):
                raise RuntimeError(f"sizes {result[at]} and {size} do not broadcast")
    return tuple(result)


def _check_tensor(caller: str, name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise KizukiTypeError(
            f"{caller}: {name} is a {type(tensor).__name__} but must be a torch.Tensor; wrap it in "
            "torch.as_tensor(...)"
        )
    if tensor.layout is not torch.strided:
        raise KizukiTypeError(
            f"{caller}: {name} has layout {tensor.layout} but must be strided; call .to_dense() first"
        )
    if tensor.dtype not in DTYPES:
        raise KizukiTypeError(
            f"{caller}: {name} has dtype {tensor.dtype} but must be float16, bfloat16, float32 or float64; "
            "convert it first"
        )
    if tensor.dim() < 2:
        raise ShapeError(
            f"{caller}: {name} has {tensor.dim()} axes but needs at least 2, [length, width]; add the missing axes "
            f"({name} {show(tensor)})"
        )


def _check_same(caller: str, name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.dtype is not query.dtype:
        raise KizukiTypeError(
            f"{caller}: {name} has dtype {tensor.dtype} but query has {query.dtype}; convert one of them"
        )
    if tensor.device != query.device:
        raise KizukiTypeError(
            f"{caller}: {name} is on {tensor.device} but query is on {query.device}; move one of them"
        )


def _check_heads(caller: str, name: str, tensor: Tensor, kv_heads: int, heads: int, query: Tensor) -> None:
    if kv_heads == heads:
        return
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(
            f"{caller}: {name} has {kv_heads} heads but query has {heads}; the number of {name} heads must divide it "
            f"(query {show(query)}, {name} {show(tensor)})"
        )


def _broadcast_lead(caller: str, query: Tensor, key: Tensor) -> tuple[int, ...]:
    try:
        return broadcast(query.shape[:-3], key.shape[:-3])
    except RuntimeError:
        raise ShapeError(
            f"{caller}: key has batch axes {list(key.shape[:-3])} but query has {list(query.shape[:-3])}; "
            "they must be "
            f"equal or 1 (query {show(query)}, key {show(key)})"
        ) from None


def _check_scale(caller: str, scale: float | Tensor | None, query: Tensor, values: bool) -> float:
    if scale is None:
        return 1.0 / math.sqrt(query.shape[-1])
    if isinstance(scale, Tensor):
        if scale.dim() or not scale.dtype.is_floating_point:
            raise KizukiTypeError(
                f"{caller}: scale is {scale.dtype} of shape {show(scale)} but must be a number or a floating "
                "tensor of no axes; call .reshape(())"
            )
        if scale.device != query.device:
            raise KizukiTypeError(
                f"{caller}: scale is on {scale.device} but query is on {query.device}; move one of them"
            )
        return read_scale(caller, scale, query.dtype) if values else math.nan
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise KizukiTypeError(
            f"{caller}: scale is a {type(scale).__name__} but must be a number or None (1/sqrt(head_dim)); "
            "call float(scale)"
        )
    return read_scale(caller, scale, query.dtype)


def read_scale(caller: str, scale: float | Tensor, dtype: torch.dtype) -> float:
    """The number `scale` holds; OptionError where scores of queries of this dtype cannot be multiplied by it."""
    try:
        number = float(scale.detach() if isinstance(scale, Tensor) else scale)
    except OverflowError:  # a whole number of more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise OptionError(f"{caller}: scale is {number} but must be finite; None means 1/sqrt(head_dim)")
    limit = LARGEST_SCALE[dtype]
    if abs(number) > limit:
        kind = str(accumulates(dtype)).removeprefix("torch.")
        raise OptionError(
            f"{caller}: scale is {number} but must lie in ±{limit:.3g}, which {kind} can multiply by; None means "
            "1/sqrt(head_dim)"
        )
    return number


def _check_softcap(caller: str, softcap: float | None) -> float | None:
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise KizukiTypeError(f"{caller}: softcap is a {type(softcap).__name__} but must be a number or None")
    if not (math.isfinite(softcap) and softcap > 0):
        raise OptionError(f"{caller}: softcap is {softcap} but must be above 0; None turns it off")
    if not 1e-30 <= softcap <= 1e30:
        raise OptionError(
            f"{caller}: softcap is {softcap} but must lie in 1e-30 … 1e30, which float32 can divide by; "
            "None turns it off"
        )
    return float(softcap)


def _check_bias(caller: str, bias: Any, problem: Problem) -> None:
    if not isinstance(bias, Tensor) or not bias.dtype.is_floating_point:
        kind = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise KizukiTypeError(
            f"{caller}: bias is {kind} but must be a floating tensor added to the scores; a boolean mask "
            "goes into mask="
        )
    if bias.device != problem.device:
        raise KizukiTypeError(
            f"{caller}: bias is on {bias.device} but query is on {problem.device}; move one of them"
        )
    check_pairs(caller, "bias", bias, problem)


def check_pairs(caller: str, name: str, tensor: Tensor, problem: Problem) -> None:
    """Check that a mask or bias broadcasts to the shape of A and does not enlarge it."""
    target = problem.shape
    if not fits(tuple(tensor.shape), target):
        raise ShapeError(
            f"{caller}: {name} has shape {show(tensor)} but must broadcast to {list(target)} "
            "([..., heads, queries, keys]); give each axis that length or 1"
        )


def fits(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to `target` without enlarging it."""
    if len(shape) > len(target):
        return False
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(target), strict=False))


def _check_sinks(caller: str, sinks: Any, problem: Problem) -> None:
    if not isinstance(sinks, Tensor) or not sinks.dtype.is_floating_point:
        kind = sinks.dtype if isinstance(sinks, Tensor) else f"a {type(sinks).__name__}"
        raise KizukiTypeError(
            f"{caller}: sinks is {kind} but must be a floating tensor of one logit a head, [{problem.heads}]; "
            "convert it"
        )
    if tuple(sinks.shape) != (problem.heads,):
        raise ShapeError(
            f"{caller}: sinks has shape {show(sinks)} but must be [{problem.heads}], one logit for each query head"
        )
    if sinks.device != problem.device:
        raise KizukiTypeError(
            f"{caller}: sinks is on {sinks.device} but query is on {problem.device}; move one of them"
        )


def join_masks(
    caller: str,
    mask: Mask | Tensor | None,
    causal: bool,
    window: tuple[int | None, int | None] | None,
) -> Mask | None:
    """The one mask that `mask`, `causal` and `window` make together; None where there is none."""
    parts: list[Mask] = []
    if mask is not None:
        parts.append(as_mask(mask, caller))
    if not isinstance(causal, bool):
        raise KizukiTypeError(
            f"{caller}: causal is a {type(causal).__name__} but must be True or False; an alignment goes into "
            'mask=kizuki.masks.causal("lower_right")'
        )
    if causal:
        parts.append(masks.causal())
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise KizukiTypeError(
                f"{caller}: window is {window!r} but must be (left, right), the keys visible beyond the query's own; "
                "None on a side means unlimited"
            )
        parts.append(masks.window(*window))
    if not parts:
        return None
    joined = parts[0]
    for rule in parts[1:]:
        joined = joined.__and__(rule)  # torch.compile before 2.9 does not know & of objects
    return joined
