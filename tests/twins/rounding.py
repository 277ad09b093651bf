"""Arithmetic of the kernels that NumPy has not: the multiply-add rounded once, bfloat16, exp and tanh as promised.

Each is derived from what it must give, not from how the kernels get it; test_twins.py holds them against exact
rational numbers.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SPLITTER = 2.0**27 + 1  # halves of a float64 (Veltkamp 1968)
LARGE, SMALL = 2.0**500, 2.0**-400  # between them no product's error is lost
LOWEST = {4: np.float32(-87.33654), 8: -708.39641}  # exp of less is below the smallest normal number


def fma(x: Any, y: Any, z: Any) -> Any:
    """x·y + z rounded once, float32 or float64, elementwise."""
    x, y, z = np.broadcast_arrays(*np.atleast_1d(x, y, z))
    with np.errstate(all="ignore"):
        return _single(x, y, z) if x.dtype == np.float32 else _double(x, y, z)


def _odd(x: Array, error: Array) -> Array:
    """A sum and what it lost, rounded to odd: rounding that once more gives what rounding once gives.

    (Boldo and Melquiond 2008: the wider type must have two bits more.) What lies between two neighbours goes to the
    one whose last bit is 1.
    """
    bits = x.view(np.int64)
    step = np.where((error > 0) == (x > 0), 1, -1)
    moves = (error != 0) & np.isfinite(x) & (bits & 1 == 0)
    return np.where(moves, (bits + step).view(np.float64), x)


def _sum(a: Array, c: Array) -> tuple[Array, Array]:
    """a + c and its error (Knuth)."""
    s = a + c
    b = s - a
    return s, (a - (s - b)) + (c - b)


def _single(x: Array, y: Array, z: Array) -> Array:
    product = x.astype(np.float64) * y.astype(np.float64)  # exact: 24 + 24 bits
    return np.asarray(_odd(*_sum(product, z.astype(np.float64))).astype(np.float32))


def _halves(x: Array) -> tuple[Array, Array]:
    far = x * SPLITTER
    high = far - (far - x)
    return high, x - high


def _double(x: Array, y: Array, z: Array) -> Array:
    product = x * y
    (a, b), (c, d) = _halves(x), _halves(y)
    lost = b * d - (((product - a * c) - b * c) - a * d)  # Dekker: the product's error, exactly
    high, low = _sum(z, lost)
    top, rest = _sum(product, high)
    found = np.asarray(top + _odd(low + rest, _sum(low, rest)[1]))
    finite = np.isfinite(x) & np.isfinite(y)
    found = np.where(finite, np.where(np.isfinite(z), found, z), product + z)
    size = np.maximum(np.maximum(abs(x), abs(y)), np.maximum(abs(product), abs(z)))
    least = np.minimum(np.minimum(abs(x), abs(y)), abs(product))
    safe = (size < LARGE) & ((least > SMALL) | (x == 0) | (y == 0)) & ((abs(z) > SMALL) | (z == 0))
    found = np.array(found)
    for at in zip(*np.nonzero(finite & np.isfinite(z) & ~safe), strict=True):
        found[at] = exactly(x[at], y[at], z[at])
    return found


def exactly(x: float, y: float, z: float) -> float:
    """x·y + z of finite float64 by rational numbers, rounded once."""
    total = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    if total == 0:
        return float(x) * float(y) + float(z)  # for the sign of zero
    try:
        return float(total)
    except OverflowError:
        return np.inf if total > 0 else -np.inf


def from_bfloat16(bits: Array) -> Array:
    """bfloat16 numbers as float32: they are its upper half."""
    return np.asarray((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))


def to_bfloat16(x: Array) -> Array:
    """The bits of float32 numbers rounded to 8 significant bits, ties to even; a NaN keeps its sign and is quiet."""
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        _, exponent = np.frexp(np.where(np.isfinite(wide), wide, 0.0))
        unit = np.ldexp(
            1.0, np.maximum(exponent, -125) - 8
        )  # of the last bit; subnormal numbers share theirs
        near = np.where(np.isfinite(wide), np.rint(wide / unit) * unit, wide)
        bits = near.astype(np.float32).view(np.uint32) >> np.uint32(16)
        nan = np.where(np.signbit(x), 0xFFC0, 0x7FC0)
    return np.asarray(np.where(np.isnan(x), nan, bits).astype(np.uint16))


def _wider(x: Array) -> Array:
    return x.astype(np.float64 if x.dtype == np.float32 else np.longdouble)


def exp(x: Array) -> Array:
    """e^x for x that is not above 0 by more than rounding; exactly 0 below the type's lowest; NaN for NaN."""
    with np.errstate(all="ignore"):
        found = np.exp(_wider(x)).astype(x.dtype)
        return np.where(x < LOWEST[x.dtype.itemsize], x.dtype.type(0), found)


def tanh(x: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(np.tanh(_wider(x)).astype(x.dtype))


def larger(best: Array, x: Array) -> Array:
    """The larger of two; `best` where x is NaN, and where they are equal."""
    with np.errstate(invalid="ignore"):
        return np.where(x > best, x, best)


def dot_pairs(x: Array, y: Array, total: Array) -> Array:
    """total + the products of the two bfloat16 in each 32-bit word of x and y, the low halves first."""
    for half in (0, 16):
        a, b = ((w >> np.uint32(half)).astype(np.uint16) for w in np.broadcast_arrays(x, y))
        total = fma(from_bfloat16(a), from_bfloat16(b), total)
    return total


def folded(vector: Array, combine: Any) -> Any:
    """The lanes of a vector combined pairwise: the first half with the second, and again."""
    while vector.size > 1:
        half = vector.size // 2
        vector = combine(vector[:half], vector[half:])
    return vector[0]
