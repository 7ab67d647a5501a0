"""Conversion between tensors and the flat arrays that a call works on.

A single contiguous tensor in host memory is used as it is, without a copy. Several tensors, a tensor with gaps,
or one on a device go through a buffer. On CUDA the copies are queued on the program's stream, and the program
goes on; `copied` waits until the buffer is filled.

A thread waits for these copies in the order in which the calls were made, and then starts each call. From the
first call with tensors on a device on, all calls of the group go through this thread, to stay in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import ml_dtypes
import torch
from torch import Tensor

from hcsim.collectives.buffers import Array
from hcsim.errors import DeadlineExceeded
from hcsim.torch_backend.engine import PendingCall

Factor: TypeAlias = float | Tensor

_AS_THEY_ARE = (
    torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
"""dtypes that torch converts to numpy."""
_BY_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Other dtypes travel as integers of the same width: they can be moved, but not reduced."""


class FlatTensors:
    """One or several tensors as one flat array."""

    def __init__(
        self, tensors: Sequence[Tensor], *, reduced: bool = False, read: bool = True, factor: Factor | None = None
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
        self._tensors = tensors
        self._pieces: list[Tensor] | None = None
        self._filled: torch.cuda.Event | None = None
        self.lengths = [tensor.numel() for tensor in tensors]
        if len(tensors) == 1 and _in_place(first) and factor is None:
            whole = first.detach().view(-1)
        else:
            on_cuda = first.device.type == "cuda"
            whole = torch.empty(sum(self.lengths), dtype=first.dtype, pin_memory=on_cuda)
            self._pieces = list(torch.split(whole, self.lengths))
            if read:
                for piece, tensor in zip(self._pieces, tensors, strict=True):
                    piece.view(tensor.shape).copy_(tensor.detach(), non_blocking=on_cuda)
                if on_cuda:
                    self._filled = torch.cuda.current_stream(first.device).record_event()
        if factor is not None:
            self.copied()
        if factor is not None:
            whole.mul_(factor)
        self.array = _array(whole)

    @property
    def staged(self) -> bool:
        """Whether the copy into the array may still be in progress."""
        return self._filled is not None

    def copied(self) -> None:
        """Wait until the elements are in the array."""
        if self._filled is not None:
            self._filled.synchronize()

    def back(self) -> None:
        """Copy the array back into the tensors; on CUDA, ahead of the program's later work."""
        if self._pieces is not None:
            with torch.no_grad():
                for piece, tensor in zip(self._pieces, self._tensors, strict=True):
                    tensor.detach().copy_(piece.view(tensor.shape), non_blocking=tensor.device.type == "cuda")


def _in_place(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


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

    def __init__(self) -> None:
        self._worker: ThreadPoolExecutor | None = None
        self._guard = threading.Lock()

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
