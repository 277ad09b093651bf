"""What is published: do sdist and wheel hold everything, and does the wheel alone do the work anywhere?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import kizuki

ROOT = Path(__file__).parents[1]
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", "*.egg-info", "build", "dist", "_site", ".*_cache", ".hypothesis"
)
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def run(*command: object, cwd: Path) -> str:
    """What a command prints, with nothing of this checkout in its environment."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@dataclass(frozen=True)
class Built:
    sdist: Path
    wheel: Path
    again: Path  # a wheel built from the sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """sdist and wheel of a copy of this checkout (setuptools writes into what it builds), and a wheel of the sdist."""
    base = tmp_path_factory.mktemp("built")
    source = base / "source"
    shutil.copytree(ROOT, source, ignore=LEFT_BEHIND)
    run(sys.executable, "-c", BUILD, "build_sdist", base / "dist", cwd=source)
    run(sys.executable, "-c", BUILD, "build_wheel", base / "dist", cwd=source)
    (sdist,), (wheel,) = (base / "dist").glob("*.tar.gz"), (base / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(base / "unpacked", filter="data")
    (unpacked,) = (base / "unpacked").iterdir()
    run(sys.executable, "-c", BUILD, "build_wheel", base / "again", cwd=unpacked)
    (again,) = (base / "again").iterdir()
    return Built(sdist, wheel, again)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def package_files() -> set[str]:
    """Every file of the package in this checkout, by its path in a wheel."""
    return {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "kizuki").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    inside = {name for name in contents(built.wheel) if ".dist-info/" not in name}
    assert inside == package_files()
    assert "kizuki/py.typed" in inside
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in contents(built.wheel))


def test_the_sdist_holds_every_file_of_the_repository(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        inside = {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}
    for wanted in (
        "constraints.txt",
        "Makefile",
        "tests/test_wheel.py",
        "docs/log.md",
        ".ci/run",
        "examples/gpt.py",
    ):
        assert wanted in inside
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return  # an unpacked sdist: what is tracked cannot be asked for there
    tracked = run("git", "-c", "core.quotepath=off", "ls-files", cwd=ROOT).splitlines()
    assert {name for name in tracked if (ROOT / name).exists()} - inside == set()
    made = {"PKG-INFO", "setup.cfg"}
    assert {name for name in inside - set(tracked) - made if ".egg-info/" not in name} <= untracked()


def untracked() -> set[str]:
    """New files of this checkout that git does not ignore: they belong to whoever works here."""
    listed = run("git", "ls-files", "--others", "--exclude-standard", cwd=ROOT)
    return set(listed.splitlines())


def test_a_wheel_of_the_sdist_is_the_same_wheel(built: Built) -> None:
    assert built.again.name == built.wheel.name
    assert contents(built.again) == contents(built.wheel)


@pytest.fixture(scope="module")
def anywhere(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run python or kizuki of an environment that holds the wheel, from a folder that has nothing to do with it.

    Its dependencies are those of the environment the tests run in, by a path alone: a path from a .pth file reads no
    further .pth files, so that an editable installation of this checkout is not on it.
    """
    base = tmp_path_factory.mktemp("anywhere")
    run(sys.executable, "-m", "venv", "--without-pip", base / "env", cwd=base)
    scripts = base / "env" / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile")
    run(*pip, "--no-deps", "--no-index", built.wheel, cwd=base)
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=base).strip())
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (own / "dependencies.pth").write_text("\n".join(sorted(paths)), encoding="utf-8")
    folder = base / "elsewhere"
    folder.mkdir()
    names = {"python": python, "kizuki": scripts / "kizuki"}
    return lambda name, *arguments: run(names[name], *arguments, cwd=folder)


def test_the_wheel_imports_and_computes(anywhere: Callable[..., str], built: Built) -> None:
    code = """
import pathlib, sys, sysconfig
from importlib import metadata
import torch, kizuki
home = pathlib.Path(kizuki.__file__).resolve()
assert home.is_relative_to(pathlib.Path(sys.prefix).resolve()), home
assert home.with_name("py.typed").is_file()
assert metadata.version("kizuki") == kizuki.__version__
q, k, v = torch.randn(3, 1, 2, 70, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
assert torch.allclose(kizuki.attention(q, k, v, causal=True), truth, atol=1e-5)
print(kizuki.__version__)
"""
    assert anywhere("python", "-c", code).strip() == kizuki.__version__
    assert built.wheel.name.startswith(f"kizuki-{kizuki.__version__}-")
    assert anywhere("kizuki", "--version").strip() == f"kizuki {kizuki.__version__}"


def test_the_wheel_s_doctor_reports(anywhere: Callable[..., str]) -> None:
    assert kizuki.__version__ in anywhere("kizuki", "doctor")


def test_the_wheel_writes_the_lesson_and_the_page(anywhere: Callable[..., str], tmp_path: Path) -> None:
    """From what it ships: the lesson's example is a small saved recording, which `look` opens like any other."""
    lesson, page = tmp_path / "lesson.html", tmp_path / "page.html"
    anywhere("kizuki", "explain", "--lang", "ja", "--html", lesson, "--no-open")
    assert "バリューを混ぜる" in lesson.read_text(encoding="utf-8")
    where = "from importlib.resources import files; print(files('kizuki') / 'lesson/example/recording.safetensors')"
    recording = anywhere("python", "-c", where).strip()
    anywhere("kizuki", "look", recording, "--out", page, "--no-open")
    text = page.read_text(encoding="utf-8")
    assert text.rstrip().endswith("</html>")
    assert "playing" in text
