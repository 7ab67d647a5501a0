"""Cells in both worlds: measured among network namespaces, and predicted by the simulator."""

from __future__ import annotations

import hashlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec
import numpy as np

from experiments.fidelity.cells import MB, AnyCell, Cell, TrainingCell
from experiments.fidelity.homes import Network, built, modelled
from experiments.fidelity.program import Collectives, Laps, Turn, options, run
from experiments.fidelity.rank import Job, Ready
from experiments.fidelity.switch import Station
from experiments.peers.crew import Command, Crew, module, working
from hcsim.collectives.group import Group
from hcsim.config import Machine, Scenario
from hcsim.launch import DEFAULT_PORT
from hcsim.launch.virtual import simulate

_PAUSE_S = 0.5
"""Longer than a barrier in any home."""
_MOST_SIMULATED = 15


class Timing(msgspec.Struct, frozen=True):
    """The time of a cell in one world, each repeat as long as on its slowest rank."""

    median_s: float
    p10_s: float
    p90_s: float
    repeats: int
    algorithm: str
    """What was done; `auto` may choose differently in the two worlds."""
    sha256: str
    """Of the results of all ranks."""


class Played(Protocol):
    """What the simulator asks of a cell."""

    @property
    def hosts(self) -> int: ...

    @property
    def setup(self) -> tuple[str, str]:
        """What the group is asked to be ready for, and the device."""

    @property
    def warm_up(self) -> Turn:
        """What is done before time counts."""


Typical: TypeAlias = Callable[[Sequence[float]], float]
"""What stands for the repeats of a cell."""


def _team(cell: AnyCell) -> tuple[str, int, tuple[str, str], bool]:
    """Cells with the same one are measured by the same processes."""
    return cell.medium, cell.hosts, cell.setup, cell.tls


def measure(cells: Sequence[AnyCell], done: Callable[[AnyCell, Timing], None]) -> None:
    """Measure all cells, home by home; `done` is called after each."""
    in_order = sorted(cells, key=_team)
    for (medium, hosts), at_home in groupby(in_order, key=lambda cell: (cell.medium, cell.hosts)):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hcsim-")))
            machines = stack.enter_context(built(medium, hosts, folder))
            for (*_, setup, tls), of_team in groupby(at_home, key=_team):
                with working(hosts, partial(_commands, machines, setup, tls)) as crew:
                    crew.hear(Ready)
                    for cell in of_team:
                        done(cell, measured(crew, cell))


def _commands(machines: Sequence[Station], setup: tuple[str, str], tls: bool, folder: Path) -> list[Command]:
    addresses = tuple(f"{machine.ip}:{DEFAULT_PORT}" for machine in machines)
    algorithm, device = setup
    job = msgspec.json.encode(Job(str(folder), addresses, algorithm, tls, device)).decode()
    return [
        [*machine.prefix, *module("experiments.fidelity.rank", job, str(rank))] for rank, machine in enumerate(machines)
    ]


def measured(crew: Crew, cell: AnyCell) -> Timing:
    crew.take(cell.warm_up, Laps)
    return combined(crew.take(cell.turn(cell.repeats), Laps))


def predicted(cell: AnyCell, network: Network, machine: Machine) -> Timing:
    """Simulate a cell with data: the results must have the bits of the measured ones."""
    if isinstance(cell, TrainingCell) or cell.size_bytes >= 16 * MB:
        repeats = 2
    else:  # more where it costs little: who begins late may change from one repeat to the next
        repeats = 3 if cell.size_bytes >= MB else min(cell.repeats, _MOST_SIMULATED)
    return simulated(cell, scenario_of(cell, network, machine), cell.turn(repeats))


def predicted_s(cell: Cell, network: Network, machine: Machine) -> float:
    """Simulate a cell without data, for its time alone."""
    turn = msgspec.structs.replace(cell.turn(2), phantom=True)
    return simulated(cell, scenario_of(cell, network, machine), turn).median_s


def scenario_of(cell: AnyCell, network: Network, machine: Machine) -> Scenario:
    """Return the cell's home in the simulator."""
    if isinstance(cell, TrainingCell):  # which computes at its own speed, and handles messages at this machine's
        machine = msgspec.structs.replace(cell.machine, messages=machine.messages)
    return modelled(cell.medium, cell.hosts, network, machine, tls=cell.tls)


def simulated(cell: Played, scenario: Scenario, turn: Turn, typical: Typical = statistics.median) -> Timing:
    """Simulate a turn of a cell."""
    algorithm, _ = cell.setup
    warmed_up_s: list[float] = []

    async def program(group: Group) -> Laps:
        if algorithm == "auto":
            await group.measure()
        warm_up = cell.warm_up
        if isinstance(turn, Collectives) and isinstance(warm_up, Collectives):
            warm_up = msgspec.structs.replace(warm_up, phantom=turn.phantom)
        await run(group, warm_up)  # also for the windows of its connections
        clock = group.host.clock
        warmed_up_s.append(clock.elapsed())
        await group.barrier()
        # The lab has all ranks begin at once.
        await clock.sleep(max(warmed_up_s) + _PAUSE_S - clock.elapsed())
        return await run(group, turn)

    return combined(simulate(scenario, program, options=options(cell.hosts, algorithm)).values(), typical)


def combined(reports: Sequence[Laps], typical: Typical = statistics.median) -> Timing:
    """Return the timing of all ranks."""
    slowest = [max(times) for times in zip(*(report.seconds for report in reports), strict=True)]
    p10, p90 = (float(np.percentile(slowest, share)) for share in (10, 90))
    # Reports come in the order in which the processes have started, not in that of the ranks.
    digest = hashlib.sha256("".join(sorted(report.sha256 for report in reports)).encode()).hexdigest()
    return Timing(typical(slowest), p10, p90, len(slowest), reports[0].algorithm, digest)
