"""The front end as text: the ES modules of static/ joined into one script each for the page and its worker.

No build step and no tool: modules import from each other with `import { a, b } from "./x.js"`, on one or
more lines, and export declarations. They share one scope; a module that names something of its own as another does
gets a function scope that returns its exports. Comments and the white space that only people need stay behind, and the
words of both languages travel deflated, as the numbers travel in base64.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections import Counter
from functools import cache
from importlib.resources import files

from .squeeze import squeeze

IMPORT = re.compile(r"^import \{([^}]*)\} from \"\./([\w.]+)\";\n", re.MULTILINE)
NAMES = re.compile(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)

LITERAL = re.compile(r"^export const (\w+) = (\{\n.*?^\});\n", re.MULTILINE | re.DOTALL)
JSON_PARTS = re.compile(  # strings; keys; what JSON has not
    r"(\"(?:[^\"\\\n]|\\.)*\")|(\w+)(?=:)|//[^\n]*|,(?=\s*\})|\s+"
)
# What a carrier has no use for: a file has nobody to ask, and where Python computes, the page need not.
LEFT_OUT = {
    "": (),
    "file": ("remote.js", "transport.js", "cause.js"),
    "live": ("data.js", "head.js", "axes.js", "engine.js", "runner.js", "worker.js"),
}
PACKED = ("words.js",)  # modules whose one table is text for people

# What fails before the page can say so itself: in a box of page.html, and to whoever waits for an error of a worker.
RUN = """"use strict";
(async () => {
%s
})().catch((error) => {
  const box = globalThis.document?.getElementById("failure");
  if (box) {
    box.hidden = false;
    box.textContent = error.message;
  }
  setTimeout(() => { throw error; });
});"""
STYLE_SPACE = re.compile(r"\s*(?:/\*.*?\*/\s*)+|\s*([{};,])\s*|(?<=:)\s+|\n\s*", re.DOTALL)


def read(name: str) -> str:
    """A file of static/."""
    return files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def style(name: str) -> str:
    """A style sheet of static/ without its comments, and without the white space around its signs."""
    return STYLE_SPACE.sub(lambda m: m[1] or "", read(name))


@cache
def script(entry: str, carrier: str = "") -> str:
    """`entry` and everything it imports, as one classic script: for a carrier ("file" or "live") what it uses."""
    return squeeze(RUN % joined(entry, carrier=carrier)) + "\n"


def joined(*entries: str, carrier: str = "") -> str:
    """The modules `entries` and everything they import, in one scope; to be run where `await` may stand. What the
    carrier's left-out modules export is null there."""
    order: list[str] = []
    for entry in entries:
        _visit(entry, order, (), LEFT_OUT[carrier])
    unused = [name for module in LEFT_OUT[carrier] for name in EXPORT.findall(_source(module))]
    names = Counter(name for module in order for name in set(NAMES.findall(_source(module))))
    text = "".join(f"const {name} = null;\n" for name in unused)
    text += "\n".join(_scope(module, names) for module in order)
    # under a name of ours, which becomes a short one: the arithmetic says Math some hundreds of times
    return "const maths = Math;\n" + re.sub(r"\bMath\.", "maths.", text)


def packed(literal: str) -> str:
    """An object literal of strings, as base64 of the deflated JSON text: what `inflated` of decode.js reads."""
    text = JSON_PARTS.sub(lambda m: m[1] or (f'"{m[2]}"' if m[2] else ""), literal)
    return base64.b64encode(zlib.compress(text.encode("utf-8"), 9)).decode("ascii")


@cache
def _source(name: str) -> str:
    """A module as it is joined: its own text, or with its table packed. The worker beside the page has no words."""
    text = read(name)
    if name not in PACKED:
        return text
    return 'import { inflated } from "./decode.js";\n' + LITERAL.sub(
        lambda m: (
            f'export const {m[1]} = typeof document === "undefined" ? {{}} : await inflated("{packed(m[2])}");\n'
        ),
        text,
        count=1,
    )


def _visit(name: str, order: list[str], above: tuple[str, ...], without: tuple[str, ...]) -> None:
    if name in above:
        raise ImportError(f"static/{name}: imports itself through {' -> '.join(above)}")
    if name in order or name in without:
        return
    for match in IMPORT.finditer(_source(name)):
        _visit(match[2], order, (*above, name), without)
    order.append(name)


def _scope(name: str, names: Counter[str]) -> str:
    source = _source(name)
    exports = EXPORT.findall(source)
    for export in exports:
        if names[export] > 1:
            raise ImportError(
                f"static/{name}: exports {export}, and another module has something of that name"
            )
    body = EXPORT.sub("", IMPORT.sub("", source))
    if all(names[own] == 1 for own in NAMES.findall(source)):
        return body
    out = ", ".join(exports)
    return f"const {{ {out} }} = (() => {{\n{body}\nreturn {{ {out} }};\n}})();"
