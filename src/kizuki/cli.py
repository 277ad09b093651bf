"""The command line. A command is a function below; `main` turns what goes wrong into one line and a code.

Exit codes: 0 done, 2 something given cannot be used, 130 stopped with Ctrl-C, 1 a fault of kizuki's own.
Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from . import cli_cause, cli_figure

if TYPE_CHECKING:
    from .lesson import Material

app = typer.Typer(
    name="kizuki",
    help="Look at all of a model's self-attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Errors of the command line itself, by the name typer exports (where its copy of click lives has changed).
UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]


def version(asked: bool) -> None:
    if asked:
        from . import __version__

        typer.echo(f"kizuki {__version__}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=version, is_eager=True)
    ] = False,
) -> None:
    """Look at all of a model's self-attention."""


@app.command()
def look(
    text: Annotated[
        str | None,
        typer.Argument(help="The text, or a saved recording; - or nothing reads standard input."),
    ] = None,
    other: Annotated[
        Path | None,
        typer.Argument(help="A second saved recording, to compare the same heads in both."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the text from a file.")] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Use the text that comes with kizuki.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="smollm2, minilm, a folder, or a Hugging Face id.",
            show_default="smollm2",
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Which layers, such as 0,5,10-12.", show_default="all")
    ] = None,
    heads: Annotated[str | None, typer.Option(help="Which heads, likewise.", show_default="all")] = None,
    first: Annotated[int | None, typer.Option(help="Look at the first so many tokens only.", min=1)] = None,
    topk: Annotated[
        int | None, typer.Option(help="Next tokens shown at each position.", min=1, show_default="5")
    ] = None,
    limit_mb: Annotated[
        float | None, typer.Option(help="The largest page to write, in MB.", show_default="100")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page to write.", show_default="kizuki.html")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page on this machine instead of writing one.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="Where --serve listens.", min=1, max=65535, show_default="a free one")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Save the recording too: a file to look at again, ….safetensors.")
    ] = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Write one self-contained HTML page of what a model's heads read in a text, and open it.

    The page needs no network and no other file. Its path is printed on standard output, and below it that of the
    recording, where one was saved. kizuki look FILE.safetensors makes the page of a saved one again, and a second one
    behind it lets the page compare the same heads in both. With --serve the page comes from a server on this machine,
    for texts too long for a file; its address is printed instead.
    """
    from . import look as job
    from .progress import Bars

    console = Console(stderr=True, highlight=False, markup=False)  # names may hold [brackets]
    wanted = numbers(layers, "--layers"), numbers(heads, "--heads")
    if other is not None and other.suffix != job.RECORDING:
        raise job.InputError(f"{other}: no saved recording; put a text of several words between quotes")
    if serve:
        refuse_options(
            "is for a page that is written, and --serve writes none", {"--out": out, "--limit-mb": limit_mb}
        )
        serve_look(text, other, file, sample, model, wanted, first, topk, save, port, show, console)
        return
    refuse_options("is for --serve", {"--port": port})
    out = job.check_out(Path("kizuki.html") if out is None else out)
    limit_mb = 100.0 if limit_mb is None else limit_mb
    if (recording := job.saved_recording(text, file)) is not None:
        for_texts = {"--model": model, "--heads": heads, "--first": first, "--topk": topk, "--save": save}
        refuse_with_recording(recording, for_texts, text is not None and file is not None, sample)
        console.print(f"looking at {recording}, a saved recording")
        with Bars(console) as bars:
            done = job.reopen(
                recording, other=other, layers=wanted[0], limit_mb=limit_mb, out=out, progress=bars
            )
    else:
        if other is not None:
            raise job.InputError(
                f"{other}: is compared with another recording, or with --serve; save this one first"
            )
        words = given(text, file, sample)
        job.check_text(words)
        model = "smollm2" if model is None else model
        console.print(f"looking at {len(words):,} characters with {model}")
        with Bars(console) as bars:
            done = job.look(
                words,
                model=model,
                layers=wanted[0],
                heads=wanted[1],
                first=first,
                topk=5 if topk is None else topk,
                limit_mb=limit_mb,
                out=out,
                save=save,
                progress=bars,
            )
    rest = f" (the first; {done.dropped:,} more were left out)" if done.dropped else ""
    console.print(
        f"{done.model}: {done.tokens:,} tokens{rest}, {done.layers} layers × {done.heads} heads, "
        f"{done.size / 1e6:.1f} MB, {done.seconds:.1f} s"
    )
    typer.echo(done.page)
    if done.saved is not None:
        typer.echo(done.saved)
    if show and not open_page(done.page):
        folder = done.page.resolve().parent
        hint = "There is no screen here to open it on. It is one file that needs no other: copy it, or serve it with"
        how = f"  python -m http.server --bind 127.0.0.1 --directory '{folder}' 8000"
        then = f"and open http://127.0.0.1:8000/{done.page.name}"
        console.print(hint, how, then, sep="\n", soft_wrap=True)


def serve_look(
    text: str | None,
    other: Path | None,
    file: Path | None,
    sample: bool,
    model: str | None,
    wanted: tuple[tuple[int, ...] | None, tuple[int, ...] | None],
    first: int | None,
    topk: int | None,
    save: Path | None,
    port: int | None,
    show: bool,
    console: Console,
) -> None:
    """`kizuki look --serve`: print the address and serve until Ctrl-C."""
    from . import look as job
    from .progress import Bars

    with Bars(console) as bars:
        if (recording := job.saved_recording(text, file)) is not None:
            for_texts = {
                "--model": model,
                "--heads": wanted[1],
                "--first": first,
                "--topk": topk,
                "--save": save,
            }
            refuse_with_recording(recording, for_texts, text is not None and file is not None, sample)
            server = job.serve(None, recording=recording, other=other, layers=wanted[0], port=port or 0)
        else:
            server = job.serve(
                given(text, file, sample),
                other=other,
                model="smollm2" if model is None else model,
                layers=wanted[0],
                heads=wanted[1],
                first=first,
                topk=5 if topk is None else topk,
                save=save,
                port=port or 0,
                progress=bars,
            )
    meta = server.answers.meta
    rest = " (the first; the rest was left out)" if first is not None and meta["queries"] == first else ""
    console.print(
        f"{meta['model']}: {meta['queries']:,} tokens{rest}, {len(meta['layers'])} layers × {len(meta['heads'])} heads"
    )
    typer.echo(server.address)
    sys.stdout.flush()
    console.print("The token in it is for this run only. Ctrl-C stops.")
    if show:
        open_address(server.address)
    server.run()


def refuse_options(why: str, options: Mapping[str, object]) -> None:
    """Raise for an option that would be left aside without a word."""
    from .look import InputError

    for name, value in options.items():
        if value is not None:
            raise InputError(f"{name} {why}; leave it out")


@app.command()
def survey(
    files: Annotated[list[Path], typer.Argument(help="Text files, UTF-8, one text each.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="smollm2, minilm, a folder, or a Hugging Face id.")
    ] = "smollm2",
    measures: Annotated[
        str | None, typer.Option(help="Which measures, such as entropy,first_key.", show_default="all")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Which layers, such as 0,5,10-12.", show_default="all")
    ] = None,
    heads: Annotated[str | None, typer.Option(help="Which heads, likewise.", show_default="all")] = None,
    first: Annotated[int | None, typer.Option(help="Read the first so many tokens only.", min=1)] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The Parquet file to write.")] = Path(
        "survey.parquet"
    ),
) -> None:
    """Measure every head of a model in many texts, each number beside its control, into one Parquet file.

    One row a text, layer and head. Stopped or killed, the same command goes on where it was: no text is lost or read
    twice. The file's path is printed on standard output.
    """
    from . import look as job
    from .models import load, parquet
    from .models import survey as read
    from .progress import Bars

    console = Console(stderr=True, highlight=False, markup=False)
    wanted = numbers(layers, "--layers"), numbers(heads, "--heads")
    chosen = None if measures is None else [name.strip() for name in measures.split(",")]
    out = parquet.check_target(out)
    parquet.library()
    texts: dict[str, str] = {}
    for file in files:
        if str(file) in texts:
            raise job.InputError(f"{file} is given twice; name each file once")
        texts[str(file)] = job.read_file(file)
    with Bars(console) as bars:
        source = load(model, progress=bars)
        done = read(
            texts, source, chosen, out=out, layers=wanted[0], heads=wanted[1], first=first, progress=bars
        )
    before = f", {done.texts - done.done:,} of them before" if done.done < done.texts else ""
    console.print(f"{source.name}: {done.texts:,} texts{before}")
    typer.echo(out)


app.command()(cli_figure.figure)
app.command()(cli_cause.cause)


@app.command()
def explain(
    text: Annotated[
        str | None,
        typer.Argument(
            help="One sentence, or a saved recording; - reads standard input.", show_default="the example"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="smollm2, minilm, a folder, or a Hugging Face id.",
            show_default="smollm2",
        ),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Which layer, from 0.", show_default="a telling one")
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="Which head, from 0.", show_default="a telling one")
    ] = None,
    word: Annotated[
        str | None,
        typer.Option(help="The token to follow, its text or number.", show_default="one that looks far"),
    ] = None,
    number: Annotated[
        str | None,
        typer.Option("--number", "-n", help='Open one number to its multiplications, such as "weight[7,1]".'),
    ] = None,
    lang: Annotated[str | None, typer.Option(help="en or ja.", show_default="the locale's")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the lesson as one HTML page with switches instead.")
    ] = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open that page in a browser.")] = True,
) -> None:
    """Walk through self-attention in eight steps on your own sentence and a real model's own numbers.

    Without a sentence the example that comes with kizuki opens at once.
    """
    from . import lesson as job
    from .lesson.language import preferred, table
    from .lesson.page import check_target, write_page

    language = preferred() if lang is None else lang
    table(language)
    page = None if html is None else check_target(html)
    if page is not None and number is not None:
        raise job.LessonError("--number opens a number here and --html writes a page; use one of them")
    made = lesson_of(text, model, layer, head, word)
    if page is not None:
        typer.echo(write_page(page, made, language=language))
        if show:
            open_page(page)
        return
    from .lesson.terminal import Terminal

    told = Terminal(made, language, Console(highlight=False))
    if number is None:
        told.lesson_in_full()
    else:
        told.number(number)


def lesson_of(
    text: str | None, model: str | None, layer: int | None, head: int | None, word: str | None
) -> Material:
    """The lesson's material: the example, a saved recording, or a model's pass over a sentence."""
    from . import lesson, look

    if text is None:
        for name, value in {"--model": model, "--layer": layer}.items():
            if value is not None:
                raise lesson.LessonError(f"{name} is for a sentence; give one, or leave {name} out")
        return lesson.shipped(head=head, word=word)
    if (recording := look.saved_recording(text, None)) is not None:
        if model is not None:
            raise lesson.LessonError(f"--model is for a sentence, and {recording} is a saved recording")
        from .models import open

        opened = open(recording, layers=None if layer is None else [layer])
        return lesson.from_recording(
            opened, opened.layers[0] if layer is None else layer, head=head, word=word
        )
    words = given(text, None, False)
    look.check_text(words)
    if text == "-":
        words = words.rstrip("\r\n")  # the end of a line, and no token of the sentence
    from .models import load
    from .progress import Bars

    with Bars(Console(stderr=True, highlight=False, markup=False)) as bars:
        source = load(model or "smollm2", progress=bars)
        return lesson.gather(source, words, layer=layer, head=head, word=word, progress=bars)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For a program to read.")] = False,
) -> None:
    """Print what a bug report needs: versions, processor, threads, caches, models, environment."""
    from .doctor import report, show

    found = report()
    if as_json:
        import json

        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        show(found, Console(highlight=False))


@app.command()
def bench(
    cell: Annotated[
        list[str] | None,
        typer.Argument(help="Cells, their beginnings (forward/f32), patterns ('*/causal'), or growth."),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the cells and their bars.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look: little time, no conclusions.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Add the rows to this file, as JSON.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them: a .png, .svg or .pdf.")] = None,
    only: Annotated[str | None, typer.Option(help="Providers, such as kizuki,torch-sdpa.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads for everybody.", show_default="torch's")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.001, max=3600.0, help="Time for one provider on one cell.")
    ] = 2.0,
) -> None:
    """Measure kizuki and its peers on one grid of problems, each checked against float64 before it is timed.

    Without a cell it runs all of them, which takes half an hour. Exit code 1 when kizuki was wrong or failed.
    """
    from .bench import job

    console = Console(highlight=False, markup=False)
    if listing:
        job.list_cells(console)
        return
    right = job.bench(
        cell or [],
        console=console,
        quick=quick,
        out=out,
        plot=plot,
        only=only,
        threads=threads,
        seconds=seconds,
    )
    if not right:
        fail("kizuki itself was wrong or failed in a cell above", 1)


@app.command()
def warmup() -> None:
    """Compile every kernel for this processor into the cache, so that no first call has to."""
    from . import caches
    from .cpu import warmup as job
    from .progress import Bars

    console = Console(stderr=True, highlight=False, markup=False)
    total, done = 0.0, []
    try:
        count = job.count()
        with Bars(console) as bars:
            bars("kernels", 0, count)
            for kernel in job.warm():
                done.append(kernel)
                total += kernel.seconds
                console.print(
                    f"{kernel.name:<28} {'loaded' if kernel.loaded else 'compiled':<9}{kernel.seconds:7.2f} s"
                )
                bars("kernels", len(done), count)
    except job.CacheError as error:
        fail(str(error), 1)
    typer.echo(f"{len(done)} kernels in {caches.folder('kernels')}, {total:.1f} s")


def numbers(listed: str | None, name: str) -> tuple[int, ...] | None:
    """`0,5,10-12` as (0, 5, 10, 11, 12)."""
    from .look import InputError

    if listed is None or listed == "all":
        return None
    found: list[int] = []
    for part in listed.split(","):
        ends = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part)
        low, high = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if low > high:
            raise InputError(f"{name} {listed!r}: {part.strip()!r} is no number or range; write 0,5,10-12")
        found.extend(range(low, high + 1))
    return tuple(sorted(set(found)))


def given(text: str | None, file: Path | None, sample: bool) -> str:
    """The text, from the one place that was named, or else from standard input."""
    from . import look as job

    if (text is not None) + (file is not None) + sample > 1:
        raise job.InputError("TEXT, --file and --sample each give the text; use one of them")
    if sample:
        return job.sample()
    if file is not None and str(file) != "-":
        return job.read_file(file)
    if text is not None and text != "-":
        return text
    if sys.stdin is None or sys.stdin.isatty():
        raise job.InputError('no text; give it as "your text", with --file, through a pipe, or use --sample')
    return job.decode(sys.stdin.buffer.read(job.TEXT_LIMIT + 1), "standard input")


def refuse_with_recording(recording: Path, options: Mapping[str, object], both: bool, sample: bool) -> None:
    """Raise for what only a text and a model can use, so that nothing given is left aside without a word."""
    from .look import InputError

    if both or sample:
        raise InputError("TEXT, --file and --sample each give what to look at; use one of them")
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{name} is for a text, and {recording} is a saved recording; leave it out")


def open_page(page: Path) -> bool:
    """Open a page where there is a screen to see it on; say whether that was so."""
    return open_address(page.resolve().as_uri())


def open_address(address: str) -> bool:
    """The same of an address."""
    import webbrowser

    screen = (
        sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    return bool(screen) and webbrowser.open(address)


def fail(message: str, code: int) -> NoReturn:
    """One line on standard error, and the exit code."""
    line = " ".join(message.split())
    typer.echo(line if line.startswith("kizuki") else f"kizuki: {line}", err=True)
    raise SystemExit(code)


def explained(error: BaseException) -> bool:
    """Whether an error was written for the person who called: every error class of kizuki's own is."""
    return type(error).__module__.partition(".")[0] == "kizuki"


def on_fault(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What is left: a fault of kizuki's own, in one line."""
    line = " ".join(f"{kind.__name__}: {error}".split())
    typer.echo(f"kizuki: a fault of its own, {line} (KIZUKI_DEBUG=1 shows where)", err=True)


def main(args: Sequence[str] | None = None) -> None:
    """The `kizuki` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a terminal without × or 気 shows ?, and the work is not lost
    debug = os.environ.get("KIZUKI_DEBUG", "0") not in ("", "0")
    if not debug:
        sys.excepthook = on_fault
    command = typer.main.get_command(app)  # calling `app` would put typer's own excepthook in its place
    try:
        code = command(args=args, prog_name="kizuki", standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except UsageProblem as error:
        message = str(error.format_message())  # type: ignore[attr-defined]
        if not message:  # `kizuki` alone: the help is on the screen already
            raise SystemExit(2) from None
        fail(f"{message.rstrip('.')}; kizuki --help lists what there is", 2)
    except (ValueError, TypeError, MemoryError, RuntimeError) as error:
        if debug:
            raise
        if explained(error):
            fail(str(error), 2)
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # Python's, or torch's
            fail("out of memory; look at less with --first, --layers or --heads", 1)
        raise
    if code == 130:
        fail("stopped", 130)
    raise SystemExit(code if isinstance(code, int) else 0)
