"""Tasks with a known result: ridge regression, and sums of gradients.

Ridge regression is strongly convex, and its optimum is known. Several outputs are predicted linearly from
features; the loss is half the mean squared error, summed over the outputs, plus half the ridge times the
squared norm of all weights. The weights W are in blocks of features. With H = XᵀX / n + ridge and the optimum
W* = H⁻¹ XᵀY / n, solved in double precision, the loss is exactly L(W*) + ½ tr((W − W*)ᵀ H (W − W*)), so that
the distance from the optimum is not lost in rounding.

The gradients of `LinearTask` do not depend on the model, so that the learned result can be added up by hand. The
loss of sample i is cᵢ·θ, so the gradient of a batch is the mean of its c, whatever the parameters are. A lost
step is missing from the sum, and a step that counted twice is in it twice, however long ago it was.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hcsim.errors import UsageError
from hcsim.rng import generator
from hcsim.runtime.channel import Phantom
from hcsim.training.data import Batches
from hcsim.training.layout import Layout
from hcsim.training.task import Block, Defaults, Flat, Indices, Score

Array: TypeAlias = npt.NDArray[np.float32]
Exact: TypeAlias = npt.NDArray[np.float64]

SAMPLES = 1024
FEATURES = (32, 16, 16)
"""By block."""
COLUMNS = tuple(slice(sum(FEATURES[:block]), sum(FEATURES[: block + 1])) for block in range(len(FEATURES)))
OUTPUTS = 16
RIDGE = 0.001
NOISE = 0.1
DATA_SEED = 0
"""The data are the same in every run, whatever its seed."""


class Convex:
    """Ridge regression. The score is over the training data, whose optimum is known."""

    name = "convex"
    phantom = False
    samples = SAMPLES
    defaults = Defaults(lr=0.05, momentum=0.9, batch=16)
    blocks: Sequence[Block] = tuple(
        Block(f"{number}", ((f"{number}.weight", (features, OUTPUTS)),), 2.0 * features * OUTPUTS,
              4.0 * (features + 2 * OUTPUTS))
        for number, features in enumerate(FEATURES)
    )  # fmt: skip
    """Weights of groups of features; each block reads its features and adds to the outputs."""

    def __init__(self) -> None:
        self.x, self.y = _data()
        x, y = self.x.astype(np.float64), self.y.astype(np.float64)
        self.curvature: Exact = x.T @ x / SAMPLES + RIDGE * np.eye(x.shape[1])
        self.optimum: Exact = np.linalg.solve(self.curvature, x.T @ y / SAMPLES).astype(np.float64)
        self.least_loss = float(
            0.5 * np.square(x @ self.optimum - y).sum() / SAMPLES + 0.5 * RIDGE * np.square(self.optimum).sum()
        )

    @cached_property
    def fingerprint(self) -> str:
        about = repr((self.name, RIDGE, [block.shapes for block in self.blocks]))
        return hashlib.sha256(about.encode() + self.x.tobytes() + self.y.tobytes()).hexdigest()

    def replica(self, seed: int, device: str = "cpu") -> ConvexReplica:
        """Return a fresh model; it is so small that it stays on the host, whatever the device."""
        replica = ConvexReplica(self.x, self.y, Layout.of([block.shapes for block in self.blocks]))
        drawn = generator(seed, "parameters").standard_normal(replica.layout.length, np.float32)
        replica.parameters[:] = drawn / np.float32(sum(FEATURES) ** 0.5)
        return replica

    def score(self, parameters: Flat) -> Score:
        """Return the loss over all training data, and its distance from the minimum."""
        if isinstance(parameters, Phantom):
            raise UsageError("convex is scored with its parameters, not with their phantom")
        weights = _by_block(parameters, Layout.of([block.shapes for block in self.blocks]))
        away = np.concatenate(weights).astype(np.float64) - self.optimum
        gap = float(0.5 * np.sum(away * (self.curvature @ away)))
        return Score(self.least_loss + gap, gap=gap)


class ConvexReplica:
    """One rank's copy of the weights."""

    def __init__(self, x: Array, y: Array, layout: Layout) -> None:
        self.layout = layout
        self.parameters: Array = np.zeros(layout.length, np.float32)
        self.gradients: Array = np.zeros(layout.length, np.float32)
        self._weights = _by_block(self.parameters, layout)
        self._slopes = _by_block(self.gradients, layout)
        self._x, self._y = x, y
        self._kept: tuple[Array, Array] | None = None

    def forward(self, batch: Indices) -> float:
        """Return the mean loss over the batch, ridge included; keep the batch's features and the output errors."""
        self._kept = None
        if len(batch) == 0:
            return 0.0
        features = self._x[batch]
        wrong = -self._y[batch]
        for columns, weight in zip(COLUMNS, self._weights, strict=True):
            # einsum adds in one order, whatever the number of threads of the linear algebra library.
            wrong += np.einsum("nf,fo->no", features[:, columns], weight)
        self._kept = features, wrong
        error = 0.5 * float(np.square(wrong).sum()) / len(batch)
        return error + 0.5 * RIDGE * float(np.square(self.parameters).sum())

    def backward(self, block: int) -> None:
        """Add the gradients of one group of features."""
        if self._kept is None:
            return  # the batch was empty
        features, wrong = self._kept
        slope = np.einsum("nf,no->fo", features[:, COLUMNS[block]], wrong) / np.float32(len(wrong))
        self._slopes[block] += slope + np.float32(RIDGE) * self._weights[block]


