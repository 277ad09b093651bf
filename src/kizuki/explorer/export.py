"""Writing the page: one self-contained HTML file, streamed to disk, complete or not there at all."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from numpy.typing import NDArray

from .. import files
from . import bundle, page, start
from .budget import BudgetError, LayerSize, Plan, encoded, plan
from .page import Layer, PageError

if TYPE_CHECKING:
    import torch

    from kizuki import AttentionMatrix
    from kizuki.models import Run

Progress = Callable[[str, int, int], None]

BLOCK = 96  # bytes around one array in the file
OTHER = "other-"  # before the names of the other input's blocks

__all__ = ["BudgetError", "PageError", "Written", "check_writable", "write", "write_page"]


def check_writable(path: str | os.PathLike[str]) -> Path:
    """The path, if a page can be written there; else `PageError`, one line, before any work is done.

    >>> from kizuki.explorer import check_writable
    >>> check_writable("page.html").name
    'page.html'
    """
    return files.check_target(path, PageError)


@dataclass(frozen=True)
class Written:
    """A page that was written, and which layers it holds in full (with q, k and L) and in part (their readings)."""

    path: Path
    full: tuple[int, ...]
    partial: tuple[int, ...]
    partial_other: tuple[int, ...] = ()  # of the other input, where the page has one


@dataclass(frozen=True)
class Part:
    """What a page holds of one run; `mark` is before the names of its blocks."""

    meta: dict[str, Any]
    layers: list[Layer]
    matrices: dict[int, AttentionMatrix]
    values: dict[int, torch.Tensor]
    chosen: Plan
    mark: str = ""

    @property
    def partial(self) -> tuple[int, ...]:
        return tuple(layer for layer in self.matrices if layer not in self.chosen.full)


def write_page(
    path: str | os.PathLike[str],
    run: Run,
    *,
    limit_mb: float = 100.0,
    first: Sequence[int] = (),
    other: Run | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write everything a run's heads read as one HTML file that needs no network and no server.

    The page holds q, k (float32, as recorded) and L of every layer that fits, and computes any weight
    a_ij = exp(scale · q_i·k_j − L_i) from them; of the others it holds row statistics, the weight each
    key received, a pooled picture and the largest weights of each row, and says what is left out.
    Where room remains it also holds v of layers that are there in full, the one it opens with first.

    Args:
        path: where to; written beside it and moved there when complete.
        run: what `kizuki.models.run` returns, of one text.
        limit_mb: the file's size, in MB of 10⁶ bytes, that decides how many layers are there in full.
        first: layers to hold in full before others; the rest are evenly spaced, first and last among them.
        other: another run, to compare its heads with the same heads here; each gets half of the limit then.
        progress: called as `progress(stage, done, total)`.

    Returns:
        The path.

    Raises:
        PageError: a run is not one text, the two have no layer or head in common, `first` names a layer that neither
            has, or the path cannot be written.
        BudgetError: not even the smallest page fits the limit. Both are ValueErrors of one line.

    Time: five passes over Q Kᵀ of every layer. Memory: the readings (at most the file's size) and one
    layer's arrays; nothing of queries × keys.

    Example:
        >>> from kizuki.explorer import write_page
        >>> from kizuki.models import load, run
        >>> write_page("page.html", run(load("minilm"), "They had seen it.", layers=[0])).name
        'page.html'
    """
    return write(path, run, limit_mb=limit_mb, first=first, other=other, progress=progress).path


