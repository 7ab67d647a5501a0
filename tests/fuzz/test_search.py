"""The search: what seeds are, that they hold and repeat themselves, what is kept, and how a finding gets small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
from typer.testing import CliRunner

from hcsim.cli.app import app
from hcsim.config import FAULTS, Crash, Machine, NanGradient, Scenario, load_scenario, parse_scenario, write_scenario
from hcsim.errors import ConfigError
from hcsim.fuzz.coverage import Coverage
from hcsim.fuzz.generate import COMPRESSORS, LAUNCHES_OF_A_STEP, QUORUMS, STRATEGIES, scenario_of
from hcsim.fuzz.phases import phases_of
from hcsim.fuzz.search import TrialLog
from hcsim.fuzz.shrink import shrink
from hcsim.fuzz.trial import gather, run_trial, timeline, trial_of, write_finding
from hcsim.training.run import Run, Update

SEEDS = (6, 8, 13)
"""Quick ones."""
ROUGH = """
name = "rough"
seed = 4
medium = [{ kind = "ethernet", name = "switch", rate = "1 Gb/s" }]

[[node]]
name = "mac"
count = 3
machine = { name = "slow", peak = "1 TFLOPS", memory = "100 GB/s", overhead = "0.1 s" }
links = ["switch"]

[cluster]
nodes = 3
preset = "low_latency"
settle = "0.1 s"

[training]
task = "slopes"
steps = 12
batch = 4
timeout = "5 s"

[[fault]]
kind = "throttle"
at = "0.5 s"
node = "mac-1"
factor = 0.9
duration = "1 s"

[[fault]]
kind = "nan_gradient"
at = "2.5 s"
node = "mac-2"
nth = 2

[[fault]]
kind = "multicast_loss"
at = "3 s"
node = "mac-3"
share = 0.5
duration = "1 s"
"""


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: a step that was dropped once is applied twice."""
    carry_out, drop = Run.carry_out, Run.drop
    dropped: WeakKeyDictionary[Run, list[int]] = WeakKeyDictionary()

    async def carry_out_twice(self: Run, update: Update) -> None:
        await carry_out(self, update)
        if update.step in dropped.get(self, ()):
            await update.apply()

    def drop_and_note(self: Run) -> None:
        if self.pending is not None:
            dropped.setdefault(self, []).append(self.pending.step)
        drop(self)

    monkeypatch.setattr(Run, "carry_out", carry_out_twice)
    monkeypatch.setattr(Run, "drop", drop_and_note)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_holds_every_invariant(seed: int) -> None:
    assert trial_of(seed).breaches == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("file", sorted((Path(__file__).parent / "mended").glob("*.toml")), ids=lambda file: file.stem)
def test_what_was_found_once_and_mended_holds(file: Path) -> None:
    assert run_trial(load_scenario(file)).breaches == []


