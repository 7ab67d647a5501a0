"""Loading: the newest whole checkpoint that the ranks hold together, by as many ranks as there are now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from hcsim.checkpoints.parts import Part, complete, parts_in, read_data, steps_in, write_part
from hcsim.checkpoints.state import HasState, Names, put_together, restore_random_state
from hcsim.errors import CheckpointError


class Checkpoint:
    """One step that was saved, whole and verified."""

    def __init__(self, folder: Path, parts: Mapping[int, Part]) -> None:
        self._folder = folder
        self._parts = parts
        self._data: dict[int, dict[str, Tensor]] = {}
        first = parts[0]
        self.step = first.step
        self.world = first.world
        """How many ranks saved it."""
        self.plain: dict[str, Any] = dict(first.plain)

    @classmethod
    def open(cls, folder: Path | str, step: int | None = None) -> Checkpoint:
        """A step in one folder; without one, the newest that is whole."""
        folder = Path(folder)
        for found in steps_in(folder) if step is None else [step]:
            parts = {part.rank: part for part in parts_in(folder, found)}
            if parts and complete(parts):
                return cls(folder, parts)
        raise CheckpointError(_nothing(folder, step))

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        piece = next((part.pieces[name] for part in self._parts.values() if name in part.pieces), None)
        if piece is None:
            raise CheckpointError(f"the checkpoint of step {self.step} has no {name}")
        count = 1
        for size in piece.shape:
            count *= size
        return self.elements(name, 0, count).view(piece.shape)

    def elements(self, name: str, lo: int, hi: int) -> Tensor:
        """Some elements of a tensor, from whichever parts have them."""
        found: Tensor | None = None
        have = 0
        for rank, part in self._parts.items():
            piece = part.pieces.get(name)
            if piece is None:
                continue
            if found is None:
                found = torch.empty(hi - lo, dtype=getattr(torch, piece.dtype))
            first, last = max(lo, piece.lo), min(hi, piece.hi)
            if first < last:
                found[first - lo : last - lo] = self._of(rank)[name][first - piece.lo : last - piece.lo]
                have += last - first
        if found is None or have != hi - lo:
            raise CheckpointError(f"the checkpoint of step {self.step} has not all of {name}")
        return found

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None where there is none of that name."""
        return next((part.pieces[name].shape for part in self._parts.values() if name in part.pieces), None)

    def own(self, rank: int, name: str) -> Any:
        """The state of that name that a rank alone had."""
        part = self._parts[rank]

        def tensor(path: str) -> Tensor:
            return self._of(rank)[path].view(part.pieces[path].shape)

        return put_together(part.own_plain[name], tensor)

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        also: Mapping[str, HasState] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Put it into a model and what belongs to it, however many ranks there are. What was one rank's alone goes to
        that rank again; where there are fewer ranks now, a state with a method `absorb` also takes what the others had.
        """
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        with torch.no_grad():
            self._fill_model(model)
            if optimizer is not None:
                self._fill_optimizer(optimizer, model)
        for name, state in (also or {}).items():
            if rank < self.world:
                state.load_state_dict(self.own(rank, name))
            absorb = getattr(state, "absorb", None)
            if absorb is not None:
                for gone in range(rank + world, self.world, world):
                    absorb(self.own(gone, name))
        if rank < self.world:
            restore_random_state(self.own(rank, "random"))

    def _fill_model(self, model: nn.Module) -> None:
        ranges = [*Names(model).ranges()]
        for part in ranges:
            there = self.shape(f"model/{part.name}")
            if there != part.shape:
                raise CheckpointError(
                    f"{part.name} has shape {list(part.shape)} in the model, and in the checkpoint "
                    + ("it is missing" if there is None else f"{list(there)}")
                )
        for part in ranges:
            part.values.copy_(self.elements(f"model/{part.name}", part.lo, part.lo + part.values.numel()))

    def _fill_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        saved = self.plain.get("optimizer")
        if saved is None:
            raise CheckpointError(f"the checkpoint of step {self.step} has no optimizer's state")
        names = Names(model)
        for name, parameter in model.named_parameters():
            counts = saved["counts"].get(names.within(name)[0], {})
            state = {key: _number(*number) for key, number in counts.items()}
            for key in saved["moments"]:
                moment = torch.zeros_like(parameter)
                parts = [part._replace(name=f"optimizer/{key}/{part.name}") for part in names.like(name, moment)]
                if all(self.shape(part.name) is not None for part in parts):
                    for part in parts:
                        part.values.copy_(self.elements(part.name, part.lo, part.lo + part.values.numel()))
                    state[key] = moment
            if state:
                optimizer.state[parameter] = state
        for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})

    def _of(self, rank: int) -> dict[str, Tensor]:
        if rank not in self._data:
            self._data[rank] = load_tensors(read_data(self._folder, self._parts[rank]))
        return self._data[rank]


def load(folder: Path | str, step: int | None = None, *, group: dist.ProcessGroup | None = None) -> Checkpoint:
    """The newest step that all ranks together hold all parts of. All ranks call this.

    A rank whose folder lacks parts, or has damaged ones, gets them from the others and keeps them."""
    folder = Path(folder)
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return Checkpoint.open(folder, step)
    holders: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(holders, _held(folder, step), group=group)
    chosen = _newest(holders)
    if chosen is None:
        raise CheckpointError(_nothing(folder, step) + ", nor with what the other ranks have")
    for rank in sorted(chosen):
        _spread(folder, chosen[rank], holders, group)
    return Checkpoint(folder, chosen)


def _held(folder: Path, step: int | None) -> list[Part]:
    """The parts that this machine has, with the bytes that were saved."""
    sound = []
    for found in steps_in(folder) if step is None else [step]:
        for part in parts_in(folder, found):
            try:
                read_data(folder, part)
            except CheckpointError:
                continue
            sound.append(part)
    return sound


def _newest(holders: list[list[Part]]) -> dict[int, Part] | None:
    savings: dict[tuple[int, str], dict[int, Part]] = {}
    for part in (part for parts in holders for part in parts):
        savings.setdefault((part.step, part.saving), {})[part.rank] = part
    for _, parts in sorted(savings.items(), reverse=True):
        if complete(parts):
            return parts
    return None


def _spread(folder: Path, part: Part, holders: list[list[Part]], group: dist.ProcessGroup | None) -> None:
    """Let those that lack a part have it from the first that has it."""
    having = [rank for rank, parts in enumerate(holders) if part in parts]
    if len(having) == len(holders):
        return
    room = torch.empty(part.size_bytes, dtype=torch.uint8)
    if dist.get_rank(group) == having[0]:
        room = torch.frombuffer(bytearray(read_data(folder, part)), dtype=torch.uint8)
    dist.broadcast(room, group_src=having[0], group=group)
    if dist.get_rank(group) not in having:
        write_part(folder, part, room.numpy().tobytes())


def _nothing(folder: Path, step: int | None) -> str:
    there = ", ".join(f"step {found}: {_missing(folder, found)}" for found in steps_in(folder)[:3])
    what = "no whole checkpoint" if step is None else f"no whole checkpoint of step {step}"
    return f"{folder}: there is {what} here{f' ({there})' if there else ''}"


def _missing(folder: Path, step: int) -> str:
    parts = [*parts_in(folder, step)]
    if not parts:
        return "no part is whole"
    if len({part.saving for part in parts}) > 1:
        return "its parts are of several savings"
    lacking = sorted({*range(parts[0].world)} - {part.rank for part in parts})
    return f"the part of rank {', '.join(map(str, lacking))} is missing"


def _number(dtype: str, value: Any) -> Any:
    return torch.tensor(value, dtype=getattr(torch, dtype)) if dtype else value
