"""How much a cell of the lab differs from one run to the next: all cells of some classes again and again, each time in
a new home with new processes and connections, which are measured as the lab measures them.

That is the error which even a prediction of the median of all runs has in a single one, and so a bound for all others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from experiments.fidelity.cells import Cell, collectives
from experiments.fidelity.worlds import Timing, measure

RUNS = 15
KINDS = ("1 MB", "asymmetric, from 1 MB", "two at once, from 1 MB")
_FEWEST_RUNS = 3
_RUN = ", run "


class RepeatedCell(msgspec.Struct, frozen=True):
    """One of several runs of a cell."""

    inner: Cell
    run: int

    @property
    def name(self) -> str:
        return run_name(self.inner.name, self.run)


class Bound(msgspec.Struct, frozen=True):
    """What repeats say of the errors of a class of cells."""

    cells: int
    runs: int
    """Of the cell that has fewest."""
    median: float
    """Of the errors that the median of the other runs has in each run: no prediction is better."""
    p90: float
    error_median: float
    """Of the errors that our prediction has in the median of all runs: what remains where runs do not differ."""
    error_p90: float


def run_name(cell: str, run: int) -> str:
    return f"{cell}{_RUN}{run}"


def repeated(medium: str) -> list[RepeatedCell]:
    """All runs of the cells that did not calibrate, run by run."""
    cells = [
        cell
        for cell in collectives(medium)
        if isinstance(cell, Cell) and cell.kind in KINDS and not cell.calibrates
    ]  # fmt: skip
    return [RepeatedCell(cell, run) for run in range(1, RUNS + 1) for cell in cells]


def measure_repeated(cells: Sequence[RepeatedCell], done: Callable[[RepeatedCell, Timing], None]) -> None:
    """Measure run by run; `done` is called after each cell."""
    for run in dict.fromkeys(cell.run for cell in cells):
        of_run = [cell.inner for cell in cells if cell.run == run]
        measure(of_run, lambda cell, timing, run=run: done(RepeatedCell(cell, run), timing))


def runs_of(timings: Mapping[str, Timing], cell: str) -> list[float]:
    """Return the times of all runs of a cell."""
    return [timing.median_s for name, timing in timings.items() if name.rpartition(_RUN)[0] == cell]


def deviations(runs_s: Sequence[float]) -> list[float]:
    """Return how far each run is from the median of the others, relative to the run, as an error of a prediction is."""
    others = (statistics.median([*runs_s[:number], *runs_s[number + 1 :]]) for number in range(len(runs_s)))
    return [abs(other / run - 1) for other, run in zip(others, runs_s, strict=True)]


def bound(predicted_s: Mapping[str, float], timings: Mapping[str, Timing]) -> Bound | None:
    """Return the bound of a class of cells, given with what is predicted of each; None if none has been repeated."""
    runs_s = {cell: runs_of(timings, cell) for cell in predicted_s}
    enough = {cell: each for cell, each in runs_s.items() if len(each) >= _FEWEST_RUNS}
    if not enough:
        return None
    # Each cell counts the same, however often it was repeated.
    alike = np.concatenate([np.quantile(deviations(each), np.linspace(0, 1, 21)) for each in enough.values()])
    errors = [abs(predicted_s[cell] / statistics.median(each) - 1) for cell, each in enough.items()]
    percentiles = (float(np.percentile(of, share)) for of in (alike, errors) for share in (50, 90))
    return Bound(len(enough), min(map(len, enough.values())), *percentiles)
