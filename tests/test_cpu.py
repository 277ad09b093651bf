"""Do the compiled kernels hold on other processors, in other processes, and with a broken cache?"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import llvmlite.binding as llvm
import pytest
import torch

import kizuki
from kizuki import caches
from kizuki.cpu import cache, launch, target

CHECK = """
import torch, kizuki
torch.manual_seed(0)
for shape in ((2, 6, 133, 40), (1, 2, 31, 129)):
    q, v = torch.randn(shape), torch.randn(shape)
    k = torch.randn(shape[0], shape[1] // 2, *shape[2:])
    v = v[:, : shape[1] // 2]
    for options in ({}, {"causal": True}, {"window": (9, 3), "softcap": 4.0, "sinks": torch.randn(shape[1])}):
        report = kizuki.check(q, k, v, backend="cpu", **options)
        assert report.ok, str(report)
print(kizuki.attend(q, k).plan())
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("name", ["avx512", "neon", "generic"])
def test_every_target_computes_the_same_thing(name: str) -> None:
    """Tile shapes of other processors run here too, their vectors split or widened by LLVM."""
    done = python(CHECK, KIZUKI_TARGET=name)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{name} tiles" in done.stdout


def test_the_target_follows_from_the_features() -> None:
    assert target.select(frozenset({"avx512f", "avx2", "fma"})).name == "avx512"
    assert target.select(frozenset({"avx2", "fma"})).name == "avx2"
    assert target.select(frozenset({"neon"})).name == "neon"
    assert target.select(frozenset({"sse2"})).name == "generic"
    assert target.select(frozenset({"avx2"})).name == "generic", "avx2 tiles need fma"


def test_an_llvm_that_would_end_the_process_over_an_instruction_is_not_asked_for_it(monkeypatch):
    """LLVM 14 and 15, with Numba 0.60 and 0.61, abort at vdpbf16ps of bfloat16 operands; bfdot they know."""
    import llvmlite.binding as llvm

    for version, dots in ((14, False), (15, False), (20, True)):
        monkeypatch.setattr(llvm, "llvm_version_info", (version, 0, 0))
        assert bool(target.select(frozenset({"avx512f", "avx512bf16"})).dot) is dots
        assert target.select(frozenset({"neon", "bf16"})).dot == "bf16"


@pytest.mark.parametrize("made", target.TARGETS.values(), ids=lambda t: t.name)
def test_tile_shapes_fit_each_other(made: target.Target) -> None:
    """What the kernels take for granted of a target."""
    assert made.block_q % made.mr == 0
    assert made.block_k % made.nr == 0
    assert made.block_k % (4 * made.lanes) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_computes_on_one_thread() -> None:
    """The OpenMP pool does not survive a fork: entering it in the child would hang."""
    code = """
import os, torch, kizuki
torch.set_num_threads(2)
q = torch.randn(1, 4, 300, 16)
want = kizuki.attention(q, q, q)
child = os.fork()
if child == 0:
    same = torch.equal(kizuki.attention(q, q, q), want)
    os._exit(0 if same else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = python(code)
    assert done.stdout.strip() == "0", done.stderr[-2000:]


def test_eight_threads_at_once_get_the_same_bits() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 257, 32).unbind(0)
    want = kizuki.attention(q, k, v, causal=True)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            if not torch.equal(kizuki.attention(q, k, v, causal=True), want):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_python_threads_serve_where_openmp_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 4, 400, 16).unbind(0)
    want = kizuki.attention(q, k, v)
    monkeypatch.setattr(launch, "openmp", lambda: None)
    monkeypatch.setattr(launch, "threads", lambda: 3)
    assert torch.equal(kizuki.attention(q, k, v), want)
    assert launch.layer() == "Python threads"


def test_a_broken_cache_entry_is_as_none(tmp_path: Path) -> None:
    """A kernel file cut short or overwritten is compiled again, and the answer is right."""
    pack_only = """
from kizuki.cpu import launch
launch.kernel("pack", launch.target())
print("ready")
"""
    assert python(pack_only, KIZUKI_CACHE=str(tmp_path)).stdout.strip() == "ready"
    (kept,) = (path for path in tmp_path.rglob("*") if path.is_file())
    whole = kept.read_bytes()
    for broken in (b"not a kernel", b"", whole[:-100], whole[:100], whole[:-1] + bytes([whole[-1] ^ 1])):
        kept.write_bytes(broken)
        assert cache._read(kept) is None
    assert python(pack_only, KIZUKI_CACHE=str(tmp_path)).stdout.strip() == "ready"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept]
    assert kept.read_bytes()[:16] == cache.MAGIC
    assert cache._read(kept) is not None


def test_a_kernel_on_disk_needs_no_compiler() -> None:
    """What makes a first call fast: neither Numba nor the kernels' sources are imported."""
    code = """
import sys, torch, kizuki
from kizuki import masks
q = torch.randn(1, 2, 20, 16, requires_grad=True)
A = kizuki.attend(q, q, causal=True)
(A @ q).sum().backward()
A.topk(3), A.received()
kizuki.attention(q[:, :, :1], q, q, mask=masks.lengths(key=[3]), dropout=0.5)
print([name for name in sys.modules if name.startswith(("numba", "kizuki.cpu.kernels"))])
"""
    assert python(code).returncode == 0  # which compiles what is missing
    assert python(code).stdout.strip() == "[]"


def test_kernels_do_not_share_their_helpers() -> None:
    """Processes name helpers alike: the linker must not take one kernel's for another's."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    read = []
    for number in (1, 2):
        code = f"""
define linkonce_odr i64 @helper() noinline {{
  ret i64 {number}
}}
define void @{cache.SYMBOL}(i64 %args) {{
  %place = inttoptr i64 %args to i64*
  %made = call i64 @helper()
  store i64 %made, i64* %place
  ret void
}}"""
        read.append(cache._load(bytes(machine.emit_object(llvm.parse_assembly(code)))))
    found = torch.zeros(2, dtype=torch.int64)
    for at, address in enumerate(read):
        launch.run(address, found[at:].data_ptr(), 1)
    assert found.tolist() == [1, 2]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    """A path under a file can never be a folder, whoever asks (root may write to read-only folders)."""
    blocked = tmp_path / "file"
    blocked.write_text("here first")
    code = """
from kizuki.cpu import launch
launch.kernel("pack", launch.target())
print("ready")
"""
    done = python(code, KIZUKI_CACHE=str(blocked / "below"))
    assert done.stdout.strip() == "ready", done.stderr[-2000:]


def test_kernels_are_kept_under_a_key_of_their_sources() -> None:
    assert cache.folder() == caches.folder("kernels")
    assert len(cache.stamp()) == 24
