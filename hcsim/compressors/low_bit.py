"""Few bits for every element: `onebit` and `int8`.

`onebit`: every element's sign, and one magnitude for the tensor: the mean of all magnitudes.

    payload: the magnitude (f32), then a bit for each element, the lowest bit of a byte first; 1 is negative

It decodes to ± the magnitude, the value with the least squared error (Seide et al. 2014, with one mean in place
of two). Zero counts as positive. It is only useful with error feedback. The magnitude is rounded to 12
significant bits: sums of it are then exact, and encoding a decoded tensor gives the same again.

`int8`: every element in one byte, as a multiple of a scale from −127 to 127.

    payload: one scale (f32) for each block, then n multiples (i8)
    `int8` has one block, the tensor; `int8:block=256` has blocks of 256 elements; `int8:stochastic` see below

The scale is the block's largest magnitude / 127. It is rounded down to 17 significant bits, so that every
product of a multiple and the scale is exact: all machines decode to the same bits, and encoding again changes
nothing. Rounding is to the nearest, ties to even: the error is at most half the scale. A stochastic encoder
rounds up with the probability of the fraction (to 2⁻¹⁶), so that it is unbiased; each rank draws its own
numbers. A block whose scale would be subnormal (below 1.5·10⁻³⁶) is sent as zeros.
"""

from __future__ import annotations

import math
from math import prod

import numpy as np

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, ByteArray, Ident, PayloadKind, TensorShape
from hcsim.compressors.codec import WORK, ChunkedCompressor, CodecCost, Unpack
from hcsim.compressors.draws import bits, uniform16
from hcsim.compressors.encoding import CHUNK, FLOAT_BYTES, HEADER_BYTES, Codec, check_input, not_finite
from hcsim.compressors.kernels.plain import Multiples
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


LARGEST = 127
_LIMITS = np.finfo(np.float32)
_DROPPED_BITS = np.uint32((1 << 7) - 1)
"""Those of a float's 24 significant bits that a scale does not have."""


class Int8(ChunkedCompressor):
    """Smaller blocks give less error and more scales. `block` is a power of two up to 32768, or 0 for the whole
    tensor."""

    codec = Codec.INT8
    kind = PayloadKind.QUANTISED

    def __init__(self, block: int, *, stochastic: bool, seed: int, rank: int) -> None:
        settings = [f"block={block}"] * bool(block) + ["stochastic"] * stochastic
        super().__init__("int8" + ":" * bool(settings) + ",".join(settings))
        self.parameter = block
        self._stochastic = stochastic
        self._seed = seed
        self._rank = rank

    def size_bytes(self, shape: TensorShape) -> int:
        return HEADER_BYTES + FLOAT_BYTES * self._blocks(prod(shape)) + prod(shape)

    def _blocks(self, elements: int) -> int:
        return -(-elements // self.parameter) if self.parameter else min(1, elements)

    def _encode(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        payload = self._payload(of.name, shape)
        scales, multiples = self._parts(payload[HEADER_BYTES:], flat.size)
        block = self._block(flat.size)
        kernels.largest(flat, scales, block)
        if not np.isfinite(scales).all():
            raise not_finite(flat, of.name)
        scales[:] = _rounded_down(scales / np.float32(LARGEST))
        if self._stochastic:
            # Divided, not multiplied by an inverse: a whole multiple comes out whole and stays what it is.
            divisors = np.where(scales > 0, scales, np.float32(1))
            self._draw(flat, divisors, multiples, of)
        else:
            inverses = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
            kernels.quantise(flat, inverses, multiples, block)
        return payload

    def _draw(self, flat: Array, divisors: Array, multiples: Multiples, of: Ident) -> None:
        source = bits(self._seed, "int8", self._rank, of.name, of.step)
        for lo in range(0, flat.size, CHUNK):
            piece = flat[lo : lo + CHUNK]
            kernels.quantise_at_random(
                piece,
                divisors[self._blocks_of(lo, piece.size)],
                uniform16(source, piece.size),
                multiples[lo : lo + CHUNK],
                self._block(piece.size),
            )

    def _unpacker(self, body: ByteArray, elements: int, of: Ident) -> Unpack:
        scales, multiples = self._parts(body, elements)
        # Written so that a NaN fails too.
        if not ((scales >= 0) & (scales <= _LIMITS.max / LARGEST)).all():
            raise CompressionError("the payload has a scale that no encoder writes", of.name)
        # No encoder writes −128; it does no harm but where it makes an infinity.
        if (scales > _LIMITS.max / 128).any() and multiples.min() < -LARGEST:
            raise CompressionError("the payload decodes to an infinity", of.name)

        def unpack(lo: int, into: Array) -> None:
            piece = multiples[lo : lo + into.size]
            kernels.dequantise(piece, scales[self._blocks_of(lo, into.size)], into, self._block(into.size))

        return unpack

    def _block(self, elements: int) -> int:
        """Return the block size, which is `elements` if the tensor or chunk is one block."""
        return self.parameter or max(1, elements)

    def _blocks_of(self, lo: int, elements: int) -> slice:
        if not self.parameter:
            return slice(0, 1)
        return slice(lo // self.parameter, -(-(lo + elements) // self.parameter))

    def _parts(self, body: ByteArray, elements: int) -> tuple[Array, Multiples]:
        middle = FLOAT_BYTES * self._blocks(elements)
        return body[:middle].view(np.float32), body[middle:].view(np.int8)

    def _factors(self) -> CodecCost:
        if self._stochastic:
            return WORK["int8:stochastic"]
        return WORK["int8:block" if self.parameter else "int8"]


def _rounded_down(scales: Array) -> Array:
    down = (scales.view(np.uint32) & ~_DROPPED_BITS).view(np.float32)
    return np.where(down >= _LIMITS.tiny, down, np.float32(0))
