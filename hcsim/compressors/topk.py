"""`topk:RATIO`: the elements of largest magnitude, with their indices.

    payload: k indices (u32, ascending), k values (f32); k = max(1, ⌈ratio · n⌉) for each tensor

Exactly k elements are sent; among equals those with the lowest indices, so the choice is deterministic. A full
selection reads the tensor many times. Instead a threshold is estimated from a sample with a fixed stride, a
little too low on purpose. One pass collects the elements that reach it, and the exact choice is made among
these few. Where the estimate was too high after all, the choice is made among all.

Magnitudes are compared as integers (the bits of a float without its sign). The order is the same, and a NaN or
an infinity sorts above all finite values, so checking the collected elements finds it.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod, sqrt

import numpy as np
import numpy.typing as npt

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, ByteArray, Ident, PayloadKind, TensorShape
from hcsim.compressors.codec import BaseCompressor, Mix
from hcsim.compressors.encoding import (
    FLOAT_BYTES,
    HEADER_BYTES,
    MAGNITUDE,
    Codec,
    check_decoded,
    not_finite,
)
from hcsim.errors import CompressionError, UsageError

Bits = npt.NDArray[np.uint32]
Indices = npt.NDArray[np.int64]
INFINITY = 0x7F800000
SAMPLES = 1 << 16
INDEX_BYTES = 4


class TopK(BaseCompressor):
    """A lower ratio gives fewer bytes, and leaves more unsent."""

    codec = Codec.TOPK
    kind = PayloadKind.SPARSE

    def __init__(self, ratio: Fraction) -> None:
        super().__init__(f"topk:{float(ratio):g}")
        self._ratio = ratio
        self._found = np.empty((2, 0), np.uint32)

    def size_bytes(self, shape: TensorShape) -> int:
        return HEADER_BYTES + (INDEX_BYTES + FLOAT_BYTES) * count_of(self._ratio, prod(shape))

    def _encode(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        if flat.size >= 1 << 32:
            raise UsageError(f"{of.name}: {flat.size} elements are too many for indices of 32 bits")
        count = count_of(self._ratio, flat.size)
        payload = self._payload(of.name, shape)
        indices, values = _parts(payload[HEADER_BYTES:], count)
        indices[:], values.view(np.uint32)[:] = self._largest(flat, count, of)
        return payload

    def _mix_body(self, body: ByteArray, flat: Array, shape: TensorShape, of: Ident, mix: Mix) -> None:
        count = count_of(self._ratio, flat.size)
        indices, values = _parts(body, count)
        if not (indices[1:] > indices[:-1]).all():
            raise CompressionError("the payload's indices are not ascending", of.name)
        if count and indices[-1] >= flat.size:
            raise CompressionError(f"index {indices[-1]} is beyond the tensor's {flat.size} elements", of.name)
        check_decoded(values, of.name)
        scatter(flat, indices, values, mix)

    def _largest(self, flat: Array, count: int, of: Ident) -> tuple[Bits, Bits]:
        """Return the indices of the elements of largest magnitude, ascending, and their bits."""
        bits = flat.view(np.uint32)
        least = _guess(bits, count)
        indices, found = self._reaching(flat, least, count) if least else (np.empty(0, np.uint32), bits[:0])
        if indices.size < count:
            indices, found = np.arange(flat.size, dtype=np.uint32), bits
        magnitudes = found & MAGNITUDE
        if magnitudes.max(initial=0) >= INFINITY:
            raise not_finite(flat, of.name)
        if indices.size == count:
            return indices, found
        chosen = _largest_of(magnitudes, count)
        return indices[chosen], found[chosen]

    def _reaching(self, flat: Array, least: int, count: int) -> tuple[Bits, Bits]:
        """Return the ascending indices of magnitudes of at least `least`, and their bits."""
        room = 2 * count
        while True:
            indices, found = self._room(room)
            reaching = kernels.reaching(flat, least, indices, found)
            if reaching <= indices.size:
                return indices[:reaching], found[:reaching]
            room = reaching

    def _room(self, size: int) -> tuple[Bits, Bits]:
        """Return two reused arrays, since fresh pages cost more than filling them."""
        if self._found.shape[1] < size:
            self._found = np.empty((2, size), np.uint32)
        return self._found[0], self._found[1]


def _parts(body: ByteArray, count: int) -> tuple[Bits, Array]:
    middle = INDEX_BYTES * count
    return body[:middle].view(np.uint32), body[middle:].view(np.float32)


def _guess(bits: Bits, count: int) -> int:
    """Estimate a magnitude that slightly more than `count` elements reach; 0 where estimating does not pay."""
    if bits.size < 2 * SAMPLES:
        return 0
    sample = bits[:: bits.size // SAMPLES | 1] & MAGNITUDE
    expected = sample.size * count / bits.size
    rank = int(expected + 4 * sqrt(expected) + 4)
    if rank >= sample.size:
        return 0
    # At least one, so that where most elements are zero only the others are collected.
    return max(1, int(np.partition(sample, sample.size - rank)[sample.size - rank]))


def _largest_of(magnitudes: Bits, count: int) -> Indices:
    """Return the ascending indices of the largest magnitudes; of those equal to the smallest one taken, the
    first."""
    least = np.partition(magnitudes, magnitudes.size - count)[magnitudes.size - count]
    taken = magnitudes > least
    ties = np.flatnonzero(magnitudes == least)[: count - np.count_nonzero(taken)]
    taken[ties] = True
    return np.flatnonzero(taken)


def count_of(ratio: Fraction, elements: int) -> int:
    """Return k = max(1, ⌈ratio · n⌉), so that something is sent of every tensor that is not empty. The ratio is
    exact, as it was written."""
    rounded_up = -(-elements * ratio.numerator // ratio.denominator)  # a product of fractions takes four times as long
    return min(elements, max(1, rounded_up))


def scatter(flat: Array, indices: npt.NDArray[np.integer], values: Array, mix: Mix) -> None:
    """Combine values with the elements at their indices."""
    if mix is None:
        kernels.scatter(indices.astype(np.int64, copy=False), values, flat)
    else:
        flat[indices] = mix(flat[indices], values)
