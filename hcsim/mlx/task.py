"""A task with a model of MLX modules, one per block, for `hcsim run --task` and elastic training.

A plugin registers it: `register_task("mine", lambda: MlxTask("mine", …))`. Strategies work on flat arrays; the forward
pass copies the parameters into MLX. MLX is lazy, so the backward pass through a block computes what that block's
gradients need, and a strategy sends them while the rest is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten

from hcsim.errors import UsageError
from hcsim.mlx.arrays import MlxArray, read
from hcsim.mlx.graph import kernels
from hcsim.runtime.channel import Phantom
from hcsim.training.layout import FLOAT_BYTES, Layout, initial
from hcsim.training.task import Block, Defaults, Flat, Indices, Score

Loss = Callable[[MlxArray, MlxArray], MlxArray]
"""The mean loss over a batch, of the outputs and the targets."""


class MlxData(msgspec.Struct, frozen=True):
    """Samples and their targets, along the first axis."""

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[Any]


class MlxTask:
    """A model in blocks, its data, and its loss."""

    phantom = False

    def __init__(
        self,
        name: str,
        modules: Callable[[], Sequence[nn.Module]],
        training: MlxData,
        held_out: MlxData,
        *,
        loss: Loss | None = None,
        defaults: Defaults | None = None,
        gain: float = 2**0.5,
    ) -> None:
        """`modules` makes one module for each block. Without a loss, targets are classes, and the score counts the
        right ones. `gain` is that of fresh weights, whose variance is gain² / fan-in."""
        self.name = name
        self.defaults = defaults or Defaults(lr=0.1, momentum=0.9, batch=32)
        self._modules = modules
        self._training = training
        self._held_out = held_out
        self._classes = loss is None
        self._loss = loss or _cross_entropy
        self._gain = gain
        self.blocks: Sequence[Block] = _counted(modules(), mx.array(training.inputs[:1]))

    @property
    def samples(self) -> int:
        return len(self._training.inputs)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr((self.name, [block.shapes for block in self.blocks])).encode())
        for data in (self._training, self._held_out):
            digest.update(np.ascontiguousarray(data.inputs).tobytes() + np.ascontiguousarray(data.targets).tobytes())
        return digest.hexdigest()

    def replica(self, seed: int, device: str = "cpu") -> MlxReplica:
        """Return a fresh model. MLX computes on its own default device."""
        replica = MlxReplica(self._modules(), self._loss, self._training)
        for tensor in replica.layout.tensors:
            replica.parameters[tensor.span] = initial(seed, tensor, self._gain).reshape(-1)
        return replica

    def score(self, parameters: Flat) -> Score:
        if isinstance(parameters, Phantom):
            raise UsageError(f"{self.name} is scored with its parameters, not with their phantom")
        judge = MlxReplica(self._modules(), self._loss, self._held_out)
        judge.parameters[...] = parameters
        outputs = judge.outputs(mx.array(self._held_out.inputs))
        targets = mx.array(self._held_out.targets)
        right = (outputs.argmax(-1) == targets).mean().item() if self._classes else None
        return Score(self._loss(outputs, targets).item(), right)


class MlxReplica:
    """One rank's copy of the model."""

    def __init__(self, modules: Sequence[nn.Module], loss: Loss, data: MlxData) -> None:
        self._modules = modules
        self._loss = loss
        self._data = data
        self.layout = Layout.of(_shapes(modules))
        self.parameters: npt.NDArray[np.float32] = np.zeros(self.layout.length, np.float32)
        self.gradients: npt.NDArray[np.float32] = np.zeros(self.layout.length, np.float32)
        self._left: list[dict[str, MlxArray]] = []
        """The gradients of the blocks that the backward pass has yet to come to."""

    def forward(self, batch: Indices) -> float:
        """Return the loss. The gradients are computed when the backward pass asks for them."""
        self._left = []
        if len(batch) == 0:
            return 0.0
        inputs, targets = mx.array(self._data.inputs[batch]), mx.array(self._data.targets[batch])

        def loss_of(parameters: list[dict[str, MlxArray]]) -> MlxArray:
            return self._loss(self._run(parameters, inputs), targets)

        loss, self._left = mx.value_and_grad(loss_of)(self._present())
        return float(loss.item())

    def backward(self, block: int) -> None:
        """Compute and add the gradients of one block."""
        if not self._left:
            return  # the batch was empty
        if block != len(self._left) - 1:
            raise UsageError(f"the backward pass comes to block {len(self._left) - 1} next, not to block {block}")
        gradients = self._left.pop()
        mx.eval(gradients)
        for tensor, gradient in zip(self.layout.blocks[block], gradients.values(), strict=True):
            self.gradients[tensor.span] += read(gradient)

    def outputs(self, inputs: MlxArray) -> MlxArray:
        """Return the model's outputs for these inputs."""
        return self._run(self._present(), inputs)

    def _present(self) -> list[dict[str, MlxArray]]:
        """Copy the parameters into MLX, by block and name."""
        return [
            {tensor.name: mx.array(tensor.view(self.parameters)) for tensor in tensors}
            for tensors in self.layout.blocks
        ]

    def _run(self, parameters: list[dict[str, MlxArray]], flowing: MlxArray) -> MlxArray:
        for module, own in zip(self._modules, parameters, strict=True):
            module.update(tree_unflatten([(name.partition(".")[2], value) for name, value in own.items()]))
            flowing = module(flowing)
        return flowing


def _shapes(modules: Sequence[nn.Module]) -> list[list[tuple[str, tuple[int, ...]]]]:
    return [
        [(f"{number}.{name}", tuple(value.shape)) for name, value in tree_flatten(module.trainable_parameters())]
        for number, module in enumerate(modules)
    ]


def _cross_entropy(outputs: MlxArray, targets: MlxArray) -> MlxArray:
    return nn.losses.cross_entropy(outputs, targets, reduction="mean")


def _counted(modules: Sequence[nn.Module], flowing: MlxArray) -> tuple[Block, ...]:
    """Return the cost of each block for one sample."""
    blocks = []
    for number, (module, shapes) in enumerate(zip(modules, _shapes(modules), strict=True)):
        mx.eval(module.parameters(), flowing)
        flowing = module(flowing)
        work = kernels([flowing])
        own = Block(f"{number}", tuple(shapes), 0.0, 0.0)
        moved_bytes = sum(kernel.moved_bytes for kernel in work) - FLOAT_BYTES * own.length
        flops = sum(kernel.flops for kernel in work)
        blocks.append(Block(own.name, own.shapes, flops, max(0.0, moved_bytes), max(1, len(work))))
    return tuple(blocks)
