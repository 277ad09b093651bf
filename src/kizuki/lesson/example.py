"""The example that comes with the package, so that a lesson opens at once: a recording and the matrices around it.

    example/recording.safetensors   q, k, v of one layer, all heads, by `Recording.save`; `kizuki.open` opens it
    example/around.safetensors      one head's slices of W_Q, W_K, W_V, W_O, the rows of X, the residual

`python -m kizuki.lesson.make` makes both from SmolLM2 and says how many bytes they are. Here they are read with
numpy alone: the first lesson of a reader waits neither for torch nor for a kernel to be compiled.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np

from .material import Floats, LessonError, Material, Projection, build

SENTENCE = "The dog is tired because it was playing in the green garden."
LAYER, HEAD, WORD = 13, 8, "playing"
RECORDING, AROUND = "recording.safetensors", "around.safetensors"


def shipped(*, head: int | None = None, word: str | int | None = None) -> Material:
    """The lesson's own example: SmolLM2, layer 13, head 8, "The dog is tired because it was playing …".

    Args:
        head: another head of that layer; its W slices are not in the example, its q, k, v are.
        word: the token to follow, its text or its number; None: "playing".

    Returns:
        A `Material`; needs no model and no network. About 0.7 MB are read.

    Raises:
        LessonError: a head or word that is not there.

    Example:
        >>> from kizuki.lesson import shipped
        >>> lesson = shipped()
        >>> lesson.labels[lesson.word], round(float(lesson.weights()[lesson.word, 1]), 3)
        (' playing', 0.766)
    """
    with as_file(files(__package__).joinpath("example")) as folder:
        notes, kept = read(folder / RECORDING)
        told, around = read(folder / AROUND)
    about = json.loads(told["lesson"])
    table = json.loads(notes["recording"])
    layer, tokens = table["layers"][0], table["tokens"]
    length = len(tokens["ids"])
    made = build(
        text=tokens["text"],
        labels=tokens["labels"],
        ids=tokens["ids"],
        model=table["model"],
        layer=layer["layer"],
        layers=int(about["layers"]),
        query=kept[layer["query"]][0],
        key=kept[layer["key"]][0],
        value=kept[layer["value"]][0],
        scale=layer["scale"],
        own=np.tril(np.ones((length, length), dtype=bool)),  # its rule is "causal", as a test sees to
        head=HEAD if head is None else head,
        word=WORD if word is None else word,
        special=tokens["special"],
        origin=about["origin"],
    )
    made = replace(made, gap=float(about["gap"]))
    if made.head != int(about["head"]):
        return replace(made, why="closed_example")
    parts: dict[str, Any] = {f.name: around.get(f.name) for f in fields(Projection)}
    return replace(made, projection=Projection(**parts), why="")


def write(folder: Path, made: Material) -> Path:
    """The second of the two files: a plain safetensors file of the material's projection."""
    from safetensors.numpy import save_file

    if made.projection is None:
        raise LessonError(f"the example needs a head that can be opened ({made.why}); choose another")
    arrays = {f.name: getattr(made.projection, f.name) for f in fields(Projection)}
    # One text, for safetensors writes several in any order, and the same pass should give the same file.
    notes = {"origin": made.origin, "layers": str(made.layers), "head": str(made.head), "gap": repr(made.gap)}
    save_file(
        {n: a for n, a in arrays.items() if a is not None},
        folder / AROUND,
        metadata={"lesson": json.dumps(notes)},
    )
    return folder / AROUND


def read(path: Path) -> tuple[dict[str, str], dict[str, Floats]]:
    """The notes and arrays of a safetensors file of float32: a JSON header before the numbers."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    table: dict[str, Any] = json.loads(data[8 : 8 + size])
    notes: dict[str, str] = table.pop("__metadata__")
    arrays: dict[str, Floats] = {}
    for name, entry in table.items():
        begin, end = entry["data_offsets"]
        flat = np.frombuffer(data[8 + size + begin : 8 + size + end], "<f4")
        arrays[name] = flat.reshape(entry["shape"])
    return notes, arrays
