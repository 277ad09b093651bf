"""A PNG of RGB bytes, with the standard library alone: the picture inside an SVG."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(colours: NDArray[np.uint8]) -> bytes:
    """`colours`, uint8 `[rows, cols, 3]`, as an image file of that many pixels."""
    rows, cols, _ = colours.shape
    lines = np.zeros((rows, 1 + 3 * cols), np.uint8)  # each line begins with its filter, 0: none
    lines[:, 1:] = colours.reshape(rows, -1)
    head = struct.pack(">IIBBBBB", cols, rows, 8, 2, 0, 0, 0)
    return (
        SIGNATURE
        + _chunk(b"IHDR", head)
        + _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
