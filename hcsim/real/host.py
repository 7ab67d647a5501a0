"""This machine, as a host: it dials, listens and runs tasks.

Plaintext stays on loopback unless somebody explicitly allows more. The scheme of an address chooses what carries the
bytes.

Whom a caller of wss:// trusts depends on what it has:

nothing, or a cluster's key   a public server, whose certificate must be of that name, from an authority that this
                              machine trusts. That is the tunnel's or proxy's, and says nothing about who is behind
                              it: members prove that to each other by the admission handshake, over the WebSocket.
TLS files of its own          whoever their authority has signed, and both sides show a certificate: a proxy has to
                              have one of that authority's.

Whoever runs the tunnel can read and change what passes through it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from errno import EADDRINUSE, EADDRNOTAVAIL
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import msgspec

from hcsim import rng
from hcsim.errors import ChannelError, ConfigError, DeadlineExceeded, PeerRefused, WrongPeer
from hcsim.real.hardware import FolderStore, MemoryStore, RealClock, device_named
from hcsim.real.interfaces import link_local_interfaces, list_interfaces
from hcsim.real.listener import StreamListener, listening_socket
from hcsim.real.sensors import Sensors
from hcsim.real.shm.rendezvous import Rendezvous
from hcsim.real.shm.rendezvous import dial as dial_shared
from hcsim.real.shm.stream import is_possible as can_share_memory
from hcsim.real.sockets import AnotherNode, Closable, bind_to_interface, is_distrust, is_final, translated
from hcsim.real.stream_channel import StreamChannel
from hcsim.real.tcp import TcpStream, TlsStream, tune
from hcsim.real.tls import ClusterTls, Tls, TlsFiles
from hcsim.runtime.address import TCP, Target, join_address, parse
from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.host import CONNECT_TIMEOUT_S, Device, Interface, PeerCheck, Readings
from hcsim.runtime.timeline_clock import TimelineClock
from hcsim.telemetry.metrics import HostMetrics
from hcsim.telemetry.trace import Intervals, Trace

if TYPE_CHECKING:
    from hcsim.real.mdns import MdnsLan

_HANDSHAKE_TIMEOUT_S = 5.0
_FIRST_RETRY_S = 0.02
_SLOWEST_RETRY_S = 1.0
NEXT_PLACE_S = 1.0
"""How long one of a machine's addresses may take to answer before the next is tried beside it."""
_MOST_ELSEWHERE = 64
_EVERYWHERE, _EVERYWHERE_V6 = ("0.0.0.0",), ("::",)


class DialTarget(NamedTuple):
    """Where a socket connects to."""

    family: int
    sockaddr: Any
    interface: str = ""
    """The interface that it has to leave by; empty: as the routes say."""


class RealOptions(msgspec.Struct, frozen=True):
    """User options of a real host."""

    name: str
    seed: int = 0
    tls: TlsFiles | ClusterTls | None = None
    """TLS files, or the credentials of a cluster member."""
    insecure: bool = False
    """Allow plaintext beyond loopback."""
    shared_memory: bool = True
    """Use shared memory for channels within this machine where the peer allows it too, otherwise TCP."""
    lan_interfaces: tuple[str, ...] = ()
    """Addresses of the interfaces to announce on; empty: all."""
    handshake_timeout_s: float = _HANDSHAKE_TIMEOUT_S
    device: str = "cpu"
    """The torch name of the compute device, or sleep: and the name of a machine."""
    state: Path | None = None
    """The folder for records that survive restarts; None: nothing is stored."""


