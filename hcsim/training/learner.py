"""One rank's part of a training run: its replica, its device, and where its time went."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from hcsim.runtime.channel import Phantom
from hcsim.runtime.device import Work
from hcsim.runtime.host import Host
from hcsim.training.optimizer import Optimizer
from hcsim.training.task import Flat, Indices, Task, backward_work, forward_work

T = TypeVar("T")


class Ledger:
    """Seconds by what they were spent on, on this rank's clock."""

    def __init__(self, host: Host) -> None:
        self._clock = host.clock
        self.seconds = dict.fromkeys(("compute", "encode", "exchange"), 0.0)

    @contextmanager
    def spent_on(self, what: str) -> Iterator[None]:
        """Book the time that passes in this block."""
        start_s = self._clock.elapsed()
        try:
            yield
        finally:
            self.seconds[what] += self._clock.elapsed() - start_s


class Learner:
    """Computes gradients and applies updates on this rank's device."""

    def __init__(self, host: Host, task: Task, optimizer: Optimizer, seed: int) -> None:
        self.host = host
        self.task = task
        self.ledger = Ledger(host)
        self.replica = task.replica(seed, host.device.torch_name)
        self.layout = self.replica.layout
        self.stepper = optimizer.open(self.replica.parameters)
        self._update_work = optimizer.work(self.layout.length)

    async def gradients(self, batch: Indices, ready: Callable[[int], Awaitable[None]] | None = None) -> float:
        """The mean loss over the batch, its gradients in place; `ready` is told each block when it is done.

        An empty batch has no loss, and gradients of zero."""
        gradients = self.replica.gradients
        if not isinstance(gradients, Phantom):
            gradients.fill(0.0)
        loss = float("nan")
        if len(batch):
            loss = await self.run(forward_work(self.task, len(batch)), partial(self.replica.forward, batch))
        for block in reversed(range(len(self.task.blocks))):
            if len(batch):
                work = backward_work(self.task.blocks[block], len(batch))
                await self.run(work, partial(self.replica.backward, block), self._gradients_of(block))
            if ready is not None:
                await ready(block)
        return loss

    async def update(self, lr: float) -> None:
        """One step of the optimizer with the gradients that are in place."""
        await self.run(self._update_work, partial(self.stepper.step, self.replica.gradients, lr))

    async def run(self, work: Work, function: Callable[[], T], into: memoryview | None = None) -> T:
        """Compute something on the device, and book its time."""
        with self.ledger.spent_on("compute"):
            return await self.host.device.run(work, function, into)

    def _gradients_of(self, block: int) -> memoryview | None:
        tensors, gradients = self.layout.blocks[block], self.replica.gradients
        if isinstance(gradients, Phantom) or not tensors:
            return None
        return gradients[tensors[0].offset : tensors[-1].span.stop].data


def digest(parameters: Flat) -> str | None:
    """SHA-256 over the parameters' bits; None for a phantom."""
    return None if isinstance(parameters, Phantom) else hashlib.sha256(parameters.data).hexdigest()
