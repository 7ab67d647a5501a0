"""What a node concludes from how the others stand."""

from __future__ import annotations

from hcsim.cluster.messages import Status
from hcsim.cluster.roster import Roster
from hcsim.cluster.view import Member, View

A, B = Member("a", 1, "mac-a", "a:1"), Member("b", 1, "mac-b", "b:1")
AFTER = View("line", 5, (A,), formed=True)


def test_one_that_has_just_been_left_out_is_about_to_ask_until_it_has_had_its_chance() -> None:
    roster = Roster(A)
    roster.heard(Status(B, "b:0", "line", 4, 2, formed=True))
    roster.quarantine("b", 0.0, 10.0)
    assert not roster.preparing(AFTER, 10.0)
    roster.release(10.0)
    assert roster.preparing(AFTER, 10.0)
    roster.heard(Status(B, "b:0", "b:1.1", 6, 1, formed=False, joins="line"))
    assert roster.preparing(AFTER, 10.1)
    roster.quarantine("b", 0.0, 11.0)
    roster.release(11.0)
    assert not roster.preparing(AFTER, 11.0)


def test_one_that_was_let_in_early_and_failed_has_the_rest_of_its_time_before_it_and_then_a_longer_one() -> None:
    roster = Roster(A)
    roster.heard(Status(B, "b:0", "b:1.1", 6, 1, formed=False, joins="line"))
    roster.quarantine("b", 0.0, 10.0)
    roster.release(11.0)
    assert roster.quarantine("b", 0.0, 12.0).until_s == 15.0
    assert [bool(roster.preparing(AFTER, by_s)) for by_s in (14.9, 15.0)] == [False, True]
    assert roster.quarantine("b", 0.0, 16.0).until_s == 26.0


def test_of_several_sick_members_each_is_the_pardon_of_another_only_once() -> None:
    roster = Roster(A)
    roster.heard(Status(B, "b:0", "b:1.1", 6, 1, formed=False, joins="line", reaches=("a",)))
    roster.qualify("b", "line", 1)
    lets_in: list[bool] = []
    for now in (10.0, 20.0):
        roster.quarantine("b", 0.0, now)
        roster.pardon("b")
        lets_in.append(roster.joiners(AFTER, now) == [B])
    roster.progressed()
    roster.pardon("b")
    assert [*lets_in, roster.joiners(AFTER, 20.0) == [B]] == [True, False, True]
