"""DCP's storage: torch writes checkpoints to parts and reads them from there, with any planner.

Nothing is pickled. `Writer` stores what DCP would pickle as plain data. `Reader` only gives DCP objects to
unpickle that it has pickled itself.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save as packed_tensors
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from hcsim.checkpoints.parts import (
    CheckpointShard,
    Item,
    chosen,
    data_file,
    dtype_name,
    dtype_of,
    parts_in,
    put_together,
    taken_apart,
    write_part,
)
from hcsim.errors import CheckpointError


class Saving(msgspec.Struct, frozen=True):
    """Identifies the parts of one checkpoint: see `CheckpointShard`."""

    saving: str
    again: int
    rank: int = 0
    world: int = 1


class Taken(NamedTuple):
    """A copy of a rank's part at one moment."""

    part: CheckpointShard
    tensors: dict[str, Tensor]

    def packed(self) -> tuple[CheckpointShard, bytes]:
        data = packed_tensors(self.tensors)
        digest = hashlib.sha256(data).hexdigest()
        return msgspec.structs.replace(self.part, size_bytes=len(data), sha256=digest), data


class Writer(StorageWriter):
    """Writes one step, for `torch.distributed.checkpoint.save`."""

    def __init__(self, folder: Path | str, step: int, aliases: Mapping[str, str] | None = None) -> None:
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(f"steps are counted from 0, and this is {step}")
        self._folder, self._step, self._aliases = Path(folder), step, dict(aliases or {})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new saving, optionally in another folder."""
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no rank has a special role."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add a random number for the saving, and the number of earlier savings of this step."""
        again = 1 + max((part.again for part in parts_in(self._folder, self._step)[0]), default=-1)
        return replace(plan, storage_data=Saving(secrets.token_hex(16), again))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose one saving for all parts. The result is the same on whichever rank this runs."""
        number = plans[0].storage_data.saving
        again = max(plan.storage_data.again for plan in plans)
        return [replace(plan, storage_data=Saving(number, again, rank, len(plans))) for rank, plan in enumerate(plans)]

    def take(self, plan: SavePlan, planner: SavePlanner, copy: bool = True) -> Taken:
        """Copy what this rank writes, unless the planner returns copies already."""
        tensors: dict[str, Tensor] = {}
        items = []
        paths = plan.planner_data or {}
        for each in plan.items:
            item = _described(each, paths.get(each.index.fqn, (each.index.fqn,)))
            if not item.dtype:
                within: dict[str, Tensor] = {}
                plain = taken_apart(_object(each, planner), item.name, within)
                tensors |= {_packed(name, tensor): on_cpu(tensor, copy=True) for name, tensor in within.items()}
                items.append(msgspec.structs.replace(item, plain=plain))
                continue
            stored = item.name + (f"@{','.join(map(str, item.offsets))}" if item.sizes != item.shape else "")
            while stored in tensors:
                stored += "'"
            data = planner.resolve_data(each)
            assert isinstance(data, Tensor)
            tensors[_packed(stored, data)] = on_cpu(data, copy=True) if copy else data
            items.append(msgspec.structs.replace(item, stored="" if stored == item.name else stored))
        saving = msgspec.structs.asdict(plan.storage_data)
        return Taken(CheckpointShard(step=self._step, items=items, aliases=self._aliases, **saving), tensors)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the part and return when it is on disk."""
        taken = self.take(plan, planner)
        write_part(self._folder, *taken.packed())
        return _done([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the parts themselves show whether the checkpoint is complete."""


class Reader(StorageReader):
    """Reads one complete checkpoint for `torch.distributed.checkpoint.load`, by default the newest in the
    folder.

    `parts` are known to be intact; without them, the folder is searched and its files are checked."""

    def __init__(
        self, folder: Path | str, step: int | None = None, *, parts: Mapping[int, CheckpointShard] | None = None
    ) -> None:
        self._folder, self._step, self._parts = Path(folder), step, parts
        self._files: dict[int, Any] = {}
        self._places: dict[tuple[str, tuple[int, ...] | None], tuple[int, Item]] = {}
        self._metadata: Metadata | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another folder, if one is given."""
        if checkpoint_id is not None:
            self._folder, self._parts, self._metadata = Path(checkpoint_id), None, None
            self._files, self._places = {}, {}

    def read_metadata(self) -> Metadata:
        """Return the metadata of all parts together."""
        if self._metadata is None:
            self._metadata = self._put_together()
        return self._metadata

    def _put_together(self) -> Metadata:
        if self._parts is None:
            self._parts, _ = chosen(self._folder, self._step, lambda mine: [mine])
        found: dict[str, Any] = {}
        paths: dict[str, tuple[str | int, ...]] = {}
        for rank, part in self._parts.items():
            for item in part.items:
                paths[item.name] = item.path
                self._places[item.name, item.offsets if item.dtype else None] = rank, item
                if not item.dtype:
                    found[item.name] = BytesStorageMetadata()
                    continue
                kind = TensorProperties(dtype_of(item.dtype))
                found.setdefault(item.name, TensorStorageMetadata(kind, torch.Size(item.shape), []))
                found[item.name].chunks.append(_chunk(item))
        for name, entry in found.items():
            chunks = [] if isinstance(entry, BytesStorageMetadata) else entry.chunks
            if chunks and sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(entry.size):
                raise CheckpointError(f"the checkpoint of step {self._parts[0].step} has not all of {name}")
        for name, of in self.aliases().items():
            if of not in found:
                continue
            paths[name] = (*paths[of][:-1], name.removeprefix(of.removesuffix(str(paths[of][-1]))))
            found[name] = found[of]
            for chunk in found[of].chunks:
                self._places[name, tuple(chunk.offsets)] = self._places[of, tuple(chunk.offsets)]
        return Metadata(found, planner_data=paths)

    def aliases(self) -> dict[str, str]:
        return {name: of for part in (self._parts or {}).values() for name, of in part.aliases.items()}

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no rank has a special role."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all data before returning."""
        for read in plan.items:
            index = read.storage_index
            if read.type == LoadItemType.BYTE_IO:
                torch.save(self.value(index.fqn), made := io.BytesIO())
                made.seek(0)
                planner.load_bytes(read, made)
                continue
            assert index.offset is not None
            rank, item = self._places[index.fqn, tuple(index.offset)]
            target = planner.resolve_tensor(read).detach()
            if target.numel():
                target.copy_(self._elements(rank, item, read.storage_offsets, read.lengths))
            planner.commit_tensor(read, target)
        return _done(None)

    def value(self, name: str) -> Any:
        """Return a new copy of an object."""
        self.read_metadata()
        rank, item = self._places[name, None]
        return put_together(item.plain, self._file(rank).get_tensor)

    def _elements(self, rank: int, item: Item, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        file, stored = self._file(rank), item.stored or item.name
        if not item.sizes:
            whole: Tensor = file.get_tensor(stored)
            return whole
        within = tuple(slice(lo, lo + length) for lo, length in zip(offsets, lengths, strict=True))
        some: Tensor = file.get_slice(stored)[within]
        return some

    def _file(self, rank: int) -> Any:
        assert self._parts is not None
        if rank not in self._files:
            self._files[rank] = safe_open(data_file(self._folder, self._parts[rank]), framework="pt")
        return self._files[rank]


def packed_plan(plan: SavePlan) -> bytes:
    """Serialise a plan, to send it to other ranks."""
    paths = plan.planner_data or {}
    items = [_described(item, paths.get(item.index.fqn, (item.index.fqn,))) for item in plan.items]
    return msgspec.msgpack.encode((items, plan.storage_data))


def unpacked_plan(data: bytes) -> SavePlan:
    items, saving = msgspec.msgpack.decode(data, type=tuple[list[Item], Saving])
    return SavePlan([_planned(item) for item in items], saving, {item.name: item.path for item in items})


def _described(item: WriteItem, path: Sequence[str | int]) -> Item:
    if item.tensor_data is None:
        return Item(tuple(path))
    chunk = item.tensor_data.chunk
    dtype, shape = dtype_name(item.tensor_data.properties.dtype), tuple(item.tensor_data.size)
    return Item(tuple(path), dtype, shape, tuple(chunk.offsets), tuple(chunk.sizes))


def _planned(item: Item) -> WriteItem:
    if not item.dtype:
        return WriteItem(MetadataIndex(item.name), WriteItemType.BYTE_IO)
    kind = WriteItemType.TENSOR if item.sizes == item.shape else WriteItemType.SHARD
    data = TensorWriteData(_chunk(item), TensorProperties(dtype_of(item.dtype)), torch.Size(item.shape))
    return WriteItem(MetadataIndex(item.name, item.offsets), kind, tensor_data=data)


def _chunk(item: Item) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes))


def on_cpu(tensor: Tensor, copy: bool = False) -> Tensor:
    """Return a contiguous CPU tensor without lazy conjugation or negation."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.to("cpu", copy=copy, memory_format=torch.contiguous_format).contiguous()


def _object(item: WriteItem, planner: SavePlanner) -> Any:
    if isinstance(planner, DefaultSavePlanner):
        return planner.lookup_object(item.index)
    pickled = planner.resolve_data(item)
    assert isinstance(pickled, io.BytesIO)
    pickled.seek(0)
    return torch.load(pickled, weights_only=True)


def _packed(name: str, tensor: Tensor) -> str:
    """Return the name, after checking that the tensor can be saved."""
    if not _packs(tensor.dtype):
        raise CheckpointError(f"{name} is {dtype_name(tensor.dtype)}, which a safetensors file cannot hold")
    return name


@cache
def _packs(dtype: torch.dtype) -> bool:
    try:
        packed_tensors({"": torch.empty(0, dtype=dtype)})
    except KeyError:
        return False
    return True


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
