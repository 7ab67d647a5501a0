"""What is left when everybody is gone: a member's state on its disk, whole and verified.

The first member of a view saves now and then, and everybody who leaves before the end. After all have started anew,
training goes on from the newest state that one of them holds: a checkpoint says of which era and step it is, and
members compare those when a view begins. What the saver's error feedback owed is in it, unless others owe it now.
What those owed who did not save is lost with them.

The file is safetensors: everything that reads those finds the parameters under "parameters".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from hcsim.errors import ConfigError, HcsimError
from hcsim.runtime.channel import Phantom
from hcsim.runtime.device import Work
from hcsim.runtime.host import Host
from hcsim.runtime.store import Store
from hcsim.training.elastic.parcel import Parcel

_FORMAT = "hcsim checkpoint 1"


class Vault(Protocol):
    """Where one checkpoint is kept."""

    def save(self, data: bytes) -> None:
        """Replace it: all or nothing."""

    def load(self) -> bytes | None:
        """As it was last saved; None where there is none."""

    def __str__(self) -> str:
        """Where a person finds it."""


class InStore:
    """In a host's store."""

    def __init__(self, store: Store, name: str = "checkpoint") -> None:
        self._store = store
        self._name = name

    def __str__(self) -> str:
        return self._store.where(self._name)

    def save(self, data: bytes) -> None:
        """See `Vault.save`."""
        self._store.save(self._name, data)

    def load(self) -> bytes | None:
        """See `Vault.load`."""
        return self._store.load(self._name)


class Checkpoints(msgspec.Struct, frozen=True):
    """When to save, and where."""

    every: int
    """Steps."""
    vault: Vault
    tell: Callable[[str], None] = lambda what: None
    """Hears what became of the state of a member that left before the end."""

    def after(self, step: int) -> int:
        """The next step to save after."""
        return step - step % self.every + self.every

    async def save(self, host: Host, state: Parcel) -> None:
        """Save a state, in the host's time."""
        work = Work(0.0, 3.0 * sum(array.nbytes for array in state.arrays.values()))
        await host.device.run(work, lambda: self.vault.save(encode(state)))

    async def save_last(self, host: Host, state: Parcel, step: int) -> None:
        """Save the state of a member that leaves, after that step. A full disk does not keep it from leaving."""
        try:
            await self.save(host, state)
        except HcsimError as error:
            self.tell(f"what was trained until step {step} could not be saved: {error}")
        else:
            self.tell(f"saved after step {step}: {self.vault}")


def encode(parcel: Parcel) -> bytes:
    """A state as a file."""
    arrays = _arrays(parcel)
    metadata = {"format": _FORMAT, "about": parcel.about.hex(), "sha256": _digest(parcel.about, arrays)}
    return safetensors.numpy.save(arrays, metadata)


def load(vault: Vault) -> Parcel | None:
    """The state that was saved there, if there is one; refuses what is not that."""
    data = vault.load()
    if data is None:
        return None
    try:
        return decode(data)
    except ConfigError as error:
        raise ConfigError(f"{vault}: {error}") from None


def decode(data: bytes) -> Parcel:
    """A state that was saved; refuses what is not that."""
    try:
        header = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = header["__metadata__"]
        arrays: dict[str, npt.NDArray[np.generic]] = safetensors.numpy.load(data)
        parcel = Parcel(bytes.fromhex(about["about"]), arrays)
    except (safetensors.SafetensorError, msgspec.DecodeError, KeyError, ValueError) as error:
        raise ConfigError(f"this checkpoint is damaged ({error}): put another in its place, or remove it") from None
    if about.get("format") != _FORMAT or about.get("sha256") != _digest(parcel.about, arrays):
        raise ConfigError("this checkpoint is not what was saved (its SHA-256 differs): remove it")
    return parcel


def _arrays(parcel: Parcel) -> dict[str, npt.NDArray[np.generic]]:
    if any(isinstance(array, Phantom) for array in parcel.arrays.values()):
        raise ConfigError("a task of shapes alone has nothing to save: train it without checkpoints")
    return {name: np.ascontiguousarray(array) for name, array in parcel.arrays.items()}


def _digest(about: bytes, arrays: Mapping[str, npt.NDArray[np.generic]]) -> str:
    sha = hashlib.sha256(about)
    for name in sorted(arrays):
        sha.update(name.encode())
        sha.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return sha.hexdigest()
