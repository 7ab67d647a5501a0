"""Tasks: data, a model in blocks, and its evaluation.

A model is a sequence of blocks. The forward pass runs them all at once; the backward pass runs block by block.
So a strategy can send finished gradients while the rest is computed, with the same code for real gradients and
phantoms, and in real and virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from hcsim.errors import ConfigError
from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import KernelGroup, Work
from hcsim.training.layout import FLOAT_BYTES, Layout

Indices: TypeAlias = npt.NDArray[np.int64]
"""The indices of training samples: a batch."""
Flat: TypeAlias = npt.NDArray[np.float32] | Phantom
"""A flat array of a layout, or its phantom."""


Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of tensors."""


class Activations(msgspec.Struct, frozen=True):
    """What a block keeps in memory for one sample, in bytes."""

    entering_bytes: float
    """Its input: all that is kept from one pass to the other if the block is computed again."""
    kept_bytes: float
    """From its forward pass to its backward pass."""
    working_bytes: float = 0.0
    """At most, in addition, during its backward pass: gradients of activations."""


class Block(msgspec.Struct, frozen=True):
    """One block of a model, with its cost per sample."""

    name: str
    shapes: Shapes
    """The names and shapes of the parameters that are trained."""
    flops: float
    """FLOPs of the forward pass; the backward pass takes twice that."""
    moved_bytes: float
    """Activations read and written in the forward pass; twice that in the backward pass."""
    kernels: int = 1
    """Kernels launched in the forward pass, for any number of samples; twice as many in the backward pass."""
    frozen: Shapes = ()
    """Parameters that are not trained: they are read, and have no gradients."""
    backward_flops: float | None = None
    """FLOPs of the backward pass, where they are not twice those of the forward pass. With 0, there is no backward
    pass."""
    activations: Activations | None = None
    """None: all results are kept (half of `moved_bytes`, since each is written once and read once)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, gradients and activations."""
    recompute: bool = False
    """Whether the forward pass is computed again before the backward pass, from the block's input."""

    @property
    def length(self) -> int:
        """The number of elements of its trained parameters."""
        return sum(prod(shape) for _, shape in self.shapes)

    @property
    def frozen_length(self) -> int:
        return sum(prod(shape) for _, shape in self.frozen)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def is_trained(self) -> bool:
        """Whether there is a backward pass."""
        return self.backward_flops is None or self.backward_flops > 0


ELEMENT_BYTES = {"float32": FLOAT_BYTES, "bfloat16": 2}


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


class Tie(NamedTuple):
    """A parameter of one block that another block computes with too, as a head does with an embedding's matrix."""

    tensor: str
    owner: int
    user: int


class StageReplica(Replica, Protocol):
    """One rank's run of a model's blocks, through which several microbatches go at a time.

    Blocks are counted from the first of the run. An activation is a flat array, sample by sample."""

    def forward_stage(
        self, number: int, batch: Indices, entering: Flat | None, share: float
    ) -> tuple[float, Flat | None]:
        """Compute microbatch `number` of a step with what the blocks before gave, and keep what its backward pass
        needs. The first run of blocks takes the samples themselves, and no array.

        Return the mean loss and nothing, if these are the model's last blocks; otherwise not a number, and what
        leaves. `share` is what the microbatch's mean loss counts in that of the whole batch."""

    def backward_stage(self, number: int, block: int, leaving: Flat | None, *, last: bool) -> Flat | None:
        """Add a block's gradients of this microbatch to the others, from the last block to the first. `leaving` is the
        gradient of what left, for the last block, unless it ends in the loss. With the step's last microbatch the
        gradients are complete.

        Return the gradient of what entered, of the first block, if the blocks before need it."""


@runtime_checkable
class Sequential(Protocol):
    """A task whose blocks are a chain: each computes with the result of the one before, and nothing else."""

    @property
    def entering(self) -> Sequence[int]:
        """By block, the elements of its input for one sample; what enters the first block is data."""

    @property
    def ties(self) -> Sequence[Tie]: ...

    def stage(self, first: int, end: int) -> Task:
        """Return the task of the blocks from `first` to before `end`, whose replicas are `StageReplica`s.

        A block that shares a parameter of a block outside has a copy of it, as its last tensor."""


def sequential(task: Task) -> Sequential:
    """Return the task, if it can be cut into runs of blocks."""
    if not isinstance(task, Sequential):
        raise ConfigError(f"{task.name} cannot be cut into stages: its blocks are not a chain")
    return task


