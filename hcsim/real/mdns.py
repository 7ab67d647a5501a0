"""The local network through multicast DNS (RFC 6762) and DNS service discovery (RFC 6763).

Any device on the local network can send any number of packets, so each has a bounded cost. Packets beyond a rate are
dropped before they are parsed: a rate for each source address, so that one that floods does not drown the others, and
one for all of them, since a source address can be forged. Of what is parsed, a bounded number of names is resolved at
once and kept. zeroconf bounds its own cache; its ServiceBrowser keeps a timer for every name it ever heard of, so we
have our own.
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
"""Packets of one source address that are parsed, at each of our sockets."""
PACKETS_PER_S, BURST = 100.0, 400
"""Packets of all sources that are parsed, at each of our sockets."""
REST_S = 0.02
"""How long a socket is not read after a packet was dropped; then up to `MOST_AT_ONCE` packets are read at once."""
MOST_AT_ONCE = 512
MOST_PACKET_BYTES = 9000
MOST_SOURCES = 256
"""Source addresses whose rates are remembered."""
MOST_RESOLVING = 32
"""Names that are asked for at once, because their announcement did not say all."""
MOST_IN_VIEW = 1024
"""Services, and changes of services, that are kept."""
_RESOLVE_TIMEOUT_MS = 3000
_QUERY_AFTER_S = (0.1, 1.0, 3.0, 9.0)
_QUERY_EVERY_S = 60.0
"""Between queries for all services; whoever is there also announces itself now and then."""
_PTR, _SRV, _TXT, _A, _AAAA, _IN = 12, 33, 16, 1, 28, 1
_QUERY = 0
_RENAMES = 3
"""Names that are tried where ours is taken; the next one is announced without asking whether it is taken too."""
_LABEL_BYTES = 63


class MdnsLan:
    """Announces and browses services of type `_hcsim._tcp`; opens its sockets at the first use."""

    def __init__(self, interfaces: tuple[str, ...] = ()) -> None:
        self._interfaces = interfaces
        self._responder: AsyncZeroconf | None = None
        self._advertised: dict[str, AsyncServiceInfo] = {}
        self._guarding: asyncio.Task[None] | None = None

    async def advertise(self, service: Service) -> str:
        """Announce a service under its IP addresses and port; a host that was given by name is looked up."""
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
        """Announce the first name that nobody else has, as far as anybody can be believed."""
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
        """Say goodbye."""
        info = self._advertised.pop(name, None)
        if info is None:
            raise UsageError(f"{name} is not advertised here")
        await (await self._opened().async_unregister_service(info))

    async def browse(self) -> AsyncIterator[Sighting]:
        """All services in view, then every change."""
        responder = self._opened()
        search = _Search(self._resolve, self._cached)
        browser = Browser(responder.zeroconf, search.note)
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
        """Withdraw everything and close the sockets."""
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
        """Where a service is and what it says; None when it vanished meanwhile, or never was one."""
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
    """Where a service is and what it says, if all of it was announced already."""
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
    """Put a sieve before what zeroconf does with the packets of each of its sockets."""
    await zeroconf.async_wait_for_start()
    for reader in zeroconf.engine.readers:
        transport = reader.transport
        transport.set_protocol(Sieve(transport.get_protocol(), rest=Rest.of(transport)))


class Rest:
    """Lets a socket's packets pile up for a moment during a flood, to read them all at once.

    A turn of the event loop for every packet costs ten times what it costs to read and drop it. asyncio has no public
    way to pause a datagram transport; on an event loop without these methods packets are read one by one."""

    def __init__(self, transport: Any, loop: Any) -> None:
        self._transport = transport
        self._loop = loop
        self._fd = transport.get_extra_info("socket").fileno()
        self._sock = socket.socket(fileno=os.dup(self._fd))
        self._resting: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, transport: Any) -> Rest | None:
        """For a transport of the standard event loop."""
        loop = asyncio.get_running_loop()
        possible = all(hasattr(loop, name) for name in ("_add_reader", "_remove_reader"))
        return cls(transport, loop) if possible and hasattr(transport, "_read_ready") else None

    def begin(self, received: Callable[[bytes, tuple[Any, ...]], bool]) -> None:
        """Read nothing for a moment, then all that came, until `received` has taken all of it."""
        if self._resting is None and not self._transport.is_closing():
            self._loop._remove_reader(self._fd)
            self._resting = self._loop.call_later(REST_S, self._read_all, received)

    def end(self) -> None:
        """The transport is closed."""
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


class Sieve(asyncio.DatagramProtocol):
    """Passes packets on to another protocol, and drops those beyond the rates above."""

    def __init__(self, inner: Any, clock: Callable[[], float] = time.monotonic, rest: Rest | None = None) -> None:
        self._inner = inner
        self._clock = clock
        self._rest = rest
        self._all = TokenBucket(PACKETS_PER_S, BURST)
        self._sources: dict[str, TokenBucket] = {}

    def datagram_received(self, data: bytes, address: tuple[Any, ...]) -> None:
        """A packet came."""
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
        """The socket reports an error."""
        self._inner.error_received(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        if self._rest is not None:
            self._rest.end()
        self._inner.connection_lost(exc)


class Browser(RecordUpdateListener):
    """Asks for services of our type, and tells which names come, change and go."""

    def __init__(self, zeroconf: Zeroconf, note: Callable[[str, ServiceStateChange], None]) -> None:
        super().__init__()
        self._zeroconf = zeroconf
        self._note = note
        self._changes: dict[str, ServiceStateChange] = {}
        self._question = DNSQuestion(SERVICE_TYPE, _PTR, _IN)
        zeroconf.async_add_listener(self, [self._question])
        self._asking = asyncio.create_task(self._ask(), name="browse")

    async def cancel(self) -> None:
        """Ask and tell no more."""
        self._zeroconf.async_remove_listener(self)
        self._asking.cancel()
        await asyncio.gather(self._asking, return_exceptions=True)

    def async_update_records(self, zc: Zeroconf, now: float, records: Sequence[RecordUpdate]) -> None:
        """See `RecordUpdateListener`; the cache does not have the new records yet."""
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
        """See `RecordUpdateListener`; now the cache has them."""
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
    """Resolves the names that a browser hears of, beside each other: one without an answer holds up no other.

    What was announced whole is there at once. Names that have to be asked for are a bounded number; beyond it they are
    dropped, and heard of again when they are announced again."""

    def __init__(
        self, resolve: Callable[[str], Awaitable[Service | None]], cached: Callable[[str], Service | None]
    ) -> None:
        self._resolve = resolve
        self._cached = cached
        self._found: asyncio.Queue[tuple[str, Service | None] | Exception] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._changed: set[str] = set()
        """Those that have changed while they were resolved."""

    def note(self, name: str, change: ServiceStateChange) -> None:
        """A name came, changed or went."""
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

    def _put(self, found: tuple[str, Service | None] | Exception) -> None:
        if self._found.qsize() >= MOST_IN_VIEW:
            self._found.get_nowait()
        self._found.put_nowait(found)

    async def _follow(self, name: str) -> None:
        """Resolve a name until it has not changed meanwhile."""
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
