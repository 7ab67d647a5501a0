"""How throughput falls when Macs pause or drop out now and then, by strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from experiments.figures.hidden import METHOD, check_shown, only
from experiments.figures.methods import with_methods
from experiments.figures.style import figure, looks, percentage, save_data, spread, takeaway, task_title
from experiments.study.failures import CRASH

FAILURES = {"pause": ("pauses", "runs"), "dropout": ("dropouts", "is reached"), "crash": ("crashes", "runs")}
"""In words, and what a Mac does in the hours that the rate is of: from the end of one failure to the next."""


def draw(cells: pd.DataFrame, curves: pd.DataFrame, out: Path) -> None:
    """A row for each kind of failure. Left: steps per second. Right: relative to the same strategy without failures."""
    cells = with_methods(cells)
    # What crashes is in a cluster, and compared with a cluster; all else is compared with what never fails.
    parts = (part for _, part in cells.groupby(cells["failure"] == CRASH, sort=False))
    failing = [(part, part[part["failures_per_hour"] > 0]) for part in parts]
    kinds = {str(ill["failure"].iloc[0]): part for part, ill in failing if len(ill)}
    if not kinds:
        raise ValueError("nothing fails in any of its runs")
    tables = []
    for kind, part in kinds.items():
        check_shown(part, *METHOD, "failures_per_hour")
        tables.append(_summary(part).assign(failure=kind))
    table = pd.concat(tables, ignore_index=True)
    save_data(table, out / "failures")
    titles = {
        kind: (
            f"{task_title(only(part, 'task'))}, {only(part, 'world')} Macs",
            float(only(part[part["failures_per_hour"] > 0], "failure_s")),
        )
        for kind, part in kinds.items()
    }
    _sheet(table, titles, out / "failures")


def _sheet(table: pd.DataFrame, titles: dict[str, tuple[str, float]], file: Path) -> None:
    look_of = looks(table["method"])
    with figure(10.4, 3.7 * len(titles) + 0.3, file) as sheet:
        rows = sheet.subplots(len(titles), 2, squeeze=False)
        for row, (kind, title) in zip(rows, titles.items(), strict=True):
            _row(row, table[table["failure"] == kind], title, look_of)
        takeaway(sheet, _finding(table))


def _row(row: Any, table: pd.DataFrame, title: tuple[str, float], look_of: dict[str, dict[str, Any]]) -> None:
    words, while_well = FAILURES[table["failure"].iloc[0]]
    place, lasts_s = title
    left, right = row
    _lines(left, table, look_of, "", 1.0)
    _lines(right, table, look_of, "of_healthy_", 100.0)
    left.set_ylabel("steps per second")
    right.set_ylabel(f"% of that without {words}")
    left.set_title(f"{place}: random {words} of {lasts_s:g} s")
    right.set_title(f"The same, relative to each without {words}")
    for axes in (left, right):
        axes.set_xlabel(f"{words} per Mac and hour that it {while_well}")
        axes.set_ylim(bottom=0)
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _finding(table: pd.DataFrame) -> str:
    """At the highest rate of each kind, the method that keeps most of its speed and the one that keeps least."""
    parts = []
    for kind, part in table.groupby("failure", sort=False):
        rate = part["failures_per_hour"].max()
        kept = part[part["failures_per_hour"] == rate].set_index("method")["of_healthy_steps_per_s"]
        best, worst = kept.idxmax(), kept.idxmin()
        words = f"{rate:g} {FAILURES[kind][0]} an hour leave {worst} {percentage(kept[worst])} of its speed"
        parts.append(words if best == worst else f"{words}, {best} {percentage(kept[best])}")
    return "\n".join(parts)


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


def _lines(axes: Any, table: pd.DataFrame, look_of: dict[str, dict[str, Any]], prefix: str, scale: float) -> None:
    for name in dict.fromkeys(table["method"]):
        look = look_of[name]
        line = table[table["method"] == name].sort_values("failures_per_hour")
        x = line["failures_per_hour"].astype(float)
        y = scale * line[f"{prefix}steps_per_s"].astype(float)
        low, high = (scale * line[f"{prefix}{end}"].astype(float) for end in ("lowest", "highest"))
        axes.errorbar(x, y, yerr=spread(y, low, high), label=name, elinewidth=0.7, capsize=1.5, **look)
