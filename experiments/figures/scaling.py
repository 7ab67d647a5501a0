"""Speed-up against the number of Macs: samples per second, relative to one Mac that does the same steps alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.ticker import NullLocator

from experiments.figures.hidden import METHOD, check_shown
from experiments.figures.methods import with_methods
from experiments.figures.style import BAND, figure, in_order, link_title, looks, save_data, takeaway, task_title
from experiments.study.grid import SINGLE

LINKS = ("1gbe", "2.5gbe", "thunderbolt", "wifi6")
BAND_OF_SPEEDUP = ("speedup_p10", "speedup_p90")
MODELS = ("resnet50", "gpt2", "llama-1b", "llama-7b")
SHOWN = [
    "task", "method", "link", "world", "batch", "step_s", "p10_s", "p90_s", "step_sent_bytes", "speedup",
    *BAND_OF_SPEEDUP,
]  # fmt: skip


def draw(cells: pd.DataFrame, curves: pd.DataFrame, out: Path) -> None:
    """A panel for each link and strategy, a line for each model."""
    check_shown(cells, "task", *METHOD, "link", "world")
    table = with_methods(cells)
    # By the time per step, which leaves out the opening of connections: these runs are short.
    alone = table[table["strategy"] == SINGLE].groupby(["task", "world"])["step_s"].mean().rename("alone_s")
    table = table[table["strategy"] != SINGLE].merge(alone.reset_index(), on=["task", "world"])
    by = table.groupby(["task", "method", "link", "world", "batch"], sort=False)
    table = by[["step_s", "p10_s", "p90_s", "step_sent_bytes", "alone_s", *BAND_OF_SPEEDUP]].mean().reset_index()
    table = table.assign(speedup=table["alone_s"] / table["step_s"])
    save_data(table[SHOWN], out / "scaling")
    _sheet(table, out / "scaling")


def _sheet(table: pd.DataFrame, file: Path) -> None:
    links = in_order(table["link"], LINKS)
    methods = list(dict.fromkeys(table["method"]))
    most, models = int(table["world"].max()), looks(table["task"], MODELS)
    with figure(2.6 * len(links) + 0.6, 2.7 * len(methods) + 0.3, file) as sheet:
        panels = sheet.subplots(len(methods), len(links), sharex=True, sharey=True, squeeze=False)
        for row, name in zip(panels, methods, strict=True):
            for axes, link in zip(row, links, strict=True):
                lowest = float(table[["speedup", "speedup_p10"]].min().min())
                _panel(axes, table[(table["method"] == name) & (table["link"] == link)], most, models, lowest)
                axes.set_title(f"{link_title(link)}\n{name}")
            row[0].set_ylabel("times as fast as one Mac")
        for axes in panels[-1]:
            axes.set_xlabel("Macs")
        panels[0, 0].legend(loc="lower right", fontsize=8, title="shaded: p10 to p90", title_fontsize=8)
        takeaway(sheet, _finding(table))


def _finding(table: pd.DataFrame) -> str:
    """Of the first method, on the best and on the worst of the links, with the most Macs."""
    name, most = table["method"].iloc[0], table["world"].max()
    by_link = table[(table["method"] == name) & (table["world"] == most)].groupby("link", sort=False)["speedup"]
    best, worst = by_link.mean().idxmax(), by_link.mean().idxmin()
    ranges = {link: f"{part.min():.2g} to {part.max():.2g}" for link, part in by_link}
    words = f"{most} Macs, {name}: {ranges[best]} times as fast as one by {link_title(best)}"
    return words if best == worst else f"{words}, {ranges[worst]} times by {link_title(worst)}"


def _panel(axes: Any, table: pd.DataFrame, most: int, models: dict[str, dict[str, Any]], lowest: float) -> None:
    axes.plot([1, most], [1, most], color="0.6", linewidth=0.9)
    axes.annotate("ideal", (0.5 * most, 0.5 * most), (-5, 2), textcoords="offset points", ha="right", fontsize=8,
                  color="0.4")  # fmt: skip
    axes.axhline(1, color="0.6", linewidth=0.9)
    for task, look in models.items():
        line = table[table["task"] == task].sort_values("world")
        if len(line):
            worlds = [1, *line["world"]]
            axes.plot(worlds, [1.0, *line["speedup"]], label=task_title(task), **look)
            if line["speedup_p10"].notna().all():
                low, high = ([1.0, *line[name]] for name in BAND_OF_SPEEDUP)
                axes.fill_between(worlds, low, high, color=look["color"], **BAND)
    axes.set_xscale("log")
    axes.set_xlim(0.9, 1.12 * most)
    # On a linear axis all that is slower than one Mac would lie on the bottom.
    axes.set_yscale("log")
    axes.set_ylim(0.8 * min(lowest, 0.9), 1.25 * most)
    ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4, 8, 16, 32, 64) if 0.8 * lowest <= tick <= most]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())
    worlds = sorted({1, *map(int, table["world"])})
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.xaxis.set_minor_locator(NullLocator())
