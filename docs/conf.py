"""The site of docs/: pages in Markdown, the reference from the docstrings. `make docs` builds it into docs/_site.

Docstrings are plain text in which `backticks` mean code, so they are made reStructuredText here and not where they are
written: the first hook below escapes what would be markup, and leaves examples and indented blocks as they stand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # this checkout, whatever else is installed

import kizuki

project = "kizuki"
author = "The kizuki authors"
project_copyright = author
version = release = kizuki.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_site"]
source_suffix = {".md": "markdown"}
default_role = "code"
highlight_language = "python"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 90
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

myst_heading_anchors = 2

html_theme = "furo"
html_title = f"kizuki {release}"
html_static_path: list[str] = []
html_copy_source = False
html_show_sourcelink = False

CODE = re.compile(r"(``.+?``|`[^`]+`)")
MARKUP = re.compile(r"([\\*|])|(?<=\w)(_)(?=\W|$)")


def plain(line: str) -> str:
    """A line of prose with everything escaped that reStructuredText would take for markup, code apart."""
    parts = CODE.split(line)
    return "".join(
        part if at % 2 else MARKUP.sub(lambda m: "\\" + m.group(), part) for at, part in enumerate(parts)
    )


def as_restructured_text(
    app: Any, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Escape the prose of a docstring; blocks indented behind a blank line become literal in modules."""
    made: list[str] = []
    example = False
    for line in lines:
        if line.lstrip().startswith(">>> "):
            if not example and made and made[-1].strip():
                made.append("")
            example = True
        elif not line.strip():
            example = False
        made.append(line if example else plain(line))
    lines[:] = made


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_restructured_text, priority=1)  # before napoleon's own
