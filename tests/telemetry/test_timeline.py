"""Timelines of runs: what Perfetto reads of them, and whether what they say of the run is so."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from hcsim import simulate_training
from hcsim.cli.app import app
from hcsim.config import Cluster, Crash, Pause, Scenario, Training
from hcsim.config.machine import Machine
from hcsim.launch.real import RealNode, train_in_cluster
from hcsim.node import ClusterJob
from hcsim.real.keys import new_secret, save_secret
from hcsim.telemetry.critical_path import path_gain
from hcsim.telemetry.timeline import Timeline, TimelineAnalysis
from hcsim.telemetry.trace import Event
from hcsim.units import PositiveSeconds, Seconds
from tests.conftest import free_addresses
from tests.switches import on_switch
from tests.telemetry.trace_processor import query

TWO_STEPS = Training(task="resnet50", steps=2)


def timeline_of(scenario: Scenario | str, training: Training, path: Path) -> TimelineAnalysis:
    with path.open("wb") as file:
        timeline = Timeline(file.write)
        simulate_training(scenario, training, sink=timeline)
        return timeline.end()


def with_speeds(gflops: Mapping[str, float]) -> Scenario:
    """Machines on a quick and ideal switch that differ in their speed alone."""
    scenario = on_switch(list(gflops), rate="40 Gb/s")
    machine = Machine(name="mac", peak_flops=1e9, memory_Bps=1e16, overhead_s=0.0)  # type: ignore[arg-type]
    nodes = (replace(each, machine=replace(machine, peak_flops=gflops[each.name] * 1e9)) for each in scenario.nodes)
    return replace(scenario, nodes=tuple(nodes))


def analysed(gflops: Mapping[str, float]) -> TimelineAnalysis:
    timeline = Timeline(lambda data: None)
    simulate_training(with_speeds(gflops), TWO_STEPS, sink=timeline).values()
    return timeline.end()


def length_ns(analysis: TimelineAnalysis) -> int:
    return analysis.path[-1].end_ns - analysis.path[0].begin_ns


def packets(path: Path) -> list[Any]:
    """The packets of a file, by Perfetto's own schema."""
    schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    return list(schema.Trace.FromString(path.read_bytes()).packet)


def test_a_timeline_does_not_change_the_run() -> None:
    events: list[Event] = []
    plain = simulate_training("two-macs-wifi", TWO_STEPS, sink=events.extend)
    watched = simulate_training("two-macs-wifi", TWO_STEPS, sink=Timeline(lambda data: None))
    assert watched.trace_sha256 == plain.trace_sha256 == simulate_training("two-macs-wifi", TWO_STEPS).trace_sha256
    assert {"begin", "end"}.isdisjoint(event[1] for event in events), "only a timeline gets intervals"


def test_the_parts_of_every_step_of_a_run_add_up_to_it(tmp_path: Path) -> None:
    analysis = timeline_of("eight-macs-2.5gbe", TWO_STEPS, tmp_path / "run.pftrace")
    assert Counter(step.machine for step in analysis.steps) == dict.fromkeys(
        ("studio", "mini-1", "mini-2", "mini-3", "mini-4", "mini-5", "old-1", "old-2"), 2
    )
    for step in analysis.steps:
        assert step.compute_ns + step.encode_ns + step.exposed_ns + step.idle_ns == step.whole_ns
        assert sum(spent_ns for _, spent_ns in step.causes) == step.exposed_ns + step.idle_ns
    computed_ns = {step.machine: step.compute_ns for step in analysis.steps}
    assert computed_ns["old-1"] == computed_ns["old-2"] > computed_ns["mini-1"] > computed_ns["studio"]


def test_the_critical_path_is_as_long_as_the_run() -> None:
    timeline = Timeline(lambda data: None)
    outcome = simulate_training("two-macs-wifi", TWO_STEPS, sink=timeline)
    analysis = timeline.end()
    assert analysis.path[0].begin_ns == min(step.begin_ns for step in analysis.steps)
    assert analysis.path[-1].end_ns == round(outcome.seconds * 1e9)
    assert all(before.end_ns == after.begin_ns for before, after in pairwise(analysis.path))


