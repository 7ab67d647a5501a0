"""The error of each prediction, by classes of cells: as rows, as a table and as a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import msgspec
import numpy as np
import pandas as pd
from rich import box
from rich.table import Table

from experiments.fidelity.cells import SHARED_KIND, AnyCell
from experiments.fidelity.churn import ChurnCell
from experiments.fidelity.computed import ComputedCell
from experiments.fidelity.loaded import LoadedCell
from experiments.fidelity.repeats import bound
from experiments.fidelity.worlds import Timing
from experiments.figures.style import LOOKS, figure, labelled, save_data, time_label

LOADED_TARGETS = {
    "collectives": (0.02, 0.08),
    "64 KB": (0.08, 0.20),
    "compute slept": (0.04, 0.10),
    "real compute": (0.08, 0.20),
}
TARGETS: dict[str, tuple[float | None, float | None]] = {
    "rings and halving, from 16 MB": (0.005, 0.02),
    "others from 16 MB": (0.02, 0.08),
    "1 MB": (0.02, 0.08),
    "asymmetric, from 1 MB": (0.02, 0.08),
    "two at once, from 1 MB": (0.02, 0.08),
    "4 to 64 KB": (0.08, 0.20),
    SHARED_KIND: (0.08, 0.20),
    "training step, compute slept": (0.04, 0.10),
    "training step, real compute": (0.08, 0.20),
    "unmodified script, probed": (0.08, 0.20),
    **{f"shared load, {what}{over}": target for what, target in LOADED_TARGETS.items() for over in ("", " over TLS")},
    "a member is lost: noticed": (0.15, None),
    "a member is lost: next step": (0.15, None),
}
"""The median and the 90th percentile of the error that a class is to have, in the order of the table."""


LabCell: TypeAlias = AnyCell | ChurnCell | ComputedCell | LoadedCell


class Row(msgspec.Struct, frozen=True):
    """A cell in both worlds."""

    cell: str
    kind: str
    calibrates: bool
    measured_s: float
    predicted_s: float
    p10_s: float
    """Of the prediction."""
    p90_s: float
    inside: bool
    """Whether the measured median lies between them."""
    error: float
    """Relative to the measured time."""
    spread: float
    """Half of the distance between the 10th and the 90th percentile of the repeats, relative to their median."""
    repeats: int
    algorithm: str
    predicted_algorithm: str
    same_bits: bool


class Class(msgspec.Struct, frozen=True):
    """A class of cells that did not calibrate."""

    kind: str
    cells: int
    median_error: float
    p90_error: float
    inside: float
    """The share of its cells whose measured median lies between p10 and p90 of the prediction."""
    spread: float
    """The median of the cells' spreads."""
    target_median: float | None
    target_p90: float | None
    runs_median: float | None = None
    """Of the errors that the median of many runs has in single ones: a bound of the median error."""
    runs_p90: float | None = None
    median_error_of_runs: float | None = None
    """Of the errors in the median of many runs."""
    p90_error_of_runs: float | None = None


def row(cell: LabCell, measured: Timing, predicted: Timing) -> Row:
    spread = (measured.p90_s - measured.p10_s) / 2 / measured.median_s
    return Row(
        cell.name, cell.kind, cell.calibrates, measured.median_s, predicted.median_s,
        predicted.p10_s, predicted.p90_s, predicted.p10_s <= measured.median_s <= predicted.p90_s,
        predicted.median_s / measured.median_s - 1, spread, measured.repeats, measured.algorithm, predicted.algorithm,
        measured.sha256 == predicted.sha256,
    )  # fmt: skip


