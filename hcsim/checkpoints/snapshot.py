"""A copy of what a rank has to save: its share of what is alike on all ranks, and what is its own."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn

from hcsim.checkpoints.optimizer import optimizer_plain, optimizer_ranges
from hcsim.checkpoints.parts import Part, Piece
from hcsim.checkpoints.plain import dtype_name, taken_apart
from hcsim.checkpoints.random_numbers import random_state
from hcsim.checkpoints.ranges import Names, Range
from hcsim.checkpoints.words import place
from hcsim.errors import CheckpointError
from hcsim.training.elastic.fingerprint import fingerprint

Marks = dict[int, tuple[int, int]]
"""Digests of a rank's tensors, by a digest of their names, shapes and dtypes."""


class HasState(Protocol):
    """A learning-rate schedule, a communication hook with residuals, a data loader…"""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and words, in dictionaries and lists."""

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Go on from there."""


class Snapshot(NamedTuple):
    """A rank's part of the state at one moment, in memory of its own."""

    step: int
    rank: int
    world: int
    tensors: dict[str, Tensor]
    pieces: dict[str, Piece]
    plain: Any
    own: Any

    def packed(self, saving: str, again: int = 0) -> tuple[Part, bytes]:
        """As it is written."""
        data = save(self.tensors)
        part = Part(
            saving=saving,
            again=again,
            step=self.step,
            rank=self.rank,
            world=self.world,
            size_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            pieces=self.pieces,
            plain=self.plain,
            own=self.own,
        )
        return part, data


class State(NamedTuple):
    """What a rank has, where it lies."""

    step: int
    rank: int
    world: int
    ranges: list[Range]
    beside: dict[str, Tensor]
    """Tensors of what is not the model's or the optimizer's."""
    plain: Any
    own: Any

    @classmethod
    def of(
        cls,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        also: Mapping[str, HasState] | None = None,
        plain: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """Of these."""
        if step < 0:
            raise CheckpointError(f"steps are counted from 0, and this is {step}")
        rank, world = place(group)
        names = Names(model)
        ranges = [part._replace(name=f"model/{part.name}") for part in names.ranges()]
        same: dict[str, Any] = {"given": dict(plain or {}), "optimizer": None, "aliases": names.aliases()}
        same["extra"] = {name: module.get_extra_state() for name, module in names.extra().items()}
        if optimizer is not None:
            ranges += optimizer_ranges(optimizer, model)
            same["optimizer"] = optimizer_plain(optimizer, model)
        beside: dict[str, Tensor] = {}
        states = {name: state.state_dict() for name, state in (also or {}).items()}
        own = taken_apart({**states, "random": random_state()}, "own", beside)
        return cls(step, rank, world, ranges, beside, taken_apart(same, "plain", beside), own)

    def marks(self) -> Marks:
        """By these the ranks find out what is alike; one that is alone has nothing to find out."""
        return {} if self.world == 1 else {_kind(part): _digest(part.values) for part in self.ranges}

    def copied(self, everyones: Sequence[Marks]) -> Snapshot:
        """What is ours to write, when all have told their marks."""
        ours = [*self._dealt(everyones)]
        ours += [(Range(name, tensor, tuple(tensor.shape), 0, "us"), False) for name, tensor in self.beside.items()]
        return Snapshot(
            step=self.step,
            rank=self.rank,
            world=self.world,
            tensors={part.name: _copy(part.name, part.values) for part, _ in ours},
            pieces={
                part.name: Piece(dtype_name(part.values.dtype), part.shape, part.lo, part.hi, own) for part, own in ours
            },
            plain=self.plain,
            own=self.own,
        )

    def _dealt(self, everyones: Sequence[Marks]) -> Iterator[tuple[Range, bool]]:
        """Those that are ours to write, and whether each is our own. What is alike is dealt out, the largest first, to
        who has least."""
        loads = [0] * self.world
        for part in sorted(self.ranges, key=lambda part: (-part.values.nbytes, part.name)):
            found = [marks.get(_kind(part)) for marks in everyones]
            if part.held_by == "us":  # other ranks may have the same shard, in groups of their own
                yield part, len({*found} - {None}) > 1
            elif len({*found}) == 1:
                writer = loads.index(min(loads))
                loads[writer] += part.values.nbytes
                if writer == self.rank:
                    yield part, False
            elif part.held_by == "all" or None in found:
                yield part, True
            elif self.rank == 0 or found[self.rank] != found[0]:
                yield part, self.rank != 0


def _kind(part: Range) -> int:
    """Ranges that may be alike have the same."""
    said = msgspec.json.encode((part.name, part.shape, dtype_name(part.values.dtype), part.lo, part.hi))
    return int.from_bytes(hashlib.sha256(said).digest()[:8])


def _digest(tensor: Tensor) -> tuple[int, int]:
    """Of its bits. A fingerprint, being a sum, cannot tell rows that change places, nor two signs; a CRC can."""
    data = tensor.detach().reshape(-1).to("cpu").view(torch.uint8).numpy()
    return fingerprint(data), zlib.crc32(data.data)


def _copy(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.complex128:
        raise CheckpointError(f"{name} is complex128, which a safetensors file cannot hold")
    return tensor.detach().reshape(-1).to("cpu", copy=True)
