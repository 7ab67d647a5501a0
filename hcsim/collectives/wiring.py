"""What both ways of executing a plan do with memory and links: send, post, combine, finish."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec

from hcsim.collectives.buffers import Buffer, ScratchPool
from hcsim.runtime.channel import Fold, Payload
from hcsim.runtime.device import Device
from hcsim.runtime.frame import Header, Kind
from hcsim.transport.link import Link

POINT_TO_POINT = 1 << 31
"""Set in the group number of point-to-point messages, which are counted apart."""
RECEIVING = "receiving from"
"""What a task does that waits for a frame, as `Progress` says."""
BUCKET_BITS = 16
NUMBER_BITS = 48
"""Of an operation's number. The bits above it are those of a tag that is wider than a bucket."""
TAG_BITS = BUCKET_BITS + 64 - NUMBER_BITS
WORTH_CONVEYING_BYTES = 2**15
"""What is shorter gains little: rings, in which most is only passed on, are for long messages."""
_DATA = Kind.DATA  # an enum's member takes long to look up


class Ticket(msgspec.Struct, frozen=True):
    """What identifies one operation on the wire, and to people."""

    name: str
    rank: int
    epoch: int
    group: int
    operation: int
    bucket: int
    signature: int

    def __str__(self) -> str:
        return f"{self.name} #{self.operation % (1 << NUMBER_BITS)}"

    @property
    def to_one(self) -> bool:
        """Whether it is a message from one rank to another rather than a collective."""
        return bool(self.group & POINT_TO_POINT)


class Range(Protocol):
    """Some elements of the buffer: an action, or a segment of one."""

    @property
    def lo(self) -> int:
        """The first."""

    @property
    def hi(self) -> int:
        """One beyond the last."""


class Progress:
    """What a task does at the moment, and with whom, for the report of a failure."""

    __slots__ = ("doing", "peer", "segment", "step")

    def __init__(self) -> None:
        self.doing = ""
        self.peer: int | None = None
        self.step = 0
        self.segment = ""

    def rest(self) -> None:
        """Nobody is waited for."""
        self.doing, self.peer = "", None

    def __str__(self) -> str:
        if self.peer is None or not self.doing:
            return "waiting for its turn"
        return f"{self.doing} rank {self.peer} in round {self.step}{self.segment}"


class Wiring:
    """An operation's buffer, its links, and the headers between them."""

    __slots__ = ("_device", "_pool", "_rooms", "_size", "buffer", "links", "ticket")

    def __init__(self, ticket: Ticket, buffer: Buffer, pool: ScratchPool, device: Device) -> None:
        self.ticket = ticket
        self.buffer = buffer
        self.links: dict[int, Link] = {}
        self._pool = pool
        self._device = device
        self._size = buffer.element_bytes
        self._rooms: dict[tuple[int, int], tuple[memoryview, Fold | None]] = {}

    def send(
        self, link: Link, part: Range, step: int, offset: int = 0, total: int | None = None
    ) -> Coroutine[Any, Any, None]:
        """Send a range, which lies at `offset` of a message of `total` elements (both: all of it)."""
        header = self._header(part, step, offset, total, self.ticket.rank)
        return link.send(header, self.buffer.payload(part.lo, part.hi))

    def post(
        self,
        link: Link,
        part: Range,
        step: int,
        into: memoryview | Fold | None,
        offset: int = 0,
        total: int | None = None,
    ) -> asyncio.Future[Payload]:
        """Say where a range goes that the peer will send."""
        size, ticket = self._size, self.ticket
        tag = (ticket.group, ticket.operation, ticket.bucket, step, offset * size)
        return link.post(tag, into, ticket.signature, (part.hi - part.lo if total is None else total) * size)

    def may_convey(self, sent: int) -> bool:
        """Whether something that comes may be passed on without a stop, where so many elements are sent in all."""
        if sent * self._size < WORTH_CONVEYING_BYTES or self.buffer.is_phantom:
            return False
        return any(link.outlet is not None for link in self.links.values())

    def header(self, part: Range, step: int, sender: int) -> Header:
        """Of a message that is one frame."""
        return self._header(part, step, 0, None, sender)

    def _header(self, part: Range, step: int, offset: int, total: int | None, sender: int) -> Header:
        size, ticket = self._size, self.ticket
        length = (part.hi - part.lo) * size
        return Header(
            length, _DATA, sender, ticket.bucket, ticket.epoch, ticket.group, ticket.operation,
            ticket.signature, step, offset * size, length if total is None else total * size,
        )  # fmt: skip

    def scratch(self, which: tuple[int, int], part: Range, *, now: bool) -> memoryview | Fold | None:
        """Room beside the buffer for a range that is combined, until it is released by that name.

        Where `now` is its turn, and nobody else reads or writes the range before it has come, it may be added to it
        on the way."""
        if self.buffer.is_phantom:
            return None
        size_bytes = (part.hi - part.lo) * self._size
        whole = self._pool.take(size_bytes)
        room = whole[:size_bytes]
        fold = self.buffer.fold(part.lo, part.hi, room) if now else None
        self._rooms[which] = whole, fold
        return fold or room

    def check_over(self) -> None:
        """All went well here, so nothing more may have come for this operation."""
        ticket = self.ticket
        if not ticket.to_one:  # there the peer's numbers are its own
            for link in self.links.values():
                link.check_over(ticket.group, ticket.operation, ticket.bucket)

    def combine(
        self, which: tuple[int, int], part: Range, received: Payload, *, received_left: bool
    ) -> Coroutine[Any, Any, None]:
        """Combine what was received with the range, unless it was added to it on the way, and release its room.

        What is left to wait for is the time that this takes."""
        if not self.buffer.is_phantom:
            whole, fold = self._rooms.pop(which)
            if fold is None or received is not fold.into:
                self.buffer.combine(part.lo, part.hi, received, received_left=received_left)
            self._pool.give_back(whole)
        return self._device.touch(3 * received.nbytes)

    def finish(self, lo: int, hi: int) -> Coroutine[Any, Any, None]:
        """Apply what comes last to the range; wait for the time that this takes."""
        self.buffer.finish(lo, hi)
        return self._device.touch(2 * (hi - lo) * self._size)
