"""Channels of the virtual world: two streams, and an inbox at each end.

A frame for a pump is handed over as it arrives, in the context of the pumping task, and wakes no task. This
saves a tenth of the cost of a message, and more with hundreds of ranks, whose tasks do not fit into a cache.
The frame stays in the inbox while its host is frozen or while it waits for its place.

A frame larger than the buffers arrives in pieces (see `segmented_frame.py`). It enters the inbox with its first piece;
the rest is read as it arrives once the frame has its place.

Where a host has a processor (see `processor.py`), frames and pieces pass through it before they enter the network, and
before they enter the inbox.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Protocol, TypeAlias

from hcsim.errors import ChannelBroken, ChannelClosed, RemoteProtocolError, UsageError
from hcsim.runtime.channel import EMPTY, Fold, Landed, Payload, Phantom, Place, SegmentCounts
from hcsim.runtime.frame import HEADER_BYTES, Header, decode_header
from hcsim.virtual.environment import NS
from hcsim.virtual.processor import SMALLEST_PIECE_BYTES, MessageProcessor
from hcsim.virtual.segmented_frame import HandledSend, Owner, SegmentedFrame, SegmentedSend
from hcsim.virtual.stream import RTO_S, StreamMessage, VirtualStream, frame_event

MAX_FRAME_BYTES = 64 * 2**20
NO_FRAME_BYTES = 1 << 62
"""Larger than any frame and any limit."""
MAX_RTO_NS = 60 * NS
"""The longest retransmission timeout of TCP."""


Detour: TypeAlias = Callable[["VirtualChannel", Callable[[Header, Payload], None], tuple[Header, Payload]], None]
"""Called with the local end, the delivery function of the peer, and a frame, when the frame arrives."""


class ChannelHost(Owner, Protocol):
    """What a channel asks of the host whose end it is."""

    alive: bool
    channels: dict[VirtualChannel, None]
    """Those that have not ended."""

    @property
    def name(self) -> str:
        """The name in the scenario."""

    def present(self, name: str) -> ChannelHost:
        """The host of that name, in the life that it has now."""

    @property
    def processor(self) -> MessageProcessor | None:
        """What handles its messages; None where they cost nothing."""

    def hears(self, what: str) -> bool:
        """Whether there is somebody to take such a packet."""

    def signal(self, target: ChannelHost, what: str, arrive: Callable[..., None], *args: object) -> None:
        """Send a packet of no size; a partition or a crash swallows it."""

    def is_silenced(self, channel: VirtualChannel) -> bool:
        """Whether the port that the channel was made to lets nothing pass."""

    def disown(self, channel: VirtualChannel) -> None:
        """A packet of a connection arrives that nobody here knows: the answer is a reset."""

    def forget(self, channel: VirtualChannel) -> None:
        """The channel has ended."""


class _Pump:
    """A task that receives frames as they arrive, and the context of its callbacks."""

    __slots__ = ("context", "landed", "large", "place", "wanted", "where")

    def __init__(self, place: Place, landed: Landed) -> None:
        self.place = place
        self.landed = landed
        self.context = copy_context()
        self.wanted: asyncio.Future[None] | None = None
        """The future that the frame at the head of the inbox waits for."""
        self.large: SegmentedFrame | None = None
        """The large frame that is being read into its place."""
        self.where: memoryview | Fold | None = None


class Undecodable(Header, frozen=True, gc=False):
    """Bytes in the position of a header that do not decode. Its length is `NO_FRAME_BYTES`."""

    raw: bytes = bytes(HEADER_BYTES)


class VirtualChannel:
    """One end of a simulated connection."""

    __slots__ = (
        "_coming", "_deliver", "_departure", "_end", "_ends", "_far", "_host", "_in", "_inbox", "_largest_whole_bytes",
        "_loop", "_max_frame_bytes", "_out", "_peer", "_processor", "_pump", "_reader", "_trace",
        "_unheard_since_ns", "_writers", "called",
    )  # fmt: skip
    carrier = "the simulated network"
    outlet = None

    def __init__(
        self, host: ChannelHost, peer: str, outgoing: VirtualStream, ends: tuple[str, str], called: tuple[str, int]
    ) -> None:
        self.called = called
        """The host and port that the connection was made to."""
        self._host = host
        self._loop = host.loop
        self._trace = host.net.trace
        self._processor = host.processor
        self._largest_whole_bytes = 0
        self._peer = peer
        self._ends = ends
        self._out = outgoing
        self._in: VirtualStream
        self._far: VirtualChannel
        self._deliver: Callable[[Header, Payload], None]
        self._inbox: deque[tuple[Header, Payload, SegmentedFrame | None]] = deque()
        self._coming: SegmentedFrame | None = None
        """The large frame whose last piece has not arrived."""
        self._reader: asyncio.Future[BaseException | None] | None = None
        """The pending receive; its result is the error that ends it, or None."""
        self._pump: _Pump | None = None
        """The pump, if the receiver takes frames as they arrive."""
        self._writers: deque[asyncio.Future[None]] = deque()
        self._departure: SegmentedSend | None = None
        """The large frame being sent; other senders wait for it."""
        self._max_frame_bytes = MAX_FRAME_BYTES
        self._unheard_since_ns: int | None = None
        self._end: ChannelClosed | ChannelBroken | RemoteProtocolError | None = None

    def __repr__(self) -> str:
        return f"<channel {self._out.name}>"

    @staticmethod
    def join(near: VirtualChannel, far: VirtualChannel) -> None:
        """Connect two ends with each other."""
        near._far, far._far = far, near
        near._in, far._in = far._out, near._out
        near.divert(None)
        far.divert(None)

    @property
    def host(self) -> ChannelHost:
        return self._host

    @property
    def peer(self) -> str:
        """The name of the host at the other end."""
        return self._peer

    @property
    def ends(self) -> tuple[str, str]:
        return self._ends

    @property
    def identity(self) -> str:
        """Empty: the simulated network has no encryption, so the identity of the peer is not yet proved."""
        return ""

    @property
    def binding(self) -> bytes:
        """Empty: there is no encryption to bind to."""
        return b""

    @property
    def segments(self) -> SegmentCounts:
        """What the outgoing stream has sent, and what it loses on average by the model."""
        return self._out.segments

    @property
    def streams(self) -> tuple[VirtualStream, VirtualStream]:
        """The outgoing and the incoming stream."""
        return self._out, self._in

    async def send(self, header: Header, payload: Payload = EMPTY) -> None:
        """Send a frame; see `runtime.channel.Channel.send`.

        A frame that is not large is queued whole while the queue is shorter than the send buffer."""
        if payload.nbytes != header.length:
            raise UsageError(f"the header announces {header.length} bytes, the payload has {payload.nbytes}")
        out = self._out
        if out.queued_bytes >= out.send_buffer_bytes or self._writers or self._departure is not None:
            await self._wait_for_room()
        if self._end is not None:
            raise self._again(self._end)
        # The sender may overwrite its buffer while the frame is still under way.
        kept = payload if isinstance(payload, Phantom) else memoryview(bytes(payload))
        self._trace.record(frame_event(self._loop.env.now_ns, "send", out.name, header))
        if (size_bytes := HEADER_BYTES + header.length) > self._largest_whole_bytes:
            await self._send_in_pieces(SegmentedFrame(header, kept))
        elif self._processor is not None:
            await self._send_handled(StreamMessage(size_bytes, self._deliver, header, kept))
        else:
            out.push(StreamMessage(size_bytes, self._deliver, header, kept))

    async def recv(self, place: Place) -> tuple[Header, Payload]:
        inbox = self._inbox
        if self._reader is not None:
            raise self._two_receive()
        if not inbox:
            await self._until_arrived()
        header, payload, large = inbox[0]  # where it stays until it has a place
        if (length := header.length) > self._max_frame_bytes or header.offset + length > header.total > 0:
            raise self._refused(header)
        while isinstance(where := place(header), asyncio.Future):
            await asyncio.shield(where)
            if self._end is not None and not inbox:
                raise self._again(self._end)
        if large is not None and not large.is_whole:
            self._check_place(header, payload, where)
            self._read(large)
            await self._until_arrived(large=large)
        if self._end is not None and not inbox:  # by `place`, or the frame is lost with the connection
            raise self._again(self._end)
        taken = self._taken(header, payload, where)
        self._in.consumed(HEADER_BYTES + header.length if large is None else large.take())
        inbox.popleft()
        return header, taken

    async def pump(self, place: Place, landed: Landed) -> None:
        inbox, pump = self._inbox, _Pump(place, landed)
        if self._reader is not None:
            raise self._two_receive()
        while True:
            while inbox and pump.wanted is None:
                pump.context.run(self._hand_over, pump, *inbox.popleft())
            if pump.wanted is None:
                await self._until_arrived(pump)
            if pump.wanted is not None:
                await asyncio.shield(pump.wanted)
                pump.wanted = None

    def limit(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes

    async def close(self) -> None:
        if self._end is None:
            self._finish(ChannelClosed(f"the channel to {self._peer} was closed by us", self._peer))

    def broken(self, why: str) -> None:
        """Break this end of the connection. Unread data is lost."""
        if self._end is None:
            self._inbox.clear()
            self._ended(ChannelBroken(f"the connection to {self._peer} broke: {why}", self._peer))
            self._out.kill()

    def tell_peer(self, why: str) -> None:
        """Send a reset; the peer's end breaks when it arrives."""
        if not self._host.is_silenced(self):
            self._host.signal(self._far._host, "reset", self._far.broken, why)

    def vanish(self, *, answers: bool = True) -> None:
        """Drop this end without notifying the peer.

        The peer notices when it sends and gets a reset back, unless nothing `answers` at the old address any more."""
        far = self._far
        unfinished = self._in.unfinished
        self._out.kill()
        self._in.kill()
        self._host.forget(self)
        if answers:
            far._out.on_pushed_dead = far._unheard
            if unfinished:
                far._unheard()

    def lose(self, why: str, *, answers: bool = True) -> None:
        """Drop the connection at this end: the local program gets an error, the peer is not notified."""
        self.vanish(answers=answers)
        self.broken(why)

    def divert(self, through: Detour | None) -> None:
        """Pass outgoing frames through a function that may change them; None restores direct delivery."""
        far = self._far
        straight = far._arrived if far._processor is None else far._handle
        if through is None:
            self._deliver = straight
            tcp = self._host.net.tcp
            in_pieces = tcp.autotune or self._processor is not None or far._processor is not None
            self._largest_whole_bytes = SMALLEST_PIECE_BYTES if in_pieces else tcp.largest_whole_bytes
        else:
            self._deliver = lambda header, payload: through(self, straight, (header, payload))
            self._largest_whole_bytes = sys.maxsize  # what is to be changed is changed whole

    def _unheard(self) -> None:
        self._unheard_since_ns = self._loop.env.now_ns
        self.retransmit()

    def retransmit(self) -> None:
        """Retransmit to a peer that does not acknowledge; TCP doubles the wait each time."""
        since_ns = self._unheard_since_ns
        there = self._host.present(self._peer)
        if since_ns is None or self._end is not None or not self._host.alive or not there.alive:
            return
        waited_ns, rto_ns = self._loop.env.now_ns - since_ns, round(RTO_S * NS)
        past, due_ns = 0, 0
        while due_ns < waited_ns:
            past, due_ns = past + 1, due_ns + min(rto_ns << past, MAX_RTO_NS)
        if due_ns == waited_ns:
            if not self._host.is_silenced(self):
                self._host.signal(there, "again", there.disown, self)  # a partition may swallow it, so we go on
            due_ns += min(rto_ns << past, MAX_RTO_NS)
        self._loop.env.call_at(since_ns + due_ns, self.retransmit)

    def reset(self, why: str) -> None:
        """Break both ends at once; data in flight is lost."""
        self._in.kill()
        self._out.kill()
        self.broken(why)
        self._far.broken(why)

    def _two_receive(self) -> UsageError:
        return UsageError(f"two tasks receive from {self!r} at once")

    async def _until_arrived(self, pump: _Pump | None = None, large: SegmentedFrame | None = None) -> None:
        """Wait until a frame is in the inbox, or until the large frame at its head is complete.

        A frame handed to a pump does not end the wait. Cancellation in the middle of a frame breaks the channel."""
        while not self._inbox if large is None else not large.is_whole:
            if self._end is not None:
                raise self._again(self._end)
            if self._reader is not None:
                raise self._two_receive()
            self._reader = asyncio.Future(loop=self._loop)
            self._pump = pump
            try:
                failure = await self._reader
            except asyncio.CancelledError:
                begun = self._coming.is_read if self._coming is not None else not self._inbox and self._in.is_in_message
                if self._end is None and begun:
                    self._finish(ChannelBroken(f"a frame from {self._peer} was cancelled half-way", self._peer))
                raise
            finally:
                self._reader = self._pump = None
            if failure is not None:
                raise failure

    def came(self, large: SegmentedFrame, size_bytes: int, filled: bool) -> None:
        """Accept a piece of a frame that is not its last one. `filled`: it was counted in the window when it left."""
        if filled:
            self._in.outstanding -= size_bytes
        if self._processor is None:
            self._came(large, size_bytes)
        else:
            self._processor.receive(None, size_bytes, partial(self._came, large, size_bytes))

    def came_whole(self, large: SegmentedFrame, size_bytes: int, header: Header, payload: Payload) -> None:
        """Accept the last piece of a frame."""
        came = partial(self._came_whole, large, size_bytes, header, payload)
        if self._processor is None:
            came()
        else:
            self._processor.receive(header, size_bytes, came)

    def _came(self, large: SegmentedFrame, size_bytes: int) -> None:
        if self._end is not None:
            self._in.consumed(size_bytes)
            return
        large.unread_bytes += size_bytes
        if large.is_read:
            self._read_on(large)
        elif self._coming is None:
            self._coming = large
            self._arrived(large.header, large.payload, large)

    def _came_whole(self, large: SegmentedFrame, size_bytes: int, header: Header, payload: Payload) -> None:
        if self._end is not None:
            self._in.consumed(size_bytes)
            return
        large.unread_bytes += size_bytes
        large.is_whole = True
        self._coming = None
        if self._inbox and self._inbox[-1][2] is large:
            self._wake()
        else:
            self._arrived(header, payload, large)

    def _read(self, large: SegmentedFrame) -> None:
        """Read the frame as it arrives from now on; it has its place."""
        large.is_read, large.context = True, copy_context()
        self._in.consumed(large.take())

    def _read_on(self, large: SegmentedFrame) -> None:
        if self._loop.is_frozen(self._host):
            self._loop.call_soon(lambda: self._in.consumed(large.take()), context=large.context)
        else:
            self._in.consumed(large.take())

    def _handle(self, header: Header, payload: Payload) -> None:
        """Have the processor handle a frame that has arrived."""
        assert self._processor is not None
        self._processor.receive(header, HEADER_BYTES + header.length, partial(self._arrived, header, payload))

    def _arrived(self, header: Header, payload: Payload, large: SegmentedFrame | None = None) -> None:
        if self._end is not None:  # nobody will read it, so that it takes no room
            self._in.consumed(HEADER_BYTES + header.length)
            return
        pump, reader = self._pump, self._reader
        if pump is None or reader is None or reader.done() or self._loop.is_frozen(self._host):
            self._inbox.append((header, payload, large))
            self._wake()
            return
        failure = None
        self._reader = None  # what happens meanwhile does not wake it
        try:
            pump.context.run(self._hand_over, pump, header, payload, large)
        except BaseException as error:
            failure = error
        self._reader = reader
        if not reader.done() and (failure is not None or self._inbox or self._end is not None):
            reader.set_result(failure)

    def _hand_over(self, pump: _Pump, header: Header, payload: Payload, large: SegmentedFrame | None) -> None:
        """Give a frame to the pump. The frame stays in the inbox while it has no place."""
        if large is not None and large is pump.large:
            where = pump.where
            pump.large = pump.where = None
        else:
            if (length := header.length) > self._max_frame_bytes or header.offset + length > header.total > 0:
                raise self._refused(header)
            end = self._end
            try:
                asked = pump.place(header)
            except BaseException:
                if self._end is end:
                    self._inbox.appendleft((header, payload, large))
                raise
            if self._end is not end:  # by `place`
                return
            if isinstance(asked, asyncio.Future):
                pump.wanted = asked
                self._inbox.appendleft((header, payload, large))
                return
            where = asked
        try:
            if large is not None and not large.is_whole:
                self._check_place(header, payload, where)
                pump.large, pump.where = large, where
                self._read(large)
                return
            taken = self._taken(header, payload, where)
        except UsageError:
            self._inbox.appendleft((header, payload, large))
            raise
        self._in.consumed(HEADER_BYTES + header.length if large is None else large.take())
        pump.landed(header, taken)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _refused(self, header: Header) -> RemoteProtocolError:
        limit, end = self._max_frame_bytes, header.offset + header.length
        if isinstance(header, Undecodable):
            text = _what_is_wrong(header.raw, limit, self._peer)
        elif header.length > limit:
            text = f"{self._peer} announced a frame of {header.length} bytes where at most {limit} are allowed"
        else:
            text = f"{self._peer} sent a segment that ends at byte {end} of a message of {header.total}"
        error = RemoteProtocolError(text, self._peer)
        self._finish(error)
        return error

    def _check_place(self, header: Header, payload: Payload, where: memoryview | Fold | None) -> None:
        """Raise `UsageError` if the payload does not fit its place; the payload stays unread."""
        room = where.room if isinstance(where, Fold) else where
        if room is None or isinstance(payload, Phantom):
            return
        if room.nbytes != header.length or room.readonly:
            kind = "that is read-only " if room.readonly else ""
            raise UsageError(f"a place of {room.nbytes} bytes {kind}was given for a payload of {header.length}")

    def _taken(self, header: Header, payload: Payload, where: memoryview | Fold | None) -> Payload:
        """Return the payload, copied into its place."""
        if isinstance(payload, Phantom):
            return payload
        self._check_place(header, payload, where)
        if isinstance(where, Fold):
            where = where.room
        if where is None:
            where = memoryview(bytearray(header.length))
        where[:] = payload
        return where

    def _finish(self, error: ChannelClosed | ChannelBroken | RemoteProtocolError) -> None:
        """Close the local end. The peer reads what was sent before, then the end of the stream."""
        for header, _, large in self._inbox:
            self._in.consumed(HEADER_BYTES + header.length if large is None else large.take())
        if self._coming is not None:
            self._in.consumed(self._coming.take())
        self._inbox.clear()
        self._ended(error)
        if not self._out.dead:
            self._out.push(StreamMessage(HEADER_BYTES, self._far._end_came))

    def _end_came(self) -> None:
        if self._processor is None:
            self._peer_closed()
        else:
            self._processor.receive(None, 0, self._peer_closed)  # behind what came before

    def _peer_closed(self) -> None:
        self._trace.record((self._loop.env.now_ns, "deliver", self._in.name, "fin"))
        if self._end is None:
            where = ""
            if self._coming is not None:
                where = " in the middle of a frame"
                if self._inbox and self._inbox[-1][2] is self._coming:
                    self._inbox.pop()
            self._ended(ChannelBroken(f"{self._peer} closed the connection{where}", self._peer))
            self._out.kill()
        self._in.kill()  # it has said its last word

    def _ended(self, error: ChannelClosed | ChannelBroken | RemoteProtocolError) -> None:
        self._end = error
        self._coming = None
        self._host.forget(self)
        if self._departure is not None:
            self._departure.end()
        writers = tuple(self._writers)
        self._writers.clear()
        for future in writers:
            if not future.done():
                future.set_result(None)
        self._wake()

    def _again(self, error: ChannelClosed | ChannelBroken | RemoteProtocolError) -> Exception:
        """Return a fresh copy: raising one exception object twice would chain unrelated tracebacks."""
        return type(error)(str(error), self._peer)

    async def _send_handled(self, message: StreamMessage) -> None:
        """Send a frame once the processor has handled it, also if the sender is cancelled meanwhile."""
        assert self._processor is not None
        assert message.header is not None
        handled, context = self._loop.create_future(), copy_context()

        def leave() -> None:
            if self._loop.is_frozen(self._host):
                self._loop.call_soon(leave, context=context)
                return
            if self._end is None and self._host.alive:
                self._out.push(message)
            if not handled.done():
                handled.set_result(None)

        self._processor.send(message.header, message.size_bytes, leave)
        await handled
        if self._end is not None:
            raise self._again(self._end)

    async def _send_in_pieces(self, large: SegmentedFrame) -> None:
        departure = (
            HandledSend(self, self._far, large, self._processor)
            if self._largest_whole_bytes == SMALLEST_PIECE_BYTES
            else SegmentedSend(self, self._far, large)
        )
        self._departure = departure
        self._out.on_room = self._room
        departure.go_on()
        try:
            await departure.until_over()
        finally:
            if departure.unsent_bytes and self._end is None:
                self._finish(ChannelBroken(f"a frame to {self._peer} was cancelled half-way", self._peer))
            self._departure = None
            self._room()
        if departure.unsent_bytes:
            assert self._end is not None
            raise self._again(self._end)

    async def _wait_for_room(self) -> None:
        """Queue for room in the send buffer. An admitted sender stays at the head of the queue until it runs."""
        if self._end is not None:
            return
        mine = self._loop.create_future()
        self._writers.append(mine)
        self._out.on_room = self._room
        try:
            await mine
        except asyncio.CancelledError:
            self._leave_line(mine)
            if self._departure is None:
                self._room()
            raise
        self._leave_line(mine)

    def _leave_line(self, writer: asyncio.Future[None]) -> None:
        if writer in self._writers:  # unless the channel has ended
            self._writers.remove(writer)

    def _room(self) -> None:
        """Continue the large frame, or admit the first waiting sender: the send buffer has room."""
        if self._departure is not None:
            self._departure.left()
        elif not self._writers:
            self._out.on_room = None
        elif self._out.queued_bytes < self._out.send_buffer_bytes and not self._writers[0].done():
            self._writers[0].set_result(None)


def _what_is_wrong(raw: bytes, limit: int, peer: str) -> str:
    """Return the error message that a real channel gives for these bytes."""
    try:
        header = decode_header(raw, max_length=limit, peer=peer)
    except RemoteProtocolError as error:
        return str(error)
    raise UsageError(f"these bytes are a header: {header}")
