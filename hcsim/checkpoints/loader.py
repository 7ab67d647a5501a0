"""Loading the newest complete checkpoint that the ranks hold together, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from hcsim.checkpoints.parts import (
    CheckpointShard,
    as_tensor,
    chosen,
    data_file,
    dtype_name,
    gathered,
    place,
    write_part,
)
from hcsim.checkpoints.saver import own
from hcsim.checkpoints.state import (
    EXTRA,
    Divided,
    HasState,
    Held,
    ProgramState,
    StateEntry,
    local,
    restore_random_state,
)
from hcsim.checkpoints.storage import Reader
from hcsim.errors import CheckpointError


class Checkpoint:
    """One saved step, complete and verified. `load` returns it; tensors are read on demand."""

    def __init__(self, folder: Path, parts: Mapping[int, CheckpointShard]) -> None:
        self.reader = Reader(folder, parts=parts)
        metadata = self.reader.read_metadata()
        self._saved: dict[str, Any] = metadata.state_dict_metadata
        self._moment_keys: dict[str, dict[str, None]] = {}
        """The names of the optimizer state of each parameter, over all ranks."""
        for path in metadata.planner_data.values():
            match path[2:] if path[0] in {"own", "first"} else path:
                case "optimizer", "state", name, key:
                    self._moment_keys.setdefault(name, {})[key] = None
        self.step = parts[0].step
        self.world = parts[0].world
        self.plain: dict[str, Any] = self._of(0)["given"]
        """The `plain` arguments of `save`."""

    @classmethod
    def open(cls, folder: Path | str, step: int | None = None) -> Checkpoint:
        """Open a checkpoint of which this folder has all parts, independent of other ranks: to inspect it, or to
        use a trained model."""
        return cls(Path(folder), chosen(Path(folder), step, lambda mine: [mine])[0])

    def model(self) -> dict[str, Any]:
        """Return the parameters and buffers of the whole model by name, as `nn.Module.load_state_dict` takes them."""
        self._check_whole("model.")
        found = {name: torch.empty(saved.size, dtype=saved.properties.dtype) for name, saved in self._alike()}
        self._read({f"model.{name}": tensor for name, tensor in found.items()})
        aliases = self.reader.aliases().items()
        found |= {name[6:]: found[of[6:]] for name, of in aliases if of[6:] in found}
        extra: dict[str, Any] = self._of(0)["extra"]
        return dict(sorted(found.items())) | extra

    @torch.no_grad()
    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        also: Mapping[str, HasState] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Restore a model, its optimizer and other state, on any number of ranks.

        State that belongs to one rank is restored on the same rank, as are its random number generators. An
        additional rank starts with the state of rank 0; its `forget()`, if defined, is called to drop what
        belongs to rank 0 only. With fewer ranks than before, a state with a method `absorb` also takes over the
        state of removed ranks, such as residuals that are still to be sent. With another number of ranks,
        tensors of the model and the optimizer that differed between ranks are rejected."""
        rank, world = place(group)
        before = rank if rank < self.world else 0
        mine = self._of(before)
        if optimizer is not None and mine["optimizer"] is None:
            raise CheckpointError(f"the checkpoint of step {self.step} has no optimizer's state")
        alone = rank if world == self.world else None
        if alone is None:
            self._check_whole("model.")
            if optimizer is not None:
                self._check_whole("optimizer.")
        program = ProgramState(model, group)
        self._restore_model(program, mine, alone)
        if optimizer is not None:
            self._restore_optimizer(program, optimizer, mine["optimizer"], alone)
        for name, state in (also or {}).items():
            state.load_state_dict(self._also(before, name))
            if rank >= self.world and hasattr(state, "forget"):
                state.forget()
            if hasattr(state, "absorb"):
                for gone in range(rank + world, self.world, world):
                    state.absorb(self._also(gone, name))
        if rank < self.world:
            restore_random_state(mine["random"])

    def _restore_model(self, program: ProgramState, mine: Mapping[str, Any], rank: int | None) -> None:
        targets = dict(self._target(entry, rank) for entry in program.entries())
        for entry in program.entries():
            self._check_fits(entry, rank)
        extra = mine["extra"]
        known = {*program.whole(), *program.extra}
        saved = [*(mine["names"] if rank is not None else (name for name, _ in self._alike())), *extra]
        if beyond := [name for name in saved if name not in known]:
            raise CheckpointError(
                f"the checkpoint of step {self.step} is of another model: this one has no {', '.join(beyond[:3])}"
                + (f" and {len(beyond) - 3} more" if len(beyond) > 3 else "")
            )
        if lacking := [name for name in program.extra if name not in extra]:
            raise CheckpointError(f"the checkpoint of step {self.step} has no {lacking[0]}")
        self._read(targets)
        program.restored(extra)

    def _called(self, name: str, rank: int | None) -> str:
        """Return the stored name of this rank's tensor."""
        own_ones = () if rank is None else (own(rank, name), own(rank, name, first=True))
        return next((each for each in own_ones if each in self._saved), name)

    def _fitting(self, called: str, held: Held) -> Held:
        """Return the destination to read into. For a tensor of one rank alone, it covers everything that was saved
        here."""
        return held if called.startswith(("model.", "optimizer.")) else local(held)

    def _target(self, entry: StateEntry, rank: int | None) -> tuple[str, Held]:
        called = self._called(entry.name, rank)
        return called, self._fitting(called, entry.held)

    def _check_fits(self, entry: StateEntry, rank: int | None) -> None:
        name, shape = entry.path[1], list(entry.held.shape)
        key, held = self._target(entry, rank)
        saved = self._saved.get(key)
        if saved is None or list(saved.size) != list(held.shape):
            raise CheckpointError(
                f"{name} has shape {shape} in the model, and in the checkpoint "
                + ("it is missing" if saved is None else f"{list(saved.size)}")
            )
        ours, theirs = local(held).dtype, saved.properties.dtype
        cannot = f"{name} is {dtype_name(ours)} in the model, which cannot hold the "
        if not torch.can_cast(theirs, ours):
            raise CheckpointError(f"{cannot}{dtype_name(theirs)} of the checkpoint")
        if _narrower(ours, theirs):
            self._read({key: (wide := like(held, theirs))})
            numbers, kind = local(wide).cpu().numpy(), torch.iinfo(ours)
            beyond = numbers[(numbers < kind.min) | (numbers > kind.max)]
            if beyond.size:
                raise CheckpointError(f"{cannot}{beyond[0]} of the checkpoint")

    def _restore_optimizer(
        self, program: ProgramState, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], rank: int | None
    ) -> None:
        """Restore the optimizer; parameter groups are matched by their parameters."""
        now = program.optimizer_state(optimizer)
        here = [group["params"] for group in program.optimizer_plain(now)["param_groups"]]
        there = [group["params"] for group in saved["param_groups"]]
        if here != there:
            raise CheckpointError(
                f"the optimizer has {len(here)} groups, of {', '.join(str(len(group)) for group in here)} parameters, "
                f"which are not those of the checkpoint, {', '.join(str(len(group)) for group in there)}"
            )
        for theirs in saved["param_groups"]:
            lacking = [key for key in optimizer.defaults if key not in theirs]
            foreign = [key for key in theirs if key not in {*optimizer.defaults, "params", "param_names", "initial_lr"}]
            if lacking and foreign:  # torch's versions add settings, and take none away
                raise CheckpointError(
                    f"the checkpoint of step {self.step} is of another kind of optimizer: it has {foreign[0]}, and "
                    f"{type(optimizer).__name__} has {lacking[0]}"
                )
        names = [name for group in now["param_groups"] for name in group["params"]]
        reading: dict[str, Held] = {}
        states = {name: self._moments(program, name, saved["state"], rank, reading) for name in names}
        self._read(reading)
        numbers = iter(range(len(names)))
        groups = [
            {"params": [next(numbers) for _ in ours["params"]]}
            | {key: value for key, value in theirs.items() if key not in {"params", "param_names"}}
            for ours, theirs in zip(now["param_groups"], saved["param_groups"], strict=True)
        ]
        state = {number: states[name] for number, name in enumerate(names) if states[name]}
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _moments(
        self,
        program: ProgramState,
        name: str,
        counts: Mapping[str, Mapping[str, Any]],
        rank: int | None,
        reading: dict[str, Held],
    ) -> dict[str, Any]:
        """Return the optimizer state of one parameter; add the tensors that are still to be read to `reading`."""
        state = {key: value for whole in program.names(name) for key, value in counts.get(whole, {}).items()}
        parameter, pieces, block = program.parameter(name), program.pieces(name), program.is_block(name)
        for key in dict.fromkeys(key for whole in pieces for key in self._moment_keys.get(whole, ())):
            saved = {whole: self._called(f"optimizer.state.{whole}.{key}", rank) for whole in pieces}
            there = {whole: self._saved[called] for whole, called in saved.items() if called in self._saved}
            dtype = next((each.properties.dtype for each in there.values()), parameter.dtype)
            moment = like(parameter, dtype)
            held: dict[str, Held] = program.held(name, moment) if block else {name: moment}
            if block and (key == "step" or any(not each.size and pieces[whole] for whole, each in there.items())):
                held = dict.fromkeys([*there][:1], moment := torch.zeros((), dtype=dtype))
            elif not block and any(self._fitting(saved[name], moment).shape != each.size for each in there.values()):
                held = {name: (moment := torch.zeros(there[name].size, dtype=dtype, device=parameter.device))}
            if there or not held:  # all of a block's shard may be padding
                state[key] = moment
            reading |= {saved[whole]: self._fitting(saved[whole], held[whole]) for whole in there.keys() & held.keys()}
        return state

    def _of(self, rank: int) -> dict[str, Any]:
        """Return a rank's data other than the tensors of the model and the optimizer."""
        found: dict[str, Any] = self.reader.value(f"rank.{rank}")
        return found

    def _also(self, rank: int, name: str) -> Any:
        """Return a rank's own additional state of this name."""
        states = self._of(rank)["also"]
        if name not in states:
            raise CheckpointError(f"the checkpoint of step {self.step} has no state called {name}")
        return states[name]

    def _alike(self) -> Iterator[tuple[str, TensorStorageMetadata]]:
        """Yield the model's tensors that all ranks shared, each under one name."""
        aliases = self.reader.aliases()
        for name, saved in self._saved.items():
            within, *path = name.split(".")
            if within != "model" or name in aliases or EXTRA in path:
                continue
            if isinstance(saved, TensorStorageMetadata):
                yield ".".join(path), saved

    def _check_whole(self, within: str) -> None:
        """Raise if a tensor can only be restored on the same ranks that saved it."""
        for path in sorted(self.reader.read_metadata().planner_data.values(), key=str):
            name = ".".join(map(str, path[2:]))
            if path[0] == "own" and name.startswith(within) and name not in self._saved:
                raise CheckpointError(
                    f"{name.removeprefix('model.')} differs among the {self.world} ranks that saved it: only "
                    f"{self.world} ranks can go on from it, each from its own"
                )

    def _read(self, targets: Mapping[str, Held]) -> None:
        planner = _Planner(targets, self.reader.read_metadata())
        self.reader.read_data(planner.create_local_plan(), planner).wait()


