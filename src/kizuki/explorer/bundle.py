"""The front end as text: the ES modules of static/ joined into one script each for the page and its worker.

No build step and no tool: modules import from each other with `import { a, b } from "./x.js"`, on one or
more lines, and export declarations. They share one scope; a module that names something of its own as another does
gets a function scope that returns its exports. Comments and the white space that only people need stay behind.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from importlib.resources import files

from .squeeze import squeeze

IMPORT = re.compile(r"^import \{([^}]*)\} from \"\./([\w.]+)\";\n", re.MULTILINE)
NAMES = re.compile(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


STYLE_SPACE = re.compile(r"\s*(?:/\*.*?\*/\s*)+|\s*([{};,])\s*|(?<=:)\s+|\n\s*", re.DOTALL)


def read(name: str) -> str:
    """A file of static/."""
    return files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def style(name: str) -> str:
    """A style sheet of static/ without its comments, and without the white space around its signs."""
    return STYLE_SPACE.sub(lambda m: m[1] or "", read(name))


@cache
def script(entry: str) -> str:
    """`entry` and everything it imports, as one classic script."""
    order: list[str] = []
    _visit(entry, order, ())
    names = Counter(name for module in order for name in set(NAMES.findall(read(module))))
    joined = "\n".join(_scope(module, names) for module in order)
    # under a name of ours, which becomes a short one: the arithmetic says Math some hundreds of times
    joined = "const maths = Math;\n" + re.sub(r"\bMath\.", "maths.", joined)
    return squeeze(f'"use strict";\n(() => {{\n{joined}\n}})();') + "\n"


def _visit(name: str, order: list[str], above: tuple[str, ...]) -> None:
    if name in above:
        raise ImportError(f"static/{name}: imports itself through {' -> '.join(above)}")
    if name in order:
        return
    for match in IMPORT.finditer(read(name)):
        _visit(match[2], order, (*above, name))
    order.append(name)


def _scope(name: str, names: Counter[str]) -> str:
    source = read(name)
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
