"""The journal of a survey on disk: one part file a text, renamed into place when complete, merged at the end.

Beside the result `out.parquet` stands the folder `out.parquet.parts` while a survey goes on:

    survey.json     what the survey is: model, measures, layers, heads, and the texts by name and checksum
    <key>.parquet   the rows of one text; the key is a checksum of its name and its characters

A part is written under another name, synced to the disk and renamed, so that it is there in full or not at all: a run
that is killed at any moment loses the text it was reading and no other, and the next one begins with that text. The
result is written in the same way, a row group a text in the order they were given; then the folder goes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .. import files
from ..extras import absent

Columns = dict[str, list[Any]]
META = b"kizuki.survey"
LOCK = "lock"


class SurveyError(ValueError):
    """A survey cannot be run, gone on with or written; the message is one line."""


def library() -> Any:
    """pyarrow with its Parquet, or an error that says what to install."""
    try:
        import pyarrow
        import pyarrow.parquet
    except (ImportError, OSError) as error:
        needs = "kizuki survey: writing Parquet needs the package pyarrow"
        raise SurveyError(absent(error, needs, "survey")) from None
    return pyarrow


class Journal:
    """The parts of one survey: what is done, what is added, and the file made of them."""

    def __init__(self, out: Path, about: dict[str, Any], schema: list[tuple[str, str]]) -> None:
        """`about` says what the survey is; `schema` names its columns with their Arrow types."""
        self.out = out
        self.about = about
        self.folder = out.with_name(f"{out.name}.parts")
        arrow = library()
        self.schema = arrow.schema(
            [(name, getattr(arrow, kind)()) for name, kind in schema], metadata={META: _json(about)}
        )

    @contextmanager
    def opened(self) -> Iterator[Journal]:
        """Begin the survey or go on with it; nobody else can meanwhile (on systems with flock)."""
        try:
            self.folder.mkdir(exist_ok=True)
            with _alone(self.folder / LOCK, self.out):
                self._settle()
                try:
                    yield self
                finally:
                    if not self._any():  # what never began leaves nothing
                        self._clear()
        except OSError as error:
            raise SurveyError(
                f"kizuki survey: {self.out}: cannot be written ({error.strerror or error}); free some space or choose "
                "another folder"
            ) from error

    def _settle(self) -> None:
        """Raise unless what is in the folder belongs to this survey; write down what it is where there is none."""
        note = self._note
        if note.exists():
            try:
                before = json.loads(note.read_text(encoding="utf-8"))
            except ValueError:
                raise SurveyError(
                    f"kizuki survey: {note} is damaged; delete {self.folder} to begin anew"
                ) from None
            differing = [name for name in self.about if before.get(name) != self.about[name]]
            if differing and self._any():
                raise SurveyError(
                    f"kizuki survey: {self.folder} holds an unfinished survey with other {', '.join(differing)}; give "
                    "the same again to go on with it, choose another --out, or delete the folder"
                )
        elif any(path.name != LOCK for path in self.folder.iterdir()):
            raise SurveyError(
                f"kizuki survey: {self.folder} holds files and no survey.json, so it is not a survey's; choose another "
                "--out"
            )
        files.write(note, _json(self.about))
        for leftover in self.folder.glob(".*.part"):
            leftover.unlink()

    @property
    def _note(self) -> Path:
        return self.folder / "survey.json"

    def _any(self) -> bool:
        return any(self.folder.glob("*.parquet"))

    def _clear(self) -> None:
        """Take away what the journal put into its folder, the note last, and the folder if nothing else is in it."""
        for path in (
            *self.folder.glob("*.parquet"),
            *self.folder.glob(".*.part"),
            self.folder / LOCK,
            self._note,
        ):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def finished(self) -> bool:
        """Whether the result is there already; SurveyError where the file there is something else."""
        if not self.out.exists():
            return False
        if read_about(self.out) != self.about:
            raise SurveyError(
                f"kizuki survey: {self.out} is there already and is not this survey (other texts, model or settings); "
                "choose another --out, or delete it"
            )
        if self._note.exists():  # left by a run that was killed between its last two steps
            self._clear()
        return True

    def has(self, key: str) -> bool:
        """Whether a text's rows are on the disk."""
        return (self.folder / f"{key}.parquet").exists()

    def add(self, key: str, columns: Columns) -> None:
        """Put a text's rows on the disk, in full or not at all."""
        arrow = library()
        table = arrow.table(columns, schema=self.schema)
        sink = arrow.BufferOutputStream()
        arrow.parquet.write_table(table, sink)
        files.write(self.folder / f"{key}.parquet", sink.getvalue().to_pybytes())

    def merge(self, keys: list[str]) -> None:
        """Make the result of the parts, in this order, a row group each; then the folder goes."""
        parquet = library().parquet
        with (
            files.replacing(self.out) as part,
            parquet.ParquetWriter(part, self.schema) as writer,
        ):
            for key in keys:
                table = parquet.read_table(
                    self.folder / f"{key}.parquet", schema=self.schema, partitioning=None
                )
                writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._clear()


def read_about(path: Path) -> dict[str, Any]:
    """What a finished survey says of itself; SurveyError for a file that is none."""
    arrow = library()
    try:
        found = (arrow.parquet.read_schema(path).metadata or {}).get(META)
    except (arrow.ArrowInvalid, OSError):
        found = None
    if found is None:
        raise SurveyError(
            f"kizuki survey: {path} is no survey of kizuki's; choose another --out, or delete it"
        )
    about: dict[str, Any] = json.loads(found)
    return about


def check_target(out: str | os.PathLike[str]) -> Path:
    """The file a survey goes to; SurveyError, before any work is done, where it cannot."""
    return files.check_target(out, SurveyError, "kizuki survey", "out")


def _json(about: dict[str, Any]) -> bytes:
    return json.dumps(about, ensure_ascii=False, sort_keys=True).encode()


@contextmanager
def _alone(lock: Path, out: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system lets go of when a process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows: whoever starts the same survey twice there does its work twice
        yield
        return
    with lock.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SurveyError(
                f"kizuki survey: another process is writing {out}; wait for it, or choose another --out"
            ) from None
        yield
