"""A model of torch modules, one per block, over flat arrays.

Every parameter is a view of one flat array and every gradient a view of another. So a strategy reduces or sends
what autograd wrote, and the next forward pass reads the result, without a copy.

The blocks are cut apart at their boundaries: each starts from the detached result of the previous one. The
backward pass through a block starts from the gradient that the next block left at the cut. That is what
autograd would compute for the whole, in the same order, hence to the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hcsim.errors import ConfigError, UsageError
from hcsim.training.layout import Layout, Tensor, initial
from hcsim.training.task import Indices, Shapes

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Array = npt.NDArray[np.float32]


class ReplicaMemory:
    """The flat arrays, for a device that computes in the host's memory."""

    def __init__(self, length: int) -> None:
        self.parameters: Array = np.zeros(length, np.float32)
        self.gradients: Array = np.zeros(length, np.float32)
        self.device = torch.device("cpu")
        self.device_parameters = torch.from_numpy(self.parameters)
        self.device_gradients = torch.from_numpy(self.gradients)

    def before_forward(self) -> None:
        """Make the present parameters visible to the device."""

    def after_backward(self, span: slice) -> None:
        """Make the gradients that the device wrote in this range visible to the host."""


class MirroredMemory(ReplicaMemory):
    """The flat arrays on the host, and their mirror on a device with its own memory.

    The device is used from the first forward pass on, by the thread that runs it: MPS has to be left to one thread."""

    def __init__(self, length: int, device: torch.device) -> None:
        super().__init__(length)
        self._host_parameters = self.device_parameters
        self.device = device
        self.device_parameters = torch.empty(length, device=device)
        self.device_gradients = torch.empty(length, device=device)
        self._cleared = False

    def before_forward(self) -> None:
        """Copy all parameters: the optimizer has changed them all. They do not change again before the loss is known,
        so the copy need not be waited for."""
        self.device_parameters.copy_(self._host_parameters, non_blocking=True)
        if not self._cleared:
            self.device_gradients.zero_()
            self._cleared = True

    def after_backward(self, span: slice) -> None:
        """Add the new gradients to the host's, and set the mirror to zero."""
        self.gradients[span] += self.device_gradients[span].cpu().numpy()
        self.device_gradients[span].zero_()


def memory_on(device: str, length: int) -> ReplicaMemory:
    return ReplicaMemory(length) if device == "cpu" else MirroredMemory(length, torch.device(device))


class Passage:
    """A batch on its way through modules that are cut apart: what the backward pass needs."""

    def __init__(self, modules: Sequence[nn.Module], first_trained: int, again: Sequence[bool]) -> None:
        """The backward pass ends at the first trained module; with -1 it goes on to what enters them all. Of modules
        that are computed `again` only the input is kept."""
        self._modules = modules
        self._first_trained = first_trained
        self._again = again
        self._entering: list[torch.Tensor] = []
        """The input of each block, detached from the previous block."""
        self._leaving: list[torch.Tensor | None] = []
        """The output of each block, None if it is to be computed again."""

    def forward(self, flowing: torch.Tensor) -> torch.Tensor:
        """Run all modules, and return what leaves the last one."""
        for _ in self._modules:
            flowing = self.forward_next(flowing)
        return flowing

    def forward_next(self, flowing: torch.Tensor) -> torch.Tensor:
        """Run the next module, and keep the cut before it."""
        block = len(self._leaving)
        # Indices have no gradient, and nobody asks for those of the data and of what is frozen.
        entering = flowing.detach().requires_grad_(block > self._first_trained)
        self._entering.append(entering)
        again = self._again[block]
        with torch.set_grad_enabled(not again):
            leaving: torch.Tensor = self._modules[block](entering)
        self._leaving.append(None if again else leaving)
        return leaving

    @property
    def left(self) -> int:
        """The number of blocks that were run, and whose backward pass is still to come."""
        return len(self._leaving)

    def end_with(self, root: torch.Tensor) -> None:
        """Begin the backward pass with this, instead of with what leaves the last block."""
        self._leaving[-1] = root

    def backward(self, gradient: torch.Tensor | None) -> None:
        """Run autograd through the next block, from the gradient of its output; release what was kept for it."""
        leaving = self._leaving.pop()
        block = len(self._leaving)
        if block < self._first_trained:
            self._entering.pop()
            return
        if block < len(self._modules) - 1:
            gradient = self._entering.pop().grad
            if gradient is None:
                raise UsageError(f"block {block + 1} makes no use of what block {block} gives it")
        if leaving is None:
            leaving = self._modules[block](self._entering[block])
        if gradient is not None:
            leaving = _Cut.apply(leaving, gradient)  # type: ignore[no-untyped-call]
        assert leaving is not None
        with refused_by_name():
            leaving.backward()
        if block == self._first_trained:
            self._entering = self._entering[:block]

    def entering_gradient(self) -> torch.Tensor:
        """Return the gradient of what entered the first block, once its backward pass is done."""
        gradient = self._entering.pop().grad
        if gradient is None:
            raise UsageError("the first block of a stage makes no use of what enters it")
        return gradient


