"""Membership, election and health where other systems went wrong; each test has the line's id for its name."""

from __future__ import annotations

import pytest

from hcsim.config import Crash, Pause, parse_scenario
from hcsim.errors import ConfigError
from hcsim.units import PositiveSeconds, Seconds
from tests.cluster.nodes import Party


@pytest.mark.slow
def test_election_no_master():
    """Nodes of equal seniority that all see each other at the same instant have one leader, and keep it."""
    for count in range(2, 9):
        party = Party("abcdefgh"[:count]).run(10)
        assert {view.leader.node for views in party.views.values() for view in views} == {"a"}


@pytest.mark.slow
def test_election_self_timeout():
    """A node does not expire itself: without faults there is one view, for as long as one likes to look."""
    party = Party("abc").run(120)
    assert all(len(views) == 1 for views in party.views.values())


def test_view_by_local_guess():
    """Whatever each node happens to see first, all that work hold the same view in the same epoch."""
    for late in ({"b": 0.3}, {"a": 0.7, "c": 0.2}, {"a": 1.5, "b": 0.4, "d": 0.9}):
        party = Party("abcd")
        party.late_s = late
        party.run(8)
        by_epoch: dict[int, set[object]] = {}
        for views in party.views.values():
            for view in views:
                by_epoch.setdefault(view.epoch, set()).add(view)
        assert by_epoch
        assert all(len(views) == 1 for views in by_epoch.values())


def test_ring_once():
    """A view is replaced as often as it must be."""
    faults = [Pause(at_s=Seconds(3.0 + 8 * n), node="abc"[n % 3], duration_s=PositiveSeconds(4)) for n in range(4)]
    party = Party("abc", faults).run(40)
    assert len(party.views["a"]) == 7  # it misses two that were formed without it
    assert sorted(party.views["b"][-1].nodes) == ["a", "b", "c"]


def test_no_heartbeats_sent():
    """Healthy nodes that only compute, and say nothing of their own accord, are not evicted."""
    party = Party("ab").run(60)
    assert party.members("a") == [("a", "b")]


def test_rank_compaction():
    """After an eviction the ranks are again 0 … n−1, those who stayed keep their order, and who returns is last."""
    party = Party("abcd", [Pause(at_s=Seconds(3), node="b", duration_s=PositiveSeconds(6))]).run(16)
    assert party.members("d") == [tuple("abcd"), tuple("acd"), tuple("acdb")]


def test_peers_as_of_registration():
    """The first to come knows the last to come."""
    party = Party("abcd")
    party.late_s = {"b": 1.0, "c": 2.0, "d": 3.0}
    party.run(6)
    assert all(views[-1].nodes == tuple("abcd") for views in party.views.values())


def test_dead_worker_blocks():
    """Two that die at once hold nobody up."""
    faults = [Crash(at_s=Seconds(3), node=node) for node in ("a", "d")]
    party = Party("abcde", faults).run(12)
    assert party.members("e")[-1] == ("b", "c", "e")


@pytest.mark.parametrize("line", ['heartbeat = { interval = "0 s" }', 'peer_timeout = "-1 s"', "max_retries = 0"])
def test_coordinator_zero_timeout(line):
    """A zero or a negative interval is refused where it is read, with the key and what would be valid."""
    text = f'name = "t"\nnode = [{{ name = "a", machine = "M4" }}]\n[cluster]\n{line}\n'
    with pytest.raises(ConfigError, match=line.split()[0]):
        parse_scenario(text, "t")
