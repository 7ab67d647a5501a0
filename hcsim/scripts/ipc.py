"""The IPC between a rank's process and the simulator: their messages, and the memory that they share.

A message is a length-prefixed msgpack array, sent over a socket pair. Most messages of a rank need no answer,
so the rank computes on while the simulator still charges others for their work. It blocks only where its script
blocks. Failures travel as text: errors of the simulator's side, and exits of processes.

The arrays of calls lie in shared memory. Both sides map an anonymous file, in memory where the system supports
it. The rank allocates and frees slots. When no slot is free, it extends the file by a part with its own mapping,
so arrays in older parts keep their address. The simulator only accesses slots that it is told of.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
import tempfile
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import ml_dtypes
import msgspec
import numpy as np

from hcsim import errors
from hcsim.calls import GroupCall
from hcsim.collectives.buffers import Array
from hcsim.errors import CollectiveError, CompressionError, HcsimError
from hcsim.runtime.host import KernelGroup
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
    """A request, answered with a `SimulatorReply`."""


class Computed(_Told, frozen=True):
    """Computation since the last such report. The two kinds of work are done one after the other."""

    flops: float = 0.0
    """FLOPs of compute-bound kernels."""
    moved_bytes: float = 0.0
    """Bytes moved by memory-bound kernels."""
    kernels: int = 0
    seconds: float = 0.0
    groups: tuple[KernelGroup, ...] = ()
    """The kernels by kind and size, for a machine whose kernels were measured."""


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
    group: int
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

    group: int
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

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send one message, and pass open files along with it."""
        data = msgspec.msgpack.encode(message)
        framed = _LENGTH.pack(len(data)) + data
        try:
            sent = socket.send_fds(self._end, [framed], descriptors) if descriptors else 0
            self._end.sendall(framed[sent:])
        except OSError:
            raise IpcClosed from None

    def receive(self) -> R:
        size = _LENGTH.unpack(self._take(_LENGTH.size))[0]
        return self._receives.decode(self._take(size), "the process at the other end")

    def ask(self, message: Any, descriptors: Sequence[int] = ()) -> R:
        """Send a request and wait for its reply."""
        self.send(message, descriptors)
        return self.receive()

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


IN_MEMORY = Path("/dev/shm")
"""Files in memory, on Linux."""
_ALIGNED_BYTES = 64
_SMALLEST_PART_BYTES = 4 << 20
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def shared_file(in_memory: Path = IN_MEMORY) -> int:
    """Return the descriptor of an anonymous file, which is deleted with its last user. The caller owns the
    descriptor.

    It is in that folder, or in the temporary one where that does not exist (macOS)."""
    with tempfile.TemporaryFile(dir=in_memory if os.access(in_memory, os.W_OK) else None) as file:
        return os.dup(file.fileno())


class SharedMemoryMap:
    """The parts of the file that are mapped in this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._parts: list[tuple[int, mmap.mmap]] = []

    def map(self, part: Grown) -> None:
        self._parts.append((part.start, mmap.mmap(self._descriptor, part.size_bytes, offset=part.start)))

    def at(self, slot: SharedArray) -> Array:
        start, memory = next(part for part in reversed(self._parts) if part[0] <= slot.start)
        dtype = _BFLOAT16 if slot.dtype == _BFLOAT16.name else np.dtype(slot.dtype)
        return np.frombuffer(memory, dtype, slot.length, slot.start - start)

    def close(self) -> None:
        """Unmap the file. Arrays that are still in use keep their part."""
        os.close(self._descriptor)
        self._parts.clear()


class SharedMemoryAllocator:
    """The rank's side: the allocator of slots."""

    def __init__(self, descriptor: int) -> None:
        self.mapped = SharedMemoryMap(descriptor)
        self._descriptor = descriptor
        self._size_bytes = 0
        self._free: list[tuple[int, int]] = []
        """Free ranges (start, end) in ascending order; none spans two parts."""
        self._ends: list[int] = []

    def take(self, like: Array) -> tuple[SharedArray, Grown | None]:
        """Allocate a slot for such an array. Also return the part that was added for it, if any."""
        size_bytes = max(1, -(-like.nbytes // _ALIGNED_BYTES)) * _ALIGNED_BYTES
        grown = None
        place = next((at for at, (start, end) in enumerate(self._free) if end - start >= size_bytes), None)
        if place is None:
            place, grown = len(self._free), self._grow(size_bytes)
        start, end = self._free[place]
        if end - start == size_bytes:
            del self._free[place]
        else:
            self._free[place] = (start + size_bytes, end)
        return SharedArray(start, like.size, like.dtype.name), grown

    def give_back(self, slot: SharedArray, size_bytes: int) -> None:
        """Free the slot and merge it with free neighbours."""
        start = slot.start
        end = start + max(1, -(-size_bytes // _ALIGNED_BYTES)) * _ALIGNED_BYTES
        place = bisect(self._free, (start, end))
        self._free.insert(place, (start, end))
        if place + 1 < len(self._free) and self._free[place + 1][0] == end and end not in self._ends:
            self._free[place : place + 2] = [(start, self._free[place + 1][1])]
        if place and self._free[place - 1][1] == start and start not in self._ends:
            self._free[place - 1 : place + 1] = [(self._free[place - 1][0], self._free[place][1])]

    def _grow(self, size_bytes: int) -> Grown:
        """Add a part at least as large as the file, so that there are few parts."""
        page = mmap.ALLOCATIONGRANULARITY
        part_bytes = -(-max(size_bytes, self._size_bytes, _SMALLEST_PART_BYTES) // page) * page
        part = Grown(self._size_bytes, part_bytes)
        self._size_bytes += part_bytes
        os.ftruncate(self._descriptor, self._size_bytes)
        self.mapped.map(part)
        self._free.append((part.start, self._size_bytes))
        self._ends.append(self._size_bytes)
        return part
