"""The figures of the studies, in one style: readable without colour, in print and on a small screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

if TYPE_CHECKING:
    from experiments.sweep import Point

STYLE: dict[str, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.color": "0.9",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "savefig.bbox": "tight",
    "savefig.dpi": 160,
    "svg.hashsalt": "hcsim",
}
LOOKS: dict[str, dict[str, Any]] = {
    "ring": {"color": "#0072b2", "marker": "o", "linestyle": "-"},
    "tree": {"color": "#009e73", "marker": "^", "linestyle": "--"},
    "centralized": {"color": "#d55e00", "marker": "s", "linestyle": ":"},
    "recursive_doubling": {"color": "#cc79a7", "marker": "D", "linestyle": "-."},
    "halving_doubling": {"color": "#000000", "marker": "x", "linestyle": (0, (5, 1))},
    "direct": {"color": "#56b4e9", "marker": "P", "linestyle": (0, (1, 1))},
    "hierarchical": {"color": "#e69f00", "marker": "v", "linestyle": (0, (3, 1, 1, 1, 1, 1))},
}
"""Okabe and Ito's colours, which the colour-blind can tell apart; marker and line tell them apart too."""


def times_by_link(points: Sequence[Point], titles: dict[str, str], file: Path) -> None:
    """Time against size, a panel for each cluster and a line for each algorithm."""
    names = list(dict.fromkeys(point.cluster for point in points))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 6.0), layout="constrained")
        panels = figure.subplots(2, 3)
        for name, axes in zip(names, panels.flat, strict=False):
            here = [point for point in points if point.cluster == name]
            for algorithm in dict.fromkeys(point.algorithm for point in here):
                line = [point for point in here if point.algorithm == algorithm]
                axes.plot([p.size_bytes for p in line], [p.median_s for p in line], label=algorithm, **LOOKS[algorithm])
            axes.set_title(titles[name])
            _log_axes(axes)
        for axes in panels.flat[len(names) :]:
            axes.axis("off")
        handles = {
            label: handle
            for axes in panels.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        panels.flat[-1].legend(
            handles.values(), _words(handles), loc="center", title="simulated all-reduce by", fontsize=10
        )
        figure.supxlabel("size of the reduced tensor")
        for axes in panels[:, 0]:
            axes.set_ylabel("time")
        _save(figure, file)


def closed_forms(points: Sequence[Point], file: Path) -> None:
    """The formulas as lines, what was simulated as markers, and below how far they are apart."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.0, 5.4), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        for algorithm in dict.fromkeys(point.algorithm for point in points):
            look = LOOKS[algorithm]
            line = [point for point in points if point.algorithm == algorithm]
            sizes = [point.size_bytes for point in line]
            upper.plot(sizes, [p.closed_form_s for p in line], color=look["color"], linestyle=look["linestyle"])
            upper.plot(sizes, [p.median_s for p in line], color=look["color"], marker=look["marker"], linestyle="")
            upper.plot([], [], label=f"{_word(algorithm)}, {line[0].ranks} ports", **look)
            lower.plot(sizes, [100 * (p.median_s / (p.closed_form_s or 1) - 1) for p in line], **look)
        upper.set_title("Latency and bandwidth only: formula (line) and simulation (marker)")
        upper.legend()
        _log_axes(upper)
        upper.set_ylabel("time")
        lower.set_ylabel("simulated\nabove formula, %")
        lower.set_ylim(-1, 3)
        lower.set_xlabel("size of the reduced tensor")
        _save(figure, file)


def _log_axes(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator([1 << power for power in (10, 15, 20, 25)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_label(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: time_label(value)))


def size_label(size_bytes: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:g} {unit}"
    return f"{size_bytes:g} B"


def time_label(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 0.999:
            return f"{seconds * scale:g} {unit}"
    return f"{seconds * 1e9:g} ns"


def _word(algorithm: str) -> str:
    return algorithm.replace("_", " ")


def _words(algorithms: Any) -> list[str]:
    return [_word(algorithm) for algorithm in algorithms]


def _save(figure: Figure, file: Path) -> None:
    figure.savefig(file.with_suffix(".png"))
    figure.savefig(file.with_suffix(".svg"), metadata={"Date": None})
