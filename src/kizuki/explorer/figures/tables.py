"""A figure's numbers: CSV, JSON and Parquet, one row a cell."""

from __future__ import annotations

import csv
import json
from typing import Any

import numpy as np

from ...extras import absent
from .cells import Axis, Cells, FigureError


def columns(cells: Cells) -> dict[str, list[Any]]:
    """One entry a cell, row by row: its first and last query and key, their names, and the number.

    `query_last` is the last token of the cell itself, not the end behind it. The number's column is called "weight",
    or "mass" or "peak" where cells hold several tokens.
    """
    rows, cols = len(cells.rows), len(cells.cols)

    def side(axis: Axis, name: str, spread: Any) -> dict[str, list[Any]]:
        spans = [axis.span(cell) for cell in range(len(axis))]
        return {
            f"{name}_first": spread([first for first, _ in spans]),
            f"{name}_last": spread([end - 1 for _, end in spans]),
            f"{name}_text": spread([axis.label(cell) for cell in range(len(axis))]),
        }

    return {
        **side(cells.rows, "query", lambda each: [value for value in each for _ in range(cols)]),
        **side(cells.cols, "key", lambda each: list(each) * rows),
        cells.pool or "weight": cells.values.ravel().tolist(),
    }


def written_csv(cells: Cells) -> str:
    """UTF-8 with a header line; numbers with the digits that give back the float32 (NaN as nan)."""
    held = columns(cells)
    # Nothing is escaped but by doubling a quote. Python 3.10 takes "no sign escapes" for "U+0000 does" and refuses it.
    texts = {text for name in held if name.endswith("_text") for text in held[name]}
    unused = next(
        sign for sign in map(chr, range(0x10FFFF, 0, -1)) if not any(sign in text for text in texts)
    )
    lines = _Lines()
    writer = csv.writer(lines, escapechar=unused)
    writer.writerow(held)
    number = held.pop(cells.pool or "weight")
    for *places, value in zip(*held.values(), number, strict=True):
        writer.writerow([*places, _shortest(value)])
    return "".join(lines)


class _Lines(list[str]):
    """Takes what a csv.writer writes, a row a time, and ends rows by a line feed alone.

    Told to end them so itself, the writer would leave a carriage return in a label without its quotes.
    """

    def write(self, row: str) -> None:
        self.append(row.removesuffix("\r\n") + "\n")


def written_json(cells: Cells, about: dict[str, Any]) -> str:
    """One object: where it came from, both axes, and the numbers row by row (NaN as null, said in "not_a_number")."""
    values = [[None if np.isnan(value) else float(_shortest(value)) for value in row] for row in cells.values]
    axes = {
        name: [
            {"first": axis.span(cell)[0], "last": axis.span(cell)[1] - 1, "text": axis.label(cell)}
            for cell in range(len(axis))
        ]
        for name, axis in (("rows", cells.rows), ("cols", cells.cols))
    }
    whole = {**about, "not_a_number": int(np.isnan(cells.values).sum()), **axes, "values": values}
    return json.dumps(whole, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def written_parquet(cells: Cells, about: dict[str, Any]) -> bytes:
    """The columns of the CSV; where it came from stands in the schema's metadata under "kizuki.figure"."""
    try:
        import pyarrow
        import pyarrow.parquet
    except (ImportError, OSError) as error:
        why = absent(error, "Parquet needs the package pyarrow", "survey", ", or save a .csv")
        raise FigureError(f"figure: {why}") from None
    held = columns(cells)
    kinds = {name: pyarrow.string() if name.endswith("_text") else pyarrow.int64() for name in held}
    kinds[cells.pool or "weight"] = pyarrow.float32()
    note = json.dumps(about, ensure_ascii=False, allow_nan=False).encode()
    schema = pyarrow.schema(list(kinds.items()), metadata={b"kizuki.figure": note})
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(held, schema=schema), sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _shortest(value: float) -> str:
    """The shortest decimal that is this float32."""
    return str(np.float32(value))
