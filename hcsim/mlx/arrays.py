"""MLX arrays as flat numpy arrays that share their memory.

MLX is lazy: an array has memory once it has been evaluated. MLX does not export bfloat16, so its numbers travel
as unsigned integers of the same width.

Without a GPU, MLX takes the memory of each array from malloc, and gives it back when the array is gone. malloc asks
the system for everything above 32 MiB, page by page: of a large result, page faults cost more than the sum. So the
memory of large results is kept, and used again when no array has it any more. With a GPU, MLX keeps memory itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import mlx.core as mx
import numpy as np

from hcsim.collectives.buffers import Array
from hcsim.engine import chosen_engine
from hcsim.errors import UsageError

MlxArray: TypeAlias = Any
"""An `mlx.core.array`."""

_MLX_KEEPS_MEMORY = mx.metal.is_available() or mx.cuda.is_available()
_LEAST_BYTES = 16 << 20
_MOST_KEPT_BYTES = 1 << 30


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


class _Results:
    """The memory of large results, to be used again.

    MLX does not tell who shares an array's memory: views do, and graphs that are not evaluated yet. But it lets an
    operation write into the memory of its input if nothing else has that memory. So each memory is kept as a broadcast
    view of its first byte, and is free if the view's negative is computed in place. That takes the view away: a memory
    that is not free then is not asked for again. Most programs hold their last result, so the newest is not asked."""

    def __init__(self) -> None:
        self._kept: deque[tuple[MlxArray, int]] = deque()
        """Views, each with the address of its memory; the oldest first."""
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def keep(self, flat: MlxArray, address: int) -> None:
        """Keep the memory of a flat, evaluated array; of a simulated rank it is not, whose work is counted."""
        if _MLX_KEEPS_MEMORY or chosen_engine() is not None or not _LEAST_BYTES <= flat.nbytes <= _MOST_KEPT_BYTES:
            return
        view = mx.broadcast_to(flat.view(mx.int8)[:1], (flat.nbytes,))
        mx.eval(view)
        with self._lock:
            self._kept.append((view, address))
            self._kept_bytes += view.nbytes
            while self._kept_bytes > _MOST_KEPT_BYTES:
                self._drop(0)

    def reuse(self, length: int, dtype: Any) -> MlxArray | None:
        """Return a flat array whose memory nothing else has, with any numbers in it; None: there is none."""
        with self._lock:
            while (found := self._find(length * dtype.size)) is not None:
                view, address = self._drop(found)
                negative = mx.negative(view)
                del view
                first = negative[:1]
                del negative
                mx.eval(first)
                if np.array(first, copy=False).ctypes.data == address:
                    return mx.as_strided(first, (length * dtype.size,), (1,), 0).view(dtype)
        return None

    def _find(self, size_bytes: int) -> int | None:
        alike = [at for at, (view, _) in enumerate(self._kept) if view.nbytes == size_bytes]
        return alike[0] if len(alike) > 1 else None

    def _drop(self, at: int) -> tuple[MlxArray, int]:
        view, address = self._kept[at]
        del self._kept[at]
        self._kept_bytes -= view.nbytes
        return view, address


_results = _Results()


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
        """Return an array whose numbers are anything."""
        used = _results.reuse(length, dtype)
        return cls(mx.zeros(length, dtype) if used is None else used)

    @classmethod
    def copy(cls, array: MlxArray) -> Writable:
        return cls._joined([array]) or cls(_copied(read(array), array.dtype))

    @classmethod
    def join(cls, arrays: Sequence[MlxArray]) -> Writable:
        """Copy several arrays of one type, one after the other."""
        if len(arrays) == 1:
            return cls.copy(arrays[0])
        return cls._joined(arrays) or cls(mx.concatenate([array.reshape(-1) for array in arrays]))

    @classmethod
    def _joined(cls, arrays: Sequence[MlxArray]) -> Writable | None:
        """Copy the arrays into memory that is there already."""
        used = _results.reuse(sum(array.size for array in arrays), arrays[0].dtype)
        if used is None:
            return None
        into = cls(used)
        np.concatenate([read(array) for array in arrays], out=into.flat)
        return into

    def take(self, shape: tuple[int, ...]) -> MlxArray:
        array = self._held.view(self._dtype) if self._dtype == mx.bfloat16 else self._held
        _results.keep(array, self.flat.ctypes.data)
        return array.reshape(shape)


def _copied(numbers: Array, dtype: Any) -> MlxArray:
    return mx.array(numbers.view(np.uint16)).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(numbers)
