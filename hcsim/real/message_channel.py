"""A channel over a carrier of messages of bounded size, such as a gRPC stream or a WebSocket.

A frame is split into pieces: the header with the beginning of the payload, then the rest. Pieces are small, so
a stranger can occupy only little memory before its header has been checked. Pieces are only read from the
carrier when a frame is received, so the carrier's own back-pressure applies.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from hcsim.errors import ChannelBroken, ChannelClosed, ChannelError, RemoteProtocolError, UsageError
from hcsim.real.sockets import fresh
from hcsim.real.stream import FIRST_MAX_FRAME_BYTES, bytes_of, room_for
from hcsim.runtime.channel import EMPTY, REST_S, Landed, Payload, Place
from hcsim.runtime.frame import HEADER_BYTES, Header, decode_header, encode_header

_LINGER_S = 0.25
"""How long a close waits until the data sent have left."""
_WIND_DOWN_S = 60.0
"""How long the data sent may take to arrive after that."""
_SMALL_TALK_PIECES, _SMALL_TALK_BYTES = 16, 64 * 1024
"""The pieces and bytes that a peer may go on sending meanwhile. Beyond them the connection is cut, so that the
peer notices the close."""


class MessagePipe(Protocol):
    """A carrier of pieces, in order. One task reads, one writes."""

    carrier: str
    piece_bytes: int

    async def write(self, piece: bytes) -> None:
        """Send a piece; return when there is room for the next. Raises `OSError` if the connection has ended."""

    async def read(self) -> bytes | None:
        """Return the next piece, None at the end. Raises `OSError` if the connection broke."""

    async def finish(self) -> None:
        """Signal the end of the data sent."""

    async def abort(self) -> None: ...


class MessageChannel:
    """A channel over a pipe, which it owns."""

    outlet = None
    segments = None

    def __init__(self, pipe: MessagePipe, peer: str) -> None:
        self._pipe = pipe
        self._peer = peer
        self._max_frame_bytes = FIRST_MAX_FRAME_BYTES
        self._over: asyncio.Future[ChannelError] = asyncio.get_running_loop().create_future()
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when all data sent have left, or cannot leave."""
        self._turn = asyncio.Lock()
        self._write: asyncio.Task[None] | None = None
        self._send_error: ChannelError | None = None
        self._read: asyncio.Task[bytes | None] | None = None
        self._first: bytes | None = None
        """The first piece of a frame whose destination is not known yet."""
        self._receiving = False

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def carrier(self) -> str:
        return self._pipe.carrier

    @property
    def identity(self) -> str:
        """Empty: the carrier proves membership at most."""
        return ""

    @property
    def ends(self) -> tuple[str, str]:
        """Empty: there may be a tunnel or a proxy in between."""
        return "", ""

    @property
    def binding(self) -> bytes:
        """Empty: nothing is known about the carrier's encryption."""
        return b""

    def limit(self, max_frame_bytes: int) -> None:
        """Reject larger payloads from now on."""
        self._max_frame_bytes = max_frame_bytes

    # Sending.

    async def send(self, header: Header, payload: Payload = EMPTY) -> None:
        data, head = bytes_of(header, payload), encode_header(header)
        async with self._turn:
            self._raise_if_over()
            if self._send_error is not None:
                raise fresh(self._send_error)
            self._write = asyncio.create_task(self._write_frame(head, data), name=f"write to {self._peer}")
            try:
                await asyncio.wait((self._write, self._over), return_when=asyncio.FIRST_COMPLETED)
                self._raise_if_over()
                self._write.result()
            except asyncio.CancelledError:
                await self._complete_frame(self._write)
                raise
            except OSError as error:
                # Only sending is over: what the peer said before it went can still be read.
                self._send_error = ChannelBroken(f"{self._peer} ended the connection: {error}", self._peer)
                raise self._send_error from error

    async def _complete_frame(self, write: asyncio.Task[None]) -> None:
        """Send the rest of a frame after its sender was cancelled, as long as the peer reads, since an abort may follow
        it."""
        try:
            await asyncio.wait((write, self._over), timeout=REST_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not write.done() or write.cancelled() or write.exception() is not None:
                self._end(ChannelBroken(f"a frame to {self._peer} was cancelled half-way", self._peer))

    async def _write_frame(self, head: bytes, payload: memoryview) -> None:
        size = self._pipe.piece_bytes
        await self._pipe.write(b"".join((head, payload[: size - HEADER_BYTES])))
        for start in range(size - HEADER_BYTES, len(payload), size):
            if self._over.done():
                return  # the frame stays incomplete, which the peer will see
            await self._pipe.write(bytes(payload[start : start + size]))

    # Receiving.

    async def recv(self, place: Place) -> tuple[Header, Payload]:
        """Receive the next frame; see `Channel.recv`. If `place` fails, the frame stays unread."""
        self._raise_if_over()
        if self._receiving:
            raise UsageError(f"two tasks receive from {self._peer} at once")
        self._receiving = True
        try:
            if self._first is None:
                self._first = await self._next(within_frame=False)
            header = self._header(self._first)
            where = place(header)
            while isinstance(where, asyncio.Future):
                await asyncio.shield(where)
                self._raise_if_over()
                where = place(header)
            view = room_for(header, where)
            first, self._first = self._first, None
            await self._fill(view, first)
            return header, view
        finally:
            self._receiving = False

    async def pump(self, place: Place, landed: Landed) -> None:
        while True:
            # Not by name: a payload is part of somebody's array, which must not live on because we wait.
            landed(*await self.recv(place))

    def _header(self, piece: bytes) -> Header:
        try:
            if len(piece) < HEADER_BYTES:
                raise RemoteProtocolError(f"{self._peer} sent {len(piece)} bytes where a header belongs", self._peer)
            header = decode_header(piece[:HEADER_BYTES], max_length=self._max_frame_bytes, peer=self._peer)
            if len(piece) - HEADER_BYTES > header.length:
                raise RemoteProtocolError(
                    f"{self._peer} sent more than the {header.length} bytes of a frame", self._peer
                )
        except RemoteProtocolError as error:
            self._end(error)
            raise
        return header

    async def _fill(self, view: memoryview, first: bytes) -> None:
        have = len(first) - HEADER_BYTES
        view[:have] = memoryview(first)[HEADER_BYTES:]
        try:
            while have < len(view):
                piece = await self._next(within_frame=True)
                if not 0 < len(piece) <= len(view) - have:
                    raise RemoteProtocolError(f"{self._peer} sent pieces that do not make up a frame", self._peer)
                view[have : have + len(piece)] = piece
                have += len(piece)
        except asyncio.CancelledError:
            self._end(ChannelBroken(f"a frame from {self._peer} was cancelled half-way", self._peer))
            raise
        except RemoteProtocolError as error:
            self._end(error)
            raise

    async def _next(self, *, within_frame: bool) -> bytes:
        """Return the next piece. If cancelled, the piece is kept for the next call."""
        if self._read is None:
            self._read = asyncio.create_task(self._pipe.read(), name=f"read from {self._peer}")
        await asyncio.wait((self._read, self._over), return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_over()
        read, self._read = self._read, None
        where = "in the middle of a frame" if within_frame else "between two frames"
        try:
            piece = read.result()
        except (OSError, asyncio.CancelledError) as error:
            raise self._end(
                ChannelBroken(f"the connection to {self._peer} broke {where}: {error}", self._peer)
            ) from None
        if piece is None:
            raise self._end(ChannelBroken(f"{self._peer} ended the connection {where}", self._peer))
        return piece

    # Ending.

    async def close(self) -> None:
        if not self._over.done():
            self._stop(ChannelClosed(f"we closed the channel to {self._peer}", self._peer))
        await asyncio.wait((self._finished,), timeout=_LINGER_S)

    def _raise_if_over(self) -> None:
        if self._over.done():
            raise fresh(self._over.result())

    def _end(self, error: ChannelError) -> ChannelError:
        """End the channel. Every later or waiting use raises the first error given here."""
        if not self._over.done():
            self._stop(error)
        return fresh(self._over.result())

    def _stop(self, error: ChannelError) -> None:
        self._over.set_result(error)
        task = asyncio.create_task(self._wind_down(), name=f"wind down the channel to {self._peer}")
        _WINDING_DOWN.add(task)
        task.add_done_callback(_WINDING_DOWN.discard)

    async def _wind_down(self) -> None:
        """Let the data sent arrive: signal the end, and wait until the peer does too, or has sent too much."""
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(_WIND_DOWN_S):
                if self._write is not None:
                    await asyncio.wait((self._write,))
                await self._pipe.finish()
                self._finished.set_result(None)
                until_s, pieces, heard_bytes, talks_on = clock() + _LINGER_S, 0, 0, False
                while not talks_on or clock() <= until_s:
                    self._read = self._read or asyncio.create_task(self._pipe.read())
                    if (piece := await self._read) is None:
                        return
                    pieces, heard_bytes = pieces + 1, heard_bytes + len(piece)
                    talks_on = pieces > _SMALL_TALK_PIECES or heard_bytes > _SMALL_TALK_BYTES
                    self._read = None
        except OSError:  # TimeoutError is one
            pass
        finally:
            if not self._finished.done():
                self._finished.set_result(None)
            tasks = [task for task in (self._write, self._read) if task is not None]
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # even if the loop is being shut down
                await self._pipe.abort()


_WINDING_DOWN: set[asyncio.Task[None]] = set()
"""References to the running tasks, which the event loop does not keep alive."""
