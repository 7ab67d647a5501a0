"""Machines whose owners use them while they train: each has one core, and on that of one machine or of all of them a
neighbour works half of the time.

What the model knows of such a machine is what `hcsim probe` measures on one core, and how its scheduler shares a core
(`scheduler.py`). Nothing is fitted to these cells.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from experiments.fidelity.bands import Residuals, with_band
from experiments.fidelity.cells import KB, MB, Cell, TrainingCell
from experiments.fidelity.computing import HOSTS, ComputingCell, core_of, on_core, probed
from experiments.fidelity.homes import Network, built, modelled
from experiments.fidelity.program import Collectives, Laps, Steps
from experiments.fidelity.rank import Job, Ready
from experiments.fidelity.scheduler import Scheduler
from experiments.fidelity.switch import Station
from experiments.fidelity.worlds import Timing, combined, simulated
from experiments.peers.crew import Command, Crew, module, working
from hcsim.config import BackgroundLoad, Machine, Processor, Scenario, load_scenario
from hcsim.errors import ConfigError
from hcsim.launch import DEFAULT_PORT
from hcsim.units import PositiveSeconds, PositiveShare, Seconds

MACHINE, SCHEDULER = "loaded.toml", "scheduler.json"
SHARE, PERIOD_S = 0.5, 0.04
CELL_S = 2.5
_LAPS = 3
_FEWEST, _MOST = 4, 300
_STEP_S = {"resnet50": 0.7, "digits": 0.075, "text": 0.04}
_COMPUTED_STEP_S = {"digits": 0.015, "text": 0.04}

Which: TypeAlias = Literal["none", "one", "all"]
"""On whose core there is a neighbour: nobody's, the last machine's, or everybody's."""


class LoadedCell(msgspec.Struct, frozen=True):
    """A cell of another part, on machines with a core each that they share with neighbours. It never calibrates."""

    inner: Cell | TrainingCell | ComputingCell
    which: Which
    tls: bool

    calibrates = False
    hosts = HOSTS

    @property
    def medium(self) -> str:
        return self.inner.medium

    @property
    def name(self) -> str:
        return f"{self.inner.name}{'+tls' if self.tls else ''}, core shared by {self.which}"

    @property
    def kind(self) -> str:
        """The class of cells that the cell is counted in."""
        match self.inner:
            case Cell():
                what = "collectives" if self.inner.size_bytes >= MB else "64 KB"
            case TrainingCell():
                what = "compute slept"
            case _:
                what = "real compute"
        if self.which == "none":
            return f"own core, {what}{_over(self.tls)}"
        return f"shared load, {what}{_over(self.tls)}"

    @property
    def computes(self) -> bool:
        """Whether it really computes, so that the machine's kernels have to be known."""
        return isinstance(self.inner, ComputingCell)

    @property
    def setup(self) -> tuple[str, str]:
        """What the group is asked to be ready for, and the device."""
        return ("", "cpu") if isinstance(self.inner, ComputingCell) else self.inner.setup

    @property
    def turn(self) -> Collectives | Steps:
        if isinstance(self.inner, Cell):
            repeats = round(CELL_S / (self.inner.least_s + 2e-3))
            return self.inner.turn(max(_FEWEST, min(_MOST, repeats)))
        lasts_s = (_STEP_S if isinstance(self.inner, TrainingCell) else _COMPUTED_STEP_S)[self.inner.task]
        turn = Steps(self.inner.task, self.inner.strategy, self.inner.compressor, 1, _LAPS)
        return replace(turn, rounds=max(1, round(CELL_S / _LAPS / lasts_s / turn.every)))

    @property
    def warm_up(self) -> Collectives | Steps:
        if isinstance(self.inner, Cell):
            return self.inner.warm_up
        return replace(self.turn, rounds=1, repeats=1)


def _over(tls: bool) -> str:
    return " over TLS" if tls else ""


