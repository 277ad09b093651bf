"""Where kizuki keeps what it would otherwise make twice: compiled kernels, converted models.

KIZUKI_CACHE names the folder; without it, it is `kizuki` in the user's cache folder. Nothing in it is needed:
it may be deleted at any time.
"""

from __future__ import annotations

import os
from pathlib import Path


def folder(kind: str = "") -> Path:
    """The folder for a kind of thing ("kernels", "models"), or the one around them. It may not exist yet."""
    chosen = os.environ.get("KIZUKI_CACHE")
    if chosen:
        return Path(chosen) / kind
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kizuki" / kind
