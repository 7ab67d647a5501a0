"""Few bits for every element, and a scale for every block of elements: `int8`, `int4` and `int2`.

    payload: one scale (f32) for each block, then a code for each of the n elements

`int8` has one block, the tensor; the others have blocks of 256 elements, since one large element costs all others
of its block their precision. `block=64` sets another size.

`int8`, `int4`: a code is a multiple of the scale, from −127 to 127 in a byte, or from −7 to 7 in half a byte (the
first of two in the lower half).

The scale is the block's largest magnitude / 127 (7). It is rounded down to 17 significant bits, so that every
product of a multiple and the scale is exact: all machines decode to the same bits, and encoding again changes
nothing. Rounding is to the nearest, ties to even: the error is at most half the scale. A `stochastic` encoder
rounds up with the probability of the fraction (to 2⁻¹⁶), so that it is unbiased; each rank draws its own
numbers. A block whose scale would be subnormal (below 1.5·10⁻³⁶) is sent as zeros.

`int2`: a code is one of −3, −1, 1 and 3 times the scale, as 0 to 3 in two bits (the first in the lowest). Zero has
no level of its own. An element is a 3 if its magnitude is above 5/4 of the block's mean magnitude, which is the
best border for normally distributed ones (Max, "Quantizing for minimum distortion", 1960). The scale is then the
one with the least squared error for these codes, rounded as above.
"""

from __future__ import annotations

from math import prod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, ByteArray, Ident, PayloadKind, TensorShape
from hcsim.compressors.codec import WORK, ChunkedCompressor, CodecCost, Unpack
from hcsim.compressors.draws import bits, uniform16
from hcsim.compressors.encoding import CHUNK, FLOAT_BYTES, HEADER_BYTES, Codec, not_finite
from hcsim.compressors.kernels.plain import Multiples
from hcsim.errors import CompressionError

USUAL_BLOCK = 256
"""The block size of codes that are coarser than a byte."""
_LIMITS = np.finfo(np.float32)
_DROPPED_BITS = np.uint32((1 << 7) - 1)
"""Those of a float's 24 significant bits that a scale does not have."""


