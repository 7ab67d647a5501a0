"""Tidy tables: a row for each cell, and a row for each point of a training run that was evaluated.

Rows are in the order of the sweep file, whatever order the cells were run in, and hold nothing that depends
on this machine, so the same code always writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from experiments.study.cell import AllReduce, AnyCell, Result
from experiments.study.grid import SINGLE, Asked
from hcsim.files import write_whole

IDENTITY = (
    "study", "kind", "task", "strategy", "compressor", "algorithm", "link", "variant", "world", "seed",
    "size_bytes", "failure", "failures_per_hour", "failure_s", "target_loss",
)  # fmt: skip
MEASURED = (
    "batch", "steps", "step_s", "fastest_s", "slowest_s", "total_s", "closed_form_s", "step_sent_bytes",
    "payload_share", "diverged", "final_loss", "final_accuracy", "time_to_target_s", "samples_per_s", "speedup",
    "compute_s", "encode_s", "exchange_s", "lost_ranks", "scenario", "scenario_sha256", "trace_sha256",
    "parameters_sha256", "error",
)  # fmt: skip
CURVE = ("step", "time_s", "sent_bytes", "train_loss", "loss", "accuracy")

_WHOLE = ("world", "seed", "size_bytes", "batch", "steps", "step", "sent_bytes", "lost_ranks")
_NUMBERS = (
    "failures_per_hour", "failure_s", "target_loss", "step_s", "fastest_s", "slowest_s", "total_s", "closed_form_s",
    "step_sent_bytes", "payload_share", "final_loss", "final_accuracy", "time_to_target_s", "samples_per_s", "speedup",
    "compute_s", "encode_s", "exchange_s", "time_s", "train_loss", "loss", "accuracy",
)  # fmt: skip


def cell_table(asked: Sequence[Asked], results: Mapping[AnyCell, Result]) -> pd.DataFrame:
    """One row per cell and study; a cell that failed has an `error` and no figures."""
    rows = []
    for study, cell in asked:
        result = results[cell]
        row = _identity(study, cell) | {name: getattr(result, name) for name in MEASURED if name != "speedup"}
        rows.append(row)
    table = _typed(pd.DataFrame(rows, columns=[name for name in (*IDENTITY, *MEASURED) if name != "speedup"]))
    table.insert(table.columns.get_loc("samples_per_s") + 1, "speedup", _speedups(table))
    return table


def curve_table(asked: Sequence[Asked], results: Mapping[AnyCell, Result]) -> pd.DataFrame:
    """One row per evaluated point."""
    rows = [
        _identity(study, cell) | {name: getattr(point, name) for name in CURVE}
        for study, cell in asked
        for point in results[cell].points
    ]
    return _typed(pd.DataFrame(rows, columns=[*IDENTITY, *CURVE]))


def write_table(table: pd.DataFrame, file: Path) -> None:
    """As CSV, for people, and as Parquet, with types; each is there with all of its bytes, or as it was before."""
    write_csv(table, file)
    write_whole(file.with_suffix(".parquet"), table.to_parquet(index=False))


def write_csv(table: pd.DataFrame, file: Path) -> None:
    """As CSV alone."""
    write_whole(file.with_suffix(".csv"), table.to_csv(index=False, lineterminator="\n").encode())


def _identity(study: str, cell: AnyCell) -> dict[str, Any]:
    fields = msgspec.structs.asdict(cell)
    kind = "all_reduce" if isinstance(cell, AllReduce) else "training"
    return {name: {"study": study, "kind": kind, **fields}.get(name) for name in IDENTITY}


def _typed(table: pd.DataFrame) -> pd.DataFrame:
    """Columns of one type each, whether or not they have values."""
    kinds = {name: _kind(name) for name in table}
    return table.astype(kinds)


def _kind(column: str) -> str:
    if column in _WHOLE:
        return "Int64"
    return "Float64" if column in _NUMBERS else "boolean" if column == "diverged" else "string"


def _speedups(table: pd.DataFrame) -> pd.Series:
    """By the time per step, which leaves out the opening of connections, relative to one machine that does the same
    steps alone."""
    same = ["study", "task", "world", "batch"]
    alone = table[(table["strategy"] == SINGLE) & table["step_s"].notna()]
    reference = alone.groupby(same)["step_s"].mean().rename("alone_s").reset_index()
    joined = table[[*same, "step_s"]].merge(reference, on=same, how="left")
    return (joined["alone_s"] / joined["step_s"]).astype("Float64").to_numpy()
