"""The process of one rank: `python -m experiments.ddp.rank JOB RANK`, started by a team.

It joins its process group, says `Ready`, and then takes turns until the team hangs up. Between turns it sleeps in
the crew's socket and costs no CPU. CPU time is the whole process's, all threads, which other programs on the machine
lengthen less.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from experiments.ddp.steps import Stepper, Steps
from experiments.ddp.training import Trainer, Training
from experiments.peers.crew import CONTROL

KINDS = {Steps: Stepper, Training: Trainer}


class Job(msgspec.Struct, frozen=True):
    """What every rank of one team knows."""

    backend: str
    ranks: int
    folder: str
    master: str
    """The host where rank 0 keeps the store."""
    port: int
    interface: str
    """Of gloo."""


class Ready(msgspec.Struct, frozen=True):
    """A rank has joined the others."""


def join(job: Job, rank: int) -> None:
    """Connect this rank to the others."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": job.master, "MASTER_PORT": str(job.port), "GLOO_SOCKET_IFNAME": job.interface}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.ranks)}
    if job.backend == "hcsim":
        import hcsim.torch_backend  # noqa: F401 - torch knows it by itself only where the package is installed
    dist.init_process_group(job.backend)


def main(job: Job, rank: int) -> None:
    with socket.socket(socket.AF_UNIX) as control, control.makefile("rwb") as lines:
        control.connect(str(Path(job.folder, CONTROL)))
        join(job, rank)
        workers: dict[type, Any] = {}
        message: Any = Ready()
        while True:
            lines.write(msgspec.json.encode(message) + b"\n")
            lines.flush()
            line = lines.readline()
            if not line:
                break
            turn = msgspec.json.decode(line, type=Steps | Training)
            kind = KINDS[type(turn)]
            if kind not in workers:
                workers[kind] = kind(rank)
            message = workers[kind].take(turn)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Job), int(sys.argv[2]))
