"""NumPy twins of the kernels' emitted bodies: what each of them means, over the same memory.

The kernels (`kizuki.cpu.kernels`) are loops in Python around bodies written as LLVM code. A twin says in NumPy what a
body's docstring promises, so that the loops run with Numba switched off, every access to memory can be looked at, and
a body can be held against something that was not compiled.

    scalars.py   single numbers     products.py  matrix products     rows.py      a row of scores or weights
    packing.py   operands           views.py     observed rows       best.py      the k best of a row
    custom.py    a user's arrays    rounding.py  the arithmetic      memory.py    memory at an address
"""

from __future__ import annotations

from . import best, custom, memory, packing, products, rows, scalars, views
from .registry import MAKERS, ContractError, Twin, name_of, twin_of

__all__ = [
    "MAKERS",
    "ContractError",
    "Twin",
    "best",
    "custom",
    "memory",
    "name_of",
    "packing",
    "products",
    "rows",
    "scalars",
    "twin_of",
    "views",
]
