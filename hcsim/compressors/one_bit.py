"""`onebit`: one bit for every element.

Every element's sign, and one magnitude for the tensor: the mean of all magnitudes.

    payload: the magnitude (f32), then a bit for each element, the lowest bit of a byte first; 1 is negative

It decodes to ± the magnitude, the value with the least squared error (Seide et al. 2014, with one mean in place
of two). Zero counts as positive. It is only useful with error feedback. The magnitude is rounded to 12
significant bits: sums of it are then exact, and encoding a decoded tensor gives the same again.
"""

from __future__ import annotations

import math
from math import prod

import numpy as np

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, ByteArray, Ident, PayloadKind, TensorShape
from hcsim.compressors.codec import ChunkedCompressor, Unpack
from hcsim.compressors.encoding import CHUNK, FLOAT_BYTES, HEADER_BYTES, Codec, check_input
from hcsim.errors import CompressionError

_SIGNS = 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32)
"""The signs of the eight elements, for each byte."""


class OneBit(ChunkedCompressor):
    """One bit per element: a thirty-second of the bytes."""

    codec = Codec.ONEBIT
    kind = PayloadKind.QUANTISED

    def __init__(self) -> None:
        super().__init__("onebit")

    def size_bytes(self, shape: TensorShape) -> int:
        return HEADER_BYTES + FLOAT_BYTES + -(-prod(shape) // 8)

    def _encode(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        payload = self._payload(of.name, shape)
        magnitude, packed = _parts(payload[HEADER_BYTES:])
        total = 0.0
        for lo in range(0, flat.size, CHUNK):
            piece = flat[lo : lo + CHUNK]
            subtotal = kernels.pack_signs(piece, packed[lo // 8 : (lo + CHUNK) // 8])
            total += subtotal if math.isfinite(subtotal) else self._sum_of_large(piece, flat, of)
        magnitude[0] = _rounded(total / max(1, flat.size))
        return payload

    def _sum_of_large(self, piece: Array, flat: Array, of: Ident) -> float:
        """Return the sum of magnitudes where float32 would overflow."""
        check_input(flat, of.name)
        return float(np.abs(piece).sum(dtype=np.float64))

    def _unpacker(self, body: ByteArray, elements: int, of: Ident) -> Unpack:
        (magnitude,), packed = _parts(body)
        if not 0 <= magnitude < np.inf:
            raise CompressionError(f"the payload's magnitude is {magnitude}", of.name)
        if elements % 8 and packed[-1] >> elements % 8:
            raise CompressionError("the payload has signs of more elements than the tensor has", of.name)
        decoded = _SIGNS * magnitude

        def unpack(lo: int, into: Array) -> None:
            kernels.unpack_signs(packed[lo // 8 : -(-(lo + into.size) // 8)], decoded, into)

        return unpack


def _parts(body: ByteArray) -> tuple[Array, ByteArray]:
    return body[:FLOAT_BYTES].view(np.float32), body[FLOAT_BYTES:]


def _rounded(mean: float) -> float:
    fraction, exponent = math.frexp(mean)
    return min(math.ldexp(round(math.ldexp(fraction, 12)), exponent - 12), float(np.finfo(np.float32).max))
