"""A program's state as torch's state dicts have it (`torch.distributed.checkpoint.state_dict`), for DCP to save.

Names are those of the unwrapped model. A `Sharded` block appears under the names and shapes of its parameters
in the whole model. A rank's piece of a parameter is a range of its elements, which is passed to DCP as boxes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hcsim.errors import CheckpointError
from hcsim.training.modules.sharded import ParameterSlice, Sharded

EXTRA = "_extra_state"


class HasState(Protocol):
    """An object with a state: a learning-rate schedule, a communication hook with residuals, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers and strings, in dictionaries and lists."""

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


class Divided:
    """A range of a tensor's elements in row-major order, which DCP accesses as boxes."""

    def __init__(self, flat: Tensor, shape: Sequence[int], lo: int) -> None:
        self.flat = flat
        self.shape = torch.Size(shape)
        self.lo = lo
        self._boxes = tuple(boxes(self.shape, lo, lo + flat.numel()))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self._boxes]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        kind = TensorProperties(self.flat.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, kind, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        at = 0
        for offsets, sizes in self._boxes:
            if offsets == index.offset:
                return self.flat[at : at + math.prod(sizes)].view(sizes)
            at += math.prod(sizes)
        raise ValueError(f"{index.fqn} has no box at {index.offset}")


def boxes(shape: Sequence[int], lo: int, hi: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the offsets and sizes of the boxes that make up a range of a tensor's elements, in order."""
    if not shape or lo == hi:
        yield (0,) * len(shape), tuple(shape)
        return
    row, within = math.prod(shape[1:]), shape[1:]
    first, last = -(-lo // row), hi // row
    if first > last:  # all of it is in one row
        for offsets, sizes in boxes(within, lo - last * row, hi - last * row):
            yield (last, *offsets), (1, *sizes)
        return
    if lo < first * row:
        for offsets, sizes in boxes(within, lo - (first - 1) * row, row):
            yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0 for _ in within)), (last - first, *within)
    if last * row < hi:
        for offsets, sizes in boxes(within, 0, hi - last * row):
            yield (last, *offsets), (1, *sizes)


Held = Tensor | Divided
"""A rank's data of a tensor: all of it, a DTensor's shard, or a range of elements."""


def local(held: Held) -> Tensor:
    if isinstance(held, Divided):
        return held.flat
    return held.to_local().detach() if isinstance(held, DTensor) else held.detach()


def chunks(held: Held) -> list[ChunkStorageMetadata]:
    """Return the local chunks of a tensor that is divided among ranks."""
    divided: Any = held
    return divided.__create_chunk_list__() if isinstance(held, Divided | DTensor) else []


class StateEntry(NamedTuple):
    """A tensor of the state."""

    path: tuple[str, ...]
    """The path in the state dict."""
    held: Held
    first: bool = False
    """Where ranks differ, a run with another number of ranks uses the first rank's tensor. This holds for
    buffers, which DDP broadcasts from the first rank."""
    compared: bool = True
    """Whether the ranks compare the tensor. What DDP averages is identical, apart from the rounding of
    different machines."""

    @property
    def name(self) -> str:
        return ".".join(self.path)


class ProgramState:
    """The state of a model and of an optimizer."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """`group` are the ranks that save it."""
        while isinstance(model, DataParallel):
            model = model.module
        self._model = model
        self._state: dict[str, Any] = dict(get_model_state_dict(model))
        blocks = {_place(module.shard): module for module in model.modules() if isinstance(module, Sharded)}
        tensors = {name: value for name, value in self._state.items() if not name.endswith(EXTRA)}
        self._blocks = {name: blocks[_place(value)] for name, value in tensors.items() if _place(value) in blocks}
        self._prefixes = sorted((name.removesuffix("shard") for name in self._blocks), key=len, reverse=True)
        self._averaged = {*_averaged(model, group)}
        self._buffers = {_place(buffer) for buffer in model.buffers()}
        self.extra = {self._whole(name): name for name in self._state if name.endswith(EXTRA)}
        """Whole-model names of the modules' extra state, with the names in this model."""
        self.aliases: dict[str, str] = {}
        """Additional names of tensors saved under another name, as for tied weights."""
        self._tensors: dict[str, Tensor] = {}
        first: dict[Any, str] = {}
        for name, tensor in tensors.items():
            of = first.setdefault(_place(tensor), name)
            if of == name:
                self._tensors[name] = tensor
            for alias, saved in zip(self.names(name), self.names(of), strict=True):
                if alias != saved:
                    self.aliases[alias] = saved
            if name in self._blocks:
                self.aliases |= self._within(name)

    def entries(self) -> Iterator[StateEntry]:
        """Yield this rank's part of the model's parameters and buffers."""
        for name, tensor in self._tensors.items():
            averaged = name not in self._blocks and _place(tensor) in self._averaged
            first = averaged or _place(tensor) in self._buffers
            for whole, held in self._held(name, tensor):
                yield StateEntry(("model", whole), held, first, not averaged)

    def whole(self) -> Iterator[str]:
        """Yield the names of all saved tensors of the model, on any rank."""
        for name in self._tensors:
            yield from self.names(name)

    def extra_state(self) -> dict[str, Any]:
        return {whole: self._state[name] for whole, name in self.extra.items()}

    def restored(self, extra: Mapping[str, Any]) -> None:
        """Pass the extra state to the modules, and notify them that their tensors have changed."""
        state = {name: value for name, value in self._state.items() if not name.endswith(EXTRA)}
        set_model_state_dict(self._model, {**state, **{self.extra[whole]: value for whole, value in extra.items()}})

    def optimizer_entries(self, state: Mapping[str, Any]) -> Iterator[StateEntry]:
        """Yield the tensors of an `optimizer_state`."""
        for name, values in state["state"].items():
            averaged = name not in self._blocks and _place(self._tensors[name]) in self._averaged
            for key, value in values.items():
                if not isinstance(value, Tensor):
                    continue
                block = self._blocks.get(name)
                if block is not None and value.dim() and value.shape != block.shard.shape:
                    raise CheckpointError(f"{key} of {name} has not its shape, and cannot be saved by shards")
                every = self._held(name, value) if value.dim() else ((whole, value) for whole in self.names(name))
                for whole, held in every:
                    yield StateEntry(("optimizer", "state", whole, key), held, averaged, not averaged)

    def optimizer_plain(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rest of an `optimizer_state`: the settings of the parameter groups, by whole-model names, and
        counters."""
        counts: dict[str, dict[str, Any]] = {}
        for name, values in state["state"].items():
            for key, value in values.items():
                if not isinstance(value, Tensor):
                    for whole in self.names(name):
                        counts.setdefault(whole, {})[key] = value
        groups = [
            {**group, "params": sorted(whole for name in group["params"] for whole in self.names(name))}
            for group in state["param_groups"]
        ]
        return {"state": counts, "param_groups": groups}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state in torch's format, by this model's names."""
        ours = {*self._model.parameters()}
        if any(parameter not in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise CheckpointError(
                "the optimizer has parameters that are not the model's: give a model that holds all of them"
            )
        with _without_a_step(optimizer):
            return get_optimizer_state_dict(self._model, optimizer)

    def parameter(self, name: str) -> Tensor:
        return self._tensors[name]

    def is_block(self, name: str) -> bool:
        """Return whether the parameter is the shard of a block."""
        return name in self._blocks

    def held(self, name: str, tensor: Tensor) -> dict[str, Held]:
        """Return the pieces of a tensor that is sharded like this parameter: the parameter itself, or an optimizer
        moment."""
        return dict(self._held(name, tensor))

    def names(self, name: str) -> list[str]:
        """Return the whole-model names of the parameters in this shard, on any rank."""
        block = self._blocks.get(name)
        return [self._whole(name)] if block is None else [self._in_block(name, piece) for piece in block.places]

    def pieces(self, name: str) -> dict[str, torch.Size]:
        """Return their names and shapes."""
        block = self._blocks.get(name)
        shapes = [self._tensors[name].shape] if block is None else [piece.shape for piece in block.places]
        return dict(zip(self.names(name), shapes, strict=True))

    def _held(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Held]]:
        block = self._blocks.get(name)
        if block is None:
            if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None:
                yield self._whole(name), tensor.detach()
            return
        flat = tensor.detach()
        start, end = block.rank * flat.numel(), (block.rank + 1) * flat.numel()
        for whole, piece in zip(self.names(name), block.places, strict=True):
            lo, hi = max(piece.lo, start), min(piece.hi, end)
            if lo < hi or (piece.lo == piece.hi and block.rank == 0):
                yield whole, Divided(flat[lo - start : max(hi, lo) - start], piece.shape, lo - piece.lo)

    def _in_block(self, shard: str, piece: ParameterSlice) -> str:
        return self._whole(f"{shard.removesuffix('shard')}block.{piece.name.replace('_orig_mod.', '')}")

    def _within(self, shard: str) -> dict[str, str]:
        block = self._blocks[shard]
        places = {(piece.lo, piece.hi): piece for piece in block.places}
        called: dict[nn.Module, list[str]] = {}
        for name, module in block.block.named_modules(remove_duplicate=False):
            called.setdefault(module, []).append(name)
        found = {}
        for piece in block.pieces:
            owner, _, last = piece.name.rpartition(".")
            saved = self._in_block(shard, places[piece.lo, piece.hi])
            for name in called[block.block.get_submodule(owner)]:
                alias = self._in_block(shard, piece._replace(name=f"{name}.{last}" if name else last))
                if alias != saved:
                    found[alias] = saved
        return found

    def _whole(self, name: str) -> str:
        for prefix in self._prefixes:  # from the inside out
            if name.startswith(f"{prefix}block."):
                name = prefix + name.removeprefix(f"{prefix}block.")
        return name


def random_state() -> dict[str, Any]:
    """Return the states of the usual random number generators: torch's, numpy's and Python's."""
    kind, words, at, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, cached = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": {"kind": kind, "words": torch.from_numpy(np.array(words, np.int64)), "rest": (at, has_gauss, gauss)},
        "python": {"version": version, "words": torch.tensor(internal, dtype=torch.int64), "cached": cached},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    theirs = state["numpy"]
    np.random.set_state((theirs["kind"], theirs["words"].numpy().astype(np.uint32), *theirs["rest"]))
    theirs = state["python"]
    random.setstate((theirs["version"], tuple(theirs["words"].tolist()), theirs["cached"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key of the tensor's memory; equal keys mean one tensor under two names."""
    here = local(tensor)
    return here.untyped_storage()._cdata, here.storage_offset(), here.shape, here.stride(), here.dtype


def _averaged(model: nn.Module, group: dist.ProcessGroup | None) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of tensors that DDP keeps identical on all ranks that save."""
    for ddp in model.modules():
        if isinstance(ddp, DistributedDataParallel) and _members(ddp.process_group) == _members(group):
            for name, parameter in ddp.module.named_parameters():
                if name not in ddp.parameters_to_ignore:
                    yield _place(parameter)


def _members(group: dist.ProcessGroup | None) -> set[int]:
    """Return the ranks of a group; empty if the group has been destroyed."""
    try:
        return {*dist.get_process_group_ranks(group)} if dist.is_initialized() else set()
    except KeyError:
        return set()


@contextmanager
def _without_a_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep the optimizer from being stepped: torch would take a step to initialise a missing state, and the
    optimizer would count it."""
    parameters = [] if optimizer.state else [each for group in optimizer.param_groups for each in group["params"]]
    for parameter in parameters[:1]:
        optimizer.state[parameter] = {}
    try:
        yield
    finally:
        for parameter in parameters[:1]:
            del optimizer.state[parameter]
