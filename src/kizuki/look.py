"""The main job as one function: a text in, one page that shows a real model's attention on it out.

    load the model → one recorded forward pass → read the heads → write the page

and, of a recording that was saved on the way, the same page again without the model. The command line
(`kizuki look`) draws its progress and prints what it returns; nothing here prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .explorer.server import Server
    from .models import Recording, Run

Progress = Callable[[str, int, int], None]  # (stage, done, total), called as work goes on

# A text this long has far more tokens than any model here reads; reading stops there, so that a stream
# without an end (or a disk image given by mistake) is refused at once and not swallowed.
TEXT_LIMIT = 16 * 2**20
RECORDING = ".safetensors"  # how the name of a saved recording ends


class InputError(ValueError):
    """Something given to `look` cannot be looked at; the message is the one line to show."""


@dataclass(frozen=True)
class Look:
    """What `look` did: the page it wrote, and what is on it."""

    page: Path
    model: str
    tokens: int  # tokens on the page
    dropped: int  # tokens of the text behind the first N that were asked for
    layers: int
    heads: int
    size: int  # bytes of the page
    seconds: float
    saved: Path | None = None  # the recording's file, where one was asked for


def look(
    text: str,
    *,
    model: str = "smollm2",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    first: int | None = None,
    topk: int = 5,
    limit_mb: float = 100.0,
    out: str | Path = "kizuki.html",
    save: str | Path | None = None,
    progress: Progress | None = None,
) -> Look:
    """Run a model on a text once, and write one self-contained HTML page of what its heads read.

    Args:
        text: what to look at; at least one character that is not white space.
        model: "smollm2", "minilm", a local folder, or a Hugging Face id.
        layers, heads: which ones, counted from 0; `None` = all.
        first: look at the first so many tokens only; `None` = all of them.
        topk: how many next tokens to show at each position, for a model that predicts them.
        limit_mb: the largest page, in MB of 10⁶ bytes; of layers that do not fit in full it holds less.
        out: where the page goes; an existing page there is replaced, at once and only when complete.
        save: a file for the recording as well, `….safetensors`: what `kizuki.open` and `reopen` open.
        progress: called as `progress(stage, done, total)`.

    Returns:
        A `Look`: the path of the page, and the numbers of tokens, layers and heads on it.

    Raises:
        InputError: an empty text, an `out` or `save` that cannot be written, a number out of its range.
        ValueError: a text longer than the model's positions, an unknown model, layer or head. All of these
            have messages of one line.

    Time and memory: one forward pass, and memory that grows with the tokens, never with their square.

    Example:
        >>> from kizuki.look import look
        >>> done = look("Mika laughed.", model="minilm", layers=[0, 5], out="mika.html")
        >>> done.page.name, done.tokens, done.layers, done.heads
        ('mika.html', 5, 2, 12)
    """
    start = time.perf_counter()
    out = check_out(out)
    _check_limit(limit_mb)
    done, dropped = _recorded(text, model, layers, heads, first, topk, save, out, progress)
    page = _page(done, out, limit_mb, progress, start)
    return replace(page, dropped=dropped, saved=None if save is None else check_save(save, out))


def _recorded(
    text: str,
    model: str,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    first: int | None,
    topk: int,
    save: str | Path | None,
    out: Path | None,
    progress: Progress | None,
) -> tuple[Run, int]:
    """A model's pass over a text, saved where that was asked for, and how many tokens were left out."""
    check_text(text)
    if first is not None and first < 1:
        raise InputError(f"first is {first}; give a number of tokens from 1 up")
    if topk < 1:
        raise InputError(f"topk is {topk}; give a number of predictions from 1 up")
    file = None if save is None else check_save(save, out)

    from .models import run, sources
    from .models.tokens import cut

    source = sources.load(model, progress=progress)
    whole = source.tokenize(text)
    tokens = whole if first is None else cut(whole, first)
    done = run(source, tokens, layers=layers, heads=heads, k=topk, progress=progress)
    if file is not None:
        done.recording.save(file)
    return done, len(whole.ids) - len(tokens.ids)


