"""Reductions: sum, mean, min, max, product and bitwise operations, for every supported dtype.

Booleans follow logic: a sum is an or, a product an and. Complex numbers have no order.

Half-precision floats are combined and divided block by block in float32 and rounded once. The result is the
same as that of a native half-precision operation (float32 has more than twice their digits, plus two, so the
second rounding cannot differ). Compiled loops convert them many times faster than numpy, but support finite
numbers only.

A channel may add on receive (`added_as`), with bit-identical results.
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
"""Called with the left operand, the right operand and the output."""

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
"""By the kind of the dtype; V is bfloat16."""

_FLOATS = {"float16": "e", "bfloat16": "E", "float32": "f", "float64": "d", "complex64": "f", "complex128": "d"}
_INTEGERS = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""By size in bytes: signed and unsigned integers are added alike."""
_BLOCK = 16384
"""Elements per block, so that both float32 operands stay close to the first-level cache."""


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of that name, including bfloat16."""
    found: dict[str, np.dtype[Any]] = {dtype.name: dtype for dtype in DTYPES}
    if name in found:
        return found[name]
    raise UsageError(f"{name!r} is no dtype that we carry: there are {', '.join(d.name for d in DTYPES)}")


@lru_cache(maxsize=256)
def check_carried(dtype: np.dtype[Any]) -> None:
    """Reject unsupported dtypes: foreign byte order, times, objects."""
    if dtype not in DTYPES:
        raise UsageError(f"{dtype} is no dtype that we carry: there are {', '.join(d.name for d in DTYPES)}")


def check(operation: str, dtype: np.dtype[Any] | None = None) -> None:
    """Reject an unknown operation, or one that is undefined for the dtype."""
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
    """Return the type code with which a channel may add on receive; empty if it cannot. See `Fold`."""
    if operation not in ("sum", "mean"):
        return ""
    if dtype.kind in "iu":
        return _INTEGERS[dtype.itemsize]
    return _FLOATS.get(dtype.name, "")


@lru_cache(maxsize=256)
def combiner(operation: str, dtype: np.dtype[Any]) -> Combine:
    """Return a function that combines two arrays into a third, which may be one of them."""
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
    """Multiply step by step. The product of numpy is rounded once or twice, depending on the processor and the
    position in the array, so that different machines would get different bits."""
    with np.errstate(all="ignore"):
        for block in _blocks(out):
            a, b, c, d = left[block].real, left[block].imag, right[block].real, right[block].imag
            real, imag = a * c - b * d, a * d + b * c
            out[block].real, out[block].imag = real, imag


def divide(array: Array, by: int) -> None:
    """Divide the array in place, as the last step of a mean."""
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