class BlockScaled(ChunkedCompressor):
    """Smaller blocks give less error and more scales. A block is a power of two up to 32768, or 0 for the whole
    tensor."""

    kind = PayloadKind.QUANTISED
    bits: ClassVar[int]
    """Those of a code."""
    largest: ClassVar[int]
    """The largest magnitude of a code."""

    def __init__(self, spec: str, block: int) -> None:
        super().__init__(spec)
        self.parameter = block

    def size_bytes(self, shape: TensorShape) -> int:
        elements = prod(shape)
        return HEADER_BYTES + FLOAT_BYTES * self._blocks(elements) + -(-elements * self.bits // 8)

    def _parts(self, body: ByteArray, elements: int) -> tuple[Array, ByteArray]:
        middle = FLOAT_BYTES * self._blocks(elements)
        return body[:middle].view(np.float32), body[middle:]

    def _checked(self, body: ByteArray, elements: int, of: Ident) -> tuple[Array, ByteArray]:
        """Return the parts of a payload of another rank."""
        scales, codes = self._parts(body, elements)
        # Written so that a NaN fails too.
        if not ((scales >= 0) & (scales <= _LIMITS.max / self.largest)).all():
            raise CompressionError("the payload has a scale that no encoder writes", of.name)
        unused = -elements * self.bits % 8
        if unused and codes[-1] >> (8 - unused):
            raise CompressionError("the payload has codes of more elements than the tensor has", of.name)
        return scales, codes

    def _blocks(self, elements: int) -> int:
        return -(-elements // self.parameter) if self.parameter else min(1, elements)

    def _block(self, elements: int) -> int:
        """Return the block size, which is `elements` if the tensor or chunk is one block."""
        return self.parameter or max(1, elements)

    def _blocks_of(self, lo: int, elements: int) -> slice:
        if not self.parameter:
            return slice(0, 1)
        return slice(lo // self.parameter, -(-(lo + elements) // self.parameter))

    def _bytes_of(self, lo: int, elements: int) -> slice:
        return slice(lo * self.bits // 8, -(-(lo + elements) * self.bits // 8))


class Int8(BlockScaled):
    """A byte for each element: a multiple of the scale."""

    codec = Codec.INT8
    bits = 8
    largest = 127
    name: ClassVar[str] = "int8"
    usual_block: ClassVar[int] = 0

    def __init__(self, block: int, *, stochastic: bool, seed: int, rank: int) -> None:
        settings = [f"block={block}"] * (block != self.usual_block) + ["stochastic"] * stochastic
        super().__init__(self.name + ":" * bool(settings) + ",".join(settings), block)
        self._stochastic = stochastic
        self._seed = seed
        self._rank = rank

    def _encode(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        payload = self._payload(of.name, shape)
        scales, codes = self._parts(payload[HEADER_BYTES:], flat.size)
        kernels.largest(flat, scales, self._block(flat.size))
        if not np.isfinite(scales).all():
            raise not_finite(flat, of.name)
        scales[:] = _rounded_down(scales / np.float32(self.largest))
        if self._stochastic:
            self._draw(flat, scales, codes, of)
        else:
            self._round(flat, scales, codes)
        return payload

    def _round(self, flat: Array, scales: Array, codes: ByteArray) -> None:
        inverses = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        kernels.quantise(flat, inverses, codes.view(np.int8), self._block(flat.size))

    def _draw(self, flat: Array, scales: Array, codes: ByteArray, of: Ident) -> None:
        # Divided, not multiplied by an inverse: a whole multiple comes out whole and stays what it is.
        divisors = np.where(scales > 0, scales, np.float32(1))
        source = bits(self._seed, self.name, self._rank, of.name, of.step)
        for lo in range(0, flat.size, CHUNK):
            piece = flat[lo : lo + CHUNK]
            draws, some = uniform16(source, piece.size), divisors[self._blocks_of(lo, piece.size)]
            self._draw_chunk(piece, some, draws, codes[self._bytes_of(lo, piece.size)])

    def _draw_chunk(self, piece: Array, divisors: Array, draws: npt.NDArray[np.uint16], codes: ByteArray) -> None:
        kernels.quantise_at_random(piece, divisors, draws, codes.view(np.int8), self._block(piece.size))

    def _unpacker(self, body: ByteArray, elements: int, of: Ident) -> Unpack:
        scales, codes = self._checked(body, elements, of)
        self._check_multiples(scales, codes, of)

        def unpack(lo: int, into: Array) -> None:
            multiples = self._multiples(codes[self._bytes_of(lo, into.size)], into.size)
            kernels.dequantise(multiples, scales[self._blocks_of(lo, into.size)], into, self._block(into.size))

        return unpack

    def _check_multiples(self, scales: Array, codes: ByteArray, of: Ident) -> None:
        # No encoder writes −128; it does no harm but where it makes an infinity.
        if (scales > _LIMITS.max / 128).any() and codes.view(np.int8).min() < -self.largest:
            raise CompressionError("the payload decodes to an infinity", of.name)

    def _multiples(self, codes: ByteArray, elements: int) -> Multiples:
        return codes.view(np.int8)

    def _factors(self) -> CodecCost:
        if self._stochastic:
            return WORK["int8:stochastic"]
        return WORK["int8:block" if self.parameter else "int8"]


class Int4(Int8):
    """Half a byte for each element: a multiple of the scale."""

    codec = Codec.INT4
    bits = 4
    largest = 7
    name = "int4"
    usual_block = USUAL_BLOCK

    def _round(self, flat: Array, scales: Array, codes: ByteArray) -> None:
        inverses = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        for lo in range(0, flat.size, CHUNK):
            piece = flat[lo : lo + CHUNK]
            multiples = np.empty(piece.size, np.int8)
            kernels.quantise(piece, inverses[self._blocks_of(lo, piece.size)], multiples, self._block(piece.size))
            _pack_halves(multiples, codes[self._bytes_of(lo, piece.size)])

    def _draw_chunk(self, piece: Array, divisors: Array, draws: npt.NDArray[np.uint16], codes: ByteArray) -> None:
        multiples = np.empty(piece.size, np.int8)
        kernels.quantise_at_random(piece, divisors, draws, multiples, self._block(piece.size))
        # The largest element may exceed the largest multiple by what its scale was rounded down.
        _pack_halves(multiples.clip(-self.largest, self.largest), codes)

    def _check_multiples(self, scales: Array, codes: ByteArray, of: Ident) -> None:
        # No encoder writes −8; it does no harm but where it makes an infinity.
        if (scales > _LIMITS.max / 8).any() and (((codes & 15) == 8) | (codes >> 4 == 8)).any():
            raise CompressionError("the payload decodes to an infinity", of.name)

    def _multiples(self, codes: ByteArray, elements: int) -> Multiples:
        both = _HALVES[codes].view(np.int8)
        return both[:elements]

    def _factors(self) -> CodecCost:
        rounded = WORK["int4"]
        if not self._stochastic:
            return rounded
        drawing = WORK["int8:stochastic"].encode - WORK["int8:block"].encode
        return CodecCost(rounded.encode + drawing, rounded.decode)


def _pack_halves(multiples: Multiples, codes: ByteArray) -> None:
    halves = multiples.view(np.uint8) & np.uint8(15)
    codes[:] = 0
    codes[: halves.size // 2] = halves[1::2] << 4
    codes |= halves[::2]


def _signed(half: int) -> int:
    return half - 16 if half > 7 else half


_HALVES = np.array([(_signed(code & 15) & 255) | (_signed(code >> 4) & 255) << 8 for code in range(256)], "<u2")
"""The two multiples of each byte, as two bytes."""


class Int2(BlockScaled):
    """Two bits for each element: its sign, and which of two magnitudes it has."""

    codec = Codec.INT2
    bits = 2
    largest = 3

    def __init__(self, block: int) -> None:
        super().__init__("int2" if block == USUAL_BLOCK else f"int2:block={block}", block)

    def _encode(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        payload = self._payload(of.name, shape)
        scales, codes = self._parts(payload[HEADER_BYTES:], flat.size)
        for lo in range(0, flat.size, self._span(flat.size)):
            piece = flat[lo : lo + self._span(flat.size)]
            exact, levels = _two_levels(piece, self._block(piece.size))
            if not np.isfinite(exact).all():
                raise not_finite(flat, of.name)
            scale = np.minimum(exact, float(_LIMITS.max) / 3).astype(np.float32)
            scales[self._blocks_of(lo, piece.size)] = _rounded_down(scale)
            codes[self._bytes_of(lo, piece.size)] = _pack_quarters(levels)
        return payload

    def _span(self, elements: int) -> int:
        """Return the number of elements to encode at a time."""
        return CHUNK if self.parameter else max(1, elements)

    def _unpacker(self, body: ByteArray, elements: int, of: Ident) -> Unpack:
        scales, codes = self._checked(body, elements, of)

        def unpack(lo: int, into: Array) -> None:
            multiples = _QUARTERS[codes[self._bytes_of(lo, into.size)]].view(np.int8)[: into.size]
            kernels.dequantise(multiples, scales[self._blocks_of(lo, into.size)], into, self._block(into.size))

        return unpack


_BORDER = 1.25
"""By how much a large magnitude exceeds the mean."""


def _two_levels(piece: Array, block: int) -> tuple[npt.NDArray[np.float64], ByteArray]:
    """Return the scales of the blocks and the elements' codes, from 0 to 3. The scale of a block with a NaN or an
    infinity is not finite."""
    blocks = -(-piece.size // block)
    magnitudes = np.zeros((blocks, block))
    magnitudes.reshape(-1)[: piece.size] = np.abs(piece)
    counts = np.full(blocks, block)
    counts[-1] = piece.size - (blocks - 1) * block
    with np.errstate(invalid="ignore"):
        borders = _BORDER / counts * magnitudes.sum(axis=1)
        is_large = magnitudes > borders[:, None]
        weighted = np.where(is_large, 3 * magnitudes, magnitudes).sum(axis=1)
        scales: npt.NDArray[np.float64] = weighted / (counts + 8 * np.count_nonzero(is_large, axis=1))
    level = is_large.reshape(-1)[: piece.size].astype(np.uint8)
    return scales, np.where(piece < 0, np.uint8(1) - level, np.uint8(2) + level)


def _pack_quarters(codes: ByteArray) -> ByteArray:
    whole = np.zeros(-(-codes.size // 4) * 4, np.uint8)
    whole[: codes.size] = codes
    first, second, third, fourth = (whole[at::4] << np.uint8(2 * at) for at in range(4))
    packed: ByteArray = first | second | third | fourth
    return packed


_QUARTERS = np.array(
    [sum((2 * (code >> at & 3) - 3 & 255) << 4 * at for at in (0, 2, 4, 6)) for code in range(256)], "<u4"
)
"""The four multiples of each byte, as four bytes."""


def _rounded_down(scales: Array) -> Array:
    down = (scales.view(np.uint32) & ~_DROPPED_BITS).view(np.float32)
    return np.where(down >= _LIMITS.tiny, down, np.float32(0))
