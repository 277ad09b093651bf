"""`attn_implementation="kizuki"`: a Hugging Face model that computes its attention with `kizuki.attention`."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import masks
from ..errors import KizukiTypeError, OptionError, ShapeError, SizeError, show
from ..functional import attention as mix
from ..operator import attend
from .calls import want
from .hfmask import Plan, Reader, RuleMask, Scene, plan

NAME = "kizuki"

# What some models hand to their attention function and only some functions heed: what each would do to the numbers.
UNHEARD = {
    "indices": "chooses the keys of each query by itself (sparse attention)",
    "block_indices": "chooses the keys of each query by itself (sparse attention)",
    "topk_indices": "chooses the keys of each query by itself (sparse attention)",
    "head_mask": "scales whole heads by a head mask",
    "block_table": "reads its keys from a paged cache (continuous batching)",
    "block_tables": "reads its keys from a paged cache (continuous batching)",
}

_reader: Reader | None = None
_collector: Any = None  # transformers' context variable: what the model's caller wants collected


def install() -> None:
    """Register kizuki with transformers, so that `attn_implementation="kizuki"` names it.

        kizuki.models.install()
        model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="kizuki")

    or, for a model that is loaded, `model.set_attn_implementation("kizuki")`. Nothing else changes: a model that
    does not name it runs as before. Calling it again changes nothing.

    The model's attention becomes `kizuki.attention`: scaling, softcap, sinks, position bias (T5) and, in training,
    dropout as the model says; key heads are not repeated; training goes through the compiled backward kernel. Masks
    come as rules (causal, sliding windows on one or both sides, padding on either side, packed documents, chunks) and
    never as queries × keys, for prefill, continued prefill and decoding, with the dynamic, static and sliding caches.
    A mask that is no rule (a function of the model's own, a 4-D tensor) is computed once a pass, and so is every mask
    inside torch.compile and torch.export. A token of padding that sees nothing gives 0. `output_attentions=True`
    gives the weights, before dropout, where A is small enough to be stored; `kizuki.record` gives them anywhere.

    Raises:
        OptionError: no transformers, or one that describes its masks otherwise. Later, while a model runs: a model
            that does its attention by itself (BLOOM, MPT, XGLM, MPNet and others; Falcon and GPT-Neo are refused by
            transformers on loading), sparse attention (DeepSeek 3.2), continuous batching.

    Cost: none until a model runs; then one reading of the mask a pass, O(batch × keys).

    Example:
        >>> import torch, transformers, kizuki.models
        >>> kizuki.models.install()
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> model.set_attn_implementation("kizuki")
        >>> model(torch.tensor([[3, 1, 4, 1, 5]])).logits.shape
        torch.Size([1, 5, 11])
    """
    global _reader, _collector
    needs = "kizuki.models.install: needs transformers 5.24 or one that describes its masks as it does"
    try:
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
        from transformers.modeling_utils import AttentionInterface
        from transformers.utils import output_capturing
    except ImportError as error:
        raise OptionError(f"{needs}; pip install 'kizuki[models]'") from error
    collector = getattr(output_capturing, "_active_collector", None)
    if "q_offset" not in inspect.signature(sdpa_mask).parameters or collector is None:
        raise OptionError(f"{needs}; pip install -U transformers")
    if _reader is None:
        _reader, _collector = Reader(), collector
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **kwargs: Any,
) -> Tensor:
    """transformers' mask function of this implementation: a `RuleMask`; where a graph is traced, its numbers.

    It never answers None ("no mask: go by the module's is_causal flag"): a model that expects none cannot
    run unmasked by mistake.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask
    from transformers.utils.import_utils import is_tracing

    function = causal_mask_function if mask_function is None else mask_function
    if is_tracing(attention_mask) or is_tracing(q_offset):
        numbers: Any = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=cast(int, q_offset),
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        return cast(Tensor, numbers)
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.dtype is not torch.bool):
        raise ShapeError(
            f"kizuki: attention_mask is {attention_mask.dtype} of shape {show(attention_mask)} but must be "
            "[batch, length], 1 for a token and 0 for padding, or a 4-D mask of its own"
        )
    scene = Scene(
        batch_size,
        q_length,
        kv_length,
        int(q_offset),
        int(kv_offset),
        function,
        attention_mask,
        use_vmap,
        torch.device(device),
    )
    made = plan(scene, None if _reader is None else _reader.read(function))
    return RuleMask.of(scene, made)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function of this implementation: `([batch, queries, heads, value_dim], weights)`.

    query `[batch, heads, queries, head_dim]`, key and value `[batch, kv_heads, keys, ...]`. The weights are None
    unless they are asked for.
    """
    for name in kwargs.keys() & UNHEARD.keys():
        if kwargs[name] is not None:
            raise OptionError(
                f'kizuki: {type(module).__name__} {UNHEARD[name]}, which attn_implementation="kizuki" does not do; '
                'load the model with attn_implementation="eager"'
            )
    made, bias = _told(module, query, key, attention_mask, is_causal, kwargs)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    keys = key.shape[2]
    if made.start or made.stop != keys:
        key, value = key[:, :, made.start : made.stop], value[:, :, made.start : made.stop]
        if bias is not None and bias.shape[-1] != 1:
            bias = bias[..., made.start : made.stop]
    options = made.options(shared=not _watched())
    cu_seq_lens = kwargs.get("cu_seq_lens_q")
    if cu_seq_lens is not None:
        options = _packed(options, cu_seq_lens, kwargs.get("cu_seq_lens_k"), query, keys, made)
    more: Any = {"bias": bias, "scale": scaling, "softcap": softcap, "sinks": s_aux, **options}
    output, now = None, want()
    if now is not None and not made.start and made.stop == keys and not _watched():
        with suppress(OptionError, SizeError):  # of what is to be read; of the rest they come again below
            # A recording wants to look: in the same pass, and the output keeps its bits.
            output, now.observation = mix(query, key, value, dropout=dropout, observe=now.what, **more)
    if output is None:
        output = mix(query, key, value, dropout=dropout, **more)
    weights = None
    if _asked(kwargs):
        matrix = attend(query, key, **more)
        weights = nn.functional.pad(matrix.dense(), (made.start, keys - made.stop)).to(query.dtype)
    return output.transpose(1, 2).contiguous(), weights


def _told(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Any,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> tuple[Plan, Tensor | None]:
    """What a call says of its mask: a plan, and what is added to the scores."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        return _by_flag(module, queries, keys, is_causal, kwargs.get("sliding_window")), None
    if not isinstance(mask, Tensor):
        raise KizukiTypeError(
            f"kizuki: attention_mask is a {type(mask).__name__} but must be a tensor or None; give the model "
            "[batch, length] or [batch, heads, queries, keys]"
        )
    if mask.dim() != 4 or mask.shape[-1] not in (1, keys) or mask.shape[-2] not in (1, queries):
        raise ShapeError(
            f"kizuki: attention_mask has shape {show(mask)} but must be [batch, heads, {queries}, {keys}] here "
            f"(query {show(query)}, key {show(key)})"
        )
    if isinstance(mask, RuleMask):
        made = mask.plan_for(keys)
        return Plan.of_numbers(mask.numbers(), keys) if made is None else made, None
    if mask.dtype is torch.bool:
        return Plan.of_numbers(mask, keys), None
    return Plan(0, keys), mask


