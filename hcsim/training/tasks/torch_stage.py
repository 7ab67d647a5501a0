"""A stage of a model of torch modules: a run of its blocks, through which several microbatches go at a time.

A stage computes what the whole model would, to the bit: its blocks are cut apart at their boundaries as those of a
`TorchReplica` are, and what crosses a boundary to another stage is the same array. Gradients of microbatches are added
by autograd, in the order of the backward passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from hcsim.errors import ConfigError
from hcsim.training.layout import Layout, initial
from hcsim.training.task import (
    Block,
    Defaults,
    Flat,
    Indices,
    Score,
    Tie,
    needs_gradients,
    sequential,
    stage_blocks,
)
from hcsim.training.tasks.torch_replica import (
    Array,
    Passage,
    ReplicaMemory,
    compute_alike,
    memory_on,
    place,
    place_one,
    refused_by_name,
)


class WholeTask(Protocol):
    """What a stage needs of the task of the whole model."""

    name: str
    blocks: Sequence[Block]
    defaults: Defaults
    recompute: bool
    model: Any
    training: Any

    @property
    def samples(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def phantom(self) -> bool: ...

    @property
    def ties(self) -> tuple[Tie, ...]: ...

    def entering_shape(self, block: int) -> tuple[int, ...]: ...

    def modules_on(self, device: torch.device) -> Sequence[nn.Module]: ...

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...


class TorchStage:
    """The task of a run of blocks."""

    phantom = False

    def __init__(self, whole: Any, first: int, end: int) -> None:
        self.whole: WholeTask = whole
        self.first, self.end = first, end
        self.name = f"{whole.name}[{first}:{end}]"
        self.defaults = whole.defaults
        self.samples = whole.samples
        self.fingerprint = whole.fingerprint
        self.blocks: Sequence[Block] = stage_blocks(whole, first, end)
        self.layout = Layout.of([block.shapes for block in self.blocks])
        self.is_last = end == len(whole.blocks)
        self.passes_back = first > 0 and needs_gradients(whole, first)

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Those whose owner is in another stage."""
        inside = range(self.first, self.end)
        return tuple(tie for tie in sequential(self.whole).ties if tie.user in inside and tie.owner not in inside)  # type: ignore[arg-type]

    def replica(self, seed: int, device: str = "cpu") -> TorchStageReplica:
        replica = TorchStageReplica(self, memory_on(device, self.layout.length))
        for tensor in self.layout.tensors:
            replica.parameters[tensor.span] = initial(seed, tensor, self.whole.model.gain).reshape(-1)
        return replica

    def score(self, parameters: Flat) -> Score | None:
        """Return None: a part of a model cannot be evaluated by itself."""
        return None


class TorchStageReplica:
    """One rank's run of blocks."""

    def __init__(self, stage: TorchStage, memory: ReplicaMemory) -> None:
        compute_alike()
        self.layout = stage.layout
        self._stage = stage
        self._memory = memory
        whole = stage.whole.modules_on(memory.device)
        self._modules = list(whole[stage.first : stage.end])
        ties = stage.ties
        for number, (module, tensors) in enumerate(zip(self._modules, stage.layout.blocks, strict=True)):
            shared = [tie for tie in ties if tie.user == stage.first + number and tensors]
            owned = tensors[: len(tensors) - len(shared)]
            place(module, owned, memory)
            for tie, tensor in zip(shared, tensors[len(owned) :], strict=True):
                place_one(whole[tie.owner], tie.tensor.partition(".")[2], tensor, memory)
        trained = (number for number, tensors in enumerate(self.layout.blocks) if tensors)
        self._first_trained = -1 if stage.passes_back else next(trained, len(self._modules))
        self._again = [stage.whole.recompute] * len(self._modules)
        if stage.is_last:
            self._again[-1] = False
        self._passages: dict[int, tuple[Passage, int]] = {}
        """The microbatches under way, and their samples."""

    @property
    def parameters(self) -> Array:
        """On the host."""
        return self._memory.parameters

    @property
    def gradients(self) -> Array:
        """On the host."""
        return self._memory.gradients

    def forward(self, batch: Indices) -> float:
        raise NotImplementedError("a stage computes microbatches: `forward_stage`")

    def backward(self, block: int) -> None:
        raise NotImplementedError("a stage computes microbatches: `backward_stage`")

    def forward_stage(
        self, number: int, batch: Indices, entering: Flat | None, share: float
    ) -> tuple[float, Array | None]:
        """See `StageReplica.forward_stage`."""
        compute_alike()
        with refused_by_name(), _own_parameters(self._stage.name):
            return self._forward(number, torch.from_numpy(batch.copy()), entering, share)

    def _forward(
        self, number: int, batch: torch.Tensor, entering: Flat | None, share: float
    ) -> tuple[float, Array | None]:
        stage, device, samples = self._stage, self._memory.device, len(batch)
        if number == 0:
            self._memory.before_forward()
        if entering is None:
            flowing = stage.whole.training.inputs[batch].to(device, non_blocking=True)
        else:
            flowing = self._tensor(entering, samples, stage.first)
        passage = Passage(self._modules, self._first_trained, self._again)
        leaving = passage.forward(flowing)
        self._passages[number] = passage, samples
        if not stage.is_last:
            return float("nan"), _flat(leaving, stage.name)
        targets = stage.whole.training.targets[batch].to(device, non_blocking=True)
        loss = stage.whole.loss(leaving, targets)
        passage.end_with(loss if share == 1 else loss * share)
        return float(loss.detach()), None

    def backward_stage(self, number: int, block: int, leaving: Flat | None, *, last: bool) -> Array | None:
        """See `StageReplica.backward_stage`."""
        compute_alike()
        passage, samples = self._passages[number]
        with refused_by_name(), _own_parameters(self._stage.name):
            passage.backward(None if leaving is None else self._tensor(leaving, samples, self._stage.end))
            if last and (tensors := self.layout.blocks[block]):
                self._memory.after_backward(slice(tensors[0].offset, tensors[-1].span.stop))
            if block:
                return None
            del self._passages[number]
            return _flat(passage.entering_gradient(), self._stage.name) if self._stage.passes_back else None

    def _tensor(self, flat: Flat, samples: int, block: int) -> torch.Tensor:
        """Return what enters a block of the whole model, or its gradient, as a tensor on the device."""
        shape = self._stage.whole.entering_shape(block)
        return torch.from_numpy(flat).view(samples, *shape).to(self._memory.device)


@contextmanager
def _own_parameters(name: str) -> Iterator[None]:
    """Explain what comes of parameters that are not here: those of other stages are on the meta device."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        unnamed = "the task has to name them as its ties"
        raise ConfigError(f"{name} computes with parameters of another stage: {unnamed}") from error


def _flat(tensor: torch.Tensor, name: str) -> Array:
    """Return the tensor as a flat array on the host."""
    if tensor.dtype != torch.float32:
        raise ConfigError(f"{name} gives {tensor.dtype}, but stages exchange float32")
    array: Array = tensor.detach().contiguous().view(-1).cpu().numpy()
    return array
