"""A stream of bytes to another process: what a channel needs of one, be it TCP, TLS or shared memory."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Protocol, TypeAlias

from hcsim.real.conveyor import Conveyor
from hcsim.real.direction import Direction
from hcsim.runtime.channel import Fold

WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
Parts: TypeAlias = list[bytes | memoryview]


class Stream(Protocol):
    """Bytes in both directions, in order. What cannot be done at once raises that it would block (`WOULD_BLOCK`)."""

    incoming: Direction
    """Ready when there may be something to read, as far as the event loop can see."""
    outgoing: Direction
    """Ready when there may be room to write."""
    carrier: str
    """See `Channel.carrier`."""
    ends: tuple[str, str]
    read_ahead_bytes: int
    """How much it pays to read at once where a header is expected."""
    reports_late: bool
    """Whether it may have taken more than it has reported as written."""
    adds: bool
    """Whether it can add what it reads."""
    conveyor: Conveyor | None
    """Passes on what comes, to another one's."""

    @property
    def write(self) -> Callable[[Parts], int]:
        """Take from the beginning of what is to be sent, and say how much."""

    @property
    def read(self) -> Callable[[memoryview], int]:
        """Read some; 0 at the end."""

    def add(self, fold: Fold, have: int, most: int) -> int:
        """Read some of what a fold is to receive, of which `have` bytes have come; 0 where it would block.

        Raises `EOFError` at the end."""

    def hides_bytes(self) -> bool:
        """Whether there may be something to read that the event loop cannot see."""

    def hides_room(self) -> bool:
        """The same for room to write."""

    def finish(self) -> None:
        """Say that nothing more will be written."""

    def undelivered_bytes(self) -> int:
        """How much of what was written could still be lost by closing it, once it is finished; what comes is thrown
        away."""

    def close(self) -> None:
        """Let go of it."""
