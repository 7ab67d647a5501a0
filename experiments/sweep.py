"""Sweeps: what pays on which cluster, simulated.

    python -m experiments.sweep                    every study that is shipped: tables and figures in results/
    python -m experiments.sweep --quick            the same, coarser, in a few minutes, in results/quick/
    python -m experiments.sweep crossover          one study (see experiments/sweeps/), in results/crossover/
    python -m experiments.sweep mine.toml --out D  a file of one's own

Cells run in parallel processes. Each finished one is kept in OUT/.cells, so a sweep can be interrupted and goes
on where it was; a cell is run again only when it failed, or when the code has changed.

Written are `cells` and `curves` (CSV and Parquet), a figure with its own CSV for each study that has one, and
`manifest.json`. Times are virtual, so the same commit writes the same tables on every run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from experiments.study.cell import AnyCell, Result
from experiments.study.grid import Asked, load_sweep, shipped_sweeps
from experiments.study.progress import Bar
from experiments.study.runner import run_cells
from experiments.study.store import Store
from hcsim.cli import INTERRUPTED
from hcsim.errors import ConfigError


class Outcome(NamedTuple):
    """Of a sweep: how many cells failed, and the studies whose figures were drawn."""

    failed: int
    drawn: list[str]


def sweep(asked: list[Asked], out: Path, jobs: int, command: list[str], console: Console) -> Outcome:
    """Run what is not yet finished and write everything."""
    store = Store(out / ".cells")
    cells = list(dict.fromkeys(cell for _, cell in asked))
    results = {cell: entry.result for cell in cells if (entry := store.get(cell))}
    todo = [cell for cell in cells if cell not in results]
    if len(results):
        console.print(f"{len(results)} of {len(cells)} cells are finished already", highlight=False)

    with Bar(todo, jobs, console) as bar:

        def finished(cell: AnyCell, result: Result, cost_s: float) -> None:
            store.put(cell, result, cost_s)
            results[cell] = result
            bar.finished(cell, result, cost_s)

        run_cells(todo, jobs, finished)
    problems = write(asked, results, out, command)
    for study, problem in problems.items():
        if problem:
            console.print(f"no figure of {study}: its rows are not what that figure shows ({problem})", highlight=False)
    return Outcome(bar.failed, [study for study, problem in problems.items() if not problem])


def write(asked: list[Asked], results: dict[AnyCell, Result], out: Path, command: list[str]) -> dict[str, str]:
    """Tables, manifest and figures; by study, why its figure could not be drawn, or nothing."""
    # pandas and matplotlib are slow to load, and the processes that run cells load this module too.
    from experiments.figures import draw
    from experiments.study.manifest import manifest
    from experiments.study.tables import cell_table, curve_table, write_table

    cells, curves = cell_table(asked, results), curve_table(asked, results)
    write_table(cells, out / "cells")
    write_table(curves, out / "curves")
    text = json.dumps(manifest(cells, command), indent=1, ensure_ascii=False)
    (out / "manifest.json").write_text(text + "\n", encoding="utf-8")
    return draw(cells, curves, out)


def main(
    what: Annotated[
        str | None, typer.Argument(help="A sweep file, or a shipped sweep; left out, all of those.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Each grid's quick table: fewer points.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Where tables and figures go; left out: results/, results/NAME, results/quick for --quick."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, max=512, help="Processes; left out, one for each core.")] = None,
) -> None:
    """Run a sweep of simulated runs; write tables, a manifest and figures."""
    console = Console(stderr=True)
    folder = out or Path("results", *(["quick"] if quick else []), *([Path(what).stem] if what else []))
    try:
        asked = [one for name in ([what] if what else shipped_sweeps()) for one in load_sweep(name, quick=quick)]
        folder.mkdir(parents=True, exist_ok=True)
    except ConfigError as error:
        console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except OSError as error:
        raise typer.BadParameter(f"{folder}: {error.strerror}", param_hint="--out") from None
    command = [*([what] if what else []), *(["--quick"] if quick else [])]
    try:
        failed, drawn = sweep(asked, folder, jobs or os.cpu_count() or 1, command, console)
    except KeyboardInterrupt:
        console.print("interrupted: finished cells are kept, and the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    figures = f", with figures of {', '.join(drawn)}" if drawn else ""
    typer.echo(f"{len(asked)} rows in {folder / 'cells.csv'}{figures}")
    if failed:
        console.print(f"cells that failed: {failed}; see the column error; the same command tries them again")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
