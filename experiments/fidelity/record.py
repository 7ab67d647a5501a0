"""What was measured, in a file that grows by a line for each cell, so that an interrupted run goes on where it was."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec

from experiments.fidelity.worlds import Timing
from hcsim.errors import ConfigError

_FIELDS = ("cell", *Timing.__struct_fields__)


class Record:
    """A CSV file of measured cells, by their names."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.timings: dict[str, Timing] = {}
        if file.exists():
            with file.open(encoding="utf-8", newline="") as lines:
                for row in csv.DictReader(lines):
                    self.timings[row.pop("cell")] = self._read(row)

    def _read(self, row: dict[str, str]) -> Timing:
        try:
            return msgspec.convert(row, Timing, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self._file}: {error}; remove it to start afresh") from None

    def add(self, name: str, timing: Timing) -> None:
        """Write a line."""
        self.timings[name] = timing
        is_new = not self._file.exists()
        with self._file.open("a", encoding="utf-8", newline="") as lines:
            writer = csv.writer(lines, lineterminator="\n")
            if is_new:
                writer.writerow(_FIELDS)
            seconds = (f"{value:.9g}" for value in (timing.median_s, timing.p10_s, timing.p90_s))
            writer.writerow((name, *seconds, timing.repeats, timing.algorithm, timing.sha256))
