"""The samples of each rank in each step.

Every epoch is a new permutation of all samples. The global batch of a step is the next contiguous part of it,
dealt out to the ranks in order, in proportion to their batch sizes. So N ranks with batches of b see in every
step, sample for sample, what one process with a batch of N·b sees. In an epoch no sample is dropped and none is
seen twice. Its last batch may be short, so that some ranks get fewer samples than usual or none; therefore
gradients are averaged by `counts`. When the ranks change during a run, new batches begin `since` the position
that the old ones reached, so this holds for every epoch.

Where ranks take turns (`turns`), a rank takes part in some of the steps of each period of `every` steps, evenly spread.
A step's global batch is then that of the ranks that take part in it.

A worker of an asynchronous parameter server goes through a shard of its own instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from hcsim.errors import UsageError
from hcsim.rng import generator
from hcsim.training.task import Indices, Task


def dealt(count: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Share out `count` samples in proportion to the sizes; the rest goes to the largest remainders."""
    total = sum(sizes)
    shares = [count * size // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda rank: (-(count * sizes[rank] % total), rank))
    for rank in by_remainder[: count - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)


class Turns(NamedTuple):
    """In which steps of a period each rank takes part."""

    every: int
    """The steps of a period; periods begin at its multiples."""
    counts: tuple[int, ...]
    """By rank, in how many of them; for some rank in all of them."""

    def includes(self, step: int, rank: int) -> bool:
        number, count = step % self.every, self.counts[rank]
        return (number + 1) * count // self.every > number * count // self.every


class Batches:
    """The batches of all ranks: every rank computes the same ones and takes its own."""

    def __init__(
        self,
        samples: int,
        batch_sizes: Sequence[int],
        seed: int,
        *,
        shuffled: bool = True,
        since: tuple[int, int] = (0, 0),
        turns: Turns | None = None,
    ) -> None:
        """`since` is a step, and the number of samples of all epochs dealt out before it."""
        if samples < 1 or min(batch_sizes, default=0) < 0 or sum(batch_sizes) < 1:
            raise UsageError(f"{samples} samples cannot be dealt out in batches of {tuple(batch_sizes)}")
        self.samples = samples
        self.batch_sizes = tuple(batch_sizes)
        self._seed = seed
        self._since = since
        self._shuffled = shuffled
        self.turns = turns
        self._positions = [since[1]]
        """Where ranks take turns: how many samples were dealt out before each step."""
        self._order = lru_cache(maxsize=2)(self._permuted if shuffled else self._in_sequence)
        self._own_order = lru_cache(maxsize=2 * len(self.batch_sizes))(self._own_permuted if shuffled else self._shard)

    @classmethod
    def of(
        cls,
        task: Task,
        batch_sizes: Sequence[int],
        seed: int,
        since: tuple[int, int] = (0, 0),
        turns: Turns | None = None,
    ) -> Batches:
        """Return the batches of a task. A phantom task has a number of samples but nothing to shuffle."""
        return cls(task.samples, batch_sizes, seed, shuffled=not task.phantom, since=since, turns=turns)

    def again(self, step: int, batch_sizes: Sequence[int], turns: Turns | None = None) -> Batches:
        """Return batches of other sizes from this step on."""
        since = (step, self.position(step))
        return Batches(self.samples, batch_sizes, self._seed, shuffled=self._shuffled, since=since, turns=turns)

    @property
    def samples_per_step(self) -> int:
        """The usual number of samples of all ranks in a step; where they take turns, the average."""
        if self.turns is None:
            return sum(self.batch_sizes)
        each = zip(self.batch_sizes, self.turns.counts, strict=True)
        return round(sum(size * count for size, count in each) / self.turns.every)

    def takes_part(self, step: int, rank: int) -> bool:
        """Return whether the rank takes a step of its own."""
        return self.turns is None or self.turns.includes(step, rank)

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches, the short last one included."""
        return -(-self.samples // sum(self.batch_sizes))

    def counts(self, step: int) -> tuple[int, ...]:
        """Return by rank the number of samples in its batch: the weights of its gradients in the mean."""
        _, lo, hi = self._range(step)
        return dealt(hi - lo, self._sizes(step))

    def position(self, step: int) -> int:
        """Return the number of samples, of all epochs, dealt out before this step."""
        epoch, lo, _ = self._range(step)
        return epoch * self.samples + lo

    def batch(self, step: int, rank: int) -> Indices:
        """Return this rank's part of the step's global batch."""
        epoch, lo, _ = self._range(step)
        counts = self.counts(step)
        start = lo + sum(counts[:rank])
        return self._order(epoch)[start : start + counts[rank]]

    def shard(self, rank: int) -> Indices:
        """Return the samples of an asynchronous worker, in proportion to its batch size. Shards are disjoint."""
        return self._own_order(rank, -1)

    def own(self, rank: int, number: int) -> Indices:
        """Return the worker's batch of that number from its shard, which it goes through in epochs of its own."""
        size, length = self.batch_sizes[rank], len(self.shard(rank))
        if length == 0:
            return self.shard(rank)
        epoch, at = divmod(number, -(-length // size))
        return self._own_order(rank, epoch)[at * size : (at + 1) * size]

    def _range(self, step: int) -> tuple[int, int, int]:
        """Return an epoch and a range of its permutation."""
        if self.turns is not None:
            return self._range_by_turns(step)
        size = sum(self.batch_sizes)
        first_step, position = self._since
        number = step - first_step
        epoch, lo = divmod(position, self.samples)
        begun = -(-(self.samples - lo) // size)
        if number < begun:
            lo += number * size
        else:
            epochs, number = divmod(number - begun, self.steps_per_epoch)
            epoch, lo = epoch + 1 + epochs, number * size
        return epoch, lo, min(lo + size, self.samples)

    def _range_by_turns(self, step: int) -> tuple[int, int, int]:
        positions, first = self._positions, self._since[0]
        while len(positions) <= step - first:
            _, _, hi = self._part(positions[-1], first + len(positions) - 1)
            epoch = positions[-1] // self.samples
            positions.append(epoch * self.samples + hi)
        return self._part(positions[step - first], step)

    def _part(self, position: int, step: int) -> tuple[int, int, int]:
        epoch, lo = divmod(position, self.samples)
        return epoch, lo, min(lo + sum(self._sizes(step)), self.samples)

    def _sizes(self, step: int) -> tuple[int, ...]:
        turns = self.turns
        if turns is None:
            return self.batch_sizes
        return tuple(size if turns.includes(step, rank) else 0 for rank, size in enumerate(self.batch_sizes))

    def _permuted(self, epoch: int) -> Indices:
        return _constant(generator(self._seed, "batches", epoch).permutation(self.samples))

    def _in_sequence(self, epoch: int) -> Indices:
        return _constant(np.arange(self.samples))

    def _own_permuted(self, rank: int, epoch: int) -> Indices:
        shard = self._shard(rank, epoch)
        # Epoch -1 is the shard as it was dealt.
        return shard if epoch < 0 else _constant(generator(self._seed, "own", rank, epoch).permutation(shard))

    def _shard(self, rank: int, epoch: int) -> Indices:
        ends = list(accumulate(dealt(self.samples, self.batch_sizes), initial=0))
        return self._order(-1)[ends[rank] : ends[rank + 1]]


def _constant(indices: Indices) -> Indices:
    """Make the array read-only: it is shared."""
    indices.flags.writeable = False
    return indices
