"""Members that are expelled while a cluster works, in the virtual world: they are left out at once, and for good."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from hcsim.cluster.membership_source import NodeInfo
from hcsim.cluster.node import ClusterNode
from hcsim.cluster.view import View
from hcsim.config import Cluster
from hcsim.errors import HcsimError
from hcsim.identity.handshake import Credentials
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.identity.trust_store import StoredTrust, TrustStore
from hcsim.node import admitted
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World
from tests.switches import on_switch

FIRST = ClusterSecret(bytes(range(16)))
SECOND = ClusterSecret(bytes(range(1, 17)))


class Home:
    """Nodes of one cluster, each with its trust list, and what they say."""

    def __init__(self, *names: str, needed: int) -> None:
        self.world = World(on_switch(names))
        self.config = Cluster(nodes=needed, preset="low_latency")
        self.trusted: dict[str, TrustStore] = {}
        self.nodes: dict[str, ClusterNode] = {}
        self.views: dict[str, View] = {}
        self.told: list[tuple[str, str]] = []
        self.late: dict[str, float] = {}
        self.at: list[tuple[float, Callable[[], None]]] = []

    def key(self, name: str) -> NodeKey:
        return NodeKey(hashlib.sha256(name.encode()).digest())

    def start(self, host: VirtualHost, key: NodeKey) -> ClusterNode:
        boot, tell = host.rng("boot").getrandbits(40), lambda what: self.told.append((host.name, what))
        trusted = self.trusted[host.name] = TrustStore(FIRST, key, host.name, StoredTrust(host.store))
        proved = Credentials(key, FIRST, boot, host.rng("nonces").randbytes, trusted)
        me = NodeInfo(key.node_id, boot, host.name, f"{host.name}:52415", f"{host.name}:52416", trusted.namespace.hex())
        return ClusterNode(admitted(host, proved, tell), me, self.config, tell, None, trusted)

    def run(self, seconds: float) -> None:
        for at_s, act in self.at:
            self.world.loop.call_at(at_s, act)
        self.world.run_on_all(lambda host: self._live(host, seconds))

    async def _live(self, host: VirtualHost, seconds: float) -> None:
        await host.clock.sleep(self.late.get(host.name, 0.0))
        node = self.nodes[host.name] = self.start(host, self.key(host.name))
        await node.start()
        watching = host.spawn(self._watch(host.name, node), name="watch")
        await host.clock.sleep(seconds - self.world.loop.time())
        watching.cancel()
        await node.stop()

    async def _watch(self, name: str, node: ClusterNode) -> None:
        epoch = -1
        while True:
            self.views[name] = await node.view(epoch)
            epoch = self.views[name].epoch

    def members(self, name: str) -> list[str]:
        return sorted(member.name for member in self.views[name].members)

    def said(self, name: str, what: str) -> list[str]:
        return [text for host, text in self.told if host == name and what in text]


def test_members_that_meet_have_one_list_and_a_secret_that_is_replaced_reaches_all() -> None:
    home = Home("a", "b", "c", needed=3)
    home.at.append((10.0, lambda: home.trusted["a"].rotate(SECOND)))
    home.run(20.0)
    assert {home.members(name) == ["a", "b", "c"] for name in "abc"} == {True}
    assert {(store.digest, store.secret) for store in home.trusted.values()} == {(home.trusted["a"].digest, SECOND)}
    assert len({view.epoch for view in home.views.values()}) == 1
    assert not home.said("b", "refused")


def test_an_expelled_member_is_left_out_at_once_and_told_why_and_keeps_calling_in_vain() -> None:
    home = Home("a", "b", "x", needed=2)
    home.at.append((10.0, lambda: home.trusted["b"].rotate(SECOND, [home.key("x").node_id])))
    home.run(40.0)
    assert (home.members("a"), home.members("b")) == (["a", "b"], ["a", "b"])
    assert home.members("x") == ["a", "b", "x"]
    assert home.trusted["a"].secret == SECOND
    assert home.trusted["x"].secret == FIRST
    assert any("x was expelled" in text for text in home.said("a", "expelled"))
    assert any("this machine was expelled" in text for text in home.said("x", "refused us"))
    assert len(home.said("a", "we refused x")) <= 2
    assert len(home.said("x", "this machine was expelled")) <= 4


def test_of_two_members_one_goes_on_when_it_expels_the_other() -> None:
    home = Home("a", "x", needed=2)
    home.at.append((10.0, lambda: home.trusted["a"].rotate(SECOND, [home.key("x").node_id])))
    home.run(30.0)
    assert home.members("a") == ["a"]


def test_a_member_that_was_off_learns_the_secret_by_its_key_and_a_new_key_with_the_old_secret_does_not() -> None:
    home = Home("a", "b", "late", "x", needed=2)
    known = TrustStore(FIRST, home.key("a"), "a", StoredTrust(home.world.host("a").store))
    known.enlist(home.key("late").public, "late")
    home.late = {"late": 20.0, "x": 20.0}  # x has the phrase, and a key that nobody has seen
    home.at.append((10.0, lambda: home.trusted["a"].rotate(SECOND)))
    home.run(40.0)
    assert home.members("late") == ["a", "b", "late"]
    assert home.trusted["late"].secret == SECOND
    assert "x" not in home.members("a")
    assert home.trusted["x"].secret == FIRST
    for text in (home.said("x", "refused us")[0], home.said("a", "we refused")[0]):
        assert "not on the cluster's trust list: run `hcsim cluster invite`" in text


def test_an_expelled_member_that_comes_back_from_a_backup_changes_nothing() -> None:
    home = Home("a", "b", "x", needed=2)
    home.late = {"x": 20.0}
    known = TrustStore(FIRST, home.key("x"), "x", StoredTrust(home.world.host("x").store))
    for name in "ab":
        known.enlist(home.key(name).public, name)
    for name in "ab":
        StoredTrust(home.world.host(name).store).update(lambda saved: known.record)
    home.at.append((10.0, lambda: home.trusted["a"].rotate(SECOND, [home.key("x").node_id])))

    def retaliate() -> None:
        try:
            home.trusted["x"].rotate(FIRST, [home.key("a").node_id])
        except HcsimError as error:
            raise AssertionError from error

    home.at.append((21.0, retaliate))
    home.run(40.0)
    assert (home.members("a"), home.members("b")) == (["a", "b"], ["a", "b"])
    assert home.key("a").node_id in home.trusted["b"].list.members
