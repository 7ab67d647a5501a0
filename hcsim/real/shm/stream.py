"""A stream through memory that two processes of one machine share, in place of a connection over its loopback.

The memory is two rings of bytes (see rings.c). Beside it the two have a Unix socket, the bell: a byte on it wakes who
sleeps at the other end, and its end tells that the other process has gone, killed or not. They meet in `rendezvous`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum

from hcsim.real.sockets import SocketReadiness, own
from hcsim.real.stream import Forwarder
from hcsim.runtime.channel import Fold, Leg, Outlet
from hcsim.runtime.frame import HEADER_BYTES, Header, encode_header

try:
    from hcsim.real.shm import rings
except ImportError:  # there was no compiler
    rings = None  # type: ignore[assignment]

SWITCH = "HCSIM_SHARED_MEMORY"
"""Set to 0 in the environment, it disables shared memory: TCP is used within this machine, too."""
_BELLS_AT_ONCE = 64


def is_possible() -> bool:
    """Return whether shared memory is supported and enabled in this process."""
    return rings is not None and os.environ.get(SWITCH, "") != "0"


def new_memory() -> int:
    return rings.memory()


def attached(memory: int, bell: socket.socket, *, first: bool) -> rings.Rings:
    """Attach the rings in the memory; `first` for the process that created it. Raises `OSError` where it cannot be
    used."""
    return rings.Rings(memory, bell.fileno(), first)


class ForwardState(IntEnum):
    """The state of a belt after a run; the numbers are those of belt.h."""

    WAITS = 0
    """It waits for more input; the peer will ring the bell."""
    OTHERS = 1
    """The next frame does not belong to it."""
    TURN_OVER = 2
    """It can continue, but has to yield to other tasks."""
    STUCK = 3
    COMPLETE = 4


class _Load:
    """A belt and the future of the caller that waits for it."""

    __slots__ = ("_belt", "_moved", "_to", "over")

    def __init__(self, belt: rings.Belt, to: RingForwarder, moved: Callable[[int], None]) -> None:
        self._belt = belt
        self._to = to
        self._moved = moved
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def run(self, begun: bytes) -> tuple[int, bool]:
        """Return the belt's state (`ForwardState`), and whether it has consumed any input."""
        belt = self._belt
        if not self._to.is_idle():
            return ForwardState.STUCK, False
        before, how = belt.done, belt.run(begun)
        if belt.done > before:
            self._moved(belt.done)
        return how, bool(belt.took)


class RingForwarder:
    """The outlet of a channel whose stream goes through rings: frames go on to another as they come.

    The frames' headers are known beforehand; belt.h compares them with what comes, and moves what is its. Whatever else
    comes is received in the usual way, and so is what is left of a belt that got stuck."""

    def __init__(self, ours: rings.Rings, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._rings = ours
        self._loop = asyncio.get_running_loop()
        self._loads: list[_Load] = []
        self.is_idle: Callable[[], bool] = lambda: False
        """Return whether the channel can send a frame without waiting."""
        self.go_on: Callable[[], None] = lambda: None
        """Make the channel process the available input."""

    def forward(self, legs: Sequence[Leg], to: Outlet, moved: Callable[[int], None]) -> asyncio.Future[None]:
        """See `Outlet.forward`."""
        assert isinstance(to, RingForwarder)
        belt = self._rings.belt(to._rings, [(_head(leg.comes), _head(leg.goes), *leg[2:]) for leg in legs])
        load = _Load(belt, to, moved)
        self._loads.append(load)
        load.over.add_done_callback(lambda _: self._loads.remove(load))
        # Not at once: whoever asks has to know what it waits for when others' frames land.
        self._loop.call_soon(self.go_on)
        return load.over

    @property
    def is_busy(self) -> bool:
        """Whether there are belts."""
        return bool(self._loads)

    def run(self, begun: bytes) -> tuple[bool, bool]:
        """Let the belts run. Of the header that comes first, `begun` has been read.

        Whether its frame has been taken, and whether what comes now is none of theirs."""
        took, others = False, True
        for load in [load for load in self._loads if not load.over.done()]:
            how, taken = load.run(b"" if took else begun)
            others = others and how == ForwardState.OTHERS
            took = took or taken
            if how >= ForwardState.STUCK:
                load.over.set_result(None)
            elif how == ForwardState.TURN_OVER:
                self._loop.call_soon(self.go_on)
        if took and others:  # what comes now may be for a belt that has been asked before
            self._loop.call_soon(self.go_on)
        return took, others and not took


class SharedStream:
    """A stream through shared-memory rings to another process."""

    carrier = "shared memory"
    read_ahead_bytes = HEADER_BYTES
    """One header only, since a read needs no system call."""
    reports_late = False
    adds = True

    def __init__(self, bell: socket.socket, ours: rings.Rings, address: str) -> None:
        self._bell = bell  # owned by this process since they met
        self._rings = ours
        self._loop = asyncio.get_running_loop()
        self.ends = address, address
        self.incoming = SocketReadiness(bell.fileno(), _watch, _unwatch)
        self.outgoing = SocketReadiness(bell.fileno(), _watch, _unwatch)
        self.forwarder: Forwarder | None = RingForwarder(ours, rings.MOST_BYTES)
        self.read, self.write = self._rings.read, self._rings.write
        self._loop.add_reader(bell, self._rung)
        own(self._rings)

    def add(self, fold: Fold, have: int, most: int) -> int:
        return self._rings.add(fold.into, fold.numbers, have, most)

    def hides_bytes(self) -> bool:
        """Return whether there may be bytes to read: the peer rings the bell only for a sleeping reader."""
        return not self._rings.let_reader_sleep()

    def hides_room(self) -> bool:
        """Return whether there may be room to write: the peer rings the bell only for a sleeping writer."""
        return not self._rings.writer_sleeps()

    def finish(self) -> None:
        with suppress(OSError):  # the peer may have been faster
            self._bell.shutdown(socket.SHUT_WR)

    def segments(self) -> None:
        """None: memory has no segments."""

    def undelivered_bytes(self) -> int:
        """Return 0: the data written stay in the memory as long as the peer has it."""
        return 0

    def close(self) -> None:
        """Close the bell and the memory, whatever references to this stream remain."""
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


def _head(header: Header | None) -> bytes:
    return b"" if header is None else encode_header(header)


def _watch(fd: int, ready: object) -> None:
    """Do nothing: the bell is always watched."""


def _unwatch(fd: int) -> bool:
    return True
