"""The local network through multicast DNS (RFC 6762) and DNS service discovery (RFC 6763).

Any device on the local network can send any number of packets, so the cost of each is bounded. Packets beyond a
rate are dropped before they are parsed. There is a rate for each source address, so that a flood from one does
not affect the others, and one for all sources, since source addresses can be forged. The numbers of names that
are resolved at once and of services that are kept are bounded. zeroconf bounds its own cache, but its
ServiceBrowser keeps a timer for every name ever seen, so this module has its own browser.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from zeroconf import (  # type: ignore[attr-defined]  # it does not list all that it offers
    DNSOutgoing,
    DNSQuestion,
    Error,
    InterfaceChoice,
    IPVersion,
    NonUniqueNameException,
    RecordUpdate,
    RecordUpdateListener,
    ServiceStateChange,
    Zeroconf,
)
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from hcsim.errors import ConfigError, UsageError
from hcsim.runtime.address import address_at, hosts_of
from hcsim.runtime.clock import TokenBucket
from hcsim.runtime.host import Service, Sighting

SERVICE_TYPE = "_hcsim._tcp.local."
SOURCE_PACKETS_PER_S, SOURCE_BURST = 50.0, 200
"""The rate and burst of packets that are parsed per source address and socket."""
PACKETS_PER_S, BURST = 100.0, 400
"""The rate and burst of packets that are parsed per socket, from all sources."""
REST_S = 0.02
"""How long a socket is not read after a dropped packet; then up to `MOST_AT_ONCE` packets are read at once."""
MOST_AT_ONCE = 512
MOST_PACKET_BYTES = 9000
MOST_SOURCES = 256
"""The number of source addresses whose rates are kept."""
MOST_RESOLVING = 32
"""The number of names that are resolved at once, because their announcements were incomplete."""
MOST_IN_VIEW = 1024
"""The number of services, and of changes of services, that are kept."""
_RESOLVE_TIMEOUT_MS = 3000
_QUERY_AFTER_S = (0.1, 1.0, 3.0, 9.0)
_QUERY_EVERY_S = 60.0
"""The interval between queries for all services; services also announce themselves from time to time."""
_PTR, _SRV, _TXT, _A, _AAAA, _IN = 12, 33, 16, 1, 28, 1
_QUERY = 0
_RENAMES = 3
"""The number of further names that are tried on a conflict; the last one is announced without a check for
conflicts."""
_LABEL_BYTES = 63


class MdnsLan:
    """Announces and browses services of type `_hcsim._tcp`; opens its sockets at the first use."""

    def __init__(self, interfaces: tuple[str, ...] = ()) -> None:
        self._interfaces = interfaces
        self._responder: AsyncZeroconf | None = None
        self._advertised: dict[str, AsyncServiceInfo] = {}
        self._guarding: asyncio.Task[None] | None = None

    async def advertise(self, service: Service) -> str:
        """Announce a service under its resolved IP addresses and port; return the announced name."""
        hosts, port = hosts_of(service.address)
        addresses = [address for host in hosts for address in await _numeric(host)]

        def info(name: str) -> AsyncServiceInfo:
            return AsyncServiceInfo(
                SERVICE_TYPE,
                f"{name}.{SERVICE_TYPE}",
                port=port,
                parsed_addresses=list(dict.fromkeys(addresses)),
                properties=dict(service.properties),
                server=f"{name}.local.",
            )

        if (before := self._advertised.get(service.name)) is not None:
            name = before.name.removesuffix(f".{SERVICE_TYPE}")
            announced = info(name)
            await (await self._opened().async_update_service(announced))
        else:
            name, announced = await self._register(service.name, info)
        self._advertised[service.name] = announced
        return name

    async def _register(self, name: str, info: Callable[[str], AsyncServiceInfo]) -> tuple[str, AsyncServiceInfo]:
        """Announce the service under the first name without a reported conflict."""
        responder, ours = self._opened(), name
        for attempt in range(_RENAMES + 1):
            announced = info(ours)
            last = attempt == _RENAMES
            try:
                await (await responder.async_register_service(announced, cooperating_responders=last))
            except NonUniqueNameException:
                end = f"-{secrets.token_hex(3)}"
                ours = name.encode()[: _LABEL_BYTES - len(end)].decode(errors="ignore") + end
            else:
                break
        return ours, announced

    async def withdraw(self, name: str) -> None:
        info = self._advertised.pop(name, None)
        if info is None:
            raise UsageError(f"{name} is not advertised here")
        await (await self._opened().async_unregister_service(info))

    async def browse(self) -> AsyncIterator[Sighting]:
        """Yield all services in view, then every change."""
        responder = self._opened()
        search = _Search(self._resolve, self._cached)
        browser = MdnsBrowser(responder.zeroconf, search.note)
        in_view: dict[str, Service] = {}
        try:
            while True:
                name, service = await search.found()
                if service is None:
                    if name in in_view:
                        yield Sighting(in_view.pop(name), gone=True)
                elif in_view.get(name) != service:
                    in_view[name] = service
                    if len(in_view) > MOST_IN_VIEW:
                        del in_view[next(iter(in_view))]
                    yield Sighting(service)
        finally:
            try:
                await browser.cancel()  # first: until then it hears of more
            finally:
                await search.end()

    async def close(self) -> None:
        """Withdraw all services and close the sockets."""
        if self._guarding is not None:
            self._guarding.cancel()
            await asyncio.gather(self._guarding, return_exceptions=True)
        if self._responder is not None:
            await self._responder.async_unregister_all_services()
            await self._responder.async_close()
            self._responder = None

    def _opened(self) -> AsyncZeroconf:
        if self._responder is None:
            self._responder = self._open(IPVersion.All) or self._open(IPVersion.V4Only)
        if self._responder is None:
            raise ConfigError("this machine's network does not carry multicast: give the others' addresses (peers)")
        if self._guarding is None:
            self._guarding = asyncio.create_task(_guard(self._responder.zeroconf), name="bound multicast DNS")
        return self._responder

    def _open(self, version: IPVersion) -> AsyncZeroconf | None:
        try:
            return AsyncZeroconf(interfaces=list(self._interfaces) or InterfaceChoice.All, ip_version=version)
        except (OSError, RuntimeError):  # the second: no address of that version
            return None

    async def _resolve(self, name: str) -> Service | None:
        """Return a service's address and properties; None if it has vanished, or its name is invalid."""
        try:
            info = AsyncServiceInfo(SERVICE_TYPE, name)
            if not await info.async_request(self._opened().zeroconf, _RESOLVE_TIMEOUT_MS):
                return None
        except Error:  # any device can announce a name that zeroconf does not take
            return None
        return _service(info)

    def _cached(self, name: str) -> Service | None:
        return cached(self._opened().zeroconf, name)


