"""One figure per file. A figure is drawn from the tables alone, and has beside it a CSV of what it shows."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pandas as pd

from hcsim.errors import HcsimError

STUDIES = ("allreduce", "compression", "time_to_target", "crossover", "scaling", "stragglers", "failures")
"""Studies that have figures, each drawn by the module of its name."""

Draw = Callable[[pd.DataFrame, pd.DataFrame, Path], None]


def _distinct(rows: pd.DataFrame) -> pd.DataFrame:
    """Two grids may ask for the same cell."""
    return rows.drop_duplicates(ignore_index=True)


def draw(cells: pd.DataFrame, curves: pd.DataFrame, out: Path) -> dict[str, str]:
    """Draw the figures of all studies that the tables have rows of; by study, why it could not be drawn, or nothing.

    A sweep of one's own may bear a study's name and lack what its figure is made of. One that cannot be drawn, also for
    a mistake of ours, takes none of the others with it; a file that cannot be written is another matter."""
    drawn = {}
    for study in STUDIES:
        ours = cells[(cells["study"] == study) & cells["error"].isna()]
        if len(ours):
            module = import_module(f"experiments.figures.{study}")
            try:
                module.draw(*(_distinct(table) for table in (ours, curves[curves["study"] == study])), out)
                drawn[study] = ""
            except OSError:
                raise
            except (HcsimError, ValueError) as problem:
                drawn[study] = str(problem)
            except Exception as problem:
                drawn[study] = f"{type(problem).__name__}: {problem}"
    return drawn
