"""Saving: a copy is taken at once, and written while training goes on."""

from __future__ import annotations

import secrets
import threading
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from hcsim.checkpoints.parts import (
    Part,
    as_tensor,
    gathered,
    parts_in,
    place,
    remove_savings,
    remove_step,
    steps_in,
    write_part,
)
from hcsim.checkpoints.snapshot import HasState, Marks, Snapshot, State
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
        alike: bool = False,
    ) -> None:
        """`also` names whatever else has a state. With `copies`, each part is written by that many ranks, so that
        it outlives a machine whose folder is its own. Beside the newest step stay the `keep` before it.

        `alike`: all ranks hold the same, but for rounding. Nothing is compared, and each tensor is saved by one of
        them."""
        self._rank, self._world = place(group)
        if not 1 <= copies <= self._world:
            raise CheckpointError(f"{self._world} ranks hold 1 to {self._world} copies of a part, not {copies}")
        if keep < 1:
            raise CheckpointError(f"at least one step stays beside the newest, not {keep}")
        if "random" in (also or {}):
            raise CheckpointError("the state called random is that of the generators: call yours something else")
        self._folder = Path(folder)
        self._model, self._optimizer, self._also = model, optimizer, dict(also or {})
        self._group, self._copies, self._keep, self._alike = group, copies, keep, alike
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

        Tensors of the model and the optimizer that are alike on all ranks, to the bit, are saved once, and so is what
        DDP averages. Those that are not are each rank's own, and only as many ranks can go on from them.

        Returns when a copy has been taken. Raises, on all ranks, what went wrong with the saving before or with
        taking the copy, on any of them; nothing is saved then."""
        trouble: BaseException | None = None
        word = _Word()
        try:
            self.wait()
            state = State.of(step, self._model, self._optimizer, also=self._also, plain=plain, group=self._group)
            again = 1 + max((part.again for part in parts_in(self._folder, step)[0]), default=-1)
            word = _Word(_Saving(secrets.token_hex(16), again), state.marks(self._alike))
        except Exception as error:
            trouble = error
        words = self._told(word, trouble)
        try:
            taken = state.copied([word.marks for word in words])
        except Exception as error:
            trouble = error
        self._told(_Word(), trouble)
        saving = words[0].saving._replace(again=max(word.saving.again for word in words))
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

    def _told(self, word: _Word, trouble: BaseException | None) -> list[_Word]:
        """What each rank says. Raises on all of them if one has trouble."""
        said = "" if trouble is None else str(trouble) or repr(trouble)
        ours = msgspec.msgpack.encode(msgspec.structs.replace(word, trouble=said))
        words = [msgspec.msgpack.decode(each, type=_Word) for each in gathered(ours, self._group)]
        troubles = [f"rank {rank}: {word.trouble}" for rank, word in enumerate(words) if word.trouble]
        if troubles:
            self._step = None
            raise CheckpointError("; ".join(troubles)) from trouble
        return words

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

    number: str = ""
    again: int = 0


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says before a saving, and when its copy is taken."""

    saving: _Saving = _Saving()
    marks: Marks = {}
    trouble: str = ""
