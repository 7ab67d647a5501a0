"""Tidy tables: a row for each cell, and a row for each point of a training run that was evaluated.

Rows are in the order of the sweep file, whatever order the cells were run in, and hold nothing that depends
on this machine, so the same code always writes the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from experiments.study.cell import AllReduce, AnyCell, Result
from experiments.study.grid import SINGLE, Asked
from hcsim.files import write_whole
from hcsim.twin.effects import Effect, percentiles, relative_times

IDENTITY = (
    "study", "kind", "task", "strategy", "compressor", "algorithm", "link", "variant", "world", "seed",
    "size_bytes", "failure", "failures_per_hour", "failure_s", "target_loss",
)  # fmt: skip
MEASURED = (
    "batch", "steps", "step_s", "p10_s", "p90_s", "effects", "fastest_s", "slowest_s", "total_s", "closed_form_s",
    "step_sent_bytes", "payload_share", "diverged", "final_loss", "final_accuracy", "time_to_target_s", "samples_per_s",
    "speedup", "speedup_p10", "speedup_p90", "compute_s", "encode_s", "exchange_s", "lost_ranks", "scenario",
    "scenario_sha256", "trace_sha256", "parameters_sha256", "error",
)  # fmt: skip
_COMPARED = ("speedup", "speedup_p10", "speedup_p90")
CURVE = ("step", "time_s", "sent_bytes", "train_loss", "loss", "accuracy")

_WHOLE = ("world", "seed", "size_bytes", "batch", "steps", "step", "sent_bytes", "lost_ranks")
_NUMBERS = (
    "failures_per_hour", "failure_s", "target_loss", "step_s", "p10_s", "p90_s", "fastest_s", "slowest_s", "total_s",
    "closed_form_s", "step_sent_bytes", "payload_share", "final_loss", "final_accuracy", "time_to_target_s",
    "samples_per_s", "speedup", "speedup_p10", "speedup_p90", "compute_s", "encode_s", "exchange_s", "time_s",
    "train_loss", "loss", "accuracy",
)  # fmt: skip


def cell_table(asked: Sequence[Asked], results: Mapping[AnyCell, Result]) -> pd.DataFrame:
    """One row per cell and study; a cell that failed has an `error` and no figures."""
    rows = []
    for study, cell in asked:
        result = results[cell]
        row = _identity(study, cell) | {name: getattr(result, name) for name in MEASURED if name not in _COMPARED}
        rows.append(row | {"effects": effects_text(result.effects)})
    table = _typed(pd.DataFrame(rows, columns=[name for name in (*IDENTITY, *MEASURED) if name not in _COMPARED]))
    place = table.columns.get_loc("samples_per_s") + 1
    for number, (name, values) in enumerate(_speedups(table).items()):
        table.insert(place + number, name, values)
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


def effects_text(effects: Sequence[Effect]) -> str | None:
    """As JSON: the relative time with each figure at its faster and at its slower percentile."""
    by_figure = {each.figure: [round(each.faster, 6), round(each.slower, 6)] for each in effects}
    return json.dumps(by_figure, ensure_ascii=False) if by_figure else None


@cache
def effects_of(text: str) -> tuple[Effect, ...]:
    """What `effects_text` has written."""
    return tuple(Effect(figure, *ends) for figure, ends in json.loads(text).items())


def draws_of(row: Mapping[str, Any]) -> np.ndarray:
    """Draws of a row's time of a step, relative to it; those of rows that rest on the same figures belong together."""
    text = row["effects"]
    return relative_times(() if pd.isna(text) else effects_of(text), of=f"{row['scenario']} {row['strategy']}")


def _speedups(table: pd.DataFrame) -> pd.DataFrame:
    """By the time per step, which leaves out the opening of connections, relative to one machine that does the same
    steps alone. If Macs are slower than was thought, both take longer."""
    same = ["study", "task", "world", "batch"]
    alone = table[(table["strategy"] == SINGLE) & table["step_s"].notna()]
    means_s = alone.groupby(same)["step_s"].mean()
    draws = {key: draws_of(row) for key, row in zip(_keys(alone, same), alone.to_dict("records"), strict=True)}
    rows = []
    for key, row in zip(_keys(table, same), table.to_dict("records"), strict=True):
        if key not in draws or pd.isna(row["step_s"]):
            rows.append((None, None, None))
            continue
        speedup = means_s[key] / row["step_s"]
        low, high = percentiles(draws[key] / draws_of(row))
        rows.append((speedup, low * speedup, high * speedup))
    return pd.DataFrame(rows, columns=list(_COMPARED), dtype="Float64")


def _keys(table: pd.DataFrame, names: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(table[list(names)].itertuples(index=False, name=None))