def reopen(
    path: str | Path,
    *,
    other: str | Path | None = None,
    layers: Sequence[int] | None = None,
    limit_mb: float = 100.0,
    out: str | Path = "kizuki.html",
    progress: Progress | None = None,
) -> Look:
    """Write the page of a recording that was saved, without its model; its predictions are not in the file.

    Args:
        path: what `look(..., save=path)` or `recording.save(path)` wrote, of one text with its tokens.
        other: another one, whose heads can be compared with the same heads of the first.
        layers: which of its layers; `None` = all.
        limit_mb, out, progress: as for `look`.

    Returns:
        A `Look`.

    Raises:
        InputError: an `out` that cannot be written, a number out of its range, a recording without tokens.
        ValueError: no recording, a damaged one, an unknown layer, a batch of texts. One line each.

    Time and memory: one layer at a time is read from the file.

    Example:
        >>> from kizuki.look import look, reopen
        >>> saved = look("Mika laughed.", model="minilm", layers=[0, 5], save="mika.safetensors").saved
        >>> reopen(saved, layers=[5], out="again.html").layers
        1
    """
    start = time.perf_counter()
    out = check_out(out)
    _check_limit(limit_mb)

    beside = None if other is None else _opened(other, layers)
    return _page(_opened(path, layers), out, limit_mb, progress, start, beside)


def _opened(path: str | Path, layers: Sequence[int] | None) -> Run:
    """A saved recording as the run it was."""
    from .models import Run, open

    recording = open(path, layers=layers)
    if recording.tokens is None:
        raise InputError(f"{path} holds no tokens to show; set recording.tokens before recording.save")
    return Run(recording.tokens, recording, None, None, {})


def serve(
    text: str | None,
    *,
    recording: str | Path | None = None,
    other: str | Path | None = None,
    model: str = "smollm2",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    first: int | None = None,
    topk: int = 5,
    save: str | Path | None = None,
    port: int = 0,
    progress: Progress | None = None,
) -> Server:
    """A server on this machine for a text's or a saved recording's attention; it runs when its `run()` is called.

    Args:
        text: what to look at, as for `look`; or None, and a `recording`.
        recording: a saved recording, as for `reopen`; layers are read from it as they are looked at.
        other: another saved recording, whose heads can be compared with the same heads of the first.
        model, layers, heads, first, topk, save, progress: as for `look`.
        port: where to listen on 127.0.0.1; 0 = a free one.

    Returns:
        A `Server`: its `address` is what to open, token and all.

    Raises:
        InputError, ValueError: as `look` and `reopen`; `PageError` where the port cannot be had, or starlette
            and uvicorn are not installed.

    Time and memory: the forward pass, and for each layer three rows checked; pictures are computed when looked at.

    Example:
        >>> from importlib.resources import files
        >>> from urllib.request import urlopen
        >>> from kizuki.look import serve
        >>> server = serve(None, recording=files("kizuki") / "lesson/example/recording.safetensors")
        >>> with server.running():
        ...     page = urlopen(server.address).read()
        >>> b"<title>kizuki</title>" in page
        True
    """
    from .explorer.answers import Answers
    from .explorer.server import Server

    if (text is None) == (recording is None):
        raise InputError("text and recording each say what to look at; give one of them")
    beside = None if other is None else Answers(_opened(other, layers))
    if recording is not None:
        done = _opened(recording, layers)
    elif text is not None:
        done, _ = _recorded(text, model, layers, heads, first, topk, save, None, progress)
    return Server(Answers(done, other=beside), port)


