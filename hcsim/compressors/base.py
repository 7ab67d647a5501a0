"""What a compressor is.

A compressor turns one float32 tensor into a payload of bytes and back; it never communicates. Its `kind` says
how payloads of several ranks may be combined, and the aggregator picks the collective from that:

- linear: the encoding is a linear map that all ranks share, so factors may be summed by an
  all-reduce. Such a compressor offers `rounds`: the factors it wants summed, one after the other.
- sparse: payloads are gathered, decoded and summed by everyone.
- quantised: each rank decodes and sums its part of everybody's tensor, encodes the sum and gathers.

Encoded bytes are never summed as if they were floats.

What a compressor remembers between steps (a warm start, a residual) it keeps by the tensor's name, one
object per rank. What it learned in a step counts once the step is committed; a step that is abandoned leaves
no trace, so it can be tried again. `state` and `restore` move what was committed to a checkpoint and back;
a name in it begins with "shared/" where all ranks hold the same (a newcomer needs it), with "own/" where each
rank holds its own. What ranks must agree on (random-k's choice of indices) follows from the seed, the name and
the step alone.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hcsim.runtime.host import Work

Array: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Shape: TypeAlias = tuple[int, ...]
State: TypeAlias = dict[str, npt.NDArray[np.generic]]


class Kind(Enum):
    """How payloads of several ranks are combined."""

    LINEAR = "linear"
    SPARSE = "sparse"
    QUANTISED = "quantised"


class Ident(NamedTuple):
    """Which tensor, in which step: what all ranks know alike."""

    name: str
    step: int = 0


Rounds: TypeAlias = Generator[Array, Array, None]
"""Yields a flat factor, is sent its sum over all ranks, and so on; the sum may be in the same memory."""


class Compressor(Protocol):
    """Shrinks tensors, one at a time, on one rank."""

    @property
    def spec(self) -> str:
        """As it is written in files and tables: "topk:0.01". `make` reads it."""

    @property
    def kind(self) -> Kind:
        """How payloads are combined."""

    def size_bytes(self, shape: Shape) -> int:
        """The exact size of the payload for such a tensor (an estimate where `sized` is false)."""

    def most_bytes(self, shape: Shape) -> int:
        """No payload for such a tensor is larger."""

    @property
    def sized(self) -> bool:
        """Whether the size depends on the shape alone; a lossless coder's does not."""

    def encode(self, tensor: Array, of: Ident) -> Bytes:
        """The payload, valid until a tensor of that name is encoded again: its memory is used again.

        The tensor is contiguous and stays as it is; a NaN or an infinity in it is refused by name (`randomk` says where
        it does not look for one).
        """

    def decode(self, payload: Bytes, out: Array, of: Ident) -> None:
        """Put what the payload says into `out`, all of it.

        A payload that is not valid is refused by name; what `out` then holds is not to be used.
        """

    def add(self, payload: Bytes, out: Array, of: Ident) -> None:
        """Like `decode`, but added to what is in `out`."""

    def subtract(self, payload: Bytes, out: Array, of: Ident) -> None:
        """Like `decode`, but taken from what is in `out`: from the input, this leaves what was not sent."""

    def for_feedback(self) -> Compressor:
        """The same as error feedback needs it: what it sends is a part of the input, not an unbiased estimate."""

    def encode_work(self, shape: Shape) -> Work:
        """What encoding costs a machine whose time is modelled."""

    def decode_work(self, shape: Shape) -> Work:
        """What decoding costs."""

    def commit(self, step: int) -> None:
        """The step counts: from now on, remember what was learned in it."""

    def abandon(self, step: int) -> None:
        """The step does not count: forget what was learned in it."""

    def state(self) -> State:
        """Everything it remembers, by names of its own."""

    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Remember what another object of the same spec remembered; refuses what is not that."""


class Linear(Compressor, Protocol):
    """A compressor whose factors may be summed."""

    def rounds(self, tensor: Array, of: Ident, total: Array | None = None) -> Rounds:
        """Exchange this tensor, which in the end holds the sum over all ranks, decoded.

        Where another array is given, `total`, the sum is put there, and the tensor is left with the part of it
        that was not sent.
        """

    def round_bytes(self, shape: Shape) -> tuple[int, ...]:
        """The size of each round's factor: what crosses the wire for such a tensor, without data."""
