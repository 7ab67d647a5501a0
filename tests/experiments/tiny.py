"""A few rows for each study that has figures, made up."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.study.cell import AllReduce, AnyCell, Point, Result, Train
from experiments.study.grid import Asked
from experiments.study.tables import cell_table, curve_table

Row = tuple[AnyCell, Result]


def training(result: dict[str, Any] | None = None, **cell: Any) -> Row:
    usual = {"link": "1gbe", "world": 4, "task": "resnet50", "strategy": "ddp", "seed": 1, "steps": 4}
    figures = {"steps": 4, "step_s": 0.5, "samples_per_s": 256.0, "batch": 128, "step_sent_bytes": 1e6}
    return Train(**usual | cell), Result(**figures | (result or {}))


def reduced(link: str, size_bytes: int, formula_s: float | None) -> Row:
    cell = AllReduce(link, 4, "ring", size_bytes, 1)
    return cell, Result(steps=1, step_s=1e-3, fastest_s=1e-3, slowest_s=1e-3, closed_form_s=formula_s)


def compressed(compressor: str, accuracy: float, sent_bytes: float, seed: int) -> Row:
    share = sent_bytes / 1e6
    figures = {"final_accuracy": accuracy, "step_sent_bytes": sent_bytes, "payload_share": share, "encode_s": 0.1}
    return training(figures, task="digits", compressor=compressor, seed=seed)


def diverged(compressor: str) -> Row:
    return Train("1gbe", 4, "digits", "ddp", 1, 4, compressor), Result(diverged=True, batch=128)


def to_target(task: str, strategy: str, link: str, step_s: float) -> Row:
    points = tuple(Point(step, step * step_s, 0, 1.0, 0.4 / step, 0.9) for step in (1, 2, 3, 4))
    figures = {"step_s": step_s, "points": points if task == "digits" else (), "time_to_target_s": 2 * step_s}
    return training(figures, task=task, strategy=strategy, link=link, target_loss=0.2 if task == "digits" else None)


TINY: dict[str, list[Row]] = {
    "allreduce": [
        *(reduced("1gbe", size, None) for size in (1024, 1 << 20)),
        *(reduced("ideal", size, 1e-3) for size in (1024, 1 << 20)),
    ],
    "compression": [
        *(compressed("none", 0.95, 1e6, seed) for seed in (1, 2)),
        *(compressed("topk:0.01", 0.1, 5e4, seed) for seed in (1, 2, 3)),  # whose mean is above each of them
        *(compressed("topk:0.01+ef", 0.94, 5e4, seed) for seed in (1, 2)),
        diverged("randomk:0.1"),
    ],
    "time_to_target": [
        to_target(task, strategy, link, step_s)
        for task in ("digits", "resnet50")
        for strategy, link, step_s in (("single", "none", 1.0), ("ddp", "1gbe", 2.0), ("diloco:8", "wifi6", 0.7))
    ],
    "crossover": [
        training({"step_s": step_s}, task=f"transformer:{size}", strategy=strategy, link=link, world=world)
        for world in (4, 8)
        for size in ("1e6", "1e9")
        for strategy, link, step_s in (
            ("single", "none", 1.0), ("ddp", "ethernet:10 Mb/s", 9.0), ("ddp", "ethernet:1 Gb/s", 0.5),
            ("diloco:32", "ethernet:10 Mb/s", 0.7), ("diloco:32", "ethernet:1 Gb/s", 0.6),
        )
    ],
    "scaling": [
        training({"step_s": step_s}, strategy=strategy, link=link, world=world)
        for world in (2, 4)
        for strategy, link, step_s in (("single", "none", world * 1.0), ("ddp", "1gbe", 1.5))
    ],
    "stragglers": [
        training({"samples_per_s": rate}, variant=variant)
        for variant, rate in (("equal", 100.0), ("one-old", 60.0), ("one-on-wifi", 30.0))
    ],
    "failures": [
        training({"samples_per_s": 12.8 / (1 + rate)}, failures_per_hour=rate, failure_s=10.0, seed=seed)
        for rate in (0.0, 60.0)
        for seed in (1, 2, 3)
    ],
}  # fmt: skip


def words_of(svg: Path, begin: str) -> list[str]:
    """What stands in a figure and begins so: its letters are drawn, but a comment before them has them."""
    return [words for words in re.findall(r"<!-- (.*?) -->", svg.read_text()) if words.startswith(begin)]


def tables(study: str, rows: Iterable[Row]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Cells and curves, as a sweep writes them."""
    asked, results = [], {}
    for cell, result in rows:
        asked.append(Asked(study, cell))
        results[cell] = result
    return cell_table(asked, results), curve_table(asked, results)
