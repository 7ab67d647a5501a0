"""A task whose model is made of torch modules."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hcsim.errors import UsageError
from hcsim.runtime.channel import Phantom
from hcsim.training.layout import Layout
from hcsim.training.task import Block, Defaults, Flat, Score
from hcsim.training.tasks.torch_replica import Memory, TorchReplica, compute_alike, layout_of, memory_on, place

SCORED_AT_ONCE = 512
"""Samples, so that a score's memory is bounded."""


class Data(msgspec.Struct, frozen=True):
    """Samples and what is to be said of them."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def digest(self) -> bytes:
        """Of its bytes."""
        return hashlib.sha256(self.inputs.numpy().tobytes() + self.targets.numpy().tobytes()).digest()


class Model(msgspec.Struct, frozen=True):
    """How a network is made."""

    modules: Callable[[], Sequence[nn.Module]]
    """One for each block."""
    gain: float
    """Of fresh weights: √2 where a ReLU follows (He et al., https://arxiv.org/abs/1502.01852), else 1."""


class TorchTask:
    """Classes to be told from inputs, one for each sample or one for each place in it."""

    phantom = False

    def __init__(self, name: str, model: Model, training: Data, held_out: Data, defaults: Defaults) -> None:
        self.name = name
        self.defaults = defaults
        self.model = model
        self.training = training
        self.held_out = held_out
        self.blocks: Sequence[Block] = counted(self._on_meta(), training.inputs[:1])

    @property
    def samples(self) -> int:
        """To train on."""
        return len(self.training.inputs)

    @cached_property
    def fingerprint(self) -> str:
        """Of the data and the shapes."""
        digest = hashlib.sha256(repr((self.name, [block.shapes for block in self.blocks])).encode())
        digest.update(self.training.digest() + self.held_out.digest())
        return digest.hexdigest()

    def replica(self, seed: int, device: str = "cpu") -> TorchReplica:
        """A fresh model."""
        replica = self.replica_in(memory_on(device, Layout.of([block.shapes for block in self.blocks]).length))
        replica.initialise(seed, self.model.gain)
        return replica

    def replica_in(self, memory: Memory) -> TorchReplica:
        """A model over these arrays, as they are."""
        data = (self.training.inputs, self.training.targets)
        return TorchReplica(self._on_meta(), cross_entropy, data, memory)

    def score(self, parameters: Flat) -> Score:
        """On held-out data."""
        if isinstance(parameters, Phantom):
            raise UsageError(f"{self.name} is scored with its parameters, not with their phantom")
        self._judge.parameters[:] = parameters
        loss = right = 0.0
        for at in range(0, len(self.held_out.inputs), SCORED_AT_ONCE):
            some = self.held_out.inputs[at : at + SCORED_AT_ONCE]
            answers = self.held_out.targets[at : at + SCORED_AT_ONCE]
            outputs = self._judge.outputs(some)
            loss += float(cross_entropy(outputs, answers)) * answers.numel()
            right += int((outputs.argmax(-1) == answers).sum())
        answered = self.held_out.targets.numel()
        return Score(loss / answered, right / answered)

    @cached_property
    def _judge(self) -> TorchReplica:
        return self.replica_in(memory_on("cpu", Layout.of([block.shapes for block in self.blocks]).length))

    def _on_meta(self) -> Sequence[nn.Module]:
        """Modules without memory, for which torch draws no random numbers."""
        with torch.device("meta"):
            return self.model.modules()


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over samples, and over the places in each; classes come last in the outputs."""
    return nn.functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def counted(modules: Sequence[nn.Module], sample: torch.Tensor) -> tuple[Block, ...]:
    """What each block costs for one sample.

    Without torch's `FlopCounterMode` and meta device: they import its compiler, which takes as long as torch itself.
    """
    compute_alike()
    layout = layout_of(modules)
    memory = memory_on("cpu", layout.length)
    flowing, blocks = sample, []
    for number, (module, tensors) in enumerate(zip(modules, layout.blocks, strict=True)):
        place(module, tensors, memory)
        with _Apart(), _Counter() as count, torch.no_grad():
            flowing = module(flowing)
        shapes = tuple((tensor.name, tensor.shape) for tensor in tensors)
        # What is written is read again once.
        blocks.append(Block(f"{number}", shapes, float(count.flops), 2.0 * count.nbytes, count.kernels))
    return tuple(blocks)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs by torch's own table, and the results that are not views, and their bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.nbytes = 0
        self.kernels = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what keeps the compiler out of a mode is a part of it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        results = result if isinstance(result, tuple | list) else (result,)
        for declared, value in zip(func._schema.returns, results, strict=False):
            if isinstance(value, torch.Tensor) and declared.alias_info is None:
                self.nbytes += value.nbytes
                self.kernels += 1
        return result


class _Apart(TorchFunctionMode):
    """Has attention computed by products, also where torch has something better: so every machine counts alike."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return torch._scaled_dot_product_attention_math(*args, **(kwargs or {}))[0]
        return func(*args, **(kwargs or {}))


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A copy that torch may keep."""
    return torch.from_numpy(np.array(array))
