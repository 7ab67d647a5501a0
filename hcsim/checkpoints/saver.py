"""Saving: the ranks find out which tensors differ, copy the state, and write the copy while training goes on.

DCP saves an item once per name. A tensor that is identical on all ranks keeps its name, and DCP's planner
distributes these among the ranks; so it does with the pieces of a sharded tensor. A tensor that differs between
ranks, as in a pipeline's stage, gets a name of each rank's own.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from hcsim.checkpoints.parts import (
    CheckpointShard,
    PartName,
    as_tensor,
    dtype_name,
    gathered,
    parts_before,
    place,
    remove_savings,
    remove_step,
    steps_in,
    whole_steps,
    write_part,
)
from hcsim.checkpoints.state import Divided, HasState, ProgramState, StateEntry, chunks, local, random_state
from hcsim.checkpoints.storage import Taken, Writer, on_cpu, packed_plan, unpacked_plan
from hcsim.errors import CheckpointError
from hcsim.training.learner import fingerprint

_Kept = TypeVar("_Kept")


class TensorReport(msgspec.Struct, frozen=True, array_like=True):
    """The metadata of a rank's tensor, or of its piece of one, which ranks compare."""

    first: bool
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    """Offsets and sizes of this rank's pieces, for a sharded tensor."""
    digest: tuple[int, int] | None = None
    """A digest of the bits; None if they are not compared."""

    @classmethod
    def of(cls, entry: StateEntry) -> TensorReport:
        shape = tuple(entry.held.shape)
        boxes = tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks(entry.held))
        return cls(entry.first, dtype_name(local(entry.held).dtype), shape, boxes)

    @property
    def size(self) -> int:
        return sum(math.prod(sizes) for _, sizes in self.boxes)


Marks = dict[str, TensorReport]
"""A rank's marks, by the names of the tensors."""


def is_own(found: Sequence[TensorReport | None], rank: int) -> bool:
    """Return whether a rank's tensor differs from those of the others under the same name, by their marks."""
    ours = found[rank]
    assert ours is not None
    if not ours.boxes:
        return len({*found}) > 1 and (not ours.first or (rank != 0 and ours != found[0]))
    every = {mark for mark in found if mark is not None}
    kinds = {(mark.first, mark.dtype, mark.shape, bool(mark.boxes)) for mark in every}
    pieces = {mark.boxes: mark for mark in every}
    return len(kinds) > 1 or len(pieces) < len(every) or sum(mark.size for mark in every) != math.prod(ours.shape)


def own(rank: int, name: str, first: bool = False) -> str:
    """Return the stored name of a tensor that belongs to this rank alone."""
    return f"{'first' if first else 'own'}.{rank}.{name}"


class RankState:
    """A rank's state, by reference: nothing is copied yet."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        also: Mapping[str, HasState] | None = None,
        plain: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.world = place(group)
        program = ProgramState(model, group)
        self._entries = [*program.entries()]
        extra = program.extra_state()
        mine: dict[str, Any] = {
            "given": dict(plain or {}), "names": [*program.whole()], "extra": extra, "optimizer": None
        }  # fmt: skip
        shown: dict[str, Any] = {"model": extra}  # to other programs; ours go on from what each rank had
        if optimizer is not None:
            state = program.optimizer_state(optimizer)
            self._entries += program.optimizer_entries(state)
            mine["optimizer"] = shown["optimizer"] = program.optimizer_plain(state)
        mine["also"] = {name: each.state_dict() for name, each in (also or {}).items()}
        mine["random"] = random_state()
        shown, self._paths = flatten_state_dict(shown)
        self._objects = {f"rank.{self.rank}": mine, **shown}
        self.aliases = {f"model.{name}": f"model.{saved}" for name, saved in program.aliases.items()}
        self._brought: dict[str, Tensor] = {}
        """Tensors copied from another device for comparison, by name, that this rank will probably have to write."""

    def marks(self, alike: bool = False) -> Marks:
        """Return the marks by which the ranks find out which tensors are identical. With `alike` they have no
        digests. A single rank has no marks."""
        if self.world == 1:
            return {}
        marks = {entry.name: TensorReport.of(entry) for entry in self._entries}
        if not alike:
            elsewhere = any(local(entry.held).device.type != "cpu" for entry in self._entries)
            presuming = self.planner([marks] * self.world) if elsewhere else None
            for name, digest in self._digests(presuming.presumed(self.rank, self.world) if presuming else set()):
                marks[name] = msgspec.structs.replace(marks[name], digest=digest)
        return marks

    def _digests(self, ours: set[str]) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the digests of the compared tensors. Beside the tensors that this rank will write, at most one
        tensor per thread is in memory."""
        threads = min(4, os.cpu_count() or 1)
        pending: deque[tuple[str, Future[tuple[int, int]]]] = deque()
        with ThreadPoolExecutor(threads, "digests") as pool:
            for entry in self._entries:
                if not entry.compared:
                    continue
                if len(pending) == threads:
                    name, digest = pending.popleft()
                    yield name, digest.result()
                there = local(entry.held)
                here = on_cpu(there)  # not on a thread, which would have another stream of the device
                if there.device != here.device and (entry.name in ours or chunks(entry.held)):
                    self._brought[entry.name] = here
                pending.append((entry.name, pool.submit(_digest, here)))
                del here
            for name, digest in pending:
                yield name, digest.result()

    def planner(self, everyones: Sequence[Marks]) -> CheckpointSavePlanner:
        """Return the planner, given the marks of all ranks."""
        values: dict[str, Any] = {**self._objects}
        paths: dict[str, tuple[str | int, ...]] = {**self._paths}
        brought = {}
        for entry in self._entries:
            name, held = entry.name, entry.held
            found = [marks.get(name) for marks in everyones]
            if self.world > 1 and is_own(found, self.rank):
                name, held = own(self.rank, name, entry.first), local(held)
                paths[name] = ("first" if entry.first else "own", str(self.rank), *entry.path)
            else:
                paths[name] = entry.path
            values[name] = held
            if entry.name in self._brought:
                brought[name] = self._brought[entry.name]
        self._brought = {}
        return CheckpointSavePlanner(values, paths, brought)


