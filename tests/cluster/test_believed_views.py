"""Whose word on a decided view counts: a member of the cluster that was never in ours cannot end our view."""

from __future__ import annotations

import pytest

from hcsim.cluster.agreement import Accept, Prepare
from hcsim.cluster.messages import ControlMessage, Decided, Status
from hcsim.cluster.view import Member, MembershipRules, View
from tests.cluster.machines import Lan, Machine

RULES = MembershipRules(3, "tiebreak", 0.0, 5.0)


@pytest.fixture
def lan() -> Lan:
    """a, b and c are in a view that works; d was in none with them."""
    lan = Lan(3, RULES)
    lan.rounds(20)
    assert lan.together()
    return lan


def forger(lan: Lan) -> Machine:
    stranger = lan.machine("d")
    for machine in lan.machines:
        us = Member(stranger.node, 99, "d", "d:2")
        machine.core.heard(Status(us, "d:1", f"{us.node}:63.1", 1, 1, False, reaches=(machine.node,)), lan.now)
        machine.drain()
    return stranger


def say(lan: Lan, source: str, message: ControlMessage) -> None:
    for machine in lan.machines:
        machine.core.message(source, message, lan.now)
        machine.drain()


def forged(lan: Lan, members: tuple[Member, ...]) -> View:
    ours = lan.machines[0].core.view
    return View(ours.lineage, ours.epoch + 1, members, ours.epoch, formed=True, abrupt=True, reason="forged")


@pytest.mark.parametrize("lineage", ["", "/9.deadbeef"], ids=["the same lineage", "a branch of it"])
def test_a_view_that_a_stranger_to_the_lineage_says_was_decided_is_ignored(lan: Lan, lineage: str) -> None:
    d, before = forger(lan), [machine.core.view for machine in lan.machines]
    for members in ((), (Member(d.node, 99, "d", "d:2"),), before[0].members[:1]):
        view = forged(lan, members)
        say(
            lan,
            d.node,
            Decided(View(f"{view.lineage}{lineage}", *[getattr(view, f) for f in view.__struct_fields__[1:]])),
        )
        say(lan, d.node, Prepare((1000, d.node), view))
    assert [machine.core.view for machine in lan.machines] == before


def test_a_stranger_to_the_lineage_cannot_propose_a_view(lan: Lan) -> None:
    d, before = forger(lan), [machine.core.view for machine in lan.machines]
    mail = len(lan.mail)
    say(lan, d.node, Prepare((1000, d.node), before[0]))
    say(lan, d.node, Accept((1000, d.node), before[0].lineage, before[0].epoch, forged(lan, ())))
    assert [machine.core.view for machine in lan.machines] == before
    assert len(lan.mail) == mail
    assert [machine.record.accepted for machine in lan.machines if machine.record is not None] == [None] * 3
    lan.lose_disk(lan.machines[2])  # and the members go on to decide what they like
    lan.rounds(20)
    assert lan.together()


def test_one_that_was_counted_on_and_went_elsewhere_is_not_waited_for() -> None:
    lan = Lan(3, MembershipRules(2, "majority", 0.0, 5.0))
    a, b, c = lan.machines
    lan.connect(b, c)
    b.hear(c)
    left = b.core.view
    assert b.members == "bc"
    lan.connect(a, c)  # before c hears what b decided
    a.hear(c)
    lan.round()
    assert a.members == c.members == "ac"
    lan.rounds(20)
    assert lan.together()

    d = forger(lan)  # it was never in that lineage: nobody that was gives it its word
    claimed = View(left.lineage, 9, (Member(d.node, 99, "d", "d:2"), *left.members))
    b.core.message(d.node, Prepare((1000, d.node), claimed), lan.now)
    assert b.core.effects == []


def test_a_member_that_was_away_believes_those_it_was_with(lan: Lan) -> None:
    a, b, c = lan.machines
    before = c.core.view
    c.stop()
    for machine in (a, b):
        machine.lose(c.node)
    lan.rounds(20)
    assert a.core.view.epoch > before.epoch
    c.start()
    lan.rounds(20)
    assert lan.together()


def test_what_everybody_else_of_a_view_took_along_is_believed_of_anybody(lan: Lan) -> None:
    """All the others are gone for good, as a person says: whoever is left in the lineage may tell what followed."""
    d = forger(lan)
    a = lan.machines[0]
    view = forged(lan, (Member(d.node, 99, "d", "d:2"),))
    a.core.message(d.node, Decided(view), lan.now)
    assert a.core.view != view
    for other in lan.machines[1:]:
        a.lose(other.node)
        a.core.forget(other.node, lan.now)
    a.core.message(d.node, Decided(view), lan.now)
    a.drain()
    assert a.core.view.epoch > view.epoch - 1
