"""Trainings whose compute is real, on two machines that have a core each, and how they are predicted.

A machine is a network namespace and one core of this machine. What the system does for its network is done on that
core too, as on a real machine. Nothing is fitted: the machine's model is what `hcsim probe` measures with one thread on
one core, and the networks are those of the collective operations' cells.

Ranks are processes: `python -m experiments.fidelity.computing JOB RANK`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

import hcsim
from experiments.fidelity.homes import Network, built, modelled
from experiments.fidelity.program import Trainings, options
from experiments.fidelity.rank import Job, Ready
from experiments.fidelity.switch import Station
from experiments.fidelity.worlds import Timing
from experiments.peers.crew import CONTROL, Command, Crew, module, working
from hcsim.config import Machine, Scenario, Training, load_scenario
from hcsim.errors import HcsimError
from hcsim.launch import DEFAULT_PORT
from hcsim.training.trainer import train
from hcsim.twin.ledger import FIRST_STEPS, PHASES, PhaseTimes, phase_times
from hcsim.twin.prediction import PredictedRun, exchanges_every, predict, uncertainty
from hcsim.workers import ONE_THREAD

HOSTS = 2
TASKS = ("digits", "text")
_ROUNDS = 4
_REPEATS = 2
_VARIANTS = 8
_METHODS = (
    ("ddp", "none"), ("ddp", "int8+ef"), ("ddp", "topk:0.01+ef"), ("ddp", "powersgd:4+ef"),
    ("local_sgd:4", "none"), ("diloco:4", "none"), ("diloco:4", "int8+ef"),
    ("parameter_server", "none"), ("parameter_server", "topk:0.01+ef"),
)  # fmt: skip


class ComputingCell(msgspec.Struct, frozen=True):
    """A training on machines that really compute. It never calibrates."""

    medium: str
    task: str
    strategy: str
    compressor: str

    calibrates = False
    repeats = _REPEATS
    kind = "training step, real compute"

    @property
    def name(self) -> str:
        return f"{self.medium}/{HOSTS}/{self.task}, computed/{self.strategy}/{self.compressor}"

    @property
    def turn(self) -> Trainings:
        every = exchanges_every(Training(strategy=self.strategy))
        return Trainings(self.task, self.strategy, self.compressor, (1 + _ROUNDS) * max(4, every), 1)


def computing() -> list[ComputingCell]:
    return [ComputingCell(medium, task, *how) for medium in ("100mb", "1gb") for task in TASKS for how in _METHODS]


class Lap(msgspec.Struct, frozen=True):
    """The steps of a training on one rank, by phase."""

    rank: int
    seconds: list[dict[str, float]]


def on_core(core: int, command: Command) -> Command:
    """Return the command on one core alone."""
    return ["taskset", "-c", str(core), *command]


def core_of(rank: int) -> int:
    """Return the core of a rank's machine."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < HOSTS:
        raise HcsimError(f"machines that really compute need a core each: there are {len(cores)} for {HOSTS}")
    return cores[rank]


def measure_computing(
    cells: Sequence[ComputingCell], done: Callable[[ComputingCell, Timing, PhaseTimes], None]
) -> None:
    """Measure all cells, medium by medium; `done` is called after each."""
    for medium, at_home in groupby(sorted(cells, key=lambda cell: cell.medium), key=lambda cell: cell.medium):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hcsim-")))
            machines = stack.enter_context(built(medium, HOSTS, folder))
            crew = stack.enter_context(working(HOSTS, partial(_commands, machines)))
            crew.hear(Ready)
            for cell in at_home:
                done(cell, *_measured(crew, cell))


def _commands(machines: Sequence[Station], folder: Path) -> list[Command]:
    addresses = tuple(f"{machine.ip}:{DEFAULT_PORT}" for machine in machines)
    job = msgspec.json.encode(Job(str(folder), addresses, "")).decode()
    return [
        on_core(core_of(rank), [*machine.prefix, *module("experiments.fidelity.computing", job, str(rank))])
        for rank, machine in enumerate(machines)
    ]


def _measured(crew: Crew, cell: ComputingCell) -> tuple[Timing, PhaseTimes]:
    """Take the steps of the rank that trains in every strategy: the last one."""
    laps = [max(crew.take(cell.turn, Lap), key=lambda lap: lap.rank).seconds for _ in range(cell.repeats)]
    every = exchanges_every(cell.turn.training)
    phases = [phase_times(lap, every) for lap in laps]
    steps_s = [
        sum(step["whole"] for step in lap[first : first + every]) / every
        for lap in laps
        for first in range(max(FIRST_STEPS, every), len(lap) - every + 1, every)
    ]
    timing = _timing(statistics.fmean(each["step"] for each in phases), steps_s)
    return timing, {phase: statistics.fmean(each[phase] for each in phases) for phase in PHASES.values()}


def _timing(median_s: float, all_s: Sequence[float]) -> Timing:
    p10, p90 = (float(np.percentile(all_s, share)) for share in (10, 90))
    return Timing(median_s, p10, p90, len(all_s), "", "")


def predicted_phases(cell: ComputingCell, network: Network, machine: Machine) -> PhaseTimes:
    """Return the phases of a step by the model."""
    return predict(apart(cell.medium, network, machine), _run(cell)).phases


def step_band(cell: ComputingCell, network: Network, machine: Machine) -> tuple[float, float]:
    """Return the band of a step by the spread of the machine's figures, relative to the predicted time."""
    return uncertainty(apart(cell.medium, network, machine), _run(cell), _VARIANTS).band["step"]


def _run(cell: ComputingCell) -> PredictedRun:
    return PredictedRun(cell.turn.training, rank=HOSTS - 1)


def apart(medium: str, network: Network, machine: Machine) -> Scenario:
    """Return the home whose machines have a core each."""
    home = modelled(medium, HOSTS, network, machine)
    return replace(home, nodes=tuple(replace(node, processor="") for node in home.nodes))


def probed(file: Path, scripts: Sequence[Path] = ()) -> Machine:
    """Return the model of a machine with one core, which `hcsim probe` measures if it is not in the file, with its
    model of these scripts."""
    known = load_scenario(file).machines[0] if file.exists() else None
    if known is None:
        _probe(file)
        for name in TASKS:
            _probe(file, "--task", name)
    for script in scripts:
        if known is None or script.name not in [each.name for each in known.scripts]:
            _probe(file, str(script), "--", "1000000")
    return load_scenario(file).machines[0]


def _probe(file: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "hcsim", "probe", "--device", "cpu", "-o", str(file), *arguments]
    subprocess.run(on_core(core_of(0), command), env=os.environ | ONE_THREAD, check=True, stdout=subprocess.DEVNULL)


async def _take_turns(job: Job, rank: int) -> None:
    reader, writer = await asyncio.open_unix_connection(str(Path(job.folder, CONTROL)))
    async with hcsim.real_group(
        rank=rank, peers=list(job.addresses), options=options(HOSTS, ""), insecure=True, shared_memory=False
    ) as group:
        message: Ready | Lap = Ready()
        while True:
            writer.write(msgspec.json.encode(message) + b"\n")
            if not (line := await reader.readline()):
                return
            report = await train(group, msgspec.json.decode(line, type=Trainings).training, seed=1)
            message = Lap(rank, [point.spent_s for point in report.points])


if __name__ == "__main__":
    asyncio.run(_take_turns(msgspec.json.decode(sys.argv[1], type=Job), int(sys.argv[2])))
