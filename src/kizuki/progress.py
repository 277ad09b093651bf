"""How the command line shows long work: bars on a terminal, one line a stage anywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from rich.console import Console


class Bars:
    """Call it as `progress(stage, done, total)` inside `with`; each stage gets a bar (or line) of its own."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = console.is_terminal and not console.is_dumb_terminal
        self.tasks: dict[str, TaskID] = {}
        self.begun: dict[str, float] = {}
        self.ended: set[str] = set()
        self.progress = Progress(
            TextColumn("{task.description:<18}", markup=False),
            BarColumn(bar_width=32),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not self.live,
        )

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self.live:
            if stage not in self.tasks:
                self.tasks[stage] = self.progress.add_task(stage, total=total or None)
            self.progress.update(self.tasks[stage], completed=done, total=total or None)
            return
        self.begun.setdefault(stage, time.perf_counter())
        if done >= total and stage not in self.ended:
            self.ended.add(stage)
            seconds = time.perf_counter() - self.begun[stage]
            self.console.print(f"{stage}: done in {seconds:.1f} s")
