"""Channels: authenticated, ordered, reliable, message-framed connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from operator import index
from typing import NamedTuple, Protocol, TypeAlias

from hcsim.errors import UsageError
from hcsim.runtime.frame import Header


class Phantom:
    """A payload that has a size and no data: a sweep over a large model moves no bytes.

    It is only split between elements, like the array that it stands for."""

    __slots__ = ("itemsize", "nbytes")

    def __init__(self, nbytes: int, itemsize: int = 1) -> None:
        try:
            self.nbytes, self.itemsize = index(nbytes), index(itemsize)  # numpy's become plain
        except TypeError:
            raise UsageError(
                f"a payload has a whole number of bytes, not {nbytes!r} in elements of {itemsize!r}"
            ) from None
        if nbytes < 0 or itemsize < 1 or nbytes % itemsize:
            raise UsageError(f"a payload cannot have {nbytes} bytes, in elements of {itemsize}")

    def __repr__(self) -> str:
        return f"Phantom({self.nbytes})" if self.itemsize == 1 else f"Phantom({self.nbytes}, {self.itemsize})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Phantom) and (other.nbytes, other.itemsize) == (self.nbytes, self.itemsize)

    def __hash__(self) -> int:
        return self.nbytes


Payload: TypeAlias = memoryview | Phantom
"""Bytes (a contiguous view of format "B"), or their phantom."""


class Fold:
    """A destination whose contents are added to: reduce on receive.

    A channel may add the numbers as they arrive, while they are in the processor's cache: the payload that
    it returns is then `into`. A channel that cannot do so receives into `room`, of the same size, and
    returns that; the caller then adds it. `numbers` is their type: a character of `struct`, or E for
    bfloat16. Integers wrap, and are unsigned."""

    __slots__ = ("into", "numbers", "room")

    def __init__(self, into: memoryview, room: memoryview, numbers: str) -> None:
        self.into = into
        self.room = room
        self.numbers = numbers


class Leg(NamedTuple):
    """One frame's path through this rank: it arrives under one header and is forwarded under another as soon as
    it is there. A leg may also only receive (the frame stays), or only send."""

    comes: Header | None
    goes: Header | None
    into: memoryview
    numbers: str
    """The type of numbers that are added to the buffer, as in a `Fold`. Empty: the payload overwrites the
    buffer."""
    stays: bool
    """Whether the result is also needed here if it is forwarded."""
    divisor: int = 1
    """The divisor of sums before they are forwarded."""


class Outlet(Protocol):
    """A channel's end that can forward frames to another such end by itself."""

    most_bytes: int

    def forward(self, legs: Sequence[Leg], to: Outlet, moved: Callable[[int], None]) -> asyncio.Future[None]:
        """Receive the frames of these legs on this channel and forward them on the other, one after the other, from
        the event loop's next iteration on. Another task has to `pump` this channel meanwhile.

        `moved` is called repeatedly with the number of completed legs. The future is done when all are, or when
        the next one has to be received and sent in the usual way: it is another sender's turn, or there is no
        room. Frames of other messages may come in between. After cancellation nothing more is moved; every leg
        is either moved as a whole or not at all."""


Place: TypeAlias = Callable[[Header], "memoryview | Fold | asyncio.Future[None] | None"]
"""Returns the destination of a frame's payload: a writable view of `header.length` bytes (or a `Fold` of
such views), None to have it allocated, or a future. With a future the payload is not read yet, and the
function is called again once the future is done. It is also called for a phantom, for which only a
future has an effect."""

Landed: TypeAlias = Callable[[Header, Payload], None]
"""Called with each received frame."""


class SegmentCounts(NamedTuple):
    """What the transport beneath a channel has sent since the channel was opened."""

    sent: int
    """Segments, with those that were sent again."""
    lost: int
    """Segments that were sent again because they did not arrive, as far as the transport knows."""


EMPTY = memoryview(b"")
REST_S = 0.25
"""How long a cancelled send waits for the rest of its frame to be sent."""


class Channel(Protocol):
    """One connection to one peer.

    Frames arrive whole and in order. One task may send while another receives. Several senders take turns,
    frame by frame; there is one receiver."""

    @property
    def peer(self) -> str:
        """The peer, for messages to users."""

    @property
    def carrier(self) -> str:
        """The carrier, for messages to users, such as "TCP"."""

    @property
    def identity(self) -> str:
        """The peer's authenticated node id; empty if it has not been authenticated."""

    @property
    def ends(self) -> tuple[str, str]:
        """The addresses of both ends, the local one first, without ports; they show which interfaces the channel
        uses. Empty if the carrier does not tell."""

    @property
    def segments(self) -> SegmentCounts | None:
        """What the carrier has sent and lost; None if it does not tell."""

    @property
    def binding(self) -> bytes:
        """A digest of this connection's encryption (channel binding), the same at both ends; empty without
        encryption.

        A proof that covers it cannot be relayed to another connection."""

    @property
    def outlet(self) -> Outlet | None:
        """The forwarding interface to other channels, if the channel has one."""

    async def send(self, header: Header, payload: Payload = EMPTY) -> None:
        """Send one frame; `header.length` is the payload's size.

        Return when the caller may reuse the buffer, which says nothing about delivery. Block while the peer does
        not read (back-pressure). If cancelled before its first byte was sent, nothing is sent. If cancelled in
        the middle of a frame, the rest is still sent, if the peer takes it within a moment; otherwise the
        channel is broken."""

    async def recv(self, place: Place) -> tuple[Header, Payload]:
        """Receive the next frame into the buffer that `place(header)` returns.

        Cancelled between frames, nothing is lost and the channel stays usable. Cancelled in the middle of a
        frame, the channel is broken, since the stream would be out of step."""

    async def pump(self, place: Place, landed: Landed) -> None:
        """Receive frames and pass each to `landed`, until the channel ends or one of the callbacks raises.

        Cancellation acts as for `recv`."""

    def limit(self, max_frame_bytes: int) -> None:
        """Set the maximum payload from now on; an unknown peer starts with a small limit."""

    async def close(self) -> None:
        """Close the channel. What was sent before still arrives. Later use raises `ChannelClosed`; the peer
        receives what is in flight, then `ChannelBroken`. Idempotent."""


class Listener(Protocol):
    """Accepts channels at an address."""

    @property
    def address(self) -> str:
        """`host:port`, with the actual port."""

    async def accept(self) -> Channel: ...

    async def close(self) -> None:
        """Stop accepting. Accepted channels stay open."""