def _cells(inner: Sequence[Cell | TrainingCell | ComputingCell]) -> list[LoadedCell]:
    """One and all are reported; none shows what the model says of a machine with one core that is alone."""
    loads: tuple[Which, ...] = ("none", "one", "all")
    return [
        LoadedCell(each, which, tls)
        for each in inner
        for tls in (False, True)
        for which in (loads if not tls and each in inner[:: max(1, len(inner) // 4)] else loads[1:])
    ]


def loaded_collectives() -> list[LoadedCell]:
    ring, tree = ("ring", (64 * KB, 1 * MB, 16 * MB)), ("tree", (64 * KB, 1 * MB))
    return _cells(
        [
            Cell(medium, HOSTS, "all_reduce", algorithm, size_bytes)
            for medium in ("100mb", "1gb")
            for algorithm, sizes_bytes in (ring, tree)
            for size_bytes in sizes_bytes
        ]
    )


def loaded_trainings() -> list[LoadedCell]:
    large = (("ddp", "none"), ("ddp", "topk:0.01+ef"), ("diloco:4", "int8+ef"))
    small = (("ddp", "none"), ("ddp", "int8+ef"), ("local_sgd:4", "none"), ("parameter_server", "none"))
    return _cells(
        [
            *(TrainingCell("1gb", HOSTS, "resnet50", *how) for how in large),
            *(TrainingCell("100mb", HOSTS, "digits", *how) for how in small),
        ]
    )


def loaded_computing() -> list[LoadedCell]:
    methods = (("ddp", "none"), ("ddp", "int8+ef"), ("local_sgd:4", "none"))
    return _cells(
        [
            *(ComputingCell("1gb", "digits", *how) for how in (*methods, ("parameter_server", "none"))),
            *(ComputingCell("1gb", "text", *how) for how in (*methods, ("ddp", "powersgd:4+ef"))),
            *(ComputingCell("100mb", "digits", *how) for how in methods[1:]),
        ]
    )


def is_known(folder: Path) -> bool:
    """Return whether the folder has what the model knows of a machine with one core."""
    return all((folder / name).exists() for name in (MACHINE, SCHEDULER))


def know_machine(folder: Path) -> None:
    """Measure what the model knows of a machine with one core, unless it is in the folder."""
    probed(folder / MACHINE)
    if not (folder / SCHEDULER).exists():
        command = module("experiments.fidelity.scheduler", str(core_of(0)), str(folder / SCHEDULER))
        subprocess.run(command, check=True)


def measure_loaded(cells: Sequence[LoadedCell], done: Callable[[LoadedCell, Timing], None]) -> None:
    """Measure all cells, home by home; `done` is called after each."""
    for medium, at_home in groupby(sorted(cells, key=_team), key=lambda cell: cell.medium):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hcsim-")))
            machines = stack.enter_context(built(medium, HOSTS, folder))
            for (_, device, tls), of_team in groupby(at_home, key=lambda cell: _team(cell)[:3]):
                with working(HOSTS, partial(_commands, machines, device, tls)) as crew:
                    crew.hear(Ready)
                    for which, of_load in groupby(of_team, key=lambda cell: cell.which):
                        with _neighbours(which):
                            for cell in of_load:
                                done(cell, _measured(crew, cell))


def _team(cell: LoadedCell) -> tuple[str, str, bool, str]:
    return cell.medium, cell.setup[1], cell.tls, cell.which


def _commands(machines: Sequence[Station], device: str, tls: bool, folder: Path) -> list[Command]:
    addresses = tuple(f"{machine.ip}:{DEFAULT_PORT}" for machine in machines)
    job = msgspec.json.encode(Job(str(folder), addresses, "", tls, device)).decode()
    return [
        on_core(core_of(rank), [*machine.prefix, *module("experiments.fidelity.rank", job, str(rank))])
        for rank, machine in enumerate(machines)
    ]


def ranks_with(which: Which) -> range:
    """Return the ranks whose machines have a neighbour."""
    return {"none": range(0), "one": range(HOSTS - 1, HOSTS), "all": range(HOSTS)}[which]


@contextmanager
def _neighbours(which: Which) -> Iterator[None]:
    processes = [
        subprocess.Popen(
            on_core(
                core_of(rank),
                [sys.executable, "-m", "experiments.fidelity.neighbour", str(SHARE), str(PERIOD_S), str(rank)],
            )
        )
        for rank in ranks_with(which)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _measured(crew: Crew, cell: LoadedCell) -> Timing:
    """The mean: a repeat in which a neighbour works differs from one in which it sleeps, and what counts is how long
    many of them take."""
    crew.take(cell.warm_up, Laps)
    return combined(crew.take(cell.turn, Laps), statistics.fmean)


def predict_loaded(
    cells: Sequence[LoadedCell], networks: Mapping[str, Network], off: Mapping[str, Residuals], folder: Path
) -> Iterator[tuple[LoadedCell, Timing]]:
    """Predict cells one by one."""
    if cells and not is_known(folder):
        raise ConfigError(f"{folder} has no {MACHINE} and {SCHEDULER}: run --only load-computing there first")
    if not cells:
        return
    machine = load_scenario(folder / MACHINE).machines[0]
    scheduler = msgspec.json.decode((folder / SCHEDULER).read_bytes(), type=Scheduler)
    for cell in cells:
        scenario = scenario_of(cell, networks[cell.medium], machine, scheduler)
        expected = simulated(cell, scenario, cell.turn, statistics.fmean)
        residuals = off[cell.medium]
        short = isinstance(cell.inner, Cell) and cell.inner.size_bytes < MB
        yield cell, with_band(expected, residuals.short if short else residuals.long)


def scenario_of(cell: LoadedCell, network: Network, machine: Machine, scheduler: Scheduler) -> Scenario:
    """Return the home whose machines have a core each, which some share with a neighbour."""
    if isinstance(cell.inner, TrainingCell):
        machine = replace(cell.inner.machine, messages=machine.messages)
    home = modelled(cell.medium, HOSTS, network, machine, tls=cell.tls)
    cores = tuple(
        Processor(f"core-{node.name}", 1, Seconds(scheduler.slice_s), Seconds(scheduler.tick_s)) for node in home.nodes
    )
    nodes = tuple(replace(node, processor=core.name) for node, core in zip(home.nodes, cores, strict=True))
    faults = tuple(
        BackgroundLoad(Seconds(0), nodes[rank].name, PositiveShare(SHARE), 1, PositiveSeconds(PERIOD_S))
        for rank in ranks_with(cell.which)
    )
    return replace(home, nodes=nodes, processors=cores, faults=faults)
