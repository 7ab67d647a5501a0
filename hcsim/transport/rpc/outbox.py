"""Sending in turns: each message gives one frame and goes to the back of the queue, so a large array delays nobody.

Frames are sent by a task of its own. Whoever gives a message up takes it out of the queue; no frame is ever cut.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from hcsim.runtime.channel import Channel
from hcsim.runtime.frame import Header, Kind
from hcsim.transport.rpc.messages import Failure, Message, Result, encode


class Outgoing:
    """A message and its arrays, on their way."""

    def __init__(
        self,
        message: Message,
        step: int = 0,
        arrays: Sequence[memoryview] = (),
        segment_bytes: int = 1,
        keep: Any = None,
    ) -> None:
        self.frames = _frames(message, step, arrays, segment_bytes)
        self.keep = keep
        """What must live until all is sent."""
        self.results_bytes = len(message.parcel.body) + sum(map(len, arrays)) if isinstance(message, Result) else 0
        self.answers = isinstance(message, Result | Failure)
        self.begun = False
        self.dropped = False


class Outbox:
    """What is to be sent over a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: deque[Outgoing] = deque()
        self._wanted: asyncio.Future[None] | None = None
        self.results_bytes = 0
        """Of what we have returned and not sent yet."""
        self.answers = 0
        """To calls of the peer's, that are not sent yet."""

    def put(self, outgoing: Outgoing) -> None:
        """Send it when its turn comes."""
        self._queue.append(outgoing)
        self.results_bytes += outgoing.results_bytes
        self.answers += outgoing.answers
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def run(self) -> None:
        """Send until the channel ends."""
        while True:
            while not self._queue:
                self._wanted = asyncio.get_running_loop().create_future()
                await self._wanted
            await self._one_frame(self._queue.popleft())  # not by name: it must not live on because we wait

    async def _one_frame(self, outgoing: Outgoing) -> None:
        frame = None if outgoing.dropped else next(outgoing.frames, None)
        if frame is not None:
            outgoing.begun = True
            await self._channel.send(*frame)
            self._queue.append(outgoing)
        else:
            self.results_bytes -= outgoing.results_bytes
            self.answers -= outgoing.answers


def _frames(
    message: Message, step: int, arrays: Sequence[memoryview], segment_bytes: int
) -> Iterator[tuple[Header, memoryview]]:
    data = encode(message)
    yield Header(len(data), Kind.CONTROL), memoryview(data)
    for number, array in enumerate(arrays):
        for offset in range(0, len(array), segment_bytes):
            piece = array[offset : offset + segment_bytes]
            yield (
                Header(len(piece), operation=message.number, bucket=number, step=step, offset=offset, total=len(array)),
                piece,
            )
