"""`none`: the tensor as it is. What the others are compared with, and what a small tensor is sent as."""

from __future__ import annotations

from math import prod

import numpy as np

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, Bytes, Ident, Kind, Rounds, Shape
from hcsim.compressors.codec import ChunkedCompressor, Unpack
from hcsim.compressors.encoding import FLOAT_BYTES, HEADER_BYTES, Codec, check_input, decodes_badly, not_finite


class Dense(ChunkedCompressor):
    """One round: the tensor itself."""

    codec = Codec.NONE
    kind = Kind.LINEAR

    def size_bytes(self, shape: Shape) -> int:
        """All elements."""
        return HEADER_BYTES + FLOAT_BYTES * prod(shape)

    def _encode(self, flat: Array, shape: Shape, of: Ident) -> Bytes:
        payload = self._payload(of.name, shape)
        if not kernels.copy(flat, payload[HEADER_BYTES:].view(np.float32)):
            raise not_finite(flat, of.name)
        return payload

    def _unpacker(self, body: Bytes, elements: int, of: Ident) -> Unpack:
        values = body.view(np.float32)

        def unpack(lo: int, into: Array) -> None:
            if not kernels.copy(values[lo : lo + into.size], into):
                raise decodes_badly(of.name)

        return unpack

    def rounds(self, tensor: Array, of: Ident, total: Array | None = None) -> Rounds:
        """The sum of the tensors; nothing is left unsent."""
        yield from exchange_dense(tensor, total, of)

    def round_bytes(self, shape: Shape) -> tuple[int, ...]:
        """All elements, at once."""
        return (FLOAT_BYTES * prod(shape),)


def exchange_dense(tensor: Array, total: Array | None, of: Ident) -> Rounds:
    """Sum the tensors, without a copy where the sum comes in the factor's own memory.

    The sum is checked rather than the tensor: it is the same on all ranks, and so is what they find."""
    if total is not None:
        np.copyto(total, tensor)
        tensor.fill(0)
    factor = (tensor if total is None else total).reshape(-1)
    summed = yield factor
    if not np.may_share_memory(summed, factor):
        np.copyto(factor, summed)
    check_input(factor, of.name)
