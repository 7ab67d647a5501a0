"""The layout of a model's tensors in one flat array.

Parameters, gradients and residuals are flat float32 arrays of one layout. Blocks lie in the order in which the
backward pass finishes them, the last one first. So a bucket of finished gradients is one contiguous range, and
is sent without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

import msgspec
import numpy as np
import numpy.typing as npt

from hcsim.rng import generator

FLOAT_BYTES = 4
OUTER = "lora_b"
"""How the name of an adapter's outer matrix ends."""


class Tensor(msgspec.Struct, frozen=True):
    """One parameter tensor."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """The offset of its first element."""

    @property
    def length(self) -> int:
        return prod(self.shape)

    @property
    def span(self) -> slice:
        """Its range in the flat array."""
        return slice(self.offset, self.offset + self.length)

    def piece(self, lo: int, hi: int) -> Tensor:
        """Return the part of the tensor that lies in [lo, hi) of the flat array."""
        start, stop = max(lo, self.offset), min(hi, self.offset + self.length)
        if (start, stop) == (self.offset, self.offset + self.length):
            return self
        return Tensor(f"{self.name}[{start - self.offset}:{stop - self.offset}]", (stop - start,), start)

    def view(self, flat: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return a view of the tensor in an array of its layout."""
        return flat[self.span].reshape(self.shape)


class Bucket(msgspec.Struct, frozen=True):
    """Blocks whose gradients are exchanged together."""

    number: int
    blocks: tuple[int, ...]
    """In the order of the backward pass."""
    tensors: tuple[Tensor, ...]
    """With offsets from the start of the bucket."""
    lo: int
    hi: int
    element_bytes: int = FLOAT_BYTES

    @property
    def span(self) -> slice:
        """Its range in the flat array."""
        return slice(self.lo, self.hi)

    @property
    def size_bytes(self) -> int:
        """The size of its gradients, uncompressed."""
        return self.element_bytes * (self.hi - self.lo)


class Layout(msgspec.Struct, frozen=True):
    """The tensors of a model, by block, in the order of the backward pass."""

    blocks: tuple[tuple[Tensor, ...], ...]
    """By block, in the order of the *forward* pass; offsets fall from block to block."""
    element_bytes: int = FLOAT_BYTES
    """Of parameters and gradients: only phantoms can have another size than float32."""

    @classmethod
    def of(cls, shapes: Sequence[Sequence[tuple[str, tuple[int, ...]]]], element_bytes: int = FLOAT_BYTES) -> Layout:
        """Lay out (name, shape) by block, given in the order of the forward pass."""
        placed: list[tuple[Tensor, ...]] = []
        offset = 0
        for block in reversed(shapes):
            starts = list(accumulate((prod(shape) for _, shape in block), initial=offset))
            placed.append(tuple(Tensor(name, shape, at) for (name, shape), at in zip(block, starts, strict=False)))
            offset = starts[-1]
        return cls(tuple(reversed(placed)), element_bytes)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for block in reversed(self.blocks) for tensor in block)

    @property
    def length(self) -> int:
        return sum(tensor.length for tensor in self.tensors)

    @property
    def size_bytes(self) -> int:
        return self.element_bytes * self.length

    def buckets(self, most_bytes: int) -> tuple[Bucket, ...]:
        """Cut the layout into buckets of whole blocks. A bucket closes when it has reached `most_bytes`."""
        return tuple(self._filled(most_bytes))

    def _filled(self, most_bytes: int) -> Iterator[Bucket]:
        number, lo, hi, members = 0, 0, 0, list[int]()
        for block in reversed(range(len(self.blocks))):
            members.append(block)
            hi += sum(tensor.length for tensor in self.blocks[block])
            if self.element_bytes * (hi - lo) >= most_bytes or block == 0:
                tensors = tuple(
                    msgspec.structs.replace(tensor, offset=tensor.offset - lo)
                    for member in members
                    for tensor in self.blocks[member]
                )
                yield Bucket(number, tuple(members), tensors, lo, hi, self.element_bytes)
                number, lo, members = number + 1, hi, []


def initial(seed: int, tensor: Tensor, gain: float) -> npt.NDArray[np.float32]:
    """Return fresh values: weights normal with a variance of gain² / fan-in, a norm's factors one, biases zero, and
    the outer matrices of adapters zero, so that these change nothing at first."""
    if len(tensor.shape) >= 2 and not tensor.name.endswith(OUTER):
        deviation = gain / prod(tensor.shape[1:]) ** 0.5
        drawn = generator(seed, "parameters", tensor.name).standard_normal(tensor.shape, np.float32)
        return drawn * np.float32(deviation)
    return np.full(tensor.shape, 1 if tensor.name.endswith("weight") else 0, np.float32)
