"""The lesson as one HTML page that needs nothing else: its numbers, its words in both languages, its script."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from dataclasses import asdict, fields
from functools import cache
from html import escape
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from . import exact, spread
from .language import LANGUAGES, table
from .material import Floats, LessonError, Material, Projection
from .plane import plane
from .tell import Teller

# Each module after those it imports; joined into one script, they share one scope.
MODULES = ("formula.js", "lesson.js", "opened.js", "dom.js", "pictures.js", "panel.js", "steps.js", "main.js")
IMPORT = re.compile(r'^import \{[^}]*\} from "\./[\w.]+";\n', re.MULTILINE)


def write_page(path: str | os.PathLike[str], lesson: Material, *, language: str = "en") -> Path:
    """Write the lesson as one self-contained HTML file, in English and Japanese with a switch between them.

    Args:
        path: the file; one that is there is replaced, at once and only when complete.
        lesson: what `shipped` or `gather` gives.
        language: "en" or "ja", which the page opens in.

    Returns:
        The path.

    Raises:
        LessonError: an unknown language, or a file that cannot be written.

    Time and memory: the page holds q, k, v of the layer and the matrices of one head: about 1 MB for SmolLM2.

    Example:
        >>> from kizuki.lesson import shipped, write_page
        >>> write_page("lesson.html", shipped(), language="ja").name
        'lesson.html'
    """
    target = check_target(path)
    files.write(target, html(lesson, language).encode(), LessonError)
    return target


def check_target(path: str | os.PathLike[str]) -> Path:
    """The file the page goes to; LessonError, before any work is done, where it cannot."""
    return files.check_target(path, LessonError)


def html(lesson: Material, language: str) -> str:
    """The page's text."""
    words = table(language)
    style, code = read("page.css"), script()
    data = json.dumps(packed(lesson, language), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # no text of anybody's can end the block it stands in
    policy = (
        f"default-src 'none'; style-src {hashed(style)}; script-src {hashed(code)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!doctype html>\n<html lang="{language}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(words['title'])} — kizuki</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<noscript>{escape(words['noscript'])}</noscript>\n"
        f'<script type="application/json" id="lesson">{data}</script>\n<script>{code}</script>\n</body>\n</html>\n'
    )


def packed(lesson: Material, language: str) -> dict[str, Any]:
    """What the page is given: float32 as base64 with its shape, the rest as JSON."""
    around = lesson.projection
    quoted = lesson.text.replace("\\", "\\\\").replace('"', '\\"')
    command = f'kizuki explain "{quoted}" --model {lesson.model} --layer {lesson.layer} --head HEAD --html lesson.html'
    return {
        "language": language,
        "words": {each: table(each) for each in LANGUAGES},
        "facts": {
            "text": lesson.text,
            "labels": lesson.labels,
            "ids": lesson.ids,
            "model": lesson.model,
            "layer": lesson.layer,
            "head": lesson.head,
            "heads": lesson.heads,
            "kv_heads": lesson.kv_heads,
            "word": lesson.word,
            "d": lesson.head_dim,
            "scale": lesson.scale,
            "masked": lesson.masked,
            "why": lesson.why,
        },
        "query": block(lesson.query),
        "key": block(lesson.key),
        "value": block(lesson.value),
        "seen": ["".join("1" if seen else "0" for seen in row) for row in lesson.seen],
        "projection": None
        if around is None
        else {f.name: optional(getattr(around, f.name)) for f in fields(Projection)},
        "planes": planes(lesson),
        "drawn": [asdict(line) for line in spread.drawn()],
        "examples": [asdict(example) for example in exact.examples()],
        "provenance": {each: Teller(lesson, each).provenance() for each in LANGUAGES},
        "command": command,
    }


def planes(lesson: Material) -> dict[str, Any]:
    """The plane of every query in every head."""
    every = [[plane(q, lesson.k(h)) for q in lesson.q(h)] for h in range(lesson.heads)]
    return {
        "query": block(np.array([[p.query for p in head] for head in every], np.float32)),
        "residual": block(np.array([[p.residual for p in head] for head in every], np.float32)),
        "along": block(np.array([[p.along for p in head] for head in every], np.float32)),
        "beside": block(np.array([[p.beside for p in head] for head in every], np.float32)),
    }


def block(numbers: Floats) -> dict[str, Any]:
    """A float32 array for the page."""
    data = np.ascontiguousarray(numbers, dtype="<f4").tobytes()
    return {"shape": list(numbers.shape), "data": base64.b64encode(data).decode()}


def optional(numbers: Floats | None) -> dict[str, Any] | None:
    return None if numbers is None else block(numbers)


@cache
def read(name: str) -> str:
    """A file of static/."""
    return resources(__package__).joinpath("static", name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """The modules as one classic script: without their imports and exports, for they share one scope."""
    joined = "\n".join(
        re.sub(r"^export ", "", IMPORT.sub("", read(name)), flags=re.MULTILINE) for name in MODULES
    )
    return f'"use strict";\n(() => {{\n{joined}\n}})();\n'


def hashed(text: str) -> str:
    """The source expression of an inline block for the Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