def stage_blocks(task: Task, first: int, end: int) -> tuple[Block, ...]:
    """Return the blocks of a stage, with copies of the parameters that they share with blocks outside."""
    blocks = list(task.blocks[first:end])
    for tensor, owner, user in sequential(task).ties:
        if first <= user < end and not first <= owner < end:
            block = blocks[user - first]
            where = "shapes" if any(name == tensor for name, _ in task.blocks[owner].shapes) else "frozen"
            shape = next(shape for name, shape in getattr(task.blocks[owner], where) if name == tensor)
            blocks[user - first] = replace(block, **{where: (*getattr(block, where), (tensor, shape))})
    return tuple(blocks)


def needs_gradients(task: Task, end: int) -> bool:
    """Return whether any block before `end` has a backward pass, so that it needs the gradient of what leaves."""
    return any(block.is_trained for block in task.blocks[:end])


class TaskSpec(msgspec.Struct, frozen=True):
    """The figures of a task that a spec sets ("gpt2:tokens=512"): a struct with a field for each."""

    def task(self, name: str) -> Task:
        """Return the task with these figures; `name` is the whole spec."""
        raise NotImplementedError


def recomputed(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return the blocks, all but the last of which are computed again."""
    return (*(replace(block, recompute=True) for block in blocks[:-1]), blocks[-1])


def forward_work(task: Task, samples: int) -> Work:
    return joined_work([block_forward_work(block, samples) for block in task.blocks])


def block_works(block: Block, samples: int) -> tuple[Work, Work]:
    """Return the work of a forward and of a backward pass through a block."""
    return block_forward_work(block, samples), backward_work(block, samples)


def block_forward_work(block: Block, samples: int) -> Work:
    """Return the work of the forward pass through one block."""
    weights_bytes = block.element_bytes * (block.length + block.frozen_length)
    moved_bytes = weights_bytes + samples * block.moved_bytes
    return Work(samples * block.flops, moved_bytes, block.kernels, _kernels(block, samples)[0], estimated=True)


def backward_work(block: Block, samples: int) -> Work:
    """Return the work of the backward pass through one block: twice the forward pass, and its gradients written.

    Frozen weights are read once, and have no gradients. A block that keeps nothing but its input computes its forward
    pass again."""
    if not block.is_trained:
        return Work(kernels=0, estimated=True)
    flops = samples * (2 * block.flops if block.backward_flops is None else block.backward_flops)
    weights_bytes = block.element_bytes * (2 * block.length + block.frozen_length)
    moved_bytes = weights_bytes + 2 * (samples * block.moved_bytes)
    work = Work(flops, moved_bytes, 2 * block.kernels, _kernels(block, samples)[1], estimated=True)
    return joined_work([block_forward_work(block, samples), work]) if block.recompute else work


def joined_work(works: Sequence[Work]) -> Work:
    """Return all of these, one after the other."""
    return Work(
        sum(work.flops for work in works),
        sum(work.moved_bytes for work in works),
        sum(work.kernels for work in works),
        tuple(group for work in works for group in work.groups),
        estimated=True,
    )


@lru_cache(maxsize=4096)
def _kernels(block: Block, samples: int) -> tuple[tuple[KernelGroup, ...], tuple[KernelGroup, ...]]:
    """Return the kernels of the forward and of the backward pass, by the shapes of the parameters.

    Each matrix is of a product, and does its share of the FLOPs; a tensor of more dimensions is of a convolution. The
    others are elementwise. All move equal parts of the activations. The backward pass has one product for the gradient
    of a weight's input, and one for that of the weight, unless that is frozen."""
    weights = [(shape, True) for _, shape in block.shapes] + [(shape, False) for _, shape in block.frozen]
    weights = [(shape, trained) for shape, trained in weights if len(shape) > 1 and block.flops]
    others = max(0, block.kernels - len(weights))
    moved_bytes = samples * block.moved_bytes / max(1, len(weights) + others)
    elements = sum(prod(shape) for shape, _ in weights)
    twice = sum(prod(shape) * (1 + trained) for shape, trained in weights)
    forward, backward = [], []
    for shape, trained in weights:
        flops = samples * block.flops * prod(shape) / elements
        back = flops if block.backward_flops is None else samples * block.backward_flops * prod(shape) / twice
        touched_bytes = moved_bytes + block.element_bytes * prod(shape)
        if len(shape) > 2:
            forward.append(KernelGroup("convolution", flops, touched_bytes, 1, block.dtype))
            sides = 1 + trained
            group = KernelGroup("convolution_backward", sides * back, sides * touched_bytes, 1, block.dtype)
            backward.append(group)
        else:
            forward.append(KernelGroup("matmul", flops, touched_bytes, 1, block.dtype))
            backward.append(KernelGroup("matmul", back, touched_bytes, 1 + trained, block.dtype))
    if others:
        forward.append(KernelGroup("elementwise", 0.0, moved_bytes, others, block.dtype))
        backward.append(KernelGroup("elementwise", 0.0, moved_bytes, 2 * others, block.dtype))
    return tuple(forward), tuple(backward)
