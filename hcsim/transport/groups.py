"""How the members of a group meet: the group's settings, the hellos, and the listener for a node's collectives.

A hello is the first frame in each direction of a channel: with it two members of a group check each other.

The listener outlives the groups that it serves: groups change with the views of a cluster, it stays. The first
frame of a caller gives its purpose:

    HELLO       it belongs to the group of a view. The caller waits until that group is attached here.
    CONTROL     it checks this node. The frame is echoed, whatever the node is busy with.

A check shows whether a node is usable. Heartbeats do not show that: they use another port and few bytes, so
they continue if this port is closed, if a cable carries next to nothing, or if the device hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from hcsim.errors import ChannelError, HcsimError, RemoteProtocolError, UsageError
from hcsim.runtime.channel import EMPTY, Channel, Listener, Phantom
from hcsim.runtime.frame import Header, Kind, decode_message
from hcsim.runtime.host import Host, PeerCheck, Work
from hcsim.transport.admission_queue import AdmissionQueue, RefusalLog

HELLO_LIMIT_BYTES = 4096
HELLO_TIMEOUT_S = 5.0
MOST_EPOCHS = 1 << 32
"""The range of the epoch field in a frame's header."""
MAX_FRAME_BYTES = 16 * 2**20


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """How messages are sent within a group. All members must agree on it."""

    stripes: int = 1
    """Connections per peer; more can help on fast links with long round trips."""
    segment_bytes: int = 8 * 2**20
    """The segment size of large messages: smaller segments overlap better, larger ones cost less."""
    connect_timeout_s: float = 30.0
    """The time limit for connecting to the peers of an operation, from its beginning on."""

    def __post_init__(self) -> None:
        if self.stripes < 1 or not 0 < self.segment_bytes <= MAX_FRAME_BYTES or self.connect_timeout_s <= 0:
            raise UsageError(
                f"a wire has at least one stripe, segments of 1 to {MAX_FRAME_BYTES} bytes, and time to connect: {self}"
            )


class GroupMembership(msgspec.Struct, frozen=True):
    """A group and the rank of this member in it. All members must agree on all fields but `rank` and `refusals`."""

    rank: int
    addresses: tuple[str, ...]
    """The listening address of each rank."""
    name: str = "hcsim"
    epoch: int = 0
    wire: Wire = Wire()
    identities: tuple[str, ...] = ()
    """The node id of each rank, which its channel has to prove. Empty: ranks are not authenticated."""
    refusals: RefusalLog | None = None
    """Receives the refusals of callers by this group and its host, if given."""

    @property
    def world(self) -> int:
        return len(self.addresses)

    def is_rank(self, rank: int) -> PeerCheck | None:
        """Return a check for the node of a rank; None if ranks are not authenticated."""
        return (lambda identity: identity == self.identities[rank]) if self.identities else None

    def is_impostor(self, rank: int, channel: Channel) -> bool:
        """Return whether the peer is not the node that this rank should be."""
        return bool(self.identities) and channel.identity != self.identities[rank]


class GroupHello(msgspec.Struct, frozen=True):
    """The group that a member belongs to, and its rank and stripe."""

    name: str
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=MOST_EPOCHS)]
    world: int
    segment_bytes: int
    stripes: int
    rank: int
    stripe: int = 0


_DECODER = msgspec.msgpack.Decoder(GroupHello)


def hello_of(us: GroupMembership, rank: int, stripe: int) -> GroupHello:
    return GroupHello(us.name, us.epoch, us.world, us.wire.segment_bytes, us.wire.stripes, rank, stripe)


def objection(us: GroupMembership, theirs: GroupHello, channel: Channel) -> str:
    """Return the reason to reject a hello, or an empty string."""
    ours = hello_of(us, theirs.rank, theirs.stripe)
    for what in ("name", "epoch", "world", "segment_bytes", "stripes"):
        if getattr(ours, what) != getattr(theirs, what):
            return f"your {what} is {getattr(theirs, what)}, ours is {getattr(ours, what)}"
    if not us.rank < theirs.rank < us.world or not 0 <= theirs.stripe < us.wire.stripes:
        return f"rank {theirs.rank} (connection {theirs.stripe}) has no business calling rank {us.rank}"
    if us.is_impostor(theirs.rank, channel):
        return f"rank {theirs.rank} is node {us.identities[theirs.rank]}, and you are node {channel.identity}"
    return ""


def decode_hello(data: bytes, peer: str) -> GroupHello:
    """Decode the hello of an untrusted peer."""
    return decode_message(_DECODER, data, peer, "sent a hello that cannot be read")


async def send_hello(channel: Channel, us: GroupMembership, stripe: int = 0) -> None:
    await send_frame(channel, Kind.HELLO, us, msgspec.msgpack.encode(hello_of(us, us.rank, stripe)))


async def send_frame(
    channel: Channel, kind: Kind, us: GroupMembership, data: bytes, culprit: int | None = None
) -> None:
    """Send a frame that belongs to no operation; an ABORT may name the rank that caused it."""
    step = culprit + 1 if culprit is not None and 0 <= culprit < us.world else 0
    await channel.send(Header(len(data), kind, sender=us.rank, epoch=us.epoch, step=step), memoryview(data))


def culprit_in(header: Header, world: int) -> int | None:
    """Return the rank that an ABORT names, or None if there is none."""
    return header.step - 1 if 0 < header.step <= world else None


async def receive_frame(channel: Channel) -> tuple[Kind, bytes]:
    """Receive a frame; return its kind and its payload."""
    header, payload = await channel.recv(lambda header: None)
    if isinstance(payload, Phantom):
        raise RemoteProtocolError(f"{channel.peer} sent a greeting without content", channel.peer)
    return header.kind, bytes(payload)


