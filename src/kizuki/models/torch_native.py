"""Where attention passes by in models that use PyTorch's own functions.

While a recording is open these entries are wrapped: `F.scaled_dot_product_attention`, kizuki's function of that name
and `kizuki.attention` (also where a module imported them by name), `KVCache.attention`,
`F.multi_head_attention_forward` (what `nn.MultiheadAttention` calls, and where it writes its attention out to return
weights), and the two fused functions of the fast path, `torch._native_multi_head_attention` and
`torch._transformer_encoder_layer_fwd`.

A wrapper calls the original with exactly what it was given, so that no bit of the output changes; only on a thread
where a recorded pass is running does it then tell what went by. The fast path hands out no query, key or value: they
are computed once more from its input and its weights, and checked by carrying rows of A v through the rest of the layer
to the output that it did give.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .calls import Call, listening, tell, told
from .recording import leeway
from .rule import RecordError

if TYPE_CHECKING:
    from kizuki.nn import KVCache

_lock = threading.Lock()
_installed = 0
_undo: list[tuple[Any, str, Any, Any]] = []  # (module, name, original, wrapper)


def install() -> None:
    """Wrap the entries; counts, so that recordings may overlap."""
    global _installed
    with _lock:
        if _installed == 0:
            _replace(F, "scaled_dot_product_attention", _sdpa)
            for name, tell_of in (("scaled_dot_product_attention", _sdpa), ("attention", _attention)):
                _replace(_home_of(name), name, tell_of)
            _replace(_cache_class(), "attention", _cached)
            _replace(F, "multi_head_attention_forward", _multi_head)
            _replace(torch, "_native_multi_head_attention", _native)
            _replace(torch, "_transformer_encoder_layer_fwd", _encoder_layer)
        _installed += 1


def uninstall() -> None:
    """Undo one `install`; the last one puts back every name that still holds our wrapper."""
    global _installed
    with _lock:
        _installed -= 1
        if _installed == 0:
            for module, name, original, wrapper in _undo:
                if getattr(module, name, None) is wrapper:
                    setattr(module, name, original)
            _undo.clear()


def _home_of(name: str) -> Any:
    """The module of kizuki that a public function lives in."""
    import kizuki

    function = getattr(kizuki, name)  # also makes the package hold it, so that it is wrapped there too
    return sys.modules[function.__module__]


def _cache_class() -> type[KVCache]:
    from kizuki.nn import KVCache  # with all of its room, which is loaded when it is used

    return KVCache


def _replace(home: Any, name: str, tell_of: Callable[..., Any]) -> None:
    """Wrap `home.name`, there and in every loaded module that imported it under its name."""
    original = getattr(home, name)
    wrapper = _wrapped(original, tell_of)
    for module in [home, *list(sys.modules.values())]:
        held = getattr(module, "__dict__", {})
        if module is home or (isinstance(held, dict) and held.get(name) is original):
            setattr(module, name, wrapper)
            _undo.append((module, name, original, wrapper))


def _wrapped(original: Callable[..., Any], tell_of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def entry(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not listening():
            return original(*args, **kwargs)
        return tell_of(original, *args, **kwargs)

    entry._kizuki = True  # type: ignore[attr-defined]
    return entry


# -- F.scaled_dot_product_attention ----------------------------------------------------------------


def _sdpa(
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    with told():
        output = original(query, key, value, attn_mask, dropout_p, is_causal, **options)

    def call(module: nn.Module) -> Call:
        mask = attn_mask
        if mask is not None:
            mask = _spread(mask, query)
        return Call(
            module,
            "torch",
            _four(query),
            _four(key),
            _four(value),
            mask,
            {"scaling": options.get("scale"), "is_causal": is_causal},
            _four(output).transpose(1, 2),
            random=dropout_p > 0,
        )

    tell(listening(), call)
    return output


def _attention(
    original: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Any:
    """`kizuki.attention`, which kizuki's own layers call."""
    with told():
        output = original(query, key, value, **options)
    mixed = output[0] if isinstance(output, tuple) else output

    def call(module: nn.Module) -> Call:
        from kizuki import masks

        if options.get("score") is not None:
            raise RecordError("its scores go through a function of their own, which is not recorded")
        mask, bias = options.get("mask"), options.get("bias")
        rules = [masks.dense(mask) if isinstance(mask, Tensor) else mask] if mask is not None else []
        if options.get("window") is not None:
            rules.append(masks.window(*options["window"]))
        causal = bool(options.get("causal"))
        if rules and causal:
            rules.append(masks.causal())
        return Call(
            module,
            "note",
            _four(query),
            _four(key),
            _four(value),
            functools.reduce(operator.and_, rules) if rules else None,
            {
                "scaling": options.get("scale"),
                "softcap": options.get("softcap"),
                "s_aux": options.get("sinks"),
                "position_bias": None if bias is None else _spread(bias, query),
                "is_causal": causal,
            },
            _four(mixed).transpose(1, 2),
            random=bool(options.get("dropout")),
        )

    tell(listening(), call)
    return output


