"""A model of torch modules whose blocks have parameters and gradients only while they are computed.

Autograd keeps parameters for the backward pass, and views of them. Of these it is given a note instead: where in the
block's parameters they are. The backward pass finds them in the parameters that the block has got by then. So a block's
memory is free between its forward and its backward pass, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from hcsim.errors import UsageError
from hcsim.runtime.channel import Phantom
from hcsim.training.layout import FLOAT_BYTES, Tensor
from hcsim.training.task import Flat, Indices
from hcsim.training.tasks.torch_replica import (
    Array,
    Loss,
    ReplicaMemory,
    TorchReplica,
    compute_alike,
    put,
    refused_by_name,
)


class _Part(NamedTuple):
    """A view of a block's parameters, for autograd to keep."""

    block: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Nowhere(ReplicaMemory):
    """No arrays: they come with each block."""

    def __init__(self, device: str) -> None:
        super().__init__(0)
        self.device = torch.device(device)


class BlockPlan(NamedTuple):
    """How blocks are computed."""

    device: str
    recompute: bool = False
    tied: tuple[int, ...] = ()
    """Blocks whose parameters later blocks use too."""


class TorchBlocks(TorchReplica):
    """One rank's copy of the model, of which the caller holds the parameters."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        loss: Loss,
        data: tuple[torch.Tensor, torch.Tensor],
        draw: Callable[[Tensor], Array],
        plan: BlockPlan,
    ) -> None:
        """`draw` returns the first values of a parameter."""
        self._own: list[list[nn.Parameter]] = []
        """The parameters of each block."""
        self._nothing = torch.empty(0, device=plan.device)
        self._flat: dict[int, torch.Tensor] = {}
        """The parameters of blocks that have them, on the device."""
        self._slopes: dict[int, torch.Tensor] = {}
        """The gradients of blocks, on the device."""
        self._draw = draw
        self._tied = plan.tied
        self._flowing = self._awaited = self._nothing
        super().__init__(modules, loss, data, _Nowhere(plan.device), recompute=plan.recompute)
        size_bytes = FLOAT_BYTES * self._layout.length
        self._whole: Flat = Phantom(size_bytes, FLOAT_BYTES)
        self._absent = self._whole

    def _place(self) -> None:
        for module in self._modules:
            named = [name for name, each in module.named_parameters() if each.requires_grad]
            own = [nn.Parameter(self._nothing) for _ in named]
            for name, parameter in zip(named, own, strict=True):
                put(module, name, parameter)
            self._own.append(own)

    @property  # type: ignore[override]
    def parameters(self) -> Flat:
        """All parameters on the host, while this rank holds them; else a phantom."""
        return self._whole

    @parameters.setter
    def parameters(self, values: Flat) -> None:
        self._whole = values

    @property
    def gradients(self) -> Flat:  # type: ignore[override]
        """A phantom: they are there by block."""
        return self._absent

    def fresh(self, block: int) -> Flat:
        drawn = [self._draw(tensor).reshape(-1) for tensor in self._layout.blocks[block]]
        return np.concatenate([*drawn, np.empty(0, np.float32)])

    def room(self, lo: int, hi: int) -> Flat:
        return np.empty(hi - lo, np.float32)

    def slopes(self, lo: int, hi: int) -> Flat:
        return np.zeros(hi - lo, np.float32)

    def begin(self, batch: Indices) -> None:
        compute_alike()
        self._begun()
        self._flat.clear()
        self._slopes.clear()
        rows = torch.from_numpy(np.array(batch))
        self._flowing, self._awaited = self._inputs[rows], self._targets[rows]

    def forward_block(self, block: int, parameters: Flat) -> float:
        compute_alike()
        passage = self._passage
        assert passage is not None
        if block != passage.left:
            raise UsageError(f"the forward pass comes to block {passage.left} next, not to block {block}")
        self._give(block, parameters)
        with refused_by_name(), torch.autograd.graph.saved_tensors_hooks(self._noted, self._found):
            entering = self._flowing.to(self._memory.device)
            self._flowing = passage.forward_next(entering)
            last = block == len(self._modules) - 1
            loss = self._loss_of(self._flowing, self._awaited) if last else float("nan")
        if block not in self._tied:
            self._take_away(block)
        if last:
            self._flowing = self._awaited = self._nothing
        return loss

    def backward_block(self, block: int, parameters: Flat, gradients: Flat) -> None:
        assert not isinstance(gradients, Phantom)
        compute_alike()
        if block not in self._tied:
            self._give(block, parameters)
            self.gather_slopes(block, gradients)
        super().backward(block)
        for parameter in self._own[block]:
            parameter.grad = None
        place = self._slopes.pop(block)
        if place.device.type != "cpu":
            gradients += place.cpu().numpy()
        self._take_away(block)

    def gather_slopes(self, block: int, gradients: Flat) -> None:
        assert not isinstance(gradients, Phantom)
        host, device = torch.from_numpy(gradients), self._memory.device
        place = self._slopes[block] = host if device.type == "cpu" else torch.zeros(host.shape, device=device)
        for parameter, piece in zip(self._own[block], self._pieces(block, place), strict=True):
            parameter.grad = piece

    def _give(self, block: int, parameters: Flat) -> None:
        """Make these the parameters of the block."""
        assert not isinstance(parameters, Phantom)
        flat = self._flat[block] = torch.from_numpy(parameters).to(self._memory.device)
        for parameter, piece in zip(self._own[block], self._pieces(block, flat), strict=True):
            parameter.data = piece

    def _take_away(self, block: int) -> None:
        for parameter in self._own[block]:
            parameter.data = self._nothing
        del self._flat[block]

    def _pieces(self, block: int, flat: torch.Tensor) -> list[torch.Tensor]:
        tensors = self._layout.blocks[block]
        start = tensors[0].offset if tensors else 0
        return [flat[t.offset - start : t.span.stop - start].view(t.shape) for t in tensors]

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor | _Part:
        place = tensor.untyped_storage().data_ptr()
        for block, flat in self._flat.items():
            if flat.numel() and flat.untyped_storage().data_ptr() == place:
                return _Part(block, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return tensor

    def _found(self, kept: torch.Tensor | _Part) -> torch.Tensor:
        return self._flat[kept.block].as_strided(*kept[1:]) if isinstance(kept, _Part) else kept
