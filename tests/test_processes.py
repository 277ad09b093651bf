"""Threads, forked and spawned processes, killed ones, Ctrl-C, and memory that runs out: is every answer still right?

Each test that kills, forks or limits does it in a process of its own, in folders of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from oracle import BACKENDS, randn

import kizuki
from kizuki.cpu import cache

SERIAL = {"OMP_NUM_THREADS": "2"}


def started(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **SERIAL, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(job: subprocess.Popen[str], code: int = 0) -> str:
    """What a process printed; it must have ended with `code`."""
    try:
        out, err = job.communicate(timeout=240)
    finally:
        job.kill()  # one that does not end must not go on beside the tests after it
    assert job.returncode == code, f"{job.returncode}: {err[-2000:]}"
    return out.strip()


# -- threads ---------------------------------------------------------------------------------------


def test_eight_threads_of_a_thousand_calls() -> None:
    """Outputs, readings and gradients, of kinds that are remembered and of kinds that are not, all at once."""
    q, k, v = (randn(1, 2, 9, 8, seed=s) for s in range(3))
    seen = torch.ones(9, 9, dtype=torch.bool).tril(1)

    def gradient() -> torch.Tensor:
        leaf = q.clone().requires_grad_()
        return torch.autograd.grad(kizuki.attention(leaf, k, v, causal=True).sum(), leaf)[0]

    calls = [
        lambda: kizuki.attention(q, k, v),
        lambda: kizuki.attention(q, k, v, causal=True, softcap=2.0),
        lambda: kizuki.attention(q, k, v, mask=seen),
        lambda: kizuki.attend(q, k, mask=seen).topk(3)[0],
        lambda: kizuki.attend(q, k, window=(2, 0)).received(),
        lambda: kizuki.attend(q, k)[0, 1, 4],
        gradient,
        lambda: kizuki.attention(q.double(), k.double(), v.double()),
    ]
    wants = [call() for call in calls]
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            for at in range(1000):
                which = (at + number) % len(calls)
                if not torch.equal(calls[which](), wants[which]):
                    wrong.append(f"thread {number}, call {at}, {which}")
        except Exception as error:  # noqa: BLE001 - in a thread it would be lost
            wrong.append(repr(error))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong, wrong[:3]


# -- processes -------------------------------------------------------------------------------------

LOADER = """
import sys, torch, kizuki
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, at):
        torch.manual_seed(at)
        q, k, v = torch.randn(3, 2, 150, 16).unbind(0)
        A = kizuki.attend(q, k, causal=True)
        leaf = q.clone().requires_grad_()
        kizuki.attention(leaf, k, v).sum().backward()
        return A @ v, A.received(), leaf.grad

