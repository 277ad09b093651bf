"""JavaScript without its comments and the white space that it does not need; names and everything else stay.

A third of the front end's text is there for people who read its files, and not for the page.
"""

from __future__ import annotations

import re

SPACE = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)+", re.DOTALL)
STRING = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'")
TEMPLATE = re.compile(r"(?:[^`\\$]|\\.|\$(?!\{))*(?:`|\$\{)", re.DOTALL)  # up to its end or its next ${
REGEX = re.compile(r"/(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*")
WORD = re.compile(r"[\w$]+")
VALUE_ENDS = re.compile(r"[\w$)\]}\"'`]$")  # behind one of these a slash divides
BEFORE_REGEX = {"return", "typeof", "case", "of", "in"}


def squeeze(code: str) -> str:
    """The same program on as few characters as white space allows. Line ends stay where one may end a statement."""
    parts: list[str] = []
    holes: list[int] = []  # for each template that is open, how many braces are open in its ${ }
    at, gap = 0, ""
    while at < len(code):
        if space := SPACE.match(code, at):
            gap = "\n" if "\n" in space[0] else " "
            at = space.end()
            continue
        last = parts[-1] if parts else ""
        char = code[at]
        if char in "\"'":
            found = STRING.match(code, at)
        elif char == "`" or (char == "}" and holes and holes[-1] == 0):
            if char == "}":
                holes.pop()
            found = TEMPLATE.match(code, at + 1)
            if found and found[0].endswith("${"):
                holes.append(0)
        elif char == "/" and (last in BEFORE_REGEX or not VALUE_ENDS.search(last)):
            found = REGEX.match(code, at)
        else:
            found = WORD.match(code, at)
            if holes and char in "{}":
                holes[-1] += 1 if char == "{" else -1
        end = found.end() if found else at + 1
        token = code[at:end]
        if gap and last and _needed(last[-1], token[0], gap):
            parts.append(gap)
        parts.append(token)
        at, gap = end, ""
    return "".join(parts)


def _needed(before: str, after: str, gap: str) -> bool:
    """Whether white space between two characters keeps words, signs or statements apart."""
    if gap == "\n":
        return before not in ";{,([=?:&|>" and after not in "})],.?:&|;"
    return bool(WORD.match(before) and WORD.match(after)) or (before == after and after in "+-/")
