"""Conversion between tensors and the flat arrays that a call works on.

A single contiguous tensor in host memory is used as it is, without a copy. Several tensors, a tensor with gaps,
or one on a device go through a buffer. Copies from a device are queued behind the program's work on it, and the
program goes on; `copied` waits until the buffer is filled.

A thread waits for these copies in the order in which the calls were made, and then starts each call. From the
first call with tensors on a device on, all calls of the group go through this thread, to stay in order.

Metal's command buffers are not safe to fill from two threads: torch aborts the process. So tensors on MPS are
touched only by the threads that call, that wait for results, or that run autograd, of which one at a time has
work. The thread above asks whether an event has passed, which touches no command buffer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeAlias

import ml_dtypes
import torch
from torch import Tensor

from hcsim.collectives.buffers import Array
from hcsim.engine import PendingCall
from hcsim.errors import DeadlineExceeded

Factor: TypeAlias = float | Tensor

_AS_THEY_ARE = (
    torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
"""dtypes that torch converts to numpy."""
_BY_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Other dtypes travel as integers of the same width: they can be moved, but not reduced."""


_LOOK_S = 0.0002
"""Interval at which a copy on MPS is asked whether it is over. `Event.synchronize` would keep Python's lock."""
_COPY_S = 600.0
"""No copy takes as long, unless the device has failed."""


class DeviceCopies(Protocol):
    """Copies between the tensors of one kind of device and buffers in host memory."""

    @property
    def in_turn(self) -> bool:
        """Whether the threads of a program may use the device only in turn, so that nothing else may use it."""

    def shares(self, tensor: Tensor) -> bool:
        """Return whether a call can work on this tensor's own memory."""

    def buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return host memory for these copies."""

    def fetch(self, tensors: Sequence[Tensor], buffer: Tensor) -> Callable[[], None] | None:
        """Copy the tensors into the buffer, one behind the other. Return a function that waits for the end, in any
        thread; None: they are copied."""

    def put(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the buffer into the tensors, ahead of the program's later work."""


