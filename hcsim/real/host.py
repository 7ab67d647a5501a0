"""This machine, as a host: it dials, listens and runs tasks.

Plaintext stays on loopback unless somebody explicitly allows more.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from errno import EADDRINUSE, EADDRNOTAVAIL
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import msgspec

from hcsim import rng
from hcsim.errors import ChannelError, ConfigError, DeadlineExceeded, PeerRefused
from hcsim.real import carriers, doors, shared
from hcsim.real.clock import RealClock
from hcsim.real.device import RealDevice
from hcsim.real.failures import is_distrust, translated
from hcsim.real.interfaces import list_interfaces
from hcsim.real.listener import StreamListener, listening_socket
from hcsim.real.race import Place, Race
from hcsim.real.store import FileStore, MemoryStore
from hcsim.real.stream_channel import StreamChannel
from hcsim.real.tcp import TcpStream, TlsStream, tune
from hcsim.real.tls import ClusterTls, Tls, TlsFiles
from hcsim.runtime.address import join_address
from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.device import Device
from hcsim.runtime.host import CONNECT_TIMEOUT_S, Interface
from hcsim.runtime.target import TCP, Target, parse
from hcsim.telemetry.metrics import HostMetrics
from hcsim.telemetry.trace import Trace

if TYPE_CHECKING:
    from hcsim.real.mdns import MdnsLan

_HANDSHAKE_TIMEOUT_S = 5.0
_FIRST_RETRY_S = 0.02
_SLOWEST_RETRY_S = 1.0
NEXT_PLACE_S = 1.0
"""How long one of a machine's addresses may take to answer before the next is tried beside it."""
_EVERYWHERE, _EVERYWHERE_V6 = ("0.0.0.0",), ("::",)


class RealOptions(msgspec.Struct, frozen=True):
    """What a person decides about a real host."""

    name: str
    seed: int = 0
    tls: TlsFiles | ClusterTls | None = None
    """Files of your own, or what a member of a cluster has."""
    insecure: bool = False
    """Allow plaintext beyond loopback."""
    shared_memory: bool = True
    """What goes to processes of this machine goes through memory, where they allow it too; else over TCP."""
    lan_interfaces: tuple[str, ...] = ()
    """Addresses to announce on; empty: all."""
    handshake_timeout_s: float = _HANDSHAKE_TIMEOUT_S
    device: str = "cpu"
    """What it computes with, as torch calls it."""
    state: Path | None = None
    """A folder for what it remembers across restarts; None: nothing."""


