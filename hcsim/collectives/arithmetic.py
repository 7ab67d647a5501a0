"""What a reduction computes: sum, mean, min, max, product and bitwise operations, for every dtype that we carry.

Truth values are combined as logic has it: a sum is an or, a product an and. Complex numbers have no order.

Half-width floats are combined and divided block by block in float32 and rounded once: the result is the
same as of a native half-width operation (float32 has more than twice their digits, plus two, so
the second rounding cannot differ). Compiled loops widen and narrow them many times faster than numpy does, but
know finite numbers alone.

A channel may add numbers itself, as they come (`added_as`): to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from hcsim.compressors import kernels
from hcsim.errors import UsageError

Array = np.ndarray[Any, np.dtype[Any]]
Combine: TypeAlias = Callable[[Array, Array, Array], object]
"""left, right, where the result goes."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALF_WIDTH = (np.dtype(np.float16), BFLOAT16)
DTYPES = (
    *HALF_WIDTH,
    np.dtype(np.float32),
    np.dtype(np.float64),
    *(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    np.dtype(np.bool_),
    np.dtype(np.complex64),
    np.dtype(np.complex128),
)

_UFUNCS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
OPERATIONS = tuple(_UFUNCS)
_BITWISE = ("band", "bor", "bxor")
_MEANINGLESS = {"f": _BITWISE, "V": _BITWISE, "i": ("mean",), "u": ("mean",), "b": ("mean",)}
_MEANINGLESS["c"] = (*_BITWISE, "min", "max")
"""By the dtype's kind, of which V is bfloat16's."""

_FLOATS = {"float16": "e", "bfloat16": "E", "float32": "f", "float64": "d", "complex64": "f", "complex128": "d"}
_INTEGERS = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""By their bytes: with a sign or without, they are added alike."""
_BLOCK = 16384
"""Elements per block: both float32 operands stay in the first-level cache's neighbourhood."""


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of that name, bfloat16 included."""
    found: dict[str, np.dtype[Any]] = {dtype.name: dtype for dtype in DTYPES}
    if name in found:
        return found[name]
    raise UsageError(f"{name!r} is no dtype that we carry: there are {', '.join(d.name for d in DTYPES)}")


@lru_cache(maxsize=256)
def check_carried(dtype: np.dtype[Any]) -> None:
    """Refuse what we do not carry: numbers in another machine's byte order, times, objects."""
    if dtype not in DTYPES:
        raise UsageError(f"{dtype} is no dtype that we carry: there are {', '.join(d.name for d in DTYPES)}")


def check(operation: str, dtype: np.dtype[Any] | None = None) -> None:
    """Refuse what has no meaning: an operation that does not exist, or one that the dtype does not have."""
    if operation not in _UFUNCS:
        raise UsageError(f"{operation!r} is no reduction: there are {', '.join(OPERATIONS)}")
    if dtype is None:
        return
    check_carried(dtype)
    if operation in _MEANINGLESS[dtype.kind]:
        if operation == "mean":
            raise UsageError(f"the mean of {dtype} has no exact meaning: use sum, and divide as you see fit")
        raise UsageError(f"{operation} of {dtype} has no meaning")


@lru_cache(maxsize=256)
def added_as(operation: str, dtype: np.dtype[Any]) -> str:
    """What a channel may add such numbers as, for this operation; empty where it has to be done here. See `Fold`."""
    if operation not in ("sum", "mean"):
        return ""
    if dtype.kind in "iu":
        return _INTEGERS[dtype.itemsize]
    return _FLOATS.get(dtype.name, "")


@lru_cache(maxsize=256)
def combiner(operation: str, dtype: np.dtype[Any]) -> Combine:
    """The function that combines two arrays into a third, which may be one of them."""
    check(operation, dtype)
    ufunc = _UFUNCS[operation]

    def whole(left: Array, right: Array, out: Array) -> None:
        with np.errstate(all="ignore"):  # infinities and NaNs are the caller's data, not our news
            ufunc(left, right, out=out)

    def in_blocks(left: Array, right: Array, out: Array) -> None:
        with np.errstate(all="ignore"):
            for block in _blocks(out):
                wide = _widened(left[block])
                _narrow(ufunc(wide, _widened(right[block]), out=wide), out[block])

    if dtype.kind == "c" and operation == "product":
        return _complex_product
    return in_blocks if dtype in HALF_WIDTH and operation not in ("min", "max") else whole


def _complex_product(left: Array, right: Array, out: Array) -> None:
    """Step by step: numpy's own product is rounded once or twice, depending on the processor and on the place in the
    array, and ranks on unlike machines would end with unlike bits."""
    with np.errstate(all="ignore"):
        for block in _blocks(out):
            a, b, c, d = left[block].real, left[block].imag, right[block].real, right[block].imag
            real, imag = a * c - b * d, a * d + b * c
            out[block].real, out[block].imag = real, imag


def divide(array: Array, by: int) -> None:
    """What a mean does last."""
    if array.dtype in HALF_WIDTH:
        with np.errstate(all="ignore"):
            for block in _blocks(array):
                wide = _widened(array[block])
                _narrow(np.divide(wide, np.float32(by), out=wide), array[block])
        return
    if array.dtype.kind == "c":  # both parts by a real number; a complex one would turn infinities into NaNs
        array = array.view(array.real.dtype)
    np.divide(array, by, out=array, casting="same_kind")


def _blocks(array: Array) -> Iterator[slice]:
    return (slice(lo, lo + _BLOCK) for lo in range(0, array.size, _BLOCK))


def _widened(halves: Array) -> Array:
    widen = kernels.from_bf16 if halves.dtype == BFLOAT16 else kernels.from_fp16
    wide = np.empty(halves.size, np.float32)
    if not (kernels.COMPILED and widen(halves.view(np.uint16), wide)):
        wide[:] = halves
    return wide


def _narrow(wide: Array, halves: Array) -> None:
    narrow = kernels.to_bf16 if halves.dtype == BFLOAT16 else kernels.to_fp16
    if not (kernels.COMPILED and narrow(wide, halves.view(np.uint16))):
        halves[:] = wide
