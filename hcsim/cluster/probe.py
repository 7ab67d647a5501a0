"""Measurement of a machine's speed and of the latency and bandwidth of a connection.

A machine is timed on a product of matrices and on a sum of vectors, repeated until the clock's resolution does
not matter.

A connection is timed by the shortest of a few round trips, and by a burst of frames in each direction. The
receiver of a burst measures the time of its second half, from frame to frame: by then TCP's window is open, and
the time includes no round trip. Bursts grow until that half takes long enough. A line that is shaped passes the first
ones faster than what it sustains: bursts follow each other until they no longer become slower, and the last ones count.

While two nodes measure the link between them, neither measures another one: each node has one lock, and a
measurement holds both. Locks are taken in the order of node names to avoid deadlock. Pairs without a common
node may still share an access point or an internet link: let nodes survey one after the other where that
matters.

`Routes` holds what a node knows of its routes to the others, and which one it dials. A machine with several
interfaces has several addresses. Of two members of a view, the one that will dial the other measures its routes
to all of the other's addresses, once: quickly, over the control port. It sends the results to the other. The
measurement is repeated when one of the two was restarted, or when their connection has failed.

Addresses are in their owner's order, the fastest medium first. One that did not answer is dialled last, and one
that was measured to be clearly slower than another is dialled after those that were not. The choice of the
route changes how long operations take, and never their results.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import inf
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from hcsim.cluster import messages
from hcsim.cluster.view import Member
from hcsim.errors import ChannelError, DeadlineExceeded, HcsimError
from hcsim.runtime.address import address_at, hosts_of
from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.frame import Header
from hcsim.runtime.host import Host, KernelGroup, Work
from hcsim.transport.admission_queue import AdmissionQueue
from hcsim.transport.messages import Schema, expect

KIB = 1024
LARGEST_FRAME_BYTES = 512 * KIB
MOST_FRAMES = 256
LONG_ENOUGH_S = 0.02
REPEATS = 3
"""The median of so many bursts, the last ones, counts: on a wireless link that stalls for a moment, one burst may take
long, or arrive all at once."""
MOST_REPEATS = 12
SLOWER = 1.03
"""A burst that takes longer than the one before by this factor is followed by another one."""
MESSAGE_BYTES = 256
CONNECT_TIMEOUT_S = 2.0
"""The timeout for addresses; an unreachable one often does not even refuse."""
PROBE_TIMEOUT_S = 30.0
TURN_TIMEOUT_S = 120.0
"""The timeout for another node's measurement lock."""

_MATRIX = 1024
_VECTOR = 4 * 2**20
_FLOAT_BYTES = 4
_MOST_REPEATS = 1024


MeasuredSeconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
MeasuredRate: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
"""A rate from a peer: neither NaN nor negative."""


class ProbeBudget(msgspec.Struct, frozen=True):
    """Limits of the bytes and the time of a link measurement."""

    bursts: tuple[tuple[int, int], ...]
    """Frames, and bytes per frame: the first burst, and the following ones while the measured half takes too
    little time."""
    long_enough_s: float
    repeat_for_s: float
    pings: int
    silence_s: float
    """How long a peer that holds the lock may be silent before it is released."""


THOROUGH = ProbeBudget(((16, 256 * KIB), (64, 256 * KIB), (256, 256 * KIB)), LONG_ENOUGH_S, inf, 7, TURN_TIMEOUT_S)
"""Measures a link to within a percent."""
QUICK = ProbeBudget(
    (*((8, size * KIB) for size in (2, 8, 32, 128, 512)), (64, 512 * KIB)), LONG_ENOUGH_S / 2, 0.3, 4, 3.0
)
"""For measurements while others wait: a tenth of a second in each direction of a cable, and 16 KiB on a slow
link."""


class DeviceSpeed(msgspec.Struct, frozen=True):
    """The measured speed of a machine."""

    flops: float
    """Floating-point operations per second, in a product of float32 matrices."""
    memory_Bps: float


class LinkSpeed(msgspec.Struct, frozen=True):
    """The measured performance of a connection."""

    latency_s: MeasuredSeconds
    """The minimum one-way latency."""
    there_Bps: MeasuredRate
    """Bandwidth from the caller to the callee."""
    back_Bps: MeasuredRate


