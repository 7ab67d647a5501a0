"""Asking a running cluster from outside how it stands."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hcsim.cluster.membership_source import NodeInfo
from hcsim.cluster.messages import StatusReply
from hcsim.cluster.node import ClusterNode
from hcsim.cluster.status_client import StatusClient, ask
from hcsim.cluster.view import Member
from hcsim.config import Crash
from hcsim.errors import HcsimError
from hcsim.units import Seconds
from hcsim.virtual.host import VirtualHost
from tests.cluster.nodes import Party

ABC = ("a", "b", "c")


def surveyed(party: Party, peers: Sequence[str], look_s: float) -> StatusClient:
    """What host a finds out, some heartbeats after it is in a view."""
    surveys: list[StatusClient] = []

    async def look(node: ClusterNode) -> None:
        host = party.world.host("a")
        await node.view(-1)
        await host.clock.sleep(3.0)
        surveys.append(StatusClient(host, "", 1.0))
        await surveys[0].run(peers, look_s)

    party.meanwhile["a"] = look
    party.run(10)
    return surveys[0]


def check(told: dict[str, StatusReply]) -> None:
    assert sorted(told) == [*ABC]
    for node, each in told.items():
        assert each.view.nodes == ABC
        assert each.status.us.node == node
        assert [link.node for link in each.links] == [other for other in ABC if other != node]
        for link in each.links:
            assert link.address.partition(":")[0] == link.node
            assert link.latency_s == pytest.approx(2e-4, rel=0.5), "there and back over a switch of 0.1 ms"
            assert not link.suspected


def test_everybody_who_announces_itself_tells_its_view_and_its_links() -> None:
    party = Party(ABC)
    check(surveyed(party, (), 1.0).told)
    assert party.members("b") == [ABC], "whoever asks is no node for that"


def test_one_address_is_enough_to_find_them_all() -> None:
    party = Party(ABC, discover=False, peers=("a:52415", "b:52415", "c:52415"))
    check(surveyed(party, ("c:52415",), 0.001).told)


def test_who_does_not_answer_is_named_with_the_reason() -> None:
    survey = surveyed(Party(ABC), ("b:1",), 1.0)
    assert "b:1" in survey.failures["b:1"]
    check(survey.told)


def test_a_leader_that_is_gone_for_good_is_waited_for_until_a_person_says_so() -> None:
    party = Party(("a", "b"), faults=[Crash(Seconds(2.0), "a")])

    async def say(node: ClusterNode) -> None:
        host = party.world.host("b")
        await host.clock.sleep(10.0)
        assert party.members("b") == [("a", "b")]
        await ask(host, "b:52415", 1.0, forget="a")

    party.meanwhile["b"] = say
    party.run(20)
    assert party.members("b") == [("a", "b"), ("b",)]
    assert any("hcsim cluster forget NAME" in text for name, text in party.told if name == "b")


class Renamed(Party):
    """Host c calls itself a."""

    def node(self, host: VirtualHost) -> ClusterNode:
        name = "a" if host.name == "c" else host.name
        me = NodeInfo(host.name, host.rng("boot").getrandbits(47), name, f"{host.name}:52415", f"{host.name}:52416")
        return ClusterNode(host, me, self.config, lambda what: self.told.append((host.name, what)))


def test_one_that_is_gone_for_good_is_known_from_another_machine_under_its_name() -> None:
    party = Renamed(ABC, faults=[Crash(Seconds(2.0), "a")])
    party.late_s["c"] = 5.0
    awaited: list[Member] = []
    members: list[list[str]] = []

    async def say(node: ClusterNode) -> None:
        host = party.world.host("b")
        await host.clock.sleep(10.0)
        survey = StatusClient(host, "", 1.0)
        await survey.run(("b:52415", "c:52415"), 1.0)
        awaited.extend(survey.awaited())
        members.append(sorted(survey.told["b"].view.nodes))
        await ask(host, "b:52415", 1.0, forget=awaited[0].node)
        await host.clock.sleep(5.0)
        members.append(sorted((await ask(host, "b:52415", 1.0)).view.nodes))

    party.meanwhile["b"] = say
    party.run(20)
    assert [(member.node, member.name) for member in awaited] == [("a", "a")]
    assert members == [["a", "b"], ["b", "c"]]
    assert ("b", "a is gone for good, as somebody says") in party.told


def test_nobody_is_there() -> None:
    party = Party(ABC)

    async def main() -> None:
        with pytest.raises(HcsimError, match="b:52415"):
            await ask(party.world.host("a"), "b:52415", 1.0)

    party.world.run(main())
