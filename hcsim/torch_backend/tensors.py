"""Tensors as the flat arrays that a call works on, and back.

One tensor that lies in this machine's memory in one piece is its array: nothing is copied. Several tensors, one with
gaps, or one on a device go through a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from hcsim.collectives.memory import Array

_CARRIED = {torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16))}
"""dtypes that torch does not give numpy, and what they travel as."""
_NEVER_REDUCED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Flat:
    """Tensors, as one flat array."""

    def __init__(self, tensors: Sequence[Tensor], *, reduced: bool = False, read: bool = True) -> None:
        """`reduced`: the call computes with the elements; otherwise they are moved, as bytes. `read`: it needs what is
        in them now."""
        first = tensors[0]
        for tensor in tensors:
            if tensor.dtype != first.dtype:
                raise ValueError(f"the tensors of one call have one dtype, not {first.dtype} and {tensor.dtype}")
            if tensor.layout != torch.strided:
                raise ValueError(f"a tensor with layout {tensor.layout} has to be made dense first")
        if reduced and first.dtype in _NEVER_REDUCED:
            raise ValueError(f"{first.dtype} cannot be reduced without losing nearly all of it: use bfloat16")
        self._tensors = tensors
        self._pieces: list[Tensor] | None = None
        self.lengths = [tensor.numel() * (1 if reduced else tensor.element_size()) for tensor in tensors]
        """How many elements of the array each tensor has."""
        if len(tensors) == 1 and _in_place(first):
            whole = first.detach().view(-1)
        else:
            whole = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=first.dtype)
            self._pieces = list(torch.split(whole, [tensor.numel() for tensor in tensors]))
            if read:
                for piece, tensor in zip(self._pieces, tensors, strict=True):
                    piece.view(tensor.shape).copy_(tensor.detach())
        self.array = _array(whole, reduced=reduced)

    def scale(self, factor: float | Tensor) -> None:
        """Multiply everything, before the call."""
        np.multiply(self.array, np.asarray(factor, self.array.dtype), out=self.array)

    def back(self) -> None:
        """Put what the call has left in the array into the tensors."""
        if self._pieces is not None:
            with torch.no_grad():
                for piece, tensor in zip(self._pieces, self._tensors, strict=True):
                    tensor.detach().copy_(piece.view(tensor.shape))


def _in_place(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _array(flat: Tensor, *, reduced: bool) -> Array:
    if not reduced:
        return flat.view(torch.uint8).numpy()
    if flat.dtype in _CARRIED:
        as_torch, as_numpy = _CARRIED[flat.dtype]
        return flat.view(as_torch).numpy().view(as_numpy)
    return flat.numpy()
