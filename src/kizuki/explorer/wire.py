"""Answers as bytes: what the page's `transport.js` unpacks, over HTTP and as messages alike.

Little-endian: the length of a JSON text (uint32), that text, then the arrays it lists as `[name, kind, length]`, each
at a multiple of 8 bytes from the beginning. Floats travel in an array of their own, for JSON has no NaN and no
infinity.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGN = 8


def pack(fields: Mapping[str, Any]) -> bytes:
    """Fields by name: NumPy arrays (float32, float64, int32), floats, and whatever JSON holds without floats in lists.

    Raises TypeError for an array of another kind: nothing is widened or cut on the way.

    Time and memory: one copy of the arrays.

    Example:
        >>> unpacked = pack({"bad": [3], "worst": 0.5, "weights": np.ones(2, np.float32)})
        >>> unpacked[4:4 + int.from_bytes(unpacked[:4], "little")]
        b'{"bad":[3],"floats":["worst"],"arrays":[["floats","f8",1],["weights","f4",2]]}'
    """
    plain: dict[str, Any] = {}
    floats: dict[str, float] = {}
    arrays: list[tuple[str, NDArray[Any]]] = []
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            arrays.append((name, value))
        elif isinstance(value, float):
            floats[name] = value
        else:
            plain[name] = value
    if floats:
        plain["floats"] = list(floats)
        arrays.insert(0, ("floats", np.array(list(floats.values()))))
    listed, parts = [], []
    for name, array in arrays:
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        kind = little.dtype.str[1:]
        if kind not in ("f4", "f8", "i4"):
            raise TypeError(f"wire.pack: {name} holds {array.dtype} but must hold float32, float64 or int32")
        listed.append([name, kind, little.size])
        parts.append(little.tobytes())
    text = json.dumps({**plain, "arrays": listed}, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    made = bytearray(len(text).to_bytes(4, "little") + text.encode("ascii"))
    for part in parts:
        made += bytes(-len(made) % ALIGN)
        made += part
    return bytes(made)
