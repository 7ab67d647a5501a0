"""How long an all-reduce takes, by algorithm, size and link; and whether the simulator agrees with the textbook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.ticker import FixedLocator

from experiments.figures.hidden import check_shown
from experiments.figures.style import (
    BAND,
    figure,
    labelled,
    link_title,
    looks,
    save_data,
    size_label,
    takeaway,
    time_label,
)

ALGORITHMS = (
    "ring", "tree", "centralized", "recursive_doubling", "halving_doubling", "direct", "hierarchical",
    "chunked_ring",
)  # fmt: skip
AUTO = "auto"
_CLOSE = 1.1
"""So many times as long as the fastest is nearly as fast."""
SHOWN = [
    "link", "world", "algorithm", "size_bytes", "step_s", "p10_s", "p90_s", "fastest_s", "slowest_s",
    "step_sent_bytes", "closed_form_s",
]  # fmt: skip


BY_LINK, CLOSED_FORM = "allreduce_by_link", "allreduce_closed_form"
FILES = f"{BY_LINK}|{CLOSED_FORM}"


def draw(cells: pd.DataFrame, curves: pd.DataFrame, out: Path) -> None:
    """Two figures: real links, and ideal ones beside their formulas."""
    real, ideal = cells[cells["closed_form_s"].isna()], cells[cells["closed_form_s"].notna()]
    check_shown(real, "link", "world", "algorithm", "size_bytes")
    for _, line in ideal.groupby("algorithm"):
        check_shown(line, "algorithm", "size_bytes")
    if len(real):
        save_data(real[SHOWN], out / BY_LINK)
        _by_link(real, out / BY_LINK)
    if len(ideal):
        save_data(ideal[SHOWN], out / CLOSED_FORM)
        _closed_form(ideal, out / CLOSED_FORM)


def _by_link(cells: pd.DataFrame, file: Path) -> None:
    """Time against size, a panel for each cluster and a line for each algorithm."""
    places = list(dict.fromkeys(zip(cells["link"], cells["world"], strict=True)))
    rows = -(-(len(places) + 1) // 3)
    look_of = looks(cells["algorithm"], ALGORITHMS)
    with figure(9.6, 3.0 * rows, file) as sheet:
        panels = sheet.subplots(rows, 3, squeeze=False)
        for (link, world), axes in zip(places, panels.flat, strict=False):
            here = cells[(cells["link"] == link) & (cells["world"] == world)]
            for algorithm, line in here.groupby("algorithm", sort=False):
                look = look_of[algorithm]
                if algorithm == AUTO:
                    axes.plot(line["size_bytes"], line["step_s"], label=AUTO, **_BENEATH)
                    continue
                axes.plot(line["size_bytes"], line["step_s"], label=algorithm, **look)
                if line["p10_s"].notna().all():
                    sizes, low, high = (line[name].astype(float) for name in ("size_bytes", "p10_s", "p90_s"))
                    axes.fill_between(sizes, low, high, color=look["color"], **BAND)
            axes.set_title(f"{world} Macs, {link_title(link)}")
            _log_axes(axes)
        for axes in panels.flat[len(places) :]:
            axes.axis("off")
        named = {
            label: handle
            for axes in panels.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        words = [f"{AUTO}, nothing measured" if name == AUTO else _word(name) for name in named]
        panels.flat[-1].legend(
            named.values(), words, loc="center", title="simulated all-reduce by\n(shaded: p10 to p90)", fontsize=10
        )
        sheet.supxlabel("size of the reduced tensor")
        for axes in panels[:, 0]:
            axes.set_ylabel("time")
        takeaway(sheet, _finding(cells))


_BENEATH: dict[str, Any] = {"color": "#f0e442", "linewidth": 7, "solid_capstyle": "round", "zorder": 1}
"""How `auto` is drawn: below the line of the algorithm that it takes."""


def _finding(cells: pd.DataFrame) -> str:
    """How often the fastest is whom, and how often `auto` comes near it."""
    place = ["link", "world", "size_bytes"]
    fixed = cells[cells["algorithm"] != AUTO]
    fastest = fixed.loc[fixed.groupby(place)["step_s"].idxmin()]
    wins = fastest["algorithm"].value_counts()
    words = f"{_word(wins.index[0])} is the fastest in {wins.iloc[0]} of {len(fastest)} places"
    auto = cells[cells["algorithm"] == AUTO].merge(fastest[[*place, "step_s"]], on=place, suffixes=("", "_fastest"))
    if auto.empty:
        return words
    close = int((auto["step_s"] <= _CLOSE * auto["step_s_fastest"]).sum())
    return f"{words}; auto takes at most {_CLOSE - 1:.0%} longer than the fastest in {close} of {len(auto)}"


def _closed_form(cells: pd.DataFrame, file: Path) -> None:
    """The formulas as lines, what was simulated as markers, and below how far they are apart."""
    look_of = looks(cells["algorithm"], ALGORITHMS)
    with figure(6.0, 5.4, file) as sheet:
        upper, lower = sheet.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        for algorithm, line in cells.groupby("algorithm", sort=False):
            look = look_of[algorithm]
            sizes = line["size_bytes"]
            upper.plot(sizes, line["closed_form_s"], color=look["color"], linestyle=look["linestyle"])
            upper.plot(sizes, line["step_s"], **look | {"linestyle": ""})
            upper.plot([], [], label=f"{_word(algorithm)}, {line['world'].iloc[0]} ports", **look)
            lower.plot(sizes, 100 * (line["step_s"] / line["closed_form_s"] - 1), **look)
        off = float((cells["step_s"] / cells["closed_form_s"] - 1).abs().max())
        words = f"{100 * off:.2g} %" if off else "the last digit"
        takeaway(sheet, f"The simulator agrees with the formulas to {words}")
        upper.set_title("Latency and bandwidth only: formula (line) and simulation (marker)")
        upper.legend()
        _log_axes(upper)
        upper.set_ylabel("time")
        lower.set_ylabel("simulated\nabove formula, %")
        lower.set_ylim(-1, 1)
        lower.set_xlabel("size of the reduced tensor")


def _word(algorithm: str) -> str:
    return algorithm.replace("_", " ")


def _log_axes(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    labelled(axes.xaxis, size_label)
    labelled(axes.yaxis, time_label)
    axes.xaxis.set_major_locator(FixedLocator([1 << power for power in (10, 15, 20, 25)]))
