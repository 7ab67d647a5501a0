"""Figures whose pictures no test opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def svg_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn as SVG alone, and their PNG is empty: laying them out twice takes most of the time."""
    save = Figure.savefig

    def savefig(sheet: Figure, file: Path, **options: Any) -> None:
        if file.suffix == ".png":
            file.touch()
        else:
            save(sheet, file, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
