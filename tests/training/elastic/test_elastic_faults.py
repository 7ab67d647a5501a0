"""Members crash, pause and are cut off at awkward moments: what the others learn is what they would have learned if the
same members had gone at the same steps by agreement."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hcsim.config import AnyFault, Crash, Partition, Pause, Reset, Training, load_scenario
from hcsim.selftest.script import ScriptedOutcome, train, without_faults
from hcsim.training.run import Report
from hcsim.units import PositiveSeconds, Seconds
from tests.switches import on_switch

SWITCH = on_switch("abcde", rate="10 Mb/s", latency="0.5 ms")
"""A step takes about 20 ms, most of it in the reduction; the vote takes 3 ms."""
HOMES = load_scenario("two-homes-wan")
CONVEX = Training(task="convex", steps=6, evaluate_every=6, timeout_s=PositiveSeconds(0.5))
ABCD = tuple("abcd")


@cache
def reference(key: tuple[tuple[int, tuple[str, ...]], ...], chosen: Training) -> str:
    (_, first), *plan = key
    return train(SWITCH, chosen, first=first, plan=plan).sha256()


def check(faulty: ScriptedOutcome, chosen: Training) -> None:
    key = tuple((step, tuple(names)) for step, names in faulty.plan())
    assert faulty.sha256() == reference(key, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("compressor", ["none", "topk:0.05+ef", "int8+ef", "powersgd:2+ef"])
def test_a_crash_at_any_moment_of_a_step_changes_only_who_takes_part(compressor: str) -> None:
    """In the reduction, in the vote, and between the vote and the update: each member's turn comes."""
    chosen = replace(CONVEX, compressor=compressor)
    plans = set()
    for number in range(10):
        crash = Crash(at_s=Seconds(0.004 + 0.0028 * number), node="abcd"[number % 4], clean=number % 3 > 0)
        faulty = train(SWITCH, chosen, first=ABCD, faults=[crash])
        check(faulty, chosen)
        plans.add(str(faulty.plan()))
    assert len(plans) > 2


@pytest.mark.slow
@settings(max_examples=25, derandomize=True)
@given(
    times=st.lists(st.floats(0.0, 0.14), min_size=1, max_size=3),
    victims=st.permutations(ABCD),
    clean=st.booleans(),
    joining=st.booleans(),
)
def test_several_crashes_at_any_time_leave_survivors_that_agree(
    times: list[float], victims: list[str], clean: bool, joining: bool
) -> None:
    crashes = [Crash(at_s=Seconds(t), node=v, clean=clean) for t, v in zip(times, victims, strict=False)]
    plan = [(3, "abcde")] if joining else []
    check(train(SWITCH, CONVEX, first=ABCD, plan=plan, faults=crashes), CONVEX)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("kind", ["reset", "reset in a frame", "pause", "partition", "one way"])
def test_links_and_members_that_fail_for_a_while_cost_time_and_nothing_else(kind: str, number: int) -> None:
    at = Seconds(0.011 + 0.0063 * number)
    pair = "abcd"[number % 4], "abcd"[(number + 1 + number // 4) % 4]
    faults: dict[str, AnyFault] = {
        "reset": Reset(at_s=at, between=pair),
        "reset in a frame": Reset(at_s=at, between=pair, mid_frame=True),
        "pause": Pause(at_s=at, node=pair[0], duration_s=Seconds(0.8)),
        "partition": Partition(at_s=at, sides=(("a", "b"), ("c", "d")), duration_s=Seconds(0.7)),
        "one way": Partition(at_s=at, sides=((pair[0],), (pair[1],)), duration_s=Seconds(0.7), oneway=True),
    }
    faulty = train(SWITCH, CONVEX, first=ABCD, faults=[faults[kind]])
    assert faulty.sha256() == reference(((0, ABCD),), CONVEX)
    assert sorted(faulty.cluster.done) == list(ABCD)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "hierarchical"])
def test_other_strategies_that_step_together_go_on_as_well(strategy: str) -> None:
    chosen = replace(CONVEX, strategy=strategy, timeout_s=PositiveSeconds(2.0))
    names = [node.name for node in HOMES.nodes]
    for number in range(6):
        crash = Crash(at_s=Seconds(0.1 + 0.061 * number), node=names[number % 4])
        faulty = train(HOMES, chosen, faults=[crash])
        assert faulty.sha256() == without_faults(faulty, HOMES, chosen).sha256()


