"""Which changes of a cluster are losses to a script that runs on some of its members."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from hcsim.cluster.node import ClusterNode
from hcsim.config import AnyFault, Crash, Partition, Restart
from hcsim.errors import HcsimError
from hcsim.runtime.channel import Listener
from hcsim.scripts.ipc import RankFailed, Stored
from hcsim.scripts.processes import end_of, lost
from hcsim.scripts.store import PORT, StoreClient, StoreService
from hcsim.units import PositiveSeconds, Seconds
from hcsim.virtual.host import VirtualHost
from tests.cluster.nodes import Party

Act = Callable[[VirtualHost, ClusterNode, StoreClient], Awaitable[None]]
KEEPER = "a"


async def _forever(host: VirtualHost, node: ClusterNode, store: StoreClient) -> None:
    await host.clock.sleep(1e6)


class Watched:
    """A script's members, and which loss each of them heard of, and when."""

    def __init__(self, names: str, *faults: AnyFault, ranks: int | None = None) -> None:
        self.party = Party([*names], faults)
        self.party.config = replace(self.party.config, nodes=ranks or len(names))
        self.heard: dict[str, RankFailed] = {}
        self.when_s: dict[str, float] = {}
        self.acts: dict[str, Act] = {}
        for name in names[: self.party.config.needed]:
            self.party.meanwhile[name] = self._watch

    async def _watch(self, node: ClusterNode) -> None:
        host = self.party.world.host(node.us.name)
        if host.life > 1:
            return
        address = f"{KEEPER}:{PORT}"
        if host.name == KEEPER:
            host.spawn(StoreService().serve(host, await host.listen(address)), name="store")
        store = StoreClient(host, KEEPER, address)
        view = await node.view(-1)
        watching = host.spawn(lost(host, node, view, view.members, store), name="losses")
        watching.add_done_callback(lambda task: self._note(host, task.result()) if not task.cancelled() else None)
        await self.acts.get(host.name, _forever)(host, node, store)
        watching.cancel()

    def _note(self, host: VirtualHost, failed: RankFailed) -> None:
        self.heard[host.name], self.when_s[host.name] = failed, host.loop.time()


async def _end_and_leave(host: VirtualHost, node: ClusterNode, store: StoreClient) -> None:
    """As a member does whose script has ended."""
    await host.clock.sleep(20.0)
    rank = node.status().us.name
    await store.do(Stored("set", (end_of("abc".index(rank)),), (b"",)))
    await node.leave()
    await node.stop()


def test_the_others_hear_whose_machine_fell_silent() -> None:
    watched = Watched("abc", Crash(at_s=Seconds(10), node="c"))
    watched.party.run(60)
    for name in "ab":
        assert watched.heard[name].rank == 2
        assert watched.heard[name].reason.startswith("rank 2 (c) was lost: silent")
        assert watched.when_s[name] < 20


def test_both_sides_of_a_split_hear_of_it_also_the_one_that_cannot_decide_alone() -> None:
    watched = Watched("ab", Partition(Seconds(10), (("a",), ("b",)), PositiveSeconds(50)))
    watched.party.run(59)
    assert {name: failed.rank for name, failed in watched.heard.items()} == {"a": 1, "b": 0}
    assert watched.party.members("b")[-1] == ("a", "b")


def test_a_machine_that_was_started_anew_has_lost_its_script() -> None:
    watched = Watched("ab", Restart(Seconds(10), "b", down_s=Seconds(0.1), clean=True))
    watched.party.run(60)
    assert watched.heard["a"] == RankFailed(1, "rank 1 (b) was lost: it was started anew")


@pytest.mark.parametrize("fault", [[], [Crash(at_s=Seconds(20), node="c")]])
def test_newcomers_that_join_and_are_lost_are_no_loss(fault: list[AnyFault]) -> None:
    watched = Watched("abc", *fault, ranks=2)
    watched.party.late_s["c"] = 10.0
    watched.party.run(60)
    assert ("a", "b", "c") in watched.party.members("a")
    assert not watched.heard


@pytest.mark.parametrize("leaver", ["a", "c"])
def test_who_leaves_when_its_script_has_ended_is_no_loss(leaver: str) -> None:
    watched = Watched("abc")
    watched.acts[leaver] = _end_and_leave
    watched.party.run(60)
    assert [*watched.party.members("b")[-1]] == [name for name in "abc" if name != leaver]
    assert not watched.heard


def test_who_ends_when_the_store_has_gone_with_its_keeper_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    async def only_until(self: StoreService, host: VirtualHost, listener: Listener) -> None:
        serving = host.spawn(serve(self, host, listener), name="serve")
        await host.clock.sleep(25.0)
        serving.cancel()
        await listener.close()
        for channel in [*host.channels]:
            if channel.ends[0].startswith(KEEPER):
                await channel.close()

    serve = StoreService.serve
    monkeypatch.setattr(StoreService, "serve", only_until)

    async def end_unheard(host: VirtualHost, node: ClusterNode, store: StoreClient) -> None:
        await host.clock.sleep(40.0)
        with pytest.raises(HcsimError):
            await store.do(Stored("set", (end_of(2),), (b"",), timeout_s=5.0))
        await node.leave()
        await node.stop()

    watched = Watched("abc")
    watched.acts = {"a": _end_and_leave, "c": end_unheard}
    watched.party.run(90)
    assert watched.party.members("b")[-1] == ("b",)
    assert not watched.heard
