"""Precision, and what is kept for the backward pass: a task as the settings want it.

With `precision = "bf16"` weights, activations and gradients are bfloat16, and gradients are exchanged as such. The
optimizer keeps a float32 copy of the weights and updates that, then rounds it (Micikevicius et al., "Mixed Precision
Training", https://arxiv.org/abs/1710.03740; bfloat16 has float32's range, so that losses need no scaling). An update
moves as many bytes as in float32: those that weights and gradients save are those of the copy. Compressors take and
send what they do of float32. Products are as fast as in float32, except on machines whose curves say otherwise.

With `recompute` only the inputs of blocks are kept from the forward pass (Chen et al., "Training Deep Nets with
Sublinear Memory Cost", https://arxiv.org/abs/1604.06174). The backward pass computes each block again, except the last
one, whose turn comes at once.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from msgspec.structs import replace

from hcsim.compressors.base import Compressor
from hcsim.compressors.cast import Dense
from hcsim.compressors.registry import make
from hcsim.config.training import Training
from hcsim.errors import ConfigError
from hcsim.training.task import ELEMENT_BYTES, Activations, Block, Task, recomputed
from hcsim.training.tasks.shapes import shapes_of

NARROW = "bfloat16"


@runtime_checkable
class Recomputable(Protocol):
    """A task with data whose replicas can compute blocks again."""

    def recomputing(self) -> Task:
        """Return the task with such replicas."""


def prepared(task: Task, settings: Training) -> Task:
    """Return the task as it is trained."""
    if settings.precision == "bf16":
        if not task.phantom:
            raise ConfigError(
                f'precision = "bf16": {task.name} has data, and is trained in float32; tasks of shapes are simulated '
                'with it, and compressor = "bf16" halves what is exchanged'
            )
        task = replace(shapes_of(task), blocks=tuple(map(_narrowed, task.blocks)))
    if not settings.recompute:
        return task
    if task.phantom:
        return replace(shapes_of(task), blocks=recomputed(task.blocks))
    if not isinstance(task, Recomputable):
        raise ConfigError(f"recompute = true: {task.name} keeps no activations that could be computed again")
    return task.recomputing()


def compressor_of(settings: Training, seed: int, rank: int) -> Compressor:
    """Return the compressor of the settings, whose uncompressed elements are as wide as the gradients."""
    compressor = make(settings.compressor, seed=seed, rank=rank)
    if settings.precision == "bf16" and isinstance(compressor, Dense):
        return Dense(compressor.spec, ELEMENT_BYTES[NARROW])
    return compressor


def _narrowed(block: Block) -> Block:
    share = ELEMENT_BYTES[NARROW] / block.element_bytes
    kept = block.activations
    if kept is not None:
        kept = Activations(share * kept.entering_bytes, share * kept.kept_bytes, share * kept.working_bytes)
    return replace(block, dtype=NARROW, moved_bytes=share * block.moved_bytes, activations=kept)
