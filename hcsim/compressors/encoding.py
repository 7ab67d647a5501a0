"""The header of every payload, and its validation.

    offset  0  2  magic "hz"      5  1  reserved, 0
            2  1  version         6  2  parameter  of the codec: a block's size, a rank
            3  1  codec           8  8  elements   of the tensor
            4  1  dtype, 1: float32

A payload of codec 0 says that the tensor has a NaN or an infinity; the rest has no meaning. It has the size of
a normal payload, so receivers need not know in advance.

All numbers are little-endian, and so are the arrays behind the header, which start at a multiple of 16 bytes.
Both sides know the codec, its parameter and the shape. A receiver compares the header with the expected one, so
a peer's claims never decide how much memory is allocated.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, ByteArray
from hcsim.errors import CompressionError, NotFinite, UsageError

MAGIC = b"hz"
VERSION = 2
FLOAT32 = 1
FLOAT_BYTES = 4
CHUNK = 1 << 17
"""The number of elements that a kernel processes at a time, so that its passes hit the cache."""

MAGNITUDE = np.uint32(0x7FFFFFFF)
"""The bits of a float without its sign. As integers they are ordered by magnitude, with NaNs and infinities
above all."""

_HEADER = struct.Struct("<2sBBBBHQ")
_FIELDS = ("magic", "version", "codec", "dtype", "reserved byte", "parameter", "number of elements")
HEADER_BYTES = _HEADER.size


class Codec(IntEnum):
    """The codec of a payload. Numbers from 128 on are those of plugins: see `plugin_codec`."""

    NONE = 1
    TOPK = 2
    RANDOMK = 3
    FP16 = 4
    BF16 = 5
    INT8 = 6
    ONEBIT = 7
    POWERSGD = 8
    ZSTD = 9
    INT4 = 10
    INT2 = 11
    BLOCKTOPK = 12
    DCTTOPK = 13
    ACPSGD = 14
    ARCTOPK = 15


def plugin_codec(name: str) -> int:
    """Return the number of a plugin's codec. It guards against mistakes only: two plugins may share a number."""
    return 128 + crc32(name.encode()) % 128


def header(codec: int, parameter: int, elements: int) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, codec, FLOAT32, 0, parameter, elements)


NOT_FINITE = _HEADER.pack(MAGIC, VERSION, 0, FLOAT32, 0, 0, 0)


def without_values(size_bytes: int) -> ByteArray:
    """Return a payload for a tensor that is not finite."""
    payload = np.zeros(size_bytes, np.uint8)
    payload[:HEADER_BYTES] = np.frombuffer(NOT_FINITE, np.uint8)
    return payload


def has_values(payload: ByteArray) -> bool:
    """Return whether the payload is not one of `without_values`."""
    return payload[:HEADER_BYTES].tobytes() != NOT_FINITE


def check_header(payload: ByteArray, expected: bytes, name: str) -> None:
    if not isinstance(payload, np.ndarray) or payload.dtype != np.uint8 or payload.ndim != 1 or payload.strides != (1,):
        raise UsageError(f"{name}: a payload is a contiguous one-dimensional array of uint8")
    if payload.size < HEADER_BYTES:
        raise CompressionError(f"the payload ends within its header, after {payload.size} bytes", name)
    found = payload[:HEADER_BYTES].tobytes()
    if found == expected:
        return
    for field, theirs, ours in zip(_FIELDS, _HEADER.unpack(found), _HEADER.unpack(expected), strict=True):
        if theirs != ours:
            raise CompressionError(f"the payload's {field} is {theirs!r}, but {ours!r} was expected", name)


def check_size(payload: ByteArray, expected_bytes: int, name: str) -> None:
    """Reject a payload that is too short or too long."""
    if payload.size != expected_bytes:
        raise CompressionError(f"the payload has {payload.size} bytes, but {expected_bytes} were expected", name)


def is_finite(array: npt.NDArray[np.float32]) -> bool:
    largest = np.zeros(min(1, array.size), np.float32)
    kernels.largest(array, largest, max(1, array.size))
    return bool(np.isfinite(largest).all())


def check_input(array: Array, name: str) -> None:
    """Reject an input that peers would not accept."""
    if not is_finite(array):
        raise not_finite(array, name)


def not_finite(array: Array, name: str) -> NotFinite:
    """Return the error that names the first NaN or infinity of the input."""
    at = int(np.argmin(np.isfinite(array)))
    return NotFinite(
        f"element {at} of the tensor is {array[at]}, which cannot be sent; has the training diverged?", name
    )


def check_decoded(values: npt.NDArray[np.float32], name: str) -> None:
    """Reject a payload that would put a NaN or an infinity into a tensor."""
    if not is_finite(values):
        raise decodes_badly(name)


def decodes_badly(name: str) -> CompressionError:
    """Return the error for a payload that would put a NaN or an infinity into a tensor."""
    return CompressionError("the payload decodes to a NaN or an infinity", name)


def as_array(tensor: Any, name: str) -> Array:
    """Return the tensor's memory as a flat array: numpy, or torch on the CPU; only contiguous float32."""
    if not hasattr(tensor, "dtype"):
        raise UsageError(f"{name}: expected a float32 array, not {type(tensor).__name__}")
    try:
        array = np.asarray(tensor)
    except (RuntimeError, TypeError) as problem:
        raise UsageError(f"{name}: this tensor has no memory that can be read here ({problem})") from problem
    if array.dtype != np.float32:
        raise UsageError(f"{name}: expected float32, not {array.dtype}; convert it first")
    if not array.flags.c_contiguous:
        raise UsageError(f"{name}: expected a contiguous tensor; make it contiguous first")
    return array.reshape(-1)
