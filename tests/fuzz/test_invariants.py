"""What must always hold: each check finds what breaks it, and a run in which all is well breaks nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from hcsim.config import Cluster, Crash, Misbehave, Pause, Scenario, Training, parse_scenario
from hcsim.fuzz.evidence import Evidence, HostMessage, StepRecord
from hcsim.fuzz.invariants import INVARIANTS, breaches
from hcsim.fuzz.phases import phases_of
from hcsim.training.run import Report
from hcsim.training.tasks.convex import expected_slopes
from hcsim.units import PositiveSeconds, Seconds
from hcsim.virtual.world import Usage


def report(**changes: Any) -> Report:
    return replace(Report(0, 3, 1.0, 0, {}, (), "aa"), **changes)


def home(*faults: Any) -> Scenario:
    scenario = parse_scenario(
        """
        name = "t"
        seed = 5
        medium = [{ kind = "ethernet", name = "switch", rate = "1 Gb/s" }]
        node = [
            { name = "a", machine = "M4", links = ["switch"] },
            { name = "b", machine = "M4", links = ["switch"] },
            { name = "c", machine = "M4", links = ["switch"] },
        ]
        """,
        "t",
    )
    training = Training(task="slopes", steps=3, batch=4, timeout_s=PositiveSeconds(5))
    return replace(scenario, training=training, cluster=Cluster(nodes=3, preset="low_latency"), faults=faults)


def evidence(*further: tuple[Any, ...], **changes: Any) -> Evidence:
    """A run of two members and three steps in which all is well, and what a test adds to it."""
    events: list[tuple[Any, ...]] = []
    for host in ("a", "b", "c"):
        events += [(0, "view", host, "L", 1, 0, "a#1,b#2,c#3"), (0, "follows", host, 1, 0, 3)]
        events += [(0, "synchronised", host, 1, 0, -1)]
        for step in range(3):
            events += [(0, "voted", host, "L", 1, step, 77 + step), (0, "applied", host, 1, step + 1)]
    parameters = expected_slopes(5, [12, 12, 12]).astype(np.float32)
    scenario = changes.pop("scenario", home())
    given: dict[str, Any] = {
        "scenario": scenario, "phases": phases_of(scenario), "events": [*events, *further],
        "said": [HostMessage(0.0, host, "view 1: a, b, c (b, c joined)") for host in "abc"],
        "steps": [StepRecord(1.0 + step, "a", step) for step in (1, 2, 3)],
        "results": {name: report() for name in "abc"}, "parameters": {"a": parameters, "b": parameters},
        "usage": {"a": Usage(6, 60, 4096)}, "limit_s": 500.0,
    }  # fmt: skip
    return Evidence(**{**given, **changes})


def results(**changed: object) -> dict[str, object]:
    return {**dict.fromkeys("abc", report()), **changed}


def said(*texts: str) -> list[HostMessage]:
    return [HostMessage(0.0, "a", "view 1: a, b, c (b, c joined)"), *(HostMessage(1.0, "a", text) for text in texts)]


NEXT = ((1, "view", "a", "L", 2, 1, "a#1,b#2"),)
BROKEN: list[tuple[str, Evidence]] = [
    ("one_view_per_epoch", evidence((1, "view", "b", "L", 1, 0, "b#2,a#1"))),
    ("one_view_per_epoch", evidence((1, "view", "b", "L", 2, 0, "a#1,b#2"))),
    ("epochs_never_go_back", evidence((1, "view", "b", "M", 1, 0, "b#2"))),
    ("replicas_are_alike", evidence((1, "voted", "b", "L", 1, 2, 78))),
    ("steps_are_applied_in_order", evidence((1, "applied", "b", 1, 3))),
    ("steps_are_applied_in_order", evidence((1, "applied", "b", 1, 5))),
    ("nothing_is_lost_or_doubled", evidence(parameters={"a": expected_slopes(5, [12, 12])})),
    ("nothing_is_lost_or_doubled", evidence(parameters={"a": expected_slopes(5, [12, 12, 12, 12])})),
    ("nothing_is_lost_or_doubled", evidence(parameters={"a": expected_slopes(5, [12, 8, 12])})),
    ("nothing_is_lost_or_doubled", evidence(parameters={"a": np.full(120, np.nan)})),
    ("errors_are_ours", evidence(results=results(b=KeyError("b")))),
    ("errors_are_ours", evidence(lost=["a task failed: KeyError('b')"])),
    ("views_name_a_machine", evidence(said=said("view 2: a, b, c (recv #5 took longer than 10 s)"))),
    ("departures_are_named", evidence(*NEXT, said=said("view 2: a, b (b was slow)"))),
    (
        "the_innocent_stay",
        evidence(scenario=home(Pause(Seconds(1), "b")), said=said("view 2: a, b (c is left out: it was not reached)")),
    ),
    ("descriptors_are_bounded", evidence(usage={"a": Usage(descriptors=200)})),
    ("tasks_are_bounded", evidence(usage={"a": Usage(tasks=2000)})),
    ("buffers_are_bounded", evidence(usage={"a": Usage(buffered_bytes=1 << 26)})),
    ("lines_are_bounded", evidence(said=said(*(f"view {number}: a (a is alone)" for number in range(200))))),
    ("the_core_makes_progress", evidence(steps=[StepRecord(1.0, "a", 1)])),
    ("the_core_makes_progress", evidence(steps=[StepRecord(1.0, "a", 1), StepRecord(400.0, "a", 3)])),
    (
        "the_departed_are_not_waited_for",
        evidence(
            (21_000_000_000, "view failed", "a", 1, "all_gather #0 took longer than 20 s: opening a link to rank 1"),
            said=said("b has gone: it has finished or left"),
        ),
    ),
    ("the_core_comes_to_the_end", evidence(results=results(b=TimeoutError()))),
    ("the_core_comes_to_the_end", evidence(results=results(b=report(sha256="bb")))),
    ("the_core_comes_to_the_end", evidence(results=results(b=report(steps=2)))),
]


def test_a_run_in_which_all_is_well_breaks_nothing() -> None:
    assert breaches(evidence()) == []


@pytest.mark.parametrize(("invariant", "found"), BROKEN)
def test_each_invariant_finds_what_breaks_it(invariant: str, found: Evidence) -> None:
    assert invariant in [breach.invariant for breach in breaches(found)]


def test_every_invariant_is_tried_above() -> None:
    assert {invariant for invariant, _ in BROKEN} == {check.__name__ for check in INVARIANTS}


@pytest.mark.parametrize("goes_on", ["thaw", "unhang"])
def test_a_machine_that_was_held_has_not_waited_for_the_departed(goes_on: str) -> None:
    late = (21_000_000_000, "view failed", "a", 1, "all_gather #0 took longer than 20 s: opening a link to rank 1")
    gone = said("b has gone: it has finished or left")
    broken = [
        [
            breach.invariant
            for breach in breaches(evidence((at_s * 1_000_000_000, "fault", goes_on, "a"), late, said=gone))
        ]
        for at_s in (2, 20)
    ]
    assert broken == [["the_departed_are_not_waited_for"], []]


def test_a_machine_that_was_started_anew_is_told_nothing_of_those_in_its_view_before() -> None:
    anew = (500_000_000, "fault", "start", "a 2")
    follows = (1_000_000_000, "view", "a", "L", 2, 1, "a#3")
    unnamed = said("view 2: a (a is alone)")
    assert "departures_are_named" in [breach.invariant for breach in breaches(evidence(follows, said=unnamed))]
    assert breaches(evidence(anew, follows, said=unnamed)) == []


def test_what_is_excused_need_not_come_to_the_end() -> None:
    assert breaches(evidence(excused="too few", results={"a": TimeoutError()}, steps=[])) == []


def test_a_sick_machine_need_not_come_to_the_end() -> None:
    scenario = home(Crash(Seconds(1), "c"))
    gone = evidence(scenario=scenario, results={"a": report(), "b": report(), "c": TimeoutError()})
    assert breaches(gone) == []
    others = evidence(scenario=scenario, results={"a": report(), "b": TimeoutError(), "c": TimeoutError()})
    assert [breach.invariant for breach in breaches(others)] == ["the_core_comes_to_the_end"]


def test_one_that_was_left_out_just_before_the_end_gets_the_final_model_too() -> None:
    texts = said("view 2: a, b (c is left out: c sent a frame of another length)")
    late = evidence(*NEXT, said=texts, results=results(c=TimeoutError()))
    assert [breach.invariant for breach in breaches(late)] == ["the_core_comes_to_the_end"]


@pytest.mark.parametrize(
    ("quorum", "faults", "ended_s", "broken"),
    [
        ("any", (Pause(Seconds(1), "a", PositiveSeconds(0.1)),), 200.0, True),
        ("any", (Pause(Seconds(199), "a", PositiveSeconds(0.1)),), 200.0, False),
        ("any", (Pause(Seconds(1), "c"),), 200.0, False),
        ("tiebreak", (Pause(Seconds(199), "a", PositiveSeconds(0.1)),), 200.0, True),
    ],
    ids=["well for long", "before all was well", "with a sick machine", "by another rule"],
)
def test_only_where_any_side_may_go_on_may_those_out_of_sight_end_apart(
    quorum: str, faults: tuple[Any, ...], ended_s: float, broken: bool
) -> None:
    scenario = replace(home(*faults), cluster=Cluster(nodes=3, preset="low_latency", quorum=quorum))  # type: ignore[arg-type]
    left = [(ended_s, name) for name in "abc"]
    found = breaches(evidence(scenario=scenario, results=results(b=report(sha256="bb")), left=left))
    assert ("the_core_comes_to_the_end" in [breach.invariant for breach in found]) == broken


@pytest.mark.parametrize(
    ("lineage", "fault", "broken"),
    [
        ("M", Pause(Seconds(1), "c"), False),
        ("L", Pause(Seconds(1), "c"), True),
        ("M", Pause(Seconds(1), "c", PositiveSeconds(0.1)), True),
    ],
    ids=["asks members of which one is sick", "is one of them", "asks members that are well"],
)
def test_one_that_was_never_admitted_may_end_apart_if_it_cannot_work_with_a_sick_member(
    lineage: str, fault: Pause, broken: bool
) -> None:
    alone = (1, "view", "b", lineage, 2, 1, "b#2")
    found = breaches(evidence(alone, scenario=home(fault), results=results(b=report(sha256="bb"))))
    assert ("the_core_comes_to_the_end" in [breach.invariant for breach in found]) == broken


@pytest.mark.parametrize(("how", "broken"), [("lie", []), ("noise", ["lines_are_bounded"])])
def test_who_lies_about_views_makes_as_many_messages_about_them(how: str, broken: list[str]) -> None:
    lines = said(*(f"view {number}: a, b, c (c joined)" for number in range(2, 200)))
    liar = Misbehave(Seconds(1), "c", how, duration_s=PositiveSeconds(1))  # type: ignore[arg-type]
    found = breaches(evidence(scenario=home(liar), said=lines))
    assert [breach.invariant for breach in found] == broken
    flood = said(*(f"mac-{number} was not reached" for number in range(200)))
    found = breaches(evidence(scenario=home(liar), said=flood))
    assert [breach.invariant for breach in found] == ["lines_are_bounded"]


def goes_back(*forgets: tuple[Any, ...]) -> Evidence:
    """One member begins anew alone; then two go on from what was done before that."""
    return evidence(
        (1, "fault", "start", "a 2"), (1, "fault", "start", "b 2"),
        (1, "view", "a", "L", 2, 1, "a#4"), (1, "follows", "a", 2, 0, 1),
        (1, "synchronised", "a", 2, 0, -1), (1, "applied", "a", 2, 1), *forgets,
        (2, "view", "a", "L", 3, 2, "a#5,b#6"), (2, "follows", "a", 3, 0, 2),
        (2, "synchronised", "a", 3, 2, 1), (2, "applied", "a", 3, 3),
        parameters={"a": expected_slopes(5, [12, 12, 8])},
    )  # fmt: skip


def test_what_was_begun_anew_counts_while_a_member_has_it_in_memory() -> None:
    assert breaches(goes_back((2, "fault", "start", "a 3"))) == []
    assert [breach.invariant for breach in breaches(goes_back())] == ["nothing_is_lost_or_doubled"]


def test_a_step_counts_that_was_taken_over_from_another() -> None:
    late = evidence((3_000_000_000, "synchronised", "a", 2, 3, 1), steps=[StepRecord(1.0, "a", 1)])
    assert "the_core_makes_progress" not in [breach.invariant for breach in breaches(late)]
