"""Messages and their payloads over a channel, within limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from hcsim.errors import DeadlineExceeded, RemoteProtocolError
from hcsim.runtime.channel import Channel, Payload, Phantom
from hcsim.runtime.clock import Clock
from hcsim.runtime.frame import HEADER_BYTES, Header, Kind
from hcsim.training.parameter_server.messages import Answer, Question, encode

SEGMENT_BYTES = 16 << 20
"""Payloads travel in frames of at most this size; whoever takes one in allocates no more at a time."""
MESSAGE_BYTES = 4096
"""What a message may have, before its lists."""

M = TypeVar("M", bound=Question | Answer)


class Line(Generic[M]):
    """One end of a connection on which messages of type M arrive.

    A frame that does not pass within `silence_s` ends the wait with `DeadlineExceeded`. After any error the
    connection is of no more use, and is to be closed.
    """

    def __init__(
        self, channel: Channel, clock: Clock, read: Callable[[bytes | memoryview, str], M], *, silence_s: float
    ) -> None:
        self.peer = channel.peer
        self.sent_bytes = 0
        """Headers included."""
        self._channel = channel
        self._clock = clock
        self._read = read
        self._silence_s = silence_s
        self._message_bytes = MESSAGE_BYTES

    def trust(self, list_length: int) -> None:
        """The peer is known: its messages may have lists of this length."""
        self._message_bytes = MESSAGE_BYTES + 10 * list_length

    async def send(self, message: Question | Answer, payload: Payload | None = None) -> None:
        """Send a message, and the payload that it announces."""
        data = encode(message)
        await self._frame(Header(len(data), Kind.CONTROL), memoryview(data))
        if payload is not None:
            total = payload.nbytes
            for offset in range(0, total, SEGMENT_BYTES):
                length = min(SEGMENT_BYTES, total - offset)
                part = Phantom(length) if isinstance(payload, Phantom) else payload[offset : offset + length]
                await self._frame(Header(length, Kind.DATA, offset=offset, total=total), part)

    async def recv(self, within_s: float | None) -> M:
        """The next message; None waits for it as long as the connection lives."""
        self._channel.limit(self._message_bytes)
        header, payload = await self._hear(lambda _: None, within_s)
        if header.kind is not Kind.CONTROL or isinstance(payload, Phantom):
            raise RemoteProtocolError(f"{self.peer} sent data where a message was due", self.peer)
        return self._read(payload, self.peer)

    async def recv_payload(self, size_bytes: int, into: memoryview | None) -> None:
        """Receive what was announced, into place; with None it is heard and forgotten, piece by piece."""
        for offset in range(0, size_bytes, SEGMENT_BYTES):
            length = min(SEGMENT_BYTES, size_bytes - offset)
            place = into[offset : offset + length] if into is not None else None
            self._channel.limit(length)
            due = Header(length, offset=offset, total=size_bytes)
            _, heard = await self._hear(self._placing(due, place), self._silence_s)
            if place is not None and isinstance(heard, Phantom):
                raise RemoteProtocolError(f"{self.peer} sent a phantom where bytes were due", self.peer)

    def _placing(self, due: Header, place: memoryview | None) -> Callable[[Header], memoryview | None]:
        def where(header: Header) -> memoryview | None:
            if header != due:
                raise RemoteProtocolError(f"{self.peer} sent {header} where {due} was due", self.peer)
            return place

        return where

    async def close(self) -> None:
        """End the connection."""
        await self._channel.close()

    async def _frame(self, header: Header, payload: Payload) -> None:
        try:
            async with self._clock.timeout(self._silence_s):
                await self._channel.send(header, payload)
        except TimeoutError as error:
            raise self._silent(error, self._silence_s) from None
        self.sent_bytes += HEADER_BYTES + header.length

    async def _hear(
        self, place: Callable[[Header], memoryview | None], within_s: float | None
    ) -> tuple[Header, Payload]:
        try:
            async with self._clock.timeout(within_s):
                return await self._channel.recv(place)
        except TimeoutError as error:
            raise self._silent(error, within_s) from None

    def _silent(self, error: TimeoutError, after_s: float | None) -> DeadlineExceeded:
        if isinstance(error, DeadlineExceeded):
            return error
        return DeadlineExceeded(f"nothing passed between us and {self.peer} for {after_s:g} s")
