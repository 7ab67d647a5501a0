"""A task whose gradients do not depend on the model: what was learned can be added up by hand.

The loss of sample i is cᵢ·θ, so the gradient of a batch is the mean of its c, whatever the parameters are. A step that
was lost, or that counted twice, is then missing from the sum, or is in it twice, however long ago it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hcsim.rng import generator
from hcsim.training.data import Batches
from hcsim.training.layout import Layout
from hcsim.training.task import Block, Defaults, Flat, Indices, Score

SAMPLES = 16384
LR = 0.5
SHAPES = ((("w", (12, 8)),), (("v", (24,)),))
LAYOUT = Layout.of(SHAPES)
_SLOPES = generator(3, "slopes").standard_normal((SAMPLES, LAYOUT.length), np.float32)


class Slopes:
    """The task."""

    name = "slopes"
    phantom = False
    samples = SAMPLES
    defaults = Defaults(lr=LR, momentum=0.0, batch=4)
    fingerprint = hashlib.sha256(_SLOPES.tobytes()).hexdigest()
    blocks = tuple(Block(str(number), shapes, 1e4, 1e3) for number, shapes in enumerate(SHAPES))

    def replica(self, seed: int, device: str = "cpu") -> SlopesReplica:
        """A model of zeros."""
        return SlopesReplica()

    def score(self, parameters: Flat) -> Score | None:
        """There is nothing to be good at."""
        return None


class SlopesReplica:
    """One member's copy."""

    layout = LAYOUT

    def __init__(self) -> None:
        self.parameters = np.zeros(LAYOUT.length, np.float32)
        self.gradients = np.zeros(LAYOUT.length, np.float32)
        self._batch: Indices = np.zeros(0, np.int64)

    def forward(self, batch: Indices) -> float:
        """The mean loss."""
        self._batch = batch
        with np.errstate(over="ignore", invalid="ignore"):  # of a model that has diverged
            return float((_SLOPES[batch] @ self.parameters).mean())

    def backward(self, block: int) -> None:
        """Add the slopes of one block."""
        for tensor in LAYOUT.blocks[block]:
            self.gradients[tensor.span] += _SLOPES[self._batch][:, tensor.span].mean(axis=0)


def expected(seed: int, sizes: Sequence[int]) -> npt.NDArray[np.float64]:
    """The parameters after steps over global batches of these sizes."""
    order = Batches(SAMPLES, [SAMPLES], seed).batch(0, 0)
    ends = np.cumsum([0, *sizes])
    parts = [_SLOPES[order[lo:hi]].astype(np.float64).mean(axis=0) for lo, hi in pairwise(ends)]
    total: npt.NDArray[np.float64] = -LR * np.sum(parts, axis=0)
    return total
