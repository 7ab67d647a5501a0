"""Timelines of real machines: their frames, their clocks, and files of several machines as one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hcsim.cli.recording import RecordingFiles, recording
from hcsim.collectives.select import Options
from hcsim.collectives.startup import assemble
from hcsim.config import Cluster, Training
from hcsim.launch.real import RealNode, real_group, train_in_cluster
from hcsim.node import ClusterJob
from hcsim.real.keys import new_secret, save_secret
from hcsim.runtime.timeline_clock import ClockSample, TimelineClock
from hcsim.telemetry.aligned import AlignedSink
from hcsim.telemetry.trace import Event
from tests.conftest import free_addresses
from tests.telemetry.trace_processor import query

delays = st.integers(0, 10**9)


@given(offset_ns=st.integers(0, 10**15), there_ns=delays, answering_ns=delays, back_ns=delays)
def test_the_clock_of_another_machine_is_known_to_half_of_the_round_trip(
    offset_ns: int, there_ns: int, answering_ns: int, back_ns: int
) -> None:
    received_ns = 7 + there_ns + offset_ns
    answered_ns = received_ns + answering_ns
    sample = ClockSample(7, received_ns, answered_ns, answered_ns - offset_ns + back_ns, 0)
    assert abs(sample.offset_ns - offset_ns) <= sample.bound_ns <= (there_ns + back_ns) / 2 + 1


def sample_of(offset_ns: int, trip_ns: int, asked_ns: int = 0, error_ns: int = 0) -> ClockSample:
    at_ns = asked_ns + trip_ns // 2 + offset_ns
    return ClockSample(asked_ns, at_ns, at_ns, asked_ns + trip_ns, error_ns)


def test_a_shorter_round_trip_gives_a_better_clock_and_a_longer_one_only_after_a_while() -> None:
    clock = TimelineClock(own_reference=9)
    assert clock.learn(5, sample_of(100, 400))
    assert not clock.learn(5, sample_of(300, 800))
    assert clock.learn(5, sample_of(120, 200))
    assert clock.offset_ns == 120
    assert clock.learn(5, sample_of(5000, 800, asked_ns=10**9)), "the clocks drift apart"
    assert clock.error_ns(2 * 10**9) > clock.error_ns(10**9 + 800)


def test_the_oldest_reference_is_everybodys() -> None:
    clock = TimelineClock(own_reference=9)
    assert clock.be_reference()
    assert clock.error_ns(10**12) == 0
    assert not clock.learn(10, sample_of(1, 2)), "a younger one"
    assert clock.learn(4, sample_of(50, 20))
    assert not clock.be_reference()
    assert not clock.learn(9, sample_of(70, 2)), "somebody who still follows us"
    assert clock.offset_ns == 50


def test_what_happens_before_the_clock_is_known_is_told_by_it_as_well() -> None:
    told: list[Event] = []
    sink = AlignedSink(told.extend)
    sink([(10, "begin", "a", 1, "compute", "", 0), (11, "begin", "b", 2, "compute", "", 0)])
    assert told == []
    sink([(20, "clock", "a", 1000, 5, 1), (30, "end", "a", 1)])
    assert [event[:3] for event in told] == [(1010, "begin", "a"), (1020, "clock", "a"), (1030, "end", "a")]
    sink.end()
    assert told[-1][:3] == (11, "begin", "b"), "by its own clock, as it knows no other"


def record_group(folder: Path, *, shared_memory: bool) -> list[Path]:
    """Carry out an operation on three real ranks, each of which writes its own file."""
    peers = free_addresses(3)
    paths = [folder / f"{rank}.pftrace" for rank in range(3)]

    async def member(rank: int) -> None:
        files = RecordingFiles(timeline=paths[rank])
        with recording(files, real=True) as record:
            options = Options(timeout_s=20.0)
            group_of = real_group(rank, peers, options=options, shared_memory=shared_memory, sink=record.sink)
            async with group_of as group:
                await assemble(group, 20.0, lambda missing: None)
                for _ in range(2):
                    await group.all_reduce(np.ones(2**18, np.float32), algorithm="ring")

    async def everybody() -> None:
        await asyncio.gather(*map(member, range(3)))

    asyncio.run(everybody())
    return paths


def links_of(path: Path) -> tuple[list[tuple[int, int]], list[tuple[int, int]], set[int], int]:
    """The frames that left and those that came, each as its number and its time; the tracks; the error of the clock."""
    schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    names: dict[int, str] = {}
    left, came, error_ns = [], [], 0
    for packet in schema.Trace.FromString(path.read_bytes()).packet:
        about, event = packet.track_descriptor, packet.track_event
        if about.uuid:
            assert about.uuid not in names
            names[about.uuid] = about.name
        elif event.name == "clock":
            error_ns = next(
                note.uint_value or note.int_value for note in event.debug_annotations if "error" in note.name
            )
        for flow in event.flow_ids:
            (left if names[event.track_uuid].startswith("→") else came).append((flow, packet.timestamp))
    return left, came, set(names), error_ns


@pytest.mark.parametrize("shared_memory", [True, False])
def test_every_frame_that_leaves_a_machine_comes_to_another_within_the_error_of_their_clocks(
    tmp_path: Path, shared_memory: bool
) -> None:
    parts = [links_of(path) for path in record_group(tmp_path, shared_memory=shared_memory)]
    left = [each for part in parts for each in part[0]]
    came = [each for part in parts for each in part[1]]
    assert len(left) == len({flow for flow, _ in left}) > 3 * 2 * 4
    assert {flow for flow, _ in came} == {flow for flow, _ in left}
    assert len(came) == len(left)
    errors_ns = sum(part[3] for part in parts)
    sent_ns = dict(left)
    assert all(at_ns >= sent_ns[flow] - errors_ns for flow, at_ns in came)
    assert sum(len(part[2]) for part in parts) == len(set.union(*(part[2] for part in parts))), "files may be joined"


@pytest.mark.slow
def test_perfetto_shows_the_files_of_several_machines_as_one(tmp_path: Path) -> None:
    whole = tmp_path / "all.pftrace"
    whole.write_bytes(b"".join(path.read_bytes() for path in record_group(tmp_path, shared_memory=True)))
    of_process = "from slice s join process_track t on s.track_id = t.id join process using (upid)"
    machines, sent, received, flows, losses = query(
        whole,
        f"select distinct process.name as name {of_process} order by 1",
        f"select count(*) as n {of_process} where t.name glob '→*'",
        f"select count(*) as n {of_process} where t.name glob '←*'",
        "select count(*) as n from flow",
        "select name from stats where value > 0 and severity in ('error', 'data_loss')",
    )
    assert [row["name"] for row in machines] == ["rank 0", "rank 1", "rank 2"]
    assert sent == received == flows
    assert losses == []


@pytest.mark.slow
def test_ranks_by_hand_write_timelines_with_the_links_between_them(tmp_path: Path) -> None:
    peers = ",".join(free_addresses(2))
    words = ["rank", "--peers", peers, "--set", "job.size=64 KiB", "--set", "job.repeat=2"]

    def started(rank: int) -> subprocess.Popen[str]:
        own = ["--rank", str(rank), "--timeline", str(tmp_path / f"{rank}.pftrace")]
        command = [sys.executable, "-m", "hcsim", *words, *own]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    for process in [started(rank) for rank in range(2)]:
        told, _ = process.communicate(timeout=60)
        assert process.returncode == 0, told
        assert "timeline in" in told
    (left, came, _, _), (others_left, others_came, _, _) = (links_of(tmp_path / f"{r}.pftrace") for r in range(2))
    assert {flow for flow, _ in left} == {flow for flow, _ in others_came} != set()
    assert {flow for flow, _ in came} == {flow for flow, _ in others_left} != set()


def test_members_of_a_cluster_write_one_timeline_if_they_run_in_one_process(tmp_path: Path) -> None:
    ports = [int(address.rpartition(":")[2]) for address in free_addresses(4)]
    path, trace = tmp_path / "run.pftrace", tmp_path / "run.jsonl"

    async def member(number: int, sink: Any) -> None:
        control, data = ports[2 * number : 2 * number + 2]
        peers = tuple(f"127.0.0.1:{port}" for port in ports[::2])
        cluster = Cluster(nodes=2, discover=False, discovery_port=control, gradient_port=data, peers=peers)
        plan = ClusterJob(cluster, Training(task="convex", steps=3), 1)
        home = tmp_path / str(number)
        node = RealNode(home, name="ab"[number], hosts=("127.0.0.1",))
        await train_in_cluster(node, plan, sink=sink)

    secret = new_secret()
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        save_secret(tmp_path / str(number), "home", secret)

    async def both(sink: Any) -> None:
        await asyncio.gather(member(0, sink), member(1, sink))

    with recording(RecordingFiles(timeline=path, trace=trace), real=True) as record:
        asyncio.run(both(record.sink))
    left, came, _, _ = links_of(path)
    assert {flow for flow, _ in left} == {flow for flow, _ in came} != set()
    clocks = [json.loads(line) for line in trace.read_text().splitlines() if '"clock"' in line]
    assert {clock[2] for clock in clocks} == {"a", "b"}
    assert len({clock[5] for clock in clocks}) == 1, "both follow the same clock"


def test_a_machine_without_a_timeline_neither_asks_nor_has_a_clock(tmp_path: Path) -> None:
    peers, path = free_addresses(2), tmp_path / "0.pftrace"

    async def member(rank: int, sink: Any) -> None:
        async with real_group(rank, peers, options=Options(timeout_s=20.0), sink=sink) as group:
            assert (group.host.timeline_clock is None) == (sink is None)
            await assemble(group, 20.0, lambda missing: None)
            await group.all_reduce(np.ones(2**10, np.float32))

    async def both(sink: Any) -> None:
        await asyncio.gather(member(0, None), member(1, sink))

    with recording(RecordingFiles(timeline=path), real=True) as record:
        asyncio.run(both(record.sink))
    left, came, _, _ = links_of(path)
    assert left
    assert came, "one that nobody can tell the time uses its own clock"
