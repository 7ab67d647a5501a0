"""What a rank's process and the simulator say to each other, and how.

A message is a msgpack array behind its length, over a socket pair. Most of what a rank says needs no answer, so it
computes on while the simulator still charges others for theirs; it waits only where its script waits.

What has gone wrong is told in words: errors of the simulator's side, as they reach a rank, and the ends of processes.
"""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from hcsim import errors
from hcsim.calls import GroupCall
from hcsim.errors import CollectiveError, CompressionError, HcsimError
from hcsim.transport.messages import Schema, describe, revive

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 16
R = TypeVar("R")


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """An array in the shared memory."""

    start: int
    length: int
    """In elements."""
    dtype: str


class _Told(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Needs no answer."""


class _Asked(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Is answered with an `Answer`."""


class Computed(_Told, frozen=True):
    """What the rank has done since it last said so. The two kinds of work are done one after the other."""

    flops: float = 0.0
    """Of kernels that the machine's arithmetic holds up."""
    moved_bytes: float = 0.0
    """Of kernels that its memory holds up."""
    kernels: int = 0
    seconds: float = 0.0
    """Beyond that."""


class Printed(_Told, frozen=True):
    """The script wrote something."""

    stream: int
    """1 is standard output, 2 standard error."""
    text: str


class Stepped(_Told, frozen=True):
    """An optimizer has done a step."""


class Grown(_Told, frozen=True):
    """The shared memory has another part."""

    start: int
    size_bytes: int


class Started(_Told, frozen=True):
    """A call begins."""

    number: int
    """Of the call, on this rank."""
    line: int
    call: GroupCall
    slots: tuple[Slot, ...]


class Left(_Told, frozen=True):
    """The script is over; nothing follows."""

    code: int
    error: str = ""
    """The exception that ended it, in a line."""


class Opened(_Asked, frozen=True):
    """A group is to be formed; the answer's number is that of the line."""

    name: str
    rank: int
    size: int
    timeout_s: float
    parent: int | None
    ranks: tuple[int, ...]


class Closed(_Asked, frozen=True):
    """Leave a group."""

    line: int
    in_order: bool


class Awaited(_Asked, frozen=True):
    """Answer when this call is over, or this time has passed."""

    number: int
    timeout_s: float | None


class Slept(_Asked, frozen=True):
    """Answer after this time, which may be none at all: what time is it, and what is over by now?"""

    seconds: float


class Stored(_Asked, frozen=True):
    """Do something with the store."""

    operation: str
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    amount: int = 0
    timeout_s: float | None = None


Message: TypeAlias = Computed | Printed | Stepped | Grown | Started | Left | Opened | Closed | Awaited | Slept | Stored


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error, as it travels."""

    kind: str
    text: str
    peer: int | None = None
    phase: str = ""


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A call is over."""

    number: int
    result: int = 0
    failure: Failure | None = None


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What the simulator says, and at what time."""

    now_s: float
    """By the host's clock."""
    elapsed_s: float
    """By the one that measures durations."""
    finished: tuple[Finished, ...] = ()
    """All calls that have ended since the answer before."""
    number: int = 0
    values: tuple[bytes, ...] = ()
    failure: Failure | None = None


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """On a real cluster, the rank hears that another rank's script has failed."""

    rank: int
    reason: str


MESSAGES: Schema[Message] = Schema(Message)
ANSWERS: Schema[Answer] = Schema(Answer)
STORE_REQUESTS: Schema[Stored] = Schema(Stored)
FAILURES: Schema[Failed] = Schema(Failed)


class HungUp(Exception):
    """The other side is gone."""


class Conversation(Generic[R]):
    """One end of a socket pair. Sending blocks while the peer has too much to read; receiving blocks until a message
    has come. A request is a message whose sender then receives, so replies need no numbers."""

    def __init__(self, end: socket.socket, receives: Schema[R], *, descriptors: int = 0) -> None:
        self._end = end
        self._buffer = bytearray()
        self._most_descriptors = descriptors
        self._descriptors: list[int] = []
        self._receives = receives

    def say(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send one message, and open files with it."""
        data = msgspec.msgpack.encode(message)
        framed = _LENGTH.pack(len(data)) + data
        try:
            sent = socket.send_fds(self._end, [framed], descriptors) if descriptors else 0
            self._end.sendall(framed[sent:])
        except OSError:
            raise HungUp from None

    def hear(self) -> R:
        """The next message."""
        size = _LENGTH.unpack(self._take(_LENGTH.size))[0]
        return self._receives.decode(self._take(size), "the process at the other end")

    def ask(self, message: Any, descriptors: Sequence[int] = ()) -> R:
        """Send a request and wait for its reply."""
        self.say(message, descriptors)
        return self.hear()

    def take_descriptors(self) -> list[int]:
        """The open files that have come with the messages so far."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def close(self) -> None:
        """Hang up."""
        self._end.close()

    def _take(self, size: int) -> bytes:
        buffer = self._buffer
        while len(buffer) < size:
            try:
                piece = self._read()
            except OSError:
                piece = b""
            if not piece:
                raise HungUp
            buffer += piece
        taken = bytes(buffer[:size])
        del buffer[:size]
        return taken

    def _read(self) -> bytes:
        if not self._most_descriptors:
            return self._end.recv(_READ_BYTES)
        piece, descriptors, *_ = socket.recv_fds(self._end, _READ_BYTES, self._most_descriptors)
        self._descriptors += descriptors
        return piece


def ended_how(code: int) -> str:
    """An exit status, or minus a signal, in words."""
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # of those for real time, only the first and the last have names
        return f"was ended by signal {-code}"


def failure_of(error: BaseException) -> Failure:
    """The error as it travels."""
    kind, text = describe(error)
    if isinstance(error, CollectiveError):
        return Failure(kind, text, error.peer, error.phase)
    return Failure(kind, text or repr(error))


_ERRORS = {
    name: HcsimError if issubclass(kind, CompressionError) else kind  # which wants to know the tensor
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, HcsimError)
}


def raised(failure: Failure) -> HcsimError:
    """The same error, on the other side."""
    error = revive(failure.kind, failure.text, _ERRORS) or HcsimError(f"{failure.kind}: {failure.text}")
    if isinstance(error, CollectiveError):
        error.peer, error.phase = failure.peer, failure.phase
    return error
