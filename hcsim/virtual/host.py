"""Hosts of the virtual world: connection setup, listeners, datagrams, and process limits."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from hcsim.config import Machine, Scenario
from hcsim.errors import ChannelClosed, ConfigError, DeadlineExceeded, PeerRefused, UsageError
from hcsim.rng import stream as random_stream
from hcsim.runtime.address import hosts_of
from hcsim.runtime.host import CONNECT_TIMEOUT_S, Interface, PeerCheck, Readings
from hcsim.telemetry.metrics import HostMetrics
from hcsim.telemetry.trace import Intervals, Trace
from hcsim.virtual.channel import ChannelHost, VirtualChannel
from hcsim.virtual.environment import NS, Environment
from hcsim.virtual.hardware import VirtualClock, VirtualDevice, VirtualStore
from hcsim.virtual.host_network import FrameFaults, HostNetwork
from hcsim.virtual.lan import Datagram, DatagramRules, VirtualLan
from hcsim.virtual.links import ResourceGraph
from hcsim.virtual.loop import OWNER, VirtualLoop
from hcsim.virtual.network import FluidNetwork
from hcsim.virtual.processor import Cores, MessageProcessor, costs_nothing
from hcsim.virtual.stream import NEVER_NS

SYN_RETRY_S = 1.0
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0
FIRST_FREE_PORT = 49152
NEXT_PLACE_S = 1.0
"""Connection timeout of one of several addresses of a machine, before the next is tried."""
NO_NODES: Mapping[str, str] = {"192.0.2.1": "refuse", "192.0.2.2": "silent", "192.0.2.3": "absent"}
"""Unused addresses on every local network, and the outcome of a connection attempt there."""
NO_NODE_ANSWERS_S = 1e-3
NO_ROUTE_S = 3.0
"""Time until the system reports an absent machine on the local network."""


class _CannotDial(Exception):
    """The local system cannot make a connection; the text is the system's error message."""


class Surroundings(Protocol):
    """The world, as its hosts and faults know it."""

    scenario: Scenario
    trace: Trace
    loop: VirtualLoop
    env: Environment
    """SimPy's."""
    net: FluidNetwork
    wiring: HostNetwork
    datagrams: DatagramRules
    tampering: FrameFaults
    returns: dict[str, int]
    """How often each host is still to be started again."""
    spoofed: dict[str, list[str]]
    """Names of services that strangers announce, and in which homes."""

    @property
    def topology(self) -> ResourceGraph:
        """The media and routes of this moment."""

    @property
    def hosts(self) -> tuple[VirtualHost, ...]:
        """In the order of the scenario."""

    def host(self, name: str) -> VirtualHost:
        """The host of that name, in the life that it has now."""

    def restart(self, name: str, records: Mapping[str, bytes] | None = None) -> VirtualHost:
        """Start a crashed host again, with these records in its store (None: those that were there)."""

    def host_ended(self, host: VirtualHost, why: str) -> None:
        """Its program will never end by itself, unless the host is started again."""


