"""The tensors of a model under the names that they have when nothing of it is wrapped.

A tensor that is alike on all ranks is saved once, by one of them. One that is divided among the ranks (`Sharded`) is
saved in pieces under the name and shape that it has in the whole model, so that any number of ranks, or one, can read
it. One that differs, such as a pipeline's stage, is each rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hcsim.errors import CheckpointError
from hcsim.training.modules.sharded import Piece, Sharded


class Range(NamedTuple):
    """Some elements of a tensor, as they lie in the model."""

    name: str
    values: Tensor
    """Flat, where they are not all."""
    shape: tuple[int, ...]
    """Of the whole."""
    lo: int
    held_by: Literal["all", "first", "us"]
    """Whose they are. Where "first" ones are unlike, another number of ranks goes on from the first rank's: buffers, as
    DDP gives its to the others."""
    compared: bool = True
    """Whether the ranks find out if they are alike. What DDP averages is, but for what unlike machines round."""

    @property
    def hi(self) -> int:
        """The end of the range."""
        return self.lo + self.values.numel()


class Names:
    """What a model's tensors are called, and which part of them is here."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """`group` are the ranks that save it."""
        modules = dict(model.named_modules(remove_duplicate=False))
        self._modules = modules
        self._blocks = {name: module for name, module in modules.items() if isinstance(module, Sharded)}
        self._ddp = {
            name: module
            for name, module in modules.items()
            if isinstance(module, DistributedDataParallel) and _members(module.process_group) == _members(group)
        }
        within = {name: inner for name, module in modules.items() if (inner := _wraps(module))}
        self._wrappers = sorted(within.items(), key=lambda item: -len(item[0]))  # from the inside out
        fleeting = {
            _joined(name, buffer) for name, module in modules.items() for buffer in module._non_persistent_buffers_set
        }
        every = model.named_buffers(remove_duplicate=False)
        self._buffers = {name: buffer for name, buffer in every if name not in fleeting}
        self._every = {**dict(model.named_parameters(remove_duplicate=False)), **self._buffers}
        """What is saved, under every name that it has."""
        self._first: dict[Tensor, str] = {}
        for name, tensor in self._every.items():
            self._first.setdefault(tensor, name)
        self._extras: dict[nn.Module, str] = {}
        for name, module in modules.items():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                self._extras.setdefault(module, self._extra(name))

    def ranges(self) -> Iterator[Range]:
        """The model's parameters and buffers, or what this rank has of them."""
        for tensor, name in self._first.items():
            yield from self.like(name, tensor)

    def whole(self) -> Iterator[str]:
        """The names of all that is saved of the model, on whichever rank."""
        for name in self._first.values():
            yield from self.within(name)

    def extra(self) -> dict[str, nn.Module]:
        """The modules that have an extra state, by the name of that, as `state_dict` has it."""
        return {name: module for module, name in self._extras.items()}

    def aliases(self) -> dict[str, str]:
        """Further names of what is saved under another, by which `state_dict` has it too: of tied weights, say."""
        also = {self._extra(name): self._extras[of] for name, of in self._modules.items() if of in self._extras}
        for name, tensor in self._every.items():
            if self.block(name) is None:
                also[self._unwrapped(name)] = self._unwrapped(self._first[tensor])
        called: dict[nn.Module, list[str]] = {}
        for name, module in self._modules.items():
            called.setdefault(module, []).append(name)
        for block in dict.fromkeys(self._blocks.values()):
            places = {(piece.lo, piece.hi): piece for piece in block.places}
            for piece in block.pieces:
                owner, _, last = piece.name.rpartition(".")
                for name in called[block.block.get_submodule(owner)]:
                    saved = self._in_block(self._first[block.shard], places[piece.lo, piece.hi])
                    also[self._unwrapped(_joined(name, last))] = saved
        return {name: saved for name, saved in also.items() if name != saved}

    def like(self, name: str, tensor: Tensor) -> Iterator[Range]:
        """A tensor that is divided as the parameter of that name is: the parameter itself, or a moment of it."""
        if hasattr(tensor, "to_local"):
            raise CheckpointError(f"{name} is a DTensor, which torch divides: torch.distributed.checkpoint saves it")
        block = self.block(name)
        if block is None:
            averaged = self._averaged(name)
            held_by: Literal["all", "first"] = "first" if averaged or name in self._buffers else "all"
            yield Range(self._unwrapped(name), tensor.detach(), tuple(tensor.shape), 0, held_by, not averaged)
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
        return [self._unwrapped(name)] if block is None else [self._in_block(name, piece) for piece in block.places]

    def block(self, name: str) -> Sharded | None:
        """The block whose shard has that name."""
        prefix, _, last = name.rpartition(".")
        return self._blocks.get(prefix) if last == "shard" else None

    def _in_block(self, shard: str, piece: Piece) -> str:
        return self._unwrapped(_joined(shard.rpartition(".")[0], f"block.{piece.name}"))

    def _averaged(self, name: str) -> bool:
        """Whether a DDP keeps it alike on all ranks that save it."""
        if name in self._buffers:
            return False
        for prefix, ddp in self._ddp.items():
            inner = name.removeprefix(_joined(prefix, "module."))
            if inner != name and inner not in ddp.parameters_to_ignore:
                return True
        return False

    def _extra(self, module: str) -> str:
        return self._unwrapped(_joined(module, "_extra_state"))

    def _unwrapped(self, name: str) -> str:
        for prefix, inner in self._wrappers:
            head = _joined(prefix, inner) + "."
            if name.startswith(head):
                name = _joined(prefix, name.removeprefix(head))
        return name


def _members(group: dist.ProcessGroup | None) -> set[int]:
    """Of a group that there still is."""
    try:
        return {*dist.get_process_group_ranks(group)} if dist.is_initialized() else set()
    except KeyError:
        return set()


def _wraps(module: nn.Module) -> str:
    """What a wrapper calls the module in it; nothing, for one that is none."""
    if isinstance(module, Sharded):
        return "block"
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    return "_orig_mod" if "_orig_mod" in module._modules else ""  # torch.compile's


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
