"""Files that are there in full or not at all: checked before any work is done, written beside and moved into place.

Everything that kizuki writes (pages, recordings, surveys, lessons, figures) goes through here, so a full disk or a
killed process never leaves half a file under a name that somebody trusts, nor harms what was there before.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def check_target(
    path: str | os.PathLike[str], error: type[ValueError], caller: str = "", argument: str = "path"
) -> Path:
    """The file that will be written; `error`, in one line, where there can be none.

    A link stands for the file behind it, which is replaced while the link stays. `caller` begins the
    line, `argument` is what the path is called there.
    """
    begin = f"{caller}: " if caller else ""
    try:
        target = Path(path)
    except TypeError:
        raise error(f"{begin}{argument} is a {type(path).__name__} but must be a path") from None
    named = f"{begin}{target}"
    try:
        if target.is_symlink():
            target = target.resolve()
        if target.is_dir():
            raise error(f"{named}: is a folder; name a file in it")
        if target.exists() and not target.is_file():
            raise error(f"{named}: is not an ordinary file; choose another name")
        if not target.parent.is_dir():
            raise error(f"{named}: there is no folder {target.parent}; make it first")
        if target.exists() and not os.access(target, os.W_OK):
            raise error(f"{named}: the file may not be written; choose another name")
        probe = _beside(target)
        probe.open("xb").close()
        probe.unlink()
    except OSError as fault:
        raise error(
            f"{named}: cannot be written ({fault.strerror or fault}); choose another folder"
        ) from None
    return target


@contextmanager
def replacing(target: Path, error: type[ValueError] | None = None, caller: str = "") -> Iterator[Path]:
    """A new file beside `target` to write into; it becomes `target` as the block ends, synced to the disk.

    An exception leaves what was at `target` as it was. With `error`, a disk that refuses is told in one line.
    """
    part = _beside(target)
    try:
        yield part
        with part.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
        _sync(target.parent)
    except OSError as fault:
        if error is None:
            raise
        begin = f"{caller}: " if caller else ""
        raise error(
            f"{begin}{target}: cannot be written ({fault.strerror or fault}); free some space or choose another folder"
        ) from fault
    finally:
        part.unlink(missing_ok=True)


def write(target: Path, data: bytes, error: type[ValueError] | None = None, caller: str = "") -> None:
    """Write a whole file at once."""
    with replacing(target, error, caller) as part:
        part.write_bytes(data)


def _beside(target: Path) -> Path:
    """A new name in the same folder, and so on the same disk."""
    return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.part")


def _sync(folder: Path) -> None:
    """Make the new name last through a power failure, where the system can: some network disks refuse it."""
    if os.name != "posix":
        return
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
