"""Unmodified scripts on two machines that really compute, and how they are predicted: by the kernels that were timed in
their own steps, and by the machine's curves alone."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from msgspec.structs import replace

from experiments.compute.scripts import SCRIPTS, step_s
from experiments.fidelity.computing import HOSTS, apart, core_of, on_core
from experiments.fidelity.homes import Network, built
from experiments.fidelity.switch import Station
from experiments.fidelity.worlds import Timing
from hcsim.config import Machine
from hcsim.errors import HcsimError
from hcsim.scripts.environment import environment
from hcsim.scripts.processes import RankProcesses
from hcsim.scripts.run import simulate_script
from hcsim.workers import ONE_THREAD
from tests.real.namespaces import REPOSITORY

_STEPS = 40
_REPEATS = 2
_SIMULATED_STEPS = 8
_LONGEST_S = 120.0


class ScriptCell(msgspec.Struct, frozen=True):
    """A script on machines that really compute."""

    medium: str
    script: str
    probed: bool
    """Whether its own kernels are known."""

    calibrates = False

    @property
    def name(self) -> str:
        return f"{self.medium}/{HOSTS}/{self.script}.py/{'probed' if self.probed else 'not probed'}"

    @property
    def kind(self) -> str:
        return "unmodified script, probed" if self.probed else "unmodified script"


def script_cells() -> list[ScriptCell]:
    return [
        ScriptCell(medium, script, probed)
        for medium in ("100mb", "1gb")
        for script in SCRIPTS
        for probed in (True, False)
    ]


def measure_scripts(cells: Sequence[ScriptCell], done: Callable[[ScriptCell, Timing], None]) -> None:
    """Run each script some times in each medium; `done` is called for each cell that it belongs to."""
    for medium in dict.fromkeys(cell.medium for cell in cells):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hcsim-")))
            machines = stack.enter_context(built(medium, HOSTS, folder))
            for script in dict.fromkeys(cell.script for cell in cells if cell.medium == medium):
                lasted_s = [_measured(machines, SCRIPTS[script]) for _ in range(_REPEATS)]
                timing = Timing(statistics.fmean(lasted_s), min(lasted_s), max(lasted_s), _REPEATS, "", "")
                for cell in cells:
                    if (cell.medium, cell.script) == (medium, script):
                        done(cell, timing)


def _measured(machines: Sequence[Station], script: Path) -> float:
    """Return the time of a step."""
    hosts = list(machines)
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank, machine in enumerate(hosts):
            variables = environment(rank, HOSTS, hosts[0].ip, 1)
            secrets = {"HCSIM_INSECURE": "1", "HCSIM_ADDRESSES": machine.ip, "PYTHONPATH": str(REPOSITORY)}
            command = on_core(core_of(rank), [*machine.prefix, sys.executable, str(script), str(_STEPS)])
            processes.append(
                subprocess.Popen(
                    command,
                    env=os.environ | ONE_THREAD | variables | secrets,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
        said = [process.communicate(timeout=_LONGEST_S)[0] for process in processes]
    except subprocess.TimeoutExpired:
        raise HcsimError(f"{script.name} did not end within {_LONGEST_S:g} s") from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return step_s(script, said[0])


def predict_script(cell: ScriptCell, network: Network, machine: Machine, processes: RankProcesses) -> Timing:
    """Run the script in the simulator."""
    if not cell.probed:
        machine = replace(machine, scripts=())
    script, said = SCRIPTS[cell.script], []
    simulate_script(
        apart(cell.medium, network, machine), script, [str(_SIMULATED_STEPS)],
        say=lambda rank, stream, text: said.append(text), processes=processes,
    )  # fmt: skip
    lasts_s = step_s(script, "".join(said))
    return Timing(lasts_s, lasts_s, lasts_s, _SIMULATED_STEPS, "", "")
