"""Checkpoints: a member's state on its disk, complete and verified.

The first member of a view saves periodically, and every member that leaves before the end saves. After a
restart of all members, training goes on from the newest checkpoint that one of them holds: a checkpoint names
its trained view and step, and members compare those when a view begins. It contains the saver's error-feedback
residual, unless another member has it by then. The residuals of members that did not save are lost.

A member keeps the last few checkpoints, each in a record of its own. They are numbered, and a new one replaces
the oldest, so the others stay intact. The newest undamaged one is loaded. If a checkpoint cannot be written (a
full disk), training goes on and the next one is tried when it is due.

The file is safetensors, with the parameters under "parameters". Its metadata name the task, and its SHA-256
covers them and every array with its name, type and shape. Checkpoints of format 1, whose digest covered less,
are rejected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from hcsim.errors import UNDECODABLE, ConfigError, HcsimError, UsageError
from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import Host, Store, Work
from hcsim.training.elastic.transfer import StateArrays

MOST_KEPT = 16
"""The number of records searched when a checkpoint is loaded, even if fewer are kept now."""
ANOTHER_FOLDER = "give another folder (--state), or remove it"
_FORMAT = "hcsim checkpoint 2"
_EARLIER = "hcsim checkpoint 1"


class CheckpointStorage(Protocol):
    """A place for one checkpoint."""

    def save(self, data: bytes) -> None:
        """Replace the checkpoint, atomically."""

    def load(self) -> bytes | None:
        """Return the checkpoint as it was last saved, or None."""

    def __str__(self) -> str:
        """Return the place as shown to the user."""


class HostStorage:
    """A vault in a host's store."""

    def __init__(self, store: Store, name: str = "checkpoint") -> None:
        self._store = store
        self._name = name

    def __str__(self) -> str:
        return self._store.where(self._name)

    def save(self, data: bytes) -> None:
        self._store.save(self._name, data)

    def load(self) -> bytes | None:
        return self._store.load(self._name)


def in_store(store: Store, name: str = "checkpoint") -> tuple[HostStorage, ...]:
    """Return vaults for as many checkpoints as may be kept."""
    return tuple(HostStorage(store, f"{name}.{number}" if number else name) for number in range(MOST_KEPT))


class CheckpointOrigin(msgspec.Struct, frozen=True):
    """The task that a checkpoint belongs to."""

    task: str = ""
    fingerprint: str = ""
    """The fingerprint of the task's data and shapes."""


class CheckpointWriter:
    """When and where to save."""

    def __init__(
        self,
        every: int,
        vaults: Sequence[CheckpointStorage],
        tell: Callable[[str], None] = lambda what: None,
        *,
        keep: int = 1,
        origin: CheckpointOrigin | None = None,
    ) -> None:
        """Save every `every` steps, and keep the last few. `tell` is called with messages for the user."""
        self.every = every
        self._vaults = tuple(vaults)
        self._tell = tell
        self._keep = min(keep, len(self._vaults))
        self._origin = origin or CheckpointOrigin()
        self._numbers = [0] * len(self._vaults)
        """The number of the checkpoint in each vault; 0 if there is none or it is damaged."""
        self._failed = False

    def after(self, step: int) -> int:
        """Return the next step to save after."""
        return step - step % self.every + self.every

    def load(self) -> StateArrays | None:
        """Return the newest saved state, if there is one; reject other data, and states of another task.

        If the newest is damaged, the one before it is used, and the user is told."""
        damaged: list[str] = []
        newest: tuple[CheckpointStorage, LoadedCheckpoint] | None = None
        for place, vault in enumerate(self._vaults):
            if (data := vault.load()) is None:
                continue
            try:
                loaded = decode(data)
            except ConfigError as error:
                damaged.append(f"{vault}: {error}")
                continue
            self._numbers[place] = loaded.number
            if newest is None or loaded.number > newest[1].number:
                newest = vault, loaded
        if newest is None:
            if damaged:
                raise ConfigError(damaged[0])
            return None
        vault, loaded = newest
        if loaded.origin != self._origin:
            raise ConfigError(f"{vault}: {_unlike(loaded.origin, self._origin)}")
        for text in damaged:
            self._tell(f"{text}; going on from {vault}")
        return loaded.snapshot

    async def save(self, host: Host, state: StateArrays, step: int) -> None:
        """Save the state after that step, in the host's time. If it cannot be written, training goes on."""
        error = await self._save(host, state)
        if error and not self._failed:
            self._tell(f"the checkpoint after step {step} could not be saved ({error}); training goes on, and the next "
                       "one is tried when it is due")  # fmt: skip
        elif not error and self._failed:
            self._tell(f"checkpoints are saved again, as of step {step}")
        self._failed = bool(error)

    async def save_last(self, host: Host, state: StateArrays, step: int) -> None:
        """Save the state of a member that leaves after that step. A full disk does not keep it from leaving."""
        error = await self._save(host, state)
        if error:
            self._tell(f"what was trained until step {step} could not be saved: {error}")
        else:
            newest = self._vaults[self._numbers.index(max(self._numbers))]
            self._tell(f"saved after step {step}: {newest}")

    async def _save(self, host: Host, state: StateArrays) -> str:
        """Return why the state could not be saved; empty if it was saved."""
        number = max(self._numbers) + 1
        oldest = min(range(self._keep), key=self._numbers.__getitem__)

        def write() -> str:
            data = encode(state, self._origin, number)
            try:
                self._vaults[oldest].save(data)
            except HcsimError as error:
                return str(error)
            self._numbers[oldest] = number
            return ""

        work = Work(0.0, 3.0 * sum(array.nbytes for array in state.arrays.values()))
        return await host.device.run(work, write)


