"""Well-known models by their shapes: their size, FLOPs and memory traffic, without any data.

FLOPs are of the forward pass for one sample (an image, or a text of some length): two for each multiply-add of the
convolutions and matrix products. Attention is included and counted in full, as customary, although half of a causal
one is masked. Bytes are of float32 activations: each result is written once and read once. Attention is assumed to be
fused: its scores never reach memory.

What is kept for the backward pass is what torch's autograd keeps of the same modules, each tensor once: the inputs of
normalisations, of activation functions and of products whose weights are trained, and what attention takes and
returns.

A task of shapes is for timing: it costs what the model would, and learns nothing.
"""

from __future__ import annotations

import hashlib

import msgspec

from hcsim.runtime.channel import Phantom
from hcsim.training.blockwise import PhantomBlocks, tied_blocks
from hcsim.training.layout import FLOAT_BYTES, Layout
from hcsim.training.task import Block, Defaults, Flat, Indices, Task

WRITTEN_AND_READ = 2 * FLOAT_BYTES
"""Bytes moved for each element of an activation."""


class PhantomTask(msgspec.Struct, frozen=True):
    """A model given by its blocks."""

    name: str
    blocks: tuple[Block, ...]
    samples: int
    defaults: Defaults
    tied: tuple[int, ...] = ()
    """Blocks whose parameters later blocks use too."""

    @property
    def phantom(self) -> bool:
        return True

    @property
    def fingerprint(self) -> str:
        """A digest of the costs."""
        return hashlib.sha256(repr((self.name, self.blocks)).encode()).hexdigest()

    def replica(self, seed: int, device: str = "cpu") -> PhantomReplica:
        return PhantomReplica(Layout.of([block.shapes for block in self.blocks], self.blocks[0].element_bytes))

    def blockwise(self, seed: int, device: str = "cpu", *, whole: bool) -> PhantomBlocks:
        return PhantomBlocks(Layout.of([block.shapes for block in self.blocks], self.blocks[0].element_bytes))

    def score(self, parameters: Flat) -> None: ...


def shapes_of(task: Task) -> PhantomTask:
    """Return a task that costs what this one does, without its data."""
    return PhantomTask(task.name, tuple(task.blocks), task.samples, task.defaults, tied_blocks(task))


class PhantomReplica:
    """A replica with sizes and no values."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.parameters = Phantom(layout.size_bytes, layout.element_bytes)
        self.gradients = Phantom(layout.size_bytes, layout.element_bytes)

    def forward(self, batch: Indices) -> float:
        return float("nan")

    def backward(self, block: int) -> None: ...
