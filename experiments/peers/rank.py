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
from experiments.peers.peer import Floats, Job, Rank
from experiments.peers.roster import PEERS

_PERIOD = np.arange(251 * 1024, dtype=np.float32) % 251
"""One MiB of small whole numbers: sums over many ranks stay exact in float32."""


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
            while True:
                lines.write(msgspec.json.encode(message) + b"\n")
                lines.flush()
                # In a thread, so that a library with an event loop can use it meanwhile.
                line = await asyncio.to_thread(lines.readline)
                if not line:
                    return
                message = await take(msgspec.json.decode(line, type=Turn), member, rank, job.ranks)


async def take(turn: Turn, member: Rank, rank: int, ranks: int) -> Report:
    member.load(pattern(turn.elements, 1, rank) if turn.verify else pattern(turn.elements, 0, 0))
    has_peak = reset_peak()
    await member.all_reduce()
    wrong_elements = 0
    if turn.verify:
        wrong_elements = count_wrong(member.read(), ranks, ranks * (ranks - 1) // 2)
    durations_s = []
    for _ in range(turn.iterations):
        await member.barrier()
        start_s = perf_counter()
        await member.all_reduce()
        durations_s.append(perf_counter() - start_s)
    peak = peak_bytes() if has_peak else None
    # Nobody goes to sleep while another may still need him to move bytes.
    await member.barrier()
    member.load(np.zeros(1, np.float32))
    return Report(durations_s, peak, wrong_elements)


def pattern(elements: int, scale: int, offset: int) -> Floats:
    """`scale` × a saw-tooth + `offset`, with every page touched."""
    values = np.empty(elements, np.float32)
    for start in range(0, elements, _PERIOD.size):
        part = values[start : start + _PERIOD.size]
        np.multiply(_PERIOD[: part.size], np.float32(scale), out=part)
        part += np.float32(offset)
    return values


def count_wrong(values: Floats, scale: int, offset: int) -> int:
    """How many elements differ from `pattern(values.size, scale, offset)`; no large temporary."""
    expected = pattern(min(values.size, _PERIOD.size), scale, offset)
    parts = (values[start : start + expected.size] for start in range(0, values.size, expected.size))
    return sum(int(np.count_nonzero(part != expected[: part.size])) for part in parts)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Job), int(sys.argv[2])))
