"""The compiled kernels as plain Python: every loop a line that can be followed, counted, and caught reading astray.

Run as a program it computes a few problems through every kernel, compares them with the compiled code, and prints as
JSON which lines of the kernels' loops no problem ran through:

    python tests/interpreted.py

Numba's `njit` becomes the identity before the kernels are imported, so their loops run as Python does them. What they
are made of, the emitted vector bodies and scalar access, is compiled one by one, each a function that Python can call.
Each scalar read and write is checked against the memory that the process owns: an address outside every tensor, array
and argument block is an error here, and a wrong number or a crash in compiled code. (`NUMBA_BOUNDSCHECK` checks arrays,
and the kernels have none.)
"""

from __future__ import annotations

import ast
import gc
import json
import os
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["KIZUKI_TARGET"] = "generic"

import numba
import numba.extending
import numpy as np
import torch
from numba.core import types

JIT, INTRINSIC = numba.njit, numba.extending.intrinsic
SIZES = {"i64": 8, "f64": 8, "f32": 4, "i32": 4, "u16": 2, "u8": 1}
checked = 0  # scalar reads and writes


class Memory:
    """Address ranges of everything alive that a kernel may be pointed at."""

    def __init__(self) -> None:
        ranges = []
        for thing in gc.get_objects():
            kind = type(thing)  # asking the thing itself would ask objects that only pretend to be of a class
            if (
                issubclass(kind, torch.Tensor)
                and thing.device.type == "cpu"
                and thing.layout is torch.strided
            ):
                store = thing.untyped_storage()
                ranges.append((store.data_ptr(), store.nbytes()))
            elif issubclass(kind, np.ndarray):
                ranges.append((thing.__array_interface__["data"][0], thing.nbytes))
        for block in blocks:
            kept = [block.slots, *block.alive.values()]
            for thing in kept:
                if isinstance(thing, array):
                    at, count = thing.buffer_info()
                    ranges.append((at, count * thing.itemsize))
                elif isinstance(thing, torch.Tensor):
                    ranges.append((thing.data_ptr(), thing.untyped_storage().nbytes()))
                elif isinstance(thing, np.ndarray):
                    ranges.append((thing.__array_interface__["data"][0], thing.nbytes))
            for thing in block.borrowed.values():
                ranges.append((thing.data_ptr(), thing.numel()))
        ranges = sorted((a, a + n) for a, n in ranges if n)
        merged: list[list[int]] = []
        for first, stop in ranges:
            if merged and first <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], stop)
            else:
                merged.append([first, stop])
        self.first = np.array([a for a, _ in merged])
        self.stop = np.array([b for _, b in merged])

    def holds(self, address: int, size: int) -> bool:
        at = int(np.searchsorted(self.first, address, side="right")) - 1
        return at >= 0 and address + size <= int(self.stop[at])


blocks: list[Any] = []  # the argument blocks of the call that runs
memory: Memory | None = None


def python(function: Any = None, **_: Any) -> Any:
    """`numba.njit` that compiles nothing."""
    return function if function is not None else python


class Body:
    """An emitted body that Python calls: compiled at its first call, for the types it is given then."""

    def __init__(self, function: Any) -> None:
        self.made, self.name = INTRINSIC(function), function.__name__
        count = function.__code__.co_argcount - 1
        names = ", ".join(f"a{n}" for n in range(count))
        space: dict[str, Any] = {"made": self.made}
        exec(f"def call({names}): return made({names})", space)
        self.call = JIT(space["call"], error_model="numpy")

    def __call__(self, *given: Any) -> Any:
        found = self.call(*given)
        if type(found) is float:  # Numba hands a float32 out as Python's float
            (made, *_) = self.call.overloads.values()
            return np.float32(found) if made.signature.return_type is types.float32 else np.float64(found)
        return found


def bodies(function: Any) -> Body:
    return Body(function)


def watched(body: Body, size: int) -> Any:
    """A scalar load or store that looks where it reads."""

    def access(address: int, *value: Any) -> Any:
        global checked
        checked += 1
        assert memory is not None
        if not memory.holds(int(address), size):
            raise IndexError(f"{body.name} of {size} bytes at {address:#x}, which is nobody's memory")
        return body(address, *value)

    return access


numba.njit, numba.extending.intrinsic = python, bodies
from kizuki.cpu import launch, target  # noqa: E402
from kizuki.cpu.block import Block  # noqa: E402
from kizuki.cpu.kernels import simd  # noqa: E402

