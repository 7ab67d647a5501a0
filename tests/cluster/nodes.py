"""Virtual clusters whose nodes do nothing but be there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from hcsim.cluster.membership_source import NodeInfo
from hcsim.cluster.node import ClusterNode
from hcsim.cluster.view import View
from hcsim.config import AnyFault, Cluster
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World
from tests.switches import on_switch


class Party:
    """Runs a node on every host for a while, and notes every view that one could work in."""

    def __init__(self, names: Sequence[str], faults: Sequence[AnyFault] = (), **changes: object) -> None:
        self.world = World(on_switch(names, faults))
        self.config = Cluster(nodes=len(names), preset="low_latency", **changes)  # type: ignore[arg-type]
        self.views: dict[str, list[View]] = {name: [] for name in names}
        self.when_s: dict[tuple[str, int], float] = {}
        self.told: list[tuple[str, str]] = []
        self.late_s: dict[str, float] = {}
        """Hosts that start later."""
        self.meanwhile: dict[str, Callable[[ClusterNode], Awaitable[None]]] = {}
        """What a host does beside."""

    def node(self, host: VirtualHost) -> ClusterNode:
        boot = host.rng("boot").getrandbits(47)
        me = NodeInfo(host.name, boot, host.name, f"{host.name}:52415", f"{host.name}:52416")
        return ClusterNode(host, me, self.config, lambda what: self.told.append((host.name, what)))

    def run(self, seconds: float) -> Party:
        self.results = self.world.run_on_all(lambda host: self._live(host, seconds))
        return self

    async def _live(self, host: VirtualHost, seconds: float) -> View:
        await host.clock.sleep(self.late_s.get(host.name, 0.0))
        node = self.node(host)
        await node.start()
        watching = host.spawn(self._watch(host, node), name="watch")
        if host.name in self.meanwhile:
            host.spawn(self.meanwhile[host.name](node), name="meanwhile")
        await host.clock.sleep(seconds - self.world.loop.time())
        watching.cancel()
        last = self.views[host.name][-1]
        await node.stop()
        return last

    async def _watch(self, host: VirtualHost, node: ClusterNode) -> None:
        epoch = -1
        while True:
            view = await node.view(epoch)
            epoch = view.epoch
            self.views[host.name].append(view)
            self.when_s[host.name, epoch] = self.world.loop.time()

    def members(self, name: str) -> list[tuple[str, ...]]:
        """The members of each view that a host could work in."""
        return [view.nodes for view in self.views[name]]
