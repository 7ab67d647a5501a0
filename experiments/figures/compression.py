"""What compression saves on the wire and what it costs in accuracy, with and without error feedback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.ticker import NullLocator

from experiments.figures.hidden import check_shown, only
from experiments.figures.methods import compressor_words
from experiments.figures.style import LOOKS, bytes_label, figure, labelled, save_data, spread, takeaway, task_title

FAMILIES = {"topk": "top-k", "randomk": "random-k", "powersgd": "PowerSGD", "int8": "int8", "onebit": "one bit",
            "fp16": "fp16"}  # fmt: skip
FEEDBACK = "+ef"
_LEAST_MISSED = 0.1


def draw(cells: pd.DataFrame, curves: pd.DataFrame, out: Path) -> None:
    """Left: accuracy against how many times fewer bytes were sent. Right: bytes sent against bytes encoded."""
    check_shown(cells, "compressor")
    points = _summary(cells)
    if points["step_sent_bytes"].isna().all():
        raise ValueError("all of its runs diverged")
    save_data(points, out / "compression")
    steps = only(cells[~cells["diverged"]], "steps")
    place = f"{task_title(only(cells, 'task'))}, {only(cells, 'world')} Macs, {steps} steps"
    _sheet(points, place, out / "compression")


def _sheet(points: pd.DataFrame, place: str, file: Path) -> None:
    with figure(10.0, 4.4, file) as sheet:
        left, right = sheet.subplots(1, 2, width_ratios=(3, 2))
        _accuracy(left, points)
        left.set_title(f"{place}: mean and range of {points['seeds'].max()} seeds")
        _bytes(right, points)
        handles = [
            left.plot([], [], **_look(family, True) | {"linestyle": "-"}, label=words)[0]
            for family, words in FAMILIES.items()
            if (points["family"] == family).any()
        ]
        handles.append(left.plot([], [], color="0.3", marker="o", linestyle="-", label="with error feedback")[0])
        handles.append(left.plot([], [], color="0.3", marker="o", linestyle=":", mfc="w", label="without")[0])
        handles.append(left.plot([], [], color="0.4", linewidth=0.9, label="no compression")[0])
        left.legend(handles=handles, loc="lower left", fontsize=8)
        takeaway(sheet, _finding(points))


def _finding(points: pd.DataFrame) -> str:
    """What sends least without learning worse than any seed does without compression."""
    whole = points[(points["family"] != "none") & (points["diverged"] == 0)]
    dense = points[(points["compressor"] == "none") & (points["diverged"] == 0)]
    if dense.empty or whole["times_fewer_bytes"].isna().all():
        return "Accuracy and bytes of compressors"
    as_good = whole[whole["accuracy"] >= float(dense.iloc[0]["lowest_accuracy"])]
    if as_good.empty:
        return "Every compressor costs accuracy here"
    best = as_good.loc[as_good["times_fewer_bytes"].idxmax()]
    feedback = " with error feedback" if best["feedback"] else ""
    fewer = f"{best['times_fewer_bytes']:.0f} times fewer bytes"
    return f"{compressor_words(best['compressor'])}{feedback} sends {fewer}, and learns as well as without compression"


def _summary(cells: pd.DataFrame) -> pd.DataFrame:
    """Mean and spread over the seeds."""
    by = cells.groupby("compressor", sort=False)
    points = pd.DataFrame(
        {
            "seeds": by["seed"].nunique(),
            "diverged": by["diverged"].sum(),
            "steps": by["steps"].max(),
            "accuracy": by["final_accuracy"].mean(),
            "lowest_accuracy": by["final_accuracy"].min(),
            "highest_accuracy": by["final_accuracy"].max(),
            "step_sent_bytes": by["step_sent_bytes"].mean(),
            "payload_share": by["payload_share"].mean(),
            "step_s": by["step_s"].mean(),
            "p10_s": by["p10_s"].mean(),
            "p90_s": by["p90_s"].mean(),
            "encode_s": by["encode_s"].mean(),
        }
    ).reset_index()
    points.insert(1, "family", points["compressor"].str.removesuffix(FEEDBACK).str.partition(":")[0])
    points.insert(2, "feedback", points["compressor"].str.endswith(FEEDBACK))
    dense = points.loc[points["compressor"] == "none", "step_sent_bytes"].dropna()
    points["times_fewer_bytes"] = float(dense.iloc[0]) / points["step_sent_bytes"] if len(dense) else float("nan")
    return points


def _accuracy(axes: Any, points: pd.DataFrame) -> None:
    dense = points[(points["compressor"] == "none") & (points["diverged"] == 0)]
    if len(dense):
        base = dense.iloc[0]
        axes.axhline(_missed(base["accuracy"]), color="0.4", linewidth=0.9)
        axes.axhspan(_missed(base["highest_accuracy"]), _missed(base["lowest_accuracy"]), color="0.93", zorder=0)
    compared = points["times_fewer_bytes"].notna().any()
    across = "times_fewer_bytes" if compared else "step_sent_bytes"
    for (family, feedback), line in points[points["family"] != "none"].groupby(["family", "feedback"], sort=False):
        line = line[line["diverged"] == 0].sort_values(across)
        mean, most, least = (
            line[name].astype(float).map(_missed) for name in ("accuracy", "lowest_accuracy", "highest_accuracy")
        )
        axes.errorbar(
            line[across].astype(float), mean, yerr=spread(mean, least, most),
            elinewidth=0.7, capsize=1.5, **_look(family, feedback),
        )  # fmt: skip
    # What is missed, on a logarithmic axis: between 95 and 99 % lies as much as between 50 and 90 %.
    axes.set_yscale("log")
    axes.invert_yaxis()
    bottom, top = axes.get_ylim()
    if lost := _lost(points):
        axes.annotate(f"diverged {lost}", (0.99, 0.015), xycoords="axes fraction", ha="right", fontsize=8, color="0.3")
        bottom *= 1.4  # room for these words below the lowest bar
    axes.set_ylim(bottom, top)
    ticks = [missed for missed in (80, 50, 20, 10, 5, 3, 2, 1, 0.5, 0.2, 0.1) if top <= missed <= bottom]
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(ticks, [f"{100 - missed:g}" for missed in ticks])
    axes.set_xscale("log")
    if compared:
        labelled(axes.xaxis, lambda value: f"{value:g}×")
        axes.set_xlabel("fewer bytes on the wire than without compression (measured, headers included)")
    else:
        labelled(axes.xaxis, bytes_label)
        axes.invert_xaxis()  # what sends less is on the right in both
        axes.set_xlabel("sent per step by each Mac (measured, headers included)")
    axes.set_ylabel("held-out accuracy, %")


def _missed(accuracy: float) -> float:
    """Return the percentage of samples that are taken for something else; on a logarithmic axis none has no place."""
    return max(_LEAST_MISSED, 100 * (1 - accuracy))


def _lost(points: pd.DataFrame) -> str:
    """What diverged with any seed, by how it was compressed."""
    lost = points[points["diverged"] > 0]
    encoded = lost[lost["family"] != "none"]
    parts = ["without compression"] if len(encoded) < len(lost) else []
    for feedback, words in ((False, "without error feedback"), (True, "with error feedback")):
        names = [compressor_words(name) for name in encoded.loc[encoded["feedback"] == feedback, "compressor"]]
        parts += [f"{words}: {', '.join(names)}"] if names else []
    return "; ".join(parts)


def _bytes(axes: Any, points: pd.DataFrame) -> None:
    """Only one of each pair: error feedback sends the same number of bytes."""
    dense = points[(points["compressor"] == "none") & points["step_sent_bytes"].notna()]
    shown = points[points["feedback"] | ~points["family"].isin(points.loc[points["feedback"], "family"])]
    shown = shown[shown["step_sent_bytes"].notna()]
    for family, line in shown[shown["family"] != "none"].groupby("family", sort=False):
        line = line.sort_values("payload_share")
        axes.plot(line["payload_share"], line["step_sent_bytes"], **_look(family, True))
        last = line.iloc[0]
        axes.annotate(
            compressor_words(last["compressor"]), (last["payload_share"], last["step_sent_bytes"]), (5, -3),
            textcoords="offset points", fontsize=8, bbox={"facecolor": "w", "edgecolor": "none", "pad": 0.6},
        )  # fmt: skip
    if len(dense):
        size = float(dense.iloc[0]["step_sent_bytes"])
        shares = [float(shown["payload_share"].min()), 1.0]
        axes.plot(shares, [size * share for share in shares], color="0.5", linewidth=0.9)
        axes.annotate("in proportion", (shares[0], size * shares[0]), (2, -9), textcoords="offset points", fontsize=8,
                      color="0.4")  # fmt: skip
        axes.plot([1.0], [size], color="0.2", marker="o")
        axes.annotate("none", (1.0, size), (-4, 5), textcoords="offset points", fontsize=8, ha="right")
    axes.set_xscale("log")
    axes.set_yscale("log")
    labelled(axes.xaxis, lambda value: f"{100 * value:g} %")
    labelled(axes.yaxis, bytes_label)
    axes.set_xlabel("size of an encoded gradient, of float32")
    axes.set_ylabel("sent per step by each Mac")
    axes.set_title("Sparse gradients are gathered, the others summed")


def _look(family: str, feedback: bool) -> dict[str, Any]:
    look = LOOKS[list(FAMILIES).index(family)] if family in FAMILIES else LOOKS[-1]
    look = look | {"marker": "X"} if look["marker"] == "x" else look  # a cross of lines cannot be hollow
    if feedback:
        return look | {"linestyle": "-"}
    return look | {"linestyle": ":", "markerfacecolor": "white"}