@given(slow=st.integers(300, 1000), times=st.integers(4, 9), faster=st.floats(1.1, 4.0))
@settings(max_examples=4, deadline=None, phases=(Phase.explicit, Phase.generate))
def test_what_is_off_the_path_may_be_faster_and_nothing_changes(slow: int, times: int, faster: float) -> None:
    speeds = {"slow": float(slow), "fast": float(slow * times)}
    before = analysed(speeds)
    assert path_gain(before.path, "compute", "fast", faster) == 0
    assert length_ns(analysed({**speeds, "fast": speeds["fast"] * faster})) == length_ns(before)
    after = analysed({**speeds, "slow": speeds["slow"] * 1.1})
    gained = 1 - length_ns(after) / length_ns(before)
    promised = path_gain(before.path, "compute", "slow", 1.1)
    assert gained <= promised + 1e-6
    assert gained == pytest.approx(promised, rel=0.02), "here nothing else becomes the longest path"


def test_a_fault_is_an_instant_and_the_reason_why_others_wait(tmp_path: Path) -> None:
    pause = Pause(at_s=Seconds(0.05), node="b", duration_s=PositiveSeconds(0.5))
    scenario = replace(with_speeds({"a": 5000.0, "b": 5000.0}), faults=(pause,))
    analysis = timeline_of(scenario, TWO_STEPS, tmp_path / "run.pftrace")
    paused, alone = (next(s for s in analysis.steps if s.machine == name) for name in "ba")
    assert paused.compute_ns == alone.compute_ns, "a machine that stands still does not compute"
    assert dict(paused.causes)["fault", "b"] == 500_000_000
    waits = dict(alone.causes)
    assert waits["fault", "b"] > 100_000_000
    assert 450_000_000 < waits["fault", "b"] + waits["compute", "b"] < 501_000_000, "b is half a second late"
    found = [packet for packet in packets(tmp_path / "run.pftrace") if packet.track_event.name == "fault: Pause"]
    assert [(packet.timestamp, packet.track_event.type) for packet in found] == [(50_000_000, 3)]


def test_what_a_crashed_machine_was_doing_does_not_go_on_to_the_end(tmp_path: Path) -> None:
    scenario = replace(with_speeds({"a": 1000.0, "b": 1000.0}), faults=(Crash(at_s=Seconds(1.0), node="b"),))
    timeline_of(scenario, replace(TWO_STEPS, steps=9), tmp_path / "run.pftrace")
    kinds = schema_tracks(packets(tmp_path / "run.pftrace"))
    assert max(end_ns for (machine, _), spans in kinds.items() if machine == "b" for _, end_ns in spans) <= 10**9