class ProbeTurn(msgspec.Struct, frozen=True, tag="Turn"):
    """The caller requests the callee's measurement lock, and gets an empty answer once it has it."""

    caller: str = ""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Is answered with another ping."""


class Burst(msgspec.Struct, frozen=True, tag=True):
    """Announces this many frames, or (`back`) requests them; their receiver reports the time."""

    frames: Annotated[int, msgspec.Meta(ge=2, le=MOST_FRAMES)]
    frame_bytes: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_FRAME_BYTES)]
    back: bool


class Took(msgspec.Struct, frozen=True, tag=True):
    """The time of the second half of a burst."""

    seconds: MeasuredSeconds


class Found(msgspec.Struct, frozen=True, tag=True):
    """The end: sends the caller's results to the callee."""

    line: LinkSpeed


ProbeMessage: TypeAlias = ProbeTurn | Ping | Burst | Took | Found
SCHEMA: Schema[ProbeMessage] = Schema(ProbeMessage, "does not measure as we do")


async def measure_speed(host: Host) -> DeviceSpeed:
    product = _kernel("matmul", 2.0 * _MATRIX**3, 3.0 * _FLOAT_BYTES * _MATRIX**2)
    total = _kernel("copy", 1.0 * _VECTOR, 3.0 * _FLOAT_BYTES * _VECTOR)
    product_s = await _seconds_each(host, "matmul", _MATRIX, product)
    total_s = await _seconds_each(host, "axpy", _VECTOR, total)
    return DeviceSpeed(product.flops / product_s if product_s else inf, total.moved_bytes / total_s if total_s else inf)


def _kernel(kind: str, flops: float, moved_bytes: float) -> Work:
    return Work(flops, moved_bytes, groups=(KernelGroup(kind, flops, moved_bytes),))


async def _seconds_each(host: Host, kind: Literal["matmul", "axpy"], size: int, work: Work) -> float:
    device, clock = host.device, host.clock
    exercise = device.exercise(kind, size)
    await device.run(work, exercise)  # the first time it is loaded, compiled or woken up
    repeats = 1
    while True:
        began_s = clock.elapsed()
        for _ in range(repeats):
            await device.run(work, exercise)
        lasted_s = clock.elapsed() - began_s
        if lasted_s >= LONG_ENOUGH_S or repeats >= _MOST_REPEATS:
            return lasted_s / repeats
        repeats *= 4


