"""The local network through multicast DNS (RFC 6762) and DNS service discovery (RFC 6763)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

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
        search = _Search(self._resolve)
        browser = AsyncServiceBrowser(responder.zeroconf, SERVICE_TYPE, handlers=[search.note])
        in_view: dict[str, Service] = {}
        try:
            while True:
                name, service = await search.found()
                if service is None:
                    if name in in_view:
                        yield Sighting(in_view.pop(name), gone=True)
                elif in_view.get(name) != service:
                    in_view[name] = service
                    yield Sighting(service)
        finally:
            try:
                await browser.async_cancel()  # first: until then it hears of more
            finally:
                await search.end()

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


class _Search:
    """Resolves the names that a browser hears of, beside each other: one without an answer holds up no other."""

    def __init__(self, resolve: Callable[[str], Awaitable[Service | None]]) -> None:
        self._resolve = resolve
        self._found: asyncio.Queue[tuple[str, Service | None] | Exception] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._changed: set[str] = set()
        """Those that have changed while they were resolved."""
        self._slots = asyncio.Semaphore(_MOST_RESOLVING)

    def note(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        """For the browser to call, by these names."""
        if state_change is ServiceStateChange.Removed:
            if name in self._resolving:
                self._resolving.pop(name).cancel()
            self._found.put_nowait((name, None))
        elif name in self._resolving:
            self._changed.add(name)
        else:
            task = asyncio.create_task(self._follow(name), name=f"resolve {name}")
            self._resolving[name] = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def found(self) -> tuple[str, Service | None]:
        """The next name, with what it stands for now; raises what a resolution raised."""
        found = await self._found.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def end(self) -> None:
        """Resolve nothing more."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, name: str) -> None:
        """Resolve a name until it has not changed meanwhile."""
        try:
            async with self._slots:
                self._changed.add(name)
                while name in self._changed:
                    self._changed.discard(name)
                    if (service := await self._resolve(name)) is not None:
                        self._found.put_nowait((name, service))
        except Exception as error:
            self._found.put_nowait(error)
        finally:
            if self._resolving.get(name) is asyncio.current_task():  # else it was removed, and perhaps came again
                del self._resolving[name]


async def _numeric(host: str) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{host} cannot be announced: {error.strerror}; give its IP address") from None
    return [str(sockaddr[0]) for *_, sockaddr in found]
