"""An emitted body that Python can call."""

from __future__ import annotations

from typing import Any

import numba
import numba.extending
import numpy as np
from numba.core import types

JIT, INTRINSIC = (
    numba.njit,
    numba.extending.intrinsic,
)  # the real ones: who looks at kernels puts others there


class Body:
    """An emitted body that Python calls: compiled at its first call, for the types it is given then."""

    def __init__(self, function: Any) -> None:
        count = function.__code__.co_argcount - 1
        names = ", ".join(f"a{n}" for n in range(count))
        space: dict[str, Any] = {"made": INTRINSIC(function)}
        exec(f"def call({names}): return made({names})", space)
        self.call = JIT(space["call"], error_model="numpy")

    def __call__(self, *given: Any) -> Any:
        found = self.call(*given)
        if type(found) is float:  # Numba hands a float32 out as Python's float
            (made, *_) = self.call.overloads.values()
            return np.float32(found) if made.signature.return_type is types.float32 else np.float64(found)
        return found
