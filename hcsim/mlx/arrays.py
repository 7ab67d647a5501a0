"""MLX arrays as flat numpy arrays that share their memory.

MLX is lazy: an array has memory once it has been evaluated. MLX does not export bfloat16, so its numbers travel
as unsigned integers of the same width.
"""

from __future__ import annotations

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
    """A new MLX array, and its memory as a flat numpy array for a call to fill.

    Once `take` has returned the array, its memory must not change."""

    def __init__(self, length: int, dtype: Any, values: Array | None = None) -> None:
        self._dtype = dtype
        held = mx.uint16 if dtype == mx.bfloat16 else dtype
        if values is None:
            self._held = mx.zeros(length, held)
        else:
            self._held = mx.array(values.view(np.uint16) if dtype == mx.bfloat16 else values)
        mx.eval(self._held)
        flat: Array = np.array(self._held, copy=False)
        self.flat = flat.view(ml_dtypes.bfloat16) if dtype == mx.bfloat16 else flat

    def take(self, shape: tuple[int, ...]) -> MlxArray:
        array = self._held.view(self._dtype) if self._dtype == mx.bfloat16 else self._held
        return array.reshape(shape)