def cached(zeroconf: Zeroconf, name: str) -> Service | None:
    """Return a service's address and properties if they have been announced completely."""
    try:
        info = AsyncServiceInfo(SERVICE_TYPE, name)
        return _service(info) if info.load_from_cache(zeroconf) else None
    except Error:
        return None


def _service(info: AsyncServiceInfo) -> Service | None:
    addresses = info.parsed_addresses()
    if not addresses or info.port is None:
        return None
    properties = {key: value or "" for key, value in info.decoded_properties.items()}
    return Service(info.name.removesuffix(f".{SERVICE_TYPE}"), address_at(addresses, info.port), properties)


async def _guard(zeroconf: Zeroconf) -> None:
    """Put a rate limiter before zeroconf's protocol on each of its sockets."""
    await zeroconf.async_wait_for_start()
    for reader in zeroconf.engine.readers:
        transport = reader.transport
        transport.set_protocol(PacketRateLimiter(transport.get_protocol(), rest=FloodPause.of(transport)))


class FloodPause:
    """Pauses the reading of a socket during a flood, to read many packets at once.

    One turn of the event loop per packet costs ten times as much as reading and dropping it. asyncio has no public
    way to pause a datagram transport; on event loops without the private methods packets are read one by one."""

    def __init__(self, transport: Any, loop: Any) -> None:
        self._transport = transport
        self._loop = loop
        self._fd = transport.get_extra_info("socket").fileno()
        self._sock = socket.socket(fileno=os.dup(self._fd))
        self._resting: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, transport: Any) -> FloodPause | None:
        """Return the pause of a transport of the standard event loop, or None for other loops."""
        loop = asyncio.get_running_loop()
        possible = all(hasattr(loop, name) for name in ("_add_reader", "_remove_reader"))
        return cls(transport, loop) if possible and hasattr(transport, "_read_ready") else None

    def begin(self, received: Callable[[bytes, tuple[Any, ...]], bool]) -> None:
        """Pause, then read all waiting packets; repeat until `received` has accepted all of them."""
        if self._resting is None and not self._transport.is_closing():
            self._loop._remove_reader(self._fd)
            self._resting = self._loop.call_later(REST_S, self._read_all, received)

    def end(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
        self._sock.close()

    def _read_all(self, received: Callable[[bytes, tuple[Any, ...]], bool]) -> None:
        self._resting = None
        if self._transport.is_closing():
            return
        all_taken = True
        for _ in range(MOST_AT_ONCE):
            try:
                packet = self._sock.recvfrom(MOST_PACKET_BYTES)
            except OSError:  # no more, or an error that the transport will see
                break
            all_taken = received(*packet) and all_taken
        if all_taken:
            self._loop._add_reader(self._fd, self._transport._read_ready)
        else:
            self._resting = self._loop.call_later(REST_S, self._read_all, received)


class PacketRateLimiter(asyncio.DatagramProtocol):
    """A rate limiter: passes packets on to another protocol, and drops those beyond the rates above."""

    def __init__(self, inner: Any, clock: Callable[[], float] = time.monotonic, rest: FloodPause | None = None) -> None:
        self._inner = inner
        self._clock = clock
        self._rest = rest
        self._all = TokenBucket(PACKETS_PER_S, BURST)
        self._sources: dict[str, TokenBucket] = {}

    def datagram_received(self, data: bytes, address: tuple[Any, ...]) -> None:
        if not self._passes(data, address) and self._rest is not None:
            self._rest.begin(self._passes)

    def _passes(self, data: bytes, address: tuple[Any, ...]) -> bool:
        now_s, source = self._clock(), address[0]
        bucket = self._sources.get(source)
        if bucket is None:
            bucket = self._sources[source] = TokenBucket(SOURCE_PACKETS_PER_S, SOURCE_BURST)
            if len(self._sources) > MOST_SOURCES:
                del self._sources[next(iter(self._sources))]
        if not (bucket.take(now_s) and self._all.take(now_s)):
            return False
        self._inner.datagram_received(data, address)
        return True

    def error_received(self, exc: Exception) -> None:
        self._inner.error_received(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rest is not None:
            self._rest.end()
        self._inner.connection_lost(exc)


class MdnsBrowser(RecordUpdateListener):
    """Queries for services of type `_hcsim._tcp`, and reports the names that appear, change and disappear."""

    def __init__(self, zeroconf: Zeroconf, note: Callable[[str, ServiceStateChange], None]) -> None:
        super().__init__()
        self._zeroconf = zeroconf
        self._note = note
        self._changes: dict[str, ServiceStateChange] = {}
        self._question = DNSQuestion(SERVICE_TYPE, _PTR, _IN)
        zeroconf.async_add_listener(self, [self._question])
        self._asking = asyncio.create_task(self._ask(), name="browse")

    async def cancel(self) -> None:
        self._zeroconf.async_remove_listener(self)
        self._asking.cancel()
        await asyncio.gather(self._asking, return_exceptions=True)

    def async_update_records(self, zc: Zeroconf, now: float, records: Sequence[RecordUpdate]) -> None:
        """Collect changes; see `RecordUpdateListener`. The cache does not have the new records yet."""
        for update in records:
            record: Any = update.new
            if record.type == _PTR:
                if record.key == SERVICE_TYPE and (update.old is None or record.is_expired(now)):
                    gone = record.is_expired(now)
                    change = ServiceStateChange.Removed if gone else ServiceStateChange.Added
                    if not (gone and record.alias in self._changes):
                        self._changes[record.alias] = change
            elif update.old is None and not record.is_expired(now):
                if record.type in (_A, _AAAA):
                    names = [service.name for service in zc.cache.async_entries_with_server(record.name)]
                else:
                    names = [record.name] if record.type in (_SRV, _TXT) else []
                for name in names:
                    if name.endswith(f".{SERVICE_TYPE}"):
                        self._changes.setdefault(name, ServiceStateChange.Updated)

    def async_update_records_complete(self) -> None:
        """Report the changes; see `RecordUpdateListener`. The cache has the new records now."""
        changes, self._changes = self._changes, {}
        for name, change in changes.items():
            self._note(name, change)

    async def _ask(self) -> None:
        await self._zeroconf.async_wait_for_start()
        for number, pause_s in enumerate(_QUERY_AFTER_S):
            await asyncio.sleep(pause_s)
            self._send(unicast=number == 0)
        while True:
            await asyncio.sleep(_QUERY_EVERY_S)
            self._send(unicast=False)

    def _send(self, *, unicast: bool) -> None:
        question = DNSQuestion(SERVICE_TYPE, _PTR, _IN)
        question.unicast = unicast  # the answers then come to us alone, as RFC 6762 wants it of the first question
        query = DNSOutgoing(_QUERY)
        query.add_question(question)
        self._zeroconf.async_send(query)


class _Search:
    """Resolves names concurrently, so that a name without an answer does not delay others.

    Completely announced services are available at once. The number of names that have to be queried is bounded.
    Names beyond it are dropped until they are announced again."""

    def __init__(
        self, resolve: Callable[[str], Awaitable[Service | None]], cached: Callable[[str], Service | None]
    ) -> None:
        self._resolve = resolve
        self._cached = cached
        self._found: asyncio.Queue[tuple[str, Service | None] | Exception] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._changed: set[str] = set()
        """Names that have changed during their resolution."""

    def note(self, name: str, change: ServiceStateChange) -> None:
        if change is ServiceStateChange.Removed:
            if name in self._resolving:
                self._resolving.pop(name).cancel()
            self._put((name, None))
        elif name in self._resolving:
            self._changed.add(name)
        elif (service := self._cached(name)) is not None:
            self._put((name, service))
        elif len(self._tasks) < MOST_RESOLVING:
            task = asyncio.create_task(self._follow(name), name=f"resolve {name}")
            self._resolving[name] = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def found(self) -> tuple[str, Service | None]:
        """Return the next name and its service, None if it has gone. Raises the exception of a failed resolution."""
        found = await self._found.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def end(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _put(self, found: tuple[str, Service | None] | Exception) -> None:
        if self._found.qsize() >= MOST_IN_VIEW:
            self._found.get_nowait()
        self._found.put_nowait(found)

    async def _follow(self, name: str) -> None:
        """Resolve a name again until it has not changed during its resolution."""
        try:
            self._changed.add(name)
            while name in self._changed:
                self._changed.discard(name)
                if (service := await self._resolve(name)) is not None:
                    self._put((name, service))
        except Exception as error:
            self._put(error)
        finally:
            if self._resolving.get(name) is asyncio.current_task():  # else it was removed, and perhaps came again
                del self._resolving[name]


async def _numeric(host: str) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{host} cannot be announced: {error.strerror}; give its IP address") from None
    return [str(sockaddr[0]) for *_, sockaddr in found]
