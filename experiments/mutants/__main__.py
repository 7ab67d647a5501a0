"""Planted bugs: does the search of `hcsim fuzz` find them, and how small is what it makes of them?

    python -m experiments.mutants                          all of tests/mutants/
    python -m experiments.mutants --only wall-clock        one of them
    python -m experiments.mutants --workers 16 --out DIR   and the shrunk scenarios as files

Each mutant is a patch (see `patches`). It is applied to a copy of the source tree, and the search runs seeds there,
from --first on, until one breaks an invariant. The unpatched tree runs the same seeds, and a seed that breaks something
there is no evidence. What the seed stands for is then shrunk to the smallest scenario that breaks the same invariant.
A mutant that --seeds seeds do not show has escaped: the exit status is then 1, as it is where the unpatched tree breaks
an invariant. What was found out is kept in a file, so that a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from experiments import asked
from experiments.mutants.chase import UNPATCHED, Chase
from experiments.mutants.ledger import Known, Ledger
from experiments.mutants.patches import Patch, load_all
from experiments.mutants.runner import Runner
from experiments.mutants.tree import root
from hcsim.errors import HcsimError
from hcsim.fuzz.shrink import MOST_RUNS

console = Console(soft_wrap=True)
RECORD = Path(".cells/mutants.jsonl")


class Row(msgspec.Struct, frozen=True):
    """What came of one mutant."""

    name: str
    breaks: str
    """The kind of invariant that should break."""
    seed: int | None
    """The first that shows it; None: it escaped."""
    seeds: int
    """How many that took."""
    invariant: str = ""
    what: str = ""
    faults: int | None = None
    """Of the shrunk scenario."""
    nodes: int | None = None
    steps: int | None = None
    also_unpatched: tuple[str, ...] = ()
    """Invariants that the shrunk scenario breaks in the unpatched tree."""
    cpu_s: float = 0.0


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds a mutant may take.")] = 500,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 1,
    only: Annotated[str | None, typer.Option(help="Only these, with commas.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; left out, one for each core.")] = None,
    shrink: Annotated[
        int, typer.Option(min=0, help="How many runs the shrinking of one may take; 0: none.")
    ] = MOST_RUNS,
    out: Annotated[Path | None, typer.Option(help="A folder for the shrunk scenarios.")] = None,
    json: Annotated[str | None, typer.Option(help="Write one row for each mutant to this file.")] = None,
    record: Annotated[Path, typer.Option(help="Where what was found out is kept.")] = RECORD,
) -> None:
    """Hold the search to planted bugs."""
    asked.check_json(json)
    if out is not None:
        asked.make_folder(out)
    try:
        raise typer.Exit(
            _hunt(range(first, first + seeds), only, workers or os.cpu_count() or 1, shrink, out, json, record)
        )
    except HcsimError as error:
        console.print(str(error), markup=False, highlight=False, style="red")
        raise typer.Exit(2) from None


def _hunt(
    seeds: range, only: str | None, workers: int, shrink: int, out: Path | None, json: str | None, record: Path
) -> int:
    patches = load_all(root() / "tests" / "mutants")
    names = asked.chosen(only, patches) if only is not None else list(patches)
    ledger = Ledger(record)
    rows: list[Row] = []
    with TemporaryDirectory(prefix="mutants-") as folder:
        runner = Runner(Path(folder), {name: patches[name] for name in names}, ledger, shrink)
        unpatched = runner.known(UNPATCHED)
        chases = [Chase(name, runner.known(name), unpatched, seeds, shrinks=shrink > 0) for name in names]
        try:
            for chase in runner.run(chases, seeds.start, workers):
                console.print(_line(_row(patches[chase.name], chase)), markup=False, highlight=False)
        except KeyboardInterrupt:
            console.print(f"interrupted: the same command goes on from {record}", markup=False, highlight=False)
            return 130
    rows = [_row(patches[chase.name], chase) for chase in chases]
    asked.hand_over(json, [msgspec.to_builtins(row) for row in rows], lambda: _report(rows, unpatched))
    if out is not None:
        for chase in chases:
            if (shrunk := chase.shrunk) is not None:
                (out / f"{chase.name}.toml").write_text(shrunk.scenario, encoding="utf-8")
    clean = all(seed in unpatched.clean for seed in range(seeds.start, seeds.start + max(row.seeds for row in rows)))
    return 0 if clean and all(row.seed is not None for row in rows) else 1


def _row(patch: Patch, chase: Chase) -> Row:
    found, shrunk = chase.found, chase.shrunk
    if found is None:
        return Row(patch.name, patch.breaks, None, chase.tried, cpu_s=round(chase.known.cpu_s, 1))
    return Row(
        patch.name, patch.breaks, found.seed, chase.tried,
        shrunk.invariant if shrunk is not None else found.invariants[0],
        shrunk.what if shrunk is not None else found.what,
        shrunk.faults if shrunk is not None else None,
        shrunk.nodes if shrunk is not None else None,
        shrunk.steps if shrunk is not None else None,
        shrunk.also_unpatched if shrunk is not None else (),
        round(chase.known.cpu_s, 1),
    )  # fmt: skip


def _line(row: Row) -> str:
    if row.seed is None:
        return f"{row.name}: escaped {row.seeds} seeds"
    text = f"{row.name}: seed {row.seed}, {row.invariant}: {row.what}"
    if row.faults is not None:
        text += f"\n  shrunk to {row.faults} faults, {row.nodes} nodes, {row.steps} steps"
    if row.also_unpatched:
        text += f"\n  THE UNPATCHED TREE BREAKS {', '.join(row.also_unpatched)} IN THE SHRUNK SCENARIO"
    return text


def _report(rows: list[Row], unpatched: Known) -> None:
    table = Table("mutant", "should break", "seeds", "invariant", "faults", "nodes", "steps", box=None, pad_edge=False)
    for row in rows:
        took = f"escaped {row.seeds}" if row.seed is None else str(row.seeds)
        table.add_row(row.name, row.breaks, took, row.invariant, *map(_cell, (row.faults, row.nodes, row.steps)))
    console.print(table)
    found = [row for row in rows if row.seed is not None]
    shrunk = [row for row in found if row.faults is not None]
    text = f"found {len(found)} of {len(rows)}"
    if shrunk:
        faults, nodes = (median(_figures(shrunk, name)) for name in ("faults", "nodes"))
        text += f", in the median shrunk to {faults:g} faults and {nodes:g} nodes"
    console.print(text)
    broken = sorted(unpatched.broken)
    console.print(f"the unpatched tree: {len(unpatched.clean)} seeds clean, {len(broken)} not {broken or ''}".rstrip())


def _figures(rows: list[Row], name: str) -> Iterator[int]:
    return (getattr(row, name) for row in rows)


def _cell(figure: int | None) -> str:
    return "" if figure is None else str(figure)


if __name__ == "__main__":
    asked.run(main)
