"""Tensors as the flat arrays that a call works on, and back.

One tensor that lies in this machine's memory in one piece is its array: nothing is copied. Several tensors, one with
gaps, or one on a device go through a buffer. CUDA fills and empties it on the stream that the program uses, while the
program goes on; `copied` waits until it is filled.

A call on tensors that lie on a device is started when the device has copied them, without holding up the program.

The copies into host memory are queued on the device's stream like any other work. A thread waits for them in the order
in which the calls were made, and starts each. From the first such call on, all calls of the group go through it: they
have to stay in order.
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
from hcsim.torch_backend.engine import Pending

Factor: TypeAlias = float | Tensor

_AS_THEY_ARE = (
    torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
"""dtypes that torch gives numpy."""
_BY_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What any other travels as: it can be moved, and nothing can be computed with it."""


class Flat:
    """Tensors, as one flat array."""

    def __init__(
        self, tensors: Sequence[Tensor], *, reduced: bool = False, read: bool = True, factor: Factor | None = None
    ) -> None:
        """`reduced`: the call computes with the elements; otherwise they are moved. `read`: it needs what is in them
        now. `factor`: the array has the tensors' elements times that; the tensors stay as they are until `back`."""
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
        """How many elements each tensor has."""
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
        """Whether the array may still be waiting for its elements."""
        return self._filled is not None

    def copied(self) -> None:
        """Return when the elements are in the array."""
        if self._filled is not None:
            self._filled.synchronize()

    def back(self) -> None:
        """Put what the call has left in the array into the tensors; on CUDA, ahead of what the program does next."""
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


class StagedPending:
    """A call that will be started."""

    def __init__(self, started: Future[Pending]) -> None:
        self._started = started

    def done(self) -> bool:
        """Whether it is over."""
        if not self._started.done():
            return False
        return self._started.exception() is not None or self._started.result().done()

    def wait(self, timeout_s: float | None) -> int:
        """See `Pending.wait`."""
        try:
            pending = self._started.result(timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the device had not copied the tensors after {timeout_s:g} s; it goes on") from None
        return pending.wait(timeout_s)

    def on_done(self, act: Callable[[], None]) -> None:
        """See `Pending.on_done`."""

        def follow(started: Future[Pending]) -> None:
            if started.exception() is None:
                started.result().on_done(act)
            else:
                act()

        self._started.add_done_callback(follow)


class Staging:
    """The calls of one group, in order."""

    def __init__(self) -> None:
        self._worker: ThreadPoolExecutor | None = None
        self._guard = threading.Lock()

    def start(self, flats: Sequence[Flat], begin: Callable[[], Pending]) -> Pending:
        """Begin at once where nothing lies on a device and nobody waits for one."""
        with self._guard:
            if self._worker is None:
                if not any(flat.staged for flat in flats):
                    return begin()
                self._worker = ThreadPoolExecutor(1, "hcsim staging")
            return StagedPending(self._worker.submit(_begin_when_copied, flats, begin))

    def close(self) -> None:
        """Start what is still to be started, and no more."""
        with self._guard:
            if self._worker is not None:
                self._worker.shutdown()
                self._worker = None


def _begin_when_copied(flats: Sequence[Flat], begin: Callable[[], Pending]) -> Pending:
    for flat in flats:
        flat.copied()
    return begin()
