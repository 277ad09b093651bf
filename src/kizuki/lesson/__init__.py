"""The lesson: self-attention in eight steps, on your own sentence and a real model's own q, k and v.

    kizuki explain                                     the example that comes with the package, at once
    kizuki explain "Mika gave him the key." --word him SmolLM2 on your sentence
    kizuki explain --open "z[7,3]"                     one number, down to its multiplications
    kizuki explain --html lesson.html                  a page with switches that needs nothing else

From Python: `shipped()` and `gather(source, text)` give a `Material`; `Book(material).open("weight[7,1]")` opens a
number; `write_page(path, material)` writes the page. One file a step of the work:

    material.py  what a lesson holds         formula.py  its arithmetic       opened.py    any number, opened
    capture.py   a model's own numbers       example.py  what is shipped      make.py      how that was made
    spread.py    what 1/√d does              plane.py    q and the keys       exact.py     the articles' numbers
    terminal.py  the steps in a terminal     page.py     the steps as a page  words/       both languages
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capture import from_recording, gather
    from .example import shipped
    from .material import LessonError, Material, Projection
    from .opened import Book, Opened, Term
    from .page import write_page

# A name's module loads when it is used: the shipped example needs neither torch nor transformers.
_HOME = {
    "Book": "opened",
    "LessonError": "material",
    "Material": "material",
    "Opened": "opened",
    "Projection": "material",
    "Term": "opened",
    "from_recording": "capture",
    "gather": "capture",
    "shipped": "example",
    "write_page": "page",
}

__all__ = [
    "Book",
    "LessonError",
    "Material",
    "Opened",
    "Projection",
    "Term",
    "from_recording",
    "gather",
    "shipped",
    "write_page",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return globals().setdefault(name, getattr(import_module(f".{_HOME[name]}", __name__), name))
    raise AttributeError(f"module 'kizuki.lesson' has no attribute {name!r}")
