"""Who holds which part of a model that is sharded, and this rank's parts.

Every bucket of the layout is cut into one part for each of N shards, as nearly equal as possible. So a shard has a part
of every bucket, and each bucket is reduce-scattered and gathered by itself. With copies=k shard s is held by the ranks
s to s + k − 1 (modulo N), so that k − 1 of them in a row can be lost. All holders of a shard apply the same updates to
it, of the same gradients: it is alike on them to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from hcsim.collectives.buffers import length_of
from hcsim.collectives.plan import split
from hcsim.runtime.channel import Phantom
from hcsim.training.layout import Bucket
from hcsim.training.optimizer import Optimizer, Stepper, sum_of_squares
from hcsim.training.task import Flat


class Partition(msgspec.Struct, frozen=True):
    """A layout in buckets, each cut into shards."""

    buckets: tuple[Bucket, ...]
    shards: int

    def counts(self, bucket: int) -> list[int]:
        """Return the elements of the bucket in each shard."""
        return [hi - lo for lo, hi in pairwise(self._cuts(bucket))]

    def part(self, bucket: int, shard: int) -> tuple[int, int]:
        """Return the range of the shard's part, in the bucket."""
        cuts = self._cuts(bucket)
        return cuts[shard], cuts[shard + 1]

    def spans(self, shard: int) -> list[tuple[int, int]]:
        """Return the ranges of the shard in the flat array, by bucket."""
        parts = (self.part(number, shard) for number in range(len(self.buckets)))
        return [(bucket.lo + lo, bucket.lo + hi) for bucket, (lo, hi) in zip(self.buckets, parts, strict=True)]

    def _cuts(self, bucket: int) -> tuple[int, ...]:
        return split(self.buckets[bucket].hi - self.buckets[bucket].lo, self.shards)


def held_shards(rank: int, shards: int, copies: int) -> tuple[int, ...]:
    """Return the shards that a rank holds, its own first."""
    return tuple((rank - back) % shards for back in range(min(copies, shards)))


class Piece(NamedTuple):
    """A part of a shard that lies together in the flat array, and the optimizer's state of it."""

    lo: int
    values: Flat
    stepper: Stepper

    @property
    def hi(self) -> int:
        return self.lo + length_of(self.values)

    def state(self) -> tuple[dict[str, npt.NDArray[np.generic]], dict[str, npt.NDArray[np.generic]]]:
        """Return the optimizer's state: that of each element, and that of all together."""
        state = self.stepper.state()
        size = length_of(self.values)
        each = {name: array for name, array in state.items() if array.dtype == np.float32 and array.size == size}
        return each, {name: array for name, array in state.items() if name not in each}


class HeldShards:
    """The shards that this rank holds: parameters, the optimizer's state, and the gradients of a step."""

    def __init__(self, partition: Partition, held: Sequence[int], optimizer: Optimizer) -> None:
        self.partition = partition
        self.held = tuple(held)
        """Its own shard first."""
        self._optimizer = optimizer
        self.pieces: dict[int, list[Piece]] = {}
        """By shard, and in the order of the buckets."""
        self.gradients: dict[tuple[int, int], Flat] = {}
        """Averages, by shard and bucket."""

    def hold(self, shard: int, values: Sequence[Flat]) -> None:
        """Hold this shard, whose parts of the buckets have these values. They are changed in place."""
        spans = self.partition.spans(shard)
        self.pieces[shard] = [
            Piece(lo, part, self._optimizer.open(part)) for (lo, _), part in zip(spans, values, strict=True)
        ]

    @property
    def own(self) -> int:
        return self.held[0]

    @property
    def length(self) -> int:
        """The number of elements, those of copies included."""
        return sum(hi - lo for shard in self.held for lo, hi in self.partition.spans(shard))

    def each(self) -> Iterator[Piece]:
        for shard in self.held:
            yield from self.pieces[shard]

    def squares(self) -> float:
        """Return the sum of the squares of this rank's own gradients, in double precision and in a fixed order."""
        total = 0.0
        for number in range(len(self.partition.buckets)):
            gradients = self.gradients[self.own, number]
            if not isinstance(gradients, Phantom):
                total += sum_of_squares(gradients)
        return total

    def step(self, lr: float, scale: np.float32 | None) -> None:
        """Update all parts with their gradients, which are scaled first and gone afterwards."""
        for shard in self.held:
            for number, piece in enumerate(self.pieces[shard]):
                gradients = self.gradients.pop((shard, number))
                if scale is not None and not isinstance(gradients, Phantom):
                    gradients *= scale
                piece.stepper.step(gradients, lr)
