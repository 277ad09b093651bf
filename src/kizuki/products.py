"""Linear maps made of attention matrices: Aᵀ, A2 @ A1, ½·A + ½·I, the mean over heads. None of them is ever stored.

What is formed is only their product with a tensor, right to left, each A by its own kernel: a rollout through many
layers is one line and O(n) memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import readgrad
from .errors import KizukiTypeError, OptionError, ShapeError, show
from .problem import broadcast, check_operand, widened

if TYPE_CHECKING:
    from .operator import AttentionMatrix


class Linear:
    """What all of them can do: `@` a tensor or another, `+`, `-`, `*` a number, `.T`."""

    @property
    def shape(self) -> torch.Size:
        """`[..., rows, columns]`."""
        raise NotImplementedError

    @property
    def T(self) -> Any:
        """The transpose."""
        raise NotImplementedError

    def apply(self, x: Tensor) -> Tensor:
        """The product with a tensor `[..., columns, width]`."""
        raise NotImplementedError

    def __matmul__(self, other: Tensor | Linear) -> Any:
        if isinstance(other, Linear):
            return Product(self, other)
        return self.apply(other)

    def __add__(self, other: Linear) -> Sum:
        return Sum(self, other) if isinstance(other, Linear) else NotImplemented

    def __sub__(self, other: Linear) -> Sum:
        return Sum(self, Scaled(-1.0, other)) if isinstance(other, Linear) else NotImplemented

    def __mul__(self, factor: float) -> Scaled:
        return Scaled(factor, self)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Scaled:
        if isinstance(divisor, (int, float)) and divisor != 0:
            return Scaled(1.0 / divisor, self)
        raise OptionError(f"A / divisor: divisor is {divisor!r} but must be a number other than 0")

    def __neg__(self) -> Scaled:
        return Scaled(-1.0, self)


class Transposed(Linear):
    """Aᵀ, `[..., heads, keys, queries]`."""

    def __init__(self, matrix: AttentionMatrix) -> None:
        self.matrix = matrix

    @property
    def T(self) -> AttentionMatrix:
        return self.matrix

    @property
    def shape(self) -> torch.Size:
        *lead, queries, keys = self.matrix.shape
        return torch.Size((*lead, keys, queries))

    def apply(self, x: Tensor) -> Tensor:
        """`Aᵀ y` = Σ_i a_ij y_i for each key, `[..., heads, keys, width]`; y is `[..., heads, queries, width]`.

        Differentiable once, in y and in what A is made of.
        """
        problem = self.matrix.problem
        check_operand(problem, x, problem.queries, "queries", "y", "A.T @ y")
        y, restore = widened(problem, x)
        flat = problem.flat(y)
        with torch.no_grad():
            lse, backend = self.matrix._flat_lse(), self.matrix.backend
            result = backend.transposed(problem, lse, flat)
        if readgrad.wanted(problem, flat):
            result = readgrad.carry(readgrad.Reading("transposed", problem, backend, lse, result), flat)
        return restore(result.reshape(problem.result_shape(problem.keys, y.shape[-1])))


class Product(Linear):
    """`left @ right`; `@ x` runs right to left."""

    def __init__(self, left: Linear, right: Linear) -> None:
        if left.shape[-1] != right.shape[-2]:
            raise ShapeError(
                f"A2 @ A1: A2 has {left.shape[-1]} keys but A1 has {right.shape[-2]} queries; the axes must meet "
                f"(A2 {list(left.shape)}, A1 {list(right.shape)})"
            )
        self.left, self.right = left, right

    @property
    def shape(self) -> torch.Size:
        lead = _lead("A2 @ A1", self.left, self.right)
        return torch.Size((*lead, self.left.shape[-2], self.right.shape[-1]))

    @property
    def T(self) -> Product:
        return Product(self.right.T, self.left.T)

    def apply(self, x: Tensor) -> Tensor:
        result: Tensor = self.left @ (self.right @ x)
        return result


class Scaled(Linear):
    """`factor · inner`."""

    def __init__(self, factor: float, inner: Linear) -> None:
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            kind = type(factor).__name__
            raise KizukiTypeError(f"factor * A: factor is a {kind} but must be a number; use float(factor)")
        if not abs(factor) < float("inf"):
            raise OptionError(f"factor * A: factor is {factor} but must be finite")
        self.factor, self.inner = float(factor), inner

    @property
    def shape(self) -> torch.Size:
        return self.inner.shape

    @property
    def T(self) -> Scaled:
        return Scaled(self.factor, self.inner.T)

    def apply(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner @ x
        return result * self.factor


class Sum(Linear):
    """`left + right`; leading axes broadcast."""

    def __init__(self, left: Linear, right: Linear) -> None:
        if left.shape[-2:] != right.shape[-2:]:
            raise ShapeError(
                f"A2 + A1: A2 is {list(left.shape)} but A1 is {list(right.shape)}; their last two axes must be equal"
            )
        self.left, self.right = left, right
        _lead("A2 + A1", left, right)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*_lead("A2 + A1", self.left, self.right), *self.left.shape[-2:]))

    @property
    def T(self) -> Sum:
        return Sum(self.left.T, self.right.T)

    def apply(self, x: Tensor) -> Tensor:
        result: Tensor = (self.left @ x) + (self.right @ x)
        return result


class Identity(Linear):
    """The identity on `length` rows: a residual stream beside attention.

    >>> import torch, kizuki
    >>> A = kizuki.attend(torch.zeros(2, 1), torch.zeros(2, 1))
    >>> (0.5 * A + 0.5 * kizuki.Identity(2)) @ torch.tensor([[1.0], [0.0]])
    tensor([[0.7500],
            [0.2500]])
    """

    def __init__(self, length: int) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise OptionError(f"kizuki.Identity: length is {length!r} but must be a whole number >= 0")
        self.length = length

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.length, self.length))

    @property
    def T(self) -> Identity:
        return self

    def apply(self, x: Tensor) -> Tensor:
        _check_rows("I @ x", x, self.length)
        return x


class MeanHeads(Linear):
    """The mean of a matrix over its heads, `[..., rows, columns]`; `@ x` takes x without a heads axis.

    Heads differ, and their mean shows none of them: it is a step of the rollout (Abnar and Zuidema 2020), and rough.
    """

    def __init__(self, inner: Linear) -> None:
        if len(inner.shape) < 3:
            raise ShapeError(f"A.mean_heads: A is {list(inner.shape)} and has no axis of heads")
        self.inner = inner

    @property
    def shape(self) -> torch.Size:
        *lead, _, rows, columns = self.inner.shape
        return torch.Size((*lead, rows, columns))

    @property
    def T(self) -> MeanHeads:
        return MeanHeads(self.inner.T)

    def apply(self, x: Tensor) -> Tensor:
        _check_rows("A.mean_heads() @ x", x, self.shape[-1])
        result: Tensor = self.inner @ x.unsqueeze(-3)
        return result.mean(-3)


def _check_rows(caller: str, x: Tensor, length: int) -> None:
    if not isinstance(x, Tensor):
        raise KizukiTypeError(
            f"{caller}: x is a {type(x).__name__} but must be a tensor [..., {length}, width]"
        )
    if x.dim() < 2 or x.shape[-2] != length:
        raise ShapeError(f"{caller}: x {show(x)} must be [..., {length}, width]")


def _lead(caller: str, left: Linear, right: Linear) -> tuple[int, ...]:
    try:
        return broadcast(left.shape[:-2], right.shape[:-2])
    except RuntimeError:
        raise ShapeError(
            f"{caller}: A2 is {list(left.shape)} but A1 is {list(right.shape)}; the axes before the last two must be "
            "equal or 1"
        ) from None