class HappyEyeballs:
    """Attempts at several places where one machine may be reached, beside each other: the first channel counts.

    As an async context manager it ends those that have not won."""

    def __init__(self, attempt: Callable[[DialTarget], Coroutine[Any, Any, Channel]]) -> None:
        self._attempt = attempt
        self._running: dict[DialTarget, asyncio.Task[Channel]] = {}
        self._won: list[asyncio.Task[Channel]] = []
        self._failures: dict[DialTarget, OSError | None] = {}
        """The last error at each address of the last round, if any."""

    @property
    def distrust(self) -> OSError | None:
        """A certificate error at one of the addresses, if any. It is reported in preference to other errors."""
        return next((error for error in self._failures.values() if error is not None and is_distrust(error)), None)

    @property
    def hopeless(self) -> bool:
        """Whether the last attempt at every address failed for good: a certificate was rejected, or another node
        answered."""
        return all(map(is_final, self._failures.values()))

    @property
    def elsewhere(self) -> dict[DialTarget, str]:
        """The addresses at which another node answered, with its identity."""
        return {place: error.identity for place, error in self._failures.items() if isinstance(error, AnotherNode)}

    async def round(self, places: list[DialTarget], next_place_s: float) -> Channel:
        """Start an attempt at each address without a running one: the next after a failure or after that time.

        Raises `OSError` if there is no channel at the end of the round; running attempts continue."""
        self._failures = {place: self._failures.get(place) for place in places}
        for place in self._failures:
            if len(self._failures) == 1 and not self._running:
                return await self._alone(place)
            if place not in self._running and not isinstance(self._failures[place], AnotherNode):
                name = f"connect to {place.sockaddr[0]}"
                self._running[place] = asyncio.create_task(self._attempt(place), name=name)
                if (channel := await self.wait(next_place_s)) is not None:
                    return channel
        raise self.distrust or next(filter(None, reversed(self._failures.values())), TimeoutError())

    async def wait(self, seconds: float) -> Channel | None:
        """Return the first channel within that time; None earlier if an attempt fails."""
        if not self._running:
            await asyncio.sleep(seconds)
            return None
        await asyncio.wait(self._running.values(), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for place, task in tuple(self._running.items()):
            if task.done():
                del self._running[place]
                try:
                    channel = task.result()
                except OSError as error:
                    self._failures[place] = error
                else:
                    self._won.append(task)
                    return channel
        return None

    async def _alone(self, place: DialTarget) -> Channel:
        try:
            return await self._attempt(place)
        except OSError as error:
            self._failures[place] = error
            raise

    async def __aenter__(self) -> HappyEyeballs:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            tasks += self._won  # nobody gets that channel any more
            raise
        finally:
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    await task.result().close()


class RealHost:
    """The host of this machine. Use it as an async context manager, or close it."""

    def __init__(
        self,
        options: RealOptions,
        *,
        device: Device | None = None,
        trace: Trace | None = None,
        on_refused: Callable[[ChannelError], None] | None = None,
        tell: Callable[[str], None] = lambda what: None,
    ) -> None:
        """`tell` is called for what a user should know of the device."""
        self._options = options
        self._own_device = device_named(options.device, tell)
        self._device = device or self._own_device
        self._trace = trace
        self.interval = Intervals(trace, time.monotonic_ns, options.name)
        has_frames = trace is not None and trace.has_frames
        self.timeline_clock = TimelineClock(time.time_ns()) if has_frames else None
        self._sensors = Sensors()
        self._clock = RealClock()
        self._tasks: dict[asyncio.Task[Any], Callable[[asyncio.Task[Any]], None] | None] = {}
        self._listeners: list[Listener] = []
        self._answered: dict[str, DialTarget] = {}
        """The address that last answered, for a machine with several addresses."""
        self._elsewhere: dict[str, dict[DialTarget, str]] = {}
        """By address: its hosts that lead to other nodes than the wanted one, as long as another of them answers."""
        self._on_refused = on_refused
        self._tls = Tls(options.tls) if options.tls else None
        self._shares_memory = options.shared_memory and can_share_memory()
        self._channels: WeakSet[StreamChannel] = WeakSet()
        self.metrics = HostMetrics()
        self.metrics.collect(self._tell_channels)

    @property
    def name(self) -> str:
        return self._options.name

    @property
    def clock(self) -> RealClock:
        return self._clock

    @property
    def device(self) -> Device:
        """The device that was given, or this machine's CPU."""
        return self._device

    @cached_property
    def lan(self) -> MdnsLan:
        """Multicast DNS, loaded at the first use."""
        from hcsim.real.mdns import MdnsLan

        return MdnsLan(self._options.lan_interfaces)

    @cached_property
    def store(self) -> FolderStore | MemoryStore:
        """Files in the folder of the options, or memory."""
        return MemoryStore() if self._options.state is None else FolderStore(self._options.state)

    def interfaces(self) -> tuple[Interface, ...]:
        """Return this machine's interfaces, those of the fastest medium first."""
        return list_interfaces()

    async def readings(self) -> Readings:
        """Ask the system in a thread, since on macOS this starts commands."""
        return await asyncio.to_thread(self._sensors.read)

    async def listen(self, address: str) -> Listener:
        """Accept channels at `host:port`, or at an address of another carrier (see `target`)."""
        target, options = parse(address), self._options
        listener: Listener
        try:
            hosts = target.hosts
            if len(hosts) > 1:
                hosts = _EVERYWHERE_V6 if any(":" in host for host in hosts) else _EVERYWHERE
            family, sockaddr, _ = (await self._resolve(target._replace(hosts=hosts)))[0]
            if target.scheme == TCP:
                sock = listening_socket(family, sockaddr)
                tls = self._tls
                local = Rendezvous.open(sock.getsockname(), tls=tls is not None) if self._shares_memory else None
                listener = StreamListener(sock, local, tls, options.handshake_timeout_s, self._accepted, self._refused)
            else:
                listener = await _listen_by(target, family, sockaddr, options.tls, options.handshake_timeout_s)
        except OSError as error:
            raise ConfigError(f"cannot listen at {address}: {error.strerror}{_what_to_do(error)}") from None
        self._listeners.append(listener)
        return listener

    async def connect(
        self, address: str, *, timeout_s: float = CONNECT_TIMEOUT_S, is_peer: PeerCheck | None = None
    ) -> Channel:
        """Open a channel; see `Host.connect`. Fails at once if the TLS certificates are rejected at every address.

        Only the certificates of a cluster's members prove an identity."""
        target = parse(address)
        until_s = self._clock.elapsed() + timeout_s
        wanted = is_peer if isinstance(self._options.tls, ClusterTls) else None
        race = HappyEyeballs(lambda place: self._dial(target, place, until_s, wanted))
        failure: OSError | None = None
        try:
            async with asyncio.timeout(timeout_s), race:
                delay_s, draw = _FIRST_RETRY_S, self.rng("connect", address)
                channel: Channel | None = None
                while channel is None:
                    try:
                        channel = await self._round(target, race, wanted)
                    except OSError as error:
                        failure = error
                        if is_final(error) and race.hopeless:
                            self._elsewhere.pop(address, None)  # perhaps addresses have changed
                            self._connected("refused")
                            raise translated(error, address) from error
                        channel = await race.wait(delay_s * draw.uniform(0.5, 1.0))
                        delay_s = min(2 * delay_s, _SLOWEST_RETRY_S)
        except TimeoutError:
            self._elsewhere.pop(address, None)
            failure = race.distrust or failure
            reason = translated(failure, address) if failure else None
            self._connected("refused" if isinstance(reason, PeerRefused) else "unanswered")
            if isinstance(reason, PeerRefused) and not isinstance(reason, WrongPeer):
                raise PeerRefused(f"{reason} (tried for {timeout_s:.3g} s)", address) from None
            why = f": {reason}" if reason else ""
            raise DeadlineExceeded(f"{address} did not answer within {timeout_s:.3g} s{why}") from None
        self._connected("opened")
        if race.elsewhere:
            self._elsewhere.setdefault(address, {}).update(race.elsewhere)
            if len(self._elsewhere) > _MOST_ELSEWHERE:
                del self._elsewhere[next(iter(self._elsewhere))]
        if isinstance(channel, StreamChannel):
            self._channels.add(channel)
        return channel

    def spawn(
        self, work: Coroutine[Any, Any, Any], *, name: str, over: Callable[[asyncio.Task[Any]], None] | None = None
    ) -> asyncio.Task[Any]:
        """Run a task until it ends or this host is closed."""
        task = asyncio.create_task(work, name=f"{self._options.name}/{name}")
        self.interval.spawned(task)
        self._tasks[task] = over
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        over = self._tasks.pop(task)
        if over is not None:
            over(task)

    def rng(self, *name: str | int) -> random.Random:
        """Return this host's random stream of that name."""
        return rng.stream(self._options.seed, self.name, *name)

    def trace(self, kind: str, *fields: str | int | float) -> None:
        """Record a trace event, if there is a trace."""
        if self._trace is not None:
            self._trace.record((time.monotonic_ns(), kind, self.name, *fields))

    def note(self, kind: str, *fields: str | int | float) -> None:
        """Write a line into the file of the trace, if there is one, that is no event."""
        if self._trace is not None and self._trace.is_kept:
            self._trace.append([(time.monotonic_ns(), kind, self.name, *fields)])

    async def close(self) -> None:
        """End its tasks, listeners, announcements and worker thread. Channels stay open; their callers own them."""
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
        """Report a client whose TLS handshake failed."""
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

    async def _round(self, target: Target, race: HappyEyeballs, wanted: PeerCheck | None) -> Channel:
        """Attempt every address that the names resolve to, the one that answered last first; those that led to other
        nodes only if there is none besides."""
        resolved = await self._resolve(target)
        if target.scheme != TCP:
            return await _dial_by(target, self._options.tls)
        places = [place for each in resolved for place in await _ways_to(each)]
        places.sort(key=lambda place: place != self._answered.get(target.text))
        if wanted is not None and (elsewhere := self._elsewhere.get(target.text)):
            places = [place for place in places if place not in elsewhere or wanted(elsewhere[place])] or places
        return await race.round(places, NEXT_PLACE_S)

    async def _dial(self, target: Target, place: DialTarget, until_s: float, wanted: PeerCheck | None) -> StreamChannel:
        """Make one attempt at one address: through shared memory where that is possible, otherwise by TCP."""
        peer = target.text if len(target.hosts) == 1 else join_address(place.sockaddr)
        if self._shares_memory:
            half_s = (until_s - self._clock.elapsed()) / 2  # TCP, which asks only the kernel, gets the other
            if (met := await dial_shared(place.sockaddr, half_s, self._tls)) is not None:
                _check(met.identity, wanted, met.stream)
                return StreamChannel(met.stream, peer, met.identity, met.binding)
        channel = await self._dial_tcp(place, peer, wanted)
        self._answered[target.text] = place
        return channel

    async def _dial_tcp(self, place: DialTarget, peer: str, wanted: PeerCheck | None) -> StreamChannel:
        """Open a TCP channel to that address, with TLS if the options have it."""
        sock = await _connected_socket(place)
        if self._tls is None:
            return StreamChannel(TcpStream(sock), peer)
        secured = await self._tls.handshake(sock, server_side=False)
        _check(secured.identity, wanted, secured.sock)
        return StreamChannel(TlsStream(secured.sock), peer, secured.identity, secured.binding)

    async def _resolve(self, target: Target) -> list[DialTarget]:
        """Return the socket families and addresses of the target's names. Raises `ConfigError` where plaintext is not
        allowed."""
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
        return [DialTarget(family, sockaddr) for family, _, _, _, sockaddr in found]


async def _ways_to(place: DialTarget) -> list[DialTarget]:
    """Return a link-local address once for each interface that may lead there, any other address as it is.

    Routes know only one interface for link-local addresses, such as the first Ethernet port and not the Thunderbolt
    bridge."""
    ip = ipaddress.ip_address(place.sockaddr[0].partition("%")[0])
    if not ip.is_link_local or (ip.version == 6 and place.sockaddr[3]):  # with a scope, the interface is said
        return [place]
    names = await asyncio.to_thread(link_local_interfaces, ip.version)  # asks programs on macOS
    if ip.version == 4:
        return [place._replace(interface=name) for name in names] or [place]
    scopes = [socket.if_nametoindex(name) for name in names]
    return [place._replace(sockaddr=(*place.sockaddr[:3], scope)) for scope in scopes] or [place]


def _check(identity: str, wanted: PeerCheck | None, stream: Closable) -> None:
    """Close the stream and raise `AnotherNode` if the node at its other end is not the wanted one."""
    if wanted is not None and not wanted(identity):
        stream.close()
        raise AnotherNode(identity)


def check_loopback(ip: str) -> None:
    """Reject any address that is not loopback, for plaintext."""
    if not ipaddress.ip_address(ip).is_loopback:
        raise ConfigError(
            f"{ip} is not the loopback, and plaintext is only allowed there: "
            "join a cluster (its members have TLS), give TLS files (certificate, key, CA), "
            "or allow plaintext explicitly (insecure)"
        )


def _numeric(host: str, port: int) -> list[Any]:
    """Return what `getaddrinfo` returns for an IP address, without its threads: pending DNS queries may occupy them."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        return []


async def _connected_socket(place: DialTarget) -> socket.socket:
    sock = socket.socket(place.family, socket.SOCK_STREAM)
    try:
        tune(sock)
        if place.interface:
            bind_to_interface(sock, place.interface)
        await asyncio.get_running_loop().sock_connect(sock, place.sockaddr)
        if sock.getsockname() == sock.getpeername():
            # Dialling a free port of our own can meet itself in TCP's simultaneous open.
            raise ConnectionRefusedError
    except BaseException:
        sock.close()
        raise
    return sock


def _what_to_do(failure: OSError) -> str:
    """Return a hint for an address at which the host cannot listen."""
    if failure.errno == EADDRINUSE:
        return ": does hcsim run here already? End it, or take another port"
    if failure.errno == EADDRNOTAVAIL or isinstance(failure, socket.gaierror):
        return ": is that this machine? We can only listen at an address of our own"
    return ""


async def _dial_by(target: Target, tls: TlsFiles | ClusterTls | None) -> Channel:
    """One attempt to open a channel; raises `OSError` where another may succeed."""
    if target.scheme == "grpc":
        from hcsim.real.grpc import dial as dial_grpc

        return await dial_grpc(target.text, target.hosts[0], target.port, _files(target, tls))
    from hcsim.real.websocket import dial as dial_websocket

    context: ssl.SSLContext | None = None
    if target.scheme == "wss":
        context = Tls(tls).context(server_side=False) if isinstance(tls, TlsFiles) else ssl.create_default_context()
    return await dial_websocket(target.text, context)


async def _listen_by(
    target: Target, family: int, sockaddr: Any, tls: TlsFiles | ClusterTls | None, handshake_timeout_s: float
) -> Listener:
    """Accept channels."""
    if target.scheme == "grpc":
        from hcsim.real.grpc import GrpcListener

        return await GrpcListener.open(sockaddr, _files(target, tls))
    from hcsim.real.websocket import WebSocketListener

    context: ssl.SSLContext | None = None
    if target.scheme == "wss":
        if not isinstance(tls, TlsFiles):
            raise ConfigError(
                f"{target.text}: to listen with TLS takes a certificate, its key and a CA in files; "
                "behind a tunnel or proxy that has them, listen at ws://127.0.0.1:…"
            )
        context = Tls(tls).context(server_side=True)
    return await WebSocketListener.open(target.path, family, sockaddr, context, handshake_timeout_s)


def _files(target: Target, tls: TlsFiles | ClusterTls | None) -> TlsFiles | None:
    if isinstance(tls, ClusterTls):
        raise ConfigError(f"{target.text}: gRPC takes no Ed25519 keys; give TLS files with ECDSA or RSA keys")
    return tls
