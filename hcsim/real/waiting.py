"""Connections that a server has taken in and nobody has accepted yet, a bounded number of them."""

from __future__ import annotations

import asyncio

from hcsim.errors import ChannelClosed
from hcsim.real.pieces import PiecewiseChannel

MAX_UNACCEPTED = 64


class Unaccepted:
    """A queue of channels that ends."""

    def __init__(self) -> None:
        self._channels: asyncio.Queue[PiecewiseChannel | None] = asyncio.Queue()
        self.closed = False

    @property
    def full(self) -> bool:
        """Whether further callers have to be sent away for now."""
        return self.closed or self._channels.qsize() >= MAX_UNACCEPTED

    def put(self, channel: PiecewiseChannel) -> None:
        """Somebody has called."""
        self._channels.put_nowait(channel)

    async def get(self, address: str) -> PiecewiseChannel:
        """The next channel."""
        channel = await self._channels.get()
        if channel is None:
            self._channels.put_nowait(None)  # for the next who asks
            raise ChannelClosed(f"the listener at {address} is closed", address)
        return channel

    async def close(self) -> None:
        """Nobody will accept any more: hang up on those who wait."""
        self.closed = True
        while not self._channels.empty():
            if channel := self._channels.get_nowait():
                await channel.close()
        self._channels.put_nowait(None)
