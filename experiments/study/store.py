"""Finished cells, one file each, so that a sweep can be interrupted at any moment and never runs a cell twice."""

from __future__ import annotations

from pathlib import Path

import msgspec

from experiments.study.cell import AnyCell, Result
from hcsim.files import write_whole


class Entry(msgspec.Struct, frozen=True):
    """One file: the cell, what it came to, and what it cost to find out."""

    cell: AnyCell
    result: Result
    cost_s: float


class Store:
    """A folder of finished cells."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, cell: AnyCell) -> Entry | None:
        """The cell, if it is finished; one that failed is not, and is to be tried again. So is one in whose file
        another cell lies, as after a copy under the wrong name."""
        try:
            entry = msgspec.json.decode(self._file(cell).read_bytes(), type=Entry)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return entry if entry.cell == cell and entry.result.error is None else None

    def put(self, cell: AnyCell, result: Result, cost_s: float) -> None:
        """Keep it. The file is there with all of its bytes, or not at all."""
        write_whole(self._file(cell), msgspec.json.encode(Entry(cell, result, cost_s)))

    def _file(self, cell: AnyCell) -> Path:
        return self._folder / f"{cell.key}.json"
