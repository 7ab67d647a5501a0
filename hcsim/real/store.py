"""A host's records, as files in a folder, or in memory where it has none."""

from __future__ import annotations

from pathlib import Path

from hcsim.errors import ConfigError
from hcsim.files import write_whole


class FileStore:
    """Each record is a file, replaced in one move once its bytes are on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

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
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(path, data)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


class MemoryStore:
    """For a host that need not outlive its process."""

    def __init__(self) -> None:
        self._records: dict[str, bytes] = {}

    def load(self, name: str) -> bytes | None:
        """See `runtime.store.Store.load`."""
        return self._records.get(name)

    def save(self, name: str, data: bytes) -> None:
        """See `runtime.store.Store.save`."""
        self._records[name] = data
