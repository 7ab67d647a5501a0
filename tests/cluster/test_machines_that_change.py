"""Who is waited for, and who speaks for whom, when machines are copied, moved, emptied, or gone for good."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hcsim.cluster.view import MembershipRules
from tests.cluster.machines import Lan, Machine


def formed(count: int, quorum: str = "tiebreak") -> tuple[Lan, list[Machine]]:
    lan = Lan(count, MembershipRules(count, quorum))  # type: ignore[arg-type]
    lan.rounds(10)
    assert lan.together()
    return lan, [*lan.machines]


@pytest.mark.parametrize("emptied", [False, True])
def test_one_that_is_lost_for_good_just_after_it_was_started_anew_is_not_waited_for(emptied):
    lan, (a, b) = formed(2)
    a.start()
    lan.connect(a, b)  # b has heard of its new life, and no view has it yet
    a.stop()
    lan.rounds(20)
    assert b.members == "ab"
    if emptied:
        lan.lose_disk(a)
    else:
        lan.destroy(a)
        lan.forget([b])
    lan.rounds(20)
    assert lan.together()


def test_one_that_is_gone_for_good_can_be_forgotten_while_a_copy_of_it_is_there():
    lan, (a, b) = formed(2)
    lan.copy(a, with_memory=True)
    lan.destroy(a)
    lan.rounds(20)
    assert b.members == "ab"
    lan.forget([b])
    lan.rounds(20)
    assert lan.together()


def test_one_that_came_back_though_a_person_had_given_it_up_is_waited_for_like_any_other():
    lan, (a, b, c) = formed(3)
    lan.split((b, a), (b, c))
    a.stop()
    c.stop()
    lan.rounds(5)
    b.core.forget(a.node, lan.now)
    b.core.forget(c.node, lan.now)
    b.drain()
    lan.rounds(5)
    assert b.members == "b"
    a.start()
    c.start()
    lan.split()
    lan.rounds(20)
    assert lan.together()
    lan.split((b, a), (b, c))
    lan.rounds(20)
    assert sorted(a.members) == sorted(c.members) == list("ac")
    assert sorted(b.members) == list("abc")  # the others are two, and may have gone on


def test_whoever_takes_the_name_of_one_that_was_given_up_is_waited_for_like_any_other():
    lan, (a, b) = formed(2, "majority")
    lan.destroy(a)
    lan.rounds(5)
    lan.forget([b])
    other = lan.machine("a")
    other.address = "elsewhere:2"
    lan.machines.append(other)
    other.start()
    lan.rounds(20)
    assert lan.together()
    lan.split((other, b))
    lan.rounds(20)
    assert sorted(b.members) == list("ab")


def test_one_whose_place_a_copy_has_taken_has_no_say_there():
    lan, (a, b, c) = formed(3, "majority")
    a.stop()
    lan.rounds(5)
    copy = lan.copy(a, with_memory=False)
    lan.rounds(10)
    assert b.members == c.members == copy.members == "bc" + copy.name
    lan.split((copy, b), (copy, c), (b, c))
    a.start()
    lan.rounds(10)  # b and c do not hear each other, and a tells each what it knows
    assert a.members == "a"
    assert b.members == c.members == "bc" + copy.name
    assert any("with our key" in text and copy.name in text for text in a.said)


def test_one_that_was_started_elsewhere_and_comes_home_is_not_waited_for():
    lan, (a, b) = formed(2)
    lan.split((a, b))
    for place in ("away", "a"):
        a.name, a.address = place, f"{place}:2"
        a.start()
    lan.split()
    lan.rounds(30)
    assert lan.together()


@pytest.mark.parametrize("count", [2, 4])
def test_with_any_as_the_rule_those_who_were_started_anew_join_those_who_went_on_without_them(count):
    lan, machines = formed(count, "any")
    seniors, juniors = machines[: count // 2], machines[count // 2 :]
    for machine in seniors:
        machine.stop()
    lan.rounds(5)
    juniors[0].core.broken(juniors[0].core.view.epoch, "as a test", lan.now)
    lan.rounds(5)
    alone = juniors[0].core.view
    assert alone.nodes == tuple(machine.node for machine in juniors)
    for machine in seniors:
        machine.start()
    lan.rounds(30)
    assert lan.together()
    assert juniors[0].core.view.lineage == alone.lineage  # where the model is


@pytest.mark.parametrize(("address", "known"), [("10.0.0.7|[fd00::8]:2", True), ("10.0.0.7|[fd00::8]:3", False)])
def test_one_whose_disk_was_lost_is_known_by_one_of_its_addresses_for_others_change(address, known):
    lan = Lan(2, MembershipRules(2))
    a, b = lan.machines
    a.address = "10.0.0.7|[fd00::7]:2"
    a.start()
    lan.rounds(10)
    assert b.members == "ab"
    a.address = address
    lan.lose_disk(a)
    lan.rounds(20)
    assert lan.together() == known


def test_one_that_comes_back_under_another_name_and_address_is_told_that_it_counts_as_a_new_one():
    _lan, (a, _b) = formed(2)
    a.name, a.address = "away", "away:2"
    a.start()
    (said,) = a.said
    assert "a at a:2" in said
    assert "its own node key" in said


def test_one_that_is_gone_for_good_is_given_up_once_though_a_view_with_it_is_still_to_be_agreed_on():
    lan, (a, b) = formed(2, "majority")
    a.core.broken(a.core.view.epoch, "as a test", lan.now)
    while b.record.accepted is None:
        lan.now += 0.1
        a.core.tick(lan.now)
        a.drain()
        while lan.mail and b.record.accepted is None:
            lan.deliver(0)
    lan.destroy(a)
    lan.rounds(5)
    assert b.members == "ab"
    lan.forget([b])
    lan.rounds(10)
    assert b.members == "b"  # after the view that b had accepted


def act(lan: Lan, doomed: Machine, action: tuple[str, int, int]) -> None:
    """Let something happen; only the doomed machine loses its disk or goes for good, so never a majority does."""
    kind, first, second = action
    one, other = (lan.machines[each % len(lan.machines)] for each in (first, second))
    if kind == "deliver":
        lan.deliver(first)
    elif kind == "time":
        lan.pass_time(0.5 * (1 + second % 4))
    elif kind == "round":
        lan.round()
    elif kind == "start":
        one.start()
    elif kind == "stop":
        one.stop()
    elif kind == "cut":
        lan.cut += [(one, other), (other, one)][: 1 + second % 2]
    elif kind == "mend":
        lan.split()
    elif kind == "move":
        lan.move(one, name=second % 3 != 0, address=second % 3 != 1)
    elif kind == "copy":
        lan.copy(one, with_memory=second % 2 == 0)
    elif kind in ("lose disk", "destroy"):
        if doomed in lan.machines:
            (lan.lose_disk if kind == "lose disk" else lan.destroy)(doomed)
    elif one.core is not None and other.core is not None:
        act_on(lan, kind, one, other)


def act_on(lan: Lan, kind: str, one: Machine, other: Machine) -> None:
    linked = one.lines.get(other.node) is other
    if kind == "forget":
        lan.forget([one])
    elif kind == "break":
        one.core.broken(one.core.view.epoch, "as a test", lan.now)
        one.drain()
    elif kind == "connect":
        lan.connect(one, other)
    elif kind == "suspect" and one is not other:
        one.lose(other.node)
    elif kind == "hear" and linked:
        one.hear(other)
    elif kind == "hang up" and linked:
        one.hang_up(other)


USUAL = (
    *(["deliver"] * 8 + ["hear", "connect", "time", "round"] * 3),
    *("start", "stop", "cut", "cut", "mend", "break", "suspect", "hang up"),
)
COPIED = (*USUAL, "copy", "copy", "move")
LOST = (*USUAL, "lose disk", "destroy", "forget", "move")


def actions(kinds: tuple[str, ...]) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 30), st.integers(0, 30)), max_size=80)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.integers(2, 4),
    st.sampled_from(["majority", "tiebreak", "any"]),
    st.booleans(),
    st.integers(0, 3),
    actions(COPIED) | actions(LOST),
)
def test_all_who_are_left_come_together_once_they_know_who_will_not_come(count, quorum, original, doomed, happens):
    lan, machines = formed(count, quorum)
    for action in happens:
        act(lan, machines[doomed % count], action)
    lan.all_well(first=original)
    lan.rounds(60)
    if not {"copy", "move", "destroy"} & {kind for kind, _, _ in happens}:
        assert lan.together()
    for _ in range(3):  # whom a person gave up may have agreed to a view with others who are gone
        if not lan.together():
            lan.forget(lan.machines)
            lan.rounds(60)
    assert lan.together()
