"""A task whose steps take a fixed time and hardly any of the processor, in both worlds.

Four machines that share two processors disturb each other, and other programs disturb all of them. So a step is slept
for, as on a Mac whose GPU computes. The gradient is that of a slope per sample and a pull towards zero: it depends on
the batch and on the model, so a step that was lost, or that counted twice, changes all that comes after it. Single
operations on float32 in one order give the same bits on all machines.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hcsim.rng import generator
from hcsim.training.layout import Layout
from hcsim.training.task import Block, Defaults, Flat, Indices, Score

NAME = "paced"
STEP_S = 0.15
"""Of computing, for a batch of `BATCH` samples."""
BATCH = 16
SAMPLES = 1 << 14
BLOCKS = 4
LENGTH = 1 << 18
"""Parameters in all: a megabyte, which 1 Gb/s carries in 8 ms."""
PULL = np.float32(0.001)
PEAK_FLOPS = 1e12
MACHINE = f'{{ name = "paced", peak = "{PEAK_FLOPS / 1e12:g} TFLOPS", memory = "1 TB/s", overhead = "0 s" }}'
"""On this one a step takes as long in the virtual world."""
_EFFICIENCY = 0.8
_FLOPS = STEP_S * PEAK_FLOPS * _EFFICIENCY / (3 * BATCH * BLOCKS)
"""Of a block's forward pass, by sample; the backward pass takes twice that."""


class Paced:
    """The task; `sleeps` where time is real."""

    name = NAME
    phantom = False
    samples = SAMPLES
    defaults = Defaults(lr=0.05, momentum=0.9, batch=BATCH)
    blocks: Sequence[Block] = tuple(
        Block(str(number), ((f"{number}.weight", (LENGTH // BLOCKS,)),), _FLOPS, 0.0) for number in range(BLOCKS)
    )

    def __init__(self, *, sleeps: bool) -> None:
        self._pause_s = STEP_S / (3 * BATCH * BLOCKS) if sleeps else 0.0
        """Of a block's forward pass, by sample."""
        drawn = generator(0, NAME)
        self._slopes = drawn.standard_normal(LENGTH, np.float32)
        self._weights = drawn.standard_normal(SAMPLES, np.float32)

    @cached_property
    def fingerprint(self) -> str:
        """Of the data and the shapes."""
        return hashlib.sha256(self._slopes.tobytes() + self._weights.tobytes()).hexdigest()

    def replica(self, seed: int, device: str = "cpu") -> PacedReplica:
        """A model of zeros."""
        return PacedReplica(self._slopes, self._weights, self._pause_s)

    def score(self, parameters: Flat) -> Score | None:
        """A figure for the eye: the first parameter."""
        return None if not isinstance(parameters, np.ndarray) else Score(float(parameters[0]))


class PacedReplica:
    """One member's copy."""

    layout = Layout.of([block.shapes for block in Paced.blocks])

    def __init__(self, slopes: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], pause_s: float) -> None:
        self.parameters: npt.NDArray[np.float32] = np.zeros(LENGTH, np.float32)
        self.gradients: npt.NDArray[np.float32] = np.zeros(LENGTH, np.float32)
        self._slopes = slopes
        self._weights = weights
        self._pause_s = pause_s
        self._batch = 0
        self._weight = np.float32(0.0)

    def forward(self, batch: Indices) -> float:
        """The mean of the samples' weights, added one after the other."""
        self._sleep(len(batch) * BLOCKS)
        self._batch = len(batch)
        self._weight = np.float32(np.add.accumulate(self._weights[batch])[-1] / np.float32(len(batch)))
        return float(self._weight)

    def backward(self, block: int) -> None:
        """The block's part of the slopes, by the batch's weight, and the pull."""
        self._sleep(2 * self._batch)
        (tensor,) = self.layout.blocks[block]
        span = tensor.span
        self.gradients[span] += self._slopes[span] * self._weight + self.parameters[span] * PULL

    def _sleep(self, shares: int) -> None:
        if self._pause_s:
            time.sleep(shares * self._pause_s)
