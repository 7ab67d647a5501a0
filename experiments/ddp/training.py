"""A turn of training: digits, by a network wide enough to keep a slow link busy, until the loss is low enough.

The loss that counts is over samples that are not trained on, and all ranks compute it alike, every few steps.
"""

from __future__ import annotations

from time import perf_counter, process_time

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hcsim.rng import generator
from hcsim.training.tasks.torch_task import digits

WIDTH = 1024
BATCH = 64
"""Of all ranks together."""
LR, MOMENTUM = 0.05, 0.9
LOOK_EVERY = 5
MOST_STEPS = 400


class Training(msgspec.Struct, frozen=True, tag=True):
    """Train a new model until its loss is no more than this."""

    target_loss: float
    compression: str = ""
    """Of hcsim's hook; empty: none."""


class Trained(msgspec.Struct, frozen=True):
    """How it went on one rank."""

    steps: int
    duration_s: float
    cpu_s: float
    loss: float


class Trainer:
    """DDP on this rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._task = digits()
        self._runs = 0

    def take(self, turn: Training) -> Trained:
        """Train."""
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
        )
        ddp = DistributedDataParallel(model, bucket_cap_mb=2)
        if turn.compression:
            self._compress(ddp, model, turn.compression)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        dist.barrier()
        began_s, cpu_began_s = perf_counter(), process_time()
        steps, loss = 0, float("inf")
        while loss > turn.target_loss and steps < MOST_STEPS:
            optimizer.zero_grad()
            self._loss(ddp, steps).backward()
            optimizer.step()
            steps += 1
            if steps % LOOK_EVERY == 0:
                loss = self._held_out(model)
        return Trained(steps, perf_counter() - began_s, process_time() - cpu_began_s, loss)

    def _loss(self, ddp: nn.Module, step: int) -> torch.Tensor:
        data, size = self._task.training, dist.get_world_size()
        batch = generator(0, "batch", step).choice(len(data.targets), BATCH, replace=False)
        ours = torch.from_numpy(np.asarray(batch[self._rank :: size]))
        return nn.functional.cross_entropy(ddp(data.inputs[ours]), data.targets[ours])

    def _held_out(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(self._task.held_out.inputs), self._task.held_out.targets))

    def _compress(self, ddp: DistributedDataParallel, model: nn.Module, compression: str) -> None:
        from hcsim.torch_backend.hooks import CompressionState, compression_hook

        # Each run owes what it owes to its own model.
        self._runs += 1
        state = CompressionState(model, compression, name=f"run {self._runs}")
        ddp.register_comm_hook(state, compression_hook)
