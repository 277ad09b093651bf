"""Which processor this is, and the tile shapes that suit it.

The kernels are one source for every processor: only the vector width and the register tile change.
A tile keeps `mr × nv` vectors of sums in registers, and needs `nv` more for a row of the right-hand
matrix and one for a broadcast of the left: the shapes below fill the register file without spilling.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class Target:
    """The vector width in lanes, the register tile and the cache blocks, for float32 or float64."""

    name: str
    lanes: int
    mr: int  # rows of a register tile
    nv: int  # vectors across a register tile
    block_q: int  # queries a task; a multiple of mr
    block_k: int  # keys a step of the online softmax; a multiple of nr and of 4 vectors
    few: int  # rows of a register tile of the decoder, beside one transposed square of keys
    size: int = 4  # bytes of a number: 4, or 8 for float64
    # Which instruction adds the products of two pairs of bfloat16 to a float32, as LLVM names its feature: what its
    # kernels for bfloat16 are made of. "" = none, "emulated" = multiply-adds in its place, for tests.
    dot: str = ""
    pairs: bool = False  # these are the kernels made of it: operands are bfloat16 and stay so

    @property
    def nr(self) -> int:
        """Columns of a register tile."""
        return self.lanes * self.nv

    @property
    def paired(self) -> Target:
        """The same for bfloat16 taken in pairs, where there is an instruction for them."""
        return replace(self, name=f"{self.name}-{self.dot}", pairs=True)

    def steps(self, dim: int) -> int:
        """How many numbers, or pairs of them, a product over `dim` goes through."""
        return (dim + 1) // 2 if self.pairs else dim

    @property
    def double(self) -> Target:
        """The same for float64: half as many lanes in the same registers."""
        return replace(self, name=f"{self.name}-float64", lanes=self.lanes // 2, size=8)


TARGETS = {
    # 32 registers of 16 lanes: 24 sums, 4 columns, 1 broadcast.
    "avx512": Target("avx512", lanes=16, mr=6, nv=4, block_q=96, block_k=128, few=8),
    # 16 registers of 8 lanes: 12 sums, 2 columns, 1 broadcast.
    "avx2": Target("avx2", lanes=8, mr=6, nv=2, block_q=96, block_k=128, few=4),
    # 32 registers of 4 lanes: 24 sums, 4 columns; the broadcast is part of the multiply.
    "neon": Target("neon", lanes=4, mr=6, nv=4, block_q=96, block_k=128, few=4),
    # Any other processor: LLVM splits 4-lane vectors into what there is.
    "generic": Target("generic", lanes=4, mr=4, nv=2, block_q=96, block_k=128, few=4),
}

DOTS = {"avx512": "avx512bf16", "neon": "bf16"}  # the feature that has them, by target
# The LLVM from which on such an instruction takes bfloat16 operands; before it they were integers, and LLVM ends the
# process over any other. Numba brings LLVM 14 up to 0.60, 15 in 0.61, and 20 or newer from 0.62 on.
SINCE = {"avx512bf16": 16}

SPLIT = 8  # key blocks whose sums are kept together; the sums of the splits are joined in order afterwards


@lru_cache(maxsize=1)
def features() -> frozenset[str]:
    """The features LLVM finds on this processor."""
    import llvmlite.binding as llvm

    return frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)


def emits(dot: str) -> bool:
    """Whether the installed LLVM can write the instruction of a feature in `DOTS` as the kernels ask for it."""
    import llvmlite.binding as llvm

    return bool(llvm.llvm_version_info[0] >= SINCE.get(dot, 0))


def processor() -> str:
    """LLVM's name for this processor."""
    import llvmlite.binding as llvm

    return str(llvm.get_host_cpu_name())


def select(found: frozenset[str] | None = None) -> Target:
    """The target for a set of processor features; by default this processor's.

    `KIZUKI_TARGET` (avx512, avx2, neon, generic) overrides it, for tests and for measuring: a wider
    target than the processor's still runs, its vectors split by LLVM. `avx2+bf16` takes bfloat16 in pairs also
    where no instruction does.
    """
    have = features() if found is None else found
    forced, _, extra = os.environ.get("KIZUKI_TARGET", "").partition("+")
    if forced:
        if forced not in TARGETS or extra not in ("", "bf16"):
            from ..errors import OptionError

            raise OptionError(
                f"KIZUKI_TARGET is {os.environ['KIZUKI_TARGET']!r} but must be one of {', '.join(TARGETS)}, or one of "
                "them and +bf16; unset it"
            )
        chosen = TARGETS[forced]
    elif "avx512f" in have:
        chosen = TARGETS["avx512"]
    elif "avx2" in have and "fma" in have:
        chosen = TARGETS["avx2"]
    elif "neon" in have:
        chosen = TARGETS["neon"]
    else:
        chosen = TARGETS["generic"]
    dot = DOTS.get(chosen.name, "")
    return replace(chosen, dot=dot if dot in have and emits(dot) else "emulated" if extra else "")
