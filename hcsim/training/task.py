"""What is learned: data, a model in blocks, and how well it does.

A model is a sequence of blocks. The forward pass goes through them at once; the backward pass comes block by
block, so that a strategy can send what is ready while the rest is computed, with the same code
whether the gradients are real or phantoms and whether time is real or modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import Work
from hcsim.training.layout import FLOAT_BYTES, Layout

Indices: TypeAlias = npt.NDArray[np.int64]
"""Which training samples: a batch."""
Flat: TypeAlias = npt.NDArray[np.float32] | Phantom
"""A flat array of a layout, or its phantom."""


class Block(msgspec.Struct, frozen=True):
    """One block of a model: what it costs, per sample."""

    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Its parameters."""
    flops: float
    """Of the forward pass; the backward pass takes twice that."""
    moved_bytes: float
    """Activations read and written in the forward pass, likewise."""
    kernels: int = 1
    """Launched in the forward pass, whatever the number of samples; twice as many in the backward pass."""

    @property
    def length(self) -> int:
        """Elements of its parameters."""
        return sum(prod(shape) for _, shape in self.shapes)


class Score(msgspec.Struct, frozen=True):
    """How well a model does on data that it was not trained on."""

    loss: float
    accuracy: float | None = None
    """The share of right answers, where an answer is right or wrong."""
    gap: float | None = None
    """The loss less the least there is, where that is known; such a loss is over the training data."""


class Defaults(msgspec.Struct, frozen=True):
    """What works for a task when nothing else is asked for: SGD on a few workers."""

    lr: float
    momentum: float
    batch: int
    """Samples in each worker's batch."""


class Replica(Protocol):
    """One rank's copy of the model."""

    @property
    def layout(self) -> Layout:
        """Where its tensors lie."""

    @property
    def parameters(self) -> Flat:
        """All parameters; writing here changes the model."""

    @property
    def gradients(self) -> Flat:
        """All gradients; the backward pass adds to what is here."""

    def forward(self, batch: Indices) -> float:
        """The mean loss over the batch; keeps what the backward pass needs.

        An empty batch, which a rank gets when an epoch ends with fewer samples than ranks, has loss 0
        and no gradients. The loss of a phantom is not a number.
        """

    def backward(self, block: int) -> None:
        """Put this block's gradients in their place. Blocks are asked for from the last to the first."""


class Task(Protocol):
    """Something to learn."""

    @property
    def name(self) -> str:
        """As it is written in files and tables."""

    @property
    def blocks(self) -> Sequence[Block]:
        """In the order of the forward pass."""

    @property
    def samples(self) -> int:
        """How many there are to train on."""

    @property
    def phantom(self) -> bool:
        """Whether there are only shapes and no data: a task for timing."""

    @property
    def defaults(self) -> Defaults:
        """What to train it with."""

    @property
    def fingerprint(self) -> str:
        """A digest of its data and shapes: runs that are compared must have it in common."""

    def replica(self, seed: int, device: str = "cpu") -> Replica:
        """A fresh model; the same seed gives the same parameters."""

    def score(self, parameters: Flat) -> Score | None:
        """Evaluate a model with these parameters on held-out data; None where there is none."""


def forward_work(task: Task, samples: int) -> Work:
    """What a forward pass over so many samples costs."""
    return Work(
        samples * sum(block.flops for block in task.blocks),
        sum(FLOAT_BYTES * block.length + samples * block.moved_bytes for block in task.blocks),
        sum(block.kernels for block in task.blocks),
    )


def backward_work(block: Block, samples: int) -> Work:
    """What the backward pass through one block costs: twice the forward pass, and its gradients written."""
    moved_bytes = FLOAT_BYTES * block.length + samples * block.moved_bytes
    return Work(2 * samples * block.flops, 2 * moved_bytes, 2 * block.kernels)
