"""Draws the errors of predicted step times, model by model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pandas as pd

from experiments.compute.predicted import Row
from experiments.figures.style import LOOKS, figure, save_data

FILE = "compute"
_TITLES = {"curves": "by the machine's curves", "own kernels": "by the model's own kernels"}


def draw(rows: list[Row], out: Path) -> None:
    """Write the table, and draw it: a panel for each device, number of threads and size of batches."""
    table = pd.DataFrame(msgspec.structs.asdict(row) for row in rows)
    save_data(table, out / f"{FILE}.csv")
    names = table["model"].str.partition(" ×")
    table["on"] += names[1].where(names[2] == "", ", batches × ") + names[2]
    table["model"] = names[0]
    panels = list(dict.fromkeys(table["on"]))
    models = list(dict.fromkeys(table["model"]))[::-1]
    with figure(3.6 * len(panels) + 1.2, 0.27 * len(models) + 1.2, out / FILE) as sheet:
        axes = sheet.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, on in zip(axes, panels, strict=True):
            here = table[table["on"] == on]
            measured = here.drop_duplicates("model").set_index("model")["spread"]
            places = [models.index(model) for model in measured.index]
            axis.barh(places, 200 * measured, left=-100 * measured, color="0.85", label="measured: p10 to p90")
            for look, (method, title) in zip(LOOKS, _TITLES.items(), strict=False):
                rows = here[here["method"] == method]
                if not rows.empty:
                    errors = 100 * rows["error"]
                    worst = errors.abs()
                    found = f"{title}: median {worst.median():.0f} %, p90 {worst.quantile(0.9):.0f} %"
                    axis.plot(errors, [models.index(model) for model in rows["model"]],
                              marker=look["marker"], color=look["color"], linestyle="none", label=found)  # fmt: skip
            axis.axvline(0, color="0.4", linewidth=0.8)
            axis.set(title=on, xlabel="predicted − measured step time, %")
            axis.set_ylim(-0.8, len(models) - 0.2)
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.07))
        axes[0].set_yticks(range(len(models)), models)
