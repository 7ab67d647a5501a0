"""What the benchmarks' commands have in common: which cases, and a file for their rows."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import typer


def chosen(only: str, known: Collection[str]) -> list[str]:
    """The names in a list with commas, if all are known."""
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint="--only")
    return names


def check_json(file: str | None) -> None:
    """Refuse, before anything is measured, a file that could not be written afterwards."""
    if file and not Path(file).absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {file} does not exist", param_hint="--json")


def make_folder(out: Path) -> None:
    """The folder for what is drawn, before anything is measured."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{out}: {error.strerror}", param_hint="--out") from None


def write_json(file: str | None, rows: Sequence[Any]) -> None:
    """One row for each case, if a file was asked for."""
    if file:
        Path(file).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
