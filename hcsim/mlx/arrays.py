"""MLX arrays as flat numpy arrays that share their memory.

MLX is lazy: an array has memory once it has been evaluated. MLX does not export bfloat16, so its numbers travel
as unsigned integers of the same width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import mlx.core as mx
import numpy as np

from hcsim.collectives.buffers import Array
from hcsim.errors import UsageError

MlxArray: TypeAlias = Any
"""An `mlx.core.array`."""


def evaluate(*arrays: MlxArray) -> None:
    """Compute the arrays. Inside `mx.compile` and `mx.vmap` there are no values to send."""
    try:
        mx.eval(*arrays)
    except ValueError as error:
        if "function transformations" not in str(error):
            raise
        raise UsageError(
            "a collective of hcsim cannot be inside mx.compile or mx.vmap, where arrays have no values yet: compile"
            " what is before it and what is after it, and call it between them"
        ) from None


def read(array: MlxArray) -> Array:
    """Return the numbers of an evaluated array, flat. They share the array's memory if that is contiguous."""
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16), copy=False).reshape(-1).view(ml_dtypes.bfloat16)
    flat: Array = np.array(array, copy=False).reshape(-1)
    return flat


class Writable:
    """An evaluated MLX array of our own, and its memory as a flat numpy array for a call to fill.

    Once `take` has returned the array, its memory must not change."""

    def __init__(self, flat: MlxArray) -> None:
        """No other array may share the memory of `flat`."""
        self._dtype = flat.dtype
        self._held = flat.view(mx.uint16) if self._dtype == mx.bfloat16 else flat
        del flat
        mx.eval(self._held)
        numbers: Array = np.array(self._held, copy=False)
        self.flat = numbers.view(ml_dtypes.bfloat16) if self._dtype == mx.bfloat16 else numbers

    @classmethod
    def empty(cls, length: int, dtype: Any) -> Writable:
        return cls(mx.zeros(length, dtype))

    @classmethod
    def copy(cls, array: MlxArray) -> Writable:
        numbers = read(array)
        if array.dtype == mx.bfloat16:
            return cls(mx.array(numbers.view(np.uint16)).view(mx.bfloat16))
        return cls(mx.array(numbers))

    @classmethod
    def join(cls, arrays: Sequence[MlxArray]) -> Writable:
        """Copy several arrays of one type, one after the other."""
        if len(arrays) == 1:
            return cls.copy(arrays[0])
        return cls(mx.concatenate([array.reshape(-1) for array in arrays]))

    def take(self, shape: tuple[int, ...]) -> MlxArray:
        array = self._held.view(self._dtype) if self._dtype == mx.bfloat16 else self._held
        return array.reshape(shape)
