"""A channel over one byte stream.

For throughput, it uses neither stream buffers nor a transport. A frame leaves in one call, with header and
payload. A payload is received directly into its destination, or reduced into it, or forwarded to another
shared-memory stream. Each direction tries at once; only when the stream would block does the event loop's
callback continue the transfer. A task that receives a single frame is woken twice: when the header has come, to
give the destination, and at the end. A task that pumps is not woken, since the callback hands over the frames.

Headers are read through a small read-ahead buffer. A run of small frames costs one system call, and of a large
frame no more than the read-ahead is copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hcsim.errors import (
    ChannelBroken,
    ChannelClosed,
    ChannelError,
    RemoteProtocolError,
    UsageError,
)
from hcsim.real.sockets import fresh, translated, unexpected_tls
from hcsim.real.stream import (
    FIRST_MAX_FRAME_BYTES,
    WOULD_BLOCK,
    Parts,
    Stream,
    bytes_of,
    close_when_delivered,
    room_for,
)
from hcsim.runtime.channel import EMPTY, REST_S, Fold, Landed, Outlet, Payload, Place, SegmentCounts
from hcsim.runtime.frame import HEADER_BYTES, Header, decode_header, encode_header

_LARGE_BYTES = 64 * 1024
_BYTES_PER_TURN = 4 * 2**20
"""How much is read before other tasks run."""
_SENDS_PER_TURN = 16
_FRAMES_PER_TURN = 64
"""The number of frames sent without blocking before other tasks run."""


class _Over(Exception):
    """Nothing more can be received. A type of its own, to tell it from exceptions of `place` and `landed`."""

    def __init__(self, why: ChannelError) -> None:
        self.why = why


class StreamChannel:
    """A channel over a stream, which it owns."""

    def __init__(self, stream: Stream, peer: str, identity: str = "", binding: bytes = b"") -> None:
        self.stream = stream
        self._peer = peer
        self._identity = identity
        self._binding = binding
        self._loop = asyncio.get_running_loop()
        self._max_frame_bytes = FIRST_MAX_FRAME_BYTES
        self._error: ChannelError | None = None

        self._incoming = stream.incoming
        self._ahead = memoryview(bytearray(stream.read_ahead_bytes))
        self._ahead_start = 0
        self._ahead_end = 0
        self._header: Header | None = None
        """The header of the frame whose payload is being received."""
        self._payload = self._into = EMPTY
        self._fold: Fold | None = None
        self._missing_bytes = 0
        self._turn_bytes = 0

        self._forwarder = stream.forwarder
        if self._forwarder is not None:
            self._forwarder.is_idle, self._forwarder.go_on = self._is_idle, self._incoming.ready

        self._outgoing = stream.outgoing
        self._turn = asyncio.Lock()
        self._unsent: Parts = []
        self._unsent_bytes = 0
        self._sent_in_a_row = 0
        self._send_error: ChannelError | None = None

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def carrier(self) -> str:
        return self.stream.carrier

    @property
    def identity(self) -> str:
        """The identity proved by TLS; empty without TLS."""
        return self._identity

    @property
    def ends(self) -> tuple[str, str]:
        return self.stream.ends

    @property
    def segments(self) -> SegmentCounts | None:
        return self.stream.segments()

    @property
    def binding(self) -> bytes:
        """The channel binding of TLS; empty without TLS."""
        return self._binding

    @property
    def outlet(self) -> Outlet | None:
        return self._forwarder

    def limit(self, max_frame_bytes: int) -> None:
        """Reject larger payloads from now on."""
        self._max_frame_bytes = max_frame_bytes

    async def send(self, header: Header, payload: Payload = EMPTY) -> None:
        data, head = bytes_of(header, payload), encode_header(header)
        async with self._turn:
            self._sent_in_a_row += 1
            if self._sent_in_a_row > _FRAMES_PER_TURN:
                self._sent_in_a_row = 0
                await asyncio.sleep(0)
            self._raise_if_over(self._error or self._send_error)
            self._unsent = [head, data]
            self._unsent_bytes = frame_bytes = HEADER_BYTES + header.length
            try:
                if not self._push():
                    await self._outgoing.finish(self._push)
            except asyncio.CancelledError:
                if self._unsent_bytes < frame_bytes or self.stream.reports_late:
                    await self._complete_frame()
                raise
            except OSError as error:
                # Only sending is over: what the peer said before it went can still be read.
                self._send_error = translated(error, self._peer)
                raise self._send_error from error
            finally:
                self._unsent = []

    async def recv(self, place: Place) -> tuple[Header, Payload]:
        """Receive the next frame; see `Channel.recv`. If `place` fails, the frame stays unread."""
        with self._receiving():
            await self._until(self._has_header)
            while (wanted := self._begin(place)) is not None:
                await asyncio.shield(wanted)
                self._raise_if_over(self._error)
            await self._until(self._has_payload)
        return self._whole()

    async def pump(self, place: Place, landed: Landed) -> None:
        """Receive all frames; see `Channel.pump`. The event loop's callback handles them without waking a task."""
        wanted: asyncio.Future[None] | None = None

        def hand_over() -> bool:
            """Process the available frames; return True if the destination of a frame has to be waited for."""
            nonlocal wanted
            while True:
                if self._header is None:
                    if self._is_conveyed() or not self._has_header():
                        return False
                    if (wanted := self._begin(place)) is not None:
                        return True
                if not self._has_payload():
                    return False
                landed(*self._whole())

        with self._receiving():
            while True:
                await self._until(hand_over)
                assert wanted is not None
                await asyncio.shield(wanted)
                self._raise_if_over(self._error)

    async def close(self) -> None:
        if self._error is None:
            self._stop(ChannelClosed(f"we closed the channel to {self._peer}", self._peer))
            close_when_delivered(self.stream)

    # -- receiving

    @contextmanager
    def _receiving(self) -> Iterator[None]:
        """Allow one receiver at a time. Stream errors end the channel; those of `place` and `landed` do not."""
        self._raise_if_over(self._error)
        if self._incoming.busy:
            raise UsageError(f"two tasks receive from {self._peer} at once")
        try:
            yield
        except asyncio.CancelledError:
            if self._header is not None:
                self._end(ChannelBroken(f"a frame from {self._peer} was cancelled half-way", self._peer))
            raise
        except _Over as over:
            raise self._end(over.why) from over.__cause__

    async def _until(self, pull: Callable[[], bool]) -> None:
        """Call `pull` at once, and whenever there may be more to read, until it returns True."""

        def tried() -> bool:
            if pull():
                return True
            self._turn_bytes = 0  # others get their turn before the next try
            if self.stream.hides_bytes():  # what the event loop cannot see, it will not call for
                self._loop.call_soon(self._incoming.ready)
            return False

        if not tried():
            await self._incoming.finish(tried)

    def _has_header(self) -> bool:
        """Return whether a header is there; reads one, and perhaps some of what follows."""
        ahead, have = self._ahead, self._ahead_end - self._ahead_start
        if have >= HEADER_BYTES:
            return True
        if self._turn_bytes >= _LARGE_BYTES:
            return False  # who waited for what has come goes first: it will say where the next one goes
        if have:
            ahead[:have] = ahead[self._ahead_start : self._ahead_end]
        self._ahead_start, self._ahead_end = 0, have
        while self._ahead_end < HEADER_BYTES:
            count = self._read(ahead[self._ahead_end :])
            if not count:
                return False
            self._ahead_end += count
            self._turn_bytes += count
        return True

    def _begin(self, place: Place) -> asyncio.Future[None] | None:
        """Decode the header and ask for the payload's destination; return a future if it has to be awaited."""
        start = self._ahead_start
        try:
            header = decode_header(
                self._ahead[start : start + HEADER_BYTES], max_length=self._max_frame_bytes, peer=self._peer
            )
        except RemoteProtocolError as error:
            raise _Over(unexpected_tls(self._received(), self._peer) or error) from None
        where = place(header)
        if isinstance(where, asyncio.Future):
            return where
        view = room_for(header, where)
        start += HEADER_BYTES
        have = min(self._ahead_end - start, header.length)
        view[:have] = self._ahead[start : start + have]
        self._ahead_start = start + have
        self._missing_bytes = header.length - have
        if isinstance(where, Fold) and self.stream.adds and have < header.length:
            self._fold, self._payload = where, where.into
        else:
            self._into, self._payload = view[have:], view
        self._header = header
        return None

    def _has_payload(self) -> bool:
        """Return whether the current payload is complete; reads on until other tasks have to run."""
        while self._missing_bytes and self._turn_bytes < _BYTES_PER_TURN:
            if self._fold is None:
                count = self._read(self._into)
                self._into = self._into[count:]
            else:
                count = self._add(self._fold)
            if not count:
                return False
            self._turn_bytes += count
            self._missing_bytes -= count
        return not self._missing_bytes

    def _whole(self) -> tuple[Header, Payload]:
        """Return the complete frame. The channel keeps no reference to it, since the payload is part of a caller's
        array."""
        assert self._header is not None
        frame = self._header, self._payload
        self._header, self._payload, self._into, self._fold = None, EMPTY, EMPTY, None
        return frame

    def _read(self, into: memoryview) -> int:
        """Read some bytes; return 0 if there are none."""
        try:
            count = self.stream.read(into)
        except WOULD_BLOCK:
            return 0
        except OSError as error:
            raise _Over(translated(error, self._peer)) from error
        if count == 0:
            raise _Over(self._end_of_stream())
        return count

    def _add(self, fold: Fold) -> int:
        """Read and reduce some bytes; return 0 if there are none."""
        have, most = len(fold.into) - self._missing_bytes, _BYTES_PER_TURN - self._turn_bytes
        try:
            return self.stream.add(fold, have, most)
        except EOFError:
            raise _Over(self._end_of_stream()) from None
        except OSError as error:
            raise _Over(translated(error, self._peer)) from error

    def _is_conveyed(self) -> bool:
        """Run the belts on the input; return whether the next input belongs to them."""
        if self._forwarder is None or not self._forwarder.is_busy:
            return False
        took, others = self._forwarder.run(self._received())
        if took:
            self._ahead_start = self._ahead_end = 0
        return not others

    def _is_idle(self) -> bool:
        """Whether a frame can be sent at once. It may overtake a waiting sender, since frames are sent as a whole."""
        return self._error is None and self._send_error is None and not self._turn.locked()

    def _received(self) -> bytes:
        """Return the part of a header that has been read."""
        return bytes(self._ahead[self._ahead_start : self._ahead_end])

    def _end_of_stream(self) -> ChannelError:
        received = self._received()
        where = "in the middle of a frame" if received or self._header is not None else "between two frames"
        over = ChannelBroken(f"{self._peer} ended the connection {where}", self._peer)
        return unexpected_tls(received, self._peer) or over

    # -- sending

    async def _complete_frame(self) -> None:
        """Send the rest of a frame after its sender was cancelled, as long as the peer reads, since an abort may follow
        it."""
        try:
            async with asyncio.timeout(REST_S):
                # Tried at once: the room that it waited for may have come with the cancellation.
                if self._unsent_bytes and not self._push():
                    await self._outgoing.finish(self._push)
        except (OSError, ChannelError):  # TimeoutError is one
            pass
        finally:
            if self._unsent_bytes:
                self._end(ChannelBroken(f"a frame to {self._peer} was cancelled half-way", self._peer))

    def _push(self) -> bool:
        """Continue to write; return True when the frame is complete, False when the loop has to call again."""
        write = self.stream.write
        for _ in range(_SENDS_PER_TURN):
            try:
                count = write(self._unsent)
            except WOULD_BLOCK:
                return False
            self._unsent_bytes -= count
            if not self._unsent_bytes:
                return True
            self._unsent = _without_first(count, self._unsent)
        if self.stream.hides_room():
            self._loop.call_soon(self._outgoing.ready)
        return False

    # -- ending

    @property
    def is_open(self) -> bool:
        return self._error is None

    def _raise_if_over(self, error: ChannelError | None) -> None:
        if error is not None:
            raise fresh(error)

    def _end(self, error: ChannelError) -> ChannelError:
        """Close the stream. Every later or waiting use raises the first error given here."""
        if self._error is None:
            self._stop(error)
            self.stream.close()
        return self._error or error

    def _stop(self, error: ChannelError) -> None:
        self._error = error
        self._header, self._payload, self._into, self._fold = None, EMPTY, EMPTY, None
        self._incoming.abandon(error)
        self._outgoing.abandon(error)
        self.stream.finish()


def _without_first(count: int, parts: Parts) -> Parts:
    head = parts[0]
    if count < len(head):
        return [memoryview(head)[count:], *parts[1:]]
    if len(parts) == 1:
        return []
    return _without_first(count - len(head), parts[1:])
