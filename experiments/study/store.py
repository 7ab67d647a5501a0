"""Finished cells, one file each, so that a sweep can be interrupted at any moment and never runs a cell twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from experiments.study.cell import AnyCell, Result
from hcsim.files import write_whole


class Entry(msgspec.Struct, frozen=True):
    """One file: the cell, what it came to, and what it cost to find out."""

    cell: AnyCell
    result: Result
    cost_s: float


class Store:
    """A folder of finished cells; `entries` is what is in a file."""

    def __init__(self, folder: Path, entries: type[Any] = Entry) -> None:
        self._folder = folder
        self._entries = entries
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, cell: Any) -> Any:
        """The cell, if it is finished; one that failed is not, and is to be tried again. So is one in whose file
        another cell lies, as after a copy under the wrong name."""
        try:
            entry = msgspec.json.decode(self._file(cell).read_bytes(), type=self._entries)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return entry if entry.cell == cell and entry.result.error is None else None

    def put(self, cell: Any, result: Any, cost_s: float) -> None:
        """Keep it. The file is there with all of its bytes, or not at all."""
        write_whole(self._file(cell), msgspec.json.encode(self._entries(cell, result, cost_s)))

    def _file(self, cell: Any) -> Path:
        return self._folder / f"{cell.key}.json"
