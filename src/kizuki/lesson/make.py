"""`python -m kizuki.lesson.make`: make the example that comes with the package, from SmolLM2 itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from . import example
from .capture import record


def main() -> None:
    """Write both files, and say how many bytes they are."""
    parser = argparse.ArgumentParser(prog="python -m kizuki.lesson.make", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "example")
    folder: Path = parser.parse_args().folder
    from kizuki.models import load

    made, recording = record(
        load("smollm2"), example.SENTENCE, layer=example.LAYER, head=example.HEAD, word=example.WORD
    )
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    for path in (recording.save(folder / example.RECORDING), example.write(folder, made)):
        console.print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
