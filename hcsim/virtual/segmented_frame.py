"""Segmented sends: frames larger than the buffers between two ends.

The pieces of such a frame leave one after the other, so that the sender stalls if the receiver does not read:
then one window lies at the receiver, the send buffer is full, and the sender waits. Pieces are small until the
receiver is known to read, and few from then on. Jitter, loss and queueing apply to the frame as a whole.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Protocol

from hcsim.runtime.channel import REST_S, Payload
from hcsim.runtime.frame import HEADER_BYTES, Header
from hcsim.virtual.loop import VirtualLoop
from hcsim.virtual.network import FluidNetwork
from hcsim.virtual.processor import MessageProcessor, piece_bytes
from hcsim.virtual.stream import StreamMessage, VirtualStream

PER_WINDOW, AT_MOST = 2, 16
"""Pieces per window while the receiver is not known to read, and the maximum number. With two, the first arrives
before the second has left, at the rate that a window allows. A piece is at most as large as the send buffer,
unless that gives too many pieces."""
SLACK = 1 / 16
"""How far the rest of a frame may exceed the send buffer when the receiver reads; a smaller excess is not worth a
piece."""


class SegmentedFrame:
    """The state of a large frame, shared by both ends."""

    __slots__ = ("context", "header", "is_read", "is_whole", "payload", "unread_bytes")

    def __init__(self, header: Header, payload: Payload) -> None:
        self.header = header
        self.payload = payload
        self.is_read = False
        """Whether the frame has its place and is read as it arrives."""
        self.context: Context
        """The context of the reading task."""
        self.is_whole = False
        """Whether all of it has arrived."""
        self.unread_bytes = 0

    def take(self) -> int:
        """Return the number of arrived bytes that become read now."""
        taken, self.unread_bytes = self.unread_bytes, 0
        return taken


class Owner(Protocol):
    """What a large frame asks of an end's host."""

    loop: VirtualLoop
    net: FluidNetwork


class End(Protocol):
    """What it asks of an end of its connection."""

    @property
    def host(self) -> Owner:
        """Whose end it is."""

    @property
    def streams(self) -> tuple[VirtualStream, VirtualStream]:
        """What it sends, and what it receives."""

    def came(self, large: SegmentedFrame, size_bytes: int, filled: bool) -> None:
        """A piece has come, which is not the last one."""

    def came_whole(self, large: SegmentedFrame, size_bytes: int, header: Header, payload: Payload) -> None:
        """The last piece has come."""


