"""Nodes that find each other, in the virtual world and under its faults."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from msgspec.structs import replace

from hcsim.cluster.agreement import AcceptorState
from hcsim.cluster.diagnosis import ViewFailure
from hcsim.cluster.discovery import Announcement
from hcsim.cluster.membership_source import NodeInfo
from hcsim.cluster.node import ClusterNode
from hcsim.cluster.view import ASTRAY_S, PATIENCE_S, View
from hcsim.config import (
    AnyFault,
    ClockJump,
    Cluster,
    Crash,
    FullDisk,
    Heartbeat,
    Lid,
    Partition,
    Pause,
    Reset,
    Restart,
    SlowDisk,
)
from hcsim.runtime.host import kept
from hcsim.units import PositiveSeconds, Seconds, SignedSeconds
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import HostCrashed
from tests.cluster.nodes import Party

ABC = ("a", "b", "c")


def after(at_s: float, duration_s: float) -> dict[str, object]:
    return {"at_s": Seconds(at_s), "duration_s": PositiveSeconds(duration_s)}


def test_nodes_find_each_other_and_all_hold_the_same_view():
    party = Party("abcde").run(5)
    views = {view for views in party.views.values() for view in views}
    assert len(views) == 1
    (view,) = views
    assert view.nodes == tuple("abcde")
    assert view.leader.name == "a"


def test_nobody_works_before_all_who_were_asked_for_are_there():
    party = Party(ABC)
    party.late_s = {"c": 3.0}
    party.run(6)
    assert party.members("a") == [ABC]
    assert party.when_s["a", party.views["a"][0].epoch] >= 3.0


def test_a_node_that_comes_later_joins_without_ending_what_is_under_way():
    party = Party("abcd", min_peers=2)
    party.config = type(party.config)(nodes=3, preset="low_latency")
    party.late_s = {"d": 3.0}
    party.run(6)
    assert party.members("a") == [ABC, tuple("abcd")]
    assert not party.views["a"][-1].abrupt


def test_a_node_that_comes_later_joins_long_before_the_next_heartbeat():
    """Both dial each other: what a node says on the first connection is not lost when the second replaces it."""
    party = Party(ABC, heartbeat=Heartbeat(PositiveSeconds(60.0), PositiveSeconds(240.0)))
    party.config = replace(party.config, nodes=1)
    party.late_s = {"a": 1.5}
    party.run(5)
    assert party.members("c")[-1] == ("b", "c", "a")


def test_a_crashed_member_is_left_out_and_the_others_go_on():
    party = Party(ABC, [Crash(at_s=Seconds(3), node="b")]).run(10)
    assert isinstance(party.results[1], HostCrashed)
    assert party.members("a") == party.members("c") == [ABC, ("a", "c")]
    assert party.views["a"][-1].abrupt


def test_a_member_whose_process_was_killed_is_left_out_long_before_it_misses_a_heartbeat():
    party = Party(ABC, [Crash(at_s=Seconds(30), node="b", clean=True)], heartbeat=Heartbeat()).run(33)
    assert party.members("a")[-1] == ("a", "c")
    assert party.when_s["a", party.views["a"][-1].epoch] < 30.5


def test_when_the_leader_crashes_the_next_most_senior_leads():
    party = Party(ABC, [Crash(at_s=Seconds(3), node="a")]).run(10)
    assert party.members("b") == [ABC, ("b", "c")]
    assert party.views["c"][-1].leader.name == "b"


def test_a_member_that_was_stuck_is_left_out_and_comes_back_as_the_most_junior():
    party = Party(ABC, [Pause(node="a", **after(3, 5))]).run(14)
    assert party.members("b") == [ABC, ("b", "c"), ("b", "c", "a")]
    assert party.members("a")[-1] == ("b", "c", "a")


def test_a_short_pause_costs_nobody_its_place():
    party = Party(ABC, [Pause(node="b", **after(3, 0.4))]).run(8)
    assert party.members("a") == [ABC]


@pytest.mark.parametrize("still_s", [1.2, 2.5, 60.0])
def test_where_all_stand_still_at_once_nobody_takes_the_others_for_lost(still_s):
    party = Party(ABC, [Pause(node=name, **after(3.1, still_s)) for name in ABC]).run(still_s + 8)
    assert all(party.members(name) == [ABC] for name in ABC)


def test_one_that_dies_while_the_others_stand_still_is_found_when_they_go_on():
    still = [Pause(node=name, **after(3, 20)) for name in "ab"]
    party = Party(ABC, [*still, Crash(at_s=Seconds(5), node="c")]).run(30)
    assert party.members("a") == party.members("b") == [ABC, ("a", "b")]
    assert 23 < party.when_s["a", party.views["a"][-1].epoch] < 26


@pytest.mark.parametrize("oneway", [False, True])
def test_who_cannot_be_heard_is_left_out_and_comes_back(oneway):
    cut = Partition(sides=(("c",), ("a", "b")), oneway=oneway, **after(3, 5))
    party = Party(ABC, [cut]).run(16)
    assert party.members("a") == [ABC, ("a", "b"), ABC]
    assert party.members("c")[-1] == ABC


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("quorum", "preset"),
    [
        # The one says who may go on, the other when.
        ("majority", "home"), ("tiebreak", "home"), ("any", "home"), ("majority", "low_latency"), ("majority", "wifi"),
        *(
            pytest.param(quorum, preset, marks=pytest.mark.soak)
            for quorum in ("tiebreak", "any")
            for preset in ("low_latency", "wifi")
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("deaf", ["a", "e"])
def test_who_hears_nobody_is_left_out_as_soon_as_it_is_missed_and_comes_back(quorum, preset, deaf):
    others = tuple(name for name in "abcde" if name != deaf)
    cut_s, cut_for_s, end_s = (20, 20, 60) if preset == "low_latency" else (60, 60, 160)
    party = Party("abcde", [Partition(sides=(others, (deaf,)), oneway=True, **after(cut_s, cut_for_s))])
    party.config = Cluster(nodes=5, preset=preset, quorum=quorum)
    party.run(end_s)
    for name in others:
        assert party.members(name) == [tuple("abcde"), others, (*others, deaf)]
        without_s = party.when_s[name, party.views[name][1].epoch]
        assert without_s < cut_s + party.config.beat.timeout_s + ASTRAY_S + 2 * PATIENCE_S
    assert party.members(deaf)[-1] == (*others, deaf)


@pytest.mark.slow
def test_one_that_leaves_the_smaller_side_of_a_cluster_that_split_gets_out():
    took_s: list[float] = []

    async def go(node: ClusterNode) -> None:
        host = party.world.host("c")
        await host.clock.sleep(60.2)
        began_s = host.loop.time()
        await node.leave()
        took_s.append(host.loop.time() - began_s)

    party = Party("abcde", [Partition(sides=(("a", "b", "e"), ("c", "d")), **after(60, 60))], quorum="any")
    party.meanwhile = {"c": go}
    party.run(110)
    assert [seconds < party.config.beat.timeout_s for seconds in took_s] == [True]
    assert [party.members(name)[-1] for name in "abde"] == [("a", "b", "e"), ("a", "b", "e"), ("d",), ("a", "b", "e")]


@pytest.mark.parametrize("connections", ["kept", "dead"])
def test_a_machine_says_how_long_it_slept_and_no_other_clock_is_taken_for_sleep(connections):
    lid = Lid(at_s=Seconds(3), node="b", duration_s=PositiveSeconds(60), connections=connections)
    jump = ClockJump(at_s=Seconds(5), node="a", by_s=SignedSeconds(3600))
    party = Party(ABC, [lid, jump]).run(75)
    assert [(name, what) for name, what in party.told if "slept" in what] == [("b", "this machine slept for 60 s")]
    assert party.members("b")[-1] == ("a", "c", "b")


def test_a_short_sleep_is_not_worth_a_line():
    party = Party(ABC, [Lid(at_s=Seconds(3), node="b", duration_s=PositiveSeconds(0.5))]).run(10)
    assert not [what for _, what in party.told if "slept" in what]


def test_two_that_do_not_reach_each_other_are_not_both_in_a_view():
    cut = Partition(sides=(("b",), ("c",)), **after(3, 5))  # both reach a
    party = Party(ABC, [cut]).run(16)
    assert party.members("a") == [ABC, ("a", "b"), ABC]


def test_a_silent_member_is_left_out_when_its_third_heartbeat_in_a_row_is_missed():
    beat = Heartbeat(interval_s=PositiveSeconds(1), timeout_s=PositiveSeconds(60), failures=3, phi=300)
    party = Party(ABC, [Partition(sides=(("c",), ("a", "b")), **after(10.5, 30))], heartbeat=beat).run(20)
    assert party.members("a") == [ABC, ("a", "b")]
    # c was last heard a moment after 10 s; health is looked at every quarter of a second.
    assert party.when_s["a", party.views["a"][-1].epoch] == pytest.approx(13.25, abs=0.01)


@pytest.mark.slow
def test_the_side_without_a_quorum_waits_and_says_so():
    cut = Partition(sides=(("d", "e"), ABC), **after(3, 5))
    party = Party("abcde", [cut]).run(16)
    assert party.members("d") == [tuple("abcde"), ("a", "b", "c", "d", "e")]
    assert ("d", "waiting for a, b, c: d, e cannot decide alone (quorum = tiebreak)") in [
        (name, text.partition(";")[0]) for name, text in party.told
    ]


def test_a_broken_connection_between_two_that_are_well_changes_nothing():
    party = Party(ABC, [Reset(at_s=Seconds(3), between=("a", "b"), mid_frame=False)]).run(8)
    assert party.members("a") == party.members("b") == [ABC]


def test_work_that_failed_gets_a_new_view_with_the_same_members():
    party = Party(ABC)

    async def complain(node: ClusterNode) -> None:
        view = await node.view(-1)
        node.broken(view.epoch, ViewFailure("as a test"))
        assert await node.over(view.epoch) == "as a test"

    party.meanwhile["b"] = complain
    party.run(5)
    assert party.members("c") == [ABC, ABC]
    assert party.views["c"][1].abrupt
    assert party.views["c"][1].reason == "as a test"


@pytest.mark.slow
def test_the_checks_of_a_failed_view_end_with_it():
    """Where views fail faster than members answer checks, the connections of all the checks would add up."""
    party, ended_s = Party(ABC, (Crash(node="c", at_s=Seconds(2.0)),)), list[float]()

    async def fail(node: ClusterNode) -> None:
        async def check(peers: Sequence[tuple[str, float]]) -> tuple[str, list[str]]:
            try:
                await party.world.host("a").clock.sleep(60.0)
            finally:
                ended_s.append(party.world.loop.time())
            return "", ["" for _ in peers]

        node.check_with(check)
        view = await node.view(-1)
        await party.world.host("a").clock.sleep(1.9 - party.world.loop.time())
        node.broken(view.epoch, ViewFailure("it took too long", late=True))

    party.meanwhile["a"] = fail
    party.run(20)
    assert party.members("a") == [ABC, ("a", "b")]
    assert ended_s == [party.when_s["a", party.views["a"][-1].epoch]]


def test_members_whose_views_never_work_ask_for_others_less_and_less_often():
    party = Party(ABC)

    async def complain(node: ClusterNode) -> None:
        epoch = -1
        while True:
            epoch = (await node.view(epoch)).epoch
            node.broken(epoch, ViewFailure("as a test"))

    for name in ABC:
        party.meanwhile[name] = complain
    party.run(60)
    began_s = [party.when_s["a", view.epoch] for view in party.views["a"]]
    assert 10 < len(began_s) < 40
    assert began_s[-1] - began_s[-2] > 4


def test_one_that_leaves_is_missed_in_the_next_view_and_nothing_is_cut_short():
    party = Party(ABC)
    over: list[bool] = []

    async def go(node: ClusterNode) -> None:
        await node.view(-1)
        await node.leave()

    async def stay(node: ClusterNode) -> None:
        first: View = await node.view(-1)
        await node.view(first.epoch)
        over.append(node.over(first.epoch).done())

    party.meanwhile = {"a": go, "b": stay}
    party.run(5)
    assert party.members("b") == [ABC, ("b", "c")]
    assert party.views["b"][1].left == ("a",)
    assert over == [False]


def test_addresses_that_a_person_gave_do_without_announcements():
    party = Party(ABC, discover=False, peers=("a:52415", "b:52415", "c:52415")).run(5)
    assert party.members("c") == [ABC]


def test_two_runs_are_the_same_event_for_event():
    runs = [Party("abcd", [Crash(at_s=Seconds(2), node="a")]).run(6) for _ in range(2)]
    assert runs[0].world.trace.digest() == runs[1].world.trace.digest()


def back(at_s: float, node: str, state: str, down_s: float = 0.5) -> Restart:
    return Restart(at_s=Seconds(at_s), node=node, state=state, down_s=PositiveSeconds(down_s))  # type: ignore[arg-type]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("state", ["kept", "lost", "stale"])
@pytest.mark.parametrize("node", ["a", "c"])
def test_a_member_that_was_started_anew_comes_back_as_the_most_junior(node, state):
    party = Party(ABC, [back(3, node, state)]).run(12)
    others = tuple(name for name in ABC if name != node)
    last = {views[-1] for views in party.views.values()}
    assert len(last) == 1
    assert last.pop().nodes == (*others, node)


def test_when_all_are_started_anew_they_come_together_again_under_a_later_epoch():
    party = Party(ABC, [back(3, node, "kept") for node in ABC]).run(16)
    assert [view.nodes for view in party.views["a"]] == [ABC, ABC]
    assert party.views["a"][1].epoch > party.views["a"][0].epoch


@pytest.mark.parametrize("state", ["kept", "lost"])
def test_of_two_the_leader_is_started_anew_and_the_other_still_has_the_model(state):
    party = Party("ab", [back(3, "a", state)]).run(12)
    assert party.members("b")[0] == ("a", "b")
    assert party.members("b")[-1] == party.members("a")[-1] == ("b", "a")


def test_one_that_is_not_taken_in_says_for_whom_it_waits():
    cut = Partition(sides=(("c",), ("b",)), **after(0, 9))  # both reach a: one of them is in its cluster first
    party = Party(ABC, [cut])
    party.config = type(party.config)(nodes=2, preset="low_latency", peer_timeout_s=PositiveSeconds(2))
    party.run(30)
    assert any("waiting to be taken in by the cluster of a" in what for _, what in party.told)
    assert sorted(party.members("a")[-1]) == list(ABC)


def test_an_address_where_another_node_answers_does_not_hide_the_one_that_was_announced_there():
    """a and c were told that the other is where b is; b answers there, and knows where they are."""
    cut = Partition(sides=(("c",), ("a",)), **after(0, 3))
    party = Party(ABC, [cut], peer_timeout_s=PositiveSeconds(2))

    async def mislead(node: ClusterNode) -> None:
        for about in "ac":
            record = Announcement(about, f"old {about}", "", 1, "b:52415")
            await party.world.host("b").lan.advertise(record.service())

    party.meanwhile = {"b": mislead}
    party.run(20)
    assert sorted(party.views["b"][-1].nodes) == list(ABC)


class WithCopy(Party):
    """Host d has the key of host a."""

    def node(self, host: VirtualHost) -> ClusterNode:
        node = "a" if host.name == "d" else host.name
        boot = host.rng("boot").getrandbits(47)
        me = NodeInfo(node, boot, host.name, f"{host.name}:52415", f"{host.name}:52416")
        return ClusterNode(host, me, self.config, lambda what: self.told.append((host.name, what)))


@pytest.mark.slow
def test_one_that_was_refused_while_a_copy_of_it_was_there_comes_in_once_the_copy_has_gone():
    party = WithCopy("abcd", [Restart(Seconds(4), "a", down_s=Seconds(16)), Crash(Seconds(60), "d")])
    party.config = Cluster(nodes=3, preset="low_latency")
    party.late_s["d"] = 10.0
    party.run(120)
    joined = [[member.name for member in view.members] for view in party.views["b"]]
    assert ["b", "c", "d"] in joined
    assert joined[-1] == ["b", "c", "a"]
    assert any("give each machine its own node key" in what for name, what in party.told if name == "a")


def test_a_sole_member_that_is_started_anew_is_in_a_view_at_once():
    party = Party("a", [back(3, "a", "kept")]).run(5)
    assert party.members("a") == [("a",), ("a",)]
    first, second = party.views["a"]
    assert (second.lineage, second.previous) == (first.lineage, first.epoch)
    assert party.when_s["a", second.epoch] < 3.6


def test_the_last_member_is_in_a_view_again_when_the_others_left_before_it():
    async def leave(node: ClusterNode) -> None:
        await party.world.host(node.us.name).clock.sleep({"b": 4, "c": 3}[node.us.name])
        await node.leave()
        await node.stop("it has left")

    party = Party(ABC, [back(7, "a", "kept")])
    party.meanwhile = {"b": leave, "c": leave}
    party.run(12)
    assert party.members("a") == [ABC, ("a", "b"), ("a",), ("a",)]
    assert party.when_s["a", party.views["a"][-1].epoch] < 8


def full_disk(node: str, duration_s: float = 100) -> FullDisk:
    return FullDisk(at_s=Seconds(3), node=node, duration_s=PositiveSeconds(duration_s))


@pytest.mark.parametrize("full", ["a", "b"])
def test_a_member_with_a_full_disk_has_no_vote_and_stays(full):
    party = Party("abcde", [full_disk(full), Crash(at_s=Seconds(5), node="e")]).run(12)
    assert [party.members(name) for name in "abcd"] == [[tuple("abcde"), tuple("abcd")]] * 4
    record = kept(party.world.host(full).store, "membership", AcceptorState)
    assert record is not None
    assert record.view == party.views[full][0]  # as it was when there was room
    said = [what for name, what in party.told if name == full and "cannot be written" in what]
    assert said == [
        "membership, on a virtual disk: cannot be written: No space left on device; until it can be written, this "
        "machine has no vote on who is in the cluster"
    ]


def test_no_word_is_given_that_would_not_outlive_a_crash():
    party = Party(ABC, [full_disk("a"), Crash(at_s=Seconds(5), node="c")]).run(12)
    assert party.members("a") == party.members("b") == [ABC]  # b's vote is one of three
    waiting = "waiting for c: a cannot write to its disk and has no vote, and b cannot decide alone (quorum = tiebreak)"
    assert any(name == "b" and what.startswith(waiting) for name, what in party.told)


def test_a_member_votes_again_when_there_is_room():
    party = Party(ABC, [full_disk("a", 9), Crash(at_s=Seconds(5), node="c")]).run(20)
    assert party.members("a") == party.members("b") == [ABC, ("a", "b")]


@pytest.mark.slow
def test_who_cannot_go_on_without_those_that_did_joins_them_where_any_side_may():
    alone = Partition(sides=(("d",), ABC), **after(5, 5))
    party = Party("abcd", [full_disk("a"), full_disk("d"), alone], quorum="any").run(30)
    # Of four members two can vote, and a does not count: theirs is a branch. Nothing draws them back into the old view.
    assert [party.members(name) for name in ABC] == [[tuple("abcd"), ABC, tuple("abcd")]] * 3
    assert party.members("d") == [tuple("abcd")] * 2


def test_a_cluster_that_cannot_change_is_not_what_others_wait_for():
    a_first = Party("ab", [full_disk("a")], quorum="any")
    a_first.config = Cluster(nodes=1, preset="low_latency", quorum="any")
    a_first.late_s = {"b": 5}
    assert a_first.run(20).members("a") == [("a",), ("b", "a")]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (FullDisk(node="d", **after(1, 7)), "d: membership, on a virtual disk: cannot be written: No space left"),
        (SlowDisk(node="d", takes_s=PositiveSeconds(1), **after(1, 7)), "d: its disk takes longer than a heartbeat"),
    ],
)
def test_a_machine_joins_members_that_work_once_its_vote_can_be_counted_on(fault: AnyFault, why: str):
    party = Party("abcd", [fault])
    party.config = Cluster(nodes=3, preset="low_latency")
    party.late_s = {"d": 3.0}
    party.run(20)
    assert party.members("a") == [ABC, tuple("abcd")]
    assert party.when_s["d", party.views["d"][0].epoch] > 8
    assert any(name == "d" and what.startswith(f"not ready to join: {why}") for name, what in party.told)


@pytest.mark.slow
def test_a_member_that_is_lost_as_soon_as_it_is_let_in_waits_longer_each_time():
    pauses = [Pause(node="c", **after(at_s, 3)) for at_s in (3, 7, 16, 32)]
    party = Party(ABC, pauses).run(60)
    changes = pairwise(party.views["a"])
    let_in_s = [party.when_s["a", new.epoch] for old, new in changes if "c" in new.nodes and "c" not in old.nodes]
    assert [round(at_s - pause.over_s) for at_s, pause in zip(let_in_s, pauses, strict=True)] == [
        1,
        4,
        9,
        19,
    ]  # 5, 10 and 20 s after it was missed


def test_a_machine_whose_work_is_done_soon_sees_that_it_can_join():
    party = Party("ab")
    party.config = Cluster(nodes=1, preset="low_latency", quorum="any")

    async def well_late(node: ClusterNode) -> None:
        async def check(peers: Sequence[tuple[str, float]]) -> tuple[str, list[str]]:
            return "" if party.world.loop.time() > 40 else "too hot", ["" for _ in peers]

        node.check_with(check)
        await party.world.host("b").clock.sleep(33)
        while node.preparing(party.views["b"][-1].epoch):
            await party.world.host("b").clock.sleep(0.5)

    party.meanwhile["b"] = well_late
    party.run(60)
    assert party.members("b") == [("b",), ("a", "b")]
    assert 40 < party.when_s["b", party.views["b"][-1].epoch] < 44


def test_a_machine_that_waits_before_it_checks_again_hears_that_the_work_of_the_others_is_done():
    party = Party("ab")
    party.config = Cluster(nodes=1, preset="low_latency")

    async def well_late(node: ClusterNode) -> None:
        async def check(peers: Sequence[tuple[str, float]]) -> tuple[str, list[str]]:
            return "" if party.world.loop.time() > 33 else "too hot", ["" for _ in peers]

        node.check_with(check)
        await party.world.host("b").clock.sleep(60)

    async def done(node: ClusterNode) -> None:
        await party.world.host("a").clock.sleep(35)
        while node.preparing(party.views["a"][-1].epoch):
            await party.world.host("a").clock.sleep(0.5)

    party.meanwhile = {"a": done, "b": well_late}
    party.run(60)
    assert party.members("a") == [("a",), ("a", "b")]
    assert 35 < party.when_s["a", party.views["a"][-1].epoch] < 39


@pytest.mark.slow
def test_a_machine_that_cannot_join_checks_the_members_for_the_last_wish_alone():
    flaps = [Partition(sides=(("c",), ("a", "b")), **after(at_s, 3)) for at_s in range(3, 93, 6)]
    party, most = Party(ABC, flaps), [0, 0]

    async def never_well(node: ClusterNode) -> None:
        async def check(peers: Sequence[tuple[str, float]]) -> tuple[str, list[str]]:
            return "too hot", ["" for _ in peers]

        node.check_with(check)
        for half in range(2):
            for _ in range(45):
                await party.world.host("c").clock.sleep(1)
                most[half] = max(most[half], party.world.loop.tasks_of(party.world.host("c")))

    party.meanwhile["c"] = never_well
    party.run(93)
    assert most[1] <= most[0]
