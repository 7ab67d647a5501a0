"""How throughput falls when Macs pause or drop out now and then, by strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from experiments.figures.hidden import METHOD, check_shown, only
from experiments.figures.methods import with_methods
from experiments.figures.style import figure, looks, save_data, spread, task_title

FAILURES = {"pause": ("pauses", "runs"), "dropout": ("dropouts", "is reached")}
"""In words, and what a Mac does in the hours that the rate is of: from the end of one failure to the next."""


def draw(cells: pd.DataFrame, curves: pd.DataFrame, out: Path) -> None:
    """Left: steps per second. Right: relative to the same strategy without failures."""
    check_shown(cells, *METHOD, "failures_per_hour")
    failing = cells[cells["failures_per_hour"] > 0]
    if failing.empty:
        raise ValueError("nothing fails in any of its runs")
    words, while_well = FAILURES[only(failing, "failure")]
    table = _summary(with_methods(cells))
    save_data(table, out / "failures")
    with figure(10.4, 3.8, out / "failures") as sheet:
        left, right = sheet.subplots(1, 2)
        _lines(left, table, "", 1.0)
        _lines(right, table, "of_healthy_", 100.0)
        left.set_ylabel("steps per second")
        right.set_ylabel(f"% of that without {words}")
        place = f"{task_title(only(cells, 'task'))}, {only(cells, 'world')} Macs"
        left.set_title(f"{place}: random {words} of {only(failing, 'failure_s'):g} s")
        right.set_title(f"The same, relative to each without {words}")
        for axes in (left, right):
            axes.set_xlabel(f"{words} per Mac and hour that it {while_well}")
            axes.set_ylim(bottom=0)
        right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _summary(table: pd.DataFrame) -> pd.DataFrame:
    """Mean and range over the seeds."""
    rates = table["samples_per_s"] / table["batch"]
    slow, fast = (rates * table["step_s"] / table[end] for end in ("p90_s", "p10_s"))
    table = table.assign(steps_per_s=rates, steps_per_s_p10=slow, steps_per_s_p90=fast)
    healthy = table[table["failures_per_hour"] == 0].groupby("method")["steps_per_s"].mean().rename("healthy")
    table = table.merge(healthy.reset_index(), on="method")
    table = table.assign(of_healthy=table["steps_per_s"] / table["healthy"])
    by = table.groupby(["method", "failures_per_hour"], sort=False)
    return pd.DataFrame(
        {
            "seeds": by["seed"].nunique(),
            "steps_per_s_p10": by["steps_per_s_p10"].mean(),
            "steps_per_s_p90": by["steps_per_s_p90"].mean(),
            "steps_per_s": by["steps_per_s"].mean(),
            "lowest": by["steps_per_s"].min(),
            "highest": by["steps_per_s"].max(),
            "of_healthy_steps_per_s": by["of_healthy"].mean(),
            "of_healthy_lowest": by["of_healthy"].min(),
            "of_healthy_highest": by["of_healthy"].max(),
        }
    ).reset_index()


def _lines(axes: Any, table: pd.DataFrame, prefix: str, scale: float) -> None:
    for name, look in looks(table["method"]).items():
        line = table[table["method"] == name].sort_values("failures_per_hour")
        x = line["failures_per_hour"].astype(float)
        y = scale * line[f"{prefix}steps_per_s"].astype(float)
        low, high = (scale * line[f"{prefix}{end}"].astype(float) for end in ("lowest", "highest"))
        axes.errorbar(x, y, yerr=spread(y, low, high), label=name, elinewidth=0.7, capsize=1.5, **look)
