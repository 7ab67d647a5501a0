"""A figure shows unlike rows as unlike, or says that it cannot; what stands over it is true of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest

from experiments.figures import STUDIES, draw
from experiments.study.cell import Result
from experiments.study.grid import load_sweep
from tests.experiments.tiny import TINY, compressed, tables, training, words_of

pytestmark = pytest.mark.usefixtures("svg_alone")
OTHER = {"link": "10gbe", "world": 6, "task": "gpt2", "variant": "one-old", "algorithm": "tree", "target_loss": 0.3}
SHOWN = {
    "compression": (),
    "time_to_target": ("link", "task"),
    "crossover": ("link", "task", "world"),
    "scaling": ("link", "task", "world"),
    "stragglers": ("link", "variant"),
    "failures": (),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("study", "axis"), [(s, a) for s, shown in SHOWN.items() for a in OTHER if a not in shown])
def test_rows_that_differ_in_what_a_figure_does_not_show_are_not_averaged(
    study: str, axis: str, tmp_path: Path
) -> None:
    cell, result = TINY[study][-1]
    usual = {"target_loss": 0.2} if axis == "target_loss" else {}
    first = (msgspec.structs.replace(cell, **usual), result)
    other = (msgspec.structs.replace(cell, **{axis: OTHER[axis]}), result)
    problems = draw(*tables(study, [*TINY[study], first, other]), tmp_path)
    assert f"it does not show {axis}, of which there are several" in problems[study]
    assert str(OTHER[axis]) in problems[study]


def test_a_task_that_has_no_panel_is_not_left_out_in_silence(tmp_path: Path) -> None:
    rows = [*TINY["time_to_target"], training(task="gpt2")]
    assert "it shows digits" in draw(*tables("time_to_target", rows), tmp_path)["time_to_target"]


def test_a_formula_is_drawn_for_one_number_of_ports(tmp_path: Path) -> None:
    cell, result = TINY["allreduce"][-1]
    rows = [*TINY["allreduce"], (msgspec.structs.replace(cell, world=8), result)]
    assert (
        "does not show world, of which there are several: 4, 8"
        in draw(*tables("allreduce", rows), tmp_path)["allreduce"]
    )


def test_runs_that_no_column_tells_apart_are_not_averaged(tmp_path: Path) -> None:
    """The learning rate is not in the tables."""
    cell, result = TINY["failures"][-1]
    rows = [*TINY["failures"], (msgspec.structs.replace(cell, lr=0.5), msgspec.structs.replace(result, step_s=9.0))]
    assert "several runs of strategy ddp" in draw(*tables("failures", rows), tmp_path)["failures"]


def test_methods_with_unlike_batches_are_not_compared(tmp_path: Path) -> None:
    rows = [*TINY["stragglers"], training({"batch": 64}, strategy="diloco:8")]
    assert "does not show batch" in draw(*tables("stragglers", rows), tmp_path)["stragglers"]


def test_a_cell_that_two_grids_ask_for_counts_once(tmp_path: Path) -> None:
    assert draw(*tables("stragglers", TINY["stragglers"] * 2), tmp_path) == {"stragglers": ""}
    assert len(pd.read_csv(tmp_path / "stragglers.csv")) == len(TINY["stragglers"])


def test_a_line_goes_through_the_mean_of_the_seeds(tmp_path: Path) -> None:
    rows = [training({"step_s": 1.0}, strategy="single", link="none")]
    rows += [training({"step_s": step_s}, seed=seed) for seed, step_s in ((1, 0.25), (2, 0.75))]
    assert draw(*tables("scaling", rows), tmp_path) == {"scaling": ""}
    assert list(pd.read_csv(tmp_path / "scaling.csv")["speedup"]) == [2.0]


@pytest.mark.parametrize("study", ["scaling", "stragglers", "failures"])
def test_without_what_it_compares_with_there_is_no_figure(study: str, tmp_path: Path) -> None:
    usual: dict[str, Any] = {"failures_per_hour": 60.0, "failure_s": 10.0} if study == "failures" else {}
    problems = draw(*tables(study, [training(variant="one-old", **usual)]), tmp_path)
    assert problems == {study: "there is nothing to compare its rows with"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "words", "rate"),
    [
        ("pause", "random pauses of 5 s", "pauses per Mac and hour that it runs"),
        ("dropout", "random dropouts of 5 s", "dropouts per Mac and hour that it is reached"),
    ],
)
def test_the_figure_of_failures_says_what_failed_where(failure: str, words: str, rate: str, tmp_path: Path) -> None:
    usual: dict[str, Any] = {"task": "gpt2", "world": 6}
    rows = [training(**usual), training(**usual, failure=failure, failures_per_hour=60.0, failure_s=5.0)]
    assert draw(*tables("failures", rows), tmp_path) == {"failures": ""}
    assert words_of(tmp_path / "failures.svg", "GPT-2") == [f"GPT-2, 6 Macs: {words}"]
    assert words_of(tmp_path / "failures.svg", failure) == [rate] * 2


def test_where_nothing_fails_there_is_no_figure_of_failures(tmp_path: Path) -> None:
    assert draw(*tables("failures", [training()]), tmp_path) == {"failures": "nothing fails in any of its runs"}


@pytest.mark.slow
def test_titles_say_what_the_rows_are_of(tmp_path: Path) -> None:
    cell, result = compressed("none", 0.9, 1e6, 1)
    rows = [(msgspec.structs.replace(cell, task="convex", world=2), result)]
    assert draw(*tables("compression", rows), tmp_path) == {"compression": ""}
    assert words_of(tmp_path / "compression.svg", "convex, 2 Macs, 4 steps")
    rows = [training(task="gpt2", world=6)]
    assert draw(*tables("stragglers", rows), tmp_path) == {"stragglers": ""}
    assert words_of(tmp_path / "stragglers.svg", "GPT-2, 6 Macs")


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_shipped_sweeps_have_rows_that_their_figures_show(study: str, tmp_path: Path) -> None:
    """As far as the grids go: every cell comes to the same."""
    rows = []
    for _, cell in load_sweep(study, quick=True):
        result = Result(
            steps=4,
            step_s=1e-3,
            fastest_s=1e-3,
            slowest_s=1e-3,
            samples_per_s=9.0,
            batch=8 * cell.world,
            step_sent_bytes=1e6,
            payload_share=1.0,
            final_accuracy=0.9,
            closed_form_s=1e-3 if cell.link == "ideal" else None,
        )
        rows.append((cell, result))
    assert draw(*tables(study, rows), tmp_path) == {study: ""}


def test_a_network_that_is_no_switch_has_no_place_on_the_axis_of_switches(tmp_path: Path) -> None:
    """Stations share the air: no switch has a rate that equals it."""
    place = {"task": "transformer:1e6", "world": 4}
    rows = [training({"step_s": 1.0}, **place, strategy="single", link="none")]
    rows += [training({"step_s": step_s}, **place, link=link)
             for link, step_s in (("ethernet:100 Mb/s", 2.0), ("wifi6", 4.0))]  # fmt: skip
    assert draw(*tables("crossover", rows), tmp_path) == {"crossover": ""}
    tiles = pd.read_csv(tmp_path / "crossover.csv").set_index("link")
    assert tiles["rate_bps"].to_dict() == pytest.approx({"ethernet:100 Mb/s": 1e8, "wifi6": float("nan")}, nan_ok=True)
    assert words_of(tmp_path / "crossover.svg", "Wi-Fi 6") == ["Wi-Fi 6"] * 3


def test_where_a_cluster_loses_its_tile_says_by_how_much(tmp_path: Path) -> None:
    place = {"task": "transformer:1e6", "world": 4}
    rows = [training({"step_s": 1.0}, **place, strategy="single", link="none")]
    rows += [training({"step_s": 4.0}, **place, link="ethernet:1 Gb/s")]
    assert draw(*tables("crossover", rows), tmp_path) == {"crossover": ""}
    tile = pd.read_csv(tmp_path / "crossover.csv").iloc[0]
    assert (tile["fastest"], tile["fastest_cluster"], tile["cluster_speedup"]) == (
        "one Mac alone",
        "data parallel",
        0.25,
    )
    assert words_of(tmp_path / "crossover.svg", "0.25×") == ["0.25×"] * 3


def test_macs_that_crash_are_compared_with_a_cluster_that_does_not(tmp_path: Path) -> None:
    rows = [
        training({"samples_per_s": 128.0 * speed}, failure=failure, failures_per_hour=rate, failure_s=10.0)
        for failure, rate, speed in (
            ("pause", 0.0, 2.0),
            ("pause", 60.0, 1.0),
            ("crash", 0.0, 4.0),
            ("crash", 20.0, 1.0),
        )
    ]
    assert draw(*tables("failures", rows), tmp_path) == {"failures": ""}
    table = pd.read_csv(tmp_path / "failures.csv")
    kept = table[table["failures_per_hour"] > 0].set_index("failure")["of_healthy_steps_per_s"]
    assert kept.to_dict() == {"pause": 0.5, "crash": 0.25}
    words = words_of(tmp_path / "failures.svg", "20 crashes")
    assert words == ["20 crashes an hour leave data parallel 25 % of its speed"]
