"""Saving: a copy is taken at once, and written while training goes on."""

from __future__ import annotations

import hashlib
import secrets
import threading
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn

from hcsim.checkpoints.optimizer import optimizer_plain, optimizer_ranges
from hcsim.checkpoints.parts import Part, Piece, parts_in, remove_savings, remove_step, steps_in, write_part
from hcsim.checkpoints.plain import dtype_name, taken_apart
from hcsim.checkpoints.random_numbers import random_state
from hcsim.checkpoints.ranges import Names, Range
from hcsim.checkpoints.words import as_tensor, gathered, place
from hcsim.errors import CheckpointError


class HasState(Protocol):
    """A learning-rate schedule, a communication hook with residuals, a data loader…"""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and words, in dictionaries and lists."""

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Go on from there."""


class Saver:
    """Saves a program's state to a folder, which may be one for all ranks or one on each machine."""

    def __init__(
        self,
        folder: Path | str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        also: Mapping[str, HasState] | None = None,
        group: dist.ProcessGroup | None = None,
        copies: int = 1,
        keep: int = 2,
    ) -> None:
        """`also` names whatever else has a state. With `copies`, each part is written by that many ranks, so that
        it outlives a machine whose folder is its own. Beside the newest step stay the `keep` before it."""
        self._rank, self._world = place(group)
        if not 1 <= copies <= self._world:
            raise CheckpointError(f"{self._world} ranks hold 1 to {self._world} copies of a part, not {copies}")
        if keep < 1:
            raise CheckpointError(f"at least one step stays beside the newest, not {keep}")
        if "random" in (also or {}):
            raise CheckpointError("the state called random is that of the generators: call yours something else")
        self._folder = Path(folder)
        self._model, self._optimizer, self._also = model, optimizer, dict(also or {})
        self._group, self._copies, self._keep = group, copies, keep
        self._writing: threading.Thread | None = None
        self._errors: list[BaseException] = []
        """Of the saving before, until somebody hears of it."""
        weakref.finalize(self, _tell_unheard, self._errors)
        self._step: int | None = None
        self._again = 0
        self._whole: list[int] = []
        """Steps that are on the disk of every rank."""

    def save(self, step: int, **plain: Any) -> None:
        """Save this step; `plain` are numbers and words, the same on all ranks. All ranks call this.

        Returns when a copy has been taken. Raises, on all ranks, what went wrong with the saving before or with
        taking the copy, on any of them; nothing is saved then."""
        trouble: BaseException | None = None
        taken: Snapshot | None = None
        again = 0
        try:
            self.wait()
            taken = snapshot(step, self._model, self._optimizer, also=self._also, plain=plain, group=self._group)
            again = 1 + max((part.again for part in parts_in(self._folder, step)[0]), default=-1)
        except Exception as error:
            trouble = error
        saving = self._agreed(taken, again, trouble)
        assert taken is not None
        replaced = None if self._step is None or not self._again else (self._step, self._again)
        if self._step is not None:
            self._whole = [*dict.fromkeys([*self._whole, self._step])][-self._keep :]
        self._step, self._again = step, saving.again
        pruned = min(self._whole) if len(self._whole) == self._keep else 0
        parts = self._exchanged(*taken.packed(*saving)) if self._copies > 1 else None
        work = (taken, saving, parts, pruned, replaced)
        self._writing = threading.Thread(target=self._write, args=work, name="checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Return when everything of this rank is on the disk; raises what went wrong."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._errors:
            self._step = None
            raise self._errors.pop()

    def _agreed(self, taken: Snapshot | None, again: int, trouble: BaseException | None) -> _Saving:
        """Which saving this is; all ranks can do it."""
        said = "" if trouble is None else str(trouble) or repr(trouble)
        ours = _Word(_Saving(secrets.token_hex(16), again), said, taken.everyones if taken else "")
        words = [
            msgspec.msgpack.decode(word, type=_Word) for word in gathered(msgspec.msgpack.encode(ours), self._group)
        ]
        troubles = [f"rank {rank}: {word.trouble}" for rank, word in enumerate(words) if word.trouble]
        if troubles:
            self._step = None
            raise CheckpointError("; ".join(troubles)) from trouble
        if len({word.everyones for word in words}) > 1:
            raise CheckpointError("the ranks hold different tensors, though none of them is divided among them")
        return words[0].saving._replace(again=max(word.saving.again for word in words))

    def _exchanged(self, part: Part, data: bytes) -> list[tuple[Part, bytes]]:
        """Our part, and those of the ranks before us, of which we hold copies."""
        theirs = [
            msgspec.msgpack.decode(each, type=Part) for each in gathered(msgspec.msgpack.encode(part), self._group)
        ]
        held = [(part, data)]
        for distance in range(1, self._copies):
            before, after = (self._rank - distance) % self._world, (self._rank + distance) % self._world
            room = torch.empty(theirs[before].size_bytes, dtype=torch.uint8)
            sending = dist.isend(as_tensor(data), group_dst=after, group=self._group)
            dist.recv(room, group_src=before, group=self._group)
            if sending is not None:
                sending.wait()
            held.append((theirs[before], room.numpy().tobytes()))
        return held

    def _write(
        self,
        taken: Snapshot,
        saving: _Saving,
        parts: list[tuple[Part, bytes]] | None,
        pruned: int,
        replaced: tuple[int, int] | None,
    ) -> None:
        """On a thread of its own. What is older than the steps that stay goes before the new one comes."""
        try:
            if replaced is not None:
                remove_savings(self._folder, *replaced)
            for older in steps_in(self._folder):
                if older < pruned:
                    remove_step(self._folder, older)
            for part, data in parts or [taken.packed(*saving)]:
                write_part(self._folder, part, data)
        except BaseException as error:
            self._errors.append(error)


def _tell_unheard(errors: list[BaseException]) -> None:
    """The saver is gone, or the program is over, and nobody has waited for the last saving."""
    for error in errors:
        warnings.warn(f"the last saving failed: {error}", stacklevel=2)


class _Saving(NamedTuple):
    """See `Part`."""

    number: str
    again: int


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says before a saving."""

    saving: _Saving
    trouble: str
    everyones: str


class Snapshot(NamedTuple):
    """A rank's part of the state at one moment, in memory of its own."""

    step: int
    rank: int
    world: int
    tensors: dict[str, Tensor]
    pieces: dict[str, Piece]
    plain: Any
    own: Any
    everyones: str
    """A digest of the names and shapes of what all ranks hold."""

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


def snapshot(
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    also: Mapping[str, HasState] | None = None,
    plain: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Snapshot:
    """Copy what this rank has to save."""
    if step < 0:
        raise CheckpointError(f"steps are counted from 0, and this is {step}")
    rank, world = place(group)
    ranges = [part._replace(name=f"model/{part.name}") for part in Names(model).ranges()]
    of_optimizer = None
    if optimizer is not None:
        ranges += optimizer_ranges(optimizer, model)
        of_optimizer = optimizer_plain(optimizer, model)
    beside: dict[str, Tensor] = {}
    states = {name: state.state_dict() for name, state in (also or {}).items()}
    own_plain = taken_apart({**states, "random": random_state()}, "own", beside)
    same_plain = taken_apart({"given": dict(plain or {}), "optimizer": of_optimizer}, "plain", beside)
    ours = [*_dealt(ranges, rank, world)]
    ours += [Range(name, tensor, tuple(tensor.shape), 0, "us") for name, tensor in beside.items()]
    named = sorted((part.name, part.shape) for part in ranges if part.held_by == "all")
    return Snapshot(
        step=step,
        rank=rank,
        world=world,
        tensors={part.name: _copy(part.name, part.values) for part in ours},
        pieces={part.name: Piece(dtype_name(part.values.dtype), part.shape, part.lo, part.hi) for part in ours},
        plain=same_plain,
        own=own_plain,
        everyones=hashlib.sha256(msgspec.json.encode(named)).hexdigest(),
    )


def _dealt(ranges: list[Range], rank: int, world: int) -> list[Range]:
    """Those that are ours to write. Of what all ranks hold, the largest are dealt out first, to who has least."""
    ours = [part for part in ranges if part.held_by == "us" or (part.held_by == "first" and rank == 0)]
    loads = [0] * world
    everyones = [part for part in ranges if part.held_by == "all"]
    for part in sorted(everyones, key=lambda part: (-part.values.nbytes, part.name)):
        writer = loads.index(min(loads))
        loads[writer] += part.values.nbytes
        if writer == rank:
            ours.append(part)
    return ours


def _copy(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.complex128:
        raise CheckpointError(f"{name} is complex128, which a safetensors file cannot hold")
    return tensor.detach().reshape(-1).to("cpu", copy=True)