def _by_block(flat: Array, layout: Layout) -> list[Array]:
    return [flat[tensor.span].reshape(tensor.shape) for (tensor,) in layout.blocks]


def _data() -> tuple[Array, Array]:
    """Draw features with scales from 1 down to 1/5, so that some directions are learned slowly.

    All operations are rounded alike by every processor, in a fixed order: different machines hold the same data."""
    drawn = generator(DATA_SEED, "convex")
    features = sum(FEATURES)
    shrink: Array = np.linspace(1, 5, features).astype(np.float32)
    x = _nearly_normal(drawn, SAMPLES, features) / shrink
    truth = _nearly_normal(drawn, features, OUTPUTS) / np.float32(math.sqrt(features))
    y = np.float32(NOISE) * _nearly_normal(drawn, SAMPLES, OUTPUTS)
    for feature in range(features):
        y += x[:, feature, None] * truth[feature]
    return x, y


def _nearly_normal(drawn: np.random.Generator, rows: int, columns: int) -> Array:
    """Draw sums of twelve integers below 2¹³, minus their mean, divided by approximately their standard deviation;
    nothing is rounded."""
    whole = drawn.integers(2**13, size=(12, rows, columns)).sum(axis=0) - 6 * (2**13 - 1)
    normal: Array = (whole / 2**13).astype(np.float32)
    return normal


SLOPES_SAMPLES = 16384
SLOPES_LR = 0.5
_SHAPES = ((("w", (12, 8)),), (("v", (24,)),))
_LAYOUT = Layout.of(_SHAPES)


@cache
def _slopes() -> Array:
    """Return the gradient of each sample."""
    return generator(3, "slopes").standard_normal((SLOPES_SAMPLES, _LAYOUT.length), np.float32)


class LinearTask:
    """Gradients that do not depend on the model."""

    name = "slopes"
    phantom = False
    samples = SLOPES_SAMPLES
    defaults = Defaults(lr=SLOPES_LR, momentum=0.0, batch=4)
    blocks = tuple(Block(str(number), shapes, 1e4, 1e3) for number, shapes in enumerate(_SHAPES))

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(_slopes().tobytes()).hexdigest()

    def replica(self, seed: int, device: str = "cpu") -> LinearReplica:
        """Return a model of zeros."""
        return LinearReplica()

    def score(self, parameters: Flat) -> Score | None:
        return None


class LinearReplica:
    """One rank's copy of the parameters."""

    layout = _LAYOUT

    def __init__(self) -> None:
        self.parameters = np.zeros(_LAYOUT.length, np.float32)
        self.gradients = np.zeros(_LAYOUT.length, np.float32)
        self._batch: Indices = np.zeros(0, np.int64)

    def forward(self, batch: Indices) -> float:
        self._batch = batch
        with np.errstate(over="ignore", invalid="ignore"):  # of a model that has diverged
            return float((_slopes()[batch] @ self.parameters).mean())

    def backward(self, block: int) -> None:
        """Add the gradients of one block."""
        for tensor in _LAYOUT.blocks[block]:
            self.gradients[tensor.span] += _slopes()[self._batch][:, tensor.span].mean(axis=0)


def expected_slopes(seed: int, sizes: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the parameters after steps over global batches of these sizes."""
    order = Batches(SLOPES_SAMPLES, [SLOPES_SAMPLES], seed).batch(0, 0)
    ends = np.cumsum([0, *sizes])
    parts = [_slopes()[order[lo:hi]].astype(np.float64).mean(axis=0) for lo, hi in pairwise(ends)]
    total: npt.NDArray[np.float64] = -SLOPES_LR * np.sum(parts, axis=0)
    return total
