"""The lab: the same job in both worlds, and the error of the prediction.

    sudo python -m experiments.fidelity
    sudo python -m experiments.fidelity --only collectives-100mb,training
    python -m experiments.fidelity --predict

Machines are network namespaces, whose ports have the rate, the queue and the segments of a switch's. A third of the
cells, chosen by a hash of their names, calibrates the model; the table shows the errors of the others. A run that was
interrupted goes on where it was. `--predict` measures nothing: it predicts the cells of the last run again, in the
present model, on any machine.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from experiments import asked
from experiments.fidelity.bands import Calibration, banded, residuals
from experiments.fidelity.calibration import fitted, this_machine
from experiments.fidelity.cells import collectives, shared_trainings, trainings
from experiments.fidelity.churn import ChurnCell, churn, measure_churn, predict_churn
from experiments.fidelity.computed import ComputedCell, measure_computed, predict_computed
from experiments.fidelity.computing import computing
from experiments.fidelity.homes import EMULATED, MEDIA, PROCESSOR, WIRED
from experiments.fidelity.loaded import (
    LoadedCell,
    know_machine,
    loaded_collectives,
    loaded_computing,
    loaded_trainings,
    measure_loaded,
    predict_loaded,
)
from experiments.fidelity.record import Record
from experiments.fidelity.repeats import RepeatedCell, measure_repeated, repeated
from experiments.fidelity.report import Class, LabCell, Row, classes, row, save, table
from experiments.fidelity.script_cells import script_cells
from experiments.fidelity.worlds import Timing, measure, predicted
from hcsim.config import Processor, Scenario, load_scenario
from hcsim.config.file import write_scenario
from hcsim.files import write_whole
from tests.real.namespaces import obstacle

PARTS: dict[str, Callable[[], Sequence[LabCell | RepeatedCell]]] = {
    **{f"collectives-{medium}": partial(collectives, medium) for medium in MEDIA},
    "training": trainings,
    "training-shared": shared_trainings,
    "churn": churn,
    "computing": computing,
    "scripts": script_cells,
    "load-collectives": loaded_collectives,
    "load-training": loaded_trainings,
    "load-computing": loaded_computing,
    **{f"repeats-{medium}": partial(repeated, medium) for medium in WIRED},
}
CELLS = "measured.csv"
REPEATS = "repeats.csv"
CALIBRATION = "calibration.json"
MACHINE = "machine.toml"


def main(
    only: Annotated[str, typer.Option(help="Parts that are measured.")] = ",".join(PARTS),
    predict: Annotated[bool, typer.Option("--predict", help="Measure nothing; predict again.")] = False,
    measure_only: Annotated[bool, typer.Option("--measure-only", help="Predict nothing.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure cells again that were measured.")] = False,
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path("results/fidelity"),
    json_file: Annotated[str | None, typer.Option("--json", help="Write one row per cell to this file.")] = None,
) -> None:
    """Measure the same job in both worlds, and show the error of the prediction."""
    parts = asked.chosen(only, PARTS)
    asked.check_json(json_file)
    if not predict and (why_not := obstacle()):
        typer.echo(f"nothing was measured: {why_not}; --predict shows the last run", err=True)
        raise typer.Exit(1)
    # Namespaces and ranks are removed on the way out, also when somebody ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    asked.make_folder(out)
    record, repeats = Record(out / CELLS), Record(out / REPEATS)
    cells = [cell for part in parts for cell in PARTS[part]()]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        if not predict:
            known = set() if again else {*record.timings, *repeats.timings}
            missing = [cell for cell in cells if cell.name not in known]
            _measure([cell for cell in missing if not isinstance(cell, RepeatedCell)], record, out, progress)
            if any(isinstance(cell, LoadedCell) and (cell.computes or not measure_only) for cell in missing):
                know_machine(out)
            _repeat([cell for cell in missing if isinstance(cell, RepeatedCell)], repeats, progress)
            _keep_machine(out / MACHINE)
        if measure_only:
            return
        rows, found = _compare(record, repeats, out, progress)
    rows_for_json = [msgspec.structs.asdict(each) for each in rows]
    asked.hand_over(json_file, rows_for_json, lambda: Console(width=120).print(table(found, rows)))


def _measure(cells: Sequence[LabCell], record: Record, out: Path, progress: Progress) -> None:
    task = progress.add_task("measuring", total=len(cells))

    def done(cell: LabCell, timing: Timing) -> None:
        record.add(cell.name, timing)
        progress.advance(task)

    measure([cell for cell in cells if not isinstance(cell, ChurnCell | ComputedCell | LoadedCell)], done)
    measure_computed([cell for cell in cells if isinstance(cell, ComputedCell)], out, done)
    if any(isinstance(cell, ChurnCell) for cell in cells):
        for cell, timing in measure_churn().items():
            done(cell, timing)
    measure_loaded([cell for cell in cells if isinstance(cell, LoadedCell)], done)


def _repeat(cells: Sequence[RepeatedCell], record: Record, progress: Progress) -> None:
    task = progress.add_task("repeating", total=len(cells))

    def done(cell: RepeatedCell, timing: Timing) -> None:
        record.add(cell.name, timing)
        progress.advance(task)

    measure_repeated(cells, done)


def _keep_machine(file: Path) -> None:
    if not file.exists():
        cores = Processor(PROCESSOR, os.cpu_count() or 1)
        write_whole(file, write_scenario(Scenario("lab", machines=(this_machine(),), processors=(cores,))).encode())


def _computer(file: Path) -> Scenario:
    if not file.exists():
        raise typer.BadParameter(f"{file} is not there: nothing was measured yet", param_hint="--out")
    return load_scenario(file)


def _compare(record: Record, repeats: Record, out: Path, progress: Progress) -> tuple[list[Row], list[Class]]:
    computer = _computer(out / MACHINE)
    [machine], [processor] = computer.machines, computer.processors
    cells = [
        cell
        for part in PARTS.values()
        for cell in part()
        if cell.name in record.timings and not isinstance(cell, RepeatedCell)
    ]
    task = progress.add_task("predicting", total=len(cells))
    calibrating = {
        medium: [each for each in collectives(medium) if each.calibrates and each.name in record.timings]
        for medium in MEDIA
    }
    networks = {
        medium: fitted(those, record.timings, machine, processor.cores) for medium, those in calibrating.items()
    }
    off = residuals(
        [list(WIRED), *([medium] for medium in EMULATED)],
        {
            medium: Calibration.of(those, record.timings, networks[medium], machine)
            for medium, those in calibrating.items()
        },
    )
    lost = predict_churn() if any(isinstance(cell, ChurnCell) for cell in cells) else {}
    apart = predict_computed([cell for cell in cells if isinstance(cell, ComputedCell)], networks, off, out)
    loaded = dict(predict_loaded([cell for cell in cells if isinstance(cell, LoadedCell)], networks, off, out))
    rows = []
    for cell in cells:
        expected: Timing | None
        if isinstance(cell, ChurnCell):
            expected = lost.get(cell)
        elif isinstance(cell, LoadedCell):
            expected = loaded[cell]
        elif isinstance(cell, ComputedCell):
            expected = apart[cell]
        else:
            network = networks[cell.medium]
            expected = banded(cell, predicted(cell, network, machine), off[cell.medium])
        if expected is not None:
            rows.append(row(cell, record.timings[cell.name], expected))
        progress.advance(task)
    found = classes(rows, repeats.timings)
    known = {medium: msgspec.structs.asdict(networks[medium]) | msgspec.structs.asdict(off[medium]) for medium in MEDIA}
    write_whole(out / CALIBRATION, msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n")
    save(rows, found, out)
    return rows, found


if __name__ == "__main__":
    asked.run(main)
