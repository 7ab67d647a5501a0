"""The process of one rank: `python -m experiments.fidelity.rank JOB RANK`, in the namespace of its machine.

It joins the others, says `Ready`, and then takes turns until the lab hangs up. Between turns it sleeps in the crew's
socket and costs no CPU.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import sys
from pathlib import Path

import msgspec

import hcsim
from experiments.fidelity.program import MAC, OLD, Laps, Turn, options, run
from experiments.peers.crew import CONTROL
from hcsim.config import CATALOGUE
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.real.tls import ClusterTls


class Job(msgspec.Struct, frozen=True):
    """What every rank of one team knows."""

    folder: str
    addresses: tuple[str, ...]
    algorithm: str
    tls: bool = False
    device: str = "cpu"


class Ready(msgspec.Struct, frozen=True):
    """A rank has joined the others."""


async def main(job: Job, rank: int) -> None:
    with socket.socket(socket.AF_UNIX) as control, control.makefile("rwb") as lines:
        control.connect(str(Path(job.folder, CONTROL)))
        tls = _tls(job.folder, rank) if job.tls else None
        chosen = options(len(job.addresses), job.algorithm)
        async with hcsim.real_group(
            rank=rank, peers=list(job.addresses), options=chosen, tls=tls, insecure=tls is None, device=job.device
        ) as group:
            if job.algorithm == "auto":
                await group.measure()
            message: Ready | Laps = Ready()
            while True:
                lines.write(msgspec.json.encode(message) + b"\n")
                lines.flush()
                # In a thread, so that the group's event loop goes on meanwhile.
                line = await asyncio.to_thread(lines.readline)
                if not line:
                    return
                message = await run(group, msgspec.json.decode(line, type=Turn))


def _tls(folder: str, rank: int) -> ClusterTls:
    """Keys and a secret that are made of the folder's name, for traffic that stays in the lab."""
    secret = hashlib.sha256(folder.encode()).digest()
    return ClusterTls(NodeKey(hashlib.sha256(secret + bytes([rank])).digest()), ClusterSecret(secret[:16]))


if __name__ == "__main__":
    for machine in (MAC, OLD):
        CATALOGUE.add(machine.name, machine)
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Job), int(sys.argv[2])))
