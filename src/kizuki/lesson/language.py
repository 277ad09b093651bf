"""The lesson's words: one file a language, the same keys in each, `{name}` where something is put in."""

from __future__ import annotations

import json
import os
from functools import cache
from importlib.resources import files

from .material import LessonError

LANGUAGES = ("en", "ja")


@cache
def table(language: str) -> dict[str, str]:
    """All words of a language; LessonError for one that there is not."""
    if language not in LANGUAGES:
        raise LessonError(f"lang is {language!r} but must be one of {', '.join(LANGUAGES)}")
    text = files(__package__).joinpath("words", f"{language}.json").read_text(encoding="utf-8")
    words: dict[str, str] = json.loads(text)
    return words


def preferred() -> str:
    """The language of the locale (LC_ALL, LC_MESSAGES, LANG, in that order): ja, or else en."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if value := os.environ.get(name):
            return "ja" if value.lower().startswith("ja") else "en"
    return "en"


def put(template: str, **values: object) -> str:
    """A sentence with its places filled. A value may hold braces itself; it is text and never a template."""
    parts = template.split("{")
    made = [parts[0]]
    for part in parts[1:]:
        name, _, rest = part.partition("}")
        made.append(str(values[name]) + rest)
    return "".join(made)
