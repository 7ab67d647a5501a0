"""Loading: the newest whole checkpoint that the ranks hold together, by as many ranks as there are now."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hcsim.checkpoints.optimizer import restore_optimizer
from hcsim.checkpoints.parts import (
    Part,
    as_tensor,
    check_data,
    complete,
    data_file,
    gathered,
    parts_in,
    place,
    steps_in,
    write_part,
)
from hcsim.checkpoints.plain import dtype_name, put_together
from hcsim.checkpoints.ranges import Names, Range
from hcsim.checkpoints.snapshot import HasState, restore_random_state
from hcsim.checkpoints.tensors import Tensors
from hcsim.errors import CheckpointError, NoCheckpoint


class Checkpoint:
    """One step that was saved, whole and verified. `load` gives it; tensors are read when they are asked for."""

    def __init__(self, folder: Path, parts: Mapping[int, Part]) -> None:
        self._folder = folder
        self._parts = parts
        self._tensors = Tensors(folder, parts)
        self.step = parts[0].step
        self.world = parts[0].world
        """How many ranks saved it."""
        self.plain: dict[str, Any] = self._plain(0)["given"]
        """What `save` was given beside the step."""

    @classmethod
    def open(cls, folder: Path | str, step: int | None = None) -> Checkpoint:
        """What is whole in one folder, whoever else there is: to look at, say, or to use a model that was trained."""
        return cls(Path(folder), _chosen(Path(folder), step, lambda mine: [mine])[0])

    def model(self) -> dict[str, Any]:
        """The whole model's parameters and buffers by their names, as `nn.Module.load_state_dict` takes them."""
        plain = self._plain(0)
        found = {name: self._tensors.whole(f"model/{name}") for name in self._tensors.names("model/")}
        found |= plain.get("extra", {})
        return found | {name: found[saved] for name, saved in plain.get("aliases", {}).items()}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None where there is none of that name."""
        return self._tensors.shape(name)

    def elements(self, name: str, lo: int, hi: int) -> Tensor:
        """Some elements of a tensor, from whichever parts have them."""
        return self._tensors.elements(name, lo, hi)

    @torch.no_grad()
    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        also: Mapping[str, HasState] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Put it into a model and what belongs to it, however many ranks there are.

        What a rank alone had goes to that rank again, and so do its random numbers. A rank that is new has what rank
        0 had, and is asked to `forget()` what is rank 0's alone, if it can; where there are fewer ranks now, a state
        with a method `absorb` also takes what those had that are gone: residuals that are still to be sent, say.
        Where there are more or fewer ranks now, tensors of the model and the optimizer that differed are refused."""
        rank, world = place(group)
        before = rank if rank < self.world else 0
        plain = self._plain(before)
        tensors = Tensors(self._folder, self._parts, rank if world == self.world else None)
        if optimizer is not None and plain["optimizer"] is None:
            raise CheckpointError(f"the checkpoint of step {self.step} has no optimizer's state")
        if world != self.world:
            for path in ("model/", "optimizer/") if optimizer is not None else ("model/",):
                for name in tensors.names(path):
                    tensors.check(path + name)
        self._restore_model(model, tensors, plain.get("extra"))
        if optimizer is not None:
            restore_optimizer(optimizer, model, plain["optimizer"], tensors)
        for name, state in (also or {}).items():
            state.load_state_dict(self._own(before, name))
            if rank >= self.world and hasattr(state, "forget"):
                state.forget()
            if hasattr(state, "absorb"):
                for gone in range(rank + world, self.world, world):
                    state.absorb(self._own(gone, name))
        if rank < self.world:
            restore_random_state(self._own(rank, "random"))

    def _restore_model(self, model: nn.Module, tensors: Tensors, extra: Mapping[str, Any] | None) -> None:
        names = Names(model)
        ranges = [*names.ranges()]
        for part in ranges:
            there = tensors.shape(f"model/{part.name}")
            if there != part.shape:
                raise CheckpointError(
                    f"{part.name} has shape {list(part.shape)} in the model, and in the checkpoint "
                    + ("it is missing" if there is None else f"{list(there)}")
                )
            saved = tensors.dtype(f"model/{part.name}")
            if not torch.can_cast(saved, part.values.dtype):
                raise CheckpointError(
                    f"{part.name} is {dtype_name(part.values.dtype)} in the model, which cannot hold the "
                    f"{dtype_name(saved)} of the checkpoint"
                )
            if _narrower(part.values.dtype, saved):
                _check_fits(part, tensors.elements(f"model/{part.name}", part.lo, part.hi))
        modules = names.extra() if extra is not None else {}  # older checkpoints have none of these
        known, saved_names = {*names.whole(), *modules}, [*tensors.names("model/"), *(extra or {})]
        if beyond := [name for name in saved_names if name not in known]:
            raise CheckpointError(
                f"the checkpoint of step {self.step} is of another model: this one has no {', '.join(beyond[:3])}"
                + (f" and {len(beyond) - 3} more" if len(beyond) > 3 else "")
            )
        if lacking := [name for name in modules if name not in saved_names]:
            raise CheckpointError(f"the checkpoint of step {self.step} has no {lacking[0]}")
        for part in ranges:
            part.values.copy_(tensors.elements(f"model/{part.name}", part.lo, part.hi).view(part.values.shape))
        for name, module in modules.items():
            module.set_extra_state((extra or {})[name])

    def _plain(self, rank: int) -> dict[str, Any]:
        """What that rank had beside tensors of the model's and the optimizer's."""
        found: dict[str, Any] = put_together(self._parts[rank].plain, lambda path: self._tensors.saved_by(rank, path))
        return found

    def _own(self, rank: int, name: str) -> Any:
        """The state of that name that a rank alone had."""
        states = dict(self._parts[rank].own["$dict"])
        if name not in states:
            raise CheckpointError(f"the checkpoint of step {self.step} has no state called {name}")
        return put_together(states[name], lambda path: self._tensors.saved_by(rank, path))