class SegmentedSend:
    """The send of a large frame."""

    __slots__ = (
        "_context", "_far", "_fills", "_frame", "_is_over", "_loop", "_near", "_out", "_part_bytes", "_piece", "_tcp",
        "_waiter", "unsent_bytes",
    )  # fmt: skip

    def __init__(self, near: End, far: End, frame: SegmentedFrame) -> None:
        self._near, self._far, self._frame = near, far, frame
        self._out = near.streams[0]
        self._loop = near.host.loop
        self._tcp = near.host.net.tcp
        window_bytes = self._tcp.window_bytes
        self._part_bytes = max(min(window_bytes // PER_WINDOW, self._tcp.send_buffer_bytes), window_bytes // AT_MOST, 1)
        self._context = copy_context()
        self._waiter: asyncio.Future[None] | None = None
        self._piece: StreamMessage | None = None
        """The last piece, while it is in the local queue."""
        self._fills = True
        """Whether the piece counts in the window when it leaves, because the receiver may not read it on arrival."""
        self._is_over = False
        self.unsent_bytes = HEADER_BYTES + frame.header.length
        """Bytes that are not in the queue yet."""

    def __repr__(self) -> str:
        unread = "" if self._frame.is_read else " that nobody reads"
        return f"<frame of {HEADER_BYTES + self._frame.header.length} bytes over {self._out.name}{unread}>"

    async def until_over(self) -> None:
        """Wait until the rest is in the send buffer or the channel has ended. A cancelled wait allows a short grace
        period."""
        try:
            await self._until_over()
        except asyncio.CancelledError:
            with suppress(TimeoutError):
                async with asyncio.timeout(REST_S):
                    await self._until_over()
            raise

    async def _until_over(self) -> None:
        if not self._is_over:
            self._waiter = self._loop.create_future()
            await self._waiter

    def end(self) -> None:
        self._is_over = True
        self._count()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def left(self) -> None:
        """Handle that the head of the queue has left; after the last piece, the next follows at once."""
        if self._out.queue[0] is self._piece:
            self._count()
            if self._loop.is_frozen(self._near.host):
                self._loop.call_soon(self.go_on, context=self._context)
            else:
                self.go_on()

    def _count(self) -> None:
        """Count the last piece in the window: it has left, or its leaving will not be reported."""
        if self._piece is not None and self._fills:
            self._out.outstanding += self._piece.size_bytes
        self._piece = None

    def go_on(self) -> None:
        """Send a piece, or all of the rest if the send buffer has room for it."""
        if self._is_over:
            return
        frame, tcp, far, out = self._frame, self._tcp, self._far, self._out
        is_read = frame.is_read and not self._loop.is_frozen(far.host)
        most_bytes = tcp.window_bytes if is_read else self._part_bytes
        excess_bytes = self.unsent_bytes - tcp.send_buffer_bytes
        if excess_bytes > (tcp.send_buffer_bytes * SLACK if is_read else 0):
            size_bytes = min(excess_bytes, most_bytes)
            self.unsent_bytes -= size_bytes
            self._fills = not is_read
            self._piece = StreamMessage(size_bytes, partial(far.came, frame, size_bytes, self._fills), exposed_bytes=0)
            out.push(self._piece)
            return
        while not is_read and self.unsent_bytes > most_bytes:
            self.unsent_bytes -= most_bytes
            out.push(StreamMessage(most_bytes, partial(far.came, frame, most_bytes, False), exposed_bytes=0))
        last_bytes, self.unsent_bytes = self.unsent_bytes, 0
        arrive = partial(far.came_whole, frame, last_bytes)
        out.push(StreamMessage(last_bytes, arrive, frame.header, frame.payload, HEADER_BYTES + frame.header.length))
        self.end()


class HandledSend(SegmentedSend):
    """The send of a frame whose pieces a processor handles, at this end or at the other, or whose send buffer grows.

    A piece is handled here while those before it leave, as long as the send buffer has room."""

    __slots__ = ("_is_handling", "_processor")

    def __init__(self, near: End, far: End, frame: SegmentedFrame, processor: MessageProcessor | None) -> None:
        super().__init__(near, far, frame)
        self._processor = processor
        self._part_bytes = piece_bytes(self.unsent_bytes)
        self._is_handling = False

    def left(self) -> None:
        self.go_on()

    def go_on(self) -> None:
        """Handle the next piece, unless one is being handled or the send buffer is full."""
        if self._is_over or self._is_handling or self._out.queued_bytes >= self._out.send_buffer_bytes:
            return
        self._is_handling = True
        header = self._frame.header
        size_bytes = min(self._part_bytes, self.unsent_bytes)
        if self._processor is None:
            self._handled(size_bytes)
        else:
            begins = self.unsent_bytes == HEADER_BYTES + header.length
            self._processor.send(header, size_bytes, partial(self._handled, size_bytes), begins=begins)

    def _handled(self, size_bytes: int) -> None:
        if self._loop.is_frozen(self._near.host):
            self._loop.call_soon(self._handled, size_bytes, context=self._context)
            return
        self._is_handling = False
        if self._is_over:
            return
        frame, far = self._frame, self._far
        self.unsent_bytes -= size_bytes
        if self.unsent_bytes:
            self._out.push(StreamMessage(size_bytes, partial(far.came, frame, size_bytes, False), exposed_bytes=0))
            self.go_on()
            return
        arrive, exposed_bytes = partial(far.came_whole, frame, size_bytes), HEADER_BYTES + frame.header.length
        self._out.push(StreamMessage(size_bytes, arrive, frame.header, frame.payload, exposed_bytes))
        self.end()
