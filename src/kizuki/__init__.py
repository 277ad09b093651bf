"""kizuki (気づき): scaled dot-product self-attention as a matrix you can hold without storing it.

>>> import torch, kizuki
>>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
>>> A = kizuki.attend(q, k, causal=True)
>>> (A @ v).shape, A[0, 1, 4].shape
(torch.Size([1, 2, 5, 8]), torch.Size([5]))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Each public name and the module it lives in. A module loads when one of its names is first used, so that
# `import kizuki` and `kizuki --version` need neither torch nor its seconds.
_HOME = {
    "AttentionMatrix": "operator",
    "Identity": "products",
    "KizukiTypeError": "errors",
    "Leaks": "leaks",
    "Observation": "observation",
    "Observe": "observation",
    "OptionError": "errors",
    "Report": "accuracy",
    "ShapeError": "errors",
    "SizeError": "errors",
    "Verified": "verify",
    "attend": "operator",
    "attention": "functional",
    "check": "accuracy",
    "open": "models",
    "record": "models",
    "scaled_dot_product_attention": "sdpa",
}

__all__ = [
    "AttentionMatrix",
    "Identity",
    "KizukiTypeError",
    "Leaks",
    "Observation",
    "Observe",
    "OptionError",
    "Report",
    "ShapeError",
    "SizeError",
    "Verified",
    "attend",
    "attention",
    "check",
    "masks",
    "nn",
    "open",
    "record",
    "scaled_dot_product_attention",
]

if TYPE_CHECKING:
    from . import masks, nn
    from .accuracy import Report, check
    from .errors import KizukiTypeError, OptionError, ShapeError, SizeError
    from .functional import attention
    from .leaks import Leaks
    from .models.record import record
    from .models.store import open
    from .observation import Observation, Observe
    from .operator import AttentionMatrix, attend
    from .products import Identity
    from .sdpa import scaled_dot_product_attention
    from .verify import Verified


def __getattr__(name: str) -> Any:
    if name in ("masks", "nn"):
        return import_module(f".{name}", __name__)
    if name in _HOME:
        return globals().setdefault(name, getattr(import_module(f".{_HOME[name]}", __name__), name))
    raise AttributeError(f"module 'kizuki' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