def write(
    path: str | os.PathLike[str],
    run: Run,
    *,
    limit_mb: float = 100.0,
    first: Sequence[int] = (),
    other: Run | None = None,
    progress: Progress | None = None,
) -> Written:
    """`write_page`, where it is described; returns what the page holds."""
    target = check_writable(path)
    if isinstance(limit_mb, bool) or not isinstance(limit_mb, (int, float)) or not 0 < limit_mb < math.inf:
        raise PageError(f"limit_mb is {limit_mb!r} but must be a number above 0, in MB of the file")
    _check_first(first, [layer for each in (run, other) if each for layer in each.recording.layers])
    report = progress or (lambda stage, done, total: None)
    head_text = _head()
    fixed = len(head_text.encode())
    if other is None:
        parts = [_part(run, limit_mb, limit_mb, fixed, first, report)]
    else:
        parts = [
            _part(run, limit_mb, limit_mb / 2, fixed, first, report),
            _part(other, limit_mb, limit_mb / 2, 0, first, report, OTHER),
        ]
        page.check_shared(
            parts[0].meta["heads"], parts[0].matrices, parts[1].meta["heads"], parts[1].matrices
        )
        parts[0].meta["other"] = parts[1].meta
    with (
        files.replacing(target, PageError) as file_part,
        file_part.open("w", encoding="utf-8", newline="\n") as file,
    ):
        before, after = head_text.split("KIZUKI_META", 1)
        file.write(before)
        file.write(_json(parts[0].meta))
        file.write(after)
        # The page already runs from here on; what follows is read by the browser while people look at it.
        for part in parts:
            _write(file, part, report)
        file.write('<script type="text/plain" id="kz-end"></script>\n</body>\n</html>\n')
    return Written(
        target, parts[0].chosen.full, parts[0].partial, parts[1].partial if other is not None else ()
    )


def _check_first(first: Sequence[int], known: Sequence[Any]) -> None:
    """`PageError` unless `first` names layers of these."""
    if not isinstance(first, Sequence):
        raise PageError(f"first is {first!r} but must be a list of layers")
    for layer in first:
        if isinstance(layer, bool) or layer not in known:
            numbers = page.spans(sorted({each for each in known if isinstance(each, int)}))
            raise PageError(f"first holds {layer!r}, which was not recorded; recorded are layers {numbers}")


def _part(
    run: Run,
    limit_mb: float,
    own_mb: float,
    fixed: int,
    first: Sequence[int],
    report: Progress,
    mark: str = "",
) -> Part:
    """Read what `own_mb` can hold of a run, `fixed` bytes of it taken by something else."""
    matrices, missing = page.matrices_of(run)
    sizes = page.sizes_of(run, matrices)
    meta = page.meta_of(run, list(matrices), matrices, missing, sizes) | {"limit_mb": limit_mb}
    meta["tokens"] |= {"ids": list(run.tokens.ids), "words": page.words_of(run)}
    meta["predictions"] = page.predictions_of(run)
    fixed += len(_json(meta)) + 250 * len(sizes) + BLOCK * sum(size.heads for size in sizes)
    chosen = plan(sizes, round(own_mb * 1e6), fixed, first)

    layers = []
    for done, (layer, matrix) in enumerate(matrices.items()):
        report("reading heads", done, len(matrices))
        layers.append(page.read_layer(layer, matrix, chosen))
    report("reading heads", len(matrices), len(matrices))
    _complete(meta, layers, chosen, sizes)
    meta["provenance"].append(page.checked(layers))
    meta["start"] = start.choose(run.tokens, chosen.full or [layers[0].layer], matrices, meta["heads"])
    values = _values(run, meta, chosen, round(own_mb * 1e6) - chosen.bytes)
    return Part(meta, layers, matrices, values, chosen, mark)


def _complete(
    meta: dict[str, Any], layers: Sequence[Layer], chosen: Plan, sizes: Sequence[LayerSize]
) -> None:
    """Add to `meta` what is known after the readings: means, ranges, what is there in full."""
    ranges = list(dict.fromkeys(layer.ranges for layer in layers if layer.ranges is not None))
    meta["layers"] = [
        {
            "layer": layer.layer,
            "full": layer.layer in chosen.full,
            "reason": layer.reason,
            "ranges": None if layer.ranges is None else ranges.index(layer.ranges),
            "dim": layer.dim,
            "scale": layer.scale,
            "softcap": layer.softcap,
            "sinks": layer.sinks,
        }
        for layer in layers
    ]
    meta["controls"] = [page.controls_of(part, sizes[0].queries) for part in ranges]
    meta["ranges"] = len(ranges)
    meta["rows"] = list(chosen.rows)
    meta["top"] = min(chosen.top, sizes[0].keys) if len(chosen.full) < len(layers) else 0
    meta["top_kind"] = "u2" if sizes[0].keys < 65535 else "i4"
    meta["picture"] = dict(zip(("rows", "cols"), layers[0].picture.shape[1:], strict=True))
    meta["means"] = {
        name: [
            [None if mean is None else float(f"{mean:.9g}") for mean in layer.means[name]] for layer in layers
        ]
        for name in page.MEANS
    }
    bounds = [page.bound_of(layer.ranges, sizes[0].queries, sizes[0].keys) for layer in layers]
    meta["bound"] = max(bounds)


