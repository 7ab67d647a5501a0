"""Accepting connections.

A listener limits what strangers can take from it: handshakes run beside each other, each has a
deadline, and there is a cap on connections that nobody has accepted yet; those beyond it wait in
the kernel's queue.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Coroutine
from typing import Any

from hcsim.errors import ChannelClosed
from hcsim.real.tcp import TcpChannel, tune
from hcsim.real.tls import handshake
from hcsim.runtime.address import join_address

_MAX_UNACCEPTED = 64
_BACKLOG = 128
_ACCEPT_RETRY_S = 0.1


class TcpListener:
    """Accepts channels at one address."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext | None, handshake_timeout_s: float) -> None:
        self._sock = sock
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        self._address = join_address(sock.getsockname())
        self._slots = asyncio.Semaphore(_MAX_UNACCEPTED)
        self._welcomed: asyncio.Queue[TcpChannel | None] = asyncio.Queue()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._start(self._serve())

    @property
    def address(self) -> str:
        """`host:port`, with the port that was really taken."""
        return self._address

    async def accept(self) -> TcpChannel:
        """The next channel that a peer opened (and, with TLS, proved its membership on)."""
        channel = await self._welcomed.get()
        if channel is None:
            self._welcomed.put_nowait(None)  # for the next who asks
            raise ChannelClosed(f"the listener at {self._address} is closed", self._address)
        self._slots.release()
        return channel

    async def close(self) -> None:
        """Accept no more; what nobody accepted is closed."""
        if self._sock.fileno() < 0:
            return
        await asyncio.sleep(0)  # a welcome that was cancelled before its first step would leave its socket open
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()
        while not self._welcomed.empty():
            if channel := self._welcomed.get_nowait():
                await channel.close()
        self._welcomed.put_nowait(None)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"listener {self._address}")
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                sock, remote = await loop.sock_accept(self._sock)
            except OSError:  # out of descriptors, or the caller has gone again
                self._slots.release()
                await asyncio.sleep(_ACCEPT_RETRY_S)
            else:
                self._start(self._welcome(sock, join_address(remote)))

    async def _welcome(self, sock: socket.socket, peer: str) -> None:
        try:
            tune(sock)
            if self._context is not None:
                async with asyncio.timeout(self._handshake_timeout_s):
                    sock = await handshake(sock, self._context, server_side=True)
        except OSError:  # a stranger, or too slow (TimeoutError is an OSError)
            sock.close()
            self._slots.release()
        else:
            self._welcomed.put_nowait(TcpChannel(sock, peer))


def listening_socket(family: int, sockaddr: Any) -> socket.socket:
    """A socket that takes connections at that address."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(sockaddr)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