class Prober:
    """Measures the links between this host and others, which run a prober too."""

    def __init__(self, host: Host, name: str, pace: ProbeBudget = THOROUGH) -> None:
        self._host = host
        self._name = name
        self._pace = pace
        self._turn = asyncio.Lock()
        self._callers = AdmissionQueue(host)

    async def serve(self, listener: Listener) -> None:
        await self._callers.accept(listener, self._called_by)

    async def measure(self, name: str, address: str) -> LinkSpeed | None:
        """Measure the link to the node of that name at one of its addresses; return None if there is no answer."""
        try:
            channel = await self._host.connect(address, timeout_s=CONNECT_TIMEOUT_S)
        except (ChannelError, DeadlineExceeded):
            return None
        return await self.over(channel, name)

    async def over(self, channel: Channel, name: str) -> LinkSpeed | None:
        """Measure the link to the node of that name over this channel; return None if it did not answer to the end."""
        try:
            if self._name < name:
                async with self._turn:
                    await self._ask_turn(channel)
                    return await self._timed(channel)
            await self._ask_turn(channel)
            async with self._turn:
                return await self._timed(channel)
        except (
            ChannelError,
            TimeoutError,
        ):  # it went away, or something stands between us that lets nothing large pass
            return None
        finally:
            await channel.close()

    async def answer(self, channel: Channel, known: Callable[[], None] = lambda: None) -> tuple[str, LinkSpeed] | None:
        """Serve a caller's measurement, and return the caller's name and results; `known` is called when it has
        begun."""
        try:
            turn = await self._greeting(channel, known)
            if isinstance(turn, ProbeTurn):
                async with self._turn:
                    await SCHEMA.send(channel, ProbeTurn())
                    while True:
                        async with self._host.clock.timeout(self._pace.silence_s):
                            line = await self._answer_one(channel)
                        if line is not None:
                            return turn.caller, line
        except (ChannelError, TimeoutError):
            pass  # whoever measured gave up
        finally:
            await channel.close()
        return None

    async def _ask_turn(self, channel: Channel) -> None:
        async with self._host.clock.timeout(TURN_TIMEOUT_S):
            await SCHEMA.ask(channel, ProbeTurn(self._name))

    async def _timed(self, channel: Channel) -> LinkSpeed:
        clock = self._host.clock
        async with clock.timeout(PROBE_TIMEOUT_S):
            trips_s = []
            for _ in range(self._pace.pings):
                began_s = clock.elapsed()
                await SCHEMA.ask(channel, Ping())
                trips_s.append(clock.elapsed() - began_s)
            trip_s = min(trips_s)
            there_Bps = await self._rate_Bps(trip_s, lambda *burst: self._there(channel, *burst))
            back_Bps = await self._rate_Bps(trip_s, lambda *burst: self._back(channel, *burst))
            line = LinkSpeed(trip_s / 2, there_Bps, back_Bps)
            await SCHEMA.send(channel, Found(line))
        return line

    async def _rate_Bps(self, trip_s: float, burst: Callable[[int, int], Coroutine[Any, Any, float]]) -> float:
        clock, pace = self._host.clock, self._pace
        enough_s = max(pace.long_enough_s, 2 * trip_s)  # less may be one wait for TCP's window
        for frames, frame_bytes in pace.bursts:
            last = (frames, frame_bytes) == pace.bursts[-1]
            began_s = clock.elapsed()
            halves_s = [await burst(frames, frame_bytes)]
            if halves_s[0] < enough_s and not last:
                continue
            while _is_unsettled(halves_s) and clock.elapsed() - began_s < pace.repeat_for_s:
                halves_s.append(await burst(frames, frame_bytes))
            half_s = statistics.median(halves_s[-REPEATS:])
            if half_s >= enough_s or last:
                break
        return frames // 2 * frame_bytes / half_s if half_s else inf

    async def _there(self, channel: Channel, frames: int, frame_bytes: int) -> float:
        await SCHEMA.send(channel, Burst(frames, frame_bytes, back=False))
        await _send_burst(channel, frames, frame_bytes)
        return expect(await SCHEMA.recv(channel), Took, channel.peer).seconds

    async def _back(self, channel: Channel, frames: int, frame_bytes: int) -> float:
        await SCHEMA.send(channel, Burst(frames, frame_bytes, back=True))
        return await self._receive_burst(channel, frames, frame_bytes)

    def _called_by(self, channel: Channel, number: int) -> None:
        self._host.spawn(self.answer(channel, lambda: self._callers.known(channel)), name=f"probe {number}")

    async def _greeting(self, channel: Channel, known: Callable[[], None]) -> ProbeMessage:
        try:
            channel.limit(MESSAGE_BYTES)
            async with self._host.clock.timeout(PROBE_TIMEOUT_S):
                return await SCHEMA.recv(channel)
        finally:
            known()

    async def _answer_one(self, channel: Channel) -> LinkSpeed | None:
        match await SCHEMA.recv(channel):
            case Burst(frames, frame_bytes, back):
                if back:
                    await _send_burst(channel, frames, frame_bytes)
                else:
                    await SCHEMA.send(channel, Took(await self._receive_burst(channel, frames, frame_bytes)))
            case Ping():
                await SCHEMA.send(channel, Ping())
            case Found(line):
                return line
        return None

    async def _receive_burst(self, channel: Channel, frames: int, frame_bytes: int) -> float:
        """Return the seconds that the second half took."""
        channel.limit(frame_bytes)
        room = memoryview(bytearray(frame_bytes))
        middle_s = self._host.clock.elapsed()
        for number in range(frames):
            if number == frames - frames // 2:
                middle_s = self._host.clock.elapsed()
            await channel.recv(lambda header: room[: header.length])
        channel.limit(MESSAGE_BYTES)
        return self._host.clock.elapsed() - middle_s


def _is_unsettled(halves_s: Sequence[float]) -> bool:
    if len(halves_s) < REPEATS:
        return True
    return len(halves_s) < MOST_REPEATS and halves_s[-1] > SLOWER * halves_s[-2]


_ZEROS = memoryview(bytes(LARGEST_FRAME_BYTES))


async def _send_burst(channel: Channel, frames: int, frame_bytes: int) -> None:
    for _ in range(frames):
        await channel.send(Header(frame_bytes), _ZEROS[:frame_bytes])


AS_FAST = 0.8
"""A route with at least this share of the fastest one's bandwidth is not clearly slower."""
CALL_TIMEOUT_S = 1.0
"""How long an address may take to answer before it counts as unreachable."""


class Route(msgspec.Struct, frozen=True):
    """A route to a node, with its measurements."""

    host: str
    line: LinkSpeed

    @property
    def bandwidth_Bps(self) -> float:
        """Return the bandwidth of the slower direction."""
        return min(self.line.there_Bps, self.line.back_Bps)


