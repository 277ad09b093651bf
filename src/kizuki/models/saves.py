"""`recording.save_svg` and its like: one head of a recording as a figure or a table, without a browser."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kizuki import AttentionMatrix
    from kizuki.explorer.figures import Figure, FigureOptions

    from .recording import Layer, Recording


class Saves:
    """The methods of a `Recording` that make figures and tables of one head."""

    def figure(
        self,
        layer: Layer,
        head: int,
        *,
        batch: int = 0,
        unit: Literal["token", "word", "character"] = "token",
        **options: Unpack[FigureOptions],
    ) -> Figure:
        """One head as a `kizuki.explorer.figures.Figure`: `.save(path)`, or `.cells.values` for a plot of your own.

        Args:
            layer: one of the recorded layers.
            head: a head of the model, counted from 0.
            batch: which text of a batch. Names stand at the axes where `recording.tokens` are of this text.
            unit: what a cell is: a token, or the tokens of a word or character joined, as `kizuki.models.join` says
                (sum over keys, mean over queries); then queries and keys count those.
            options: queries, keys, pool, pixels, scale, dark, width, font_pt, font, dpi, title, language; see
                `kizuki.explorer.figures.figure`.

        Raises RecordError for a layer or head that was not recorded, FigureError for the options. One line each.

        Cost: the weights of at most `pixels` tokens a side, or one pass over this head that pools them.

        Example:
            >>> import kizuki, torch, transformers
            >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
            >>> model = transformers.GPT2LMHeadModel(config).eval()
            >>> with kizuki.record(model) as recording:
            ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
            >>> made = recording.figure(2, 1)
            >>> made.style.title, made.cells.values.shape, bool((made.cells.values.sum(1).round(5) == 1).all())
            ('GPT2LMHeadModel, layer 2, head 1', (5, 5), True)
        """
        from kizuki.explorer.figures import figure

        from .rule import RecordError
        from .words import join

        recording = cast("Recording", self)
        matrix = one_head(recording, layer, head, batch)
        tokens, versions = recording.tokens, recording.versions or {}
        known = tokens is not None and len(tokens) == matrix.shape[-1] and recording[layer].shape[0] == 1
        about: dict[str, Any] = {
            "model": recording.model_name,
            "layer": layer,
            "head": head,
            "batch": batch,
            "mask": recording.rule(layer),
            "checked": recording.checked(layer),
            **({"recorded_with": versions} if versions else {}),
        }
        if unit == "token":
            return figure(matrix, labels=tokens.labels if known and tokens else None, about=about, **options)
        if tokens is None or not known:
            raise RecordError(
                f"recording: unit is {unit!r} but the recording has no tokens of this text; set recording.tokens"
            )
        return figure(matrix, words=join(tokens, unit), about={**about, "unit": unit}, **options)

    def save_svg(
        self,
        path: str | os.PathLike[str],
        layer: Layer,
        head: int,
        *,
        batch: int = 0,
        unit: Literal["token", "word", "character"] = "token",
        **options: Unpack[FigureOptions],
    ) -> Path:
        """One head as an SVG file: text is text, up to 64 × 64 cells are vector, more are one embedded picture.

        Args:
            path: the file, `….svg`; one that is there is replaced, at once and only when complete.
            layer, head, batch, unit, options: as for `figure`.

        Returns:
            The path.

        Raises:
            FigureError: another ending, a file that cannot be written, an option that cannot be. RecordError as in
                `recording[layer]`. One line each, before any work where that can be known.

        Example:
            >>> import kizuki
            >>> from importlib.resources import files
            >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
            >>> recording.save_svg("head.svg", 13, 8, width="85mm", queries=(0, 9), keys=(0, 9)).name
            'head.svg'
        """
        return self._save(path, ".svg", layer, head, batch, unit, options)

    def save_png(
        self,
        path: str | os.PathLike[str],
        layer: Layer,
        head: int,
        *,
        batch: int = 0,
        unit: Literal["token", "word", "character"] = "token",
        **options: Unpack[FigureOptions],
    ) -> Path:
        """One head as a PNG file of `dpi` dots an inch; needs Pillow (the extra `explorer`). Else as `save_svg`.

        Text is set in fonts of the machine, each sign in the first that has it; a sign that none has is drawn as its
        number (U+1F60A), and the file's metadata says which. `font=` names a font file to be tried first.

        Example:
            >>> import kizuki
            >>> from importlib.resources import files
            >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
            >>> recording.save_png("head.png", 13, 8, dpi=150).name
            'head.png'
        """
        return self._save(path, ".png", layer, head, batch, unit, options)

    def save_csv(
        self,
        path: str | os.PathLike[str],
        layer: Layer,
        head: int,
        *,
        batch: int = 0,
        unit: Literal["token", "word", "character"] = "token",
        **options: Unpack[FigureOptions],
    ) -> Path:
        """One head as CSV, a row a cell: query_first, query_last, query_text, key_first, key_last, key_text, weight.

        The last column is "mass" or "peak" where cells are pooled. UTF-8; the numbers give back the float32. Token
        text is written as it is: a spreadsheet may take one that begins with "=" for a formula. Else as `save_svg`.

        Example:
            >>> import kizuki
            >>> from importlib.resources import files
            >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
            >>> recording.save_csv("head.csv", 13, 8).name
            'head.csv'
        """
        return self._save(path, ".csv", layer, head, batch, unit, options)

    def save_json(
        self,
        path: str | os.PathLike[str],
        layer: Layer,
        head: int,
        *,
        batch: int = 0,
        unit: Literal["token", "word", "character"] = "token",
        **options: Unpack[FigureOptions],
    ) -> Path:
        """One head as JSON: where it came from, `rows` and `cols` with their tokens, and `values` row by row.

        Else as `save_svg`.

        Example:
            >>> import kizuki
            >>> from importlib.resources import files
            >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
            >>> recording.save_json("head.json", 13, 8).name
            'head.json'
        """
        return self._save(path, ".json", layer, head, batch, unit, options)

    def save_parquet(
        self,
        path: str | os.PathLike[str],
        layer: Layer,
        head: int,
        *,
        batch: int = 0,
        unit: Literal["token", "word", "character"] = "token",
        **options: Unpack[FigureOptions],
    ) -> Path:
        """The columns of `save_csv` as Parquet; needs pyarrow (the extra `survey`). Else as `save_svg`.

        Where it came from stands in the schema's metadata, under "kizuki.figure".

        Example:
            >>> import kizuki
            >>> from importlib.resources import files
            >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
            >>> recording.save_parquet("head.parquet", 13, 8).name
            'head.parquet'
        """
        return self._save(path, ".parquet", layer, head, batch, unit, options)

    def _save(
        self,
        path: str | os.PathLike[str],
        ending: str,
        layer: Layer,
        head: int,
        batch: int,
        unit: Literal["token", "word", "character"],
        options: FigureOptions,
    ) -> Path:
        from kizuki.explorer.figures import FigureError, check_target

        target = check_target(path)
        if Path(path).suffix.lower() != ending:
            raise FigureError(f"recording.save_{ending[1:]}: {path}: give a name that ends in {ending}")
        return self.figure(layer, head, batch=batch, unit=unit, **options).save(target)


def one_head(recording: Recording, layer: Layer, head: int, batch: int = 0) -> AttentionMatrix:
    """A of one head of one text, `[1, 1, queries, keys]`: a reading of it costs that head and no other.

    The same bits as `recording[layer]` has there. RecordError for a head that was not recorded.
    """
    from kizuki import attend

    from .rule import RecordError

    matrix, rule = recording._matrix(layer)
    count, slots = int(matrix.shape[0]), int(matrix.shape[1])
    heads = recording.heads or tuple(range(slots))
    if isinstance(head, bool) or head not in heads:
        raise RecordError(
            f"recording: head {head!r} was not recorded; recorded are {', '.join(map(str, heads))}"
        )
    if isinstance(batch, bool) or not isinstance(batch, int) or not 0 <= batch < count:
        raise RecordError(f"recording: batch is {batch!r} but the pass read {count} texts, 0 … {count - 1}")
    slot, capture = heads.index(head), recording._captures[layer]

    def of(tensor: Tensor, axis: int, at: int) -> Tensor:
        return tensor if tensor.shape[axis] == 1 else tensor.narrow(axis, at, 1)

    key = of(of(capture.key, 0, batch), 1, slot * capture.key.shape[1] // slots)[:, :, : rule.stop]
    bias = None if capture.bias is None else of(of(capture.bias, 0, batch), 1, slot)[..., : rule.stop]
    own = replace(
        rule,
        keys=None if rule.keys is None else of(rule.keys, 0, batch),
        documents=None if rule.documents is None else of(rule.documents, 0, batch),
    )
    query = of(of(capture.query, 0, batch), 1, slot)
    return attend(
        query,
        key,
        mask=own.mask(query.shape[2]),
        scale=capture.scale,
        softcap=capture.softcap,
        sinks=None if capture.sinks is None else of(capture.sinks, 0, slot),
        bias=bias,
    )
