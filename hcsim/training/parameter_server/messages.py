"""The messages between workers and the server.

A worker joins, then makes one request at a time: for the model (`Pull`), to count a gradient (`Push`), or to be
told of the end of training (`AwaitEnd`). The server answers each, possibly later, and sends `KeepAlive` meanwhile.
`TrainingDone` may come at any time; it answers only an `AwaitEnd`, unless it names an error. A worker numbers its
pushes. The server recognises a repeated push by its number, so that a worker can repeat lost messages and each push
counts once.

A message is a CONTROL frame of msgpack. `Push` and `ModelReply` announce `size_bytes` that follow as DATA frames.

A `MessageConnection` carries messages and their payloads over a channel, within limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from hcsim.errors import RemoteProtocolError
from hcsim.runtime.channel import Channel, Payload, Phantom
from hcsim.runtime.clock import Clock, within
from hcsim.runtime.frame import HEADER_BYTES, Header, Kind
from hcsim.transport.messages import Schema

Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
Text = Annotated[str, Meta(max_length=256)]

UNKNOWN = -1
"""The version of a model that cannot be relied on."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The first message on a connection: it identifies the worker."""

    job: Text
    worker: Annotated[str, Meta(min_length=1, max_length=256)]
    life: Number
    """A random number drawn when the worker starts: it distinguishes a reconnection from a restart under the
    same name."""
    model: Text
    """A digest of names and shapes: gradients of another model are rejected."""
    contributes: bool = True
    """Whether the worker will push; otherwise it only waits for the end."""


class JoinReply(msgspec.Struct, frozen=True, tag="welcome"):
    """The server accepts the worker."""

    sequence: Number
    """The number of the worker's last push that was answered."""
    accepted: Number
    """The number of the worker's pushes that have counted."""
    history: Number = 0
    """A random number drawn when the server starts: equal versions of other histories are other models."""


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Requests the model, unless it still has this version."""

    version: Annotated[int, Meta(ge=UNKNOWN)]


class ModelReply(msgspec.Struct, frozen=True, tag="model"):
    """The model: `size_bytes` of float32, or none if the worker has it."""

    version: Number
    size_bytes: Number


class Push(msgspec.Struct, frozen=True, tag="push"):
    """A gradient: the mean over `samples`, computed from that version, as one payload per tensor."""

    sequence: Annotated[int, Meta(ge=1, lt=1 << 62)]
    version: Number
    samples: Annotated[int, Meta(ge=0, lt=1 << 40)]
    compressor: Text
    sizes: tuple[Number, ...]

    @property
    def size_bytes(self) -> int:
        """The size of all payloads."""
        return sum(self.sizes)


class PushAccepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The push has counted, in the update that made this version."""

    sequence: Number
    version: Number


class PushStale(msgspec.Struct, frozen=True, tag="stale"):
    """The push does not count: it is for another version than the one wanted now. Pull and compute again."""

    sequence: Number
    version: Number


class RequestRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The push (or, with sequence 0, the join) is not valid."""

    sequence: Number
    reason: str


class KeepAlive(msgspec.Struct, frozen=True, tag="wait"):
    """The server is alive, and there is no answer yet."""


class AwaitEnd(msgspec.Struct, frozen=True, tag="await"):
    """Requests notification of the end of training."""


class TrainingDone(msgspec.Struct, frozen=True, tag="done"):
    """Training is over, with this version; if an error is named, it has failed."""

    version: Number
    error: str = ""


class LeaveRequest(msgspec.Struct, frozen=True, tag="leave"):
    """The worker will push no more. After the end: it has received all it requested."""

    why: Text = ""


WorkerRequest: TypeAlias = Join | Pull | Push | AwaitEnd | LeaveRequest
ServerReply: TypeAlias = JoinReply | ModelReply | PushAccepted | PushStale | RequestRefused | KeepAlive | TrainingDone
PushVerdict: TypeAlias = PushAccepted | PushStale | RequestRefused
"""The result of a push: it is decided once, and repeated on request."""

QUESTIONS: Schema[WorkerRequest] = Schema(WorkerRequest)
ANSWERS: Schema[ServerReply] = Schema(ServerReply)


SEGMENT_BYTES = 16 << 20
"""Payloads travel in frames of at most this size; the receiver allocates no more at a time."""
MESSAGE_BYTES = 4096
"""The size limit of a message, without its lists."""

S = TypeVar("S")
R = TypeVar("R")


class MessageConnection(Generic[S, R]):
    """One end of a connection on which a worker makes one request at a time.

    A frame that does not pass within `silence_s` ends the wait with `DeadlineExceeded`. After any error the
    connection is unusable and must be closed."""

    def __init__(
        self, channel: Channel, clock: Clock, sends: Schema[S], receives: Schema[R], *, silence_s: float
    ) -> None:
        self.peer = channel.peer
        self.sent_bytes = 0
        """Headers included."""
        self._channel = channel
        self._clock = clock
        self._sends = sends
        self._receives = receives
        self._silence_s = silence_s
        self._message_bytes = MESSAGE_BYTES

    def trust(self, list_length: int) -> None:
        """Accept lists of this length in the messages of the peer, which is known now."""
        self._message_bytes = MESSAGE_BYTES + 10 * list_length

    async def send(self, message: S, payload: Payload | None = None) -> None:
        await self._frame(*self._sends.frame(message))
        if payload is not None:
            total = payload.nbytes
            for offset in range(0, total, SEGMENT_BYTES):
                length = min(SEGMENT_BYTES, total - offset)
                part = Phantom(length) if isinstance(payload, Phantom) else payload[offset : offset + length]
                await self._frame(Header(length, Kind.DATA, offset=offset, total=total), part)

    async def recv(self, within_s: float | None) -> R:
        """Receive the next message; with None, wait for as long as the connection lives."""
        self._channel.limit(self._message_bytes)
        header, payload = await self._receive(lambda _: None, within_s)
        return self._receives.framed(header, payload, self.peer)

    async def recv_payload(self, size_bytes: int, into: memoryview | None) -> None:
        """Receive the announced payload in place; with None, read and discard it piece by piece."""
        for offset in range(0, size_bytes, SEGMENT_BYTES):
            length = min(SEGMENT_BYTES, size_bytes - offset)
            place = into[offset : offset + length] if into is not None else None
            self._channel.limit(length)
            due = Header(length, offset=offset, total=size_bytes)
            _, heard = await self._receive(self._placing(due, place), self._silence_s)
            if place is not None and isinstance(heard, Phantom):
                raise RemoteProtocolError(f"{self.peer} sent a phantom where bytes were due", self.peer)

    def _placing(self, due: Header, place: memoryview | None) -> Callable[[Header], memoryview | None]:
        def where(header: Header) -> memoryview | None:
            if header != due:
                raise RemoteProtocolError(f"{self.peer} sent {header} where {due} was due", self.peer)
            return place

        return where

    async def close(self) -> None:
        await self._channel.close()

    async def _frame(self, header: Header, payload: Payload) -> None:
        async with within(self._clock, self._silence_s, self._late(self._silence_s)):
            await self._channel.send(header, payload)
        self.sent_bytes += HEADER_BYTES + header.length

    async def _receive(
        self, place: Callable[[Header], memoryview | None], within_s: float | None
    ) -> tuple[Header, Payload]:
        async with within(self._clock, within_s, self._late(within_s)):
            return await self._channel.recv(place)

    def _late(self, after_s: float | None) -> str:
        return f"nothing passed between us and {self.peer} for {after_s or 0:g} s"
