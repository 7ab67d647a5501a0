"""A recorded run looked at again: what the page says of its moments."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from hcsim import simulate_training
from hcsim.cli.app import app
from hcsim.cli.recorded import RecordedRun, fault_words, read_record
from hcsim.config import Cluster, Crash, Training
from hcsim.errors import ConfigError
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.telemetry.trace import Sink
from hcsim.units import Seconds
from tests.switches import on_switch

ABC = ("a", "b", "c")
STEPS = 30
TRAINING = Training(task="gpt2", strategy="local_sgd:4", steps=STEPS)


def recorded(crash_s: float) -> tuple[RecordedRun, float]:
    run = RecordedRun("test")
    cluster = Cluster(nodes=3, preset="low_latency")
    scenario = msgspec.structs.replace(on_switch(ABC, [Crash(Seconds(crash_s), "c")]), cluster=cluster)
    outcome = simulate_cluster(scenario, TRAINING, sink=run.listen)
    return run, outcome.seconds


@pytest.mark.slow
def test_any_moment_of_a_run_with_a_crash_can_be_looked_at() -> None:
    run, seconds = recorded(12.0)
    assert run.end_s == pytest.approx(seconds)
    before, after, end = run.at(11.0), run.at(20.0), run.at(run.end_s)
    assert [(node.name, node.state) for node in before.nodes] == [("a", "leads"), ("b", "member"), ("c", "member")]
    assert before.training is not None
    assert 0 < before.training.step < STEPS
    assert [(node.name, node.state) for node in after.nodes] == [("a", "leads"), ("b", "member"), ("c", "out")]
    assert after.nodes[2].why
    assert "out: c" in after.headline
    assert [event.text for event in after.events if event.at_s == 12.0] == ["fault: Crash, node c"]
    assert (end.state, end.headline) == ("done", f"Finished: {STEPS} steps")
    assert {node.name: node.state for node in end.nodes if node.name != "c"} == {"a": "done", "b": "done"}
    for at_s in (0.0, 5.0, 12.5):
        assert all(event.at_s <= at_s for event in run.at(at_s).events)


def test_fixed_ranks_are_all_there_from_the_beginning() -> None:
    run = RecordedRun("test")
    sink: Sink = run.listen
    simulate_training(on_switch(ABC), Training(task="slopes", steps=5), sink=sink)
    seen = run.at(run.end_s)
    assert [node.state for node in seen.nodes] == ["done"] * 3
    assert seen.training is not None
    assert [step for step, _ in seen.training.curve] == [1, 2, 3, 4, 5]
    assert seen.nodes[0].chip is not None


def test_a_record_is_no_part_of_the_digest_and_can_be_read_from_its_file(tmp_path: Path) -> None:
    plain = CliRunner().invoke(app, ["run", "two-macs-wifi", "--task", "slopes", "--steps", "4"])
    record = tmp_path / "run.jsonl"
    kept = CliRunner().invoke(app, ["run", "two-macs-wifi", "--task", "slopes", "--steps", "4", "--trace", str(record)])
    assert plain.exit_code == kept.exit_code == 0
    assert plain.stdout.splitlines()[-1] == kept.stdout.splitlines()[-1]
    run = read_record(record)
    seen = run.at(run.end_s)
    assert seen.title == "run.jsonl"
    assert seen.training is not None
    assert seen.training.step == 4


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "no machine trains in it"),
        ("[1,\"send\",\"a→b\",7]\n", "no machine trains in it"),
        ("{}\n", "line 1"),
        ("[0,\"machine\",\"a\"]\n", "line 1"),
        ("[0,\"view\",\"a\",\"x\",0,0,\"a#zz\"]\n", "line 1"),
        ("[0,\"progress\",\"a\",1]\n", "line 1"),
        ("[0,\"progress\",\"a\",[],0.5,1,1,0,0,0,0]\n", "line 1"),
        ("[0,\"progress\",\"a\",1,0.5,1,1,0,0,0,0,0,0,0,0]\n", "line 1"),
        ("[0,\"said\",\"a\"\n", "line 1"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_record_is_refused_with_its_line(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        read_record(file)
    result = CliRunner().invoke(app, ["dashboard", str(file)])
    assert result.exit_code == 2
    assert complaint in result.output


def test_what_cannot_be_served_is_told_before_anything_begins(tmp_path: Path) -> None:
    home = {"HCSIM_HOME": str(tmp_path)}
    for words, told in (
        (("dashboard",), "hcsim cluster"),
        (("dashboard", str(tmp_path / "none")), "cannot be read"),
        (("run", "two-macs-wifi", "--dashboard"), "only where something is learned"),
        (("run", "train.py", "--dashboard"), "only without a script"),
    ):
        result = CliRunner().invoke(app, [*words], env=home)
        assert result.exit_code == 2, result.output
        assert told in result.output


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("Pause(at_s=10.0, node='a', duration_s=20.0)", "fault: Pause, node a, for 20 s"),
        (
            "Partition(at_s=8.0, sides=(('a', 'b'), ('c',)), duration_s=20.0, oneway=False)",
            "fault: Partition, sides a, b | c, for 20 s",
        ),
        ("Restart(at_s=1.0, node='a', down_s=5.0, as_of_s=None)", "fault: Restart, node a, down 5 s"),
        ("something else", "fault: something else"),
    ],
)
def test_faults_in_words(fault: str, words: str) -> None:
    assert fault_words(fault) == words
