"""Hosts of either world, for functions that never learn where they run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from hcsim.config import Scenario, parse_scenario
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.real.tls import ClusterTls
from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.host import Host
from hcsim.telemetry.trace import Event, Trace

Body = Callable[..., Awaitable[Any]]
"""Takes all hosts of an arena."""
PAIR = ("left", "right")
GUARD_S = 30.0
MAX_FRAME_BYTES = 64 * 2**20


class Arena(Protocol):
    """Hosts that reach each other, and what carries their bytes."""

    carrier: str
    traced: list[Event]
    """What the hosts have put into their traces, after a run."""

    def run(self, body: Body) -> Any:
        """Run the body on the hosts, and return its result."""

    def address(self, host: Host) -> str:
        """Return where the host can listen."""

    async def channels(self, left: Host, right: Host) -> tuple[Channel, Channel]:
        """Return both ends of a new connection: the one that dialled, the one that accepted."""


class _Hosts:
    def __init__(self, names: Sequence[str] = PAIR) -> None:
        self.traced: list[Event] = []
        self._names = tuple(names)
        self._opened: list[Channel] = []

    def address(self, host: Host) -> str:
        raise NotImplementedError

    async def channels(self, left: Host, right: Host) -> tuple[Channel, Channel]:
        listener: Listener = await right.listen(self.address(right))
        client = await left.connect(listener.address)
        server = await listener.accept()
        await listener.close()
        self._opened += [client, server]
        for channel in (client, server):
            channel.limit(MAX_FRAME_BYTES)
        return client, server

    async def _bounded(self, body: Body, hosts: Sequence[Host]) -> Any:
        try:
            async with asyncio.timeout(GUARD_S):
                return await body(*hosts)
        finally:
            while self._opened:
                await self._opened.pop().close()


class RealArena(_Hosts):
    """Hosts of this machine that reach each other by its loopback interface."""

    carrier = "TCP"
    shared_memory = False

    def run(self, body: Body) -> Any:
        """Run the body in an event loop of its own."""
        from contextlib import AsyncExitStack

        from hcsim.real.host import RealHost, RealOptions

        async def main() -> Any:
            async with AsyncExitStack() as stack:
                hosts: list[Host] = []
                for name in self._names:
                    options = RealOptions(name, shared_memory=self.shared_memory, tls=self.tls(name))
                    hosts.append(await stack.enter_async_context(RealHost(options, trace=trace)))
                return await self._bounded(body, hosts)

        trace = Trace(self.traced.extend)
        try:
            return asyncio.run(main())
        finally:
            trace.digest()

    def address(self, host: Host) -> str:
        """Return any free port of the loopback interface."""
        return "127.0.0.1:0"

    def tls(self, name: str) -> ClusterTls | None:
        """Return what a host encrypts with, if it does."""
        return None


class SharedArena(RealArena):
    """The same through shared memory."""

    carrier = "shared memory"
    shared_memory = True


class TlsArena(RealArena):
    """The same by TLS, with the certificates of a cluster's members."""

    carrier = "TLS"

    def tls(self, name: str) -> ClusterTls | None:
        """Return the credentials of a cluster that exists for this run alone."""
        number = self._names.index(name)
        return ClusterTls(NodeKey(bytes([number + 1]) * 32), ClusterSecret(bytes(range(16))))


class WebSocketArena(RealArena):
    """The same by WebSockets."""

    carrier = "WebSocket"

    def address(self, host: Host) -> str:
        """Return any free port of the loopback interface."""
        return "ws://127.0.0.1:0"


class GrpcArena(RealArena):
    """The same by gRPC."""

    carrier = "gRPC"

    def address(self, host: Host) -> str:
        """Return any free port of the loopback interface."""
        return "grpc://127.0.0.1:0"


class VirtualArena(_Hosts):
    """Hosts of a simulated home."""

    carrier = "the simulated network"

    def run(self, body: Body) -> Any:
        """Run the body in a world of its own."""
        from hcsim.virtual.world import World

        world = World(self.scenario(), sink=self.traced.extend)
        try:
            return world.run(self._bounded(body, [*map(world.host, self._names)]))
        finally:
            world.trace.digest()

    def address(self, host: Host) -> str:
        """Return any free port of the host."""
        return f"{host.name}:0"

    def scenario(self) -> Scenario:
        """Return a home with all hosts on a switch, and the first on the Wi-Fi too."""
        links = ['["air", "switch"]'] + ['["switch"]'] * (len(self._names) - 1)
        nodes = ", ".join(
            f'{{ name = "{name}", machine = "M2", links = {link} }}'
            for name, link in zip(self._names, links, strict=True)
        )
        media = '{ kind = "wifi", name = "air" }, { kind = "ethernet", name = "switch", rate = "10 Gb/s" }'
        return parse_scenario(f'name = "arena"\nmedium = [{media}]\nnode = [{nodes}]', "arena")


ARENAS: dict[str, Callable[[], Arena]] = {
    "real": RealArena,
    "shared": SharedArena,
    "virtual": VirtualArena,
    "websocket": WebSocketArena,
    "grpc": GrpcArena,
}
