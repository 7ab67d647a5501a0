"""Waiting for a socket: what would block is finished by the event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from hcsim.errors import ChannelError
from hcsim.real.buffers import fresh


class Direction:
    """Lets the event loop finish what would block, in one direction of a socket.

    The registration with the selector outlives the transfer, since the next one usually follows
    at once. It is dropped when the socket is ready and nobody waits.
    """

    __slots__ = ("_fd", "_loop", "_step", "_unwatch", "_waiter", "_watch", "_watched")

    def __init__(self, fd: int, watch: Callable[..., object], unwatch: Callable[[int], bool]) -> None:
        self._fd = fd
        self._watch = watch
        self._unwatch = unwatch
        self._watched = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._step: Callable[[], bool] | None = None

    @property
    def busy(self) -> bool:
        """Whether somebody waits."""
        return self._waiter is not None

    async def finish(self, step: Callable[[], bool]) -> None:
        """Call `step` whenever the socket is ready, until it returns True."""
        self._step = step
        self._waiter = waiter = self._loop.create_future()
        if not self._watched:
            self._watch(self._fd, self.ready)
            self._watched = True
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # mark as seen: the cancellation overtook it
            raise
        finally:
            self._waiter = self._step = None

    def ready(self) -> None:
        """The socket is; or something else is worth a try."""
        waiter, step = self._waiter, self._step
        if waiter is None or step is None:
            self._stop_watching()
        elif not waiter.done():
            failure, finished = None, False
            try:
                finished = step()
            except Exception as error:
                failure = error
            if waiter.done():
                return  # whoever took what came has given up
            if failure is not None:
                waiter.set_exception(failure)
            elif finished:
                waiter.set_result(None)

    def abandon(self, error: ChannelError) -> None:
        """Watch no more; whoever waits gets the error."""
        self._stop_watching()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(fresh(error))

    def _stop_watching(self) -> None:
        if self._watched:
            self._unwatch(self._fd)
            self._watched = False


async def readable(sock: socket.socket) -> None:
    """Returns when there is something to read, or somebody at the door."""
    loop, called = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, called.set)
    try:
        await called.wait()
    finally:
        loop.remove_reader(sock)
