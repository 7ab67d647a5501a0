"""Messages in transit, whose arrays are sent in pieces.

Messages are sent round-robin: each sends one frame and goes to the back of the queue, so a large array does not
delay a short call. A received message announces its arrays. Their pieces come in order within a message,
interleaved with those of other messages. Pieces of a cancelled or rejected message are received and discarded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hcsim.errors import HcsimError, RemoteProtocolError
from hcsim.runtime.channel import Channel
from hcsim.runtime.clock import fail_future
from hcsim.runtime.frame import Header
from hcsim.transport.rpc.messages import SCHEMA, CallFailure, CallResult, EncodedValue, RpcMessage
from hcsim.transport.rpc.references import DTYPES, Handles, arrays_bytes

TransferKey: TypeAlias = tuple[int, int]
"""(OF_CALL or OF_RESULT, number)"""


class IncomingMessage:
    """A parcel that is being received."""

    def __init__(self, parcel: EncodedValue, taken: Handles) -> None:
        self.parcel = parcel
        self.taken = taken
        self.arrays: list[NDArray[Any]] = [np.empty(spec.shape, DTYPES[spec.dtype]) for spec in parcel.arrays]
        self.places = [array.reshape(-1).view(np.uint8).data for array in self.arrays]
        self.filled = [0] * len(self.places)
        self.size_bytes = arrays_bytes(parcel)
        self.missing_bytes = self.size_bytes
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self.missing_bytes:
            self.complete.set_result(None)


class Inbox:
    """All parcels that are being received over one channel."""

    def __init__(self, peer: str, expected: Callable[[TransferKey], bool]) -> None:
        self._peer = peer
        self._expected = expected
        """Return whether there has been a call of that number."""
        self._open: dict[TransferKey, IncomingMessage] = {}
        self._rubbish = memoryview(b"")
        self.held_bytes = 0

    def announce(self, key: TransferKey, parcel: EncodedValue, taken: Handles) -> IncomingMessage:
        """Allocate the arrays of a parcel whose size has been checked."""
        incoming = IncomingMessage(parcel, taken)
        if incoming.missing_bytes:
            self._open[key] = incoming
            self.held_bytes += incoming.size_bytes
        return incoming

    def place(self, header: Header) -> memoryview:
        """Return the destination of a piece of an array."""
        incoming = self._open.get((header.step, header.operation))
        if incoming is None:
            if not self._expected((header.step, header.operation)):
                raise RemoteProtocolError(f"{self._peer} sent part of a message that it did not announce", self._peer)
            if len(self._rubbish) < header.length:  # most peers never need it
                self._rubbish = memoryview(bytearray(header.length))
            return self._rubbish[: header.length]
        number = header.bucket
        place = incoming.places[number] if number < len(incoming.places) else None
        if place is None or header.offset != incoming.filled[number] or header.offset + header.length > len(place):
            raise RemoteProtocolError(f"{self._peer} sent part of an array that does not fit where it was", self._peer)
        return place[header.offset : header.offset + header.length]

    def landed(self, header: Header) -> None:
        key = (header.step, header.operation)
        incoming = self._open.get(key)
        if incoming is None:
            return
        incoming.filled[header.bucket] += header.length
        incoming.missing_bytes -= header.length
        if not incoming.missing_bytes:
            self.forget(key)
            if not incoming.complete.done():
                incoming.complete.set_result(None)

    def forget(self, key: TransferKey) -> None:
        """Drop a parcel that is complete or no longer needed."""
        incoming = self._open.pop(key, None)
        if incoming is not None:
            self.held_bytes -= incoming.size_bytes

    def close(self, error: HcsimError) -> None:
        """Fail all incomplete parcels: the channel has ended."""
        for incoming in self._open.values():
            fail_future(incoming.complete, error)
        self._open.clear()


class OutgoingMessage:
    """A message and its arrays that are being sent."""

    def __init__(
        self,
        message: RpcMessage,
        step: int = 0,
        arrays: Sequence[memoryview] = (),
        segment_bytes: int = 1,
        keep: Any = None,
    ) -> None:
        self.frames = _frames(message, step, arrays, segment_bytes)
        self.keep = keep
        """The object to keep alive until all is sent."""
        self.results_bytes = len(message.parcel.body) + sum(map(len, arrays)) if isinstance(message, CallResult) else 0
        self.answers = isinstance(message, CallResult | CallFailure)
        self.begun = False
        self.dropped = False


class Outbox:
    """The queue of messages to be sent over a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: deque[OutgoingMessage] = deque()
        self._wanted: asyncio.Future[None] | None = None
        self.results_bytes = 0
        """The bytes of results that have not been sent yet."""
        self.answers = 0
        """The number of answers to the peer's calls that have not been sent yet."""

    def put(self, outgoing: OutgoingMessage) -> None:
        self._queue.append(outgoing)
        self.results_bytes += outgoing.results_bytes
        self.answers += outgoing.answers
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def run(self) -> None:
        """Send messages until the channel ends."""
        while True:
            while not self._queue:
                self._wanted = asyncio.get_running_loop().create_future()
                await self._wanted
            await self._one_frame(self._queue.popleft())  # not by name: it must not live on because we wait

    async def _one_frame(self, outgoing: OutgoingMessage) -> None:
        frame = None if outgoing.dropped else next(outgoing.frames, None)
        if frame is not None:
            outgoing.begun = True
            await self._channel.send(*frame)
            self._queue.append(outgoing)
        else:
            self.results_bytes -= outgoing.results_bytes
            self.answers -= outgoing.answers


def _frames(
    message: RpcMessage, step: int, arrays: Sequence[memoryview], segment_bytes: int
) -> Iterator[tuple[Header, memoryview]]:
    yield SCHEMA.frame(message)
    for number, array in enumerate(arrays):
        for offset in range(0, len(array), segment_bytes):
            piece = array[offset : offset + segment_bytes]
            yield (
                Header(len(piece), operation=message.number, bucket=number, step=step, offset=offset, total=len(array)),
                piece,
            )