def _values(run: Run, meta: dict[str, Any], chosen: Plan, room: int) -> dict[int, torch.Tensor]:
    """v, `[kv_heads, keys, value_dim]`, of the full layers for which there are bytes left; `meta` says of which."""
    first = meta["start"]["layer"]
    held: dict[int, torch.Tensor] = {}
    for layer in sorted(chosen.full, key=lambda layer: layer != first):
        value = run.recording.value(layer)[0]
        size = sum(encoded(4 * each.numel()) + BLOCK for each in value)
        if size <= room:
            room -= size
            held[layer] = value
    for info in meta["layers"]:
        info["value_dim"] = held[info["layer"]].shape[-1] if info["layer"] in held else None
    return held


def _write(file: TextIO, part: Part, report: Progress) -> None:
    """The blocks of one run."""
    for number, ranges in enumerate(
        dict.fromkeys(layer.ranges for layer in part.layers if layer.ranges is not None)
    ):
        _block(file, f"{part.mark}ranges-{number}", np.frombuffer(ranges, "<i4"))
    opened = part.meta["start"]["layer"]
    # What the page opens with is read first.
    order = sorted(part.layers, key=lambda layer: layer.layer != opened)
    for layer in order[:1]:
        _light_blocks(file, layer, part)
    for done, layer in enumerate(order):
        report("writing the page", done, len(order))
        if layer.layer in part.chosen.full:
            _full_blocks(file, layer, part)
        if layer.layer in part.values:
            for slot, value in enumerate(part.values[layer.layer]):
                _block(file, f"{part.mark}v-{layer.layer}-{slot}", page.exact(value))
        if done == 0:
            for rest in order[1:]:
                _light_blocks(file, rest, part)
    report("writing the page", len(order), len(order))


def _light_blocks(file: TextIO, layer: Layer, part: Part) -> None:
    for name, values in (*layer.rows.items(), ("received", layer.received), ("picture", layer.picture)):
        _block(file, f"{part.mark}{name}-{layer.layer}", values.astype("<f4", copy=False))
    if layer.top is not None:
        weights, keys = layer.top
        _block(file, f"{part.mark}topw-{layer.layer}", weights.astype("<f4", copy=False))
        kind = {"u2": "<u2", "i4": "<i4"}[part.meta["top_kind"]]
        none = 65535 if kind == "<u2" else -1
        _block(file, f"{part.mark}topk-{layer.layer}", np.where(keys < 0, none, keys).astype(kind))


def _full_blocks(file: TextIO, layer: Layer, part: Part) -> None:
    matrix, heads = part.matrices[layer.layer], part.meta["heads"]
    _block(file, f"{part.mark}lse-{layer.layer}", layer.lse.astype("<f4", copy=False))
    for slot in range(matrix.shape[1]):
        _block(file, f"{part.mark}q-{layer.layer}-{heads[slot]}", page.exact(matrix.query[0, slot]))
    for slot in range(matrix.problem.kv_heads):
        _block(file, f"{part.mark}k-{layer.layer}-{slot}", page.exact(matrix.key[0, slot]))


def _block(file: TextIO, name: str, array: NDArray[Any]) -> None:
    """One inert element of base64; the browser keeps it as text until the page asks for it."""
    file.write(f'<script type="text/plain" id="kz-{name}">')
    file.write(base64.b64encode(np.ascontiguousarray(array).data).decode("ascii"))
    file.write("</script>\n")


def _json(meta: dict[str, Any]) -> str:
    r"""JSON in ASCII that no HTML parser can see markup in: `<`, `>`, `&` and `/` never appear as themselves."""
    text = json.dumps(meta, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # They occur inside strings only, where these escapes mean the same.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("/", "\\/")


def _head() -> str:
    """The page up to its data, with KIZUKI_META where the JSON goes."""
    script, style = bundle.script("main.js", "file"), bundle.style("page.css")
    policy = (
        f"default-src 'none'; script-src '{content_hash(script)}'; style-src '{content_hash(style)}' 'unsafe-hashes'; "
        "worker-src blob:; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n<title>kizuki</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n{bundle.read('page.html')}"
        '<script type="application/json" id="kz-meta">KIZUKI_META</script>\n'
        f'<script id="kz-page">{script}</script>\n'
    )


def content_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
