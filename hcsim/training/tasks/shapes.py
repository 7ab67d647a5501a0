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

from hcsim.errors import ConfigError
from hcsim.runtime.channel import Phantom
from hcsim.training.blockwise import PhantomBlocks
from hcsim.training.layout import FLOAT_BYTES, Layout
from hcsim.training.task import Block, Defaults, Flat, Indices, Task, Tie, needs_gradients, stage_blocks

WRITTEN_AND_READ = 2 * FLOAT_BYTES
"""Bytes moved for each element of an activation."""


class PhantomTask(msgspec.Struct, frozen=True):
    """A model given by its blocks."""

    name: str
    blocks: tuple[Block, ...]
    samples: int
    defaults: Defaults
    ties: tuple[Tie, ...] = ()

    @property
    def phantom(self) -> bool:
        return True

    @property
    def entering(self) -> tuple[int, ...]:
        """See `Sequential.entering`."""
        found = []
        for block in self.blocks:
            if block.activations is None:
                raise ConfigError(
                    f"{self.name} cannot be cut into stages: block {block.name} does not say what enters it"
                )
            found.append(round(block.activations.entering_bytes / block.element_bytes))
        return tuple(found)

    def stage(self, first: int, end: int) -> PhantomStage:
        """See `Sequential.stage`."""
        leaving = self.entering[end] if end < len(self.blocks) else 0
        entering = self.entering[first] if first and needs_gradients(self, first) else 0
        blocks = stage_blocks(self, first, end)
        name = f"{self.name}[{first}:{end}]"
        return PhantomStage(name, blocks, self.samples, self.defaults, passes=(entering, leaving))

    @property
    def fingerprint(self) -> str:
        """A digest of the costs."""
        return hashlib.sha256(repr((self.name, self.blocks)).encode()).hexdigest()

    def replica(self, seed: int, device: str = "cpu") -> PhantomReplica:
        return PhantomReplica(Layout.of([block.shapes for block in self.blocks], self.blocks[0].element_bytes))

    def blockwise(self, seed: int, device: str = "cpu", *, whole: bool) -> PhantomBlocks:
        return PhantomBlocks(Layout.of([block.shapes for block in self.blocks], self.blocks[0].element_bytes))

    def score(self, parameters: Flat) -> None: ...


class PhantomStage(PhantomTask, frozen=True):
    """A run of a model's blocks."""

    passes: tuple[int, int] = (0, 0)
    """The elements for each sample of the gradient that it passes back, and of the activation that it passes on."""

    def replica(self, seed: int, device: str = "cpu") -> PhantomStageReplica:
        layout = Layout.of([block.shapes for block in self.blocks], self.blocks[0].element_bytes)
        return PhantomStageReplica(layout, self.passes)


def shapes_of(task: Task) -> PhantomTask:
    """Return a task that costs what this one does, without its data."""
    ties = tuple(getattr(task, "ties", ()))
    return PhantomTask(task.name, tuple(task.blocks), task.samples, task.defaults, ties)


class PhantomReplica:
    """A replica with sizes and no values."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.parameters = Phantom(layout.size_bytes, layout.element_bytes)
        self.gradients = Phantom(layout.size_bytes, layout.element_bytes)

    def forward(self, batch: Indices) -> float:
        return float("nan")

    def backward(self, block: int) -> None: ...


class PhantomStageReplica(PhantomReplica):
    """A replica of a run of blocks."""

    def __init__(self, layout: Layout, passes: tuple[int, int]) -> None:
        super().__init__(layout)
        self._back, self._on = passes
        self._samples: dict[int, int] = {}

    def forward_stage(
        self, number: int, batch: Indices, entering: Flat | None, share: float
    ) -> tuple[float, Flat | None]:
        self._samples[number] = len(batch)
        return float("nan"), self._of(self._on, number) if self._on else None

    def backward_stage(self, number: int, block: int, leaving: Flat | None, *, last: bool) -> Flat | None:
        return self._of(self._back, number) if self._back and block == 0 else None

    def _of(self, elements: int, number: int) -> Phantom:
        width = self.layout.element_bytes
        return Phantom(width * elements * self._samples[number], width)