def _narrower(here: torch.dtype, saved: torch.dtype) -> bool:
    """Whether both are whole numbers, and these do not hold all of those."""
    if any(each == torch.bool or each.is_floating_point or each.is_complex for each in (here, saved)):
        return False
    ours, theirs = torch.iinfo(here), torch.iinfo(saved)
    return not ours.min <= theirs.min <= theirs.max <= ours.max


def _check_fits(part: Range, values: Tensor) -> None:
    numbers, kind = values.numpy(), torch.iinfo(part.values.dtype)
    beyond = numbers[(numbers < kind.min) | (numbers > kind.max)]
    if beyond.size:
        raise CheckpointError(
            f"{part.name} is {dtype_name(part.values.dtype)} in the model, which cannot hold the {beyond[0]} of the "
            "checkpoint"
        )


def load(folder: Path | str, step: int | None = None, *, group: dist.ProcessGroup | None = None) -> Checkpoint:
    """The newest step that all ranks together hold all parts of. All ranks call this.

    A rank whose folder lacks parts, or has damaged ones, gets them from the others and keeps them. Where nobody has any
    part the error is a `NoCheckpoint`."""
    folder = Path(folder)
    parts, sound = _chosen(folder, step, lambda mine: gathered(mine, group))
    for part in parts.values():
        _spread(folder, part, [rank for rank, held in enumerate(sound) if part.rank in held], group)
    return Checkpoint(folder, parts)


def _chosen(
    folder: Path, step: int | None, gather: Callable[[bytes], list[bytes]]
) -> tuple[dict[int, Part], list[list[int]]]:
    """The parts of the newest whole saving, and which of them each rank has. What is damaged is named."""
    mine: list[Part] = []
    troubles: list[str] = []
    for found in steps_in(folder) if step is None else [step]:
        parts, damaged = parts_in(folder, found)
        mine += parts
        troubles += damaged
    described = _decoded(gather(msgspec.msgpack.encode(mine)), list[Part])
    for parts_of in _savings(described):
        sound, damaged = _sound(folder, [part for part in parts_of.values() if part in mine])
        troubles += damaged
        held = _decoded(gather(msgspec.msgpack.encode(sound)), list[int])
        if {rank for ranks in held for rank in ranks} == parts_of.keys():
            if troubles:
                warnings.warn("; ".join(troubles) + f": step {parts_of[0].step} is loaded", stacklevel=3)
            return parts_of, held
    said = _decoded(gather(msgspec.msgpack.encode(troubles)), list[str])
    damaged = [each for ours in said for each in ours]
    kind = CheckpointError if damaged or any(described) else NoCheckpoint
    raise kind(_nothing(folder, step, described, damaged))


def _savings(described: Sequence[Sequence[Part]]) -> Iterator[dict[int, Part]]:
    """All savings of which every part is somewhere, the newest first."""
    savings: dict[tuple[int, int, str], dict[int, Part]] = {}
    for part in (part for parts in described for part in parts):
        savings.setdefault((part.step, part.again, part.saving), {})[part.rank] = part
    for _, parts in sorted(savings.items(), key=lambda item: item[0], reverse=True):
        if complete(parts):
            yield dict(sorted(parts.items()))


def _sound(folder: Path, parts: Sequence[Part]) -> tuple[list[int], list[str]]:
    """The ranks of the parts whose data are here as they were saved, and what is wrong with the others."""
    sound, troubles = [], []
    for part in parts:
        try:
            check_data(folder, part)
        except CheckpointError as error:
            troubles.append(str(error))
        else:
            sound.append(part.rank)
    return sound, troubles


def _spread(folder: Path, part: Part, having: list[int], group: dist.ProcessGroup | None) -> None:
    """Let those that lack a part have it from the first that has it."""
    rank, world = place(group)
    if len(having) == world:
        return
    room = torch.empty(part.size_bytes, dtype=torch.uint8)
    if rank == having[0]:
        room = as_tensor(data_file(folder, part).read_bytes())
    dist.broadcast(room, group_src=having[0], group=group)
    if rank not in having:
        write_part(folder, part, room.numpy().tobytes())


def _decoded(everyones: Sequence[bytes], kind: Any) -> list[Any]:
    return [msgspec.msgpack.decode(each, type=kind) for each in everyones]


def _nothing(folder: Path, step: int | None, described: Sequence[Sequence[Part]], troubles: Sequence[str]) -> str:
    """What there is instead of a whole checkpoint."""
    said = list(troubles)
    for found in sorted({part.step for parts in described for part in parts}, reverse=True)[:3]:
        parts = [part for each in described for part in each if part.step == found]
        if len({part.saving for part in parts}) > 1:
            said.append(f"the parts of step {found} are of several savings")
        elif lacking := sorted({*range(parts[0].world)} - {part.rank for part in parts}):
            said.append(f"of step {found} the part of rank {', '.join(map(str, lacking))} is missing")
    what = "no whole checkpoint" + ("" if step is None else f" of step {step}")
    return f"{folder}: there is {what} here" + (f": {'; '.join(dict.fromkeys(said))}" if said else "")
