"""Who is left out of the next view, given what the members of a failed one found."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from hcsim.cluster.diagnosis import CHECKS_S, ELIMINATE, Accusation, Diagnosis, Findings, ViewFailure, VotesSeen

NODES = ("a", "b", "c", "d")
LINEAGE, EPOCH = "line", 7


def found(
    accused: Mapping[str, str] = {}, *, checking: bool = True, checked: bool = True, waited_for: str = "",
    slow: bool = False, work_s: float = 0.0, fruitless: int = 1, lasted_s: float = 0.0, seen: VotesSeen | None = None,
) -> Findings:  # fmt: skip
    accusations = tuple(Accusation(node, why) for node, why in accused.items())
    return Findings(
        LINEAGE,
        EPOCH,
        fruitless,
        checking,
        checked,
        True,
        waited_for,
        slow,
        work_s,
        accusations,
        lasted_s,
        votes_seen=seen,
    )


def diagnosis(failure: ViewFailure, ours: Mapping[str, str], theirs: Mapping[str, Findings]) -> Diagnosis:
    """What `a` knows: how its work failed, what its checks found, and what the others told."""
    made = Diagnosis("a")
    if made.failed(LINEAGE, EPOCH, failure, 0.0):
        made.checked(EPOCH, [Accusation(node, why) for node, why in ours.items()])
    for node, findings in theirs.items():
        made.heard(node, findings, LINEAGE, EPOCH, 0.0)
    return made


LATE = ViewFailure("an operation took too long", late=True)


def culprits(made: Diagnosis, now: float = 1.0) -> dict[str, str]:
    return made.culprits(LINEAGE, EPOCH, NODES, now)


def test_a_member_that_broke_the_protocol_is_left_out() -> None:
    made = diagnosis(ViewFailure("c sent a frame of another epoch", violator="c"), {}, {"b": found(checking=False)})
    assert culprits(made) == {"c": "c sent a frame of another epoch"}


def test_the_end_that_all_accusations_share_is_left_out() -> None:
    """A machine with a broken network card accuses everybody, and everybody accuses it."""
    theirs = {"b": found({"d": "no answer"}), "c": found({"d": "no answer"}), "d": found(dict.fromkeys("abc", "none"))}
    assert list(culprits(diagnosis(LATE, {"d": "no answer"}, theirs))) == ["d"]


def test_of_members_that_contradict_each_other_the_one_is_left_out_that_all_contradictions_share() -> None:
    """`a` alone has found something: it heard from c and from d that b told them something else."""
    ours = [Accusation("b", "b told a and c unlike things", "c"), Accusation("b", "b told a and d unlike things", "d")]
    made = diagnosis(
        ViewFailure("unlike", accusations=tuple(ours)), {}, {node: found(checking=False) for node in "bcd"}
    )
    assert culprits(made) == {"b": "b told a and c unlike things"}


def test_who_tells_of_others_that_contradict_each_other_may_be_the_sick_one() -> None:
    theirs = {"b": found(checking=False), "d": found({"a": "no answer", "c": "no answer"}, checking=False)}
    ours = (Accusation("b", "b told c and d unlike things", "d"),)
    assert list(culprits(diagnosis(ViewFailure("unlike", accusations=ours), {}, theirs))) == ["d"]


def votes(round: int, **digests: int) -> VotesSeen:
    return VotesSeen(round, {"a": 1, "b": 2, "c": 3, "d": 4} | digests)


@pytest.mark.parametrize(
    ("theirs", "blamed"),
    [(votes(9), ["b"]), (votes(9, d=5), ["d"]), (votes(9, b=6), ["b"]), (votes(8, d=5), ["b"])],
    ids=["the same", "another vote of a third", "another vote of the accused", "another round"],
)
def test_a_member_that_sent_unlike_votes_is_left_out_rather_than_one_that_acts_on_them(
    theirs: VotesSeen, blamed: list[str]
) -> None:
    ours = ViewFailure("b does another operation", violator="b", votes_seen=votes(9))
    others = {node: found(checking=False, seen=theirs if node == "b" else None) for node in "bcd"}
    made = diagnosis(ours, {}, others)
    assert list(culprits(made)) == blamed
    # Nor is another blamed in the next view, if that comes to nothing too.
    made.entered()
    made.failed(LINEAGE, EPOCH, ViewFailure("something else"), 1.0)
    assert list(culprits(made)) == blamed


def test_where_no_deadline_passed_nobody_has_waited_for_long() -> None:
    """Views that fail at once, again and again, say nothing about whom their members happened to wait for."""
    theirs = {node: found(waited_for="c" if node != "c" else "", fruitless=2) for node in "bcd"}
    failure = ViewFailure("the link to d broke", waited_for="c")
    assert culprits(diagnosis(failure, {}, theirs)) == {}
    assert list(culprits(diagnosis(replace(failure, late=True), {}, theirs))) == ["c"]


def test_of_a_pair_the_junior_is_left_out() -> None:
    theirs = {"b": found({"c": "no answer"}), "c": found({"b": "no answer"}), "d": found()}
    assert list(culprits(diagnosis(LATE, {}, theirs))) == ["c"]


def test_a_member_that_does_not_finish_its_checks_is_left_out() -> None:
    theirs = {"b": found(), "c": found(checked=False), "d": found()}
    made = diagnosis(LATE, {}, theirs)
    assert culprits(made, now=CHECKS_S / 2) == {}
    assert list(culprits(made, now=CHECKS_S)) == ["c"]


def test_the_end_of_a_chain_of_waiting_is_left_out() -> None:
    theirs = {"b": found(waited_for="c"), "c": found(), "d": found(waited_for="a")}
    made = diagnosis(ViewFailure("late", late=True, waited_for="b"), {}, theirs)
    assert list(culprits(made)) == ["c"]


@pytest.mark.parametrize(("lasted_s", "blamed"), [(0.0, []), (1.5, []), (4.9, ["c"])])
def test_a_member_that_came_late_to_a_view_is_not_blamed_for_coming_late(lasted_s: float, blamed: list[str]) -> None:
    made = Diagnosis("a")
    made.began(EPOCH, 10.0)
    made.surveyed(EPOCH)
    made.failed(LINEAGE, EPOCH, ViewFailure("late", late=True, waited_for="b"), 15.0)
    made.checked(EPOCH, [])
    for node, waited_for, so_long_s in (("b", "c", 1.5), ("c", "", lasted_s), ("d", "a", 1.5)):
        made.heard(node, found(waited_for=waited_for, lasted_s=so_long_s), LINEAGE, EPOCH, 15.0)
    assert list(culprits(made, now=16.0)) == blamed


@pytest.mark.parametrize(("standing_s", "blamed"), [(1.6, []), (9.5, ["c"])])
def test_a_member_that_was_held_up_in_the_operation_before_is_not_blamed(standing_s: float, blamed: list[str]) -> None:
    theirs = {"b": found(), "c": replace(found(), standing_s=standing_s), "d": found()}
    made = diagnosis(ViewFailure("late", late=True, waited_for="c", standing_s=10.0), {}, theirs)
    assert list(culprits(made)) == blamed


@pytest.mark.parametrize(("surveyed", "lasted_s"), [(True, 5.0), (False, 0.0)])
def test_whoever_still_measures_the_links_of_a_view_has_not_begun_to_work_in_it(
    surveyed: bool, lasted_s: float
) -> None:
    made = Diagnosis("a")
    made.surveyed(EPOCH - 1)
    made.began(EPOCH, 10.0)
    if surveyed:
        made.surveyed(EPOCH)
    made.heard("b", found(waited_for="a"), LINEAGE, EPOCH, 15.0)
    made.surveyed(EPOCH)  # too late
    made.failed(LINEAGE, EPOCH, ViewFailure("b gave up"), 15.5)
    assert made.ours is not None
    assert made.ours.lasted_s == lasted_s


@pytest.mark.parametrize(("qualified", "blamed"), [(False, ["a", "d"]), (True, ["d"])])
def test_whoever_found_since_that_it_can_work_with_all_has_nothing_against_them(
    qualified: bool, blamed: list[str]
) -> None:
    """Only then `a`, whose own cable had been pulled, is not left out again beside the one that is sick."""
    made = diagnosis(LATE, {"b": "no answer", "c": "no answer"}, {})
    made.entered()
    if qualified:
        made.qualified()
    made.failed(LINEAGE, EPOCH, ViewFailure("d talks nonsense", violator="d"), 20.0)
    theirs = replace(found({"d": "it talks nonsense"}, checking=False), checked=True)
    for node in "bc":
        made.heard(node, theirs, LINEAGE, EPOCH, 20.0)
    made.checked(EPOCH, [])
    assert sorted(culprits(made, now=21.0)) == blamed


def test_the_slowest_of_a_slow_view_is_left_out() -> None:
    theirs = {"b": found(work_s=0.1), "c": found(work_s=2.0), "d": found(work_s=0.2)}
    made = diagnosis(ViewFailure("slow", late=True, slow=True, work_s=0.1), {}, theirs)
    assert culprits(made) == {"c": "it works 2 s for a step, and the others 0.1 s"}


def test_a_slow_machine_stays_where_steps_are_as_fast_as_ever() -> None:
    theirs = {"b": found(work_s=0.1), "c": found(work_s=2.0), "d": found(work_s=0.2)}
    assert culprits(diagnosis(ViewFailure("late", late=True, work_s=0.1), {}, theirs)) == {}


def test_nobody_is_left_out_of_a_view_that_is_slow_everywhere() -> None:
    theirs = {node: found(slow=True, work_s=1.0) for node in "bcd"}
    assert culprits(diagnosis(ViewFailure("slow", late=True, slow=True, work_s=1.5), {}, theirs)) == {}


@pytest.mark.parametrize("turn", range(4))
def test_where_nothing_tells_members_are_left_out_in_turn(turn: int) -> None:
    theirs = {node: found(fruitless=ELIMINATE + turn) for node in "bcd"}
    assert list(culprits(diagnosis(LATE, {}, theirs))) == [NODES[-1 - turn]]


def test_never_is_everybody_left_out() -> None:
    theirs = {node: found({node: "its device is stuck"}) for node in "bcd"}
    assert culprits(diagnosis(LATE, {"a": "its device is stuck"}, theirs)) == {}


@pytest.mark.parametrize(("still", "blamed"), [(True, []), (False, ["b"])])
def test_a_device_that_works_again_is_no_longer_held_against_its_machine(still: bool, blamed: list[str]) -> None:
    """Of two machines only one stays stuck; while both are at fault, neither can be excluded."""
    own = {"a": "its device is stuck"}
    made = diagnosis(LATE, own, {})
    made.entered()
    made.failed(LINEAGE, EPOCH, LATE, 20.0)
    made.checked(EPOCH, [Accusation(node, why) for node, why in own.items()] if still else [])
    made.heard("b", found({"b": "its device is stuck"}), LINEAGE, EPOCH, 20.0)
    assert [*made.culprits(LINEAGE, EPOCH, NODES[:2], 21.0)] == blamed


def test_findings_of_another_view_say_nothing() -> None:
    made = diagnosis(LATE, {}, {node: found() for node in "bd"})
    made.heard("c", Findings(LINEAGE, EPOCH - 1, accusations=(Accusation("b", "long ago"),)), LINEAGE, EPOCH, 0.0)
    assert "b" not in culprits(made, now=CHECKS_S)
