"""A task whose gradients do not depend on the model: what was sent of them can be added up.

The loss of sample i is cᵢ·θ, so the gradient of a batch is the mean of its c, whatever the parameters are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from hcsim.rng import generator
from hcsim.selftest.script import SEED
from hcsim.training.data import Batches
from hcsim.training.layout import Layout
from hcsim.training.task import Block, Defaults, Indices, Score

SAMPLES = 4096
SHAPES = ((("w", (20, 12)),), (("v", (33,)), ("u", (6, 9))))
LAYOUT = Layout.of(SHAPES)
SLOPES = generator(3, "slopes").standard_normal((SAMPLES, LAYOUT.length), np.float32)
ORDER = Batches(SAMPLES, [SAMPLES], SEED).batch(0, 0)
"""In which samples are dealt out."""


class Linear:
    name = "linear"
    phantom = False
    samples = SAMPLES
    defaults = Defaults(lr=0.5, momentum=0.0, batch=4)
    fingerprint = hashlib.sha256(SLOPES.tobytes()).hexdigest()
    blocks = tuple(Block(str(number), shapes, 1e4, 1e3) for number, shapes in enumerate(SHAPES))

    def __init__(self, spoil: Callable[[int, np.ndarray], None] = lambda number, gradients: None) -> None:
        self.spoil = spoil
        """Given the number of the backward pass, and the gradients that it came to."""
        self.replicas: list[LinearReplica] = []

    def replica(self, seed: int, device: str = "cpu") -> LinearReplica:
        self.replicas.append(LinearReplica(self.spoil))
        return self.replicas[-1]

    def score(self, parameters: object) -> Score | None:
        return None


class LinearReplica:
    layout = LAYOUT

    def __init__(self, spoil: Callable[[int, np.ndarray], None]) -> None:
        self.parameters = np.zeros(LAYOUT.length, np.float32)
        self.gradients = np.zeros(LAYOUT.length, np.float32)
        self._batch: Indices = np.zeros(0, np.int64)
        self._spoil = spoil
        self._number = 0

    def forward(self, batch: Indices) -> float:
        self._batch = batch
        return float((SLOPES[batch] @ self.parameters).mean())

    def backward(self, block: int) -> None:
        for tensor in LAYOUT.blocks[block]:
            self.gradients[tensor.span] += SLOPES[self._batch][:, tensor.span].mean(axis=0)
        if block == 0:
            self._number += 1
            self._spoil(self._number, self.gradients)


def means(sizes: list[int]) -> np.ndarray:
    """The sum of the mean gradients over global batches of these sizes, one after the other."""
    ends = np.cumsum([0, *sizes])
    parts = [SLOPES[ORDER[lo:hi]].astype(np.float64).mean(axis=0) for lo, hi in pairwise(ends)]
    return np.sum(parts, axis=0)
