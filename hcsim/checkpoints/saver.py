"""Saving: a copy is taken at once, and written while training goes on."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn

from hcsim.checkpoints.parts import Part, Piece, parts_in, remove_part, steps_in, write_part
from hcsim.checkpoints.state import HasState, Names, Range, optimizer_plain, optimizer_ranges, random_state, taken_apart
from hcsim.errors import CheckpointError


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
        it outlives a machine whose folder is its own. The newest `keep` steps stay."""
        self._rank, self._world = (
            (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        )
        if not 1 <= copies <= self._world:
            raise CheckpointError(f"{self._world} ranks hold 1 to {self._world} copies of a part, not {copies}")
        if keep < 1:
            raise CheckpointError(f"at least the newest step stays, not {keep}")
        self._folder = Path(folder)
        self._model, self._optimizer, self._also = model, optimizer, dict(also or {})
        self._group, self._copies, self._keep = group, copies, keep
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, **plain: Any) -> None:
        """Save this step; `plain` are numbers and words, the same on all ranks. All ranks call this.

        Returns when a copy has been taken. Raises what went wrong with the saving before, if anything did."""
        self.wait()
        part, data = self._part(step, plain)
        mine = [(part, data), *self._others(part, data)]
        self._writing = threading.Thread(target=self._write, args=(step, mine), name="hcsim checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Return when everything is on the disk; raises what went wrong."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _part(self, step: int, plain: dict[str, Any]) -> tuple[Part, bytes]:
        ranges = [part._replace(name=f"model/{part.name}") for part in Names(self._model).ranges()]
        if self._optimizer is not None:
            ranges += optimizer_ranges(self._optimizer, self._model)
            plain = {**plain, "optimizer": optimizer_plain(self._optimizer, self._model)}
        states = {"random": random_state(), **{name: state.state_dict() for name, state in self._also.items()}}
        own: dict[str, Tensor] = {}
        own_plain = {name: taken_apart(state, f"own/{name}", own) for name, state in states.items()}
        chosen = [part for part in ranges if not part.shared or self._writes(part, ranges)]
        tensors = {part.name: part.values for part in chosen} | {name: value.reshape(-1) for name, value in own.items()}
        data = save({name: _copy(tensor) for name, tensor in tensors.items()})
        pieces = {part.name: _piece(part.values, part.shape, part.lo) for part in chosen}
        pieces |= {name: _piece(tensor.reshape(-1), tuple(tensor.shape), 0) for name, tensor in own.items()}
        return Part(
            saving=self._agreed(),
            step=step,
            rank=self._rank,
            world=self._world,
            size_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            pieces=pieces,
            own=tuple(own),
            plain=plain,
            own_plain=own_plain,
        ), data

    def _writes(self, part: Range, ranges: list[Range]) -> bool:
        """Whether a tensor that all ranks hold is ours to write: the largest are dealt out first, to who has least."""
        loads = [0] * self._world
        for other in sorted(
            (each for each in ranges if each.shared), key=lambda each: (-each.values.nbytes, each.name)
        ):
            writer = loads.index(min(loads))
            loads[writer] += other.values.nbytes
            if other.name == part.name:
                return writer == self._rank
        raise AssertionError(part.name)

    def _agreed(self) -> str:
        """A number for this saving."""
        number = torch.tensor(list(secrets.token_bytes(16)), dtype=torch.uint8)
        if self._world > 1:
            dist.broadcast(number, group_src=0, group=self._group)
        return bytes(number.tolist()).hex()

    def _others(self, part: Part, data: bytes) -> list[tuple[Part, bytes]]:
        """The parts of the ranks before us, of which we hold copies."""
        held = []
        for distance in range(1, self._copies):
            everyone: list[Any] = [None] * self._world
            dist.all_gather_object(everyone, (part, len(data)), group=self._group)
            before = (self._rank - distance) % self._world
            theirs, length = everyone[before]
            room = torch.empty(length, dtype=torch.uint8)
            after = (self._rank + distance) % self._world
            sending = dist.isend(_bytes(data), group_dst=after, group=self._group)
            dist.recv(room, group_src=before, group=self._group)
            if sending is not None:
                sending.wait()
            held.append((theirs, room.numpy().tobytes()))
        return held

    def _write(self, step: int, parts: list[tuple[Part, bytes]]) -> None:
        try:
            for part, data in parts:
                write_part(self._folder, part, data)
            stems = [part.stem for part, _ in parts]
            whole = [older for older in steps_in(self._folder) if older <= step]
            for older in whole[self._keep :]:
                for part in list(parts_in(self._folder, older)):
                    if part.stem in stems or part.world != self._world:
                        remove_part(self._folder, older, part.stem)
        except BaseException as error:
            self._error = error


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _piece(values: Tensor, shape: tuple[int, ...], lo: int) -> Piece:
    return Piece(str(values.dtype).removeprefix("torch."), shape, lo, lo + values.numel())


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
