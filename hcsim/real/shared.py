"""A stream through memory that two processes of one machine share, in place of a connection over its loopback.

The memory is two rings of bytes (see rings.c). Beside it the two have a Unix socket, the bell: a byte on it wakes who
sleeps at the other end, and its end tells that the other process has gone, killed or not. `doors` is where they meet.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress

from hcsim.real.conveyor import Conveyor
from hcsim.real.direction import Direction
from hcsim.real.forked import own
from hcsim.runtime.channel import Fold
from hcsim.runtime.frame import HEADER_BYTES

try:
    from hcsim.real import rings
except ImportError:  # there was no compiler
    rings = None  # type: ignore[assignment]

SWITCH = "HCSIM_SHARED_MEMORY"
"""0 in the environment: TCP, also within this machine."""
_BELLS_AT_ONCE = 64


def is_possible() -> bool:
    """Whether this process can share memory, and may."""
    return rings is not None and os.environ.get(SWITCH, "") != "0"


def new_memory() -> int:
    """A descriptor of memory that can be shared."""
    return rings.memory()


def attached(memory: int, bell: socket.socket, *, first: bool) -> rings.Rings:
    """The rings in it; `first` is whoever brought it. Raises `OSError` where it cannot be used."""
    return rings.Rings(memory, bell.fileno(), first)


class SharedStream:
    """A stream through rings, of which the other process has the other end."""

    carrier = "shared memory"
    read_ahead_bytes = HEADER_BYTES
    """To read costs no system call."""
    reports_late = False
    adds = True

    def __init__(self, bell: socket.socket, ours: rings.Rings, address: str) -> None:
        self._bell = bell  # owned by this process since they met
        self._rings = ours
        self._loop = asyncio.get_running_loop()
        self.ends = address, address
        self.incoming = Direction(bell.fileno(), _watch, _unwatch)
        self.outgoing = Direction(bell.fileno(), _watch, _unwatch)
        self.conveyor: Conveyor | None = Conveyor(ours, rings.MOST_BYTES)
        self.read, self.write = self._rings.read, self._rings.write
        self._loop.add_reader(bell, self._rung)
        own(self._rings)

    def add(self, fold: Fold, have: int, most: int) -> int:
        """See `Stream.add`."""
        return self._rings.add(fold.into, fold.numbers, have, most)

    def hides_bytes(self) -> bool:
        """The bell is rung only for who sleeps."""
        return not self._rings.let_reader_sleep()

    def hides_room(self) -> bool:
        """Likewise."""
        return not self._rings.writer_sleeps()

    def finish(self) -> None:
        """See `Stream.finish`."""
        with suppress(OSError):  # the peer may have been faster
            self._bell.shutdown(socket.SHUT_WR)

    def undelivered_bytes(self) -> int:
        """What was written stays in the memory for as long as the peer has it."""
        return 0

    def close(self) -> None:
        """Let go of the bell and of the memory, whoever still refers to us."""
        self._loop.remove_reader(self._bell)
        self._bell.close()
        self._rings.close()

    def _rung(self) -> None:
        try:
            over = not self._bell.recv(_BELLS_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            over = True
        if over:
            self._loop.remove_reader(self._bell)
        self._rings.rung(over)
        self.incoming.ready()
        if self.outgoing.busy:
            self.outgoing.ready()


def _watch(fd: int, ready: object) -> None:
    """The bell is watched all the time."""


def _unwatch(fd: int) -> bool:
    return True
