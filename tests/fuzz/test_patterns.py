"""Patterns of faults: what belongs together strikes together, and nobody forgets anything."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import get_args

import pytest

from hcsim.config import ClockJump, Crash, Leave, Misbehave, Misbehaviour, Restart, Scenario, parse_scenario
from hcsim.config.schedule import Draw
from hcsim.fuzz.generate import (
    CULPRITS_WAYS,
    FORMING_S,
    LONE_KINDS,
    PATTERNS,
    FaultGroup,
    attrition,
    bunched,
    churn,
    conditions,
    culprit,
    draw_groups,
    outages,
    scenario_of,
)
from hcsim.rng import stream

HOME = parse_scenario(
    """
    name = "home"
    medium = [{ kind = "ethernet", name = "switch", rate = "1 Gb/s" }]
    node = [{ name = "mac", count = 4, machine = "M4", links = ["switch"] }]
    [cluster]
    preset = "low_latency"
    [training]
    timeout = "20 s"
    """,
    "home",
)
NAMES = [node.name for node in HOME.nodes]
DRAWS = range(30)


def draws(home: Scenario = HOME) -> Iterator[Draw]:
    return (Draw(stream(seed, "patterns"), home.nodes, home.media, 50.0) for seed in DRAWS)


def flat(groups: list[FaultGroup]) -> FaultGroup:
    return tuple(fault for group in groups for fault in group)


@pytest.mark.parametrize("name", PATTERNS)
def test_no_pattern_makes_a_machine_forget_but_a_culprit(name: str):
    for draw in draws():
        faults = flat(PATTERNS[name](draw, HOME))
        forgetful = {fault.node for fault in faults if isinstance(fault, Restart) and fault.state != "kept"}
        assert faults
        assert not forgetful or (name == "culprit" and len(forgetful) == 1)


def test_in_some_outages_all_machines_are_down_at_a_moment_and_all_come_back():
    whole = 0
    for draw in draws():
        for cut in outages(draw, HOME):
            assert all(isinstance(fault, Restart) for fault in cut)
            down_s, up_s = max(fault.at_s for fault in cut), min(fault.over_s for fault in cut)
            whole += {fault.node for fault in cut} == {*NAMES} and down_s < up_s
    assert whole > len(DRAWS) / 3


def test_attrition_leaves_one_machine_which_is_started_anew_when_all_others_have_gone():
    for draw in draws():
        faults = flat(attrition(draw, HOME))
        gone = {fault.node: fault.at_s for fault in faults if isinstance(fault, Crash | Leave)}
        (last,) = {*NAMES} - {*gone}
        again = [fault.at_s for fault in faults if isinstance(fault, Restart) and fault.node == last]
        assert again
        assert min(again) > max(gone.values())


def test_whoever_comes_and_goes_is_there_in_the_end():
    for draw in draws():
        faults = sorted(flat(churn(draw, HOME)), key=lambda fault: fault.at_s)
        last = {fault.node: fault for fault in faults if isinstance(fault, Leave | Restart)}
        assert all(isinstance(fault, Restart) for fault in last.values())


def test_a_culprit_is_the_only_one_at_fault_and_treats_all_others_alike():
    for draw in draws():
        faults = flat(culprit(draw, HOME))
        assert len({getattr(fault, "node", None) for fault in faults} - {None}) == 1
        assert all(fault.to is None and fault.how != "lie" for fault in faults if isinstance(fault, Misbehave))


def test_a_culprit_does_each_kind_of_harm_about_as_often():
    ways = [fault.how for draw in draws() for fault in flat(culprit(draw, HOME)) if isinstance(fault, Misbehave)]
    for alike in CULPRITS_WAYS:
        assert len(ways) / 8 < sum(how in alike for how in ways) < len(ways) / 2
    assert {how for alike in CULPRITS_WAYS for how in alike} == {*get_args(Misbehaviour)} - {"lie"}


def test_a_time_server_sets_all_clocks_at_a_moment():
    jumps = [group for draw in draws() for group in conditions(draw, HOME) if isinstance(group[0], ClockJump)]
    assert {len(group) for group in jumps} == {1, len(NAMES)}
    assert all(
        len({(fault.at_s, fault.by_s) for fault in group if isinstance(fault, ClockJump)}) == 1 for group in jumps
    )


def test_faults_in_a_bunch_follow_each_other_within_the_time_that_a_view_takes():
    notice_s = 2.0
    for draw in draws():
        groups = bunched(draw, draw_groups(draw, ("pause", "crash", "restart", "half_open"), 5), HOME)
        for before, after in pairwise(groups):
            start_s = min(fault.at_s for fault in after)
            assert any(
                -1e-3 <= start_s - time_s <= notice_s + FORMING_S + 1e-3
                for fault in before
                for time_s in (fault.at_s, fault.over_s)
            )


@pytest.mark.slow
def test_a_lone_machine_meets_only_what_needs_no_other():
    lone = [scenario for scenario in map(scenario_of, range(150)) if len(scenario.nodes) == 1]
    assert lone
    for scenario in lone:
        assert {fault.__struct_config__.tag for fault in scenario.faults} <= {*LONE_KINDS, "leave"}