for name, size in SIZES.items():
    for way in ("load", "store"):
        setattr(simd, f"{way}_{name}", watched(getattr(simd, f"{way}_{name}"), size))

import kizuki  # noqa: E402
from kizuki.cpu import kernels  # noqa: E402

FLOATS = replace(target.TARGETS["generic"], block_q=8, block_k=32)
target.TARGETS["generic"] = FLOATS
ROUTINES: dict[tuple[str, str], Any] = {}


def enter(self: Block, kernel: str, chosen: target.Target, tasks: int, threads: int) -> None:
    """`Block.enter` on one thread, in Python."""
    global memory
    if (kernel, chosen.name) not in ROUTINES:
        ROUTINES[kernel, chosen.name] = kernels.BUILDERS[kernel](chosen)
    for slot, number in (("TASKS", tasks), ("NEXT_TASK", 0), ("NEXT_SLOT", 0)):
        self[slot] = number
    blocks[:] = [self]
    memory = Memory()
    ROUTINES[kernel, chosen.name](self.slots.buffer_info()[0])


Block.enter = enter  # type: ignore[method-assign]
launch.threads = lambda: 1
in_pairs = False  # whether bfloat16 is multiplied in pairs, by multiply-adds in the place of the instruction


def chosen(dtype: torch.dtype = torch.float32) -> target.Target:
    """`launch.target`."""
    return FLOATS.double if dtype is torch.float64 else replace(FLOATS, dot="emulated" if in_pairs else "")


launch.target = chosen


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def problems() -> dict[str, Any]:
    """Name: the call."""
    F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
    masks = kizuki.masks
    found: dict[str, Any] = {}

    def add(
        name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: bool = True, **options: Any
    ) -> None:
        found[name] = (q, k, v, grad, options)

    for dtype in (F32, F64, BF16, F16):
        q, k, v = (randn(1, 2, n, 8, seed=s, dtype=dtype) for s, n in enumerate((19, 37, 37)))
        add(f"bare {dtype}", q, k, v)
        add(f"odd width {dtype}", q[..., :5], k[..., :5], v[..., :3])
    q, k, v = (randn(1, 4, 37, 8), randn(1, 2, 37, 8, seed=1), randn(1, 2, 37, 8, seed=2))
    seen = torch.rand(37, 37, generator=torch.Generator().manual_seed(0)) < 0.6
    seen[5] = False
    add(
        "causal, capped, sinks", q, k, v, causal=True, softcap=2.0, sinks=torch.tensor([0.5, -1.0, 30.0, 0.0])
    )
    add("a window and keys", q, k, v, window=(9, 2), mask=masks.keys(torch.arange(37) % 5 > 0))
    add("a dense mask", q, k, v, mask=seen)
    add("a bias", q, k, v, bias=torch.where(seen, randn(37, 37, seed=5), -torch.inf), scale=-0.4)
    add("a bias of each key", q, k, v, bias=randn(4, 1, 37, seed=5))
    odd = v.clone()
    odd[0, 0, 3, 2], odd[0, 1, 30] = torch.inf, torch.nan
    add("odd values", q, k, odd, causal=True, grad=False)
    poison = k.clone()
    poison[:, :, 7] = torch.nan
    add("poison", q, poison, v, mask=masks.keys(torch.arange(37) != 7))
    for dtype in (F32, BF16):
        one, many = randn(1, 4, 1, 8, dtype=dtype), randn(1, 2, 300, 8, seed=3, dtype=dtype)
        add(f"decoding {dtype}", one, many, many, grad=False)
        add(
            f"decoding, masked {dtype}",
            one,
            many,
            many,
            grad=False,
            mask=torch.arange(300) % 3 > 0,
            softcap=3.0,
        )
        spoiled = many.clone()
        spoiled[0, 0, 5], spoiled[0, 1, 7, 1] = torch.nan, torch.inf
        add(f"decoding, odd {dtype}", one, many, spoiled, grad=False, mask=torch.arange(300) != 5)
    q, k, v = (randn(1, 2, n, 10, seed=s, dtype=BF16) for s, n in enumerate((19, 37, 37)))
    add("pairs", q, k, v, softcap=3.0)
    add("pairs, odd width", q[..., :5], k[..., :5], v[..., :3])
    add("pairs, decoding", randn(1, 2, 1, 8, dtype=BF16), k[..., :8], v[..., :8], grad=False)
    odd = v[..., :8].clone()
    odd[0, 0, 3, 2] = torch.inf
    add("pairs, odd values", q, k, odd, grad=False, mask=torch.arange(37) != 3)
    add("pairs, decoding odd values", randn(1, 2, 1, 8, dtype=BF16), k[..., :8], odd, grad=False)
    q, k, v = (randn(1, 4, 37, 8), randn(1, 2, 37, 8, seed=1), randn(1, 2, 37, 8, seed=2))
    add("columns", *(randn(1, 2, 8, 19, seed=s).transpose(-1, -2) for s in range(3)))
    add("nothing seen", q, k, v, mask=torch.zeros(37, 37, dtype=torch.bool))
    add("dropped", q, k, v, grad=False, dropout=1.0)
    return found


