"""`none`: every element as it is. `fp16`, `bf16`: every element in half the bytes, rounded to the nearest, ties
to even.

fp16 has 11 significant bits and a narrow range: values below 6·10⁻⁸ become zero, and the largest is 65504. bf16
has 8 significant bits and the range of float32. A value beyond the range is sent as the largest one, not as an
infinity. The remainder is then finite, and error feedback can send it later.
"""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import ClassVar

import numpy as np

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, ByteArray, Ident, PayloadKind, ReductionRounds, TensorShape
from hcsim.compressors.codec import ChunkedCompressor, Unpack
from hcsim.compressors.encoding import (
    FLOAT_BYTES,
    HEADER_BYTES,
    MAGNITUDE,
    Codec,
    check_input,
    decodes_badly,
    not_finite,
)
from hcsim.compressors.kernels.plain import Halves

HALF_BYTES = 2
_SIGN = 0x8000


class Cast(ChunkedCompressor):
    """Base class of both."""

    kind = PayloadKind.QUANTISED
    largest: ClassVar[int]
    """The bits of the largest finite half-precision value."""
    beyond: ClassVar[int]
    """The bits of the smallest float that would be rounded to an infinity."""

    @abstractmethod
    def _narrow(self, flat: Array, halves: Halves) -> bool:
        """Convert to half precision; return whether all results are finite."""

    @abstractmethod
    def _widen(self, halves: Halves, into: Array) -> bool:
        """Convert to float32; return whether all are finite."""

    def size_bytes(self, shape: TensorShape) -> int:
        return HEADER_BYTES + HALF_BYTES * prod(shape)

    def _encode(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        payload = self._payload(of.name, shape)
        halves = payload[HEADER_BYTES:].view(np.uint16)
        if not self._narrow(flat, halves):
            check_input(flat, of.name)
            self._saturate(flat, halves)
        return payload

    def _unpacker(self, body: ByteArray, elements: int, of: Ident) -> Unpack:
        halves = body.view(np.uint16)

        def unpack(lo: int, into: Array) -> None:
            if not self._widen(halves[lo : lo + into.size], into):
                raise decodes_badly(of.name)

        return unpack

    def _saturate(self, flat: Array, halves: Halves) -> None:
        beyond = np.flatnonzero((flat.view(np.uint32) & MAGNITUDE) >= self.beyond)
        halves[beyond] = np.where(flat[beyond] < 0, _SIGN + self.largest, self.largest)


class Fp16(Cast):
    """Half precision."""

    codec = Codec.FP16
    largest = 0x7BFF
    beyond = 0x477FF000

    def _narrow(self, flat: Array, halves: Halves) -> bool:
        return kernels.to_fp16(flat, halves)

    def _widen(self, halves: Halves, into: Array) -> bool:
        return kernels.from_fp16(halves, into)


class Bf16(Cast):
    """The upper half of a float32."""

    codec = Codec.BF16
    largest = 0x7F7F
    beyond = 0x7F7F8000

    def _narrow(self, flat: Array, halves: Halves) -> bool:
        return kernels.to_bf16(flat, halves)

    def _widen(self, halves: Halves, into: Array) -> bool:
        return kernels.from_bf16(halves, into)


class Dense(ChunkedCompressor):
    """One round: the tensor itself."""

    codec = Codec.NONE
    kind = PayloadKind.LINEAR

    def __init__(self, spec: str, element_bytes: int = FLOAT_BYTES) -> None:
        """Phantoms may have elements of another size than float32."""
        super().__init__(spec)
        self.element_bytes = element_bytes

    def size_bytes(self, shape: TensorShape) -> int:
        return HEADER_BYTES + self.element_bytes * prod(shape)

    def _encode(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        payload = self._payload(of.name, shape)
        if not kernels.copy(flat, payload[HEADER_BYTES:].view(np.float32)):
            raise not_finite(flat, of.name)
        return payload

    def _unpacker(self, body: ByteArray, elements: int, of: Ident) -> Unpack:
        values = body.view(np.float32)

        def unpack(lo: int, into: Array) -> None:
            if not kernels.copy(values[lo : lo + into.size], into):
                raise decodes_badly(of.name)

        return unpack

    def rounds(self, tensor: Array, of: Ident, total: Array | None = None) -> ReductionRounds:
        """Exchange the sum of the tensors; nothing is left unsent."""
        yield from exchange_dense(tensor, total, of)

    def round_bytes(self, shape: TensorShape) -> tuple[int, ...]:
        return (self.element_bytes * prod(shape),)


def exchange_dense(tensor: Array, total: Array | None, of: Ident) -> ReductionRounds:
    """Sum the tensors, without a copy where the sum arrives in the factor's own memory.

    The sum is checked rather than the tensor: it is the same on all ranks, so all ranks come to the same
    result."""
    if total is not None:
        np.copyto(total, tensor)
        tensor.fill(0)
    factor = (tensor if total is None else total).reshape(-1)
    summed = yield factor
    if not np.may_share_memory(summed, factor):
        np.copyto(factor, summed)
    check_input(factor, of.name)
