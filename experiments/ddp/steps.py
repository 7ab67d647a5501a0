"""A turn of steps, timed one by one: a model of 25 million parameters whose data do not matter.

Time is taken from the barrier before a step to the end of the step.
"""

from __future__ import annotations

from time import perf_counter, process_time

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 2048
LAYERS = 6
BATCH = 16


class Steps(msgspec.Struct, frozen=True, tag=True):
    """So many."""

    count: int


class Timed(msgspec.Struct, frozen=True):
    """How one rank's turn went."""

    durations_s: list[float]
    cpu_s: list[float]
    checksum: float
    """Of the parameters after the steps: all ranks of all backends compute the same but for rounding."""


class Stepper:
    """DDP on this rank."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
        self._model = DistributedDataParallel(nn.Sequential(*layers))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))

    def take(self, turn: Steps) -> Timed:
        """Take the steps."""
        durations_s, cpu_s = [], []
        for _ in range(turn.count):
            dist.barrier()
            began_s, cpu_began_s = perf_counter(), process_time()
            self._step()
            durations_s.append(perf_counter() - began_s)
            cpu_s.append(process_time() - cpu_began_s)
        # Nobody goes to sleep while another may still need him to move bytes.
        dist.barrier()
        with torch.no_grad():
            checksum = sum(float(each.double().sum()) for each in self._model.parameters())
        return Timed(durations_s, cpu_s, checksum)

    def _step(self) -> None:
        loss = self._model(self._data).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
