"""Do the compiled kernels hold on other processors, in other processes, and with a broken cache?"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

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
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert kept, "nothing was cached"
    for path in kept:
        path.write_bytes(b"not a kernel")
    assert python(pack_only, KIZUKI_CACHE=str(tmp_path)).stdout.strip() == "ready"


@pytest.mark.slow
def test_kernels_compiled_by_different_processes_load_together(tmp_path: Path) -> None:
    """Each process counts its functions anew: two kernels' helpers must not end up under one symbol."""
    code = """
import sys, torch, kizuki
torch.manual_seed(0)
for name in sys.argv[1:]:
    q = torch.randn(1, 2, 150, 16).to(getattr(torch, name))
    report = kizuki.check(q, q, q, backend="cpu")
    assert report.ok, str(report)
"""
    for names in (["float32"], ["float64"], ["float32", "float64"], ["float64", "float32"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *names],
            env={**os.environ, "KIZUKI_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{names}: {done.stderr[-600:]}"


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
