"""What went wrong when other systems chose their network, and does not here: one test each."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.config import Attachment, Scenario, load_scenario
from hcsim.launch.virtual_cluster import measure_topology
from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import Medium
from hcsim.transport.groups import GroupMembership
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World

STUDIOS = ("studio-1", "studio-2")
PORT = 52416


@pytest.mark.slow
def test_wifi_as_ethernet() -> None:
    """Two Studios have Wi-Fi, as `en0` and first in their service order, and a Thunderbolt cable: what they exchange
    goes over the cable when they go by what they measured, and over the air when they go by names and by order."""
    scenario = home_where_wifi_comes_first()
    topology = measure_topology(scenario)

    ways = {way.interface: way for way in topology.ways if (way.source, way.target) == STUDIOS}
    assert {name: way.medium for name, way in ways.items()} == {
        "en0": Medium.WIFI, "switch": Medium.ETHERNET, "bridge0": Medium.THUNDERBOLT,
    }  # fmt: skip
    assert topology.best(*STUDIOS) is ways["bridge0"]
    chosen = {us: topology.addresses(us, STUDIOS, PORT) for us in STUDIOS}
    assert chosen["studio-2"] == ("studio-1%bridge0:52416", "studio-2:52416")
    # Without a cable the wire is next, never the air.
    assert topology.best("studio-1", "mini") is next(w for w in topology.ways if w.interface == "switch"
                                                     and (w.source, w.target) == ("studio-1", "mini"))  # fmt: skip

    by_order = {us: tuple(f"{name}:{PORT}" for name in STUDIOS) for us in STUDIOS}
    naive_s, ours_s = (exchange_s(scenario, addresses) for addresses in (by_order, chosen))
    assert 3 < naive_s / ours_s < 25


def home_where_wifi_comes_first() -> Scenario:
    """The mixed home, whose Studios are on Wi-Fi too; routes are those of a Mac, by the order of services."""
    home = load_scenario("mixed-home")
    media = tuple(replace(medium, name="en0") if medium.name == "air" else medium for medium in home.media)
    nodes = []
    for node in home.nodes:
        links = [replace(link, medium="en0") if link.medium == "air" else link for link in node.links]
        nodes.append(replace(node, links=(Attachment("en0"), *links) if node.name in STUDIOS else tuple(links)))
    return replace(home, media=media, nodes=tuple(nodes), routes="service_order")


def exchange_s(scenario: Scenario, addresses: dict[str, tuple[str, ...]]) -> float:
    """How long the Studios take for an all-reduce when each dials these addresses."""
    world = World(scenario)

    async def studio(host: VirtualHost) -> float:
        if host.name not in STUDIOS:
            return 0.0
        us = GroupMembership(STUDIOS.index(host.name), addresses[host.name])
        async with await Group.open(host, us, Options()) as group:
            await group.barrier()
            began_s = host.clock.elapsed()
            await group.all_reduce(Phantom(64 << 20), algorithm="ring")
            return host.clock.elapsed() - began_s

    times_s = world.run_on_all(studio)
    assert all(isinstance(time_s, float) for time_s in times_s), times_s
    return max(time_s for time_s in times_s if isinstance(time_s, float))
