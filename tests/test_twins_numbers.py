"""Is the arithmetic of the twins right? Against exact rational numbers, and against torch's conversions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from twins import rounding
from twins.operands import drawn

from kizuki.cpu.target import TARGETS

SINGLE, DOUBLE = TARGETS["generic"], TARGETS["generic"].double


def rounded(x: Fraction, digits: int, least: int, most: int) -> float:
    """The nearest number of so many binary digits, ties to even, by counting; `least`: the exponent of the last place
    of subnormal numbers; ±inf from 2^most on."""
    if x == 0:
        return 0.0
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    place = Fraction(2) ** max(exponent - digits + 1, least)
    whole, rest = divmod(size, place)
    whole += rest > place / 2 or (rest == place / 2 and whole % 2 == 1)
    found = whole * place
    value = float("inf") if found >= Fraction(2) ** most else float(found)
    return value if x > 0 else -value


FORMATS = {"float32": (SINGLE, 24, -149, 128), "float64": (DOUBLE, 53, -1074, 1024)}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("hostile", [False, True], ids=["plain", "hostile"])
def test_a_multiply_add_is_rounded_once(name: str, hostile: bool) -> None:
    t, *form = FORMATS[name]
    random = np.random.default_rng(7)
    x, y, z = drawn(t, random, hostile, 3, 3000)
    with np.errstate(all="ignore"):
        z[::3] = -(x[::3] * y[::3])  # nothing but the product's error is left
        z[1::3] = x[1::3] * y[1::3] * z[1::3] ** 2
    found = rounding.fma(x, y, z)
    assert found.dtype == x.dtype
    for a, b, c, got in zip(x, y, z, found, strict=True):
        if np.isfinite([a, b, c]).all():
            exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
            assert got == rounded(exact, *form), f"{a!r} · {b!r} + {c!r}"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_multiply_add_of_what_is_not_finite(dtype: type) -> None:
    inf, nan, big = np.inf, np.nan, np.finfo(dtype).max
    cases = [
        (inf, 1, 1, inf),
        (inf, 0, 1, nan),
        (inf, 1, -inf, nan),
        (nan, 1, 1, nan),
        (1, 1, nan, nan),
        (big, big, -inf, -inf),  # the product overflows alone, and not here
        (big, 2, -big, big),
        (big, 2, 0, inf),
        (1, 1, inf, inf),
        (0, -1, 0, 0),
    ]
    x, y, z, want = (np.array(column, dtype) for column in zip(*cases, strict=True))
    np.testing.assert_array_equal(rounding.fma(x, y, z), want)


def test_bfloat16_is_torch_s() -> None:
    """Every bfloat16 and what lies between it and the next: to nearest, ties to even."""
    low = np.arange(1 << 16, dtype=np.uint32) << 16
    for rest in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (low | np.uint32(rest)).view(np.float32)
        want = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        real = ~np.isnan(x)
        assert np.array_equal(rounding.to_bfloat16(x)[real], want[real])
        assert (rounding.to_bfloat16(x)[~real] & 0x7FC0 == 0x7FC0).all()
    bits = np.arange(1 << 16, dtype=np.uint16)
    want = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(rounding.from_bfloat16(bits), want)


@pytest.mark.parametrize(("dtype", "lowest"), [(np.float32, -87.33654), (np.float64, -708.39641)])
def test_the_ends_of_exp(dtype: type, lowest: float) -> None:
    x = np.array([0.0, -0.0, -np.inf, np.nan, lowest, np.nextafter(dtype(lowest), dtype(-np.inf))], dtype)
    found = rounding.exp(x)
    np.testing.assert_array_equal(found[:4], np.array([1, 1, 0, np.nan], dtype))
    assert found[4] >= np.finfo(dtype).tiny
    assert found[5] == 0
    line = np.linspace(-80, 0, 500).astype(dtype)
    assert np.allclose(
        rounding.exp(line), torch.from_numpy(line).double().exp().numpy(), rtol=2 * np.finfo(dtype).eps
    )
