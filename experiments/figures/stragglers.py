"""What one unlike Mac costs each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from experiments.figures.hidden import METHOD, check_shown, only
from experiments.figures.methods import with_methods
from experiments.figures.style import BARS, LOOKS, bars, figure, link_title, percentage, save_data, takeaway, task_title

EQUAL, NEARLY = "equal", "nearly-equal"
VARIANTS = {
    "one-old": "one is an M1",
    "one-throttled": "one is hot, at 0.4 of its speed",
    "one-on-wifi": "one is on Wi-Fi 6",
    EQUAL: "all are equal",
    NEARLY: "all are alike, 1 % apart",
}
SHOWN = [
    "method", "link", "variant", "world", "steps", "samples_per_s", "samples_per_s_p10", "samples_per_s_p90", "of_equal"
]  # fmt: skip
_APART = 0.17
"""Of the markers in a row, so that their bars do not lie on each other."""


def draw(cells: pd.DataFrame, curves: pd.DataFrame, out: Path) -> None:
    """A panel for each link; a row for each strategy, a marker for each way of being unlike."""
    check_shown(cells, *METHOD, "link", "variant")
    place = f"{task_title(only(cells, 'task'))}, {only(cells, 'world')} Macs"
    table = _relative(with_methods(cells))
    save_data(table[SHOWN], out / "stragglers")
    names = list(dict.fromkeys(table["method"]))
    links = list(dict.fromkeys(table["link"]))
    with figure(3.9 * len(links) + 2.0, 1.3 + 0.5 * len(names), out / "stragglers") as sheet:
        panels = sheet.subplots(1, len(links), sharey=True, squeeze=False)[0]
        for axes, link in zip(panels, links, strict=True):
            _panel(axes, table[table["link"] == link], names)
            axes.set_title(f"{place}, {link_title(link)}")
        panels[0].set_yticks(range(len(names)), names)
        panels[0].invert_yaxis()
        panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        takeaway(sheet, _finding(table, links[-1]))


def _finding(table: pd.DataFrame, link: str) -> str:
    """The variant that costs most on this link, for the method that bears it worst and the one that bears it best."""
    unlike = table[(table["link"] == link) & ~table["variant"].isin((EQUAL, NEARLY))]
    if unlike.empty:
        return f"{len(set(table['method']))} methods on {link_title(link)}"
    variant = unlike.groupby("variant", sort=False)["of_equal"].mean().idxmin()
    kept = unlike[unlike["variant"] == variant].groupby("method", sort=False)["of_equal"].mean()
    words = VARIANTS.get(variant, variant)
    best, worst = (f"{name} keeps {percentage(min(1.0, kept[name]))}" for name in (kept.idxmax(), kept.idxmin()))
    return f"Where {words}, {worst} of its speed, and {best}"


def _relative(table: pd.DataFrame) -> pd.DataFrame:
    same = ["method", "link", "seed"]
    base = NEARLY if (table["variant"] == NEARLY).any() else EQUAL
    equal = table.loc[table["variant"] == base, [*same, "samples_per_s"]]
    joined = table.merge(equal.rename(columns={"samples_per_s": "equal_samples_per_s"}), on=same)
    rates = joined["samples_per_s"]
    return joined.assign(
        of_equal=rates / joined["equal_samples_per_s"],
        samples_per_s_p10=rates * joined["step_s"] / joined["p90_s"],
        samples_per_s_p90=rates * joined["step_s"] / joined["p10_s"],
    )


def _panel(axes: Any, table: pd.DataFrame, names: list[str]) -> None:
    shown = {variant: words for variant, words in VARIANTS.items() if (table["variant"] == variant).any()}
    for number, (variant, words) in enumerate(shown.items()):
        part = table[table["variant"] == variant]
        look = LOOKS[number] | {"linestyle": "", "markersize": 5.5}
        if variant in (EQUAL, NEARLY):
            look = {"color": "black", "marker": "|", "linestyle": "", "markersize": 9, "markeredgewidth": 1.8}
        places = [names.index(name) + _APART * (number - (len(shown) - 1) / 2) for name in part["method"]]
        rates = part["samples_per_s"].astype(float)
        lengths = bars(rates, part["samples_per_s_p10"], part["samples_per_s_p90"])
        axes.errorbar(rates, places, xerr=lengths, label=words, **look, **BARS)
    axes.set_xlim(left=0)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlabel("samples per second (bars: p10 to p90)")
    axes.grid(axis="y", visible=False)