def _by_flag(module: nn.Module, queries: int, keys: int, is_causal: bool | None, sliding_window: Any) -> Plan:
    """No mask: as transformers' sdpa, causal by flag, query i on the keys up to i."""
    if isinstance(sliding_window, int) and keys > sliding_window:
        raise OptionError(
            f"kizuki: {type(module).__name__} has a sliding window of {sliding_window} and {keys} keys but gives no "
            "mask; call the model, which makes one, and not its layer"
        )
    flag = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not flag or queries <= 1:
        return Plan(0, keys)
    if keys < queries:
        return Plan(0, keys, masks.causal("upper_left"))
    return Plan(0, queries, causal=True)


def _packed(
    options: dict[str, Any], own: Tensor, others: Tensor | None, query: Tensor, keys: int, made: Plan
) -> dict[str, Any]:
    """Packed sequences that are said by where each begins (a collator for flash attention), on top of the mask."""
    same = others is None or others is own or torch.equal(own, others)
    if not same or query.shape[0] != 1 or query.shape[2] != keys:
        raise OptionError(
            "kizuki: cu_seq_lens says that several sequences lie in a cache of one batch entry (continuous batching), "
            'which attn_implementation="kizuki" does not do; use attn_implementation="paged|eager" for it'
        )
    ids = torch.searchsorted(own[1:].to(torch.int64), torch.arange(keys, device=own.device), right=True)
    documents = masks.documents(ids=ids, key_ids=ids[made.start : made.stop])
    given = options["mask"]
    return {**options, "mask": documents if given is None else given & documents}


def _watched() -> bool:
    """Whether what runs is traced or transformed, so that a mask must be one that can be written down."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def _asked(kwargs: dict[str, Any]) -> bool:
    """Whether the caller of the model wants its attention weights: an argument here, or transformers' collector."""
    if kwargs.get("output_attentions"):
        return True
    if torch.compiler.is_compiling():
        return False
    collected = None if _collector is None else _collector.get()
    return collected is not None and ("attentions" in collected or "cross_attentions" in collected)
