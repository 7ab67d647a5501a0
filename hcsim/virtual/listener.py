"""Listeners in the virtual world."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hcsim.errors import ChannelClosed

if TYPE_CHECKING:
    from hcsim.virtual.channel import VirtualChannel
    from hcsim.virtual.host import VirtualHost


class VirtualListener:
    """Accepts channels at a port of a virtual host."""

    def __init__(self, host: VirtualHost, port: int) -> None:
        self._host = host
        self._port = port
        self._waiting: asyncio.Queue[VirtualChannel | None] = asyncio.Queue()
        self._open = True

    def __repr__(self) -> str:
        return f"<listener {self.address}>"

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{self._host.name}:{self._port}"

    async def accept(self) -> VirtualChannel:
        """See `runtime.channel.Listener.accept`."""
        channel = await self._waiting.get() if self._open else None
        if channel is None:
            self._waiting.put_nowait(None)  # for the next who waits
            raise ChannelClosed(f"the listener at {self.address} was closed by us")
        return channel

    async def close(self) -> None:
        """See `runtime.channel.Listener.close`."""
        if self._open:
            self._open = False
            self._host.release(self._port)
            while not self._waiting.empty():
                if channel := self._waiting.get_nowait():
                    await channel.close()
            self._waiting.put_nowait(None)

    def offer(self, channel: VirtualChannel) -> None:
        """A connection has come in."""
        self._waiting.put_nowait(channel)
