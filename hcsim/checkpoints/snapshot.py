"""A copy of what a rank has to save: its share of what is alike on all ranks, and what is its own.

The generators that a program usually draws from (torch's, numpy's and Python's own) belong to what is its own.
"""

from __future__ import annotations

import hashlib
import os
import random
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn

from hcsim.checkpoints.optimizer import optimizer_plain, optimizer_ranges
from hcsim.checkpoints.parts import Part, Piece, place
from hcsim.checkpoints.plain import dtype_name, taken_apart
from hcsim.checkpoints.ranges import Names, Range
from hcsim.errors import CheckpointError
from hcsim.training.elastic.fingerprint import fingerprint


def random_state() -> dict[str, Any]:
    """Where they are now."""
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
    """Go on drawing where that was taken."""
    torch.set_rng_state(state["torch"])
    theirs = state["numpy"]
    np.random.set_state((theirs["kind"], theirs["words"].numpy().astype(np.uint32), *theirs["rest"]))
    theirs = state["python"]
    random.setstate((theirs["version"], tuple(theirs["words"].tolist()), theirs["cached"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells of a tensor, or of its piece of one."""

    held_by: str
    dtype: str
    shape: tuple[int, ...]
    lo: int
    hi: int
    digest: tuple[int, int] | None = None
    """Of its bits; none, if they are not compared."""

    @property
    def kind(self) -> tuple[str, str, tuple[int, ...]]:
        """Ranks whose tensors may be alike have the same."""
        return self.held_by, self.dtype, self.shape

    def mixes(self, other: Mark) -> bool:
        """Whether these two cannot be pieces of one tensor."""
        if self.kind != other.kind:
            return True
        overlap = max(self.lo, other.lo) < min(self.hi, other.hi)
        return overlap and self != other and (self.digest, other.digest) != (None, None)


Marks = dict[str, Mark]
"""Of a rank's tensors, by their names."""


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
    brought: dict[str, Tensor]
    """From another device, by name, while they were compared: what will be ours to write, presumably."""

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
        names = Names(model, group)
        ranges = [part._replace(name=f"model/{part.name}") for part in names.ranges()]
        same: dict[str, Any] = {"given": dict(plain or {}), "optimizer": None, "aliases": names.aliases()}
        same["extra"] = {name: module.get_extra_state() for name, module in names.extra().items()}
        if optimizer is not None:
            ranges += optimizer_ranges(optimizer, model, group)
            same["optimizer"] = optimizer_plain(optimizer, model)
        beside: dict[str, Tensor] = {}
        states = {name: state.state_dict() for name, state in (also or {}).items()}
        own = taken_apart({**states, "random": random_state()}, "own", beside)
        return cls(step, rank, world, ranges, beside, taken_apart(same, "plain", beside), own, {})

    def marks(self, alike: bool = False) -> Marks:
        """By these the ranks find out what is alike, unless they know; one that is alone has nothing to find out."""
        if self.world == 1:
            return {}
        marks = {part.name: _mark(part) for part in self.ranges}
        if not alike:
            for name, digest in self._digests({part.name for part, _ in self._dealt([marks] * self.world)}):
                marks[name] = msgspec.structs.replace(marks[name], digest=digest)
        return marks

    def _digests(self, ours: set[str]) -> Iterator[tuple[str, tuple[int, int]]]:
        """Of what is compared. At most one tensor for each thread is in memory beside those that are ours."""
        threads = min(4, os.cpu_count() or 1)
        pending: deque[tuple[str, Future[tuple[int, int]]]] = deque()
        with ThreadPoolExecutor(threads, "digests") as pool:
            for part in self.ranges:
                if not part.compared:
                    continue
                if len(pending) == threads:
                    name, digest = pending.popleft()
                    yield name, digest.result()
                flat = _on_cpu(part.values)  # here, and not on a thread, which would have another stream of the device
                if part.values.device != flat.device and part.name in ours:
                    self.brought[part.name] = flat
                pending.append((part.name, pool.submit(_digest, flat)))
                del flat
            for name, digest in pending:
                yield name, digest.result()

    def copied(self, everyones: Sequence[Marks]) -> Snapshot:
        """What is ours to write, when all have told their marks."""
        ours = [*self._dealt(everyones)]
        for name in self.brought.keys() - {part.name for part, _ in ours}:
            del self.brought[name]
        ours += [(Range(name, tensor, tuple(tensor.shape), 0, "us"), False) for name, tensor in self.beside.items()]
        return Snapshot(
            step=self.step,
            rank=self.rank,
            world=self.world,
            tensors={part.name: _copy(part.name, part.values, self.brought.get(part.name)) for part, _ in ours},
            pieces={
                part.name: Piece(
                    dtype_name(part.values.dtype), part.shape, part.lo, part.hi, own, own and part.held_by == "first"
                )
                for part, own in ours
            },
            plain=self.plain,
            own=self.own,
        )

    def _dealt(self, everyones: Sequence[Marks]) -> Iterator[tuple[Range, bool]]:
        """Those that are ours to write, and whether each is our own. What is alike is dealt out, the largest first, to
        who has least."""
        loads = [0] * self.world
        for part in sorted(self.ranges, key=lambda part: (-part.values.nbytes, part.name)):
            found = [marks.get(part.name) for marks in everyones]
            ours = found[self.rank]
            if part.held_by == "us":  # other ranks may have the same shard, in groups of their own
                yield part, ours is not None and any(mark and ours.mixes(mark) for mark in found)
            elif len({*found}) == 1:
                writer = loads.index(min(loads))
                loads[writer] += part.values.nbytes
                if writer == self.rank:
                    yield part, False
            elif part.held_by == "all" or len({mark and mark.kind for mark in found}) > 1:
                yield part, True
            elif self.rank == 0 or ours != found[0]:
                yield part, self.rank != 0


def _mark(part: Range) -> Mark:
    return Mark(part.held_by, dtype_name(part.values.dtype), part.shape, part.lo, part.hi)


def _digest(flat: Tensor) -> tuple[int, int]:
    """Of its bits. A fingerprint, being a sum, cannot tell rows that change places, nor two signs; a CRC can."""
    data = flat.view(torch.uint8).numpy()
    return fingerprint(data), zlib.crc32(data.data)


def _on_cpu(tensor: Tensor, copy: bool = False) -> Tensor:
    """Its elements as they are saved: side by side, and not to be conjugated or negated when they are read."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).to("cpu", copy=copy).contiguous()


@cache
def _packs(dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except KeyError:
        return False
    return True


def _copy(name: str, tensor: Tensor, brought: Tensor | None) -> Tensor:
    if not _packs(tensor.dtype):
        raise CheckpointError(f"{name} is {dtype_name(tensor.dtype)}, which a safetensors file cannot hold")
    return _on_cpu(tensor, copy=True) if brought is None else brought
