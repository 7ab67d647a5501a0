"""The IPC protocol between a rank's process and the simulator.

A message is a length-prefixed msgpack array, sent over a socket pair. Most messages of a rank need no answer,
so the rank computes on while the simulator still charges others for their work. It blocks only where its script
blocks.

This module also formats failures as text: errors of the simulator's side, and exits of processes.
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


class SharedArray(msgspec.Struct, frozen=True, array_like=True):
    """An array in the shared memory."""

    start: int
    length: int
    dtype: str


class _Told(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message without an answer."""


class _Asked(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request, answered with an `SimulatorReply`."""


class Computed(_Told, frozen=True):
    """Computation since the last such report. The two kinds of work are done one after the other."""

    flops: float = 0.0
    """FLOPs of compute-bound kernels."""
    moved_bytes: float = 0.0
    """Bytes moved by memory-bound kernels."""
    kernels: int = 0
    seconds: float = 0.0


class Printed(_Told, frozen=True):
    """Output of the script."""

    stream: int
    """1 is standard output, 2 standard error."""
    text: str


class Stepped(_Told, frozen=True):
    """An optimizer has completed a step."""


class Grown(_Told, frozen=True):
    """The shared memory has grown by a part."""

    start: int
    size_bytes: int


class Started(_Told, frozen=True):
    """A call begins."""

    number: int
    line: int
    call: GroupCall
    slots: tuple[SharedArray, ...]


class Left(_Told, frozen=True):
    """The script has ended; this is the last message."""

    code: int
    error: str = ""
    """The exception that ended the script, on one line."""


class Opened(_Asked, frozen=True):
    """Open a group; the answer's number identifies the group from then on."""

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
    """Answer when this call has ended, or after this time."""

    number: int
    timeout_s: float | None


class Slept(_Asked, frozen=True):
    """Answer after this time. Zero is valid: it polls for the time and for calls that have ended."""

    seconds: float


class Stored(_Asked, frozen=True):
    """An operation on the store."""

    operation: str
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    amount: int = 0
    timeout_s: float | None = None


RankMessage: TypeAlias = (
    Computed | Printed | Stepped | Grown | Started | Left | Opened | Closed | Awaited | Slept | Stored
)


class ErrorReport(msgspec.Struct, frozen=True, array_like=True):
    """A serialised error."""

    kind: str
    text: str
    peer: int | None = None
    phase: str = ""


class CallFinished(msgspec.Struct, frozen=True, array_like=True):
    """The end of a call."""

    number: int
    result: int = 0
    failure: ErrorReport | None = None


class SimulatorReply(msgspec.Struct, frozen=True, array_like=True):
    """The simulator's answer, with its virtual time."""

    now_s: float
    """The time of the host's wall clock."""
    elapsed_s: float
    """The time of the host's monotonic clock."""
    finished: tuple[CallFinished, ...] = ()
    """All calls that have ended since the previous answer."""
    number: int = 0
    values: tuple[bytes, ...] = ()
    failure: ErrorReport | None = None


class RankFailed(msgspec.Struct, frozen=True, array_like=True):
    """On a real cluster: another rank's script has failed."""

    rank: int
    reason: str


MESSAGES: Schema[RankMessage] = Schema(RankMessage)
ANSWERS: Schema[SimulatorReply] = Schema(SimulatorReply)
STORE_REQUESTS: Schema[Stored] = Schema(Stored)
FAILURES: Schema[RankFailed] = Schema(RankFailed)


class IpcClosed(Exception):
    """The peer has closed the connection."""


class IpcConnection(Generic[R]):
    """One end of a socket pair. Sending blocks while the peer's buffer is full; receiving blocks until a
    message arrives. A request's sender receives next, so replies need no numbers."""

    def __init__(self, end: socket.socket, receives: Schema[R], *, descriptors: int = 0) -> None:
        self._end = end
        self._buffer = bytearray()
        self._most_descriptors = descriptors
        self._descriptors: list[int] = []
        self._receives = receives

    def say(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send one message, and pass open files along with it."""
        data = msgspec.msgpack.encode(message)
        framed = _LENGTH.pack(len(data)) + data
        try:
            sent = socket.send_fds(self._end, [framed], descriptors) if descriptors else 0
            self._end.sendall(framed[sent:])
        except OSError:
            raise IpcClosed from None

    def hear(self) -> R:
        size = _LENGTH.unpack(self._take(_LENGTH.size))[0]
        return self._receives.decode(self._take(size), "the process at the other end")

    def ask(self, message: Any, descriptors: Sequence[int] = ()) -> R:
        """Send a request and wait for its reply."""
        self.say(message, descriptors)
        return self.hear()

    def take_descriptors(self) -> list[int]:
        """Return the file descriptors received with the messages so far."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def close(self) -> None:
        self._end.close()

    def _take(self, size: int) -> bytes:
        buffer = self._buffer
        while len(buffer) < size:
            try:
                piece = self._read()
            except OSError:
                piece = b""
            if not piece:
                raise IpcClosed
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
    """Describe an exit status, or a negated signal number."""
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # of those for real time, only the first and the last have names
        return f"was ended by signal {-code}"


def failure_of(error: BaseException) -> ErrorReport:
    kind, text = describe(error)
    if isinstance(error, CollectiveError):
        return ErrorReport(kind, text, error.peer, error.phase)
    return ErrorReport(kind, text or repr(error))


_ERRORS = {
    name: HcsimError if issubclass(kind, CompressionError) else kind  # which wants to know the tensor
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, HcsimError)
}


def raised(failure: ErrorReport) -> HcsimError:
    error = revive(failure.kind, failure.text, _ERRORS) or HcsimError(f"{failure.kind}: {failure.text}")
    if isinstance(error, CollectiveError):
        error.peer, error.phase = failure.peer, failure.phase
    return error
