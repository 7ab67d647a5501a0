"""How long the rest of a sweep takes: a guess for each cell, corrected by what cells like it took.

Cells are of very unlike cost, so counting them says little. A guess has the right proportions within one family
of cells (the same task and kind of strategy); the seconds per unit of guess are measured, for each
family, and over all of them for a family of which no cell has been run yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log2

from experiments.study.cell import AllReduce, AnyCell

_MB = 1e6


def guess(cell: AnyCell) -> float:
    """In units of its family."""
    if isinstance(cell, AllReduce):
        return (cell.repeats + 1) * cell.world * (log2(cell.world) + 1 + cell.size_bytes / (4 * _MB))
    return cell.steps * cell.world


def family(cell: AnyCell) -> str:
    """Cells whose guesses are in proportion to each other."""
    if isinstance(cell, AllReduce):
        return "all_reduce"
    return f"{cell.task} {cell.strategy} {cell.compressor}"


class Estimate:
    """Learns while cells are finished."""

    def __init__(self, cells: Iterable[AnyCell]) -> None:
        self._left: dict[str, float] = {}
        for cell in cells:
            self._left[family(cell)] = self._left.get(family(cell), 0.0) + guess(cell)
        self._spent: dict[str, tuple[float, float]] = {}

    def finished(self, cell: AnyCell, cost_s: float) -> None:
        """It took so long."""
        units, seconds = self._spent.get(family(cell), (0.0, 0.0))
        self._spent[family(cell)] = (units + guess(cell), seconds + cost_s)
        self._left[family(cell)] -= guess(cell)

    def left_s(self, jobs: int) -> float | None:
        """Until all is done, with so many at work; None before the first is finished."""
        if not self._spent:
            return None
        all_units, all_seconds = (sum(column) for column in zip(*self._spent.values(), strict=True))
        total_s = 0.0
        for name, left in self._left.items():
            units, seconds = self._spent.get(name, (all_units, all_seconds))
            total_s += left * seconds / units
        return max(0.0, total_s) / jobs
