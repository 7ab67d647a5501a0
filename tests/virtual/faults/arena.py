"""Three hosts on an ideal gigabit switch, or a home with everything in it; and what tests of faults do there."""

from __future__ import annotations

import asyncio

from hcsim.config import AnyFault, Scenario, parse_scenario
from hcsim.runtime.frame import HEADER_BYTES
from hcsim.runtime.host import Service, Sighting
from hcsim.virtual.channel import VirtualChannel
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World
from tests.switches import on_switch

LATENCY_S = 1e-3
SECOND = 125_000_000 - HEADER_BYTES
"""What a gigabit link carries in one second."""

HOME = """
name = "home"
effects = "ideal"
[[medium]]
kind = "ethernet"
name = "switch"
rate = "1 Gb/s"
latency = "1 ms"
[[medium]]
kind = "wifi"
name = "air"
phy_rate = "800 Mb/s"
efficiency = 1.0
latency = "5 ms"
[[medium]]
kind = "ethernet"
name = "far"
home = "ben"
rate = "1 Gb/s"
latency = "1 ms"
[[medium]]
kind = "thunderbolt"
name = "desk"
[[medium.cable]]
between = ["studio", "mini"]
forward = "10 Gb/s"
[[medium.cable]]
between = ["mini", "pro"]
forward = "10 Gb/s"
[[medium.cable]]
between = ["studio", "pro"]
forward = "10 Gb/s"
[[wan]]
home = "home"
up = "100 Mb/s"
down = "100 Mb/s"
latency = "10 ms"
[[wan]]
home = "ben"
up = "100 Mb/s"
down = "100 Mb/s"
latency = "10 ms"
[[node]]
name = "studio"
machine = "ideal"
links = ["switch"]
[[node]]
name = "mini"
machine = "ideal"
links = ["switch", "air"]
[[node]]
name = "pro"
machine = "ideal"
links = ["switch"]
[[node]]
name = "laptop"
machine = "ideal"
links = ["switch", "air"]
[[node]]
name = "ben"
machine = "ideal"
links = ["far"]
"""
"""Every kind of medium, in two homes."""


def home() -> Scenario:
    return parse_scenario(HOME, "home")


def world_with(*faults: AnyFault) -> World:
    return World(on_switch(("a", "b", "c"), faults, latency="1 ms"))


async def connected(world: World, source: str = "a", target: str = "b") -> tuple[VirtualChannel, VirtualChannel]:
    listener = await world.host(target).listen(f"{target}:0")
    near = await world.host(source).connect(listener.address)
    far = await listener.accept()
    far.limit(1 << 40)
    await listener.close()
    return near, far


async def until(at_s: float) -> None:
    await asyncio.sleep(at_s - asyncio.get_running_loop().time())


async def is_silent(channel: VirtualChannel, for_s: float) -> bool:
    try:
        async with asyncio.timeout(for_s):
            await channel.recv(lambda _: None)
    except TimeoutError:
        return True
    return False


async def announced(world: World, name: str, at_s: float, until_s: float) -> None:
    """A host announces itself, and time passes."""
    await until(at_s)
    host = world.host(name)
    await host.spawn(host.lan.advertise(Service(name, f"{name}:1")), name="advertise")
    await until(until_s)


class Watcher:
    """Browses on a host, and keeps what it sees: when (in seconds), which address, and whether it left."""

    def __init__(self, host: VirtualHost) -> None:
        self._host = host
        self.seen: list[tuple[float, str, bool]] = []
        host.spawn(self._browse(), name="browse")

    async def _browse(self) -> None:
        async for sighting in self._host.lan.browse():
            self._keep(sighting)

    def _keep(self, sighting: Sighting) -> None:
        self.seen.append((round(self._host.loop.time(), 2), sighting.service.address, sighting.gone))
