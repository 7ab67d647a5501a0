"""What a figure does not show must not vary: rows that differ in it would pass for one, or be averaged."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.study.grid import SINGLE

METHOD = ("strategy", "compressor")
_OF_ALL = ("task", "world", "target_loss")
_OF_A_CLUSTER = (*METHOD, "algorithm", "link", "variant", "size_bytes", "failures_per_hour")
"""What one machine alone has no choice of."""
_OF_FAILURES = ("failure", "failure_s")


def check_shown(cells: pd.DataFrame, *shown: str) -> None:
    """Refuse rows of several values on an axis that is not among those shown; seeds need not be shown."""
    together = cells[cells["strategy"].fillna("") != SINGLE]
    failing = together[together["failures_per_hour"].fillna(0) > 0]
    for axes, rows in ((_OF_ALL, cells), (_OF_A_CLUSTER, together), (_OF_FAILURES, failing)):
        for axis in axes:
            if axis not in shown:
                only(rows, axis)
    # Settings that have no column, or differ by design from method to method.
    for _, same in cells.groupby(["task", "world"]):
        only(same, "batch")
    twice = cells[cells.duplicated([*shown, "seed"], keep=False)]
    if len(twice):
        here = twice.iloc[0]
        words = ", ".join(f"{axis} {here[axis]}" for axis in shown)
        raise ValueError(f"there are several runs of {words} with the same seed, which differ in their settings")


def only(rows: pd.DataFrame, axis: str) -> Any:
    """The value that all of them have; None if they have none."""
    values = rows[axis].dropna().unique()
    if len(values) > 1:
        raise ValueError(f"it does not show {axis}, of which there are several: {', '.join(map(str, values))}")
    return values[0] if len(values) else None
