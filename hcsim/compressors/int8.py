"""`int8`: every element in one byte, as a whole multiple of a scale from −127 to 127.

    payload: one scale (f32) for each block, then n multiples (i8)
    `int8` has one block, the tensor; `int8:block=256` has blocks of 256 elements; `int8:stochastic` see below

The scale is the block's largest magnitude / 127. It is rounded down to 17 significant bits, so that every product
of a multiple and the scale is exact: all machines decode to the same bits, and encoding again changes nothing.
Rounding is to the nearest, ties to even: the error is at most half the scale. A stochastic encoder rounds up with
the probability of the fraction (to 2⁻¹⁶), so that it is right on average; each rank draws its own.
A block so small that its scale would be a subnormal number (below 1.5·10⁻³⁶) is sent as zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import numpy.typing as npt

from hcsim.compressors.base import Array, Bytes, Ident, Kind, Shape
from hcsim.compressors.codec import ChunkedCompressor, Unpack
from hcsim.compressors.draws import bits, uniform16
from hcsim.compressors.encoding import CHUNK, FLOAT_BYTES, HEADER_BYTES, Codec, not_finite
from hcsim.compressors.work import WORK, Factors
from hcsim.errors import CompressionError

LARGEST = 127
_LIMITS = np.finfo(np.float32)
_DROPPED_BITS = np.uint32((1 << 7) - 1)
"""Of a float's 24 significant bits, those that a scale does not have."""
_GRAIN = np.float32(2.0**-16)


class Int8(ChunkedCompressor):
    """Smaller blocks: less error, more scales. `block` is a power of two up to 32768, or 0 for the whole tensor."""

    codec = Codec.INT8
    kind = Kind.QUANTISED

    def __init__(self, block: int, *, stochastic: bool, seed: int, rank: int) -> None:
        settings = [f"block={block}"] * bool(block) + ["stochastic"] * stochastic
        super().__init__("int8" + ":" * bool(settings) + ",".join(settings))
        self.parameter = block
        self._stochastic = stochastic
        self._seed = seed
        self._rank = rank

    def size_bytes(self, shape: Shape) -> int:
        """A byte for each element, a float for each block."""
        return HEADER_BYTES + FLOAT_BYTES * self._blocks(prod(shape)) + prod(shape)

    def _blocks(self, elements: int) -> int:
        return -(-elements // self.parameter) if self.parameter else min(1, elements)

    def _encode(self, flat: Array, shape: Shape, of: Ident) -> Bytes:
        payload = self._payload(of.name, shape)
        scales, multiples = self._parts(payload[HEADER_BYTES:], flat.size)
        scales[:] = self._scales(flat, of)
        quantise = self._stochastically(scales, of) if self._stochastic else self._to_nearest(scales)
        for lo in range(0, flat.size, CHUNK):
            piece = flat[lo : lo + CHUNK]
            multiples[lo : lo + CHUNK] = quantise(piece, lo)
        return payload

    def _to_nearest(self, scales: Array) -> Callable[[Array, int], Array]:
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)

        def quantise(piece: Array, lo: int) -> Array:
            quotient = self.scratch[: piece.size]
            self._scale(np.multiply, piece, inverse, lo, quotient)
            return np.rint(quotient, out=quotient)

        return quantise

    def _stochastically(self, scales: Array, of: Ident) -> Callable[[Array, int], Array]:
        draws = bits(self._seed, "int8", self._rank, of.name, of.step)
        divisors = np.where(scales > 0, scales, np.float32(1))
        fractions = np.empty(CHUNK, np.float32)

        def quantise(piece: Array, lo: int) -> Array:
            quotient = self.scratch[: piece.size]
            # Divided, not multiplied by an inverse: a whole multiple comes out whole and stays what it is.
            self._scale(np.divide, piece, divisors, lo, quotient)
            np.clip(quotient, -LARGEST, LARGEST, out=quotient)
            fraction = np.multiply(uniform16(draws, piece.size), _GRAIN, out=fractions[: piece.size])
            quotient += fraction
            quotient += _GRAIN / 2
            return np.floor(quotient, out=quotient)

        return quantise

    def _unpacker(self, body: Bytes, elements: int, of: Ident) -> Unpack:
        scales, multiples = self._parts(body, elements)
        # Written so that a NaN fails too.
        if not ((scales >= 0) & (scales <= _LIMITS.max / LARGEST)).all():
            raise CompressionError("the payload has a scale that no encoder writes", of.name)
        # No encoder writes −128; it does no harm but where it makes an infinity.
        if (scales > _LIMITS.max / 128).any() and multiples.min() < -LARGEST:
            raise CompressionError("the payload decodes to an infinity", of.name)

        def unpack(lo: int, into: Array) -> None:
            into[:] = multiples[lo : lo + into.size]
            self._scale(np.multiply, into, scales, lo, into)

        return unpack

    def _parts(self, body: Bytes, elements: int) -> tuple[Array, npt.NDArray[np.int8]]:
        middle = FLOAT_BYTES * self._blocks(elements)
        return body[:middle].view(np.float32), body[middle:].view(np.int8)

    def _scale(self, operation: np.ufunc, piece: Array, factors: Array, lo: int, out: Array) -> None:
        """Multiply or divide the elements from `lo` on by their block's factor."""
        if not self.parameter:
            operation(piece, factors[0], out=out)
            return
        block, first = self.parameter, lo // self.parameter
        whole = piece.size // block
        end = whole * block
        operation(
            piece[:end].reshape(whole, block),
            factors[first : first + whole, None],
            out=out[:end].reshape(whole, block),
        )
        if end < piece.size:
            operation(piece[end:], factors[first + whole], out=out[end:])

    def _scales(self, flat: Array, of: Ident) -> Array:
        if not flat.size:
            return np.empty(0, np.float32)
        chunks = (flat[lo : lo + CHUNK] for lo in range(0, flat.size, CHUNK))
        if self.parameter:
            largest = np.concatenate([self._largest_of_blocks(chunk) for chunk in chunks])
        else:
            # numpy's maximum keeps a NaN, Python's does not.
            largest = np.max([np.maximum(chunk.max(), -chunk.min()) for chunk in chunks], keepdims=True)
        if not np.isfinite(largest).all():
            raise not_finite(flat, of.name)
        return _rounded_down(np.divide(largest, np.float32(LARGEST), dtype=np.float32))

    def _largest_of_blocks(self, chunk: Array) -> Array:
        magnitudes = np.abs(chunk, out=self.scratch[: chunk.size])
        end = chunk.size // self.parameter * self.parameter
        largest = magnitudes[:end].reshape(-1, self.parameter).max(axis=1)
        return np.append(largest, magnitudes[end:].max()) if end < chunk.size else largest

    def _factors(self) -> Factors:
        if self._stochastic:
            return WORK["int8:stochastic"]
        return WORK["int8:block" if self.parameter else "int8"]


def _rounded_down(scales: Array) -> Array:
    """To 17 significant bits; and no subnormal numbers."""
    down = (scales.view(np.uint32) & ~_DROPPED_BITS).view(np.float32)
    return np.where(down >= _LIMITS.tiny, down, np.float32(0))