def _cached(original: Callable[..., Tensor], cache: KVCache, query: Tensor, **options: Any) -> Tensor:
    """`KVCache.attention`: the newest queries, and a copy of all that the cache holds at this moment."""
    with told():
        output = original(cache, query, **options)

    def call(module: nn.Module) -> Call:
        if options.get("score") is not None:
            raise RecordError("its scores go through a function of their own, which is not recorded")
        from kizuki import masks

        bias, mask = options.get("bias"), options.get("mask")
        rule = cache.mask(query.shape[2])
        if mask is not None:
            rule = rule & (masks.dense(mask) if isinstance(mask, Tensor) else mask)
        return Call(
            module,
            "note",
            query,
            cache.key.clone(),  # pages are used again, and a view would be seen to change
            cache.value.clone(),
            rule,
            {
                "scaling": options.get("scale"),
                "softcap": options.get("softcap"),
                "s_aux": options.get("sinks"),
                "position_bias": None if bias is None else _spread(bias, query),
            },
            output.transpose(1, 2),
        )

    tell(listening(), call)
    return output


def _four(tensor: Tensor) -> Tensor:
    """`[batch, heads, length, dim]` of attention over any leading axes: no heads, or several batch axes."""
    if tensor.is_nested:
        raise RecordError("it is given nested tensors, which have no one length to show")
    if tensor.dim() > 4:
        return tensor.flatten(0, -4)
    if tensor.dim() == 3:  # [batch, length, dim] has one head
        return tensor[:, None]
    return tensor if tensor.dim() == 4 else tensor[None, None]


def _spread(mask: Tensor, query: Tensor) -> Tensor:
    """A mask that broadcasts to `[..., queries, keys]` with the axes of `_four(query)`."""
    mask = mask.reshape((1,) * (query.dim() - mask.dim()) + tuple(mask.shape))
    return _four(mask if query.dim() <= 4 else mask.expand(*query.shape[:-3], *mask.shape[-3:]))


# -- nn.MultiheadAttention -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Projected:
    """Output behind the output projection W_O, and behind the rest of an encoder layer where there is one."""

    output: Tensor  # [batch, queries, width], not yet copied
    weight: Tensor
    bias: Tensor | None
    rest: Callable[[list[int], Tensor], Tensor] | None = (
        None  # rows of attention -> rows of the layer's output
    )
    real: Tensor | None = None  # bool [batch, queries]: rows that exist

    def gap(self, rows: list[int], mixed: Tensor) -> float:
        joined = mixed.transpose(1, 2).flatten(2).to(self.weight.dtype)  # [batch, rows, width]
        mine = F.linear(joined, self.weight, self.bias)
        if self.rest is not None:
            mine = self.rest(rows, mine)
        own = self.output[:, rows]
        # Behind W_O and a residual the sizes are those of the output itself.
        unit = leeway(own.dtype) * max(float(own.abs().nan_to_num(0, 0, 0).max()), 1e-30)
        gap = (mine - own).abs().amax(-1)
        gap = gap.masked_fill(mine.isnan().any(-1) & own.isnan().any(-1), 0)
        if self.real is not None:
            gap = gap.masked_fill(~self.real[:, rows], 0)
        return float(gap.nan_to_num(nan=math.inf).max()) / unit if gap.numel() else 0.0


