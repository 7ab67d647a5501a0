"""`fp16` and `bf16`: every element in half the bytes, rounded to the nearest, ties to even.

fp16 has 11 significant bits and a narrow range: below 6·10⁻⁸ there is only zero, above 65504 there is nothing.
bf16 has 8 significant bits and the range of float32. A value beyond the range is sent as the largest one,
not as an infinity: what was cut off is then finite, and error feedback can send it later.

torch converts at the speed of memory where numpy takes ten times as long; it is imported when the first tensor
is converted, not for sizes.
"""

from __future__ import annotations

from math import prod
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from hcsim.compressors.base import Array, Bytes, Ident, Kind, Shape
from hcsim.compressors.codec import ChunkedCompressor, Unpack
from hcsim.compressors.encoding import HEADER_BYTES, Codec, check_input, decodes_badly

Scalar = TypeVar("Scalar", bound=np.generic)
Halves = npt.NDArray[np.int16]
HALF_BYTES = 2
_SIGN = 0x8000


class Cast(ChunkedCompressor):
    """What both have in common."""

    kind = Kind.QUANTISED
    dtype: ClassVar[str]
    """As torch calls it."""
    infinity: ClassVar[int]
    """As bits of the narrow type: NaNs are above it, finite numbers below."""
    chunk = 1 << 20

    def size_bytes(self, shape: Shape) -> int:
        """Two bytes for each element."""
        return HEADER_BYTES + HALF_BYTES * prod(shape)

    def _encode(self, flat: Array, shape: Shape, of: Ident) -> Bytes:
        payload = self._payload(of.name, shape)
        halves = payload[HEADER_BYTES:].view(np.int16)
        _narrow(flat, halves, self.dtype)
        if not self._is_finite(halves):
            self._saturate(flat, halves, of)
        return payload

    def _unpacker(self, body: Bytes, elements: int, of: Ident) -> Unpack:
        halves = body.view(np.int16)
        if not self._is_finite(halves):
            raise decodes_badly(of.name)
        return lambda lo, into: _widen(halves[lo : lo + into.size], into, self.dtype)

    def _is_finite(self, halves: Halves) -> bool:
        """By their bits: as signed numbers positive infinities and NaNs are largest, as unsigned ones negative ones."""
        largest, most_negative = halves.max(initial=0), halves.view(np.uint16).max(initial=0)
        return bool(largest < self.infinity and most_negative < _SIGN + self.infinity)

    def _saturate(self, flat: Array, halves: Halves, of: Ident) -> None:
        check_input(flat, of.name)
        largest = self.infinity - 1
        beyond = np.flatnonzero((halves & np.int16(0x7FFF)) >= self.infinity)
        bits = np.where(flat[beyond] < 0, np.uint16(_SIGN + largest), np.uint16(largest))
        halves[beyond] = bits.view(np.int16)


def _narrow(flat: Array, halves: Halves, dtype: str) -> None:
    import torch

    torch.from_numpy(halves).view(getattr(torch, dtype)).copy_(torch.from_numpy(_writable(flat)))


def _widen(halves: Halves, into: Array, dtype: str) -> None:
    import torch

    torch.from_numpy(into).copy_(torch.from_numpy(_writable(halves)).view(getattr(torch, dtype)))


def _writable(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """torch warns of memory that it may not write to, even where it only reads."""
    return array if array.flags.writeable else array.copy()


class Fp16(Cast):
    """Half precision."""

    codec = Codec.FP16
    dtype = "float16"
    infinity = 0x7C00


class Bf16(Cast):
    """The upper half of a float32."""

    codec = Codec.BF16
    dtype = "bfloat16"
    infinity = 0x7F80
