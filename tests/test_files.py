"""Written files: is one there in full or not at all, and is what cannot be written told before any work?"""

from __future__ import annotations

import errno
import os

import pytest

from kizuki import files


class Refused(ValueError):
    pass


def test_what_breaks_off_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    target = tmp_path / "a"
    target.write_bytes(b"old")

    def broken() -> None:
        with files.replacing(target) as part:
            part.write_bytes(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert target.read_bytes() == b"old"


def test_a_full_disk_is_one_line_of_the_caller_s_own(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        Refused, match=r"^saving: .*a: cannot be written \(No space left on device\); free some"
    ):
        files.write(tmp_path / "a", b"new", Refused, "saving")
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link_and_a_file_keeps_a_new_file_s_mode(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = os.umask(0o027)
    try:
        files.write(files.check_target(tmp_path / "link", Refused), b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (3, "out is a int but must be a path"),
        (".", "is a folder; name a file in it"),
        ("no/a", "there is no folder no; make it first"),
        ("a" * 300, "cannot be written"),
        ("pipe", "is not an ordinary file"),
    ],
)
def test_what_cannot_be_written_is_said_first(tmp_path, monkeypatch, path, expected):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(Refused, match=f"^saving: .*{expected}"):
        files.check_target(path, Refused, "saving", "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]
