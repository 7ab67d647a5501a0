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

import msgspec
import numpy as np

from experiments.fidelity.cells import KB, MB, Cell
from experiments.fidelity.homes import Network, built, modelled
from experiments.fidelity.program import Collectives, Laps, options, run_collectives
from experiments.fidelity.rank import Job, Ready
from experiments.peers.crew import Command, Crew, module, working
from hcsim.collectives.group import Group
from hcsim.config import Machine
from hcsim.launch import DEFAULT_PORT
from hcsim.launch.virtual import simulate
from tests.real.namespaces import Lan

_FEW_REPEATS = 2


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


class Team(msgspec.Struct, frozen=True):
    """Cells with one of these are measured by the same processes."""

    medium: str
    hosts: int
    setup: str
    tls: bool


def team_of(cell: Cell) -> Team:
    special = cell.algorithm in ("hierarchical", "auto")
    return Team(cell.medium, cell.hosts, cell.algorithm if special else "", cell.tls)


def measure(cells: Sequence[Cell], done: Callable[[Cell, Timing], None]) -> None:
    """Measure all cells, home by home; `done` is called after each."""
    in_order = sorted(cells, key=lambda cell: msgspec.structs.astuple(team_of(cell)))
    for (medium, hosts), at_home in groupby(in_order, key=lambda cell: (cell.medium, cell.hosts)):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hcsim-")))
            machines = stack.enter_context(built(medium, hosts, folder))
            for team, of_team in groupby(at_home, key=team_of):
                with working(hosts, partial(_commands, machines, team)) as crew:
                    crew.hear(Ready)
                    for cell in of_team:
                        done(cell, measured(crew, cell))


def _commands(machines: Lan, team: Team, folder: Path) -> list[Command]:
    addresses = tuple(f"{machine.ip}:{DEFAULT_PORT}" for machine in machines)
    job = msgspec.json.encode(Job(str(folder), addresses, team.setup, team.tls)).decode()
    return [
        [*machine.prefix, *module("experiments.fidelity.rank", job, str(rank))] for rank, machine in enumerate(machines)
    ]


def measured(crew: Crew, cell: Cell) -> Timing:
    """Measure a cell. Short operations open the connections that it uses, and fill the caches."""
    crew.take(_turn(cell, _FEW_REPEATS, min(cell.size_bytes, 64 * KB)), Laps)
    return _combined(crew.take(_turn(cell, cell.repeats), Laps))


def predicted(cell: Cell, network: Network, machine: Machine) -> Timing:
    """Simulate a cell with data: the results must have the bits of the measured ones."""
    return _simulated(cell, network, machine, _turn(cell, _FEW_REPEATS if cell.size_bytes >= 16 * MB else 3))


def predicted_s(cell: Cell, network: Network, machine: Machine) -> float:
    """Simulate a cell without data, for its time alone."""
    turn = msgspec.structs.replace(_turn(cell, _FEW_REPEATS), phantom=True)
    return _simulated(cell, network, machine, turn).median_s


def _simulated(cell: Cell, network: Network, machine: Machine, turn: Collectives) -> Timing:
    async def program(group: Group) -> Laps:
        if cell.algorithm == "auto":
            await group.measure()
        return await run_collectives(group, turn)

    chosen = options(cell.hosts, cell.algorithm)
    scenario = modelled(cell.medium, cell.hosts, network, machine, tls=cell.tls)
    return _combined(simulate(scenario, program, options=chosen).values())


def _turn(cell: Cell, repeats: int, size_bytes: int | None = None) -> Collectives:
    return Collectives(cell.operation, cell.algorithm, size_bytes or cell.size_bytes, repeats, cell.together)


def _combined(reports: Sequence[Laps]) -> Timing:
    slowest = [max(times) for times in zip(*(report.seconds for report in reports), strict=True)]
    p10, p90 = (float(np.percentile(slowest, share)) for share in (10, 90))
    # Reports come in the order in which the processes have started, not in that of the ranks.
    digest = hashlib.sha256("".join(sorted(report.sha256 for report in reports)).encode()).hexdigest()
    return Timing(statistics.median(slowest), p10, p90, len(slowest), reports[0].algorithm, digest)
