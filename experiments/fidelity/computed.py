"""The cells in which compute is real: what was measured of them and of a machine with one core, in a folder, and what
is predicted."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from experiments.compute.scripts import SCRIPTS
from experiments.fidelity.bands import Residuals, with_band
from experiments.fidelity.computing import ComputingCell, measure_computing, predicted_phases, probed, step_band
from experiments.fidelity.homes import Network
from experiments.fidelity.script_cells import ScriptCell, measure_scripts, predict_script
from experiments.fidelity.worlds import Timing
from hcsim.config import load_scenario
from hcsim.files import write_whole
from hcsim.scripts.processes import RankProcesses
from hcsim.twin.ledger import PhaseTimes

ComputedCell: TypeAlias = ComputingCell | ScriptCell
MACHINE = "computing.toml"
MEASURED_PHASES = "phases.json"
PHASES = "phases.csv"


def measure_computed(cells: Sequence[ComputedCell], folder: Path, done: Callable[[ComputedCell, Timing], None]) -> None:
    """Measure cells, and before them what the model knows of the machine; `done` is called after each cell."""
    scripts = tuple(SCRIPTS[cell.script] for cell in cells if isinstance(cell, ScriptCell))
    if cells:
        probed(folder / MACHINE, tuple(dict.fromkeys(scripts)))
    phases = _measured_phases(folder)

    def with_phases(cell: ComputingCell, timing: Timing, found: PhaseTimes) -> None:
        phases[cell.name] = found
        write_whole(folder / MEASURED_PHASES, msgspec.json.format(msgspec.json.encode(phases), indent=1) + b"\n")
        done(cell, timing)

    measure_computing([cell for cell in cells if isinstance(cell, ComputingCell)], with_phases)
    measure_scripts([cell for cell in cells if isinstance(cell, ScriptCell)], done)


def _measured_phases(folder: Path) -> dict[str, PhaseTimes]:
    file = folder / MEASURED_PHASES
    return msgspec.json.decode(file.read_bytes(), type=dict[str, PhaseTimes]) if file.exists() else {}


def predict_computed(
    cells: Iterable[ComputedCell], networks: Mapping[str, Network], off: Mapping[str, Residuals], folder: Path
) -> dict[ComputedCell, Timing]:
    """Predict cells, and write the phases of trainings as they were measured and as they are predicted."""
    chosen = list(cells)
    if not chosen:
        return {}
    machine = load_scenario(folder / MACHINE).machines[0]
    trainings = [cell for cell in chosen if isinstance(cell, ComputingCell)]
    phases = {cell: predicted_phases(cell, networks[cell.medium], machine) for cell in trainings}
    _write_phases(folder / PHASES, _measured_phases(folder), {cell.name: found for cell, found in phases.items()})
    steps_s = {cell: found["step"] for cell, found in phases.items()}
    timings: dict[ComputedCell, Timing] = {
        cell: with_band(
            Timing(lasts_s, lasts_s, lasts_s, 1, "", ""), step_band(cell, networks[cell.medium], machine),
            off[cell.medium].long,
        )
        for cell, lasts_s in steps_s.items()
    }  # fmt: skip
    with RankProcesses() as processes:
        for cell in chosen:
            if isinstance(cell, ScriptCell):
                timings[cell] = predict_script(cell, networks[cell.medium], machine, processes)
    return timings


def _write_phases(file: Path, measured: Mapping[str, PhaseTimes], predicted: Mapping[str, PhaseTimes]) -> None:
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(("cell", "phase", "measured_s", "predicted_s"))
        for cell, expected in predicted.items():
            for phase, found_s in measured.get(cell, {}).items():
                writer.writerow((cell, phase, f"{found_s:.6g}", f"{expected[phase]:.6g}"))