class _Planner(DefaultLoadPlanner):
    """DCP's planner, for tensors that this rank holds in part."""

    def __init__(self, targets: Mapping[str, Held], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state_dict, self.metadata = dict(targets), metadata

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, Divided) else super().lookup_tensor(index)


def like(held: Held, dtype: torch.dtype) -> Any:
    """Return zeros with the same layout."""
    if isinstance(held, Divided):
        return Divided(torch.zeros_like(held.flat, dtype=dtype), held.shape, held.lo)
    return torch.zeros_like(held.detach(), dtype=dtype)


def _narrower(here: torch.dtype, saved: torch.dtype) -> bool:
    """Return whether both are integer types and `here` cannot hold all values of `saved`."""
    if any(each == torch.bool or each.is_floating_point or each.is_complex for each in (here, saved)):
        return False
    ours, theirs = torch.iinfo(here), torch.iinfo(saved)
    return not ours.min <= theirs.min <= theirs.max <= ours.max


def load(folder: Path | str, step: int | None = None, *, group: dist.ProcessGroup | None = None) -> Checkpoint:
    """Return the newest step of which all ranks together hold all parts. All ranks call this.

    A rank whose folder lacks parts, or has damaged ones, receives them from the others and stores them. If
    no rank has any part, the error is a `NoCheckpoint`."""
    folder = Path(folder)
    parts, sound = chosen(folder, step, lambda mine: gathered(mine, group))
    for part in parts.values():
        _spread(folder, part, [rank for rank, held in enumerate(sound) if part.rank in held], group)
    return Checkpoint(folder, parts)


def _spread(folder: Path, part: CheckpointShard, having: list[int], group: dist.ProcessGroup | None) -> None:
    """Send a part from the first rank that has it to the ranks that lack it."""
    rank, world = place(group)
    if len(having) == world:
        return
    room = torch.empty(part.size_bytes, dtype=torch.uint8)
    if rank == having[0]:
        room = as_tensor(data_file(folder, part).read_bytes())
    dist.broadcast(room, group_src=having[0], group=group)
    if rank not in having:
        write_part(folder, part, room.numpy().tobytes())
