"""The process of one rank: `python -m experiments.ddp.rank JOB RANK`, started by a team.

It joins its process group, says `Ready`, and then takes turns until the team hangs up. Between turns it sleeps in
the crew's socket and costs no CPU. Time is taken from the barrier before a step to the end of the step; CPU time is the
whole process's, all threads, which other programs on the machine lengthen less.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from experiments.peers.crew import CONTROL

WIDTH = 2048
LAYERS = 6
BATCH = 16


class Job(msgspec.Struct, frozen=True):
    """What every rank of one team knows."""

    backend: str
    ranks: int
    folder: str
    port: int
    """Where rank 0 keeps the store."""


class Ready(msgspec.Struct, frozen=True):
    """A rank has joined the others."""


class Turn(msgspec.Struct, frozen=True):
    """So many steps, timed one by one."""

    steps: int


class Report(msgspec.Struct, frozen=True):
    """How one rank's turn went."""

    durations_s: list[float]
    cpu_s: list[float]
    checksum: float
    """Of the parameters after the steps: all ranks of all backends compute the same but for rounding."""


def model() -> nn.Module:
    """25 million parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


class Trainer:
    """DDP on this rank."""

    def __init__(self, rank: int) -> None:
        self._model = DistributedDataParallel(model())
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))

    def take(self, turn: Turn) -> Report:
        """Take the steps."""
        durations_s, cpu_s = [], []
        for _ in range(turn.steps):
            dist.barrier()
            began_s, cpu_began_s = perf_counter(), process_time()
            self._step()
            durations_s.append(perf_counter() - began_s)
            cpu_s.append(process_time() - cpu_began_s)
        # Nobody goes to sleep while another may still need him to move bytes.
        dist.barrier()
        with torch.no_grad():
            checksum = sum(float(each.double().sum()) for each in self._model.parameters())
        return Report(durations_s, cpu_s, checksum)

    def _step(self) -> None:
        loss = self._model(self._data).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def join(job: Job, rank: int) -> None:
    """Connect this rank to the others."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.ranks)}
    if job.backend == "hcsim":
        import hcsim.torch_backend  # noqa: F401 - torch knows it by itself only where the package is installed
    dist.init_process_group(job.backend)


def main(job: Job, rank: int) -> None:
    with socket.socket(socket.AF_UNIX) as control, control.makefile("rwb") as lines:
        control.connect(str(Path(job.folder, CONTROL)))
        join(job, rank)
        trainer = Trainer(rank)
        message: Any = Ready()
        while True:
            lines.write(msgspec.json.encode(message) + b"\n")
            lines.flush()
            line = lines.readline()
            if not line:
                break
            message = trainer.take(msgspec.json.decode(line, type=Turn))
        dist.destroy_process_group()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Job), int(sys.argv[2]))
