"""Tasks: data, a model in blocks, and its evaluation.

A model is a sequence of blocks. The forward pass runs them all at once; the backward pass runs block by block.
So a strategy can send finished gradients while the rest is computed, with the same code for real gradients and
phantoms, and in real and virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import KernelGroup, Work
from hcsim.training.layout import FLOAT_BYTES, Layout

Indices: TypeAlias = npt.NDArray[np.int64]
"""The indices of training samples: a batch."""
Flat: TypeAlias = npt.NDArray[np.float32] | Phantom
"""A flat array of a layout, or its phantom."""


class Block(msgspec.Struct, frozen=True):
    """One block of a model, with its cost per sample."""

    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """The names and shapes of its parameters."""
    flops: float
    """FLOPs of the forward pass; the backward pass takes twice that."""
    moved_bytes: float
    """Activations read and written in the forward pass; twice that in the backward pass."""
    kernels: int = 1
    """Kernels launched in the forward pass, for any number of samples; twice as many in the backward pass."""

    @property
    def length(self) -> int:
        """The number of elements of its parameters."""
        return sum(prod(shape) for _, shape in self.shapes)


class Score(msgspec.Struct, frozen=True):
    """The evaluation of a model on held-out data."""

    loss: float
    accuracy: float | None = None
    """The share of right answers, for tasks whose answers are right or wrong."""
    gap: float | None = None
    """The loss minus its minimum, where that is known; such a loss is over the training data."""


class Defaults(msgspec.Struct, frozen=True):
    """The default settings of a task: SGD on a few workers."""

    lr: float
    momentum: float
    batch: int
    """Samples in each worker's batch."""


class Replica(Protocol):
    """One rank's copy of the model."""

    @property
    def layout(self) -> Layout: ...

    @property
    def parameters(self) -> Flat:
        """All parameters; writing to this array changes the model."""

    @property
    def gradients(self) -> Flat:
        """All gradients; the backward pass adds to them."""

    def forward(self, batch: Indices) -> float:
        """Return the mean loss over the batch, and keep what the backward pass needs.

        An empty batch, which a rank gets when an epoch ends with fewer samples than ranks, has loss 0 and no
        gradients. The loss of a phantom is not a number."""

    def backward(self, block: int) -> None:
        """Compute this block's gradients in place. Called from the last block to the first."""


class Task(Protocol):
    """A learning task."""

    @property
    def name(self) -> str:
        """The name in files and tables."""

    @property
    def blocks(self) -> Sequence[Block]:
        """In the order of the forward pass."""

    @property
    def samples(self) -> int:
        """The number of training samples."""

    @property
    def phantom(self) -> bool:
        """Whether there are only shapes and no data: a task for timing."""

    @property
    def defaults(self) -> Defaults: ...

    @property
    def fingerprint(self) -> str:
        """A digest of the data and shapes, which must be the same in runs that are compared."""

    def replica(self, seed: int, device: str = "cpu") -> Replica:
        """Return a fresh model; the same seed gives the same parameters."""

    def score(self, parameters: Flat) -> Score | None:
        """Evaluate a model with these parameters on held-out data; return None if there is none."""


def forward_work(task: Task, samples: int) -> Work:
    return Work(
        samples * sum(block.flops for block in task.blocks),
        sum(FLOAT_BYTES * block.length + samples * block.moved_bytes for block in task.blocks),
        sum(block.kernels for block in task.blocks),
        tuple(group for block in task.blocks for group in _kernels(block, samples)[0]),
        estimated=True,
    )


def backward_work(block: Block, samples: int) -> Work:
    """Return the work of the backward pass through one block: twice the forward pass, and its gradients written."""
    moved_bytes = FLOAT_BYTES * block.length + samples * block.moved_bytes
    return Work(
        2 * samples * block.flops, 2 * moved_bytes, 2 * block.kernels, _kernels(block, samples)[1], estimated=True
    )


@lru_cache(maxsize=4096)
def _kernels(block: Block, samples: int) -> tuple[tuple[KernelGroup, ...], tuple[KernelGroup, ...]]:
    """Return the kernels of the forward and of the backward pass, by the shapes of the parameters.

    Each matrix is of a product, and does its share of the FLOPs; a tensor of more dimensions is of a convolution. The
    others are elementwise. All move equal parts of the activations."""
    weights = [shape for _, shape in block.shapes if len(shape) > 1] if block.flops else []
    others = max(0, block.kernels - len(weights))
    moved_bytes = samples * block.moved_bytes / max(1, len(weights) + others)
    forward, backward = [], []
    for shape in weights:
        flops = samples * block.flops * prod(shape) / sum(map(prod, weights))
        touched_bytes = moved_bytes + FLOAT_BYTES * prod(shape)
        if len(shape) > 2:
            forward.append(KernelGroup("convolution", flops, touched_bytes))
            backward.append(KernelGroup("convolution_backward", 2 * flops, 2 * touched_bytes))
        else:
            forward.append(KernelGroup("matmul", flops, touched_bytes))
            backward.append(KernelGroup("matmul", flops, touched_bytes, 2))
    if others:
        forward.append(KernelGroup("elementwise", 0.0, moved_bytes, others))
        backward.append(KernelGroup("elementwise", 0.0, moved_bytes, 2 * others))
    return tuple(forward), tuple(backward)
