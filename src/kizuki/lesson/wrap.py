"""Lines of Japanese for a terminal: it breaks between any two characters, but for a few (kinsoku)."""

from __future__ import annotations

import re

from rich.cells import cell_len

NOT_FIRST = "、。，．・：；？！）」』】〉》〕ーぁぃぅぇぉっゃゅょァィゥェォッャュョ々％"  # never begin a line
NOT_LAST = "（「『【〈《〔"  # never end one
# A run of anything but Japanese stays whole, as a word does; each Japanese character is one of its own.
UNIT = re.compile(r"[^\u2e80-\u9fff\uff00-\uffef\s]+|\s+|[\u2e80-\u9fff\uff00-\uffef]")


def wrap(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` columns; a run that is wider than a line stands alone and runs over."""
    units: list[str] = []
    for unit in UNIT.findall(text):
        if units and (unit in NOT_FIRST or units[-1][-1] in NOT_LAST):
            units[-1] += unit
        else:
            units.append(unit)
    lines, line = [], ""
    for unit in units:
        if line and cell_len(line + unit.rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        if line or unit.strip():
            line += unit
    return [*lines, line.rstrip()] if line else lines
