"""What all figures have in common: readable without colour, in print and on a small screen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from experiments.clusters import LINKS
from experiments.study.tables import write_csv

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.color": "0.9",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "savefig.bbox": "tight",
    "savefig.dpi": 160,
    "svg.hashsalt": "hcsim",
}
LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "#0072b2", "marker": "o", "linestyle": "-"},
    {"color": "#009e73", "marker": "^", "linestyle": "--"},
    {"color": "#d55e00", "marker": "s", "linestyle": ":"},
    {"color": "#cc79a7", "marker": "D", "linestyle": "-."},
    {"color": "#000000", "marker": "x", "linestyle": (0, (5, 1))},
    {"color": "#56b4e9", "marker": "P", "linestyle": (0, (1, 1))},
    {"color": "#e69f00", "marker": "v", "linestyle": (0, (3, 1, 1, 1, 1, 1))},
    {"color": "#7f7f7f", "marker": "*", "linestyle": (0, (5, 3))},
)
"""Okabe and Ito's colours, which the colour-blind can tell apart; marker and line tell them apart too."""

TASKS = {"digits": "Digits", "resnet50": "ResNet-50", "gpt2": "GPT-2", "llama-1b": "Llama 1B", "llama-7b": "Llama 7B"}

_LETTERS_PER_INCH = 10.5
"""Of a title."""
SUFFIXES = (".csv", ".png", ".svg")
"""Of the files of a figure."""


@contextmanager
def figure(width: float, height: float, file: Path) -> Iterator[Figure]:
    """A figure in the common style, saved as PNG and SVG."""
    with mpl.rc_context(STYLE):
        sheet = Figure(figsize=(width, height), layout="constrained")
        yield sheet
        sheet.savefig(file.with_suffix(".png"))
        sheet.savefig(file.with_suffix(".svg"), metadata={"Date": None})


def takeaway(sheet: Figure, words: str) -> None:
    """State above all panels what a reader is to take away, which is counted from the rows that are shown."""
    per_line = int(_LETTERS_PER_INCH * sheet.get_figwidth())
    lines = [line for part in words.split("\n") for line in wrap(part[:1].upper() + part[1:], per_line)]
    sheet.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=11, fontweight="bold")


def percentage(share: float) -> str:
    """ "64 %"; below one percent with a digit more."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def save_data(table: pd.DataFrame, file: Path) -> None:
    """What a figure shows, beside it; columns without any value are left out."""
    if table.empty:
        raise ValueError("there is nothing to compare its rows with")
    write_csv(table.dropna(axis=1, how="all"), file)


def spread(mean: pd.Series, lowest: pd.Series, highest: pd.Series) -> list[pd.Series]:
    """Bars from the lowest to the highest; the mean of equal numbers can be a rounding error beside them."""
    return [(mean - lowest).clip(lower=0), (highest - mean).clip(lower=0)]


BAND = {"alpha": 0.16, "linewidth": 0}
"""How a band from p10 to p90 is shaded, in the colour of its line."""
BARS: dict[str, Any] = {"elinewidth": 0.8, "capsize": 1.5, "ecolor": "0.6"}
"""How bars from p10 to p90 are drawn, behind their markers."""


def bars(values: pd.Series, lowest: pd.Series, highest: pd.Series) -> list[np.ndarray]:
    """The lengths of bars on both sides; none where no band is known."""
    filled = [end.astype(float).fillna(values.astype(float)) for end in (lowest, highest)]
    return [part.to_numpy() for part in spread(values.astype(float), *filled)]


def task_title(task: str) -> str:
    """As it stands over a panel."""
    return TASKS.get(task, task)


def link_title(link: str) -> str:
    """As it stands over a panel."""
    return LINKS[link].title if link in LINKS else link.removeprefix("ethernet:")


def in_order(present: Any, order: tuple[str, ...]) -> list[str]:
    """Those of the order that are present, then the rest."""
    names = list(dict.fromkeys(present))
    return [*(name for name in order if name in names), *(name for name in names if name not in order)]


def looks(present: Any, order: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """One for each name: those of the order always have the same. After the eighth they come again,
    hollow; after the sixteenth nobody could tell them apart anyway."""
    names = dict.fromkeys((*order, *present))
    return {name: LOOKS[number] if number < len(LOOKS) else _hollow(number) for number, name in enumerate(names)}


def _hollow(number: int) -> dict[str, Any]:
    look = LOOKS[number % len(LOOKS)] | {"markerfacecolor": "white"}
    return look | {"marker": "X"} if look["marker"] == "x" else look  # a cross of lines cannot be hollow


def labelled(axis: Any, label: Callable[[float], str]) -> None:
    """Ticks of a logarithmic axis in words."""
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))


def size_label(size_bytes: float) -> str:
    """Binary units."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:g} {unit}"
    return f"{size_bytes:g} B"


def bytes_label(size_bytes: float) -> str:
    """Decimal units."""
    return _scaled(size_bytes, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def rate_label(bps: float) -> str:
    """Bits per second."""
    return _scaled(bps, (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3), ("b/s", 1.0)))


def count_label(count: float) -> str:
    """Thousands, millions, billions."""
    return _scaled(count, (("B", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))).replace(" ", "")


def time_label(seconds: float) -> str:
    """Seconds, and their parts."""
    return _scaled(seconds, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)))


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    unit, scale = next(((unit, scale) for unit, scale in units if value >= 0.999 * scale), units[-1])
    number = value / scale
    return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"
