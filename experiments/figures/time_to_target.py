"""How long each strategy takes to a target loss, on each link.

The small model is really trained, so both are known: how many steps a strategy needs, and how long it takes them. Of
the large model only the time per step is known. Its panel multiplies that by the steps which the same
strategy needs on the small one, relative to a single machine's: a composition, and labelled as one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from experiments.figures.hidden import METHOD, check_shown, only
from experiments.figures.methods import method, with_methods
from experiments.figures.style import (
    BARS,
    bars,
    figure,
    in_order,
    labelled,
    link_title,
    looks,
    save_data,
    takeaway,
    task_title,
    time_label,
)
from experiments.study.grid import SINGLE

LINKS = ("1gbe", "2.5gbe", "thunderbolt", "wifi6", "two-homes")
ENDS = ("p10_s", "p90_s")
_APART = 0.15
"""Of the dots of a row, so that they do not lie on each other."""
SMALL, LARGE = "digits", "resnet50"


def draw(cells: pd.DataFrame, curves: pd.DataFrame, out: Path) -> None:
    """A dot for each strategy and link; a line for one machine alone."""
    check_shown(cells, "task", *METHOD, "link")
    target = only(cells, "target_loss")
    if target is None or not set(cells["task"]) <= {SMALL, LARGE}:
        raise ValueError(f"it shows {SMALL} with a target_loss, and beside it {LARGE}")
    cells = with_methods(cells)
    trained = _trained(cells, curves)
    composed = _composed(cells, trained)
    trained, composed = _with_bands(trained), _with_bands(composed)
    table = pd.concat([part for part in (trained, composed) if len(part)], ignore_index=True)
    save_data(table, out / "time_to_target")
    _sheet(table, target, out / "time_to_target")


def _sheet(table: pd.DataFrame, target: float, file: Path) -> None:
    trained, composed = (table[table["task"] == task] for task in (SMALL, LARGE))
    together = table[table["method"] != method(SINGLE)]
    names = list(dict.fromkeys(together["method"]))
    dots = {link: look | {"linestyle": "", "markersize": 6.5} for link, look in looks(together["link"], LINKS).items()}
    with figure(10.0, 1.5 + 0.46 * len(names), file) as sheet:
        panels = sheet.subplots(1, 2, sharey=True)
        _panel(panels[0], trained, names, dots, f"{task_title(SMALL)}: time to a held-out loss of {target:g}")
        _panel(panels[1], composed, names, dots, f"{task_title(LARGE)}'s time per step × steps needed on {SMALL}")
        panels[0].set_yticks(range(len(names)), names)
        panels[0].invert_yaxis()
        for link in in_order(together["link"], LINKS):
            panels[1].plot([], [], label=link_title(link), **dots[link])
        panels[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        takeaway(sheet, _finding(table))


def _finding(table: pd.DataFrame) -> str:
    """Of each task, how the soonest cluster compares with one Mac alone."""
    parts = []
    for task, part in table.groupby("task", sort=False):
        there = part[part["time_to_target_s"].notna()]
        alone, together = (there[(there["method"] == method(SINGLE)) == single] for single in (True, False))
        if len(alone) and len(together):
            best = together.loc[together["time_to_target_s"].astype(float).idxmin()]
            times = float(alone.iloc[0]["time_to_target_s"]) / float(best["time_to_target_s"])
            latest_s, soonest_alone_s = best["time_to_target_p90_s"], alone.iloc[0]["time_to_target_p10_s"]
            apart = pd.notna(latest_s) and pd.notna(soonest_alone_s) and float(latest_s) < float(soonest_alone_s)
            sure = "" if apart or times < 1 else "; the bands overlap"
            parts.append(f"{task_title(task)}: at best {times:.1f} times as soon as one Mac ({best['method']}{sure})")
    return "\n".join(parts) or "Time to a target loss"


def _with_bands(table: pd.DataFrame) -> pd.DataFrame:
    """How many steps are needed has no band here, only how long they take."""
    if table.empty:
        return table
    ends = {f"time_to_target_{end}": table["time_to_target_s"] * table[end] / table["step_s"] for end in ENDS}
    return table.assign(**ends)


def _trained(cells: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    """Mean over the seeds; none where a seed did not get there."""
    steps = _steps_to_target(curves)
    small = cells[cells["task"] == SMALL].merge(steps, on=["strategy", "compressor", "link", "seed"], how="left")
    rows = []
    for (name, link), part in small.groupby(["method", "link"], sort=False):
        reached = part["time_to_target_s"].notna()
        all_there = bool(reached.all())
        rows.append(
            {
                "task": SMALL, "method": name, "link": link, "seeds": len(part), "reached": int(reached.sum()),
                "step_s": part["step_s"].mean(), "p10_s": part["p10_s"].mean(), "p90_s": part["p90_s"].mean(),
                "steps_to_target": part["steps_to_target"].mean() if all_there else None,
                "time_to_target_s": part["time_to_target_s"].mean() if all_there else None,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def _steps_to_target(curves: pd.DataFrame) -> pd.DataFrame:
    there = curves[(curves["task"] == SMALL) & (curves["loss"] <= curves["target_loss"])]
    first = there.groupby(["strategy", "compressor", "link", "seed"], sort=False)["step"].min()
    return first.rename("steps_to_target").reset_index()


def _composed(cells: pd.DataFrame, trained: pd.DataFrame) -> pd.DataFrame:
    """Time per step of the large model, by the steps that the small one needed."""
    large = cells[cells["task"] == LARGE]
    times = large.groupby(["method", "link"], sort=False)[["step_s", "p10_s", "p90_s"]].mean().reset_index()
    needed = trained[["method", "link", "seeds", "reached", "steps_to_target"]]
    joined = times.merge(needed, on=["method", "link"], how="inner")
    joined.insert(0, "task", LARGE)
    return joined.assign(time_to_target_s=joined["step_s"] * joined["steps_to_target"])


def _panel(axes: Any, table: pd.DataFrame, names: list[str], dots: dict[str, dict[str, Any]], title: str) -> None:
    alone = table[table["method"] == method(SINGLE)]
    if len(alone) and pd.notna(alone.iloc[0]["time_to_target_s"]):
        time_s = float(alone.iloc[0]["time_to_target_s"])
        axes.axvline(time_s, color="0.3", linewidth=1.0)
        axes.annotate("one Mac alone", (time_s, 1.0), (0, 2), xycoords=("data", "axes fraction"), fontsize=8,
                      textcoords="offset points", ha="center", va="bottom", color="0.3")  # fmt: skip
    links = list(dots)
    for link, part in table[table["method"] != method(SINGLE)].groupby("link", sort=False):
        there = part[part["time_to_target_s"].notna()]
        aside = _APART * (links.index(link) - (len(links) - 1) / 2)
        places = [names.index(name) + aside for name in there["method"]]
        times_s = there["time_to_target_s"].astype(float)
        lengths = bars(times_s, *(there[f"time_to_target_{end}"].astype("Float64").astype(float) for end in ENDS))
        axes.errorbar(times_s, places, xerr=lengths, **dots[link], **BARS)
    for place, name in enumerate(names):
        times_s = table.loc[table["method"] == name, "time_to_target_s"]
        if len(times_s) and times_s.isna().all():
            axes.annotate("not reached", (0.5, place), xycoords=("axes fraction", "data"), ha="center", va="center",
                          fontsize=8, color="0.4", backgroundcolor="white")  # fmt: skip
    axes.set_xscale("log")
    labelled(axes.xaxis, time_label)
    axes.set_xlabel("simulated time (bars: p10 to p90)")
    axes.set_title(title, pad=16)
    axes.grid(axis="x", visible=False)
    for place in range(1, len(names), 2):
        axes.axhspan(place - 0.5, place + 0.5, color="0.96", zorder=0)
    axes.grid(axis="y", visible=False)
    axes.set_ylim(-0.6, len(names) - 0.4)