def schema_tracks(found: list[Any]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """The device's slices by machine and track, as begin and end."""
    processes, tracks, begun = {}, {}, {}
    slices: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for packet in found:
        about, event = packet.track_descriptor, packet.track_event
        if about.HasField("process"):
            processes[about.uuid] = about.process.process_name.partition(" ")[0]
        elif about.uuid:
            tracks[about.uuid] = processes[about.parent_uuid], about.name
        elif event.type == 1:
            assert event.track_uuid not in begun, "slices of a track overlap"
            begun[event.track_uuid] = packet.timestamp
        elif event.type == 2 and tracks[event.track_uuid][1] in ("compute", "encode"):
            span = begun.pop(event.track_uuid), packet.timestamp
            slices.setdefault(tracks[event.track_uuid], []).append(span)
        elif event.type == 2:
            del begun[event.track_uuid]
    assert not begun
    return slices


def test_perfettos_schema_reads_the_file_and_slices_of_a_track_do_not_overlap(tmp_path: Path) -> None:
    analysis = timeline_of("two-macs-wifi", TWO_STEPS, tmp_path / "run.pftrace")
    slices = schema_tracks(packets(tmp_path / "run.pftrace"))
    for machine in ("air-m2", "pro-m3"):
        steps = [step for step in analysis.steps if step.machine == machine]
        computed_ns = sum(end_ns - begin_ns for begin_ns, end_ns in slices[machine, "compute"])
        assert computed_ns == sum(step.compute_ns for step in steps)
        assert all(before[1] <= after[0] for before, after in pairwise(slices[machine, "compute"]))


@pytest.mark.slow
def test_perfetto_answers_queries_about_a_timeline(tmp_path: Path) -> None:
    analysis = timeline_of("two-macs-wifi", TWO_STEPS, tmp_path / "run.pftrace")
    of_process = "join process_track t on s.track_id = t.id join process using (upid)"
    computed, nested, flows, path, losses = query(
        tmp_path / "run.pftrace",
        f"select process.name as machine, sum(dur) as ns from slice s {of_process} where t.name = 'compute' group by 1",
        "select count(*) as n from slice s left join slice p on p.id = s.parent_id where p.dur > 0 or s.dur < 0",
        "select count(*) as n, sum(i.ts = o.ts + o.dur) as arrive from flow "
        "join slice o on o.id = slice_out join slice i on i.id = slice_in",
        f"select sum(dur) as ns from slice s {of_process} where process.name = 'critical path'",
        "select name from stats where value > 0 and severity in ('error', 'data_loss')",
    )
    expected: Counter[str] = Counter()
    for step in analysis.steps:
        expected[step.machine] += step.compute_ns
    assert {row["machine"].partition(" ")[0]: row["ns"] for row in computed} == expected
    assert nested == [{"n": 0}]
    assert flows[0]["n"] == flows[0]["arrive"] > 0
    assert path == [{"ns": length_ns(analysis)}]
    assert losses == []


def test_a_timeline_ends_after_so_many_steps_or_events() -> None:
    written = Counter[str]()

    def write(data: bytes) -> None:
        written["bytes"] += len(data)

    training = replace(TWO_STEPS, steps=6)
    short = Timeline(write, most_steps=3)
    simulate_training("two-macs-wifi", training, sink=short)
    analysis = short.end()
    assert analysis.is_cut
    assert {step.number for step in analysis.steps if step.machine == "air-m2"} >= {1, 2, 3}
    assert max(step.number for step in analysis.steps) == 4
    of_three = written["bytes"]
    tiny = Timeline(write, most_events=20)
    simulate_training("two-macs-wifi", training, sink=tiny)
    assert tiny.end().is_cut
    assert written["bytes"] - of_three < of_three / 5


def test_a_real_machine_has_a_timeline_of_what_it_did(tmp_path: Path) -> None:
    save_secret(tmp_path, "home", new_secret())
    control, data = (int(address.rpartition(":")[2]) for address in free_addresses(2))
    cluster = Cluster(nodes=1, discover=False, discovery_port=control, gradient_port=data)
    plan = ClusterJob(cluster, Training(task="convex", steps=4), 1)
    timeline = Timeline(lambda written: None)
    asyncio.run(train_in_cluster(RealNode(tmp_path, name="mac", hosts=("127.0.0.1",)), plan, sink=timeline))
    analysis = timeline.end()
    assert [(step.machine, step.number) for step in analysis.steps] == [("mac", n) for n in range(1, 5)]
    for step in analysis.steps:
        assert 0 < step.compute_ns < step.whole_ns
        assert step.compute_ns + step.encode_ns + step.exposed_ns + step.idle_ns == step.whole_ns
    assert analysis.path == (), "one machine does not see what the others do"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["run", *arguments])


def test_a_run_with_a_timeline_says_where_the_time_goes(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    done = run("two-macs-wifi", "--task", "gpt2", "--steps", "2", "--timeline", str(path), "--set", "bands=0")
    assert done.exit_code == 0, done.output
    assert "What limits it is the network" in done.output
    assert "computing on air-m2" in done.output
    assert max(len(line) for line in done.output.splitlines() if line.startswith(" ")) <= 80
    assert packets(path)


def test_a_job_of_one_operation_has_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "bench.pftrace"
    done = CliRunner().invoke(app, ["bench", "two-homes-wan", "--repeat", "2", "--timeline", str(path)])
    assert done.exit_code == 0, done.output
    names = [packet.track_event.name for packet in packets(path)]
    assert {"step 1", "step 2"} <= set(names)
    assert any(name.startswith("all_reduce") for name in names)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--timeline", "/no/folder/x"], "/no/folder/x: cannot be written: No such file or directory"),
        (["--set", "timeline_steps=3"], "--set timeline_steps: only with --timeline"),
        (["--timeline", "x", "--set", "timeline_steps=0"], "--set timeline_steps = 0"),
        (["--timeline", "same", "--trace", "same"], "--trace, --timeline: both are same"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_run(
    arguments: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("two-macs-wifi", "--task", "gpt2", *arguments)
    assert done.exit_code == 2
    assert error in done.output
    assert "trace sha256" not in done.output


def test_a_full_disk_ends_the_run_with_an_error_that_names_the_file() -> None:
    done = run("two-macs-wifi", "--task", "gpt2", "--steps", "2", "--timeline", "/dev/full")
    assert done.exit_code == 2
    assert "/dev/full: cannot be written: No space left on device" in done.output
