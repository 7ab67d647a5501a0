"""Each figure is drawn from the tables alone, with a CSV of what it shows beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments.figures import STUDIES, draw
from experiments.figures.style import bytes_label, count_label, rate_label, size_label, time_label
from experiments.study.cell import AllReduce, AnyCell, Point, Result, Train
from experiments.study.grid import Asked
from experiments.study.tables import cell_table, curve_table

FILES = {
    "allreduce": ("allreduce_by_link", "allreduce_closed_form"),
    "compression": ("compression",),
    "time_to_target": ("time_to_target",),
    "crossover": ("crossover", "crossover_8_macs"),
    "scaling": ("scaling",),
    "stragglers": ("stragglers",),
    "failures": ("failures",),
}


def training(result: dict[str, Any] | None = None, **cell: Any) -> tuple[AnyCell, Result]:
    usual = {"link": "1gbe", "world": 4, "task": "resnet50", "strategy": "ddp", "seed": 1, "steps": 4}
    figures = {"steps": 4, "step_s": 0.5, "samples_per_s": 256.0, "batch": 128, "step_sent_bytes": 1e6}
    return Train(**usual | cell), Result(**figures | (result or {}))


def reduced(link: str, size_bytes: int, formula_s: float | None) -> tuple[AnyCell, Result]:
    cell = AllReduce(link, 4, "ring", size_bytes, 1)
    return cell, Result(steps=1, step_s=1e-3, fastest_s=1e-3, slowest_s=1e-3, closed_form_s=formula_s)


def compressed(compressor: str, accuracy: float, sent_bytes: float, seed: int) -> tuple[AnyCell, Result]:
    share = sent_bytes / 1e6
    figures = {"final_accuracy": accuracy, "step_sent_bytes": sent_bytes, "payload_share": share, "encode_s": 0.1}
    return training(figures, task="digits", compressor=compressor, seed=seed)


def to_target(task: str, strategy: str, link: str, step_s: float) -> tuple[AnyCell, Result]:
    points = tuple(Point(step, step * step_s, 0, 1.0, 0.4 / step, 0.9) for step in (1, 2, 3, 4))
    figures = {"step_s": step_s, "points": points if task == "digits" else (), "time_to_target_s": 2 * step_s}
    return training(figures, task=task, strategy=strategy, link=link, target_loss=0.2 if task == "digits" else None)


TINY: dict[str, list[tuple[AnyCell, Result]]] = {
    "allreduce": [
        *(reduced("1gbe", size, None) for size in (1024, 1 << 20)),
        *(reduced("ideal", size, 1e-3) for size in (1024, 1 << 20)),
    ],
    "compression": [
        *(compressed("none", 0.95, 1e6, seed) for seed in (1, 2)),
        *(compressed("topk:0.01", 0.1, 5e4, seed) for seed in (1, 2, 3)),  # whose mean is above each of them
        *(compressed("topk:0.01+ef", 0.94, 5e4, seed) for seed in (1, 2)),
        (Train("1gbe", 4, "digits", "ddp", 1, 4, "randomk:0.1"), Result(diverged=True, batch=64)),
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


def drawn(study: str, out: Path) -> dict[str, pd.DataFrame]:
    asked = [Asked(study, cell) for cell, _ in TINY[study]]
    results = dict(TINY[study])
    assert draw(cell_table(asked, results), curve_table(asked, results), out) == {study: ""}
    return {name: pd.read_csv(out / f"{name}.csv") for name in FILES[study]}


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_is_drawn_as_png_and_svg_with_its_data_beside_it(study: str, tmp_path: Path) -> None:
    for name, data in drawn(study, tmp_path).items():
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
        assert len(data)


def test_a_figure_of_the_same_table_is_the_same_file(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        drawn("scaling", tmp_path / folder)
    assert (tmp_path / "one/scaling.svg").read_bytes() == (tmp_path / "two/scaling.svg").read_bytes()


def test_compression_is_measured_against_what_is_sent_without_it(tmp_path: Path) -> None:
    table = drawn("compression", tmp_path)["compression"].set_index("compressor")
    assert table.loc["topk:0.01+ef", "times_fewer_bytes"] == pytest.approx(20)
    assert table.loc["topk:0.01+ef", "accuracy"] == pytest.approx(0.94)
    assert table.loc["randomk:0.1", "diverged"] == 1


def test_the_large_model_takes_the_small_ones_steps_at_its_own_pace(tmp_path: Path) -> None:
    table = drawn("time_to_target", tmp_path)["time_to_target"].set_index(["task", "method"])
    assert table.loc[("digits", "data parallel"), "steps_to_target"] == 2
    assert table.loc[("resnet50", "data parallel"), "time_to_target_s"] == pytest.approx(2 * 2.0)


def test_the_map_shows_the_fastest_and_one_mac_where_nothing_beats_it(tmp_path: Path) -> None:
    tiles = drawn("crossover", tmp_path)["crossover"]
    fastest = {(row.methods, row.link): row.fastest for row in tiles.itertuples()}
    plain, every = "data parallel, nothing compressed", "and with steps of one's own"
    assert fastest[plain, "ethernet:10 Mb/s"] == "one Mac alone"
    assert fastest[plain, "ethernet:1 Gb/s"] == "data parallel"
    assert fastest[every, "ethernet:10 Mb/s"] == "DiLoCo 32"
    assert fastest[every, "ethernet:1 Gb/s"] == "data parallel"


def test_labels_have_units_that_read_well() -> None:
    assert [size_label(1 << 10), size_label(1 << 25), size_label(12)] == ["1 KiB", "32 MiB", "12 B"]
    assert [bytes_label(2500), rate_label(2.5e9), count_label(1e10)] == ["2.5 kB", "2.5 Gb/s", "10B"]
    assert [time_label(t) for t in (2e-6, 0.25, 90, 7200)] == ["2 µs", "250 ms", "90 s", "7,200 s"]


def test_rows_that_a_figure_cannot_show_are_told_and_not_a_failure(tmp_path: Path) -> None:
    asked = [Asked("crossover", cell) for cell, _ in TINY["stragglers"]]
    results = dict(TINY["stragglers"])
    problems = draw(cell_table(asked, results), curve_table(asked, results), tmp_path)
    assert "there is no task" in problems["crossover"]
    assert not list(tmp_path.glob("*.png"))
