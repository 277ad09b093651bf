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

    @property
    def nr(self) -> int:
        """Columns of a register tile."""
        return self.lanes * self.nv

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

SPLIT = 8  # key blocks whose sums are kept together; the sums of the splits are joined in order afterwards


@lru_cache(maxsize=1)
def features() -> frozenset[str]:
    """The features LLVM finds on this processor."""
    import llvmlite.binding as llvm

    return frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)


def processor() -> str:
    """LLVM's name for this processor."""
    import llvmlite.binding as llvm

    return str(llvm.get_host_cpu_name())


def select(found: frozenset[str] | None = None) -> Target:
    """The target for a set of processor features; by default this processor's.

    `KIZUKI_TARGET` (avx512, avx2, neon, generic) overrides it, for tests and for measuring: a wider
    target than the processor's still runs, its vectors split by LLVM.
    """
    forced = os.environ.get("KIZUKI_TARGET")
    if forced:
        if forced not in TARGETS:
            from ..errors import OptionError

            raise OptionError(
                f"KIZUKI_TARGET is {forced!r} but must be one of {', '.join(TARGETS)}; unset it"
            )
        return TARGETS[forced]
    have = features() if found is None else found
    if "avx512f" in have:
        return TARGETS["avx512"]
    if "avx2" in have and "fma" in have:
        return TARGETS["avx2"]
    if "neon" in have:
        return TARGETS["neon"]
    return TARGETS["generic"]
