"""The types that kernels compute in, and what their exponentials need: LLVM's types and polynomials."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llvmlite import ir
from numba import types

F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)

LOG2E = 1.4426950408889634
NEG_INF = -math.inf


@dataclass(frozen=True)
class Real:
    """What the kernels need to know of a floating type: its exponential, and scalar access to memory."""

    size: int
    ir: ir.Type
    bits: ir.IntType
    numba: types.Type
    exp2: tuple[float, ...]  # polynomial of 2^f on [-0.5, 0.5]
    mantissa: int
    bias: int
    tanh: tuple[float, ...]  # tanh(x)/x − 1 as a polynomial of x² up to |x| = 0.625, from x² on
    lowest: (
        float  # exp of less than this is below the smallest normal number: it becomes 0, as exp(−inf) must
    )

    @property
    def magic(self) -> float:
        """1.5·2^mantissa + bias: adding it rounds to an integer and leaves n + bias in the low bits."""
        return 1.5 * 2.0**self.mantissa + self.bias


# 2^f by weighted least squares on Chebyshev nodes: degree 6, relative error 2e-9, and degree 12, 2e-17. The constant
# term is exactly 1, so that the largest weight of a row is e^0 = 1 without rounding.
FLOAT = Real(
    size=4,
    ir=F32,
    bits=I32,
    numba=types.float32,
    exp2=(
        1.0,
        0.6931472057372412,
        0.24022646890575755,
        0.055503287770067467,
        0.009618488963429359,
        0.0013399931205895048,
        0.00015345810305502153,
    ),
    mantissa=23,
    bias=127,
    tanh=(
        -0.33333279208370636,
        0.133313813543585,
        -0.053735318849328396,
        0.020626291822942105,
        -0.005691985662883399,
    ),
    lowest=-87.33654,
)
DOUBLE = Real(
    size=8,
    ir=F64,
    bits=I64,
    numba=types.float64,
    exp2=(
        1.0,
        0.6931471805599453,
        0.24022650695910072,
        0.055504108664821694,
        0.009618129107628349,
        0.0013333558146391325,
        0.0001540353039361007,
        1.5252733855404498e-05,
        1.3215486617632906e-06,
        1.0178051548954344e-07,
        7.054966670034976e-09,
        4.4566235127964573e-10,
        2.563554075797703e-11,
    ),
    mantissa=52,
    bias=1023,
    tanh=(
        -0.3333333333333333,
        0.13333333333333333,
        -0.053968253968253575,
        0.021869488536136735,
        -0.008863235529384327,
        0.0035921280270908877,
        -0.0014558342673388481,
        0.0005900263618497202,
        -0.00023912201993663828,
        9.688098087160331e-05,
        -3.915502443650285e-05,
        1.5594329654446956e-05,
        -5.834559094430656e-06,
        1.7913931177970182e-06,
        -3.20559281854734e-07,
    ),
    lowest=-708.39641,
)


def real(size: int) -> Real:
    """The floating type of `size` bytes."""
    return FLOAT if size == 4 else DOUBLE