def classes(rows: Sequence[Row], repeats: Mapping[str, Timing] = MappingProxyType({})) -> list[Class]:
    """The classes in the order of the targets, then the others; `repeats` are runs of their cells."""
    found = {}
    for kind in dict.fromkeys((*TARGETS, *(row.kind for row in rows))):
        mine = [row for row in rows if row.kind == kind and not row.calibrates]
        if mine:
            errors = [abs(row.error) for row in mine]
            spread = statistics.median(row.spread for row in mine)
            median, p90 = float(np.median(errors)), float(np.percentile(errors, 90))
            runs = bound({row.cell: row.predicted_s for row in mine}, repeats)
            found[kind] = Class(
                kind, len(mine), median, p90, share_inside(mine), spread, *TARGETS.get(kind, (None, None)),
                *((runs.median, runs.p90, runs.error_median, runs.error_p90) if runs is not None else ()),
            )  # fmt: skip
    return list(found.values())


def share_inside(rows: Sequence[Row]) -> float:
    """Return the share of cells that did not calibrate, and have a band, whose measured median lies in it; not a number
    if there are none."""
    inside = [row.inside for row in rows if not row.calibrates and row.p90_s > row.p10_s]
    return statistics.mean(inside) if inside else math.nan


def table(found: Sequence[Class], rows: Sequence[Row]) -> Table:
    """Errors by class."""
    calibrating = sum(row.calibrates for row in rows)
    title = f"error of the prediction; {calibrating} other cells calibrated it"
    if len(rows) > calibrating:
        title += f"; {share_inside(rows):.0%} of the measured medians are between p10 and p90"
    result = Table(title=title, box=box.SIMPLE_HEAD)
    headings = (
        "class", "cells", "median", "p90", "inside p10–p90", "spread of repeats", "of runs: median", "p90",
        "target: median", "p90",
    )  # fmt: skip
    for heading in headings:
        result.add_column(heading, justify="left" if heading == "class" else "right")
    for each in found:
        errors = (each.median_error, each.p90_error, each.inside)
        shares = (*errors, each.spread, each.runs_median, each.runs_p90, each.target_median, each.target_p90)
        result.add_row(
            each.kind,
            str(each.cells),
            *("" if share is None or math.isnan(share) else f"{share:.1%}" for share in shares),
        )
    return result


def save(rows: Sequence[Row], found: Sequence[Class], folder: Path) -> None:
    """Write the tables and the figure."""
    save_data(pd.DataFrame(map(msgspec.structs.asdict, found)), folder / "classes.csv")
    save_data(pd.DataFrame(map(msgspec.structs.asdict, rows)), folder / "fidelity.csv")
    _draw(rows, found, folder / "fidelity")


def _draw(rows: Sequence[Row], found: Sequence[Class], file: Path) -> None:
    with figure(9, 3.8, file) as sheet:
        times, errors = sheet.subplots(1, 2, width_ratios=(1, 1.25))
        for number, each in enumerate(found):
            mine = [row for row in rows if row.kind == each.kind and not row.calibrates]
            look = {key: LOOKS[number % len(LOOKS)][key] for key in ("color", "marker")}
            measured, predicted = [row.measured_s for row in mine], [row.predicted_s for row in mine]
            times.plot(measured, predicted, linestyle="", label=each.kind, **look)
            errors.plot([100 * abs(row.error) for row in mine], [number] * len(mine), linestyle="", alpha=0.45, **look)
            errors.plot([100 * each.median_error], [number], color="black", marker="|", markersize=16, linestyle="")
            if each.target_median is not None:
                errors.plot([100 * each.target_median], [number - 0.32], color="black", marker="v", linestyle="")
        low = 0.7 * min(min(row.measured_s, row.predicted_s) for row in rows)
        high = 1.4 * max(max(row.measured_s, row.predicted_s) for row in rows)
        times.plot([low, high], [low, high], color="0.6", linewidth=0.8, zorder=0)
        times.set(xscale="log", yscale="log", xlabel="measured", ylabel="predicted", title="Time")
        for axis in (times.xaxis, times.yaxis):
            labelled(axis, time_label)
        errors.set(
            xscale="symlog", xlabel="error of the prediction, %", title="Error (| median, ▼ its target)",
            yticks=range(len(found)), yticklabels=[each.kind for each in found],
        )  # fmt: skip
        errors.set_xlim(left=0)
        labelled(errors.xaxis, lambda value: f"{value:g}")
        errors.invert_yaxis()
