"""Aᵀ and products of matrices: what is formed is only their product with a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import portable
from .errors import ShapeError
from .problem import check_operand, widened

if TYPE_CHECKING:
    from .operator import AttentionMatrix


class Transposed:
    """Aᵀ, `[..., heads, keys, queries]`; only its product with a tensor is ever formed."""

    def __init__(self, matrix: AttentionMatrix) -> None:
        self.matrix = matrix

    @property
    def T(self) -> AttentionMatrix:
        return self.matrix

    @property
    def shape(self) -> torch.Size:
        *lead, queries, keys = self.matrix.shape
        return torch.Size((*lead, keys, queries))

    def __matmul__(self, y: Tensor) -> Tensor:
        """`Aᵀ y` = Σ_i a_ij y_i for each key, `[..., heads, keys, width]`; y is `[..., heads, queries, width]`."""
        problem = self.matrix.problem
        check_operand(problem, y, problem.queries, "queries", "y", "A.T @ y")
        with torch.no_grad():
            y, restore = widened(problem, y)
            result = portable.transposed(problem, self.matrix._torch_lse(), problem.flat(y))
        return restore(result.reshape(problem.result_shape(problem.keys, y.shape[-1])))


class Product:
    """`left @ right`, a product of matrices none of which is stored; `@ x` runs right to left."""

    def __init__(self, left: AttentionMatrix | Product, right: AttentionMatrix | Product) -> None:
        if left.shape[-1] != right.shape[-2]:
            raise ShapeError(
                f"A2 @ A1: A2 has {left.shape[-1]} keys but A1 has {right.shape[-2]} queries; the axes must meet "
                f"(A2 {list(left.shape)}, A1 {list(right.shape)})"
            )
        self.left, self.right = left, right

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.left.shape[:-1], self.right.shape[-1]))

    def __matmul__(self, other: Tensor | AttentionMatrix | Product) -> Any:
        if not isinstance(other, Tensor):
            return Product(self, other)
        return self.left @ (self.right @ other)
