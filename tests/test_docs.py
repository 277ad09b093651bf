"""The pages of docs/: does every example run as written, does every link lead somewhere, is every number the log's?"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import is_typeddict

import numpy as np
import pytest

from kizuki import cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if "_site" not in path.parts)
STARTS = ("engineer.md", "researcher.md", "learner.md")
RUN = (*STARTS, "figures.md")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)


def test_there_is_a_start_for_each_reader() -> None:
    assert {"index.md", "limits.md", "log.md", *STARTS} <= set(PAGES)
    for page in STARTS:
        assert len(blocks(DOCS / page, "python")) >= 2, page


def commands(block: str) -> list[list[str]]:
    """The kizuki commands of a block that are cheap to run: all but those that compile or time for long."""
    split = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [words[1:] for words in split if words[:1] == ["kizuki"] and words[1] not in ("warmup", "bench")]


@pytest.mark.model
@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_as_written_from_top_to_bottom(page: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """Python and commands, as one session in an empty folder: what a block uses has been made above it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the command line sets it; put it back
    names: dict[str, object] = {"__name__": "example"}
    text = (DOCS / page).read_text(encoding="utf-8")
    for number, (language, block) in enumerate(re.findall(r"```(python|sh)\n(.*?)```", text, flags=re.S)):
        if language == "python":
            exec(compile(block, f"{page}, block {number}", "exec"), names)
            continue
        for words in commands(block):
            with pytest.raises(SystemExit) as stopped:
                cli.main(words)
            assert stopped.value.code == 0, (words, capsys.readouterr().err)


def test_every_page_with_examples_is_one_that_is_run() -> None:
    assert {page for page in PAGES if blocks(DOCS / page, "python")} == set(RUN)


