"""A recording on the screen: in a notebook's cell, and as one HTML file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .rule import RecordError

if TYPE_CHECKING:
    from .onepass import Run
    from .recording import Recording
    from .sources import Source


class Shows:
    """What a `Recording` can do to be looked at."""

    def show(self, *, height: int = 900, source: Source | None = None, other: Recording | None = None) -> Any:
        """The explorer in a notebook's cell: Jupyter, JupyterLab, VS Code, Colab, marimo.

        Layers are read as they are looked at, in the kernel; nothing of it is stored in the notebook but the page.

        Args:
            height: of the cell, in pixels, from 200 up.
            source: the model that was recorded, as `kizuki.models.load` gave it: with it the cell also measures
                interventions. None: the cell says that it has no model.
            other: a recording of another text, to compare its heads with the same heads here.

        Returns:
            An anywidget widget; as the last line of a cell it is shown.

        Raises:
            RecordError: the recording holds no `tokens`, or `source` is another model than the recorded one.
            PageError: it is not one text with layers that are alike, it has no layer or head in common with `other`,
                or anywidget is not installed (`pip install 'kizuki[explorer]'`).

        Time and memory: three rows of each layer are checked; what is computed later is kept within 512 MB.

        Example:
            >>> import kizuki
            >>> from importlib.resources import files
            >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
            >>> type(recording.show(height=700)).__name__
            'Explorer'
        """
        from ..explorer.answers import Answers
        from ..explorer.widget import widget

        beside = None if other is None else Answers(_run(other, "show"))
        return widget(Answers(_run(self, "show", source), other=beside), height=height)

    def save_html(
        self,
        path: str | os.PathLike[str],
        *,
        limit_mb: float = 50.0,
        first: Sequence[int] = (),
        other: Recording | None = None,
    ) -> Path:
        """Write the explorer with this recording in it as one HTML file that needs no network and no server.

        Args:
            path: the file; one that is there is replaced when the new one is complete.
            limit_mb: its largest size, in MB of 10⁶ bytes. Of layers whose q and k do not fit it holds readings only.
            first: layers to hold in full before others.
            other: a recording of another text, to compare its heads with the same heads here; each gets half the limit.

        Returns:
            The path. A warning names the layers that are not there in full; the page says so too.

        Raises:
            RecordError: the recording holds no `tokens`.
            PageError, BudgetError: it is not one text, the file cannot be written, nothing fits the limit, or it has
                no layer or head in common with `other`. One line.

        Time and memory: five passes over Q Kᵀ of every layer; at most the file's size.

        Example:
            >>> import kizuki
            >>> from importlib.resources import files
            >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
            >>> recording.save_html("dog.html").name
            'dog.html'
        """
        from ..explorer.export import write
        from ..explorer.page import spans

        beside = None if other is None else _run(other, "save_html")
        made = write(path, _run(self, "save_html"), limit_mb=limit_mb, first=first, other=beside)
        for layers, whose in ((made.partial, ""), (made.partial_other, " of other")):
            if layers:
                warnings.warn(
                    f"recording.save_html: {made.path} holds readings, but not q and k, of layers "
                    f"{spans(layers)}{whose} (limit_mb is {limit_mb:g}, or the page cannot recompute them); "
                    "it says so itself",
                    stacklevel=2,
                )
        return made.path


def _run(recording: Shows, name: str, source: Source | None = None) -> Run:
    """The recording as a run, of a model that is not here unless it is given."""
    from .onepass import Run
    from .recording import Recording
    from .sources import Source

    if not isinstance(recording, Recording):  # `self` is one, what is given as `other` need not be
        raise RecordError(
            f"recording.{name}: other is a {type(recording).__name__} but must be a Recording; "
            "kizuki.open(path) gives one"
        )
    if source is not None and not isinstance(source, Source):
        raise RecordError(
            f"recording.{name}: source is a {type(source).__name__} but must be a Source; "
            "kizuki.models.load(name) gives one"
        )
    if recording.tokens is None:
        raise RecordError(
            f"recording.{name}: it holds no tokens to show; set recording.tokens = source.tokenize(text) first"
        )
    if source is not None and source.name != recording.model_name:
        raise RecordError(
            f"recording.{name}: source is {source.name} but {recording.model_name} was recorded; give that model"
        )
    return Run(recording.tokens, recording, None, source, {})