class VirtualHost:
    """One machine in one of its lives: its clock, device, interfaces, ports and tasks.

    A restarted machine is another host of the same name. It keeps the disk, the clock and the throttling;
    everything else is new, including its random streams."""

    def __init__(
        self,
        world: Surroundings,
        name: str,
        machine: Machine,
        cores: Cores,
        records: Mapping[str, bytes] | None = None,
        before: VirtualHost | None = None,
    ) -> None:
        self._world = world
        self.loop = world.loop
        self.net = world.net
        self._name = name
        self.life: int = 1 if before is None else before.life + 1
        self._seeded = name if before is None else f"{name}#{self.life}"
        self.machine = machine
        self.clock = VirtualClock(self.loop)
        self.cores = cores
        """Those that handle its messages."""
        self.processor: MessageProcessor | None = None
        if machine.messages is not None and not costs_nothing(machine.messages):
            self.processor = MessageProcessor(self.loop.env, machine.messages, cores, tls=world.scenario.tcp.tls)
        self.device = VirtualDevice(self, machine, cores if machine.shares_processor else None)
        if before is not None:
            self.clock.go_on_from(before.clock)
            self.device.go_on_from(before.device)
        self.lan: VirtualLan = VirtualLan(self, before.lan.history if before is not None else ())
        self.store: VirtualStore = VirtualStore(records or {}, before.store if before is not None else None)
        self.metrics = HostMetrics()
        self.metrics.collect(self._tell_channels)
        self.interval = Intervals(world.trace, lambda: world.env.now_ns, name)
        self.timeline_clock: None = None  # all clocks are one, and the network notes the frames
        self.leaving = asyncio.Event()
        """Set when its program is to end in an orderly way."""
        self.alive = True
        self.system_lives = False
        """Whether only the program has crashed; the operating system then refuses connections."""
        self.pauses = 0
        """The number of faults that suspend it now."""
        self.sleeps: list[tuple[tuple[str, str], ...]] = []
        """The routes cut by each active sleep fault."""
        self.asleep_until_ns = 0
        self.channels: dict[VirtualChannel, None] = {}
        self.descriptor_limits: list[int] = before.descriptor_limits if before is not None else []
        """Limits on the number of connections; the smallest applies."""
        self._dialling = 0
        self._unaccepted: list[tuple[VirtualListener, VirtualChannel]] = []
        """Incoming connections that wait for a free descriptor."""
        self._listeners: dict[int, VirtualListener] = {}
        self._answered: dict[str, str] = {}
        """The address that last answered, for a machine with several addresses."""
        self._context = contextvars.copy_context()
        self._context.run(OWNER.set, self)
        self._signals: dict[str, random.Random] = {}
        """A random stream per target of packets, so that the draws for one peer do not affect others."""

    def __repr__(self) -> str:
        return f"<host {self._name}>"

    @property
    def name(self) -> str:
        return self._name

    def interfaces(self) -> tuple[Interface, ...]:
        return self._world.topology.interfaces(self._name)

    async def readings(self) -> Readings:
        """Return nothing: heat and power of a machine are not modelled."""
        return Readings()

    async def listen(self, address: str) -> VirtualListener:
        hosts, port = hosts_of(address)
        if any(host.partition("%")[0] not in (self._name, "0.0.0.0") for host in hosts):
            raise UsageError(f"{self._name} cannot listen at {address}: that is not its name")
        if port == 0:
            port = next(free for free in range(FIRST_FREE_PORT, 65536) if free not in self._listeners)
        if port in self._listeners:
            raise ConfigError(f"{self._name} cannot listen: it does so at port {port} already")
        listener = self._listeners[port] = VirtualListener(self, port)
        return listener

    async def connect(
        self, address: str, *, timeout_s: float = CONNECT_TIMEOUT_S, is_peer: PeerCheck | None = None
    ) -> VirtualChannel:
        """See `runtime.host.Host.connect`. Names lead to their host, so `is_peer` is ignored."""
        places, port = hosts_of(address)
        name = places[0].partition("%")[0]
        for place in places:
            if place not in NO_NODES:
                self._world.host(place.partition("%")[0])  # there must be one
        backoff_s = FIRST_BACKOFF_S
        refused, why = False, ""
        try:
            async with self.clock.timeout(timeout_s):
                while True:
                    try:
                        channel = await self._dial_one_of(address, places, port)
                    except _CannotDial as error:
                        refused, why = False, f": the connection to {address} failed: {error}"
                    else:
                        if channel is not None:
                            self.metrics.counter("hcsim_connects_total", outcome="opened").add()
                            return channel
                        refused = True
                    await self.clock.sleep(backoff_s * (0.5 + self._draws(name).random()))
                    backoff_s = min(2.0 * backoff_s, LAST_BACKOFF_S)
        except TimeoutError:
            outcome = "refused" if refused else "unanswered"
            self.metrics.counter("hcsim_connects_total", outcome=outcome).add()
            if refused:
                raise PeerRefused(f"nobody listens at {address} (tried for {timeout_s:g} s)", name) from None
            raise DeadlineExceeded(f"{address} did not answer within {timeout_s:g} s{why}") from None

    def spawn(
        self, work: Coroutine[Any, Any, Any], *, name: str, over: Callable[[asyncio.Task[Any]], None] | None = None
    ) -> asyncio.Task[Any]:
        if not self.alive:
            work.close()
            raise ChannelClosed(f"{self._name} has crashed and runs nothing any more")
        task = self.loop.create_task(work, name=f"{self._name}: {name}", context=self._context.copy())
        self.interval.spawned(task)
        if over is not None:
            task.add_done_callback(over)
        return task

    def rng(self, *name: str | int) -> random.Random:
        return random_stream(self._world.scenario.seed, self._seeded, *name)

    def trace(self, kind: str, *fields: str | int | float) -> None:
        self.net.trace.record((self.loop.env.now_ns, kind, self._name, *fields))

    def note(self, kind: str, *fields: str | int | float) -> None:
        if self.net.trace.is_kept:
            self.net.trace.append([(self.loop.env.now_ns, kind, self._name, *fields)])

    # The world's side of a host.

    def release_cores(self) -> None:
        """Take no part in the sharing of cores any more: this life is over."""
        if self.processor is not None:
            self.processor.end()
        self.cores.leave(self.device)

    def neighbours(self) -> tuple[VirtualHost, ...]:
        """Return the other hosts that receive this host's broadcasts."""
        return tuple(self._world.host(name) for name in self._world.wiring.neighbours(self._name))

    def is_name_taken(self, name: str) -> bool:
        """Return whether a foreign machine announces a service of that name on a network of this host."""
        return any(self._world.wiring.is_at_home(self._name, home) for home in self._world.spoofed.get(name, ()))

    def signal(self, target: ChannelHost, what: str, arrive: Callable[..., None], *args: object) -> None:
        """Send a packet of zero size. A partition or a crash drops it."""
        self._post(_Packet(self, target, what, arrive, args))

    def cast(self, target: VirtualHost, question: bool, arrive: Callable[..., None], *args: object) -> None:
        """Send a datagram of the local network. Datagram faults apply, besides those of `signal`."""
        route = self._world.topology.route(self._name, target.name)
        if route is not None:
            datagram = Datagram(self._name, target.name, (route.medium, route.arrives_by), question)
            what = "question" if question else "announcement"
            packet = _Packet(self, target, what, arrive, args)
            self._post(packet, self._world.datagrams.delays_s(datagram))

    def _post(self, packet: _Packet, delays_s: tuple[float, ...] = (0.0,), over: tuple[str, str] | None = None) -> None:
        if self.alive or packet.what == "refusal":
            packet.note("send")
            self._carry(packet, delays_s, over)

    def _carry(self, packet: _Packet, delays_s: tuple[float, ...], over: tuple[str, str] | None) -> None:
        target = packet.target.name
        path = self._world.topology.route(self._name, target, over)
        if path is None or self._world.wiring.is_cut(self._name, target):
            return
        if not self.alive and packet.what not in ("reset", "refusal"):  # a system sends these that outlives its process
            return
        if self.net.waits(path, partial(self._carry, packet, delays_s, over)):
            return
        way_s = path.latency_s
        if path.jitter_s > 0.0:
            way_s += self._draws(target).expovariate(1.0 / path.jitter_s)
        for delay_s in delays_s:
            self.loop.env.call_at(self.loop.env.now_ns + round((way_s + delay_s) * NS), self._came, packet)

    def _draws(self, target: str) -> random.Random:
        if target not in self._signals:
            self._signals[target] = random_stream(self._world.scenario.seed, "signal", self._seeded, target)
        return self._signals[target]

    def _came(self, packet: _Packet) -> None:
        wiring, target = self._world.wiring, packet.target
        clear_ns = wiring.clogged_until_ns(self._name, target.name)
        if self.loop.env.now_ns < clear_ns:
            if clear_ns < NEVER_NS:
                self.loop.env.call_at(clear_ns, self._came, packet)
        elif target.hears(packet.what) and not wiring.is_cut(self._name, target.name):
            packet.note("deliver")
            packet.arrive(*packet.args)

    def hears(self, what: str) -> bool:
        """Return whether such a packet is received: by the program, or by the system that refuses connections."""
        return self.alive or (self.system_lives and what == "call")

    def present(self, name: str) -> VirtualHost:
        """Return the host of that name in its current life."""
        return self._world.host(name)

    def is_silenced(self, channel: VirtualChannel) -> bool:
        """Return whether all traffic of the channel's port is dropped."""
        return self._world.wiring.is_silent(*channel.called)

    def disown(self, channel: VirtualChannel) -> None:
        """Answer a packet of an unknown connection with a reset."""
        if not self.is_silenced(channel):
            self.signal(channel.host, "reset", channel.broken, f"{self._name} does not know it any more")

    def _tell_channels(self) -> None:
        self.metrics.gauge("hcsim_channels_open").set(len(self.channels))

    def forget(self, channel: VirtualChannel) -> None:
        """Remove a channel that has ended."""
        self.channels.pop(channel, None)
        if self._unaccepted:
            self._unaccepted = [entry for entry in self._unaccepted if entry[1] is not channel]
            self.accept_waiting()

    def release(self, port: int) -> None:
        """Close the port; connections that wait there for a descriptor are reset."""
        listener = self._listeners.pop(port, None)
        for channel in [far for waited_for, far in self._unaccepted if waited_for is listener]:
            _disown(channel)

    def accept_waiting(self) -> None:
        """Accept waiting connections as far as there are descriptors."""
        while self._unaccepted and not self._is_out_of_descriptors():
            listener, channel = self._unaccepted.pop(0)
            self._accept(listener, channel)

    def _accept(self, listener: VirtualListener, channel: VirtualChannel) -> None:
        self.metrics.counter("hcsim_accepts_total").add()
        listener.offer(channel)

    @property
    def descriptors(self) -> int:
        """The number of connections of the process, including those being established."""
        return len(self.channels) - len(self._unaccepted) + self._dialling

    def _is_out_of_descriptors(self) -> bool:
        return bool(self.descriptor_limits) and self.descriptors >= min(self.descriptor_limits)

    async def _dial_one_of(self, address: str, places: Sequence[str], port: int) -> VirtualChannel | None:
        """Try each address once, the last one that answered first. All but the last get `NEXT_PLACE_S`."""
        *others, last = sorted(places, key=lambda place: place != self._answered.get(address))
        for place in others:
            with suppress(TimeoutError, _CannotDial):
                async with asyncio.timeout(NEXT_PLACE_S):
                    channel = await self._dial(place, port)
                    if channel is not None:
                        self._answered[address] = place
                        return channel
        channel = await self._dial(last, port)
        if others and channel is not None:
            self._answered[address] = last
        return channel

    async def _dial(self, place: str, port: int) -> VirtualChannel | None:
        """Return a channel, or None when the target refuses. The request is repeated while there is no answer."""
        if self._is_out_of_descriptors():
            raise _CannotDial("Too many open files")
        self._dialling += 1
        try:
            return await (self._call_nobody(NO_NODES[place]) if place in NO_NODES else self._call(place, port))
        finally:
            self._dialling -= 1
            self.accept_waiting()

    async def _call_nobody(self, how: str) -> None:
        """Simulate a connection attempt to an address without a node."""
        if how == "refuse":
            await asyncio.sleep(NO_NODE_ANSWERS_S)
        elif how == "silent":
            await self.loop.create_future()
        else:
            await asyncio.sleep(NO_ROUTE_S)
            raise _CannotDial("No route to host")

    async def _call(self, place: str, port: int) -> VirtualChannel | None:
        name, _, interface = place.partition("%")
        call = ConnectionAttempt(self, port, interface)
        try:
            while not call.answer.done():
                target = self._world.host(name)  # in the life that it has now
                over = ("", interface) if interface else None
                self._post(_Packet(self, target, "call", target.called, (call,)), over=over)
                try:
                    async with asyncio.timeout(SYN_RETRY_S):
                        await asyncio.shield(call.answer)
                except TimeoutError:
                    continue
        except BaseException:
            call.give_up()
            raise
        return call.answer.result()

    def called(self, call: ConnectionAttempt) -> None:
        """Handle a connection request or its repetition."""
        if call.given_up or not call.caller.alive:  # nobody would answer our answer
            return
        wiring = self._world.wiring
        if wiring.is_silent(self._name, call.port):
            return
        is_closed = not self.alive or wiring.is_closed(self._name, call.port)
        listener = None if is_closed else self._listeners.get(call.port)
        if call.taken_by is not self:
            if listener is None:
                self.signal(call.caller, "refusal", call.answered, None)
                return
            is_full = self._is_out_of_descriptors()
            ends = wiring.join(call.caller, self, call.port, call.interface)
            if ends is None:  # the way went away behind the call
                return
            call.taken_by = self
            _disown(call.near)  # of a life before this one
            call.near, far = ends
            if is_full:  # the system has taken it; the process does not know of it yet
                self._unaccepted.append((listener, far))
            else:
                self._accept(listener, far)
        self.signal(call.caller, "answer", call.answered, call.near)