def _pieces(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(buffer, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


class HostCopies:
    """Tensors in host memory."""

    in_turn = False

    def shares(self, tensor: Tensor) -> bool:
        return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())

    def buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(length, dtype=dtype)

    def fetch(self, tensors: Sequence[Tensor], buffer: Tensor) -> Callable[[], None] | None:
        for piece, tensor in zip(_pieces(buffer, tensors), tensors, strict=True):
            piece.copy_(tensor)
        return None

    def put(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        for piece, tensor in zip(_pieces(buffer, tensors), tensors, strict=True):
            tensor.copy_(piece)


class CudaCopies:
    """Tensors on CUDA, by its streams."""

    in_turn = False

    def shares(self, tensor: Tensor) -> bool:
        return False

    def buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(length, dtype=dtype, pin_memory=True)

    def fetch(self, tensors: Sequence[Tensor], buffer: Tensor) -> Callable[[], None] | None:
        for piece, tensor in zip(_pieces(buffer, tensors), tensors, strict=True):
            piece.copy_(tensor, non_blocking=True)
        copied: torch.cuda.Event = torch.cuda.current_stream(tensors[0].device).record_event()
        return copied.synchronize

    def put(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        for piece, tensor in zip(_pieces(buffer, tensors), tensors, strict=True):
            tensor.copy_(piece, non_blocking=True)


class Event(Protocol):
    """A moment in the device's work."""

    def query(self) -> bool:
        """Return whether the device has come to it."""


def _mps_event() -> Event:
    event = torch.mps.event.Event()
    event.record()
    return event


class MpsCopies:
    """Tensors on MPS: one copy for all tensors of a call, as Metal only copies to offsets that are multiples of 4."""

    in_turn = True

    def __init__(self, record: Callable[[], Event] = _mps_event) -> None:
        """`record` returns the end of the work that the device has been given so far."""
        self._record = record
        self._in_use: list[tuple[Event, Tensor]] = []
        """The buffers that the device may still read."""

    def shares(self, tensor: Tensor) -> bool:
        return False

    def buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(length, dtype=dtype)

    def fetch(self, tensors: Sequence[Tensor], buffer: Tensor) -> Callable[[], None] | None:
        flat = [tensor.reshape(-1) for tensor in tensors]
        buffer.copy_(flat[0] if len(flat) == 1 else torch.cat(flat), non_blocking=True)
        copied = self._record()
        return lambda: _wait_for(copied)

    def put(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        self._in_use = [(copied, each) for copied, each in self._in_use if not copied.query()]
        there = buffer.to(tensors[0].device, non_blocking=True)
        for piece, tensor in zip(_pieces(there, tensors), tensors, strict=True):
            tensor.copy_(piece)
        self._in_use.append((self._record(), buffer))


def _wait_for(event: Event) -> None:
    until_s = time.monotonic() + _COPY_S
    while not event.query():
        if time.monotonic() > until_s:
            raise DeadlineExceeded(f"the device has not copied the tensors within {_COPY_S:g} s")
        time.sleep(_LOOK_S)


class FlatTensors:
    """One or several tensors as one flat array."""

    def __init__(
        self,
        copies: DeviceCopies,
        tensors: Sequence[Tensor],
        *,
        reduced: bool = False,
        read: bool = True,
        factor: Factor | None = None,
    ) -> None:
        """`reduced`: the call computes with the elements, and does not only move them. `read`: it needs the current
        contents. `factor`: the array holds the elements times this factor; the tensors change only in `back`."""
        first = tensors[0]
        for tensor in tensors:
            if tensor.dtype != first.dtype:
                raise ValueError(f"the tensors of one call have one dtype, not {first.dtype} and {tensor.dtype}")
            if tensor.layout != torch.strided:
                raise ValueError(f"a tensor with layout {tensor.layout} has to be made dense first")
        if reduced and first.dtype not in _AS_THEY_ARE and first.dtype != torch.bfloat16:
            raise ValueError(f"{first.dtype} can be moved, not reduced: convert it to bfloat16 first")
        self._copies = copies
        self._tensors = [tensor.detach() for tensor in tensors]
        self._buffer: Tensor | None = None
        self._fetched: Callable[[], None] | None = None
        self.lengths = [tensor.numel() for tensor in tensors]
        if len(tensors) == 1 and copies.shares(first) and factor is None:
            whole = self._tensors[0].view(-1)
        else:
            whole = self._buffer = copies.buffer(sum(self.lengths), first.dtype)
            if read and whole.numel():
                self._fetched = copies.fetch(self._tensors, whole)
        if factor is not None:
            self.copied()
            whole.mul_(factor)
        self.array = _array(whole)

    @property
    def staged(self) -> bool:
        """Whether the copy into the array may still be in progress."""
        return self._fetched is not None

    def copied(self) -> None:
        """Wait until the elements are in the array."""
        if self._fetched is not None:
            self._fetched()

    def back(self) -> None:
        """Copy the array back into the tensors, ahead of the program's later work."""
        if self._buffer is not None and self._buffer.numel():
            with torch.no_grad():
                self._copies.put(self._buffer, self._tensors)


def _array(flat: Tensor) -> Array:
    if flat.dtype in _AS_THEY_ARE:
        return flat.numpy()
    array: Array = flat.view(_BY_WIDTH[flat.element_size()]).numpy()
    return array.view(ml_dtypes.bfloat16) if flat.dtype == torch.bfloat16 else array


class StagedCall:
    """A call that will be started once its tensors are copied."""

    def __init__(self, started: Future[PendingCall]) -> None:
        self._started = started

    def done(self) -> bool:
        if not self._started.done():
            return False
        return self._started.exception() is not None or self._started.result().done()

    def wait(self, timeout_s: float | None) -> int:
        try:
            pending = self._started.result(timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the device had not copied the tensors after {timeout_s:g} s; it goes on") from None
        return pending.wait(timeout_s)

    def on_done(self, act: Callable[[], None]) -> None:
        def follow(started: Future[PendingCall]) -> None:
            if started.exception() is None:
                started.result().on_done(act)
            else:
                act()

        self._started.add_done_callback(follow)


class Staging:
    """The queue of one group's calls."""

    def __init__(self, copies: Mapping[str, DeviceCopies] | None = None) -> None:
        """`copies` are those to use by the kind of device, where others than the usual ones are wanted."""
        usual: dict[str, DeviceCopies] = {"cpu": HostCopies(), "cuda": CudaCopies(), "mps": MpsCopies()}
        self._copies = usual | dict(copies or {})
        self._worker: ThreadPoolExecutor | None = None
        self._guard = threading.Lock()

    def copies(self, tensor: Tensor) -> DeviceCopies:
        """Return the copies of the tensor's device."""
        kind = tensor.device.type
        if kind not in self._copies:
            raise ValueError(f"this backend moves tensors on {', '.join(self._copies)}, not on {kind}")
        return self._copies[kind]

    def start(self, flats: Sequence[FlatTensors], begin: Callable[[], PendingCall]) -> PendingCall:
        """Start the call at once. From the first call with tensors on a device on, queue the calls instead."""
        with self._guard:
            if self._worker is None:
                if not any(flat.staged for flat in flats):
                    return begin()
                self._worker = ThreadPoolExecutor(1, "hcsim staging")
            return StagedCall(self._worker.submit(_begin_when_copied, flats, begin))

    def close(self) -> None:
        """Start the queued calls, and accept no more."""
        with self._guard:
            if self._worker is not None:
                self._worker.shutdown()
                self._worker = None


def _begin_when_copied(flats: Sequence[FlatTensors], begin: Callable[[], PendingCall]) -> PendingCall:
    for flat in flats:
        flat.copied()
    return begin()
