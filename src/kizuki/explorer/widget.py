"""The page in a notebook's cell: the same front end in a frame, its questions as messages to the kernel.

    recording.show()          # Jupyter, JupyterLab, VS Code, Colab, marimo: wherever anywidget runs

Answers are computed in the kernel when the page asks, one at a time and on the thread that hears messages: while a cell
runs, the page waits. Nothing is loaded from anywhere, and the frame has no network.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ..extras import absent
from . import bundle
from .answers import Answers, QuestionError
from .export import PageError, content_hash

if TYPE_CHECKING:
    import anywidget

HEIGHT = 900  # pixels of the cell


class Conversation:
    """A notebook's messages and what is answered: no notebook is needed for it.

    A message is `{"view": …, "id": …, "what": …, "parameters": {…}}`; the answer carries its view and id, and one block
    of bytes (`wire.pack`) or an error of one line.
    """

    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def reply(self, message: object) -> tuple[dict[str, Any], list[bytes]] | None:
        """What to send back; None for what is no question."""
        if not isinstance(message, Mapping):
            return None
        view, number, what = message.get("view"), message.get("id"), message.get("what")
        if not (isinstance(view, str) and isinstance(number, int) and isinstance(what, str)):
            return None
        parameters = message.get("parameters", {})
        back: dict[str, Any] = {"view": view, "id": number}
        try:
            if not isinstance(parameters, Mapping):
                raise QuestionError("parameters: must be names and values")
            asked = {str(name): str(value) for name, value in parameters.items()}
            return back, [self.answers.ask(what, asked)]
        except QuestionError as error:
            return back | {"error": str(error)}, []
        except (ValueError, RuntimeError, MemoryError) as error:  # of the computation; the page shows it
            return back | {"error": f"{what}: {' '.join(str(error).split())}"}, []


def document() -> str:
    """The page as a frame's whole document, without data. Its policy lets its own script and style in only."""
    script, style = bundle.script("main.js", "live"), bundle.style("page.css")
    policy = (
        f"default-src 'none'; script-src '{content_hash(script)}'; style-src '{content_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>kizuki</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n{bundle.read('page.html')}"
        f'<script type="text/plain" id="kz-notebook"></script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


@cache
def _kind() -> type[anywidget.AnyWidget]:
    """The widget's class, made when the first one is wanted: anywidget is loaded then and not before."""
    try:
        import anywidget
        import traitlets
    except (ImportError, OSError) as error:
        raise PageError(absent(error, "a notebook's widget needs anywidget", "explorer")) from None

    class Explorer(anywidget.AnyWidget):
        """The explorer in a cell. `height` is in pixels and may be changed; `close()` ends it."""

        _esm = bundle.read("widget.js")
        page = traitlets.Unicode().tag(sync=True)
        height = traitlets.Int(HEIGHT).tag(sync=True)

        def __init__(self, answers: Answers, **options: Any) -> None:
            super().__init__(page=document(), **options)
            self.conversation = Conversation(answers)
            self.on_msg(self._hear)
            answers.reader.begin()

        def _hear(self, _: Any, message: object, __: object) -> None:
            if (reply := self.conversation.reply(message)) is not None:
                self.send(*reply)

        def close(self) -> None:
            self.conversation.answers.reader.close()
            super().close()

    return Explorer


def widget(answers: Answers, *, height: int = HEIGHT) -> anywidget.AnyWidget:
    """The explorer as a widget: the last line of a cell shows it.

    Args:
        answers: what it asks.
        height: of the cell, in pixels.

    Raises:
        PageError: `height` is no whole number from 200 up, or anywidget is not installed.
    """
    if isinstance(height, bool) or not isinstance(height, int) or height < 200:
        raise PageError(f"height is {height!r} but must be a whole number of pixels, 200 or more")
    return _kind()(answers, height=height)