class TorchReplica:
    """One rank's copy of the model. The data are shared, and stay on the host.

    Parameters that need no gradient are frozen: they are not part of the flat arrays, and have their values already."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        loss: Loss,
        data: tuple[torch.Tensor, torch.Tensor],
        memory: ReplicaMemory,
        *,
        recompute: bool = False,
    ) -> None:
        """With `recompute`, only the input of each block is kept, and its backward pass begins with another forward
        pass."""
        compute_alike()
        self._recompute = recompute
        self._layout = layout_of(modules)
        first = next(number for number, tensors in enumerate(self._layout.blocks) if tensors)
        self._first_trained = first
        """The first block with gradients: the backward pass ends there."""
        self._modules = modules
        self._loss = loss
        self._inputs, self._targets = data
        self._memory = memory
        self._passage: Passage | None = None
        self._place()

    def _place(self) -> None:
        """Give the modules their parameters and gradients."""
        for module, tensors in zip(self._modules, self._layout.blocks, strict=True):
            place(module, tensors, self._memory)

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def parameters(self) -> Array:
        """On the host."""
        return self._memory.parameters

    @property
    def gradients(self) -> Array:
        """On the host."""
        return self._memory.gradients

    def initialise(self, seed: int, gain: float) -> None:
        """Draw fresh parameters on the host; each tensor has a random stream of its own."""
        for tensor in self._layout.tensors:
            self.parameters[tensor.span] = initial(seed, tensor, gain).reshape(-1)

    def forward(self, batch: Indices) -> float:
        """Run all blocks, and keep the cuts."""
        compute_alike()
        self._passage = None
        if len(batch) == 0:
            return 0.0
        with refused_by_name():
            return self._forward(torch.from_numpy(np.array(batch)))

    def _forward(self, batch: torch.Tensor) -> float:
        self._memory.before_forward()
        inputs, targets = self._inputs[batch], self._targets[batch]  # here until the device has read them
        flowing = inputs.to(self._memory.device, non_blocking=True)
        passage = self._begun()
        return self._loss_of(passage.forward(flowing), targets)

    def _begun(self) -> Passage:
        """Begin a forward pass."""
        again = [self._recompute] * (len(self._modules) - 1) + [False]
        self._passage = Passage(self._modules, self._first_trained, again)
        return self._passage

    def _loss_of(self, flowing: torch.Tensor, targets: torch.Tensor) -> float:
        """Compute the loss, with which the backward pass begins."""
        loss = self._loss(flowing, targets.to(self._memory.device, non_blocking=True))
        assert self._passage is not None
        self._passage.end_with(loss)
        return float(loss.detach())

    def backward(self, block: int) -> None:
        """Run autograd through one block, and release what was kept for it."""
        passage = self._passage
        if passage is None or not passage.left:
            return  # the batch was empty
        if block != passage.left - 1:
            raise UsageError(f"the backward pass comes to block {passage.left - 1} next, not to block {block}")
        passage.backward(None)
        if block < self._first_trained:
            return
        if tensors := self._layout.blocks[block]:
            self._memory.after_backward(slice(tensors[0].offset, tensors[-1].span.stop))

    def outputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the model's outputs for these inputs, without keeping anything."""
        compute_alike()
        self._memory.before_forward()
        with torch.no_grad():
            return nn.Sequential(*self._modules)(inputs.to(self._memory.device))  # type: ignore[no-any-return]


class _Cut(torch.autograd.Function):
    """A root for `backward`, whose gradient with respect to a block's output is the one found at the cut.

    Passing that gradient to `backward` instead would make torch import sympy to compare two shapes: half a
    second."""

    @staticmethod
    def forward(ctx: Any, leaving: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return leaving.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None


@contextmanager
def refused_by_name() -> Iterator[None]:
    """Explain what torch cannot do on MPS: some operations, and double precision, which Metal does not have."""
    try:
        yield
    except (NotImplementedError, TypeError) as error:
        if "MPS" not in str(error):
            raise
        what = re.search(r"operator '([^']+)'", str(error))
        if what is None:
            raise ConfigError(f"this model cannot be trained on MPS: {str(error).splitlines()[0]}") from None
        raise ConfigError(
            f"torch has no {what.group(1)} on MPS: --set device=cpu, or PYTORCH_ENABLE_MPS_FALLBACK=1 in the"
            " environment, by which such operations run on the processor"
        ) from None


def compute_alike() -> None:
    """Make results a function of the input alone.

    With more threads, sums are split and rounded differently, so that a run's digest would depend on the number
    of cores. Torch keeps the number of threads per thread, and work is done in several."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    if not torch.are_deterministic_algorithms_enabled():
        # As use_deterministic_algorithms(True, warn_only=True), which also imports torch's compiler: a second or two.
        torch.set_deterministic_debug_mode("warn")


def layout_of(modules: Sequence[nn.Module]) -> Layout:
    """Return the layout of the modules' trained parameters, which may be on the meta device."""
    return Layout.of([shapes_in(number, module, trained=True) for number, module in enumerate(modules)])


def shapes_in(number: int, module: nn.Module, *, trained: bool) -> Shapes:
    """Return the names and shapes of the trained parameters of the block of that number, or of the frozen ones."""
    return tuple(
        (f"{number}.{name}", tuple(parameter.shape))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad is trained
    )


def place(module: nn.Module, tensors: Sequence[Tensor], memory: ReplicaMemory) -> None:
    """Make the module's trained parameters views of the flat arrays."""
    named = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    for name, tensor in zip(named, tensors, strict=True):
        place_one(module, name, tensor, memory)


def place_one(module: nn.Module, name: str, tensor: Tensor, memory: ReplicaMemory) -> None:
    """Make one of the module's parameters a view of the flat arrays."""
    parameter = nn.Parameter(memory.device_parameters[tensor.span].view(tensor.shape))
    parameter.grad = memory.device_gradients[tensor.span].view(tensor.shape)
    put(module, name, parameter)


def freeze(module: nn.Module, tensors: Sequence[Tensor], values: torch.Tensor) -> None:
    """Make the module's frozen parameters views of these values."""
    named = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    for name, tensor in zip(named, tensors, strict=True):
        put(module, name, nn.Parameter(values[tensor.span].view(tensor.shape), requires_grad=False))


def put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)
