"""The local network through multicast DNS (RFC 6762) and DNS service discovery (RFC 6763)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

from zeroconf import Error, InterfaceChoice, IPVersion, NonUniqueNameException, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from hcsim.errors import ConfigError, UsageError
from hcsim.runtime.address import address_at, hosts_of
from hcsim.runtime.lan import Service, Sighting

SERVICE_TYPE = "_hcsim._tcp.local."
_RESOLVE_TIMEOUT_MS = 3000
_MOST_RESOLVING = 32


class MdnsLan:
    """Announces and browses services of type `_hcsim._tcp`; opens its sockets at the first use."""

    def __init__(self, interfaces: tuple[str, ...] = ()) -> None:
        self._interfaces = interfaces
        self._responder: AsyncZeroconf | None = None
        self._advertised: dict[str, AsyncServiceInfo] = {}

    async def advertise(self, service: Service) -> None:
        """Announce a service under its IP addresses and port; a host that was given by name is looked up."""
        hosts, port = hosts_of(service.address)
        addresses = [address for host in hosts for address in await _numeric(host)]
        info = AsyncServiceInfo(
            SERVICE_TYPE,
            f"{service.name}.{SERVICE_TYPE}",
            port=port,
            parsed_addresses=list(dict.fromkeys(addresses)),
            properties=dict(service.properties),
            server=f"{service.name}.local.",
        )
        responder = self._opened()
        announce = (
            responder.async_update_service if service.name in self._advertised else responder.async_register_service
        )
        try:
            await (await announce(info))
        except NonUniqueNameException:
            raise ConfigError(
                f"another machine announces itself as {service.name}: give each its own name and its own node key"
            ) from None
        self._advertised[service.name] = info

    async def withdraw(self, name: str) -> None:
        """Say goodbye."""
        info = self._advertised.pop(name, None)
        if info is None:
            raise UsageError(f"{name} is not advertised here")
        await (await self._opened().async_unregister_service(info))

    async def browse(self) -> AsyncIterator[Sighting]:
        """All services in view, then every change."""
        responder = self._opened()
        found: asyncio.Queue[tuple[str, Service | None]] = asyncio.Queue()
        resolving: dict[str, asyncio.Task[None]] = {}
        changed: set[str] = set()
        """Those that have changed while they were resolved."""
        slots = asyncio.Semaphore(_MOST_RESOLVING)

        async def resolve(name: str) -> None:
            async with slots:
                changed.add(name)
                while name in changed:
                    changed.discard(name)
                    if (service := await self._resolve(name)) is not None:
                        found.put_nowait((name, service))
            del resolving[name]

        def note(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
            if state_change is ServiceStateChange.Removed:
                if name in resolving:
                    resolving.pop(name).cancel()
                found.put_nowait((name, None))
            elif name in resolving:
                changed.add(name)
            else:  # beside the others: a name that nobody answers for must not hold them up
                resolving[name] = asyncio.create_task(resolve(name), name=f"resolve {name}")

        browser = AsyncServiceBrowser(responder.zeroconf, SERVICE_TYPE, handlers=[note])
        in_view: dict[str, Service] = {}
        try:
            while True:
                name, service = await found.get()
                if service is None:
                    if name in in_view:
                        yield Sighting(in_view.pop(name), gone=True)
                elif in_view.get(name) != service:
                    in_view[name] = service
                    yield Sighting(service)
        finally:
            tasks = tuple(resolving.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await browser.async_cancel()

    async def close(self) -> None:
        """Withdraw everything and close the sockets."""
        if self._responder is not None:
            await self._responder.async_unregister_all_services()
            await self._responder.async_close()
            self._responder = None

    def _opened(self) -> AsyncZeroconf:
        if self._responder is None:
            self._responder = self._open(IPVersion.All) or self._open(IPVersion.V4Only)
        if self._responder is None:
            raise ConfigError("this machine's network does not carry multicast: give the others' addresses (peers)")
        return self._responder

    def _open(self, version: IPVersion) -> AsyncZeroconf | None:
        try:
            return AsyncZeroconf(interfaces=list(self._interfaces) or InterfaceChoice.All, ip_version=version)
        except (OSError, RuntimeError):  # the second: no address of that version
            return None

    async def _resolve(self, name: str) -> Service | None:
        """Where a service is and what it says; None when it vanished meanwhile, or never was one."""
        try:
            info = AsyncServiceInfo(SERVICE_TYPE, name)
            if not await info.async_request(self._opened().zeroconf, _RESOLVE_TIMEOUT_MS):
                return None
        except Error:  # any device can announce a name that zeroconf does not take
            return None
        addresses = info.parsed_addresses()
        if not addresses or info.port is None:
            return None
        properties = {key: value or "" for key, value in info.decoded_properties.items()}
        return Service(name.removesuffix(f".{SERVICE_TYPE}"), address_at(addresses, info.port), properties)


async def _numeric(host: str) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{host} cannot be announced: {error.strerror}; give its IP address") from None
    return [str(sockaddr[0]) for *_, sockaddr in found]
