"""A parameter server for a group of ranks: the first one's machine has the server, and every rank has a worker.

In sync mode a round is a step, with the batches that data parallelism would use: the result is that of one process
with the joined batch. Otherwise a step is as many pushes as there are ranks, and each worker goes through a shard of
its own. The group serves only to tell where the server listens (see `place`); afterwards ranks may be lost.

The first rank's worker speaks to the server as the others do, over its machine's own loopback. That crosses no
network, so it is not counted in the bytes sent.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from copy import copy

import numpy as np
from msgspec.structs import replace

from hcsim.errors import CollectiveError
from hcsim.training.parameter_server.gradients import Gradients
from hcsim.training.parameter_server.messages import Done
from hcsim.training.parameter_server.place import address_of, listen
from hcsim.training.parameter_server.rounds import Policy, Rounds
from hcsim.training.parameter_server.server import Server
from hcsim.training.parameter_server.worker import Worker
from hcsim.training.run import Run
from hcsim.training.task import Indices


async def train(run: Run, policy: Policy) -> None:
    """Train; in the end all ranks hold the server's model."""
    timeout_s = run.settings.timeout_s
    await _Rank(run, replace(policy, patience_s=timeout_s, deadline_s=min(policy.deadline_s, timeout_s / 2))).train()


class _Rank:
    """One rank's part: its worker and, on the first, the server."""

    def __init__(self, run: Run, policy: Policy) -> None:
        self._run = run
        self._policy = policy
        self._world = run.group.size
        self._per_step = 1 if policy.mode == "sync" else self._world
        """Updates in a step."""
        self._names = [f"{rank:05d}" for rank in range(self._world)]
        self._secret = self._drawn() if run.settings.server is not None and run.group.rank == 0 else (0, 0)
        self._gradients = Gradients(run.learner.layout, run.compressor)
        self._server = self._opened() if run.group.rank == 0 else None
        self._learner = run.learner
        if self._server is not None:
            # The server has the learner; the worker beside it computes with a copy of the model.
            self._learner = copy(run.learner)
            self._learner.replica = run.task.replica(0, run.group.host.device.torch_name)
        self._worker: Worker | None = None
        self._step = 0
        self._loss = float("nan")

    async def train(self) -> None:
        """Serve, work, or both."""
        group, settings = self._run.group, self._run.settings
        told = np.array([0, *self._secret], np.int64)
        near = ""
        async with AsyncExitStack() as stack:
            if self._server is not None:
                listener, told[0] = await listen(group.host, settings, group.addresses[0])
                stack.push_async_callback(listener.close)
                stack.push_async_exit(_Serving(group.host.spawn(self._server.run(listener), name="parameter server")))
                near = listener.address
            await group.broadcast(told if settings.server is not None else told[:1])
            port, *secret = (int(number) for number in told)
            address = near if settings.server is not None and near else address_of(settings, group.addresses[0], port)
            done = await self._hired(self._job(*secret)).run(address, self._batch, self._counted)
        assert done is not None  # nobody retires from a group of fixed ranks
        await self._note(done.version)
        self._count_bytes()

    def _hired(self, job: str) -> Worker:
        name = self._names[self._run.group.rank]
        self._worker = Worker(self._learner, self._gradients, self._policy, name=name, job=job)
        return self._worker

    def _job(self, *secret: int) -> str:
        name = f"epoch {self._run.group.epoch}"
        return f"{name} {'-'.join(f'{part:016x}' for part in secret)}" if any(secret) else name

    def _drawn(self) -> tuple[int, int]:
        """What only the group's ranks know."""
        draw = self._run.group.host.rng("parameter server", "secret", self._run.group.epoch)
        return draw.getrandbits(63), draw.getrandbits(63)

    def _opened(self) -> Server:
        run = self._run
        total, now = self._per_step * run.settings.steps, run.group.host.clock.elapsed()
        rounds = Rounds(self._policy, total, awaited=self._names, now=now)
        server = Server(run.learner, self._gradients, rounds, self._update, job=self._job(*self._secret))
        server.reception.members_only = True
        return server

    async def _update(self, number: int, share: float) -> None:
        run = self._run
        await run.update(number // self._per_step, share)

    def _batch(self, version: int, accepted: int) -> Indices | None:
        batches, rank = self._run.batches, self._run.group.rank
        if self._policy.mode == "sync":
            return batches.batch(version, rank)
        return batches.own(rank, accepted) if len(batches.shard(rank)) else None

    async def _counted(self, version: int, loss: float) -> None:
        self._loss = loss
        await self._note(version)

    async def _note(self, version: int) -> None:
        """Note the step that this version completes, if it is not noted yet."""
        step = version // self._per_step
        if step > self._step:
            self._step = step
            self._count_bytes()
            await self._run.note(step, self._loss)

    def _count_bytes(self) -> None:
        worker, server = self._worker, self._server
        assert worker is not None
        sent = worker.sent_bytes if server is None else server.reception.sent_bytes(without=worker.name)
        self._run.other_sent_bytes = sent


class _Serving:
    """A server that outlives its machine's worker, for the others' sake, but not a group that never met."""

    def __init__(self, task: asyncio.Task[Done]) -> None:
        self._task = task

    async def __aenter__(self) -> _Serving:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, asyncio.CancelledError | CollectiveError):
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        else:
            await self._task
