"""The tensors of a model under the names that they have when nothing of it is wrapped.

A tensor that all ranks hold is saved once, by one of them. One that is divided among the ranks (`Sharded`) is saved
in pieces under the name and shape that it has in the whole model, so that any number of ranks, or one, can read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hcsim.errors import CheckpointError
from hcsim.training.modules.sharded import Sharded


class Range(NamedTuple):
    """Some elements of a tensor, as they lie in the model."""

    name: str
    values: Tensor
    """Flat, where they are not all."""
    shape: tuple[int, ...]
    """Of the whole."""
    lo: int
    held_by: Literal["all", "first", "us"]
    """Whose they are to save. Buffers are the first rank's: they may differ, and its are what DDP gives the others."""

    @property
    def hi(self) -> int:
        """The end of the range."""
        return self.lo + self.values.numel()


class Names:
    """What a model's tensors are called, and which part of them is here."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        modules = dict(model.named_modules())
        self._blocks = {name: module for name, module in modules.items() if isinstance(module, Sharded)}
        within = {name: inner for name, module in modules.items() if (inner := _wraps(module))}
        self._wrappers = sorted(within.items(), key=lambda item: -len(item[0]))  # from the inside out
        self._fleeting = {
            _joined(name, buffer) for name, module in modules.items() for buffer in module._non_persistent_buffers_set
        }

    def ranges(self) -> Iterator[Range]:
        """The model's parameters and buffers, or what this rank has of them."""
        for name, parameter in self._model.named_parameters():
            yield from self.like(name, parameter)
        for name, buffer in self._model.named_buffers():
            if name not in self._fleeting:
                for each in self.like(name, buffer):
                    yield each._replace(held_by="first")

    def whole(self) -> Iterator[str]:
        """The names of all that is saved of the model, on whichever rank."""
        for name, _ in self._model.named_parameters():
            yield from self.within(name)
        for name, _ in self._model.named_buffers():
            if name not in self._fleeting:
                yield from self.within(name)

    def like(self, name: str, tensor: Tensor) -> Iterator[Range]:
        """A tensor that is divided as the parameter of that name is: the parameter itself, or a moment of it."""
        if hasattr(tensor, "to_local"):
            raise CheckpointError(f"{name} is a DTensor, which torch divides: torch.distributed.checkpoint saves it")
        block = self.block(name)
        if block is None:
            yield Range(self._unwrapped(name), tensor.detach(), tuple(tensor.shape), 0, "all")
            return
        flat = tensor.detach()
        start, end = block.rank * flat.numel(), (block.rank + 1) * flat.numel()
        for whole, piece in zip(self.within(name), block.places, strict=True):
            lo, hi = max(piece.lo, start), min(piece.hi, end)
            if lo < hi or (piece.lo == piece.hi and block.rank == 0):
                yield Range(whole, flat[lo - start : max(hi, lo) - start], tuple(piece.shape), lo - piece.lo, "us")

    def within(self, name: str) -> list[str]:
        """The parameters of the whole model that are in the one of that name, on whichever rank."""
        block = self.block(name)
        if block is None:
            return [self._unwrapped(name)]
        prefix = _joined(name.rpartition(".")[0], "block")
        return [self._unwrapped(f"{prefix}.{piece.name}") for piece in block.places]

    def block(self, name: str) -> Sharded | None:
        """The block whose shard has that name."""
        prefix, _, last = name.rpartition(".")
        return self._blocks.get(prefix) if last == "shard" else None

    def _unwrapped(self, name: str) -> str:
        for prefix, inner in self._wrappers:
            head = _joined(prefix, inner) + "."
            if name.startswith(head):
                name = _joined(prefix, name.removeprefix(head))
        return name


def _wraps(module: nn.Module) -> str:
    """What a wrapper calls the module in it; nothing, for one that is none."""
    if isinstance(module, Sharded):
        return "block"
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    return "_orig_mod" if "_orig_mod" in module._modules else ""  # torch.compile's


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
