"""The sweep: one table however often it runs, and it agrees with the textbook where that holds."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from experiments.clusters import homes, ideal
from experiments.sweep import Effort, grid, measure, study, textbook

TINY = Effort((1 << 10, 1 << 20), repeats=1)


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as table:
        return list(csv.DictReader(table))


def test_two_runs_write_the_same_table_and_manifest(tmp_path: Path) -> None:
    places = [homes()[3], ideal(2, ("ring",))]
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        study(places, TINY, tmp_path / run, "the command")
    one, two = tmp_path / "one", tmp_path / "two"
    for name in ("allreduce.csv", "manifest.json", "allreduce_by_link.svg", "allreduce_closed_form.svg"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    for name in ("allreduce_by_link.png", "allreduce_closed_form.png"):
        assert (one / name).stat().st_size > 10_000


def test_every_point_has_a_row_and_a_digest(tmp_path: Path) -> None:
    places = [homes()[0], ideal(4, ("ring", "centralized"))]
    study(places, TINY, tmp_path, "the command")
    table = rows(tmp_path / "allreduce.csv")
    assert [(row["cluster"], row["algorithm"], int(row["size_bytes"])) for row in table] == [
        (cluster.scenario.name, algorithm, size) for cluster, algorithm, size in grid(places, TINY)
    ]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert len(manifest["trace_sha256"]) == len(table)
    assert len({*manifest["trace_sha256"].values()}) == len(table)
    assert [entry["name"] for entry in manifest["scenarios"]] == ["four-macs-1gbe", "4-ideal-ports"]


@pytest.mark.parametrize("size_bytes", [64 << 10, 1 << 20])
def test_the_simulator_agrees_with_the_textbook(size_bytes: int) -> None:
    for cluster in textbook():
        for algorithm in cluster.algorithms:
            point, _ = measure(cluster, algorithm, size_bytes, repeats=1)
            assert point.median_s == pytest.approx(point.closed_form_s, rel=0.01), algorithm


def test_hierarchy_spares_the_line_between_homes() -> None:
    two_homes = homes()[4]
    times_s = {name: measure(two_homes, name, 4 << 20, repeats=1)[0].median_s for name in two_homes.algorithms}
    assert min(times_s, key=lambda name: times_s[name]) == "hierarchical"