def test_who_speaks_for_a_home_next_knows_what_the_compressors_of_the_others_remember() -> None:
    """PowerSGD's factors are known to those who speak; one of them dies, a newcomer comes, and another dies."""
    chosen = replace(CONVEX, strategy="hierarchical", compressor="powersgd:2+ef", timeout_s=PositiveSeconds(2.0))
    names = [node.name for node in HOMES.nodes]
    crashes = [Crash(at_s=Seconds(1.0), node=names[2]), Crash(at_s=Seconds(1.8), node=names[0])]
    faulty = train(HOMES, chosen, first=names[:1] + names[2:], plan=[(1, names)], faults=crashes)
    assert len(faulty.plan()) > 2
    assert sorted(faulty.cluster.done) == [names[1], names[3]]
    assert faulty.sha256() == without_faults(faulty, HOMES, chosen).sha256()


@pytest.mark.parametrize("strategy", ["ddp", "diloco:3"])
def test_a_newcomer_that_comes_in_the_last_step_gets_the_final_model(strategy: str) -> None:
    outcome = train(SWITCH, replace(CONVEX, strategy=strategy), first="abc", plan=[(6, "abcd")])
    assert sorted(outcome.cluster.done) == list("abcd")
    assert outcome.sha256() == train(SWITCH, replace(CONVEX, strategy=strategy), first="abc").sha256()


@pytest.mark.parametrize("strategy", ["ddp", "diloco:3"])
def test_one_that_holds_the_final_model_ends_when_the_others_have_ended_without_it(strategy: str) -> None:
    chosen = replace(CONVEX, strategy=strategy)
    outcome = train(SWITCH, chosen, first=ABCD, plan=[(chosen.steps, "abc")])
    late = outcome.results["d"]
    assert isinstance(late, Report)
    assert late.steps == chosen.steps
    assert late.sha256 == outcome.sha256()


def test_a_newcomer_learns_with_the_others_from_the_next_step_on_and_no_step_is_wasted() -> None:
    grown = train(SWITCH, CONVEX, first="ab", plan=[(2, "abc"), (4, "abcde")])
    assert grown.plan() == [(0, ["a", "b"]), (2, ["a", "b", "c"]), (4, ["a", "b", "c", "d", "e"])]
    assert sorted(grown.cluster.done) == list("abcde")
    assert grown.cluster.reports == []
    assert [point.step for point in grown.watchers["a"].points] == [1, 2, 3, 4, 5, 6]
    assert [point.step for point in grown.watchers["e"].points] == [5, 6]
    grown.sha256()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("number", range(8))
def test_a_crash_while_state_is_handed_over_leaves_the_newcomer_with_all_or_nothing(number: int) -> None:
    """A model of 4 KB takes 4 ms on this line; the giver, the taker or a bystander dies."""
    before = train(SWITCH, CONVEX, first=ABCD).watchers["a"].points[2].time_s
    crash = Crash(at_s=Seconds(before + 0.002 + 0.0021 * number), node="aeb"[number % 3], clean=bool(number % 2))
    check(train(SWITCH, CONVEX, first=ABCD, plan=[(3, "abcde")], faults=[crash]), CONVEX)


def test_a_member_that_was_away_takes_the_others_model_and_goes_on() -> None:
    away = train(SWITCH, CONVEX, first=ABCD, plan=[(2, "abc"), (4, "abcd")])
    assert sorted(away.cluster.done) == list(ABCD)
    assert isinstance(away.results["d"], Report)
    away.sha256()


def test_the_last_one_left_trains_to_the_end() -> None:
    crashes = [Crash(at_s=Seconds(0.03 + 0.01 * number), node=node) for number, node in enumerate("abc")]
    last = train(SWITCH, CONVEX, first=ABCD, faults=crashes)
    assert last.cluster.done == ["d"]
    check(last, CONVEX)


@pytest.mark.slow
def test_the_same_faults_give_the_same_trace() -> None:
    crash = Crash(at_s=Seconds(0.031), node="a")
    runs = [train(SWITCH, CONVEX, first=ABCD, plan=[(4, "bcde")], faults=[crash]).digest for _ in range(2)]
    assert runs[0] == runs[1]


def test_what_was_done_in_a_view_that_a_newcomer_ended_counts_as_progress() -> None:
    """Otherwise what was found of a view before that one would be held against members that have worked since."""
    pause = Pause(at_s=Seconds(0.0), node="c", duration_s=PositiveSeconds(3))
    outcome = train(SWITCH, CONVEX, first="ab", plan=[(3, "abc")], faults=[pause])
    progressed = [(epoch, failure.progressed) for epoch, failure in outcome.cluster.reports]
    assert progressed[0] == (1, True)
    assert (2, False) in progressed
