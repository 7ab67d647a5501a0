"""The interface of a compressor.

A compressor turns one float32 tensor into a payload of bytes and back; it never communicates. Its `kind` says
how payloads of several ranks may be combined, and the aggregator picks the collective from that:

- linear: the encoding is a linear map that all ranks share, so factors may be summed by an all-reduce. Such a
  compressor offers `rounds`: the factors to be summed, one after the other.
- sparse: payloads are gathered; every rank decodes and sums them.
- quantised: each rank decodes and sums its part of all tensors, encodes the sum, and gathers the parts.

Encoded bytes are never summed as if they were floats.

State between steps (a warm start, a residual) is kept by the tensor's name, in one object per rank. What was
learned in a step takes effect when the step is committed. An abandoned step leaves no trace, so it can be tried
again. `state` and `restore` move committed state to a checkpoint and back. Names in it begin with "shared/"
where all ranks hold the same (a newcomer needs it), with "own/" where each rank holds its own. What ranks must
agree on (random-k's choice of indices) follows from the seed, the name and the step alone.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hcsim.runtime.host import Work

Array: TypeAlias = npt.NDArray[np.float32]
ByteArray: TypeAlias = npt.NDArray[np.uint8]
TensorShape: TypeAlias = tuple[int, ...]
CompressorStateDict: TypeAlias = dict[str, npt.NDArray[np.generic]]


class PayloadKind(Enum):
    """How payloads of several ranks are combined."""

    LINEAR = "linear"
    SPARSE = "sparse"
    QUANTISED = "quantised"


class Ident(NamedTuple):
    """The tensor's name and the step, the same on all ranks."""

    name: str
    step: int = 0


ReductionRounds: TypeAlias = Generator[Array, Array, None]
"""Yields a flat factor and is sent its sum over all ranks, repeatedly; the sum may be in the same memory."""


class Compressor(Protocol):
    """Compresses tensors, one at a time, on one rank."""

    @property
    def spec(self) -> str:
        """The spec as in files and tables: "topk:0.01". `make` parses it."""

    @property
    def kind(self) -> PayloadKind: ...

    def size_bytes(self, shape: TensorShape) -> int:
        """Return the exact size of the payload for such a tensor (an estimate where `sized` is false)."""

    def most_bytes(self, shape: TensorShape) -> int: ...

    @property
    def sized(self) -> bool:
        """Whether the size depends on the shape alone; false for a lossless coder."""

    def encode(self, tensor: Array, of: Ident) -> ByteArray:
        """Return the payload. It is valid until a tensor of that name is encoded again, which reuses its memory.

        The tensor is contiguous and is not changed. A NaN or an infinity in it raises an error that names the
        tensor (`randomk` documents where it does not check)."""

    def decode(self, payload: ByteArray, out: Array, of: Ident) -> None:
        """Decode the payload into all of `out`.

        An invalid payload raises an error that names the tensor; the contents of `out` are then undefined."""

    def add(self, payload: ByteArray, out: Array, of: Ident) -> None:
        """Like `decode`, but add to `out`."""

    def subtract(self, payload: ByteArray, out: Array, of: Ident) -> None:
        """Like `decode`, but subtract from `out`: applied to the input, this leaves what was not sent."""

    def for_feedback(self) -> Compressor:
        """Return the variant for error feedback: it sends a part of the input, not an unbiased estimate."""

    def encode_work(self, shape: TensorShape) -> Work: ...

    def decode_work(self, shape: TensorShape) -> Work: ...

    def commit(self, step: int) -> None:
        """Commit the step: what was learned in it takes effect."""

    def abandon(self, step: int) -> None:
        """Abandon the step: discard what was learned in it."""

    def state(self) -> CompressorStateDict:
        """Return the committed state, under names of its own."""

    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Restore the state of another object of the same spec; reject any other."""


class LinearCompressor(Compressor, Protocol):
    """A compressor whose factors may be summed."""

    def rounds(self, tensor: Array, of: Ident, total: Array | None = None) -> ReductionRounds:
        """Exchange this tensor; in the end it holds the decoded sum over all ranks.

        If `total` is given, the sum is put there, and the tensor is left with the part of it that was not sent."""

    def round_bytes(self, shape: TensorShape) -> tuple[int, ...]:
        """Return the size of each round's factor for such a tensor, without data."""
