"""Open MPI, made to use TCP on loopback and nothing else.

Between processes of one machine Open MPI would use shared memory, which is another contest, so
only the `tcp` and `self` transports are allowed, under the `ob1` layer. A rank that waits inside
MPI spins. That is Open MPI's fastest mode while each rank has a core, and ruinous beyond, so
`mpi_yield_when_idle` is set exactly when ranks outnumber cores. Between turns ranks do not wait
inside MPI at all. Binding to cores is off, as for the others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from itertools import chain
from typing import Any

from experiments.peers.peer import Command, Floats, Job, Peer, Rank

_PARAMETERS = {
    "pml": "ob1",
    "btl": "tcp,self",
    "coll": "^sm",
    "btl_tcp_if_include": "127.0.0.0/8",
    "oob_tcp_if_include": "127.0.0.0/8",
}


class _MpiRank:
    _values: Floats

    def __init__(self, world: Any, in_place: Any) -> None:
        self._world = world
        self._in_place = in_place

    def load(self, values: Floats) -> None:
        self._values = values

    async def all_reduce(self) -> None:
        self._world.Allreduce(self._in_place, self._values)

    async def barrier(self) -> None:
        self._world.Barrier()

    def read(self) -> Floats:
        return self._values


def _missing() -> str | None:
    if not find_spec("mpi4py"):
        return "mpi4py is not installed"
    if not shutil.which("mpirun"):
        return "there is no mpirun"
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60, check=False)
    return None if "Open MPI" in version.stdout else "mpirun is not Open MPI's"


def _launch(rank_commands: list[Command]) -> list[Command]:
    yields = len(rank_commands) > (os.cpu_count() or 1)
    parameters = _PARAMETERS | {"mpi_yield_when_idle": "1" if yields else "0"}
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    command += chain.from_iterable(["--mca", key, value] for key, value in parameters.items())
    # One program per rank: mpirun numbers its ranks in the order of the command line.
    for rank_command in rank_commands:
        command += ["-n", "1", *rank_command, ":"]
    return [command[:-1]]


@asynccontextmanager
async def _join(_job: Job, _rank: int) -> AsyncIterator[Rank]:
    from mpi4py import MPI

    yield _MpiRank(MPI.COMM_WORLD, MPI.IN_PLACE)


OPEN_MPI = Peer("mpi", _missing, _join, ("float32",), _launch)
