"""Sweeps: what pays on which cluster, simulated.

    python -m experiments.sweep                    every study that is shipped: tables and figures in results/
    python -m experiments.sweep --quick            the same, coarser, in a few minutes, in results/quick/
    python -m experiments.sweep crossover          one study (see experiments/sweeps/), in results/crossover/
    python -m experiments.sweep mine.toml --out D  a file of one's own
    python -m experiments.sweep --dask ssh:a,b     on other machines (see docs/howto/sweep.md)

`hcsim sweep` is the same where hcsim is installed. Outside of a checkout of the project --out has to be given.

Cells run in parallel processes. Each finished one is kept in OUT/.cells, so a sweep can be interrupted and goes
on where it was; a cell is run again only when it failed, or when the code or a library has changed.

Written are `cells` and `curves` (CSV and Parquet), a figure with its own CSV for each study that has one, and
`manifest.json`. Times are virtual, so the same commit writes the same tables on every run.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from experiments.asked import run
from experiments.study.cell import AnyCell, Result
from experiments.study.grid import Asked, load_sweep, shipped_sweeps
from experiments.study.progress import Bar
from experiments.study.runner import run_cells
from experiments.study.store import Store
from hcsim.cli.errors import INTERRUPTED
from hcsim.errors import ConfigError, HcsimError
from hcsim.files import write_whole
from hcsim.pool import Pool
from hcsim.pool.open import open_pool
from hcsim.registry import load_plugin
from hcsim.report.page import check_place

_OF_A_CHECKOUT = ("pyproject.toml", "hcsim/__init__.py", "experiments/sweep.py")
TERMINATED = 143
"""The exit status that shells give it."""


class Outcome(NamedTuple):
    """Of a sweep: how many cells failed, and the studies whose figures were drawn."""

    failed: int
    drawn: list[str]


class Output(NamedTuple):
    """Where a sweep writes."""

    folder: Path
    report: Path | None = None


def sweep(asked: list[Asked], output: Output, pool: Pool, command: list[str], console: Console) -> Outcome:
    """Run what is not yet finished in this pool, and write everything."""
    out = output.folder
    store = Store(out / ".cells")
    cells = list(dict.fromkeys(cell for _, cell in asked))
    results = {cell: entry.result for cell in cells if (entry := store.get(cell))}
    todo = [cell for cell in cells if cell not in results]
    if len(results):
        console.print(f"{len(results)} of {len(cells)} cells are finished already", highlight=False)

    with Bar(todo, pool.size, console) as bar:

        def finished(cell: AnyCell, result: Result, cost_s: float) -> None:
            store.put(cell, result, cost_s)
            results[cell] = result
            bar.finished(cell, result, cost_s)

        run_cells(todo, pool, finished)
    problems = write(asked, results, output, command)
    for study, problem in problems.items():
        if problem:
            words = f"no figure of {study}: its rows are not what that figure shows ({problem})"
            console.print(words, markup=False, highlight=False, soft_wrap=True)
    return Outcome(bar.failed, [study for study, problem in problems.items() if not problem])


def write(asked: list[Asked], results: dict[AnyCell, Result], output: Output, command: list[str]) -> dict[str, str]:
    """Tables, manifest, figures and report; by study, why its figure could not be drawn, or nothing."""
    out = output.folder
    # pandas and matplotlib are slow to load, and the processes that run cells load this module too.
    from experiments.figures import draw
    from experiments.study.manifest import manifest
    from experiments.study.tables import cell_table, curve_table, write_table

    cells, curves = cell_table(asked, results), curve_table(asked, results)
    write_table(cells, out / "cells")
    write_table(curves, out / "curves")
    about = manifest(cells, command)
    text = json.dumps(about, indent=1, ensure_ascii=False)
    write_whole(out / "manifest.json", f"{text}\n".encode())
    problems = draw(cells, curves, out)
    if output.report is not None:
        from experiments.figures.report import write_report

        write_report(output.report, cells, out, about, problems)
    return problems


def results_folder(what: str | None, quick: bool) -> Path:
    """Where results go that nobody has said a place for, which is in a checkout of the project only; a sweep of one's
    own does not take a shipped one's."""
    folder = _usual_folder(what, quick)
    if not all(Path(file).is_file() for file in _OF_A_CHECKOUT):
        raise ConfigError(
            f"--out FOLDER is needed: only in a checkout of hcsim do results go to {folder} by themselves"
        )
    return folder


