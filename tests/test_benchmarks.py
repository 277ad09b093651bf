"""Every script of benchmarks/ finds what it imports: they run by hand, where a name that moved is seen late."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(Path(__file__).resolve().parents[1].joinpath("benchmarks").glob("*.py"))


def test_there_are_scripts():
    assert {"models.py", "recording.py", "seeing.py"} <= {path.name for path in SCRIPTS}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_explains_itself(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    pytest.importorskip("playwright")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