CHECK_S = 3.0
"""The time limit for a device or a peer to pass a check."""
ECHOES = 4
"""The frames of a check: together 16 KiB in each direction, which need some 100 kb/s within that time."""
_ECHO = memoryview(bytes(HELLO_LIMIT_BYTES))
_EXERCISE = 4096
"""The number of elements in the vectors that a device adds in a check."""

FirstFrame: TypeAlias = tuple[Kind, bytes]
ChannelHandler: TypeAlias = Callable[[Channel, FirstFrame], None]
"""Takes a caller and its first frame."""


class GroupListener:
    """Accepts callers of collectives during a node's lifetime."""

    def __init__(self, host: Host, listener: Listener) -> None:
        self.host = host
        self._listener = listener
        self._callers = AdmissionQueue(host)
        self._take: ChannelHandler | None = None
        self._attached: asyncio.Future[None] | None = None
        self._serving = host.spawn(self._callers.accept(listener, self._called), name="accept callers of collectives")

    def attach(self, take: ChannelHandler) -> None:
        """Hand callers of groups to `take` from now on, including those that wait already."""
        self._take = take
        if self._attached is not None:
            self._attached.set_result(None)
            self._attached = None

    def detach(self) -> None:
        """Detach the group, which is over; further callers wait for the next one."""
        self._take = None

    async def close(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        await self._listener.close()

    def _called(self, channel: Channel, number: int) -> None:
        self.host.spawn(self._receive(channel), name=f"caller {number} of collectives")

    async def _receive(self, channel: Channel) -> None:
        """Receive a caller's first frame and act on it; a caller that is not handed to a group is closed at the end."""
        taken = False
        try:
            channel.limit(HELLO_LIMIT_BYTES)
            async with self.host.clock.timeout(HELLO_TIMEOUT_S):
                first = await receive_frame(channel)
                if first[0] is Kind.CONTROL:
                    await _echo(channel, first[1])
                    return
                while self._take is None:
                    self._attached = self._attached or asyncio.get_running_loop().create_future()
                    await asyncio.shield(self._attached)
            self._take(channel, first)
            taken = True
        except (ChannelError, TimeoutError):
            pass  # the caller notices, and may call again
        finally:
            self._callers.known(channel)
            if not taken:
                await channel.close()


async def _echo(channel: Channel, data: bytes) -> None:
    """Echo the frames of a check until the caller ends it."""
    while True:
        await channel.send(Header(len(data), Kind.CONTROL), memoryview(data))
        kind, data = await receive_frame(channel)
        if kind is not Kind.CONTROL:
            return


def echo_s(latency_s: float, there_Bps: float, back_Bps: float) -> float:
    """Return the duration of a check on a line with that latency (one way) and these rates."""
    return ECHOES * (2 * latency_s + len(_ECHO) / there_Bps + len(_ECHO) / back_Bps)


class CheckedPeer(NamedTuple):
    """A peer to check."""

    address: str
    within_s: float = CHECK_S
    """How long its answer may take."""
    node: str = ""
    """The id that it has to prove; empty: nothing."""


async def check_peer(host: Host, peer: CheckedPeer, until: AsyncExitStack | None = None) -> str:
    """Return why collectives cannot work with a peer, as far as visible from here; empty if they can.

    The connection is closed at once, or with `until`."""
    address, done, within_s = peer.address, 0, min(CHECK_S, peer.within_s)
    is_peer = (lambda identity: identity == peer.node) if peer.node else None
    try:
        async with host.clock.timeout(CHECK_S), AsyncExitStack() as now:
            channel = await host.connect(address, timeout_s=CHECK_S, is_peer=is_peer)
            (until or now).push_async_callback(channel.close)
            channel.limit(HELLO_LIMIT_BYTES)
            async with host.clock.timeout(within_s):
                for _ in range(ECHOES):
                    await channel.send(Header(len(_ECHO), Kind.CONTROL), _ECHO)
                    _, payload = await channel.recv(lambda header: None)
                    done += len(EMPTY if isinstance(payload, Phantom) else payload)
            return "" if done == ECHOES * len(_ECHO) else f"{address} does not answer checks"
    except TimeoutError:
        return f"{address} answered {done} of {ECHOES * len(_ECHO)} bytes within {within_s:.3g} s"
    except HcsimError as error:
        return f"{address} cannot be used: {error}"


async def check_device(host: Host) -> str:
    """Return why this host's device cannot be used; empty if it can."""
    device, work = host.device, Work(float(_EXERCISE), 12.0 * _EXERCISE)
    try:
        async with host.clock.timeout(CHECK_S):
            await device.run(work, device.exercise("axpy", _EXERCISE))
    except TimeoutError:
        return f"its device ({device.name}) did not add two vectors within {CHECK_S:g} s"
    except HcsimError as error:
        return f"its device ({device.name}) failed: {error}"
    return ""


async def check_all(
    host: Host, peers: Sequence[CheckedPeer], is_busy: Callable[[], bool] = lambda: False
) -> tuple[str, list[str]]:
    """Check this host's device, unless it is known to be busy, and all peers concurrently. Return the problem of the
    device, and those of the peers in order.

    All connections are open at the same time, as during
    operation, so a machine that allows only a few connections fails the check."""
    async with AsyncExitStack() as open_:
        checks = [check_peer(host, peer, open_) for peer in peers]
        own, *others = await asyncio.gather(_checked(host, is_busy), *checks)
    return own, others


async def _checked(host: Host, is_busy: Callable[[], bool]) -> str:
    return "" if is_busy() else await check_device(host)