class LoadedCheckpoint(NamedTuple):
    """The content of a checkpoint file."""

    snapshot: StateArrays
    origin: CheckpointOrigin
    number: int


class _Metadata(msgspec.Struct, frozen=True):
    """The metadata of a checkpoint file."""

    format: str
    about: str = ""
    sha256: str = ""
    task: str = ""
    fingerprint: str = ""
    number: str = "0"

    @property
    def digested(self) -> bytes:
        return msgspec.msgpack.encode([self.format, self.about, self.task, self.fingerprint, self.number])


class _Header(msgspec.Struct, frozen=True):
    metadata: _Metadata = msgspec.field(name="__metadata__")


def encode(snapshot: StateArrays, origin: CheckpointOrigin | None = None, number: int = 1) -> bytes:
    arrays, of = _arrays(snapshot), origin or CheckpointOrigin()
    plain = _Metadata(_FORMAT, snapshot.about.hex(), "", of.task, of.fingerprint, str(number))
    metadata = msgspec.structs.replace(plain, sha256=_digest(plain, arrays))
    return safetensors.numpy.save(arrays, msgspec.structs.asdict(metadata))


def decode(data: bytes) -> LoadedCheckpoint:
    """Decode a saved state; reject other data."""
    try:
        header = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")], type=_Header)
        says = header.metadata
        if says.format == _EARLIER:
            raise ConfigError(f"an earlier version of hcsim saved this checkpoint ({_EARLIER}): {ANOTHER_FOLDER}")
        arrays: dict[str, npt.NDArray[np.generic]] = safetensors.numpy.load(data)
        snapshot = StateArrays(bytes.fromhex(says.about), arrays)
        number = int(says.number)
    except (
        safetensors.SafetensorError, msgspec.DecodeError, KeyError, ValueError, TypeError, OverflowError, RecursionError
    ) as error:  # fmt: skip
        raise ConfigError(f"this checkpoint is damaged ({error}): put another in its place, or remove it") from None
    if says.format != _FORMAT or says.sha256 != _digest(says, arrays) or not 0 < number < 1 << 63:
        raise ConfigError("this checkpoint is not what was saved (its SHA-256 differs): remove it")
    return LoadedCheckpoint(snapshot, CheckpointOrigin(says.task, says.fingerprint), number)


@contextmanager
def fitting() -> Iterator[None]:
    """Raise `ConfigError` if a checkpoint does not fit the settings."""
    try:
        yield
    except (UsageError, *UNDECODABLE) as error:
        raise ConfigError(f"the checkpoint was saved with other settings ({error}): {ANOTHER_FOLDER}") from None


def _unlike(found: CheckpointOrigin, ours: CheckpointOrigin) -> str:
    if found.task == ours.task:
        return f"this is a checkpoint of the task {ours.task} with other data or another model: {ANOTHER_FOLDER}"
    return f"this is a checkpoint of the task {found.task}, and the task here is {ours.task}: {ANOTHER_FOLDER}"


def _arrays(snapshot: StateArrays) -> dict[str, npt.NDArray[np.generic]]:
    if any(isinstance(array, Phantom) for array in snapshot.arrays.values()):
        raise ConfigError("a task of shapes alone has nothing to save: train it without checkpoints")
    return {name: np.ascontiguousarray(array) for name, array in snapshot.arrays.items()}


def _digest(says: _Metadata, arrays: Mapping[str, npt.NDArray[np.generic]]) -> str:
    sha = hashlib.sha256(says.digested)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        sha.update(msgspec.msgpack.encode([name, array.dtype.str, array.shape]))
        sha.update(array.reshape(-1).view(np.uint8).data)
    return sha.hexdigest()