class _Packet(NamedTuple):
    """A packet of zero size, sent outside of any connection."""

    source: VirtualHost
    target: ChannelHost
    what: str
    arrive: Callable[..., None]
    args: tuple[object, ...]

    def note(self, happened: str) -> None:
        """Record it in the trace."""
        source, target = self.source, self.target
        source.net.trace.record((source.loop.env.now_ns, happened, f"{source.name}→{target.name}", self.what))


class ConnectionAttempt:
    """A connection request, including its repetitions."""

    def __init__(self, caller: VirtualHost, port: int, interface: str) -> None:
        self.caller = caller
        self.port = port
        self.interface = interface
        """The target interface of the callee; empty: the best one."""
        self.answer: asyncio.Future[VirtualChannel | None] = caller.loop.create_future()
        self.taken_by: VirtualHost | None = None
        """The host, in one of its lives, that accepted the request."""
        self.near: VirtualChannel | None = None
        self.given_up = False

    def answered(self, channel: VirtualChannel | None) -> None:
        if not self.given_up and not self.answer.done():
            self.answer.set_result(channel)

    def give_up(self) -> None:
        """Abandon the connection. The peer's end is reset, or gets a reset when it sends."""
        self.given_up = True
        _disown(self.near)


def _disown(channel: VirtualChannel | None) -> None:
    if channel is not None:
        channel.tell_peer(f"{channel.host.name} has given it up")
        channel.vanish()


class VirtualListener:
    """Accept channels at a port of a virtual host."""

    def __init__(self, host: VirtualHost, port: int) -> None:
        self._host = host
        self._port = port
        self._waiting: asyncio.Queue[VirtualChannel | None] = asyncio.Queue()
        self._open = True

    def __repr__(self) -> str:
        return f"<listener {self.address}>"

    @property
    def address(self) -> str:
        return f"{self._host.name}:{self._port}"

    async def accept(self) -> VirtualChannel:
        channel = await self._waiting.get() if self._open else None
        if channel is None:
            self._waiting.put_nowait(None)  # for the next who waits
            raise ChannelClosed(f"the listener at {self.address} was closed by us")
        return channel

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._host.release(self._port)
            while not self._waiting.empty():
                if channel := self._waiting.get_nowait():
                    await channel.close()
            self._waiting.put_nowait(None)

    def offer(self, channel: VirtualChannel) -> None:
        self._waiting.put_nowait(channel)
