"""JavaScript without comments and needless white space, its own variables under short names.

Half of the front end's text is there for people who read its files, and not for the page. Properties, strings and
whatever is not declared in the program itself keep their names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise, product

SPACE = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)+", re.DOTALL)
STRING = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'")
TEMPLATE = re.compile(r"[`}](?:[^`\\$]|\\.|\$(?!\{))*(?:`|\$\{)", re.DOTALL)  # up to its end or its next ${
REGEX = re.compile(r"/(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*")
WORD = re.compile(r"[\w$]+")
NAME = re.compile(r"[A-Za-z_$][\w$]*")
VALUE_ENDS = re.compile(r"[\w$)\]}\"'`]$")  # behind one of these a slash divides
BEFORE_REGEX = {"return", "typeof", "case", "of", "in"}
BEFORE_BLOCK = {")", "=>", "else", "try", "finally", "do", "{", "}", ";", ""}
HEADS = {"if", "for", "while", "switch"}
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
RESERVED = {"as", "do", "if", "in", "is", "of", "at", "by", "to"}


@dataclass
class Token:
    text: str
    gap: str  # white space before it: nothing, " " or a line's end
    inside: str = ""  # the bracket it stands in: "(", "block" or "object"
    close: int = -1  # of a bracket that opens: the number of the token that closes it


def squeeze(code: str) -> str:
    """The same program on fewer characters. Line ends stay where one may end a statement."""
    tokens = list(_tokens(code))
    _mark(tokens)
    _shorten(tokens)
    tokens = list(_lighter(tokens))
    parts: list[str] = []
    for token in tokens:
        if token.gap and parts and _needed(parts[-1][-1], token.text[0], token.gap):
            parts.append(token.gap)
        parts.append(token.text)
    return "".join(parts)


def _tokens(code: str) -> Iterator[Token]:
    holes: list[int] = []  # for each template that is open, how many braces are open in its ${ }
    at, gap, last = 0, "", ""
    while at < len(code):
        if space := SPACE.match(code, at):
            gap = "\n" if "\n" in space[0] else " "
            at = space.end()
            continue
        char = code[at]
        if char in "\"'":
            found = STRING.match(code, at)
        elif char == "`" or (char == "}" and holes and holes[-1] == 0):
            if char == "}":
                holes.pop()
            found = TEMPLATE.match(code, at)
            if found and found[0].endswith("${"):
                holes.append(0)
        elif char == "/" and (last in BEFORE_REGEX or not VALUE_ENDS.search(last)):
            found = REGEX.match(code, at)
        else:
            found = WORD.match(code, at)
            if holes and char in "{}":
                holes[-1] += 1 if char == "{" else -1
        last = code[at : found.end() if found else at + 1]
        if last == "=" and code.startswith("=>", at):
            last = "=>"
        yield Token(last, gap)
        at, gap = at + len(last), ""


def _mark(tokens: list[Token]) -> None:
    """Say of each token in which bracket it stands, and of each bracket where it closes."""
    open_: list[tuple[str, int]] = [("block", -1)]
    before, behind = "", ""
    for at, token in enumerate(tokens):
        text = token.text
        if text[0] in ")]}":
            tokens[open_.pop()[1]].close = at
        token.inside = open_[-1][0]
        if text in {"(", "["} or text.endswith("${"):
            open_.append(("(", at))
        elif text == "{":
            named = behind in {"class", "extends"} or (token.inside == "block" and token.gap == "\n")
            open_.append(("block" if named or before in BEFORE_BLOCK else "object", at))
        before, behind = text, before


def _shorten(tokens: list[Token]) -> None:
    """Give the program's own variables short names, the most frequent the shortest."""
    texts = ["", "", *(token.text for token in tokens), ""]
    words = Counter(text for text in texts if NAME.fullmatch(text))
    declared = {
        text
        for before, text in pairwise(texts)
        if before in {"const", "let", "function", "class"} and NAME.fullmatch(text) and len(text) > 2
    }
    declared |= {name for name in _parameters(tokens) if len(name) > 2}
    uses: dict[str, list[tuple[Token, bool]]] = {name: [] for name in declared}
    for at, token in enumerate(tokens):
        earlier, before, name, after = texts[at : at + 2] + texts[at + 2 : at + 4]
        if name not in uses or (before == "." and earlier != "."):
            continue
        starts = before in {"{", ","} and token.inside == "object"
        if starts and after == ":":
            continue  # a key
        if after == "(" and before != "function" and texts[tokens[at + 1].close + 3] == "{":
            continue  # a method
        uses[name].append((token, starts and after in {",", "}", "="}))
    free = (
        "".join(letters)
        for letters in chain(product(LETTERS, repeat=1), product(LETTERS, repeat=2))
        if "".join(letters) not in words and "".join(letters) not in RESERVED
    )
    for name in sorted(uses, key=lambda name: (-words[name] * len(name), name)):
        short = next(free)
        for token, shorthand in uses[name]:
            token.text = f"{name}:{short}" if shorthand else short


