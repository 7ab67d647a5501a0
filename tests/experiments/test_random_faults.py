"""Random faults: the laws can fail, a schedule is what its seed says, and some seeds hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from experiments.faults.laws import LAWS, Evidence, violations
from experiments.faults.slopes import expected
from experiments.faults.trial import METHODS, Trial, run_trial, scenario_of
from msgspec.structs import replace
from typer.testing import CliRunner

from experiments.faults import __main__ as faults
from hcsim.config import FAULTS, Crash, parse_scenario, write_faults
from hcsim.config.schedule import DEFAULT_KINDS
from hcsim.training.run import Report
from hcsim.units import Seconds

SEEDS = (2, 13, 28, 57, 86, 775, 12178, 15450, 30097, 37387, 40148)
"""Some found a fault of ours once, and would find it again; the others are small, and bring in what those have not."""


def report(**changes: Any) -> Report:
    return replace(Report(0, 3, 1.0, 0, {}, (), "aa"), **changes)


def evidence(*further: tuple[Any, ...], **changes: Any) -> Evidence:
    """A run of two members and three steps in which all is well, and what a test adds to it."""
    events: list[tuple[Any, ...]] = []
    for host in ("a", "b"):
        events += [(0, "view", host, "L", 1, 0, "a,b"), (0, "follows", host, 1, 0, 2), (0, "synchronised", host, 1, 0)]
        for step in range(3):
            events += [(0, "voted", host, "L", 1, step, 77 + step), (0, "applied", host, 1, step + 1)]
    parameters = expected(5, [8, 8, 8]).astype(np.float32)
    given: dict[str, Any] = {
        "seed": 5, "steps": 3, "batch": 4, "exact": True, "events": [*events, *further],
        "results": {"a": report(), "b": report()}, "parameters": {"a": parameters, "b": parameters},
        "kept": {"a": True, "b": True},
    }  # fmt: skip
    return Evidence(**{**given, **changes})


def test_a_run_in_which_all_is_well_breaks_no_law():
    assert violations(evidence()) == []


@pytest.mark.parametrize(
    ("law", "found"),
    [
        ("one_view_per_epoch", evidence((1, "view", "b", "L", 1, 0, "b,a"))),
        ("one_view_per_epoch", evidence((1, "view", "b", "L", 2, 0, "a,b"))),
        ("epochs_never_go_back", evidence((1, "view", "b", "M", 1, 0, "b"))),
        ("replicas_are_alike", evidence((1, "voted", "b", "L", 1, 2, 78))),
        ("steps_are_applied_in_order", evidence((1, "applied", "b", 1, 3))),
        ("steps_are_applied_in_order", evidence((1, "applied", "b", 1, 5))),
        ("everybody_comes_to_the_end", evidence(results={"a": report(), "b": TimeoutError()})),
        ("everybody_comes_to_the_end", evidence(results={"a": report(), "b": report(sha256="bb")})),
        ("everybody_comes_to_the_end", evidence(results={"a": report(), "b": report(steps=2)})),
        ("nothing_is_lost_or_doubled", evidence(parameters={"a": expected(5, [8, 8])})),
        ("nothing_is_lost_or_doubled", evidence(parameters={"a": expected(5, [8, 8, 8, 8])})),
        ("nothing_is_lost_or_doubled", evidence(parameters={"a": expected(5, [8, 4, 8])})),
    ],
)
def test_each_law_finds_what_breaks_it(law, found):
    assert any(what.startswith(law) for what in violations(found))


def test_every_law_is_tried_above():
    tried = {mark.args[1][n][0] for mark in test_each_law_finds_what_breaks_it.pytestmark for n in range(12)}
    assert tried == {law.__name__ for law in LAWS}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_holds_every_law_and_is_the_same_run_twice(seed):
    first, second = run_trial(scenario_of(seed)), run_trial(scenario_of(seed))
    assert first.wrong == []
    assert first == second


def test_a_cluster_that_cannot_come_to_the_end_is_found_out():
    scenario = scenario_of(3)
    gone = tuple(Crash(Seconds(5), node.name) for node in scenario.nodes[1:])
    assert run_trial(replace(scenario, faults=gone)).wrong


def test_every_kind_of_fault_and_every_method_is_among_them():
    scenarios = [scenario_of(seed) for seed in SEEDS]
    assert {type(fault) for scenario in scenarios for fault in scenario.faults} == {
        FAULTS[kind] for kind in DEFAULT_KINDS
    }
    assert {(one.training.strategy, one.training.compressor) for one in scenarios} == {one[:2] for one in METHODS}


def test_what_is_printed_for_a_seed_is_a_schedule_that_can_be_read_back():
    scenario = scenario_of(17)
    nodes = ", ".join(f'{{ name = "{n.name}", machine = "M4", links = ["switch"] }}' for n in scenario.nodes)
    medium = '{ kind = "ethernet", name = "switch", rate = "1 Gb/s" }'
    faults = write_faults(scenario.faults).replace('"air"', '"switch"')
    assert parse_scenario(f'name = "t"\nnode = [{nodes}]\nmedium = [{medium}]\n{faults}', "t").faults


def test_what_was_found_before_an_interruption_is_told_and_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def trials(seeds: range, workers: int) -> Iterator[Trial]:
        for seed in (7, 9, 8):
            yield Trial(seed, 3, "ddp, none", 60.0, 4, {"crash": 1}, [], "aa")
        raise KeyboardInterrupt

    monkeypatch.setattr(faults, "_trials", trials)
    rows = tmp_path / "rows.json"
    with pytest.raises(typer.Exit) as caught:
        faults.main(seeds=100, first=7, json=str(rows))
    assert caught.value.exit_code == 130
    said = capsys.readouterr().out
    assert "every law held in every seed" in said
    assert "--first 10 --seeds 97" in said
    assert [row["seed"] for row in json.loads(rows.read_text())] == [7, 8, 9]


def test_what_was_found_is_told_even_if_its_file_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def trials(seeds: range, workers: int) -> Iterator[Trial]:
        yield Trial(1, 3, "ddp, none", 60.0, 4, {"crash": 1}, [], "aa")
        (tmp_path / "rows.json").mkdir()

    monkeypatch.setattr(faults, "_trials", trials)
    with pytest.raises(typer.Exit) as caught:
        faults.main(seeds=1, json=str(tmp_path / "rows.json"))
    assert caught.value.exit_code == 1
    said = capsys.readouterr()
    assert "every law held in every seed" in said.out
    assert "rows.json cannot be written: Is a directory" in said.err


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--seed 3 --json rows.json", "--json"),
        ("--seed 3 --seeds 5", "--seeds"),
        ("--seed 3 --first 5", "--first"),
        ("--seed 3 --workers 2", "--workers"),
        ("--figure --json rows.json", "--json"),
        ("--figure --seed 3", "--seed"),
        ("--figure --seeds 3", "--seeds"),
        ("--seeds 1 --out figures", "--out"),
        ("--seeds 1 --json .", "--json"),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(
    words: str, refused: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(faults.main)
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2
    assert f"Invalid value for {refused}: " in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_the_figure_is_made_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[bool] = []
    monkeypatch.setattr("experiments.faults.figure.draw", lambda out, workers: began.append(out.is_dir()))
    faults.main(figure=True, out=tmp_path / "new" / "folder")
    assert began == [True]
    (tmp_path / "file").touch()
    with pytest.raises(typer.BadParameter, match="file"):
        faults.main(figure=True, out=tmp_path / "file")
    assert began == [True]
