"""Answers of the server and the widget, unpacked."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from kizuki.explorer.answers import Answers


def unpack(data: bytes) -> dict[str, Any]:
    """An answer's fields, read by the format's description and not by the code that writes it."""
    size = int.from_bytes(data[:4], "little")
    fields = json.loads(data[4 : 4 + size])
    names = fields.pop("floats", [])
    at = 4 + size
    for name, kind, length in fields.pop("arrays"):
        at += -at % 8
        fields[name] = np.frombuffer(data, f"<{kind}", length, at)
        at += fields[name].nbytes
    assert at == len(data)
    floats = fields.pop("floats", np.zeros(0)).tolist()
    return fields | dict(zip(names, floats, strict=True))


def asked(answers: Answers, what: str, **parameters: object) -> dict[str, Any]:
    return unpack(answers.ask(what, {name: str(value) for name, value in parameters.items()}))
