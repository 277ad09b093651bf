"""Attention that transformers writes out by hand, and where q, k and v are found in it: BLOOM, Falcon.

While a recording is open, hooks stand on such a module and on the projections inside it. Nothing is computed again
but Falcon's rotary embedding of q and k; keys behind a cache are read from the cache, where the module put them.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from .calls import Call, Watcher, listening


def knows(module: nn.Module) -> bool:
    """Whether a module's attention is one of those written out that are known here."""
    return _rule_of(module) is not None


def _rule_of(module: nn.Module) -> Callable[..., Call] | None:
    for cls in type(module).__mro__:
        if cls.__module__.startswith("transformers."):
            return KNOWN.get(cls.__name__)
    return None


class Written:
    """The hooks on one module; the watcher hears of it as its forward ends, unless it did already."""

    def __init__(self, module: nn.Module, watcher: Watcher, heard_of: Callable[[nn.Module], bool]) -> None:
        self.module = module
        self.watcher = watcher
        self.heard_of = heard_of
        self.inside: dict[str, Any] = {}

    def attach(self, undo: ExitStack) -> None:
        module = self.module
        into: nn.Module = module.query_key_value  # type: ignore[assignment]
        out_of: nn.Module = module.dense  # type: ignore[assignment]
        for hook in (
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            into.register_forward_hook(self._projected),
            out_of.register_forward_pre_hook(self._mixed),
            module.register_forward_hook(self._leave, with_kwargs=True),
        ):
            undo.callback(hook.remove)

    def _listens(self) -> bool:
        return self.watcher in listening()  # its pass runs, and on this thread

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._listens():
            self.inside = {}

    def _projected(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self._listens():
            self.inside["packed"] = output.detach()

    def _mixed(self, module: nn.Module, args: Any) -> None:
        if self._listens():
            self.inside["mixed"] = args[0].detach()

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._listens():
            return
        inside, self.inside = self.inside, {}
        rule = _rule_of(module)
        if rule is None or self.heard_of(module):  # Falcon under sdpa goes by PyTorch's function
            return
        packed, mixed = inside["packed"], inside["mixed"]
        self.watcher.hear(module, lambda owner: rule(owner, packed, mixed, _named(module, args, kwargs)))


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _behind_cache(module: Any, cache: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """All the keys and values that a module's attention read, from the cache it had just put its own into."""
    if cache is None:
        return key, value
    layer = cache.layers[module.layer_idx]
    return layer.keys.detach(), layer.values.detach()


def _heads_apart(mixed: Tensor, heads: int) -> Tensor:
    return mixed.unflatten(2, (heads, -1))  # [batch, queries, heads, value_dim]


def _bloom(module: Any, packed: Tensor, mixed: Tensor, given: dict[str, Any]) -> Call:
    query, key, value = module._reshape(packed)
    key, value = _behind_cache(module, given["layer_past"], key, value)
    batch, heads = query.shape[:2]
    alibi = given["alibi"].detach().view(batch, heads, 1, -1)  # [batch, heads, 1, keys]
    options = {"scaling": module.inv_norm_factor, "position_bias": alibi, "is_causal": False}
    return Call(
        module, "eager", query, key, value, given["attention_mask"], options, _heads_apart(mixed, heads),
        random=_drops(module),
    )  # fmt: skip


def _falcon(module: Any, packed: Tensor, mixed: Tensor, given: dict[str, Any]) -> Call:
    query, key, value = (x.transpose(1, 2) for x in module._split_heads(packed))
    options: dict[str, Any] = {"scaling": 1 / math.sqrt(module.head_dim), "is_causal": False}
    alibi = given["alibi"]
    if alibi is None:
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, *given["position_embeddings"])
    else:
        # It scales (q·k + alibi), so the bias in natural units is alibi · scale.
        options["position_bias"] = (
            alibi.detach().view(query.shape[0], query.shape[1], 1, -1) * module.inv_norm_factor
        )
    key, value = _behind_cache(module, given["layer_past"], key, value)
    return Call(
        module, "eager", query.detach(), key, value, given["attention_mask"], options,
        _heads_apart(mixed, query.shape[1]), random=alibi is not None and _drops(module),
    )  # fmt: skip


def _drops(module: Any) -> bool:
    return bool(module.training and module.attention_dropout.p)


KNOWN: dict[str, Callable[..., Call]] = {"BloomAttention": _bloom, "FalconAttention": _falcon}
