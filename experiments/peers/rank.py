"""The process of one rank: `python -m experiments.peers.rank JOB RANK`, started by a team.

It connects, says `Ready`, and then takes turns until the team hangs up. Between turns it sleeps in
the crew's socket and costs no CPU.

A turn loads the tensor, reduces once to warm up, then for each timed iteration passes a barrier
and takes the time of one all-reduce. Timed tensors are zeros: they stay zeros however often they
are summed, and neither sockets nor adders care.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np

from experiments.peers.crew import CONTROL
from experiments.peers.memory import peak_bytes, reset_peak
from experiments.peers.peer import EXACT, Floats, Job, Rank
from experiments.peers.roster import PEERS
from hcsim.collectives.arithmetic import dtype_named

_PRIME, _PERIODS = 251, 1024
"""A saw-tooth of small whole numbers, a megabyte of it."""


class Ready(msgspec.Struct, frozen=True):
    """A rank has joined the others."""


class Turn(msgspec.Struct, frozen=True):
    """What to do next."""

    elements: int
    iterations: int
    verify: bool = False
    """Reduce known values and check every element of their sum."""


class Report(msgspec.Struct, frozen=True):
    """How one rank's turn went."""

    durations_s: list[float]
    peak_bytes: int | None
    wrong_elements: int = 0


async def main(job: Job, rank: int) -> None:
    with socket.socket(socket.AF_UNIX) as control, control.makefile("rwb") as lines:
        control.connect(str(Path(job.folder, CONTROL)))
        async with PEERS[job.peer].join(job, rank) as member:
            message: Ready | Report = Ready()
            teeth = Teeth(job.dtype, job.ranks)
            while True:
                lines.write(msgspec.json.encode(message) + b"\n")
                lines.flush()
                # In a thread, so that a library with an event loop can use it meanwhile.
                line = await asyncio.to_thread(lines.readline)
                if not line:
                    return
                message = await take(msgspec.json.decode(line, type=Turn), member, rank, teeth)


async def take(turn: Turn, member: Rank, rank: int, teeth: Teeth) -> Report:
    member.load(teeth.values(turn.elements, 1, rank % 2) if turn.verify else teeth.values(turn.elements, 0, 0))
    has_peak = reset_peak()
    await member.all_reduce()
    wrong_elements = 0
    if turn.verify:
        wrong_elements = teeth.count_wrong(member.read(), teeth.ranks, teeth.ranks // 2)
    durations_s = []
    for _ in range(turn.iterations):
        await member.barrier()
        start_s = perf_counter()
        await member.all_reduce()
        durations_s.append(perf_counter() - start_s)
    peak = peak_bytes() if has_peak else None
    # Nobody goes to sleep while another may still need him to move bytes.
    await member.barrier()
    member.load(teeth.values(1, 0, 0))
    return Report(durations_s, peak, wrong_elements)


class Teeth:
    """Saw-teeth, whose sums over all ranks are exact in floats of some kind."""

    def __init__(self, dtype: str, ranks: int) -> None:
        self.ranks = ranks
        self._dtype = dtype_named(dtype)
        highest = min(_PRIME, (EXACT[dtype] - ranks) // ranks)
        self._period = (np.arange(_PRIME * _PERIODS) % highest).astype(self._dtype)

    def values(self, elements: int, scale: int, offset: int) -> Floats:
        """`scale` × a saw-tooth + `offset`, with every page touched."""
        values = np.empty(elements, self._dtype)
        for start in range(0, elements, self._period.size):
            part = values[start : start + self._period.size]
            np.multiply(self._period[: part.size], self._dtype.type(scale), out=part)
            part += self._dtype.type(offset)
        return values

    def count_wrong(self, values: Floats, scale: int, offset: int) -> int:
        """How many elements differ from those that `values` makes; no large temporary."""
        expected = self.values(min(values.size, self._period.size), scale, offset)
        parts = (values[start : start + expected.size] for start in range(0, values.size, expected.size))
        return sum(int(np.count_nonzero(part != expected[: part.size])) for part in parts)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Job), int(sys.argv[2])))
