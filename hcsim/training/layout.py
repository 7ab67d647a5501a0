"""Where a model's tensors lie in one flat array.

Parameters, gradients and residuals are flat float32 arrays of one layout. Blocks lie in the order in which
the backward pass finishes them, the last one first, so that a bucket of gradients that are ready
is one contiguous range, and goes to the network without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

import msgspec
import numpy as np
import numpy.typing as npt

FLOAT_BYTES = 4


class Tensor(msgspec.Struct, frozen=True):
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """Of its first element."""

    @property
    def length(self) -> int:
        """In elements."""
        return prod(self.shape)

    @property
    def span(self) -> slice:
        """Its place in the flat array."""
        return slice(self.offset, self.offset + self.length)

    def piece(self, lo: int, hi: int) -> Tensor:
        """The part of it that lies in [lo, hi), flat."""
        start, stop = max(lo, self.offset), min(hi, self.offset + self.length)
        if (start, stop) == (self.offset, self.offset + self.length):
            return self
        return Tensor(f"{self.name}[{start - self.offset}:{stop - self.offset}]", (stop - start,), start)

    def view(self, flat: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """It, in an array of its layout."""
        return flat[self.span].reshape(self.shape)


class Bucket(msgspec.Struct, frozen=True):
    """Blocks whose gradients are exchanged together."""

    number: int
    blocks: tuple[int, ...]
    """In the order in which the backward pass comes to them."""
    tensors: tuple[Tensor, ...]
    """With offsets from the start of the bucket."""
    lo: int
    hi: int

    @property
    def span(self) -> slice:
        """Its place in the flat array."""
        return slice(self.lo, self.hi)

    @property
    def size_bytes(self) -> int:
        """Of its gradients, uncompressed."""
        return FLOAT_BYTES * (self.hi - self.lo)


class Layout(msgspec.Struct, frozen=True):
    """All tensors of a model, by block, in the order of the backward pass."""

    blocks: tuple[tuple[Tensor, ...], ...]
    """By block, in the order of the *forward* pass; offsets fall from block to block."""

    @classmethod
    def of(cls, shapes: Sequence[Sequence[tuple[str, tuple[int, ...]]]]) -> Layout:
        """Lay out (name, shape) by block, given in the order of the forward pass."""
        placed: list[tuple[Tensor, ...]] = []
        offset = 0
        for block in reversed(shapes):
            starts = list(accumulate((prod(shape) for _, shape in block), initial=offset))
            placed.append(tuple(Tensor(name, shape, at) for (name, shape), at in zip(block, starts, strict=False)))
            offset = starts[-1]
        return cls(tuple(reversed(placed)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of their offsets."""
        return tuple(tensor for block in reversed(self.blocks) for tensor in block)

    @property
    def length(self) -> int:
        """Elements of the flat array."""
        return sum(tensor.length for tensor in self.tensors)

    @property
    def size_bytes(self) -> int:
        """Of the flat array."""
        return FLOAT_BYTES * self.length

    def buckets(self, most_bytes: int) -> tuple[Bucket, ...]:
        """Cut into buckets of whole blocks: a bucket closes when it has reached that size."""
        return tuple(self._filled(most_bytes))

    def _filled(self, most_bytes: int) -> Iterator[Bucket]:
        number, lo, hi, members = 0, 0, 0, list[int]()
        for block in reversed(range(len(self.blocks))):
            members.append(block)
            hi += sum(tensor.length for tensor in self.blocks[block])
            if FLOAT_BYTES * (hi - lo) >= most_bytes or block == 0:
                tensors = tuple(
                    msgspec.structs.replace(tensor, offset=tensor.offset - lo)
                    for member in members
                    for tensor in self.blocks[member]
                )
                yield Bucket(number, tuple(members), tensors, lo, hi)
                number, lo, members = number + 1, hi, []