MULTI_HEAD = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights",
    "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k",
    "static_v", "average_attn_weights", "is_causal",
)  # fmt: skip


def _multi_head(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = {"training": True, "need_weights": True, **dict(zip(MULTI_HEAD, args, strict=False)), **kwargs}
    if not given["need_weights"]:
        return original(*args, **kwargs)  # ends in F.scaled_dot_product_attention, which tells
    output = original(*args, **kwargs)
    tell(listening(), lambda module: _written_out(module, given, output[0]))
    return output


def _written_out(module: nn.Module, given: dict[str, Any], output: Tensor) -> Call:
    """The call inside `F.multi_head_attention_forward` where it returns weights: its projections once more."""
    if given.get("static_k") is not None or given.get("static_v") is not None:
        raise RecordError("F.multi_head_attention_forward with static_k or static_v is not recorded")
    query, key, value = (_batched(given[name].detach()) for name in ("query", "key", "value"))
    heads, batch = given["num_heads"], query.shape[1]
    bias = given["in_proj_bias"]
    with torch.no_grad():
        if given.get("use_separate_proj_weight"):
            weights = [given[f"{name}_proj_weight"] for name in "qkv"]
        else:
            weights = list(given["in_proj_weight"].chunk(3))
        biases = [None] * 3 if bias is None else list(bias.chunk(3))
        q, k, v = (
            F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )  # [length, batch, width]
        extra = 0
        if given.get("bias_k") is not None:
            k, v = (
                torch.cat([x, given[name].detach().expand(1, batch, -1)])
                for x, name in ((k, "bias_k"), (v, "bias_v"))
            )
            extra += 1
        if given.get("add_zero_attn"):
            k, v = (torch.cat([x, torch.zeros_like(x[:1])]) for x in (k, v))
            extra += 1
        split = [
            x.unflatten(2, (heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v)
        ]  # [batch, heads, length, dim]
        mask = _merged(given.get("attn_mask"), given.get("key_padding_mask"), batch, heads, extra, q.dtype)
    return Call(
        module,
        "torch",
        split[0],
        split[1],
        split[2],
        mask,
        {},
        _Projected(
            _batched(output.detach()).transpose(0, 1),
            given["out_proj_weight"].detach(),
            None if given["out_proj_bias"] is None else given["out_proj_bias"].detach(),
        ),
        random=bool(given["training"] and given["dropout_p"]),
    )


def _batched(x: Tensor) -> Tensor:
    """`[length, batch, width]`."""
    return x if x.dim() == 3 else x[:, None]


def _merged(
    attn_mask: Tensor | None,
    padding: Tensor | None,
    batch: int,
    heads: int,
    extra: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """`nn.MultiheadAttention`'s two masks as one to add to the scores, `[batch|1, heads|1, queries|1, keys]`.

    Its bool masks say what is left out, and the `extra` learned and zero keys are always seen.
    """
    parts = []
    if attn_mask is not None:
        leading = (1, 1) if attn_mask.dim() == 2 else (batch, heads)
        parts.append(attn_mask.view(*leading, *attn_mask.shape[-2:]))
    if padding is not None:
        parts.append(padding.view(-1, 1, 1, padding.shape[-1]))
    merged = None
    for part in parts:
        added = torch.zeros(part.shape, dtype=dtype, device=part.device)
        added = added.masked_fill(part, -math.inf) if part.dtype is torch.bool else part.to(dtype)
        merged = added if merged is None else merged + added
    return merged if merged is None or not extra else F.pad(merged, (0, extra))


# -- the fast path ---------------------------------------------------------------------------------


def _native(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = original(*args, **kwargs)
    names = ("query", "key", "value", "embed_dim", "num_heads", "in_proj_weight", "in_proj_bias", "out_proj_weight",
             "out_proj_bias", "mask", "need_weights", "average_attn_weights", "mask_type")  # fmt: skip
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tell(listening(), lambda module: _fast(module, given["query"], given["query"], given, output[0], None))
    return output


def _encoder_layer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = original(*args, **kwargs)
    names = ("src", "embed_dim", "num_heads", "in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias",
             "use_gelu", "norm_first", "eps", "norm_weight_1", "norm_bias_1", "norm_weight_2", "norm_bias_2",
             "ffn_weight_1", "ffn_bias_1", "ffn_weight_2", "ffn_bias_2", "mask", "mask_type")  # fmt: skip
    given = {**dict(zip(names, args, strict=False)), **kwargs}

    def call(module: nn.Module) -> Call:
        with torch.no_grad():
            source, _ = _dense(given["src"])
            attended = _norm(given, 1, source) if given["norm_first"] else source
        return _fast(
            module, given["src"], attended, given, output, lambda rows, x: _rest(given, source[:, rows], x)
        )

    tell(listening(), call, part="self_attn")
    return output


def _fast(
    module: nn.Module,
    source: Tensor,
    attended: Tensor,
    given: dict[str, Any],
    output: Tensor,
    rest: Callable[[list[int], Tensor], Tensor] | None,
) -> Call:
    """The call inside a fused function: q, k, v once more from what was attended and the packed weights."""
    with torch.no_grad():
        _, real = _dense(source)
        attended, _ = _dense(attended)
        shown, _ = _dense(output)
        packed = F.linear(
            attended, given["in_proj_weight"], given["in_proj_bias"]
        )  # [batch, length, 3 · width]
        q, k, v = (x.unflatten(2, (given["num_heads"], -1)).transpose(1, 2) for x in packed.chunk(3, -1))
    mask = given.get("mask")
    if mask is not None:
        if mask.dim() == 2 and given.get("mask_type") == 1:
            mask = mask[:, None, None]  # [batch, keys]: padding
        elif mask.dim() == 2:
            mask = mask[None, None]
        mask = mask == 0  # both its kinds say 0 where a key is seen
    options: dict[str, Any] = {}
    if real is not None:
        options["lengths"] = real
    behind = _Projected(
        shown.detach(), given["out_proj_weight"].detach(), given["out_proj_bias"].detach(), rest, real
    )
    return Call(module, "torch", q.detach(), k.detach(), v.detach(), mask, options, behind)


def _dense(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A nested batch padded with 0, and which places are real; any other as it is."""
    if not x.is_nested:
        return x, None
    padded = torch.nested.to_padded_tensor(x, 0.0)
    lengths = torch.tensor([part.shape[0] for part in x.unbind()], device=padded.device)
    return padded, torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]


def _norm(given: dict[str, Any], which: int, x: Tensor) -> Tensor:
    return F.layer_norm(
        x, x.shape[-1:], given[f"norm_weight_{which}"], given[f"norm_bias_{which}"], given["eps"]
    )


def _rest(given: dict[str, Any], source: Tensor, attention: Tensor) -> Tensor:
    """What an encoder layer makes of its attention, row by row."""

    def feed(x: Tensor) -> Tensor:
        inner = F.linear(x, given["ffn_weight_1"], given["ffn_bias_1"])
        inner = F.gelu(inner) if given["use_gelu"] else F.relu(inner)
        return F.linear(inner, given["ffn_weight_2"], given["ffn_bias_2"])

    with torch.no_grad():
        if given["norm_first"]:
            x = source + attention
            return x + feed(_norm(given, 2, x))
        x = _norm(given, 1, source + attention)
        return _norm(given, 2, x + feed(x))
