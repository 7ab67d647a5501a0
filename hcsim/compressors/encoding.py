"""What every payload begins with, and what is checked of it.

    offset  0  2  magic "hz"      5  1  reserved, 0
            2  1  version         6  2  parameter  of the codec: a block's size, a rank
            3  1  codec           8  8  elements   of the tensor
            4  1  dtype, 1: float32

A payload of codec 0 says that the tensor has a NaN or an infinity; what follows has no meaning. It has the size of one
that says more, so that receivers need not know before.

All numbers are little-endian, and so are the arrays behind the header, which start at a multiple of 16 bytes.
Both sides know the codec, its parameter and the shape, so a receiver compares the header with the one that
it would have written itself: nothing that a peer claims decides how much memory is taken.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, Bytes
from hcsim.errors import CompressionError, NotFinite, UsageError

MAGIC = b"hz"
VERSION = 2
FLOAT32 = 1
FLOAT_BYTES = 4
CHUNK = 1 << 17
"""Elements that a kernel works on at a time, so that its passes find them in the cache."""

MAGNITUDE = np.uint32(0x7FFFFFFF)
"""The bits of a float without its sign: as integers they are ordered as magnitudes, NaNs and infinities above all."""

_HEADER = struct.Struct("<2sBBBBHQ")
_FIELDS = ("magic", "version", "codec", "dtype", "reserved byte", "parameter", "number of elements")
HEADER_BYTES = _HEADER.size


class Codec(IntEnum):
    """Who wrote a payload. Numbers from 128 on are those of plugins: see `plugin_codec`."""

    NONE = 1
    TOPK = 2
    RANDOMK = 3
    FP16 = 4
    BF16 = 5
    INT8 = 6
    ONEBIT = 7
    POWERSGD = 8
    ZSTD = 9


def plugin_codec(name: str) -> int:
    """The number of a plugin's codec: a guard against mistakes, in which two plugins may share a number."""
    return 128 + crc32(name.encode()) % 128


def header(codec: int, parameter: int, elements: int) -> bytes:
    """The first bytes of a payload."""
    return _HEADER.pack(MAGIC, VERSION, codec, FLOAT32, 0, parameter, elements)


NOT_FINITE = _HEADER.pack(MAGIC, VERSION, 0, FLOAT32, 0, 0, 0)


def without_values(size_bytes: int) -> Bytes:
    """A payload for a tensor that is not finite."""
    payload = np.zeros(size_bytes, np.uint8)
    payload[:HEADER_BYTES] = np.frombuffer(NOT_FINITE, np.uint8)
    return payload


def has_values(payload: Bytes) -> bool:
    """Whether it is another payload than `without_values`."""
    return payload[:HEADER_BYTES].tobytes() != NOT_FINITE


def check_header(payload: Bytes, expected: bytes, name: str) -> None:
    """Refuse a payload that another codec wrote, or for another tensor."""
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


def check_size(payload: Bytes, expected_bytes: int, name: str) -> None:
    """Refuse a payload that was cut off or that goes on."""
    if payload.size != expected_bytes:
        raise CompressionError(f"the payload has {payload.size} bytes, but {expected_bytes} were expected", name)


def is_finite(array: npt.NDArray[np.float32]) -> bool:
    """Whether a flat array has neither NaN nor infinity."""
    largest = np.zeros(min(1, array.size), np.float32)
    kernels.largest(array, largest, max(1, array.size))
    return bool(np.isfinite(largest).all())


def check_input(array: Array, name: str) -> None:
    """Refuse to encode what no peer would accept."""
    if not is_finite(array):
        raise not_finite(array, name)


def not_finite(array: Array, name: str) -> NotFinite:
    """Says where the first NaN or infinity of the input is."""
    at = int(np.argmin(np.isfinite(array)))
    return NotFinite(
        f"element {at} of the tensor is {array[at]}, which cannot be sent; has the training diverged?", name
    )


def check_decoded(values: npt.NDArray[np.float32], name: str) -> None:
    """Refuse a payload that would put a NaN or an infinity into a tensor."""
    if not is_finite(values):
        raise decodes_badly(name)


def decodes_badly(name: str) -> CompressionError:
    """Says that a payload would put a NaN or an infinity into a tensor."""
    return CompressionError("the payload decodes to a NaN or an infinity", name)


def as_array(tensor: Any, name: str) -> Array:
    """The tensor's own memory as a flat array: numpy, or torch on the CPU; contiguous float32 alone."""
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
