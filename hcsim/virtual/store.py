"""A disk of the virtual world."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class VirtualStore:
    """A host's disk, in one of the host's lives."""

    def __init__(self, records: Mapping[str, bytes], before: VirtualStore | None = None) -> None:
        self.records = dict(records)
        self._at_start = dict(records)
        self._copies: dict[float, dict[str, bytes]] = before._copies if before is not None else {}
        self.before_saving: list[Callable[[str], None]] = before.before_saving if before is not None else []
        """Called with the name of each record that is to be saved; what one raises is what saving comes to."""

    def where(self, name: str) -> str:
        """Nobody finds it but whoever has the world."""
        return f"{name}, on a virtual disk"

    def load(self, name: str) -> bytes | None:
        """See `runtime.store.Store.load`."""
        return self.records.get(name)

    def save(self, name: str, data: bytes) -> None:
        """See `runtime.store.Store.save`."""
        for act in self.before_saving:
            act(name)
        self.records[name] = data

    def keep_copy(self, as_of_s: float) -> None:
        """Keep what is there now, for a life that will find an old state."""
        self._copies[as_of_s] = dict(self.records)

    def copy_of(self, as_of_s: float | None) -> dict[str, bytes]:
        """What was there at that time, or at the start of this life."""
        return self._at_start if as_of_s is None else self._copies[as_of_s]
