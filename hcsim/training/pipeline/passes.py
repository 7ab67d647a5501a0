"""The passes of one stage in a step: microbatches come from the stage before, and their gradients from the one after.

Every message is sent as soon as it is computed and is not waited for; the receive of the next one is posted while this
one is computed. So the network works while the device does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np

from hcsim.collectives.group import Group
from hcsim.collectives.scheduler import Handle
from hcsim.runtime.channel import Phantom
from hcsim.training.learner import Learner
from hcsim.training.pipeline.schedule import Schedule, turns
from hcsim.training.task import Flat, Indices, StageReplica, Task, backward_work, forward_work

_ACTIVATIONS, _GRADIENTS = 0, 1
"""Tags of messages."""
AHEAD = 1
"""The receives that are posted before their turn."""


def microbatches(batch: Indices, number: int) -> list[Indices]:
    """Cut a batch into so many nearly equal parts, or into single samples if there are fewer."""
    return list(np.array_split(batch, min(number, len(batch)))) if len(batch) else []


class StagePorts:
    """What comes over the boundaries of a stage, in elements for each sample; 0: nothing does."""

    def __init__(self, pipe: Group, element_bytes: int, activations: int, gradients: int, *, phantom: bool) -> None:
        self.pipe = pipe
        self.activations = activations
        """From the stage before."""
        self.gradients = gradients
        """From the stage after."""
        self._element_bytes = element_bytes
        self._phantom = phantom

    def buffer(self, elements: int) -> Flat:
        if self._phantom:
            return Phantom(self._element_bytes * elements, self._element_bytes)
        return np.empty(elements, np.float32)


class StagePasses:
    """The passes of a step."""

    def __init__(
        self, learner: Learner, task: Task, replica: StageReplica, ports: StagePorts, schedule: Schedule
    ) -> None:
        self._learner = learner
        self._task = task
        self._replica = replica
        self._ports = ports
        self._pipe = ports.pipe
        self._schedule: Schedule = schedule
        self._sending: list[Handle[Flat]] = []

    async def run(self, parts: Sequence[Indices], ready: Callable[[int], Awaitable[None]]) -> float:
        """Compute the gradients of these microbatches in place; return the mean loss on the last stage. `ready` is
        called with each block when its gradients are complete."""
        gradients, samples = self._replica.gradients, sum(map(len, parts))
        if not isinstance(gradients, Phantom):
            gradients.fill(0.0)
        if not parts:
            for block in reversed(range(len(self._task.blocks))):
                await ready(block)
            return float("nan")
        stage, stages, ports = self._pipe.rank, self._pipe.size, self._ports
        sizes = list(map(len, parts))
        activations = _Inbox(ports, stage - 1, _ACTIVATIONS, [ports.activations * size for size in sizes])
        coming = _Inbox(ports, stage + 1, _GRADIENTS, [ports.gradients * size for size in sizes])
        loss = 0.0
        for kind, number in turns(self._schedule, stage, stages, len(parts)):
            if kind == "F":
                share = sizes[number] / samples
                loss += share * await self._forward(number, parts[number], activations, share)
            else:
                last = ready if number == len(parts) - 1 else None
                await self._backward(number, sizes[number], coming, last)
        with self._learner.ledger.spent_on("exchange", "last messages"):
            for handle in self._sending:
                await handle
        self._sending.clear()
        return loss

    async def _forward(self, number: int, batch: Indices, activations: _Inbox, share: float) -> float:
        entering = await self._take(activations, number, f"activations {number}")
        work = forward_work(self._task, len(batch))
        compute = partial(self._replica.forward_stage, number, batch, entering, share)
        loss, leaving = await self._learner.run(work, compute, f"forward {number}")
        if leaving is not None:
            self._send(leaving, self._pipe.rank + 1, _ACTIVATIONS)
        return loss

    async def _backward(
        self, number: int, samples: int, coming: _Inbox, ready: Callable[[int], Awaitable[None]] | None
    ) -> None:
        gradient: Flat | None = await self._take(coming, number, f"gradients {number}")
        back: Flat | None = None
        for block in reversed(range(len(self._task.blocks))):
            last = ready is not None
            compute = partial(self._replica.backward_stage, number, block, gradient, last=last)
            work = backward_work(self._task.blocks[block], samples)
            name = f"backward {number}, block {self._task.blocks[block].name}"
            back = await self._learner.run(work, compute, name, self._learner.gradients_of(block) if last else None)
            gradient = None
            if ready is not None:
                await ready(block)
        if back is not None:
            self._send(back, self._pipe.rank - 1, _GRADIENTS)

    async def _take(self, inbox: _Inbox, number: int, what: str) -> Flat | None:
        if not inbox.is_used:
            return None
        inbox.post(number + AHEAD)
        with self._learner.ledger.spent_on("exchange", what):
            return await inbox.take(number)

    def _send(self, data: Flat, to: int, tag: int) -> None:
        self._sending = [handle for handle in self._sending if not handle.done()]
        self._sending.append(self._pipe.send(data, to, tag=tag))


class _Inbox:
    """The messages of a step from one neighbour, in order."""

    def __init__(self, ports: StagePorts, source: int, tag: int, lengths: Sequence[int]) -> None:
        self._ports = ports
        self._source = source
        self._tag = tag
        self._lengths = lengths
        self._posted: list[Handle[Flat] | None] = []
        self.is_used = any(lengths)
        if self.is_used:
            self.post(AHEAD - 1)

    def post(self, number: int) -> None:
        """Post the receives up to this one."""
        while len(self._posted) <= min(number, len(self._lengths) - 1):
            buffer = self._ports.buffer(self._lengths[len(self._posted)])
            self._posted.append(self._ports.pipe.recv(buffer, self._source, tag=self._tag))

    async def take(self, number: int) -> Flat:
        handle = self._posted[number]
        assert handle is not None
        self._posted[number] = None  # it holds what is to be freed
        return await handle
