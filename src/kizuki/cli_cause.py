"""`kizuki cause`: take a head, a key or a row of weights away from a live model, and see what its answer does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from .models.causes import Edit, Effect


def cause(
    text: Annotated[str, typer.Argument(help="The text; - reads standard input.")],
    layer: Annotated[
        int | None, typer.Option(help="Which layer, from 0.", show_default="all, for a hidden key")
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="Which head, from 0.", show_default="all, for a hidden key")
    ] = None,
    mask_key: Annotated[
        str | None, typer.Option("--mask-key", help="Hide these tokens from the heads, such as 7 or 3,5-6.")
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set a weight of the head, QUERY,KEY=WEIGHT; once or more, of one query."),
    ] = None,
    renormalise: Annotated[
        bool, typer.Option("--renormalise", help="Divide the row by its sum, with --set.")
    ] = False,
    mean: Annotated[bool, typer.Option("--mean", help="Put the head's mean in its place, not 0.")] = False,
    position: Annotated[
        int, typer.Option(help="The token whose next token is looked at; negative from the end.")
    ] = -1,
    tokens: Annotated[
        str | None,
        typer.Option(help="Two tokens whose logits are compared: ids, or words such as ' he, she'."),
    ] = None,
    controls: Annotated[int, typer.Option(help="How many random others beside it.", min=0)] = 10,
    seed: Annotated[int, typer.Option(help="Of the draw of these.")] = 0,
    model: Annotated[
        str, typer.Option("--model", "-m", help="smollm2, minilm, a folder, or a Hugging Face id.")
    ] = "smollm2",
    as_json: Annotated[bool, typer.Option("--json", help="For a program to read.")] = False,
) -> None:
    """Change a head of a live model and print how its next token changes, beside random other heads.

    With --layer and --head the head's output becomes 0; with --mask-key tokens are hidden instead; with --set one row
    of its weights is edited.
    """
    from rich.console import Console

    from . import look as job
    from .models import load
    from .models.causes import cause as measured
    from .progress import Bars

    followed = chosen(tokens)
    edit = edit_of(layer, head, mask_key, row, renormalise, mean)
    if text == "-":
        from .cli import given

        text = given(None, None, False)
    job.check_text(text)
    console = Console(stderr=True, highlight=False, markup=False)
    with Bars(console) as bars:
        source = load(model, progress=bars)
        read = source.tokenize(text)
        found = measured(
            source,
            read,
            edit,
            position=position,
            tokens=followed,
            controls=controls,
            seed=seed,
            progress=bars,
        )
    if as_json:
        import json

        typer.echo(json.dumps(plain(found), ensure_ascii=False, indent=2, allow_nan=False))
    else:
        show(found, read.labels, Console(highlight=False, markup=False))


def edit_of(
    layer: int | None,
    head: int | None,
    mask_key: str | None,
    row: list[str] | None,
    renormalise: bool,
    mean: bool,
) -> Edit:
    """The intervention that the options ask for; InputError where they do not fit together."""
    from .cli import numbers
    from .look import InputError
    from .models.causes import AblateHead, MaskKeys, SetRow

    if mask_key is not None and row:
        raise InputError("--mask-key and --set are two interventions; use one of them")
    if mean and (mask_key is not None or row):
        raise InputError("--mean is for a whole head; leave it out with --mask-key and --set")
    if renormalise and not row:
        raise InputError("--renormalise is for --set; leave it out, or set a weight")
    if mask_key is not None:
        keys = numbers(mask_key, "--mask-key")
        if keys is None:
            raise InputError(f"--mask-key {mask_key!r} hides everything; name tokens, such as 3,5-6")
        return MaskKeys(keys if len(keys) > 1 else keys[0], layer, head)
    if layer is None or head is None:
        raise InputError("a head is named by --layer and --head; give both, or hide a key with --mask-key")
    if not row:
        return AblateHead(layer, head, "mean" if mean else "zero")
    cells = [re.fullmatch(r"\s*(\d{1,9})\s*,\s*(\d{1,9})\s*=\s*([\d.]+(?:e-?\d+)?)\s*", one) for one in row]
    try:
        weights = [(int(cell[1]), int(cell[2]), float(cell[3])) for cell in cells if cell]
    except ValueError:
        weights = []
    if len(weights) < len(row):
        raise InputError(f"--set {' '.join(row)!r}: write QUERY,KEY=WEIGHT, such as 7,2=0.5")
    if len({query for query, _, _ in weights}) > 1:
        raise InputError("--set edits one row; give the weights of one query")
    return SetRow(layer, head, weights[0][0], {key: weight for _, key, weight in weights}, renormalise)


def chosen(tokens: str | None) -> tuple[int | str, int | str] | None:
    """` he, she` as two words with their spaces, `284,1032` as two ids."""
    from .look import InputError

    if tokens is None:
        return None
    parts = tokens.split(",")
    if len(parts) != 2 or not all(parts):
        raise InputError(
            f"--tokens {tokens!r}: give two, with a comma between them, such as ' he, she' or 284,1032"
        )
    first, second = (int(part) if re.fullmatch(r"\d{1,9}", part) else part for part in parts)
    return first, second


def show(found: Effect, labels: list[str], console: Console) -> None:
    """The effect as tables, with the sentence that keeps it from being overread."""
    from rich import box
    from rich.table import Table

    named = labels[found.position].strip() or labels[found.position]
    console.print(f"{found.edit}; seen at token {found.position}, “{named}”", soft_wrap=True)
    numbers = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    numbers.add_column("change", no_wrap=True)
    numbers.add_column("here", justify="right", no_wrap=True)
    if found.control is not None:
        numbers.add_column("others, mean ± sd", justify="right")
        numbers.add_column("others ≥ here", justify="right")
    size = "‖h′ − h‖ / ‖h‖" if found.kl is None else "KL(before ‖ after), nats"
    rows = [[size, f"{found.size:.4g}"]]
    if found.control is not None:
        rows[0] += [
            spread(found.control.mean, found.control.sd),
            f"{found.above} of {len(found.control.kl)}",
        ]
    if found.tokens is not None and found.logit_difference is not None:
        first, second = (label for _, label in found.tokens)
        before, after = found.logit_difference
        rows.append([f"logit{first} − logit{second}", f"{before:.3f} → {after:.3f}"])
        if found.control is not None and found.control.logit_difference:
            rows[1] += [_shifts(found.control.logit_difference), ""]
    for cells in rows:
        numbers.add_row(*cells)
    console.print(numbers)
    if found.kl is not None:
        tops = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("before", "", "after", " "):
            tops.add_column(name.strip(), justify="left" if name.strip() else "right")
        for (_, old, p), (_, new, q) in zip(found.before, found.after, strict=True):
            tops.add_row(old, f"{100 * p:.1f} %", new, f"{100 * q:.1f} %")
        console.print(tops)
    if found.control is not None:
        drawn = ", ".join(str(each) for each in found.control.drawn) or "there are none"
        console.print(f"others: {found.control.kind} ({drawn}), seed {found.control.seed}", soft_wrap=True)
    console.print("One text and one position: an example, not a finding.")


def spread(mean: float, sd: float) -> str:
    """`0.012 ± 0.004`, without what is not defined."""
    if mean != mean:
        return "–"
    return f"{mean:.4g}" if sd != sd else f"{mean:.4g} ± {sd:.2g}"


def _shifts(shifts: tuple[float, ...]) -> str:
    from statistics import fmean, stdev

    return f"Δ {fmean(shifts):+.3f}" + (f" ± {stdev(shifts):.2g}" if len(shifts) > 1 else "")


def plain(found: Effect) -> dict[str, Any]:
    """The effect as JSON holds it: what is not defined is null."""
    from dataclasses import asdict

    held = asdict(found)
    held["edit"] = {"kind": type(found.edit).__name__, **held["edit"]}
    if "weights" in held["edit"]:
        held["edit"]["weights"] = {str(key): weight for key, weight in held["edit"]["weights"].items()}
    if found.control is not None:
        for name in ("mean", "sd"):
            value = held["control"][name]
            held["control"][name] = None if value != value else value
    return held
