"""Replicas that are computed block by block, with parameters and gradients that are there only meanwhile.

A strategy that shards gives a block its parameters when it computes with it, and memory for its gradients. What it
gives is in the host's memory, and it may take it away afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from hcsim.runtime.channel import Phantom
from hcsim.training.layout import Layout
from hcsim.training.task import Flat, Indices, Replica, Task, Tie


class BlockwiseReplica(Protocol):
    """One rank's copy of the model, of which the caller holds the parameters."""

    @property
    def parameters(self) -> Flat:
        """All parameters, while this rank holds them; else a phantom."""

    @property
    def gradients(self) -> Flat: ...

    @property
    def layout(self) -> Layout: ...

    def fresh(self, block: int) -> Flat:
        """Return the values with which the block's parameters begin; the same seed gives the same ones."""

    def room(self, lo: int, hi: int) -> Flat:
        """Return memory for these parameters."""

    def slopes(self, lo: int, hi: int) -> Flat:
        """Return memory for these gradients, with zeros."""

    def begin(self, batch: Indices) -> None:
        """Begin a forward pass."""

    def gather_slopes(self, block: int, gradients: Flat) -> None:
        """Add here what later blocks know of the gradients of a tied block, before the backward pass."""

    def forward_block(self, block: int, parameters: Flat) -> float:
        """Run the next block, with the parameters of its range. The last one returns the mean loss."""

    def backward_block(self, block: int, parameters: Flat, gradients: Flat) -> None:
        """Add the gradients of the block's range."""


def tied_blocks(task: Task) -> tuple[int, ...]:
    """Return the blocks with trained parameters that later blocks compute with too: they stay from the forward to the
    backward pass."""
    ties: Sequence[Tie] = getattr(task, "ties", ())
    trained = (tie.owner for tie in ties if tie.tensor in dict(task.blocks[tie.owner].shapes))
    return tuple(sorted({*trained}))


@runtime_checkable
class Divisible(Protocol):
    """A task whose replicas hold a block only while they compute with it.

    A `Sequential` task is cut into runs of blocks that stay on their ranks, and activations travel; here every rank
    computes all blocks, and parameters travel. A task may be one and not the other."""

    def blockwise(self, seed: int, device: str = "cpu", *, whole: bool) -> BlockwiseReplica:
        """Return a fresh model; `whole`: with all its parameters."""


def blockwise_replica(task: Task, seed: int, device: str, *, whole: bool) -> BlockwiseReplica:
    """Return a replica of any task."""
    if isinstance(task, Divisible):
        return task.blockwise(seed, device, whole=whole)
    return WholeReplica(task.replica(seed, device))


class PhantomBlocks:
    """Blocks with sizes and no values."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.parameters: Flat = self.room(0, layout.length)
        self.gradients: Flat = self.parameters

    def fresh(self, block: int) -> Flat:
        return self.room(0, sum(tensor.length for tensor in self.layout.blocks[block]))

    def room(self, lo: int, hi: int) -> Flat:
        return Phantom((hi - lo) * self.layout.element_bytes, self.layout.element_bytes)

    slopes = room

    def begin(self, batch: Indices) -> None: ...

    def gather_slopes(self, block: int, gradients: Flat) -> None: ...

    def forward_block(self, block: int, parameters: Flat) -> float:
        return float("nan")

    def backward_block(self, block: int, parameters: Flat, gradients: Flat) -> None: ...


class WholeReplica:
    """A replica with arrays of its own for the whole model, whose forward pass runs in one piece: when all its blocks
    have come."""

    def __init__(self, replica: Replica) -> None:
        assert not isinstance(replica.parameters, Phantom)
        assert not isinstance(replica.gradients, Phantom)
        self._replica = replica
        self._fresh = replica.parameters.copy()
        self._batch: Indices = np.zeros(0, np.int64)

    @property
    def layout(self) -> Layout:
        return self._replica.layout

    @property
    def parameters(self) -> Flat:
        return self._replica.parameters

    @property
    def gradients(self) -> Flat:
        return self._replica.gradients

    def fresh(self, block: int) -> Flat:
        tensors = self.layout.blocks[block]
        return self._fresh[tensors[0].offset : tensors[-1].span.stop] if tensors else self._fresh[:0]

    def room(self, lo: int, hi: int) -> Flat:
        assert not isinstance(self._replica.parameters, Phantom)
        return self._replica.parameters[lo:hi]

    def slopes(self, lo: int, hi: int) -> Flat:
        assert not isinstance(self._replica.gradients, Phantom)
        place = self._replica.gradients[lo:hi]
        place.fill(0.0)
        return place

    def begin(self, batch: Indices) -> None:
        self._batch = batch

    def gather_slopes(self, block: int, gradients: Flat) -> None: ...

    def forward_block(self, block: int, parameters: Flat) -> float:
        last = block == len(self.layout.blocks) - 1
        return self._replica.forward(self._batch) if last else float("nan")

    def backward_block(self, block: int, parameters: Flat, gradients: Flat) -> None:
        self._replica.backward(block)