@pytest.mark.slow
def test_a_seed_is_the_same_run_in_another_process(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "hcsim", "fuzz", "--seeds", "1", "--first", "6", "--workers", "1"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([*command, "--json", str(file)], check=True, capture_output=True, env=environment)
    assert [row["trace_sha256"] for row in json.loads(file.read_text())["trials"]] == [trial_of(6).trace_sha256]


@pytest.mark.slow
def test_seeds_have_all_kinds_of_faults_and_of_trainings_and_some_that_last() -> None:
    scenarios = [scenario_of(seed) for seed in range(250)]
    faults = [fault for scenario in scenarios for fault in scenario.faults]
    assert {type(fault) for fault in faults} == {*FAULTS.values()}
    trainings = [scenario.training for scenario in scenarios if scenario.training is not None]
    assert {one.strategy for one in trainings} == {name for name, _ in STRATEGIES}
    assert {one.compressor for one in trainings} == {name for name, _ in COMPRESSORS}
    assert {one.cluster.quorum for one in scenarios if one.cluster is not None} == {name for name, _ in QUORUMS}
    assert {len(scenario.nodes) for scenario in scenarios} == set(range(1, 9))
    lasting = {type(fault) for fault in faults if fault.is_for_good or isinstance(fault, Crash)}
    assert len(lasting) > 12


def test_a_parameter_server_can_make_an_update_within_the_time_limit() -> None:
    """On the slowest machine: a launch for each of the pushes, beside those of its own worker's step."""
    for scenario in map(scenario_of, range(280, 300)):
        training = scenario.training
        assert training is not None
        if training.strategy.startswith("parameter_server"):
            slowest_s = max(node.machine.overhead_s for node in scenario.nodes if isinstance(node.machine, Machine))
            assert (LAUNCHES_OF_A_STEP + len(scenario.nodes)) * slowest_s < training.timeout_s


@pytest.mark.slow
def test_every_seed_leaves_a_core_and_can_be_written_down() -> None:
    for seed in range(200, 220):
        scenario = scenario_of(seed)
        assert phases_of(scenario).core
        assert parse_scenario(write_scenario(scenario), "again") == scenario


@pytest.mark.slow
def test_a_finding_gets_small_and_breaks_the_same(twice: None, tmp_path: Path) -> None:
    scenario = parse_scenario(ROUGH, "rough")
    assert "nothing_is_lost_or_doubled" in run_trial(scenario).broken
    shrunk = shrink(scenario, "nothing_is_lost_or_doubled")
    small = shrunk.scenario
    assert shrunk.is_minimal
    assert [type(fault) for fault in small.faults] == [NanGradient]
    assert len(small.nodes) == 1
    file = tmp_path / "finding.toml"
    file.write_text(write_finding(small, run_trial(small).breaches, "nothing_is_lost_or_doubled"))
    assert "FAULT nan_gradient" in file.read_text()
    assert "nothing_is_lost_or_doubled" in run_trial(load_scenario(file)).broken
    replayed = CliRunner().invoke(app, ["fuzz", "--replay", str(file)])
    assert replayed.exit_code == 1
    assert "broken: nothing_is_lost_or_doubled" in replayed.output


def test_shrinking_keeps_to_one_invariant_and_to_its_runs() -> None:
    runs: list[Scenario] = []

    def breaks(scenario: Scenario) -> bool:
        runs.append(scenario)
        return len(scenario.nodes) >= 2 and any(isinstance(fault, NanGradient) for fault in scenario.faults)

    small = shrink(parse_scenario(ROUGH, "rough"), "any", breaks=breaks)
    assert (len(small.scenario.nodes), len(small.scenario.faults), small.is_minimal) == (2, 1, True)
    assert small.scenario.training is not None
    assert small.scenario.training.steps == 1
    runs.clear()
    assert not shrink(parse_scenario(ROUGH, "rough"), "any", 5, breaks).is_minimal
    assert len(runs) == 5


def test_the_timeline_tells_who_did_what() -> None:
    lines = timeline(gather(parse_scenario(ROUGH, "rough"))[0])
    assert any('FAULT nan_gradient: node = "mac-2"' in line for line in lines)
    assert any("from here on nothing changes any more" in line for line in lines)
    assert lines[-1].endswith("mac-3: came to the end after 12 steps")


@pytest.mark.slow
def test_an_interrupted_search_goes_on_with_the_seeds_that_are_missing(tmp_path: Path) -> None:
    record = TrialLog(tmp_path / "state")
    trial = trial_of(6)
    record.add(trial)
    record.close()
    with (tmp_path / "state").open("ab") as file:
        file.write(b'{"seed": 13, "no')  # it was interrupted here
    again = TrialLog(tmp_path / "state")
    assert again.trials == {6: trial}
    again.add(trial_of(13))
    again.close()
    third = TrialLog(tmp_path / "state")
    assert list(third.trials) == [6, 13]
    third.close()


def test_a_record_of_something_else_is_refused_and_stays(tmp_path: Path) -> None:
    for text, why in (('{"generator":"0"}\n', "another version"), ("hello\n", "no record")):
        (tmp_path / "state").write_text(text)
        with pytest.raises(ConfigError, match=why):
            TrialLog(tmp_path / "state")
        assert (tmp_path / "state").read_text() == text


def test_coverage_says_when_it_stops_to_grow() -> None:
    coverage = Coverage()
    assert coverage.add(["crash × voting", "pause × forming"]) == ["crash × voting", "pause × forming"]
    assert coverage.add(["crash × voting"]) == []
    assert not coverage.is_stale
    for _ in range(150):
        coverage.add(["crash × voting"])
    assert coverage.is_stale
    assert coverage.count("crash", "voting") == 152


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--seed 3 --seeds 5", "--seeds"),
        ("--seed 3 --replay x.toml", "--replay"),
        ("--replay x.toml --json rows.json", "--json"),
        ("--seeds 1 --json .", "--json"),
        ("--replay x.toml", "x.toml"),
    ],
)
def test_what_means_nothing_is_refused_in_a_line(
    words: str, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["fuzz", *words.split()])
    assert result.exit_code == 2
    assert refused in result.output
    assert list(tmp_path.iterdir()) == []
