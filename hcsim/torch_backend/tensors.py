"""Tensors as the flat arrays that a call works on, and back.

One tensor that lies in this machine's memory in one piece is its array: nothing is copied. Several tensors, one with
gaps, or one on a device go through a buffer. CUDA fills and empties it on the stream that the program uses, while the
program goes on; `copied` waits until it is filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import ml_dtypes
import torch
from torch import Tensor

from hcsim.collectives.buffers import Array

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
