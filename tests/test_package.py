"""The package as a whole: is each fact written once, is importing it free, does the README hold?"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest

import kizuki

ROOT = Path(__file__).parents[1]


def texts() -> dict[str, str]:
    """Every text file of the repository by its path, without what the environment and tools leave behind."""
    top = [path for path in ROOT.iterdir() if path.is_file()]
    below = [
        path
        for name in (".ci", ".github", "src", "tests", "docs", "examples", "benchmarks")
        for path in (ROOT / name).rglob("*")
    ]
    found = {}
    for path in [*top, *below]:
        if not path.is_file() or any(
            part in ("__pycache__", "_site") or part.endswith(".egg-info") for part in path.parts
        ):
            continue
        data = path.read_bytes()
        if path.name != "kizuki.html" and b"\0" not in data:
            found[str(path.relative_to(ROOT))] = data.decode("utf-8")
    return found


def test_the_version_is_written_once():
    written = [path for path, text in texts().items() if kizuki.__version__ in text]
    assert set(written) <= {"src/kizuki/__init__.py", "CHANGELOG.md", "constraints.txt"}


def test_no_machine_path_and_no_registry_in_any_file():
    paths = re.compile(r"(?<![\w.:/])/(?:work|root|opt|home|mnt|Users)/\w")
    hosts = re.compile(r"(?:pypi|pythonhosted|download\.pytorch|registry\.npmjs)\.(?:org|com)\b")
    found = [path for path, text in texts().items() if paths.search(text) or hosts.search(text)]
    assert found == []


def test_import_is_free_of_side_effects_and_of_optional_packages(tmp_path):
    code = (
        "import os, sys, torch\n"
        "before = dict(os.environ), torch.get_num_threads(), torch.get_default_dtype()\n"
        "import kizuki\n"
        "assert before == (dict(os.environ), torch.get_num_threads(), torch.get_default_dtype())\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert not loaded & {"transformers", "tokenizers", "typer", "rich", "numba", "llvmlite", "starlette"}
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_the_readme_is_short_and_begins_with_the_two_commands():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("\n") <= 120
    first = readme.split("```")[1]
    assert re.findall(r"^make \w+", first, flags=re.M) == ["make look", "make test"]
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", readme):
        assert (ROOT / picture).is_file(), picture


@pytest.mark.model
def test_the_examples_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # they save a file
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", readme, flags=re.S)
    assert len(examples) >= 2
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})


@pytest.mark.pinned
def test_every_installed_requirement_is_pinned_and_installed_as_pinned():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    waiting = [Requirement("kizuki[models,survey,explorer,docs,dev]")]
    seen: set[str] = set()
    wrong = {}
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        key = f"{name}[{','.join(sorted(wanted.extras))}]"
        if key in seen:
            continue
        seen.add(key)
        if name != "kizuki":
            version = metadata.version(name).partition("+")[0]
            if pins.get(name) != version:
                wrong[name] = (pins.get(name), version)
        for line in metadata.requires(name) or []:
            needed = Requirement(line)
            if not needed.marker or any(
                needed.marker.evaluate({"extra": extra}) for extra in {"", *wanted.extras}
            ):
                waiting.append(needed)
    assert wrong == {}


def test_ruff_and_mypy_leave_no_file_out():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert not re.search(r"^(extend-)?exclude|ignore_errors", project, flags=re.M)
    pattern = re.compile(r"#\s*(mypy: ignore-errors|ruff: noqa|type: ignore\s*$|noqa\s*$)", flags=re.M)
    assert [path for path, text in texts().items() if path.startswith("src/") and pattern.search(text)] == []


def test_the_package_carries_its_data():
    package = resources.files("kizuki")
    assert package.joinpath("py.typed").is_file()
    assert package.joinpath("samples", "noticing.txt").is_file()
    assert any(entry.is_file() for entry in package.joinpath("explorer", "static").iterdir())


def test_the_public_workflow_checks_what_make_test_does_on_every_system_without_make():
    import yaml

    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    runs = {name: [step.get("run", "") for step in job["steps"]] for name, job in workflow["jobs"].items()}
    said = "\n".join(run for job in runs.values() for run in job)
    for command in ("ruff check .", "ruff format --check .", "-m mypy", "-m pytest", "-m sphinx -W"):
        assert command in said
    assert not re.search(r"^\s*make\b", said, flags=re.M)
    rows = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert {row["os"].split("-")[0] for row in rows} == {"ubuntu", "macos", "windows"}
    assert any(row["os"].endswith("-arm") for row in rows)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest = re.search(r'requires-python = ">=([\d.]+)"', project)[1]
    assert {row["python"] for row in rows} >= {"3.11", "3.12", "3.13"}
    least, newest = workflow["jobs"]["versions"]["strategy"]["matrix"]["include"]
    assert (least["python"], newest["install"]) == (oldest, "")
    bounds = re.findall(r'"(torch|numpy|numba|transformers)>=([\d.]+)"', project)
    assert len(bounds) == 4
    for name, version in bounds:
        assert re.search(rf"\b{name}=={re.escape(version)}\.0\b", least["install"]), (name, version)
    installed = re.search(r"--editable '(\.\[.*docs.*\])'", (ROOT / "Makefile").read_text(encoding="utf-8"))[
        1
    ]
    assert f"-e '{installed}'" in said
    actions = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert all(re.search(r"@v\d+$|@[0-9a-f]{40}$", action) for action in actions), actions