def test_the_commands_that_are_not_run_exist() -> None:
    import typer

    known = set(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
    for page in [DOCS / name for name in PAGES] + [ROOT / "README.md", ROOT / "README.ja.md"]:
        named = re.findall(r"(?:^|`|bin/)kizuki ([a-z]+)", page.read_text(encoding="utf-8"), flags=re.M)
        assert set(named) - {"doctor"} <= known, page


@pytest.mark.parametrize("page", [*PAGES, "../README.md", "../README.ja.md", "../CONTRIBUTING.md"])
def test_every_link_and_picture_is_there(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
        assert "://" not in target, f"{page} leads to the network: {target}"
        path = (DOCS / page).parent / target.partition("#")[0]
        assert path.exists(), f"{page}: {target}"


def test_every_file_that_contributing_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_./]+(?:\.py|\.js|\.md|\.txt|\.yml|/))`", text))
    assert len(named) > 30
    roots = (ROOT, ROOT / "src" / "kizuki", ROOT / "src" / "kizuki" / "models", ROOT / "tests")
    assert [name for name in sorted(named) if not any((root / name).exists() for root in roots)] == []
    tests = set(re.findall(r"`(test_[a-z]+)\*?`", text))
    assert [name for name in tests if not list((ROOT / "tests").glob(f"{name}*.py"))] == []


@pytest.mark.parametrize("page", ["engineer.md", "limits.md"])
def test_every_measured_number_is_one_of_the_log(page: str) -> None:
    """Ratios and times are copied from the log and from nowhere else: every decimal number of the prose and tables."""
    text = re.sub(r"```.*?```", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.S)
    log = (DOCS / "log.md").read_text(encoding="utf-8")
    numbers = set(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", text))
    assert numbers, page
    known = set(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", log))
    assert numbers <= known, f"{page}: not in docs/log.md: {sorted(numbers - known)}"
    assert "Zen 3" in text, page
    assert "2 cores" in text.replace("\n", " "), page


def without_comments(block: str) -> list[str]:
    """The lines of a code block that do something: what stands behind a # is in the reader's language."""
    lines = [re.sub(r"\s*#.*$", "", line) for line in block.splitlines()]
    return [line for line in lines if line.strip()]


def test_the_japanese_readme_has_the_same_commands_and_code_and_both_link_to_each_other() -> None:
    english, japanese = ROOT / "README.md", ROOT / "README.ja.md"
    for language in ("sh", "python"):
        mine, theirs = (
            [without_comments(block) for block in blocks(page, language)] for page in (japanese, english)
        )
        assert mine == theirs, language
    texts = {page: page.read_text(encoding="utf-8") for page in (english, japanese)}
    assert "(README.ja.md)" in texts[english]
    assert "(README.md)" in texts[japanese]
    files = [set(re.findall(r"[a-z_]+(?:\.py|/)", blocks(page, "text")[0])) for page in texts]
    assert files[0] == files[1]
    headings = [re.findall(r"^#+", text, flags=re.M) for text in texts.values()]
    assert headings[0] == headings[1]
    pictures = [re.findall(r"!\[[^]]+\]\(([^)]+)\)", text) for text in texts.values()]
    assert pictures[0] == pictures[1]


# The reference, from the docstrings

PUBLIC = (
    *(
        "kizuki",
        "kizuki.masks",
        "kizuki.nn",
        "kizuki.models",
        "kizuki.models.measures",
        "kizuki.models.causes",
    ),
    *("kizuki.lesson", "kizuki.explorer", "kizuki.explorer.figures"),
)


def public() -> dict[str, object]:
    """Every public function and class by its full name, modules and constants apart."""
    found = {}
    for module in PUBLIC:
        home = importlib.import_module(module)
        for name in home.__all__:
            if callable(getattr(home, name)):
                found[f"{module}.{name}"] = getattr(home, name)
    return found


def test_every_public_name_says_what_it_is_and_has_an_example() -> None:
    named = public()
    assert len(named) > 80
    plain = [
        name
        for name, it in named.items()
        if not (isinstance(it, type) and issubclass(it, Exception)) and not is_typeddict(it)
    ]
    matrix = named["kizuki.AttentionMatrix"]
    readings = {
        f"A.{name}": it
        for name, it in vars(matrix).items()
        if not name.startswith("_") and inspect.isfunction(it) and name not in ("begin", "fold", "finish")
    }
    documented = {name: inspect.getdoc(it) or "" for name, it in {**named, **readings}.items()}
    assert [name for name, text in documented.items() if not text] == []
    without = [name for name in [*plain, *readings] if ">>> " not in documented[name]]
    assert without == []


def test_every_example_of_a_docstring_is_run() -> None:
    """No example is switched off; pytest's --doctest-modules runs them all."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "--doctest-modules" in project
    assert 'testpaths = ["tests", "src"]' in project
    sources = (ROOT / "src").rglob("*.py")
    assert [path.name for path in sources if "doctest: +SKIP" in path.read_text(encoding="utf-8")] == []


def test_the_site_builds_without_a_warning_and_without_the_network(tmp_path: Path) -> None:
    """`make docs`, warnings as errors: every public name is on it, and no page asks anybody else for anything."""
    if importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("furo") is None:
        if os.environ.get("CI"):
            pytest.fail("sphinx is not installed, and CI must build the site (make env installs it)")
        pytest.skip("sphinx is not installed (make env installs it)")
    if np.__version__.startswith("1."):
        pytest.skip(
            "NumPy 1 has types whose names sphinx cannot resolve; the site is built with the pinned one"
        )
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(tmp_path / "trees")]
    done = subprocess.run([*command, str(DOCS), str(site)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    known = set(re.findall(r'<dt class="sig[^>]* id="([\w.]+)"', "".join(pages.values())))
    again = {"kizuki.models.open", "kizuki.models.record"}  # on the site as kizuki.open and kizuki.record
    again |= {name for name, it in public().items() if is_typeddict(it)}  # options, said where they are taken
    assert set(public()) - again - known == set()
    loaded = re.compile(r"""<(?:script|img|link|iframe)[^>]*(?:src|href)=["'](?:https?:)?//""")
    assert [str(path) for path, text in pages.items() if loaded.search(text)] == []