def _usual_folder(what: str | None, quick: bool) -> Path:
    parts = ["results", *(["quick"] if quick else [])]
    if what is None:
        return Path(*parts)
    name, shipped = Path(what).stem, shipped_sweeps()
    folder = Path(*parts, name)
    known = name.casefold()  # some file systems do not tell case apart
    ours = what in shipped or (known in shipped and shipped[known].samefile(what))
    if not ours and (known in shipped or (known == "quick" and not quick)):
        raise ConfigError(
            f"{what}: {folder} is for what is shipped; give the results of your own another place by --out"
        )
    return folder


@contextmanager
def _terminated_as_interrupted() -> Iterator[list[int]]:
    """SIGTERM takes the way of Ctrl-C, on which workers are ended; yields a list that has it once it has come.

    By raising SIGINT: whoever holds that back while workers are started (`starting`) then holds back this too."""
    came: list[int] = []
    interrupt = signal.getsignal(signal.SIGINT)

    def interrupted(number: int, frame: FrameType | None) -> None:
        if came:  # also where Ctrl-C is ignored, as it is in a shell's background
            raise KeyboardInterrupt
        if callable(interrupt):
            interrupt(number, frame)

    def terminated(number: int, _: FrameType | None) -> None:
        if not came:  # a second one must not stop the ending of workers
            came.append(number)
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, before)


def main(
    what: Annotated[
        str | None, typer.Argument(metavar="[SWEEP]", help="A sweep file, or a shipped sweep; left out, all of those.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Each grid's quick table: fewer points.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Where tables and figures go; in a checkout of hcsim, left out: results/, results/NAME, …"),
    ] = None,
    plugin: Annotated[
        list[str] | None, typer.Option(help="A plugin to load, a module or a file; may be given several times.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a page with the figures, their numbers and the commands, as HTML.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, max=512, help="Processes; left out, one for each core.")] = None,
    dask: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on a Dask cluster: tcp://host:8786, or ssh:host,host to start one."),
    ] = None,
) -> None:
    """Run a sweep of simulated runs; write tables, a manifest and figures."""
    console = Console(stderr=True)

    def complain(problem: str) -> None:
        console.print(f"error: {problem}", markup=False, highlight=False, soft_wrap=True)

    if jobs is not None and dask is not None:
        raise typer.BadParameter("the workers of a Dask cluster know how many processes they have", param_hint="--jobs")
    if what == "":
        raise typer.BadParameter(f"a name is needed: a file, or one of {', '.join(shipped_sweeps())}")
    names = shipped_sweeps() if what is None else [what]
    try:
        for each in plugin or ():
            load_plugin(each)
        asked = [one for name in names for one in load_sweep(name, quick=quick)]
        folder = out or results_folder(what, quick)
        check_place(report)
    except ConfigError as error:
        complain(str(error))
        raise typer.Exit(2) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{folder}: {error.strerror}", param_hint="--out") from None
    command = [
        *([what] if what else []),
        *(["--quick"] if quick else []),
        *(f"--plugin {each}" for each in plugin or ()),
    ]
    with _terminated_as_interrupted() as terminated:
        try:
            with closing(open_pool(jobs or os.cpu_count() or 1, dask)) as pool:
                failed, drawn = sweep(asked, Output(folder, report), pool, command, console)
        except ConfigError as error:
            complain(str(error))
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            console.print("interrupted: finished cells are kept, and the same command goes on from there")
            raise typer.Exit(TERMINATED if terminated else INTERRUPTED) from None
        except HcsimError as error:
            complain(str(error))
            raise typer.Exit(1) from None
        except OSError as error:  # of a full disk there is no name
            complain(f"{error.filename or folder}: {error.strerror or error}")
            raise typer.Exit(1) from None
    figures = f", with figures of {', '.join(drawn)}" if drawn else ""
    typer.echo(f"{len(asked)} rows in {folder / 'cells.csv'}{figures}{f', report in {report}' if report else ''}")
    if failed:
        console.print(f"cells that failed: {failed}; see the column error; the same command tries them again")
        raise typer.Exit(1)


if __name__ == "__main__":
    run(main)
