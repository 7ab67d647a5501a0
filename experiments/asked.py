"""What the benchmarks' commands have in common: how they start, which cases, and a file for their rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from hcsim.cli.errors import spell


def run(main: Callable[..., None]) -> None:
    """Start a command."""
    spell()
    typer.run(main)


def chosen(only: str, known: Collection[str]) -> list[str]:
    """The names in a list with commas, if all are known."""
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint="--only")
    return names


def check_json(file: str | None) -> None:
    """Refuse, before anything is measured, a file that could not be written afterwards; one that is there stays."""
    if file is None:
        return
    try:
        path = Path(file).resolve()
        there = path.exists()
        if there and not path.is_file() and not path.is_dir():
            return  # whoever reads a pipe would take its first writer for the only one
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise typer.BadParameter(f"{file!r} cannot be written: {error.strerror}", param_hint="--json") from None


def refuse(where: str, options: Mapping[str, object]) -> None:
    """Refuse those that were given, since they mean nothing there."""
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter(f"this means nothing {where}", param_hint=name)


def make_folder(out: Path) -> None:
    """The folder for what is drawn, before anything is measured."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{out}: {error.strerror}", param_hint="--out") from None


def write_json(file: str | None, rows: Sequence[Any]) -> None:
    """One row for each case, if a file was asked for."""
    if file is None:
        return
    try:
        Path(file).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        typer.echo(f"{file} cannot be written: {error.strerror}", err=True)
        raise typer.Exit(1) from None


def hand_over(file: str | None, rows: Sequence[Any], show: Callable[[], None]) -> None:
    """To whoever is watching, and to the file, if one was asked for: what befalls the one does not cost the other."""
    try:
        show()
    finally:
        write_json(file, rows)  # last: it may be the same file that is shown to
