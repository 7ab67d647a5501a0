"""What a person sees while a sweep runs: how much is done, what is left, what failed."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from experiments.study.cell import AllReduce, AnyCell, Result
from experiments.study.estimate import Estimate


class _Left(ProgressColumn):
    """The estimate, which knows that cells are of unlike cost."""

    max_refresh = 0.5

    def render(self, task: Any) -> Text:
        left_s = task.fields.get("left_s")
        return Text("" if left_s is None else f"about {_duration(left_s)} left", style="progress.remaining")


class Bar:
    """The progress bar of one sweep."""

    def __init__(self, cells: list[AnyCell], jobs: int, console: Console) -> None:
        self._estimate = Estimate(cells)
        self._jobs = jobs
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _Left(),
            console=console, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("running", total=len(cells))
        self.failed = 0

    def finished(self, cell: AnyCell, result: Result, cost_s: float) -> None:
        """One more."""
        self._estimate.finished(cell, cost_s)
        if result.error is not None:
            self.failed += 1
            self._progress.console.print(f"failed: {title(cell)}: {result.error}", markup=False, highlight=False)
        left_s = self._estimate.left_s(self._jobs)
        self._progress.update(self._task, advance=1, left_s=left_s, description=title(cell))

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def title(cell: AnyCell) -> str:
    """A cell in a few words."""
    if isinstance(cell, AllReduce):
        return f"{cell.algorithm} of {cell.size_bytes} bytes, {cell.world} × {cell.link}"
    parts = [
        cell.task,
        cell.strategy,
        cell.compressor if cell.compressor != "none" else "",
        f"{cell.world} × {cell.link}",
    ]
    return ", ".join([*filter(None, parts), f"seed {cell.seed}"])


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
