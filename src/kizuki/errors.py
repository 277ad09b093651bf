"""The errors of the core: one line each, naming the argument, what was expected, what came, and the mend."""

from __future__ import annotations

from torch import Tensor


class ShapeError(ValueError):
    """An argument has the wrong number of axes or a wrong length on one of them."""


class OptionError(ValueError):
    """An argument has a value outside what it can mean, or two arguments contradict each other."""


class KizukiTypeError(TypeError):
    """An argument has the wrong type, dtype or device."""


class SizeError(ValueError):
    """A dense result was asked for that is larger than its limit; raised before any memory is taken."""


def show(tensor: Tensor) -> str:
    """The shape of a tensor as errors print it."""
    return "[" + ", ".join(str(n) for n in tensor.shape) + "]"
