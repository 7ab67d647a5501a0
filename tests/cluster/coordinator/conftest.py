"""A coordinator and hosts around it, in either world: one body, `async def body(stage)`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import pytest

from hcsim.cluster.coordinator import Coordinator, CoordinatorClient, CoordinatorPolicy
from hcsim.runtime.channel import Listener
from hcsim.runtime.host import Host
from tests.conftest import free_addresses
from tests.switches import on_switch

GUARD_S = 60.0


class Stage(Protocol):
    hosts: dict[str, Host]

    async def kill(self, name: str) -> None:
        """The machine dies without a word."""


class _Stage:
    """What is the same in both worlds."""

    def __init__(self, hosts: dict[str, Host], addresses: dict[str, str]) -> None:
        self.hosts = hosts
        self.addresses = addresses
        self.notes: list[str] = []
        self._listener: Listener | None = None

    async def coordinator(self, policy: CoordinatorPolicy) -> Coordinator:
        host = self.hosts["hub"]
        self._listener = await host.listen(self.addresses["hub"])
        made = Coordinator(host, policy, note=self.notes.append)
        made.open(self._listener)
        return made

    async def stop(self, coordinator: Coordinator) -> None:
        await coordinator.close()
        assert self._listener is not None
        await self._listener.close()

    async def join(self, host: str, name: str = "", **options: Any) -> CoordinatorClient:
        where = self.hosts[host]
        return await CoordinatorClient.join(where, self.addresses["hub"], name or host, self.addresses[host], **options)

    async def kill(self, name: str) -> None:
        raise NotImplementedError


Body = Callable[[_Stage], Awaitable[Any]]


def run_virtual(names: list[str], body: Body, faults: tuple[Any, ...] = ()) -> Any:
    from hcsim.config import Crash
    from hcsim.virtual.world import World

    world = World(on_switch(names, faults))

    class Virtual(_Stage):
        async def kill(self, name: str) -> None:
            world.inject(Crash(at_s=world.loop.time(), node=name))
            await self.hosts["hub"].clock.sleep(0.001)

    stage = Virtual({name: world.host(name) for name in names}, {name: f"{name}:52416" for name in names})
    return world.run(body(stage))


def run_real(names: list[str], body: Body) -> Any:
    from hcsim.real.host import RealHost, RealOptions

    class Real(_Stage):
        async def kill(self, name: str) -> None:
            host = self.hosts[name]
            assert isinstance(host, RealHost)
            await host.close()  # its tasks end; its sockets stay open and say nothing

    async def main() -> Any:
        hosts = {name: RealHost(RealOptions(name)) for name in names}
        try:
            async with asyncio.timeout(GUARD_S):
                return await body(Real(dict(hosts), dict(zip(names, free_addresses(len(names)), strict=True))))
        finally:
            for host in hosts.values():
                await host.close()

    return asyncio.run(main())


@pytest.fixture(params=[run_real, run_virtual], ids=["real", "virtual"])
def staged(request: pytest.FixtureRequest) -> Callable[[list[str], Body], Any]:
    return request.param