def compute(name: str) -> list[str]:
    """Run one problem; what is wrong with it."""
    global in_pairs
    in_pairs = name.startswith("pairs")
    q, k, v, grad, options = problems()[name]
    dropout = {"dropout": options.pop("dropout")} if "dropout" in options else {}
    exact = kizuki.attention(q.double(), k.double(), v.double(), backend="portable", **options, **dropout)
    wrong = []

    def compare(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        eps = torch.finfo(got.dtype).eps
        size = float(want[want.isfinite()].abs().max()) if want.isfinite().any() else 1.0
        near = torch.isclose(
            got.double(), want.double(), rtol=64 * eps, atol=64 * eps * max(size, 1), equal_nan=True
        )
        if not near.all():
            wrong.append(f"{name}: {what}")

    compare("output", kizuki.attention(q, k, v, backend="cpu", **options, **dropout), exact)
    if not dropout:
        observed = kizuki.Observe(
            topk=3, entropy=True, received=True, max_score=True, distance=True, pool=(min(3, q.shape[-2]), 4)
        )
        output, seen = kizuki.attention(q, k, v, backend="cpu", observe=observed, **options)
        compare("observed output", output, exact)
        truth = kizuki.attend(q.double(), k.double(), backend="portable", **options).observe(observed)
        for reading in () if in_pairs else ("entropy", "received", "max_score", "distance", "pool"):
            compare(reading, getattr(seen, reading), getattr(truth, reading))
        if not in_pairs:  # theirs are of float32 numbers, and those of pairs are the kernel's own
            compare("topk", seen.topk[0], truth.topk[0])
    if grad:
        pair = []
        for backend, dtype in (("cpu", q.dtype), ("portable", torch.float64)):
            leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
            output = kizuki.attention(*leaves, backend=backend, **options)
            up = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(dtype)
            pair.append(torch.autograd.grad(output, leaves, up))
        for which, got, want in zip(("query", "key", "value"), *pair, strict=True):
            compare(f"gradient of {which}", got, want)
    return wrong


def loops() -> dict[Path, set[int]]:
    """The lines inside the functions that Numba would compile, file by file."""
    found: dict[Path, set[int]] = {}
    for path in sorted(Path(kernels.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(
                "piece" in ast.unparse(d) for d in node.decorator_list
            ):
                lines = {n.lineno for inner in node.body for n in ast.walk(inner) if isinstance(n, ast.stmt)}
                first = node.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    lines.discard(first.lineno)
                found.setdefault(path, set()).update(lines)
    return found


def astray() -> str:
    """What is said of a load far behind the end of a tensor."""
    global memory
    x = torch.ones(4)
    memory = Memory()
    if float(simd.load_f32(x.data_ptr() + 12)) != 1:
        return "the last number of a tensor is not read"
    try:
        simd.load_f32(x.data_ptr() + (1 << 46))
    except IndexError as error:
        return str(error)
    return "it was read"


def main() -> None:
    met: dict[str, set[int]] = {}
    folder = str(Path(kernels.__file__).parent)

    def local(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            met.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return local

    def enters(frame: Any, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(folder) else None

    wrong: list[str] = []
    sys.settrace(enters)
    for name in sys.argv[1:] or problems():
        wrong += compute(name)
    sys.settrace(None)
    missed = {path.name: sorted(lines - met.get(str(path), set())) for path, lines in loops().items()}
    lines = sum(map(len, loops().values()))
    print(
        json.dumps({"wrong": wrong, "missed": missed, "lines": lines, "checked": checked, "astray": astray()})
    )


if __name__ == "__main__":
    main()
