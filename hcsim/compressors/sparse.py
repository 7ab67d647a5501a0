"""A few elements of a tensor: `topk:RATIO` and `randomk:RATIO`, with k = max(1, ⌈ratio · n⌉) for each tensor.

`topk`: the elements of largest magnitude, with their indices.

    payload: k indices (u32, ascending), k values (f32)

Exactly k elements are sent; among equals those with the lowest indices, so the choice is deterministic. A full
selection reads the tensor many times. Instead a threshold is estimated from a sample with a fixed stride, a
little too low on purpose. One pass collects the elements that reach it, and the exact choice is made among
these few. Where the estimate was too high after all, the choice is made among all.

Magnitudes are compared as integers (the bits of a float without its sign). The order is the same, and a NaN or
an infinity sorts above all finite values, so checking the collected elements finds it.

`randomk`: elements chosen at random, the same on all ranks, so that they can be summed. The choice follows from
the seed, the tensor's name and the step, and is not sent.

Without error feedback, values are scaled by n / k, so that the estimate is unbiased. With error feedback they
are not scaled: the rest is sent later, and scaling as well would deliver every gradient n / k times over. Error
feedback asks for the unscaled variant itself (`for_feedback`).

For a large tensor (8 to 67 million elements) of which little is sent (one in 32 or less), only the sent
elements are read. `encode` then misses a NaN among the rest, which has no effect. Where the rest matters (the
residual of error feedback, the remainder of a sum), all elements are checked.
"""

from __future__ import annotations

from fractions import Fraction
from math import isfinite, prod, sqrt

import numpy as np
import numpy.typing as npt

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, ByteArray, Ident, PayloadKind, ReductionRounds, TensorShape
from hcsim.compressors.codec import BaseCompressor, Mix
from hcsim.compressors.draws import BitmaskChoice, Chooser, IndexChoice, bits
from hcsim.compressors.encoding import (
    FLOAT_BYTES,
    HEADER_BYTES,
    MAGNITUDE,
    Codec,
    check_decoded,
    check_input,
    not_finite,
)
from hcsim.errors import CompressionError, NotFinite, UsageError

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


class RandomK(BaseCompressor):
    """A lower ratio gives fewer bytes and more noise."""

    codec = Codec.RANDOMK
    kind = PayloadKind.LINEAR

    def __init__(self, ratio: Fraction, seed: int, *, scaled: bool = True) -> None:
        super().__init__(f"randomk:{float(ratio):g}")
        self._ratio = ratio
        self._seed = seed
        self._scaled = scaled
        self._chooser = Chooser()
        self.parameter = int(scaled)

    def for_feedback(self) -> RandomK:
        return RandomK(self._ratio, self._seed, scaled=False)

    def size_bytes(self, shape: TensorShape) -> int:
        """Return the size of the values; indices are not sent."""
        return HEADER_BYTES + sum(self.round_bytes(shape))

    def round_bytes(self, shape: TensorShape) -> tuple[int, ...]:
        return (FLOAT_BYTES * count_of(self._ratio, prod(shape)),)

    def _choice(self, elements: int, of: Ident) -> BitmaskChoice | IndexChoice:
        """Return the elements that are sent in this step; valid until the next call."""
        source = bits(self._seed, "randomk", of.name, of.step)
        return self._chooser.choice(source, elements, count_of(self._ratio, elements))

    def rounds(self, tensor: Array, of: Ident, total: Array | None = None) -> ReductionRounds:
        flat = tensor.reshape(-1)
        chosen = self._choice(flat.size, of)
        factor = np.empty(count_of(self._ratio, flat.size), np.float32)
        self._take(flat, chosen, factor, of, rest_matters=True)
        indices = chosen.numbers()
        if total is not None:
            flat[indices] -= factor
        summed = yield factor
        check_input(summed, of.name)
        scatter(flat if total is None else total.reshape(-1), indices, summed, None)

    def _take(
        self, flat: Array, chosen: BitmaskChoice | IndexChoice, values: Array, of: Ident, *, rest_matters: bool
    ) -> None:
        factor = flat.size / values.size if self._scaled and values.size else 1
        largest = chosen.take(flat, factor, values)
        if not isfinite(largest) or (rest_matters and not chosen.checks_all):
            check_input(flat, of.name)
        if not isfinite(largest):
            raise NotFinite("scaled by n / k, an element is too large for float32", of.name)

    def _encode(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        payload = self._payload(of.name, shape)
        values = payload[HEADER_BYTES:].view(np.float32)
        feeds_back = not self._scaled
        self._take(flat, self._choice(flat.size, of), values, of, rest_matters=feeds_back)
        return payload

    def _mix_body(self, body: ByteArray, flat: Array, shape: TensorShape, of: Ident, mix: Mix) -> None:
        values = body.view(np.float32)
        check_decoded(values, of.name)
        scatter(flat, self._choice(flat.size, of).numbers(), values, mix)
