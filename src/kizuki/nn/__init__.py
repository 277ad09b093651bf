"""Layers, and what they keep: self-attention, torch's multi-head attention, the cache of keys and values.

selfattention.py   SelfAttention: X → Q, K, V → A → Z
multihead.py       MultiheadAttention: torch.nn's, with its weights and arguments
positions.py       rotary positions and ALiBi
cache.py           KVCache: contiguous, paged, sliding window
pages.py           attention on pages that somebody else owns
"""

from __future__ import annotations

from .cache import KVCache
from .multihead import MultiheadAttention
from .pages import paged_attend, paged_attention
from .selfattention import SelfAttention

__all__ = ["KVCache", "MultiheadAttention", "SelfAttention", "paged_attend", "paged_attention"]