def _page(
    done: Run,
    out: Path,
    limit_mb: float,
    progress: Progress | None,
    start: float,
    other: Run | None = None,
) -> Look:
    """Write the page of a run; what is on it."""
    from .explorer.export import write_page

    page = write_page(out, done, limit_mb=limit_mb, other=other, progress=progress)
    return Look(
        page=page,
        model=done.recording.model_name,
        tokens=len(done.tokens.ids),
        dropped=0,
        layers=len(done.recording.layers),
        heads=_heads(done.recording),
        size=page.stat().st_size,
        seconds=time.perf_counter() - start,
    )


def _heads(recording: Recording) -> int:
    """How many heads a layer has; any that can be shown says it, for a page has layers that are alike."""
    from .models import RecordError

    for layer in recording:
        with suppress(RecordError):
            return recording[layer].shape[1]
    return 0


def _check_limit(limit_mb: float) -> None:
    if not 0 < limit_mb < float("inf"):
        raise InputError(f"limit_mb is {limit_mb}; give a size in MB above 0")


def sample() -> str:
    """The text that comes with kizuki: English and Japanese, about 600 tokens of SmolLM2."""
    return files("kizuki").joinpath("samples", "noticing.txt").read_text(encoding="utf-8")


def check_text(text: str) -> None:
    """Raise `InputError` for a text with nothing to see in it, or one that is not Unicode text."""
    if not text.strip():
        what = "is empty" if not text else "has only white space"
        raise InputError(f"the text {what}; give at least one word")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"the text is not UTF-8 (at character {error.start}); save it as UTF-8") from None


def decode(data: bytes, name: str) -> str:
    """UTF-8 bytes to text; raises `InputError` naming `name` for anything else."""
    if len(data) > TEXT_LIMIT:
        raise InputError(f"{name} has more than {TEXT_LIMIT >> 20} MB; give a shorter text")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{name} is UTF-16; save it as UTF-8")
    if b"\0" in data:
        raise InputError(f"{name} is a binary file (byte {data.index(0)} is 0); give UTF-8 text")
    try:
        return data.decode("utf-8-sig")  # a byte order mark is a signature, not text
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise InputError(
            f"{name} is not UTF-8 (byte {error.start} is 0x{byte:02x}); save it as UTF-8"
        ) from None


def read_file(path: str | Path) -> str:
    """The text of a file (or pipe); raises `InputError` where there is none to read."""
    try:
        with open(path, "rb") as file:
            return decode(file.read(TEXT_LIMIT + 1), str(path))
    except OSError as error:
        reason = {
            FileNotFoundError: "does not exist",
            IsADirectoryError: "is a folder; give a text file",
            PermissionError: "may not be read",
        }.get(type(error), f"cannot be read: {error.strerror or error}")
        raise InputError(f"{path} {reason}") from None


def check_out(out: str | Path) -> Path:
    """The file a page will go to; raises `InputError`, before any work is done, where it cannot be."""
    from .explorer.export import PageError, check_writable

    try:
        return check_writable(out)
    except PageError as error:
        raise InputError(f"--out {error}") from None


def check_save(save: str | Path, out: Path | None) -> Path:
    """The file a recording will go to; raises `InputError`, before any work is done, where it cannot be."""
    from .models import RecordError
    from .models.store import check_target

    if Path(save).suffix != RECORDING:
        raise InputError(f"--save {save}: give a name that ends in {RECORDING}, by which it is opened again")
    if out is not None and Path(save).resolve() == out.resolve():
        raise InputError(f"--save {save}: is where the page goes; give another name")
    try:
        return check_target(save)
    except RecordError as error:
        raise InputError(f"--save {str(error).partition(': ')[2]}") from None


def saved_recording(text: str | None, file: str | Path | None) -> Path | None:
    """The saved recording that is meant where a text or its file should be; None where it is a text."""
    if file is not None:
        return Path(file) if Path(file).suffix == RECORDING else None
    # A sentence may end with the name of a file, so one with spaces is taken for a name only if it is one.
    if text is None or "\n" in text or not text.endswith(RECORDING):
        return None
    return Path(text) if len(text.split()) == 1 or Path(text).is_file() else None
