"""One body, two worlds: the `arena` fixture runs a test body on a pair of hosts of either world, over every carrier.

A body is `async def body(left, right)` and never learns where it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import pytest

from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.host import Host
from hcsim.telemetry.trace import Event, Trace

Body = Callable[[Host, Host], Awaitable[Any]]
NAMES = ("left", "right")
GUARD_S = 30.0
MAX_FRAME_BYTES = 64 * 2**20

_TWO_ON_ETHERNET = """
name = "arena"
medium = [{ kind = "wifi", name = "air" }, { kind = "ethernet", name = "switch", rate = "10 Gb/s" }]
node = [
    { name = "left", machine = "M2", links = ["air", "switch"] },
    { name = "right", machine = "M2", links = ["switch"] },
]
"""


class Arena(Protocol):
    carrier: str
    traced: list[Event]
    """What the hosts have put into their traces, after a run."""

    def run(self, body: Body) -> Any: ...

    def address(self, host: Host) -> str:
        """Where the host can listen."""

    async def channels(self, left: Host, right: Host) -> tuple[Channel, Channel]:
        """Both ends of a new connection: the one that dialled, the one that accepted."""


class _Arena:
    def __init__(self) -> None:
        self.traced: list[Event] = []
        self._opened: list[Channel | Listener] = []

    def address(self, host: Host) -> str:
        raise NotImplementedError

    async def channels(self, left: Host, right: Host) -> tuple[Channel, Channel]:
        listener = await right.listen(self.address(right))
        client = await left.connect(listener.address)
        server = await listener.accept()
        await listener.close()
        self._opened += [client, server]
        for channel in (client, server):
            channel.limit(MAX_FRAME_BYTES)
        return client, server

    async def _bounded(self, body: Body, left: Host, right: Host) -> Any:
        try:
            async with asyncio.timeout(GUARD_S):
                return await body(left, right)
        finally:
            for channel in self._opened:
                await channel.close()


class RealArena(_Arena):
    carrier = "TCP"
    shared_memory = False

    def run(self, body: Body) -> Any:
        from hcsim.real.host import RealHost, RealOptions

        async def main() -> Any:
            left_options, right_options = (RealOptions(name, shared_memory=self.shared_memory) for name in NAMES)
            async with RealHost(left_options, trace=trace) as left, RealHost(right_options, trace=trace) as right:
                return await self._bounded(body, left, right)

        trace = Trace(self.traced.extend)
        try:
            return asyncio.run(main())
        finally:
            trace.digest()

    def address(self, host: Host) -> str:
        return "127.0.0.1:0"


class SharedArena(RealArena):
    carrier = "shared memory"
    shared_memory = True


class WebSocketArena(RealArena):
    carrier = "WebSocket"

    def address(self, host: Host) -> str:
        return "ws://127.0.0.1:0"


class GrpcArena(RealArena):
    carrier = "gRPC"

    def address(self, host: Host) -> str:
        return "grpc://127.0.0.1:0"


class VirtualArena(_Arena):
    carrier = "the simulated network"

    def run(self, body: Body) -> Any:
        from hcsim.config import parse_scenario
        from hcsim.virtual.world import World

        world = World(parse_scenario(_TWO_ON_ETHERNET, "arena"), sink=self.traced.extend)
        try:
            return world.run(self._bounded(body, *map(world.host, NAMES)))
        finally:
            world.trace.digest()

    def address(self, host: Host) -> str:
        return f"{host.name}:0"


ARENAS = {
    "real": RealArena,
    "shared": SharedArena,
    "virtual": VirtualArena,
    "websocket": WebSocketArena,
    "grpc": GrpcArena,
}


EVERY_DAY = ("real", "virtual")
"""One of each world; the other carriers are slow."""


@pytest.fixture(params=[pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.slow) for name in ARENAS])
def arena(request: pytest.FixtureRequest) -> Arena:
    return ARENAS[request.param]()
