"""One figure per file. A figure is drawn from the tables alone, and has beside it a CSV of what it shows."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pandas as pd

from experiments.figures.style import SUFFIXES
from hcsim.errors import HcsimError

STUDIES = ("allreduce", "compression", "time_to_target", "crossover", "scaling", "stragglers", "failures")
"""Studies that have figures, each drawn by the module of its name; its `FILES` is a pattern of what they are called, if
they are not called like the study."""


def draw(cells: pd.DataFrame, curves: pd.DataFrame, out: Path) -> dict[str, str]:
    """Draw the figures of all studies that the tables have rows of; by study, why it could not be drawn, or nothing.

    A sweep of one's own may bear a study's name and lack what its figure is made of. One that cannot be drawn, also for
    a mistake of ours, takes none of the others with it; a file that cannot be written is another matter."""
    return {
        study: _draw(study, cells[cells["study"] == study], curves[curves["study"] == study], out)
        for study in STUDIES
        if (cells["study"] == study).any()
    }


def _draw(study: str, cells: pd.DataFrame, curves: pd.DataFrame, out: Path) -> str:
    module = import_module(f"experiments.figures.{study}")
    good = cells[cells["error"].isna()]
    files = files_of(study)
    _remove(files, out)
    try:
        if good.empty:
            raise ValueError("all of its cells failed")
        # Two grids may ask for the same cell.
        module.draw(good.drop_duplicates(ignore_index=True), curves.drop_duplicates(ignore_index=True), out)
        return ""
    except BaseException as error:
        _remove(files, out)
        if isinstance(error, OSError) or not isinstance(error, Exception):
            raise
        return str(error) if isinstance(error, HcsimError | ValueError) else f"{type(error).__name__}: {error}"


def files_of(study: str) -> str:
    """Return a pattern of what the figures of a study are called."""
    return str(getattr(import_module(f"experiments.figures.{study}"), "FILES", study))


def _remove(names: str, out: Path) -> None:
    """A figure of an earlier sweep would pass for one of this, and half of one for a whole."""
    for file in list(out.iterdir()):
        if file.suffix in SUFFIXES and re.fullmatch(names, file.stem):
            file.unlink()
