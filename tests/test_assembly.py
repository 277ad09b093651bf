"""What do processors that are not here get? The forward kernel compiled for them, and its assembly read."""

from __future__ import annotations

import re
from dataclasses import replace

import llvmlite.binding as llvm
import pytest

from kizuki.cpu import kernels, target

MACHINES = {
    # target: triple, processor, features, multiply-add, a vector written to memory
    "neon": (
        "aarch64-unknown-linux-gnu",
        "neoverse-n1",
        "+neon",
        r"\bfmla\s+v\d+\.4s",
        r"\bst[rp]\s+q",
    ),
    "avx512": (
        "x86_64-unknown-linux-gnu",
        "skylake-avx512",
        "+avx512f",
        r"\bvfmadd\d+ps\b.*%zmm",
        r"\bvmov\w+\s+%zmm\d+, \S*\(",
    ),
    "avx512 with bfloat16": (
        "x86_64-unknown-linux-gnu",
        "cooperlake",
        "+avx512f,+avx512bf16",
        r"\bvdpbf16ps\b.*%zmm",
        r"\bvmov\w+\s+%zmm\d+, \S*\(",
    ),
    "neon with bfloat16": (
        "aarch64-unknown-linux-gnu",
        "neoverse-v1",
        "+neon,+bf16",
        r"\bbfdot\s+v\d+\.4s",
        r"\bst[rp]\s+q",
    ),
}


def shape_of(name: str) -> target.Target:
    """The target of a machine; of one with bfloat16, that of its pairs."""
    chosen = target.TARGETS[name.partition(" ")[0]]
    return replace(chosen, dot=target.DOTS[chosen.name]).paired if "bfloat16" in name else chosen


def assembly(name: str, kernel: str) -> str:
    """A kernel as LLVM writes it for another machine."""
    triple, processor, features, *_ = MACHINES[name]
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    text = str(kernels.module(kernel, shape_of(name), "entry")[0])
    text = re.sub(r'target triple = ".*"', f'target triple = "{triple}"', text)
    text = re.sub(r'target datalayout = ".*"\n', "", text)
    module = llvm.parse_assembly(text)
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=processor, features=features, opt=3, reloc="pic"
    )
    module.data_layout = str(machine.target_data)
    return str(machine.emit_assembly(module))


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_the_inner_loop_fills_the_registers_and_spills_none(name: str) -> None:
    """mr × nv multiply-adds a step, none of their sums written to the stack."""
    *_, multiply_add, spill = MACHINES[name]
    shape = shape_of(name)
    if shape.pairs and not target.emits(shape.dot):
        pytest.skip(f"LLVM {llvm.llvm_version_info[0]} has no such instruction on bfloat16 operands")
    blocks = re.split(r"\n\.LBB\S+:|\n\t(?:j\w+|b|b\.\w+|cbn?z|tbn?z)\s", assembly(name, "forward"))
    sums = shape.mr * shape.nv
    counts = [len(re.findall(multiply_add, block)) for block in blocks]
    inner = [block for block, n in zip(blocks, counts, strict=True) if n and n % sums == 0]
    clean = [block for block in inner if not re.findall(spill, block)]
    assert len(clean) >= 2, (
        "the loops of scores and of mix, unrolled by whole steps, nothing written to memory"
    )
