"""Sockets in an event loop, which finishes what would block, and in forked children, which let go of them.

A forked child closes sockets of its parent, whose other ends wait for the end of the parent, and memory that the
parent shares with others.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from hcsim.errors import ChannelError
from hcsim.real.failures import fresh


class SocketReadiness:
    """One direction of a socket; the event loop completes what would block.

    The registration with the selector outlives the transfer, since the next one usually follows at once. It is
    dropped when the socket is ready and no task waits."""

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
        """Try the step again: the socket is ready, or something else has changed."""
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
        """Stop watching. A waiting task gets the error."""
        self._stop_watching()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(fresh(error))

    def _stop_watching(self) -> None:
        if self._watched:
            self._unwatch(self._fd)
            self._watched = False


async def readable(sock: socket.socket) -> None:
    """Return when there is something to read, or a connection to accept."""
    loop, called = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, called.set)
    try:
        await called.wait()
    finally:
        loop.remove_reader(sock)


class Closable(Protocol):
    """A socket or a similar resource."""

    def close(self) -> object:
        """Close it in this process only; the parent's copy stays open."""


_LISTENING: WeakSet[Closable] = WeakSet()
_OTHERS: WeakSet[Closable] = WeakSet()


def own(what: Closable, *, listens: bool = False) -> None:
    """Close this resource in every forked child. Programs started by `exec` do not inherit it anyway."""
    (_LISTENING if listens else _OTHERS).add(what)


def _let_go() -> None:
    # Listeners first: who sees a channel end, and calls again, must not be taken in for a parent that was killed.
    for what in (*_LISTENING, *_OTHERS):
        what.close()


os.register_at_fork(after_in_child=_let_go)
