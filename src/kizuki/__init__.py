"""kizuki (気づき): scaled dot-product self-attention as a matrix you can hold without storing it.

>>> import torch, kizuki
>>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
>>> A = kizuki.attend(q, k, causal=True)
>>> (A @ v).shape, A[0, 1, 4].shape
(torch.Size([1, 2, 5, 8]), torch.Size([5]))
"""

from __future__ import annotations

from typing import Any

from . import masks
from .check import Report, check
from .errors import KizukiTypeError, OptionError, ShapeError, SizeError
from .observation import Observation, Observe
from .operator import AttentionMatrix, attend, attention

__version__ = "0.1.0"

__all__ = [
    "AttentionMatrix",
    "KizukiTypeError",
    "Observation",
    "Observe",
    "OptionError",
    "Report",
    "ShapeError",
    "SizeError",
    "attend",
    "attention",
    "check",
    "masks",
    "record",
]


def __getattr__(name: str) -> Any:
    # `record` needs transformers' seams; it loads when used, so that `import kizuki` stays light.
    if name == "record":
        from .models import record

        return record
    raise AttributeError(f"module 'kizuki' has no attribute {name!r}")