class CheckpointSavePlanner(DefaultSavePlanner):
    """DCP's planner, for tensors that lie on this rank or were copied from its device. It returns copies."""

    def __init__(
        self, values: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]], brought: dict[str, Tensor]
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._paths, self._brought = paths, brought
        self.set_up_planner(dict(values), is_coordinator=True)

    def create_local_plan(self) -> SavePlan:
        """Plan the largest items first, to balance the load."""
        plan = super().create_local_plan()
        return replace(plan, items=sorted(plan.items, key=_largest), planner_data=self._paths)

    def presumed(self, rank: int, world: int) -> set[str]:
        """Return the names that a rank will have to write if all ranks have identical tensors."""
        return {item.index.fqn for item in self._dedup_save_plans([self.create_local_plan()] * world)[rank].items}

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Free the copies of tensors that another rank writes."""
        ours = {item.index.fqn for item in new_plan.items}
        self._brought = {name: tensor for name, tensor in self._brought.items() if name in ours}
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return a copy of a tensor, or of a piece of it."""
        name = write_item.index.fqn
        held = self.state_dict[name]
        if isinstance(held, Divided):
            flat = self._brought.get(name, held.flat)
            return on_cpu(Divided(flat, held.shape, held.lo).__get_tensor_shard__(write_item.index), copy=True)
        here = self._brought.pop(name, None)
        return on_cpu(local(held), copy=True) if here is None else here


