"""Hellos: the first frame in each direction of a channel, with which two members of a group check each other."""

from __future__ import annotations

from typing import Annotated

import msgspec

from hcsim.errors import RemoteProtocolError, UsageError
from hcsim.runtime.channel import Channel, Phantom
from hcsim.runtime.frame import Header, Kind, decode_message
from hcsim.transport.admission_queue import RefusalLog

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


async def say_hello(channel: Channel, us: GroupMembership, stripe: int = 0) -> None:
    await say(channel, Kind.HELLO, us, msgspec.msgpack.encode(hello_of(us, us.rank, stripe)))


async def say(channel: Channel, kind: Kind, us: GroupMembership, data: bytes, culprit: int | None = None) -> None:
    """Send a frame that belongs to no operation; an ABORT may name the rank that caused it."""
    step = culprit + 1 if culprit is not None and 0 <= culprit < us.world else 0
    await channel.send(Header(len(data), kind, sender=us.rank, epoch=us.epoch, step=step), memoryview(data))


def culprit_in(header: Header, world: int) -> int | None:
    """Return the rank that an ABORT names, or None if there is none."""
    return header.step - 1 if 0 < header.step <= world else None


async def hear(channel: Channel) -> tuple[Kind, bytes]:
    """Receive a frame; return its kind and its payload."""
    header, payload = await channel.recv(lambda header: None)
    if isinstance(payload, Phantom):
        raise RemoteProtocolError(f"{channel.peer} sent a greeting without content", channel.peer)
    return header.kind, bytes(payload)
