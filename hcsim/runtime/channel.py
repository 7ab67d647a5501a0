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

    It is cut only between its elements, as the array is that it stands for."""

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
    """A place for numbers that are to be added to what lies there.

    A channel may add them as they come, while they are in the processor's cache: the payload that it returns is
    then `into`. One that cannot receives into `room`, of the same size, and returns that; the adding is left to do.
    What they are `numbers` says: a character of `struct`, or E for bfloat16; integers wrap, and have no sign."""

    __slots__ = ("into", "numbers", "room")

    def __init__(self, into: memoryview, room: memoryview, numbers: str) -> None:
        self.into = into
        self.room = room
        self.numbers = numbers


class Leg(NamedTuple):
    """One frame's way through us. It comes under one header and goes on under another as soon as it is there; or it
    only comes (and stays), or only goes."""

    comes: Header | None
    goes: Header | None
    into: memoryview
    """Our place for the payload."""
    numbers: str
    """What comes is added to what lies there, as in a `Fold`. Empty: it takes its place."""
    stays: bool
    """Whether the outcome is needed here even if it goes on."""
    divisor: int = 1
    """What sums are divided by before they go on."""


class Outlet(Protocol):
    """A channel's end that can pass frames on to another such end by itself, without a stop."""

    most_bytes: int
    """The longest payload."""

    def forward(self, legs: Sequence[Leg], to: Outlet, moved: Callable[[int], None]) -> asyncio.Future[None]:
        """Let the frames of these legs come over our channel and go on over the other's, one after the other, from the
        event loop's next turn on. Somebody has to `pump` our channel meanwhile.

        `moved` is told how many are over, again and again. The future is done when all are, or when the next one has to
        be received and sent in the usual way: another sender has its turn, or there is no room. Frames of others may
        come in between. Cancelled, nothing more is moved; whatever has been was moved as a whole."""


Place: TypeAlias = Callable[[Header], "memoryview | Fold | asyncio.Future[None] | None"]
"""Says where a frame's payload goes: a writable view of `header.length` bytes (or a `Fold` of such views), or None
to have it allocated, or a future: the payload then stays where it is, and the question is asked again once the
future is done. It is called for a phantom too, of which only such a future matters."""

Landed: TypeAlias = Callable[[Header, Payload], None]
"""Takes a frame that has come."""

EMPTY = memoryview(b"")
REST_S = 0.25
"""How long who cancels a send waits for the rest of its frame."""


class Channel(Protocol):
    """One connection to one peer.

    Frames arrive whole and in the order in which they were sent. One task may send while
    another receives; several senders take turns, frame by frame; there is one receiver.
    """

    @property
    def peer(self) -> str:
        """The other end, for people."""

    @property
    def carrier(self) -> str:
        """What it goes by, for people: "TCP", say."""

    @property
    def identity(self) -> str:
        """Which node is at the other end, as far as that has been proved; empty where nothing has."""

    @property
    def ends(self) -> tuple[str, str]:
        """The addresses that it goes between, ours first, without ports: which of our interfaces it uses, and which of
        the peer's. Empty where the carrier does not tell."""

    @property
    def binding(self) -> bytes:
        """A digest of this very connection's encryption, the same at both ends; empty where there is none.

        A proof that covers it cannot be carried over to another connection."""

    @property
    def outlet(self) -> Outlet | None:
        """What passes frames on to other channels that have one."""

    async def send(self, header: Header, payload: Payload = EMPTY) -> None:
        """Send one frame; `header.length` is the payload's size.

        Returns when the caller may reuse the buffer, which says nothing about delivery. Waits
        while the peer does not read (back-pressure). Cancelled before its first byte left,
        nothing was sent. Cancelled in the middle of a frame, the rest of it leaves first, if the
        peer takes it within a moment; if not, the channel is broken.
        """

    async def recv(self, place: Place) -> tuple[Header, Payload]:
        """Receive the next frame into the buffer that `place(header)` names.

        Cancelled between frames, nothing is lost and the channel is as before. Cancelled in the
        middle of one, the stream would be out of step, so the channel is broken.
        """

    async def pump(self, place: Place, landed: Landed) -> None:
        """Receive frame after frame and give each to `landed`, until the channel ends or one of the two raises.

        Cancelled, it is as a `recv` that is cancelled."""

    def limit(self, max_frame_bytes: int) -> None:
        """Refuse larger payloads from now on; an unknown peer starts with a small limit."""

    async def close(self) -> None:
        """End it. What was sent before still arrives. Later use raises `ChannelClosed`; the peer
        receives what is under way, then `ChannelBroken`. Closing twice is harmless."""


class Listener(Protocol):
    """Accepts channels at an address."""

    @property
    def address(self) -> str:
        """`host:port`, with the port that was really taken."""

    async def accept(self) -> Channel:
        """The next channel that a peer opened."""

    async def close(self) -> None:
        """Accept no more. Channels that were accepted live on."""
