"""`+ef`: error feedback. What was not sent in a step is added to the tensor of the next (Karimireddy et al. 2019).

    compensated = tensor + residual;  payload = encode(compensated);  residual' = compensated − decode(payload)

Over all steps everything is sent: Σ decoded + residual = Σ tensors. It wraps any compressor. A residual takes
effect once its step is committed, so an aborted step can be tried again.

A caller that encodes the pieces of a tensor itself gets the tensor with its residual from `compensated`, and
passes the unsent rest of the whole tensor to `keep`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from hcsim.compressors.base import (
    Array,
    ByteArray,
    Compressor,
    CompressorStateDict,
    Ident,
    LinearCompressor,
    PayloadKind,
    ReductionRounds,
    TensorShape,
)
from hcsim.compressors.codec import COMPENSATE, CompressorMemory
from hcsim.compressors.encoding import FLOAT_BYTES, as_array
from hcsim.errors import UsageError
from hcsim.runtime.host import Work, joined_work

SUFFIX = "+ef"
OWED = "own/residual/"
"""The prefix of residuals in a state."""


class ErrorFeedback:
    """A compressor that sends later what the wrapped one leaves out."""

    def __init__(self, inner: Compressor) -> None:
        self._inner = inner.for_feedback()
        self._memory = CompressorMemory(OWED)

    @property
    def inner(self) -> Compressor:
        return self._inner

    @property
    def spec(self) -> str:
        return self._inner.spec + SUFFIX

    @property
    def kind(self) -> PayloadKind:
        return self._inner.kind

    @property
    def sized(self) -> bool:
        return self._inner.sized

    def size_bytes(self, shape: TensorShape) -> int:
        return self._inner.size_bytes(shape)

    def most_bytes(self, shape: TensorShape) -> int:
        return self._inner.most_bytes(shape)

    def round_bytes(self, shape: TensorShape) -> tuple[int, ...]:
        return cast(LinearCompressor, self._inner).round_bytes(shape)

    def compensated(self, tensor: Array, of: Ident) -> Array:
        """Return the tensor plus its residual. The array is valid until `keep` or the next call."""
        as_array(tensor, of.name)
        kept = self._memory.kept(of.name, tensor.shape)
        array = self._memory.propose(of.name, tensor.shape, of.step)
        if kept is None:
            np.copyto(array, tensor)
        else:
            with np.errstate(over="ignore"):  # an infinity is refused by name when it is encoded
                np.add(tensor, kept, out=array)
        return array

    def keep(self, residual: Array, of: Ident) -> None:
        """Keep the unsent part of the compensated tensor; it may be that array itself, changed in place."""
        array = self._memory.proposed(of.name, of.step)
        if residual.shape != array.shape:
            raise UsageError(f"{of.name}: a residual of shape {residual.shape} for a tensor of shape {array.shape}")
        if residual is not array:
            np.copyto(array, residual)

    def encode(self, tensor: Array, of: Ident) -> ByteArray:
        array = self.compensated(tensor, of)
        payload = self._inner.encode(array, of)
        self._inner.subtract(payload, array, of)
        return payload

    def rounds(self, tensor: Array, of: Ident, total: Array | None = None) -> ReductionRounds:
        """Exchange the compensated tensor. All that is left unsent is kept here."""
        into = tensor if total is None else total
        yield from cast(LinearCompressor, self._inner).rounds(self.compensated(tensor, of), of, into)
        if total is not None:
            tensor.fill(0)

    def decode(self, payload: ByteArray, out: Array, of: Ident) -> None:
        self._inner.decode(payload, out, of)

    def add(self, payload: ByteArray, out: Array, of: Ident) -> None:
        self._inner.add(payload, out, of)

    def subtract(self, payload: ByteArray, out: Array, of: Ident) -> None:
        self._inner.subtract(payload, out, of)

    def for_feedback(self) -> Compressor:
        """Raise: error feedback cannot be applied twice."""
        raise UsageError(f"{self.spec} has error feedback already")

    def encode_work(self, shape: TensorShape) -> Work:
        """Return the cost of compensating, encoding, and subtracting what was sent."""
        size_bytes = FLOAT_BYTES * int(np.prod(shape))
        work = joined_work([self._inner.encode_work(shape), self._inner.decode_work(shape)])
        return replace(work, moved_bytes=COMPENSATE * size_bytes + work.moved_bytes)

    def decode_work(self, shape: TensorShape) -> Work:
        return self._inner.decode_work(shape)

    def commit(self, step: int) -> None:
        self._memory.commit(step)
        self._inner.commit(step)

    def abandon(self, step: int) -> None:
        self._memory.abandon(step)
        self._inner.abandon(step)

    def state(self) -> CompressorStateDict:
        return self._memory.state() | self._inner.state()

    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        mine = {key: array for key, array in state.items() if key.startswith(self._memory.prefix)}
        self._inner.restore({key: array for key, array in state.items() if key not in mine})
        self._memory.restore(mine)
