"""The breakdown of steps and the critical path, on activities that are written down or drawn at random."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from hcsim.telemetry.activity import (
    DeviceWork,
    FrameTransfer,
    MachineActivity,
    SpanNs,
    StepSpan,
    difference,
    intersection,
    length_ns,
    union,
)
from hcsim.telemetry.breakdown import breakdown
from hcsim.telemetry.critical_path import Causes, PathSegment, path_gain, shares

NAMES = ("a", "b", "c")
spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))), max_size=8)


def instants(of: list[SpanNs]) -> set[int]:
    """All nanoseconds of these spans, one by one."""
    return {at_ns for begin_ns, end_ns in of for at_ns in range(begin_ns, end_ns)}


@given(spans, spans)
def test_the_arithmetic_of_spans_is_that_of_sets_of_nanoseconds(one: list[SpanNs], other: list[SpanNs]) -> None:
    first, second = union(one), union(other)
    assert instants(first) == instants(one)
    assert length_ns(first) == len(instants(one))
    assert instants(difference(first, second)) == instants(one) - instants(other)
    assert instants(intersection(first, second)) == instants(one) & instants(other)


@st.composite
def activities(draw: st.DrawFn) -> dict[str, MachineActivity]:
    """Up to three machines that work, send and stand still at random."""
    machines = {name: MachineActivity() for name in NAMES[: draw(st.integers(1, 3))]}
    for activity in machines.values():
        at_ns = 0
        for pause_ns, lasts_ns, purpose in draw(
            st.lists(
                st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from(["compute", "encode"])), max_size=6
            )
        ):
            activity.work.append(DeviceWork(at_ns + pause_ns, at_ns + pause_ns + lasts_ns, purpose, ""))
            at_ns += pause_ns + lasts_ns
        activity.stopped = draw(spans)
        activity.operations = draw(spans)
        ends = sorted(draw(st.sets(st.integers(1, 70), max_size=4)))
        activity.steps = [
            StepSpan(begin, end, n) for n, (begin, end) in enumerate(zip([0, *ends], ends, strict=False), 1)
        ]
    pairs = [(one, other) for one in machines for other in machines if one != other]
    sent = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9), st.sampled_from(pairs or [("", "")])), max_size=12)
    transfers = [FrameTransfer(at, at + lasts, *pair) for at, lasts, pair in (draw(sent) if pairs else ())]
    for transfer in sorted(transfers, key=lambda each: each.end_ns):
        machines[transfer.source].departures.append(transfer)
        machines[transfer.target].arrivals.append(transfer)
    return machines


@given(activities())
@settings(max_examples=60)
def test_the_parts_of_a_step_add_up_to_the_nanosecond(machines: dict[str, MachineActivity]) -> None:
    steps = list(breakdown(machines))
    assert len(steps) == sum(len(activity.steps) for activity in machines.values())
    for step in steps:
        assert step.compute_ns + step.encode_ns + step.exposed_ns + step.idle_ns == step.whole_ns
        assert sum(spent_ns for _, spent_ns in step.causes) == step.exposed_ns + step.idle_ns
        assert min(step.compute_ns, step.encode_ns, step.exposed_ns, step.idle_ns, step.hidden_ns) >= 0
        assert step.hidden_ns <= step.compute_ns + step.encode_ns


@given(activities(), st.integers(0, 30), st.integers(31, 80))
@settings(max_examples=60)
def test_a_path_has_no_gap_and_is_as_long_as_the_run(
    machines: dict[str, MachineActivity], begin_ns: int, end_ns: int
) -> None:
    path = Causes(machines).path("a", (begin_ns, end_ns))
    assert (path[0].begin_ns, path[-1].end_ns) == (begin_ns, end_ns)
    assert all(before.end_ns == after.begin_ns for before, after in pairwise(path))
    assert shares(path).total() == end_ns - begin_ns
    for segment in path:
        if segment.kind in ("compute", "encode"):
            assert instants([segment[:2]]) <= instants(machines[segment.machine].worked(segment.kind))


def a_straggler() -> dict[str, MachineActivity]:
    """a computes for 3 ns and waits for what b sends when it has computed for 10 ns, which is paused from 2 to 5."""
    a, b = MachineActivity(), MachineActivity()
    a.work = [DeviceWork(0, 3, "compute", "backward"), DeviceWork(16, 18, "compute", "update")]
    b.work = [DeviceWork(0, 10, "compute", "backward"), DeviceWork(10, 12, "encode", "encode")]
    b.stopped = [(2, 5)]
    there, back = FrameTransfer(3, 4, "a", "b"), FrameTransfer(12, 15, "b", "a")
    a.departures, b.arrivals, b.departures, a.arrivals = [there], [there], [back], [back]
    a.steps = [StepSpan(0, 20, 1)]
    return {"a": a, "b": b}


def test_a_machine_is_idle_while_what_it_waits_for_is_computed_and_communicates_while_that_is_on_its_way() -> None:
    (step,) = breakdown(a_straggler())
    assert (step.compute_ns, step.encode_ns, step.exposed_ns, step.idle_ns, step.hidden_ns) == (5, 0, 3, 12, 0)
    assert dict(step.causes) == {
        ("compute", "b"): 5,
        ("encode", "b"): 2,
        ("fault", "b"): 2,
        ("network", "b → a"): 3,
        ("other", "a"): 3,  # from 15 to 16, and from 18 to the end
    }


def test_the_path_leads_through_the_straggler() -> None:
    path = Causes(a_straggler()).path("a", (0, 18))
    assert path == [
        PathSegment(0, 2, "compute", "b", name="backward"),
        PathSegment(2, 5, "fault", "b"),
        PathSegment(5, 10, "compute", "b", name="backward"),
        PathSegment(10, 12, "encode", "b", name="encode"),
        PathSegment(12, 15, "network", "b", "a"),
        PathSegment(15, 16, "other", "a"),
        PathSegment(16, 18, "compute", "a", name="update"),
    ]
    assert path_gain(path, "compute", "b", 2.0) == 3.5 / 18
    assert path_gain(path, "network", None, 1.5) == 3 * (1 - 1 / 1.5) / 18
    assert shares(path) == Counter(
        {("compute", "b", ""): 7, ("fault", "b", ""): 3, ("network", "b", "a"): 3, ("compute", "a", ""): 2}
    ) + Counter({("encode", "b", ""): 2, ("other", "a", ""): 1})


def test_where_no_frames_are_seen_communication_is_what_operations_take() -> None:
    activity = MachineActivity()
    activity.work = [DeviceWork(0, 4, "compute", "")]
    activity.operations = [(3, 8)]
    activity.steps = [StepSpan(0, 10, 1)]
    (step,) = breakdown({"a": activity})
    assert (step.compute_ns, step.exposed_ns, step.idle_ns, step.hidden_ns) == (4, 4, 2, 1)


def test_a_frame_that_waits_for_room_leads_back_to_its_receiver() -> None:
    a, b = MachineActivity(), MachineActivity()
    b.work = [DeviceWork(0, 10, "compute", "backward")]
    frame = FrameTransfer(2, 14, "a", "b", held_until_ns=10)
    a.departures, b.arrivals = [frame], [frame]
    path = Causes({"a": a, "b": b}).path("b", (0, 14))
    assert path == [PathSegment(0, 10, "compute", "b", name="backward"), PathSegment(10, 14, "network", "a", "b")]


def test_a_frame_that_found_its_receiver_idle_leads_back_to_its_sender() -> None:
    """It waited for room behind its own first part: the receiver had nothing to do since before it was sent."""
    a, b = MachineActivity(), MachineActivity()
    a.work = [DeviceWork(0, 6, "compute", "far")]
    b.work = [DeviceWork(0, 1, "compute", "near")]
    frame = FrameTransfer(6, 14, "a", "b", held_until_ns=10)
    a.departures, b.arrivals = [frame], [frame]
    path = Causes({"a": a, "b": b}).path("b", (0, 14))
    assert [(str(each), each.length_ns) for each in path] == [("a: compute far", 6), ("a → b", 8)]


def test_what_opens_a_connection_counts_only_where_it_explains_a_begin_to_the_nanosecond() -> None:
    a, b = MachineActivity(), MachineActivity()
    a.work = [DeviceWork(0, 5, "compute", "backward")]
    call, data = FrameTransfer(5, 8, "a", "b"), FrameTransfer(8, 12, "b", "a")
    b.signals, b.departures, a.arrivals = [call], [data], [data]
    causes = Causes({"a": a, "b": b})
    assert causes.path("a", (0, 12)) == [
        PathSegment(0, 5, "compute", "a", name="backward"),
        PathSegment(5, 8, "network", "a", "b"),
        PathSegment(8, 12, "network", "b", "a"),
    ]
    a.signals = [FrameTransfer(1, 9, "b", "a")]
    assert causes.path("a", (0, 10))[-1] == PathSegment(5, 10, "other", "a")