def _lighter(tokens: list[Token]) -> Iterator[Token]:
    """`let` for `const`, which says something to people only, and one for all that follow each other; no brackets
    around an arrow's one parameter; no semicolon before a brace closes, but where it is all that a loop or an `if`
    does."""
    texts = [token.text for token in tokens]
    bare = {
        at
        for at, token in enumerate(tokens)
        if token.text == "("
        and token.close == at + 2
        and texts[at + 3 : at + 4] == ["=>"]
        and NAME.fullmatch(texts[at + 1])
    }
    heads = {token.close for at, token in enumerate(tokens) if token.text == "(" and texts[at - 1] in HEADS}
    joined = set(_declared_on(tokens, texts))
    for at, token in enumerate(tokens):
        if at in bare or at - 2 in bare or at in joined:
            continue
        if at + 1 in joined:
            yield Token(",", "")
            continue
        if token.text == ";" and texts[at + 1 : at + 2] == ["}"] and at - 1 not in heads:
            continue
        text = "let" if token.text == "const" and texts[at - 1 : at] != ["."] else token.text
        yield Token(text, tokens[at - 1].gap or " " if at - 1 in bare else token.gap)


def _declared_on(tokens: list[Token], texts: list[str]) -> Iterator[int]:
    """Each `let` or `const` right behind the semicolon of another one: it may go on with a comma."""
    for at, token in enumerate(tokens):
        if token.text not in {"let", "const"} or token.inside != "block" or texts[at - 1 : at] == ["."]:
            continue
        place = at + 1
        while place < len(tokens) and texts[place] != ";":
            place = max(place, tokens[place].close) + 1  # over what stands in brackets
            new_line = place < len(tokens) and tokens[place].gap == "\n"
            if new_line and _needed(texts[place - 1][-1], texts[place][0], "\n"):
                break  # the line's end may have ended the statement
        else:
            if texts[place + 1 : place + 2] in (["let"], ["const"]):
                yield place + 1


def _parameters(tokens: list[Token]) -> Iterator[str]:
    """Names of functions' parameters; those that take an argument apart are left out."""
    for at, token in enumerate(tokens):
        if (
            token.text != "("
            or token.close + 1 >= len(tokens)
            or tokens[token.close + 1].text not in {"=>", "{"}
        ):
            continue
        if at > 0 and tokens[at - 1].text in HEADS:
            continue
        place = at + 1
        while place < token.close:
            if tokens[place - 1].text in {"(", ","} and NAME.fullmatch(tokens[place].text):
                yield tokens[place].text
            place = max(place, tokens[place].close) + 1  # over what stands in brackets


def _needed(before: str, after: str, gap: str) -> bool:
    """Whether white space between two characters keeps words, signs or statements apart."""
    if gap == "\n":
        return before not in ";{,([=?:&|>" and after not in "})],.?:&|;"
    return bool(WORD.match(before) and WORD.match(after)) or (before == after and after in "+-/")
