"""`attention`: the functional form of `attend(query, key, ...) @ value`; dropout, autocast, looking in passing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import Tensor

from . import backends, library
from .cpu import again
from .dropout import draw
from .errors import OptionError
from .mask import Mask
from .observation import Observation, Observe, asked, collect
from .operator import AttentionMatrix, Options, check_observe, make
from .problem import check_value

if TYPE_CHECKING:
    from typing_extensions import Unpack

PLAIN = (Tensor, torch.nn.Parameter)  # whose numbers can be read


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
    observe: None = None,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
    observe: Observe,
    **options: Unpack[Options],
) -> tuple[Tensor, Observation]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bias: Tensor | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    score: Callable[..., Any] | None = None,
    backend: str = "auto",
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
    observe: Observe | None = None,
) -> Tensor | tuple[Tensor, Observation]:
    """Scaled dot-product attention: `attend(query, key, ...) @ value`.

    Arguments are those of `attend`, and value `[..., kv_heads, keys, value_dim]`.
    Returns `[..., heads, queries, value_dim]` in the input dtype; rows with no visible key are 0. With
    `observe=kizuki.Observe(...)` it returns `(output, Observation)`, the output bit for bit the same.
    Raises as `attend` and `A @ value` do.

    dropout: each weight becomes 0 with this probability and is otherwise divided by 1 − dropout (training). Which
    do follows from their places and a seed drawn from `generator` (None: torch's own, `torch.manual_seed`), so
    that no mask is stored and the same seed drops the same weights on every backend. Readings never have dropout.

    Differentiable in query, key, value, bias, sinks and a scale given as a tensor, any number of times, in reverse
    and in forward mode; works under torch.func, torch.vmap, torch.compile and torch.export. Inside what is traced,
    torch.vmap works and torch.func's derivatives (grad, vjp, jvp) raise, for PyTorch's operators cannot follow them
    there; backward() on what the traced function gives works. Neither tracer takes `observe`, and no Python function
    (`score`, `masks.where`) leaves the process in an exported program.

    Under torch.autocast query, key and value are cast to its dtype first, as PyTorch's own attention does, but
    float64 stays; bias, sinks and scale keep theirs. Outside autocast query, key and value must have one dtype.

    Cost: 2·queries·keys·(head_dim + value_dim) operations over the visible keys; O(n) memory. A second
    derivative or a tangent runs in plain torch, block by block.

        >>> import torch, kizuki
        >>> x = torch.eye(3)
        >>> kizuki.attention(x, x, x, causal=True)[0]
        tensor([1., 0., 0.])
    """
    kind = None
    sign = None if mask is None else getattr(mask, "sign", None)
    plain = (
        (mask is None or sign is not None)
        and bias is None
        and sinks is None
        and score is None
        and observe is None
    )
    if plain and dropout == 0.0 and generator is None and not torch.compiler.is_compiling():
        kind = again.kind(query, key, value, causal, window, scale, softcap, backend, sign)
        known = None if kind is None else again.attention(kind, query, key, value)
        if known is not None:
            return known
    if isinstance(query, Tensor) and autocast(query.device.type):
        query, key, value = (_cast(t, query.device.type) for t in (query, key, value))
    options: Options = {
        "mask": mask,
        "causal": causal,
        "window": window,
        "bias": bias,
        "scale": scale,
        "softcap": softcap,
        "sinks": sinks,
        "score": score,
        "backend": backend,
    }
    if _traced(query, key, value):
        if observe is not None:
            raise OptionError(
                "kizuki.attention: observe= reads numbers that a tracer does not have; call it outside "
                "torch.compile and torch.export"
            )
        return library.attention(
            query,
            key,
            value,
            **options,
            dropout=dropout,
            generator=generator,
        )
    matrix = make("kizuki.attention", query, key, **options)
    problem = matrix.problem
    object.__setattr__(problem, "kind", kind)
    check_value(problem, value, caller="kizuki.attention")
    dropping = draw(dropout, generator, "kizuki.attention")
    mixing = matrix
    if dropping is not None:
        mixing = AttentionMatrix(replace(problem, dropout=dropping), matrix.backend)
    if observe is None:
        return cast(Tensor, mixing @ value)
    check_observe(observe, "kizuki.attention: observe")
    if dropping is not None or torch._C._are_functorch_transforms_active():
        output = (
            mixing @ value
        )  # readings never have dropout, and a transform's numbers are not read in passing
        if mixing._lse is not None:
            matrix._keep(mixing._lse)
        return output, matrix.observe(observe)
    made = matrix.begin(asked(observe))
    watching = AttentionMatrix(
        problem, cast(backends.Backend, backends.Watching(matrix.backend, [*made.values()]))
    )
    output = watching @ value
    if watching._lse is not None:
        matrix._keep(watching._lse)
    return output, collect(matrix, observe, made)


def autocast(device: str) -> bool:
    """Whether torch.autocast is on; torch refuses to answer for tensors that are on no device."""
    return device != "meta" and torch.is_autocast_enabled(device)


def _cast(tensor: Tensor, device: str) -> Tensor:
    """What torch.autocast makes of an operand of scaled_dot_product_attention."""
    if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device)) if tensor.device.type == device else tensor


def _traced(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the call is recorded rather than run, or some mode wants to see it as an operator."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    # Fake tensors are a subclass, and so are others that know operators only.
    return not (
        type(query) in PLAIN
        and type(key) in PLAIN
        and type(value) in PLAIN
        and not (query.is_meta or key.is_meta or value.is_meta)
    ) and all(isinstance(t, Tensor) for t in (query, key, value))