def main():
    torch.set_num_threads(2)
    data = Rows()
    wants = [data[at] for at in range(len(data))]
    workers = 2 if sys.argv[1] == "fork" else 1  # a spawned one imports everything anew
    for _ in range(workers):
        loader = DataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context=sys.argv[1])
        for want, got in zip(wants, loader, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(want, got)), "a worker's numbers differ"
    assert torch.equal(data[0][0], wants[0][0])
    print("same bits")

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("how", [h for h in ("fork", "spawn") if h == "spawn" or hasattr(os, "fork")])
def test_workers_of_a_data_loader_give_the_same_bits(how: str, tmp_path: Path) -> None:
    """Forked ones come after the parent's OpenMP pool has run; spawned ones begin anew."""
    script = tmp_path / "loader.py"
    script.write_text(LOADER)
    done = subprocess.run(
        [sys.executable, str(script), how],
        env={**os.environ, **SERIAL},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "same bits"


PACK = """
from kizuki.cpu import launch
launch.kernel("pack", launch.target())
print("ready")
"""


def kept(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


DIES = """
import os, pathlib, signal, sys
from kizuki.cpu import kernels, launch
write = pathlib.Path.write_bytes
def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)
def half(path, data):
    write(path, data[:1000])
    kill()
for name, dies in (("write_bytes", half), ("replace", kill)):
    child = os.fork()
    if child == 0:
        kernels.compiled = lambda *args: b"code" * 1000
        setattr(pathlib.Path, name, dies)
        launch.kernel("pack", launch.target())
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_cache_that_killed_processes_left_is_filled_by_two_at_once(tmp_path: Path) -> None:
    """Cut off amid the file, and before it gets its name: those that come next compile, and sweep what is old."""
    assert ended(started(DIES, KIZUKI_CACHE=str(tmp_path))).split() == [str(-signal.SIGKILL)] * 2
    left = kept(tmp_path)
    assert len(left) == 2
    assert all(path.name.startswith(".") for path in left), "half a kernel under a kernel's name"
    os.utime(left[0], (1, 1))
    both = [started(PACK, KIZUKI_CACHE=str(tmp_path)) for _ in range(2)]
    assert [ended(job) for job in both] == ["ready", "ready"]
    (made,) = (path for path in kept(tmp_path) if not path.name.startswith("."))
    assert cache._read(made) is not None
    assert kept(tmp_path) == sorted([made, left[1]]), "what is old is swept, what may be in use is not"


# -- signals ---------------------------------------------------------------------------------------

INTERRUPTED = """
import signal, sys, threading, torch, kizuki
torch.set_num_threads(2)
backend = sys.argv[1]
small = torch.randn(1, 2, 40, 8)
want = kizuki.attention(small, small, small, backend=backend)
long = torch.randn(1, 2, 1500, 8)
long_want = kizuki.attention(long, long, long, backend=backend)
signal.signal(signal.SIGALRM, signal.default_int_handler)  # what Ctrl-C does
stopped = 0
for wait in (0.001, 0.003, 0.01, 0.02, 0.05):
    for work in (
        lambda: kizuki.attention(long, long, long, backend=backend),
        lambda: kizuki.attend(long, long, backend=backend).topk(4),
    ):
        try:
            signal.setitimer(signal.ITIMER_REAL, wait)
            while True:
                work()
        except KeyboardInterrupt:
            stopped += 1
        assert torch.equal(kizuki.attention(small, small, small, backend=backend), want)
assert torch.equal(kizuki.attention(long, long, long, backend=backend), long_want)
print(stopped)
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timer on this system")
@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_stops_a_call_and_harms_none_after_it(backend: str) -> None:
    """A compiled kernel that runs is not cut short: KeyboardInterrupt comes as it returns."""
    assert ended(started(INTERRUPTED, backend)) == "10"


# -- memory ----------------------------------------------------------------------------------------

STARVED = """
import resource, sys, torch, kizuki
torch.set_num_threads(2)
small = torch.randn(1, 4, 300, 16)

def everything(x):
    leaf = x.clone().requires_grad_()
    output = kizuki.attention(leaf, x, x)
    output.sum().backward()
    A = kizuki.attend(x, x)
    return output, leaf.grad, A.topk(3)[0], A.received(), A.dense(), A[0, 1, 2], A.T @ x

want = everything(small)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)
few, many = (torch.zeros(1).expand(1, 8, n, 64) for n in (4, 3_000_000))
told = []
for work in (
    lambda: kizuki.attention(many, few, few),
    lambda: kizuki.attention(many, few, few),  # the second of a kind, as the third, goes the short way
    lambda: kizuki.attention(many, few, few, backend="portable"),
    lambda: kizuki.attend(many, few).lse,
    lambda: kizuki.attend(many, few).topk(4),
    lambda: kizuki.attend(many, few).dense(limit=1 << 40),
    lambda: kizuki.attend(few, many).received(),
    lambda: kizuki.attend(few, many).T @ torch.ones(1, 8, 4, 64),
):
    try:
        work()
    except MemoryError as error:
        told.append(str(error))
    else:
        sys.exit("it went through")
assert all(line.startswith("kizuki: out of memory: the system refused ") for line in told), told
assert not any("\\n" in line for line in told)
assert all(torch.equal(a, b) for a, b in zip(everything(small), want))
print(len(told))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits address space as Linux does")
def test_memory_that_runs_out_is_a_memory_error_and_the_next_call_is_right() -> None:
    assert ended(started(STARVED)) == "8"


def test_other_errors_of_torch_are_left_as_they_are() -> None:
    from kizuki.memory import told

    def fails() -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        told(fails)()
