"""A task of shapes alone, for timing: it costs what the model would, and learns nothing."""

from __future__ import annotations

import hashlib

import msgspec

from hcsim.runtime.channel import Phantom
from hcsim.training.layout import FLOAT_BYTES, Layout
from hcsim.training.task import Block, Defaults, Flat, Indices


class PhantomTask(msgspec.Struct, frozen=True):
    """A model by its blocks."""

    name: str
    blocks: tuple[Block, ...]
    samples: int
    defaults: Defaults

    @property
    def phantom(self) -> bool:
        """There is no data."""
        return True

    @property
    def fingerprint(self) -> str:
        """Of what it costs."""
        return hashlib.sha256(repr((self.name, self.blocks)).encode()).hexdigest()

    def replica(self, seed: int, device: str = "cpu") -> PhantomReplica:
        """All replicas are alike."""
        return PhantomReplica(Layout.of([block.shapes for block in self.blocks]))

    def score(self, parameters: Flat) -> None:
        """There is nothing to score."""


class PhantomReplica:
    """Sizes without values."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.parameters = Phantom(layout.size_bytes, FLOAT_BYTES)
        self.gradients = Phantom(layout.size_bytes, FLOAT_BYTES)

    def forward(self, batch: Indices) -> float:
        """There is no loss."""
        return float("nan")

    def backward(self, block: int) -> None:
        """There is nothing to put anywhere."""