class Routes:
    """This node's routes to the others."""

    def __init__(self, host: Host, us: str, control: Callable[[str], str]) -> None:
        self._host = host
        self._prober = Prober(host, us, QUICK)
        self._control = control
        """Returns the control address of a node; empty if it is unknown."""
        self._found: dict[tuple[str, int], tuple[Route, ...]] = {}
        """By node and boot: routes that answered, the one to dial first."""
        self._heard: dict[str, tuple[Route, ...]] = {}
        """By node: the peer's measurements of its routes to this node, seen from here; their hosts are this node's."""
        self.in_use: Callable[[], Mapping[str, tuple[str, str]]] = dict
        """By node: the two addresses between which collectives run at the moment."""

    async def measure(self, members: Sequence[Member]) -> None:
        """Measure the unknown routes to these members, one after the other."""
        unknown = [member for member in members if (member.node, member.boot) not in self._found]
        places = [(member, *place) for member in unknown for place in _places(self._control(member.node))]
        channels: list[Channel] = []
        try:
            # One after the other, addresses that do not answer would take a second each.
            calls = await asyncio.gather(*(self._call(address, member.node, channels) for member, _, address in places))
            for member in unknown:
                hosts = [host for place, host, _ in places if place is member]
                theirs = [call for (place, *_), call in zip(places, calls, strict=True) if place is member]
                await self._measure(member, hosts, theirs)
        finally:
            for channel in channels:
                await channel.close()

    async def _measure(self, member: Member, hosts: Sequence[str], channels: Sequence[Channel | None]) -> None:
        ways = []
        for host, channel in zip(hosts, channels, strict=True):
            line = None if channel is None else await self._prober.over(channel, member.node)
            if line is not None:
                ways.append(Route(host, line))
                self._host.trace("measured", member.name, host, line.latency_s, line.there_Bps, line.back_Bps)
        if ways:
            self._found[member.node, member.boot] = _by_choice(ways)

    async def answer(self, channel: Channel) -> None:
        heard = await self._prober.answer(channel)
        if heard is not None:
            node, line = heard
            if channel.identity in ("", node):
                ours = Route(channel.ends[0], LinkSpeed(line.latency_s, line.back_Bps, line.there_Bps))
                others = [way for way in self._heard.get(node, ()) if way.host != ours.host]
                self._heard[node] = _by_choice([ours, *others])

    def forget(self, node: str) -> None:
        """Discard the measurements of a node, since the connection may have changed."""
        for known in [known for known in self._found if known[0] == node]:
            del self._found[known]
        self._heard.pop(node, None)

    def dialled(self, member: Member) -> LinkSpeed | None:
        """Return the measurement of the route that this node dials to a member."""
        ways = self._found.get((member.node, member.boot))
        return ways[0].line if ways else None

    def line(self, member: Member) -> LinkSpeed | None:
        """Return the measurement of the route in use, or the one that would be used, whichever side measured it."""
        ours, theirs = self.in_use().get(member.node, ("", ""))
        found, heard = self._found.get((member.node, member.boot), ()), self._heard.get(member.node, ())
        used = [way for way in found if way.host == theirs] + [way for way in heard if way.host == ours]
        return next((way.line for way in (*used, *found, *heard)), None)

    def address(self, member: Member) -> str:
        """Return the address to dial for collectives: the member's address, best host first."""
        reached = [way.host for way in self._found.get((member.node, member.boot), ())]
        hosts, port = hosts_of(member.address)
        first = [host for host in reached if host in hosts]
        return address_at([*first, *(host for host in hosts if host not in first)], port) if first else member.address

    async def _call(self, address: str, node: str, channels: list[Channel]) -> Channel | None:
        """Open a channel to that node for a measurement and add it to the list of channels to close; return None if
        there is no answer, or another node's."""
        try:
            channel = await self._host.connect(
                address, timeout_s=CALL_TIMEOUT_S, is_peer=lambda identity: identity == node
            )
            channels.append(channel)
            await messages.SCHEMA.send(channel, messages.ProbeRequest())
        except HcsimError:
            return None
        return channel


def _places(address: str) -> list[tuple[str, str]]:
    """Return each of a machine's hosts with an address for it alone. IPv6 hosts lead to the same interfaces as
    IPv4 hosts, so they are omitted if there are IPv4 hosts."""
    if not address:
        return []
    hosts, port = hosts_of(address)
    return [(host, address_at([host], port)) for host in [host for host in hosts if ":" not in host] or hosts]


def _by_choice(ways: Sequence[Route]) -> tuple[Route, ...]:
    """Return the routes, with those that are clearly slower than the fastest moved to the end."""
    enough_Bps = AS_FAST * max(way.bandwidth_Bps for way in ways)
    return tuple(sorted(ways, key=lambda way: way.bandwidth_Bps < enough_Bps))
