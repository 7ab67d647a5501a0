"""`randomk:RATIO`: elements chosen at random, the same on all ranks, so that they can be summed.

The choice follows from the seed, the tensor's name and the step, and is not sent. k is as for top-k.

Without error feedback, values are scaled by n / k, so that the estimate is unbiased. With error feedback they
are not scaled: the rest is sent later, and scaling as well would deliver every gradient n / k times over. Error
feedback asks for the unscaled variant itself (`for_feedback`).

For a large tensor (8 to 67 million elements) of which little is sent (one in 32 or less), only the sent
elements are read. `encode` then misses a NaN among the rest, which has no effect. Where the rest matters (the
residual of error feedback, the remainder of a sum), all elements are checked.
"""

from __future__ import annotations

from fractions import Fraction
from math import isfinite, prod

import numpy as np

from hcsim.compressors.base import Array, ByteArray, Ident, PayloadKind, ReductionRounds, TensorShape
from hcsim.compressors.codec import BaseCompressor, Mix
from hcsim.compressors.draws import BitmaskChoice, Chooser, IndexChoice, bits
from hcsim.compressors.encoding import FLOAT_BYTES, HEADER_BYTES, Codec, check_decoded, check_input
from hcsim.compressors.topk import count_of, scatter
from hcsim.errors import NotFinite


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
