"""A host's records, as files in a folder, or in memory where it has none."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from hcsim.errors import ConfigError
from hcsim.files import write_whole

_LOCK = "in_use"


class FileStore:
    """Each record is a file, replaced in one move once its bytes are on the disk. The folder is one process's alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
        try:
            # Ends with this process, however it ends; a child that was forked does not have it.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"{folder}: another process keeps its state there: end it, or give this one a folder of its own"
            ) from None

    def close(self) -> None:
        """Others may have the folder. Closing twice is harmless."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def where(self, name: str) -> str:
        """The file's path."""
        return str(self._folder / name)

    def load(self, name: str) -> bytes | None:
        """See `runtime.store.Store.load`."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{self._folder / name}: cannot be read: {error.strerror}") from None

    def save(self, name: str, data: bytes) -> None:
        """See `runtime.store.Store.save`."""
        path = self._folder / name
        try:
            write_whole(path, data)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


class MemoryStore:
    """For a host that need not outlive its process."""

    def __init__(self) -> None:
        self._records: dict[str, bytes] = {}

    def where(self, name: str) -> str:
        """Nobody finds it but this process."""
        return f"{name}, in memory"

    def load(self, name: str) -> bytes | None:
        """See `runtime.store.Store.load`."""
        return self._records.get(name)

    def save(self, name: str, data: bytes) -> None:
        """See `runtime.store.Store.save`."""
        self._records[name] = data

    def close(self) -> None:
        """Nothing to do."""
