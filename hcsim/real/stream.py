"""A stream of bytes to another process: what a channel needs of one, what it sends and receives, and how it ends.

Connections that we have closed stay open until what was written has arrived.

Where a socket is closed for good, the system answers whatever the peer still says with a reset, and a reset destroys
what has not been delivered. So it is held, and what comes is thrown away, until the peer's system has everything or
the peer ends it too. Waiting for the latter alone would keep a peer that only sends from ever finding out that we have
gone, and would let a stranger make us hold sockets.

A program that ends waits for this a little, as long as something moves: then nobody else would hold them.
"""

from __future__ import annotations

import asyncio
import atexit
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Protocol, TypeAlias

from hcsim.errors import UsageError
from hcsim.real.sockets import SocketReadiness
from hcsim.runtime.channel import Fold, Outlet, Payload, Phantom, SegmentCounts
from hcsim.runtime.frame import Header

WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
Parts: TypeAlias = list[bytes | memoryview]
FIRST_MAX_FRAME_BYTES = 64 * 1024
"""The initial limit on a peer's frames, which is enough for a hello."""
MOST_S = 60.0
"""How long what was sent may take to arrive."""
MOST_AT_END_S = 10.0
"""The same where the program ends. The system alone then goes on."""
STUCK_S = 2.0
"""How long nothing of it may move then."""
_FIRST_LOOK_S, _SLOWEST_LOOK_S = 0.001, 0.05
MOST_HELD = 64


class Forwarder(Outlet, Protocol):
    """Passes on what comes, to another stream's."""

    is_idle: Callable[[], bool]
    """Whether a frame can be sent over the channel here and now; the channel says so."""
    go_on: Callable[[], None]
    """Lets the channel take what there is."""

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to pass on."""

    def run(self, begun: bytes) -> tuple[bool, bool]:
        """Pass on what there is. Of the header that comes first, `begun` has been read.

        Whether its frame has been taken, and whether what comes now is not to be passed on."""


class Stream(Protocol):
    """An ordered byte stream in both directions. Operations that would block raise one of `WOULD_BLOCK`."""

    incoming: SocketReadiness
    """Ready when there may be something to read that the event loop can see."""
    outgoing: SocketReadiness
    """Ready when there may be room to write."""
    carrier: str
    ends: tuple[str, str]
    read_ahead_bytes: int
    """The number of bytes worth reading at once where a header is expected."""
    reports_late: bool
    """Whether the stream may have taken more bytes than it has reported as written."""
    adds: bool
    """Whether the stream supports reduce on receive."""
    forwarder: Forwarder | None

    @property
    def write(self) -> Callable[[Parts], int]:
        """Write from the beginning of the parts and return the number of bytes taken."""

    @property
    def read(self) -> Callable[[memoryview], int]:
        """Read some bytes and return their number; 0 at the end."""

    def add(self, fold: Fold, have: int, most: int) -> int:
        """Read bytes of a fold and reduce them; `have` bytes of it have come already. Return 0 where it would block.

        Raises `EOFError` at the end."""

    def hides_bytes(self) -> bool:
        """Return whether there may be something to read that the event loop cannot see."""

    def hides_room(self) -> bool:
        """Return the same for room to write."""

    def finish(self) -> None:
        """Signal the end of the data written."""

    def segments(self) -> SegmentCounts | None:
        """Return what the system has sent and lost; None if it does not tell, or has closed the stream."""

    def undelivered_bytes(self) -> int:
        """Return how much of the data written could still be lost by a close; input is discarded.

        Call it after `finish` only."""

    def close(self) -> None: ...


def bytes_of(header: Header, payload: Payload) -> memoryview:
    """Return the bytes to send, after checking them against the header. A phantom crosses a real network as zeros."""
    if payload.nbytes != header.length:
        raise UsageError(f"the header announces {header.length} bytes, the payload has {payload.nbytes}")
    return _zeros(header.length) if isinstance(payload, Phantom) else payload


@lru_cache(maxsize=4)
def _zeros(length: int) -> memoryview:
    return memoryview(bytes(length))


def room_for(header: Header, where: memoryview | Fold | None) -> memoryview:
    """Return the buffer to receive a payload into, without any reduction."""
    view = where.room if isinstance(where, Fold) else where
    if view is None:
        return memoryview(bytearray(header.length))
    if len(view) != header.length or view.readonly:
        kind = "read-only" if view.readonly else "writable"
        raise UsageError(f"a frame of {header.length} bytes does not fit a {kind} buffer of {len(view)}")
    return view


class _Held:
    """A finished stream with undelivered data."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.loop = asyncio.get_running_loop()
        self._left_bytes = stream.undelivered_bytes()
        self._moved_s = time.monotonic()
        self._until_s = self._moved_s + MOST_S
        self._patience_s = MOST_S
        self._look_s = _FIRST_LOOK_S

    def hurry(self) -> None:
        """Use the shorter time limits: the program ends."""
        self._until_s = min(self._until_s, time.monotonic() + MOST_AT_END_S)
        self._patience_s = STUCK_S

    def is_over(self) -> bool:
        now_s, before_bytes = time.monotonic(), self._left_bytes
        self._left_bytes = self.stream.undelivered_bytes()
        if self._left_bytes < before_bytes:
            self._moved_s = now_s
        return not self._left_bytes or now_s > min(self._until_s, self._moved_s + self._patience_s)

    def next_look_s(self) -> float:
        """Return the delay until the next check; it doubles up to a limit."""
        self._look_s = min(2 * self._look_s, _SLOWEST_LOOK_S)
        return self._look_s


_HELD: dict[_Held, None] = {}
"""The held streams, oldest first."""


def close_when_delivered(stream: Stream) -> None:
    """Close a finished stream: now if all data are delivered, otherwise in the background."""
    for held in tuple(_HELD):
        if held.loop.is_closed() and held.is_over():  # nobody else looks after it
            _let_go(held)
    if not stream.undelivered_bytes():
        stream.close()
        return
    if len(_HELD) >= MOST_HELD:
        _let_go(next(iter(_HELD)))
    held = _Held(stream)
    _HELD[held] = None
    _look_after(held)


def _look_after(held: _Held) -> None:
    if held in _HELD:
        if held.is_over():
            _let_go(held)
        else:
            held.loop.call_later(held.next_look_s(), _look_after, held)


def _let_go(held: _Held) -> None:
    _HELD.pop(held, None)
    held.stream.close()


@atexit.register
def hold_out() -> None:
    """No loop runs any more. Whoever interrupts us does not want to wait."""
    for held in tuple(_HELD):
        held.hurry()
    with suppress(KeyboardInterrupt):
        for held in tuple(_HELD):
            while not held.is_over():
                time.sleep(held.next_look_s())
    for held in tuple(_HELD):
        _let_go(held)


def still_held() -> int:
    """How many connections wait until what was written has arrived."""
    return len(_HELD)
