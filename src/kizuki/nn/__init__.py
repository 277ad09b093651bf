"""What a model keeps and calls: the cache of keys and values.

cache.py    KVCache: contiguous, paged, sliding window
pages.py    attention on pages that somebody else owns
"""

from __future__ import annotations

from .cache import KVCache
from .pages import paged_attend, paged_attention

__all__ = ["KVCache", "paged_attend", "paged_attention"]