class Saver:
    """Saves a program's state to a folder, shared by all ranks or local to each machine."""

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
        alike: bool = False,
    ) -> None:
        """`also` names further objects with a state. With `copies`, each part is written by that many ranks, so
        that it survives the loss of a machine with a local folder. `keep` older steps are kept beside the
        newest.

        `alike`: all ranks hold the same state, apart from rounding. No contents are compared, and each tensor is
        saved by one rank."""
        self._rank, self._world = place(group)
        if not 1 <= copies <= self._world:
            raise CheckpointError(f"{self._world} ranks hold 1 to {self._world} copies of a part, not {copies}")
        if keep < 1:
            raise CheckpointError(f"at least one step stays beside the newest, not {keep}")
        self._folder = Path(folder)
        self._model, self._optimizer, self._also = model, optimizer, dict(also or {})
        self._group, self._copies, self._keep, self._alike = group, copies, keep, alike
        self._writing: threading.Thread | None = None
        self._errors: list[BaseException] = []
        """Errors of the previous saving that have not been raised yet."""
        weakref.finalize(self, _warn_of_unraised, self._errors)
        self._step: int | None = None
        self._again = 0
        self._whole: list[int] | None = None
        """Steps that are complete on the disks of all ranks; None until the first save finds those of earlier runs."""

    def save(self, step: int, **plain: Any) -> None:
        """Save this step; `plain` are numbers and strings, the same on all ranks. All ranks call this.

        Tensors of the model and the optimizer that are bitwise identical on all ranks are saved once, and so are
        those that DDP averages. Tensors that differ are saved per rank, and then only the same number of ranks
        can resume.

        Return when a copy has been taken. If the previous saving, or taking the copy, failed on any rank, raise
        the error on all ranks; nothing is saved then."""

        def look() -> tuple[RankState, bytes]:
            self.wait()
            state = RankState(self._model, self._optimizer, also=self._also, plain=plain, group=self._group)
            here = parts_before(self._folder, step) if self._whole is None else []
            return state, msgspec.msgpack.encode((state.marks(self._alike), here))

        state, looks = self._together(look)
        seen = [msgspec.msgpack.decode(each, type=tuple[Marks, list[PartName]]) for each in looks]
        marks = [each for each, _ in seen]
        found = whole_steps([name for _, names in seen for name in names])

        def plan() -> tuple[tuple[Writer, CheckpointSavePlanner], bytes]:
            writer = Writer(self._folder, step, state.aliases)
            planner = state.planner(marks)
            return (writer, planner), packed_plan(writer.prepare_local_plan(planner.create_local_plan()))

        (writer, planner), plans = self._together(plan)

        def copy() -> tuple[Taken, bytes]:
            dealt, _ = planner.create_global_plan([unpacked_plan(each) for each in plans])
            ours = planner.finish_plan(writer.prepare_global_plan(dealt)[self._rank])
            return writer.take(ours, planner, copy=False), b""

        taken, _ = self._together(copy)
        replaced = None if self._step is None or not self._again else (self._step, self._again)
        whole = found if self._whole is None else self._whole
        if self._step is not None:
            whole = [*dict.fromkeys([*whole, self._step])]
        self._whole = whole = whole[-self._keep :]
        pruned = min(whole) if len(whole) == self._keep else 0
        parts = self._exchanged(*taken.packed()) if self._copies > 1 else None
        self._step, self._again = step, taken.part.again
        self._writing = threading.Thread(target=self._write, args=(taken, parts, pruned, replaced), name="checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Wait until all data of this rank are on disk; raise the error of a failed saving."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._errors:
            self._step = None
            raise self._errors.pop()

    def _together(self, work: Callable[[], tuple[_Kept, bytes]]) -> tuple[_Kept, list[bytes]]:
        """Run the work, and all-gather its messages. Return the local result and the messages of all ranks. If it
        fails on one rank, raise on all."""
        kept, told, trouble = [], b"", None
        try:
            ours, told = work()
            kept.append(ours)
        except Exception as error:
            trouble = error
        said = "" if trouble is None else str(trouble) or repr(trouble)
        answers = gathered(msgspec.msgpack.encode((said, told)), self._group)
        words = [msgspec.msgpack.decode(each, type=tuple[str, bytes]) for each in answers]
        troubles = [f"rank {rank}: {said}" for rank, (said, _) in enumerate(words) if said]
        if troubles:
            self._step = None
            raise CheckpointError("; ".join(troubles)) from trouble
        return kept[0], [told for _, told in words]

    def _exchanged(self, part: CheckpointShard, data: bytes) -> list[tuple[CheckpointShard, bytes]]:
        """Return this rank's part, and those of the preceding ranks, of which it keeps copies."""
        theirs = [
            msgspec.msgpack.decode(each, type=CheckpointShard)
            for each in gathered(msgspec.msgpack.encode(part), self._group)
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
        taken: Taken,
        parts: list[tuple[CheckpointShard, bytes]] | None,
        pruned: int,
        replaced: tuple[int, int] | None,
    ) -> None:
        """Write the parts, on a thread of its own. Steps older than those to be kept are deleted first."""
        try:
            if replaced is not None:
                remove_savings(self._folder, *replaced)
            for older in steps_in(self._folder):
                if older < pruned:
                    remove_step(self._folder, older)
            for part, data in parts or [taken.packed()]:
                write_part(self._folder, part, data)
        except BaseException as error:
            self._errors.append(error)


def _warn_of_unraised(errors: list[BaseException]) -> None:
    """Report unraised errors of the last saving when the saver is destroyed or the program exits."""
    for error in errors:
        warnings.warn(f"the last save failed: {error}", stacklevel=2)


def _digest(here: Tensor) -> tuple[int, int]:
    """Return a digest of the bits: a fingerprint and a CRC. The fingerprint is a sum, so it misses swapped rows
    and a pair of flipped signs; the CRC detects both."""
    data = here.reshape(-1).view(torch.uint8).numpy()
    return fingerprint(data), zlib.crc32(data.data)


def _largest(item: WriteItem) -> tuple[int, str, tuple[int, ...]]:
    data = item.tensor_data
    size = 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
    return -size, item.index.fqn, tuple(item.index.offset or ())