class RealHost:
    """This machine. Use it as an async context manager, or close it."""

    def __init__(
        self,
        options: RealOptions,
        *,
        device: Device | None = None,
        trace: Trace | None = None,
        on_refused: Callable[[ChannelError], None] | None = None,
    ) -> None:
        self._options = options
        self._own_device = RealDevice(options.device)
        self._device = device or self._own_device
        self._trace = trace
        self._clock = RealClock()
        self._tasks: dict[asyncio.Task[Any], Callable[[asyncio.Task[Any]], None] | None] = {}
        self._listeners: list[Listener] = []
        self._answered: dict[str, Place] = {}
        """Where a machine with several addresses was last reached."""
        self._on_refused = on_refused
        self._tls = Tls(options.tls) if options.tls else None
        self._shares_memory = options.shared_memory and shared.is_possible()
        self._channels: WeakSet[StreamChannel] = WeakSet()
        self.metrics = HostMetrics()
        self.metrics.collect(self._tell_channels)

    @property
    def name(self) -> str:
        """As the options say."""
        return self._options.name

    @property
    def clock(self) -> RealClock:
        """This machine's monotonic clock."""
        return self._clock

    @property
    def device(self) -> Device:
        """What was given, or this machine's CPU."""
        return self._device

    @cached_property
    def lan(self) -> MdnsLan:
        """Multicast DNS; loaded when somebody asks for it."""
        from hcsim.real.mdns import MdnsLan

        return MdnsLan(self._options.lan_interfaces)

    @cached_property
    def store(self) -> FileStore | MemoryStore:
        """Files in the folder that the options name."""
        return MemoryStore() if self._options.state is None else FileStore(self._options.state)

    def interfaces(self) -> tuple[Interface, ...]:
        """This machine's interfaces, the fastest medium first."""
        return list_interfaces()

    async def listen(self, address: str) -> Listener:
        """Accept channels at `host:port`, or at an address of another carrier (see `target`)."""
        target, options = parse(address), self._options
        listener: Listener
        try:
            hosts = target.hosts
            if len(hosts) > 1:
                hosts = _EVERYWHERE_V6 if any(":" in host for host in hosts) else _EVERYWHERE
            family, sockaddr = (await self._resolve(target._replace(hosts=hosts)))[0]
            if target.scheme == TCP:
                sock = listening_socket(family, sockaddr)
                tls = self._tls
                door = doors.Door.open(sock.getsockname(), tls=tls is not None) if self._shares_memory else None
                listener = StreamListener(sock, door, tls, options.handshake_timeout_s, self._accepted, self._refused)
            else:
                listener = await carriers.listen(target, family, sockaddr, options.tls, options.handshake_timeout_s)
        except OSError as error:
            raise ConfigError(f"cannot listen at {address}: {error.strerror}{_what_to_do(error)}") from None
        self._listeners.append(listener)
        return listener

    async def connect(self, address: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> Channel:
        """Open a channel; see `Host.connect`. Where at no place both trust each other, it ends at once."""
        target = parse(address)
        until_s = self._clock.elapsed() + timeout_s
        race = Race(lambda place: self._dial(target, place, until_s))
        failure: OSError | None = None
        try:
            async with asyncio.timeout(timeout_s), race:
                delay_s, draw = _FIRST_RETRY_S, self.rng("connect", address)
                channel: Channel | None = None
                while channel is None:
                    try:
                        channel = await self._round(target, race)
                    except OSError as error:
                        failure = error
                        if is_distrust(error) and race.hopeless:
                            self._connected("refused")
                            raise translated(error, address) from error
                        channel = await race.wait(delay_s * draw.uniform(0.5, 1.0))
                        delay_s = min(2 * delay_s, _SLOWEST_RETRY_S)
        except TimeoutError:
            failure = race.distrust or failure
            reason = translated(failure, address) if failure else None
            self._connected("refused" if isinstance(reason, PeerRefused) else "unanswered")
            if isinstance(reason, PeerRefused):
                raise PeerRefused(f"{reason} (tried for {timeout_s:.3g} s)", address) from None
            why = f": {reason}" if reason else ""
            raise DeadlineExceeded(f"{address} did not answer within {timeout_s:.3g} s{why}") from None
        self._connected("opened")
        if isinstance(channel, StreamChannel):
            self._channels.add(channel)
        return channel

    def spawn(
        self, work: Coroutine[Any, Any, Any], *, name: str, over: Callable[[asyncio.Task[Any]], None] | None = None
    ) -> asyncio.Task[Any]:
        """Run a task until it ends or this host is closed."""
        task = asyncio.create_task(work, name=f"{self._options.name}/{name}")
        self._tasks[task] = over
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        over = self._tasks.pop(task)
        if over is not None:
            over(task)

    def rng(self, *name: str | int) -> random.Random:
        """This host's random stream of that name."""
        return rng.stream(self._options.seed, self.name, *name)

    def trace(self, kind: str, *fields: str | int | float) -> None:
        """Put an event into the trace, if one is kept."""
        if self._trace is not None:
            self._trace.record((time.monotonic_ns(), kind, self.name, *fields))

    async def close(self) -> None:
        """End its tasks, listeners, announcements and worker thread. Channels belong to whoever opened them."""
        async with AsyncExitStack() as stack:  # from the last to the first, also where it is cancelled meanwhile
            stack.push_async_callback(self._let_go)
            stack.push_async_callback(self._end_tasks)
            await asyncio.sleep(0)  # a task that was cancelled before its first step would leave open what it was given

    async def _end_tasks(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _let_go(self) -> None:
        async with AsyncExitStack() as stack:
            stack.callback(self._own_device.close)
            if "store" in self.__dict__:
                stack.callback(self.store.close)
            if "lan" in self.__dict__:
                stack.push_async_callback(self.lan.close)
            for listener in reversed(self._listeners):
                stack.push_async_callback(listener.close)

    async def __aenter__(self) -> RealHost:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _refused(self, error: ChannelError) -> None:
        """Somebody called us and did not get through TLS."""
        self.trace("refused", error.peer, str(error))
        if self._on_refused is not None:
            self._on_refused(error)

    def _connected(self, outcome: str) -> None:
        self.metrics.counter("hcsim_connects_total", outcome=outcome).add()

    def _accepted(self, channel: StreamChannel) -> None:
        self.metrics.counter("hcsim_accepts_total").add()
        self._channels.add(channel)

    def _tell_channels(self) -> None:
        self.metrics.gauge("hcsim_channels_open").set(sum(channel.is_open for channel in self._channels))

    async def _round(self, target: Target, race: Race) -> Channel:
        """An attempt at every address that the names stand for; the one that answered last comes first."""
        places = await self._resolve(target)
        if target.scheme != TCP:
            return await carriers.dial(target, self._options.tls)
        places.sort(key=lambda place: place != self._answered.get(target.text))
        return await race.round(places, NEXT_PLACE_S)

    async def _dial(self, target: Target, place: Place, until_s: float) -> StreamChannel:
        """One attempt at one place: through memory where that is possible, else by TCP."""
        family, sockaddr = place
        peer = target.text if len(target.hosts) == 1 else join_address(sockaddr)
        if self._shares_memory:
            half_s = (until_s - self._clock.elapsed()) / 2  # TCP, which asks only the kernel, gets the other
            if (met := await doors.dial(sockaddr, half_s, self._tls)) is not None:
                return StreamChannel(met.stream, peer, met.identity, met.binding)
        channel = await self._dial_tcp(family, sockaddr, peer)
        self._answered[target.text] = place
        return channel

    async def _dial_tcp(self, family: int, sockaddr: Any, peer: str) -> StreamChannel:
        """A channel to that place, with TLS where we have it."""
        sock = await _connected_socket(family, sockaddr)
        if self._tls is None:
            return StreamChannel(TcpStream(sock), peer)
        secured = await self._tls.handshake(sock, server_side=False)
        return StreamChannel(TlsStream(secured.sock), peer, secured.identity, secured.binding)

    async def _resolve(self, target: Target) -> list[Place]:
        """Socket families and addresses of names, if our security allows to use them."""
        loop = asyncio.get_running_loop()
        found: list[Any] = []
        for host in target.hosts:
            try:
                found += _numeric(host, target.port) or await loop.getaddrinfo(
                    host, target.port, type=socket.SOCK_STREAM
                )
            except UnicodeError:
                raise ConfigError(f"{host!r} cannot be the name of a host") from None
        allowed = self._options.insecure or target.encrypted(has_tls=self._tls is not None)
        if not allowed:
            for *_, sockaddr in found:
                check_loopback(sockaddr[0])
        return [(family, sockaddr) for family, _, _, _, sockaddr in found]


def check_loopback(ip: str) -> None:
    """Refuse any other address, for plaintext."""
    if not ipaddress.ip_address(ip).is_loopback:
        raise ConfigError(
            f"{ip} is not the loopback, and plaintext is only allowed there: "
            "join a cluster (its members have TLS), give TLS files (certificate, key, CA), "
            "or allow plaintext explicitly (insecure)"
        )


def _numeric(host: str, port: int) -> list[Any]:
    """As `getaddrinfo` does for an IP address, without its threads: names that nobody answers for may occupy them."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        return []


async def _connected_socket(family: int, sockaddr: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(sock)
        await asyncio.get_running_loop().sock_connect(sock, sockaddr)
        if sock.getsockname() == sock.getpeername():
            # Dialling a free port of our own can meet itself in TCP's simultaneous open.
            raise ConnectionRefusedError
    except BaseException:
        sock.close()
        raise
    return sock


def _what_to_do(failure: OSError) -> str:
    """About a place where we cannot listen."""
    if failure.errno == EADDRINUSE:
        return ": does hcsim run here already? End it, or take another port"
    if failure.errno == EADDRNOTAVAIL or isinstance(failure, socket.gaierror):
        return ": is that this machine? We can only listen at an address of our own"
    return ""
