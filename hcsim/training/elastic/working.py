"""A member's worker, which stays what it is from view to view, and only calls another server."""

from __future__ import annotations

import asyncio

from hcsim.collectives.group import Group
from hcsim.errors import DeadlineExceeded, GradientsRefused
from hcsim.runtime.host import Host
from hcsim.training.data import Batches
from hcsim.training.elastic.keeper import Pulled, Start, State
from hcsim.training.parameter_server.messages import UNKNOWN, Done
from hcsim.training.parameter_server.rounds import Policy
from hcsim.training.parameter_server.server import Server
from hcsim.training.parameter_server.worker import Worker
from hcsim.training.run import Run
from hcsim.training.task import Indices


class Working:
    """The worker, what it works on, and what is noted of that."""

    def __init__(self, host: Host, worker: Worker, policy: Policy) -> None:
        self.worker = worker
        self.task: asyncio.Task[Done | None] | None = None
        self.run: Run | None = None
        """From the first view on."""
        self.start = Start()
        """Of this view."""
        self.per_step = 1
        """Updates in a step."""
        self._host = host
        self.policy = policy
        self._noted = 0
        self._loss = float("nan")
        self._server: Server | None = None
        """Of ours, in this view."""
        self._served_bytes = 0
        """Sent by servers that we were, less what our worker sent to them."""
        self._before_serving = 0

    @property
    def ended(self) -> bool:
        """Whether it works no more."""
        return self.task is not None and self.task.done()

    @property
    def done(self) -> Done | None:
        """The end that it has come to, with the final model; None: it has not."""
        task = self.task
        return task.result() if task is not None and task.done() and task.exception() is None else None

    @property
    def gave_up(self) -> DeadlineExceeded | GradientsRefused | None:
        """Why, if its server was out of reach or one of the two is not well: it begins anew with the next one that it
        is told of."""
        error = self.task.exception() if self.task is not None and self.task.done() else None
        return error if isinstance(error, DeadlineExceeded | GradientsRefused) else None

    @property
    def pulled(self) -> Pulled:
        """What it has of the server's."""
        return Pulled(self.worker.version, self.worker.learner.replica.parameters, self.start)

    def begin(self, group: Group, run: Run, batches: Batches, start: Start) -> None:
        """Go on with the ranks of another view; its server is told of later."""
        self.start = start
        self.per_step = 1 if self.policy.mode == "sync" else group.size
        self.run = run
        run.regroup(group, batches, self.worker.gradients.compressor)

    async def call(self, address: str) -> None:
        """Go on with the server that is there; empty: there is none for now."""
        await self.worker.redirect(address)
        if address and (self.task is None or self.gave_up):
            self.task = self._host.spawn(self.worker.run(address, self._batch, self._counted), name="worker")

    def pull_again(self) -> None:
        """The model that it came to the end with is not the server's: it begins anew with the next one's."""
        assert self.ended
        self.task = None
        self.worker.version, self.worker.done = UNKNOWN, None

    async def close(self) -> None:
        """End it."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    def step_of(self, version: int) -> int:
        """How many steps lead to this version."""
        return self.start.step + (version - self.start.version) // self.per_step

    def after(self, state: State) -> Start:
        """Where the next view begins, if it goes on from this state of the last one."""
        return self._start_at(state.version, Start(*state.since, state.step))

    def at(self, version: int) -> Start:
        """Where a view would begin that went on from this version of ours."""
        return self._start_at(version, self.start)

    def _start_at(self, version: int, since: Start) -> Start:
        position = since.position
        if version != since.version and self.run is not None and self.policy.mode == "sync":
            position = self.run.batches.position(version)
        return Start(version, position, since.step + (version - since.version) // self.per_step)

    def _batch(self, version: int, accepted: int) -> Indices | None:
        assert self.run is not None
        batches, rank = self.run.batches, self.run.group.rank
        if self.policy.mode == "sync":
            return batches.batch(max(version, self.start.version), rank)
        return batches.own(rank, accepted) if len(batches.shard(rank)) else None

    # What is noted.

    async def _counted(self, version: int, loss: float) -> None:
        self._loss = loss
        await self.note(version)

    async def note(self, version: int) -> None:
        """Note the step that this version completes, if it is not noted yet."""
        assert self.run is not None
        step = self.step_of(version)
        if step > self._noted:
            self._noted = self.run.step = step
            self.count_bytes()
            await self.run.note(step, self._loss)

    def serves(self, server: Server | None) -> None:
        """Our machine has this server now; None: it has none any more."""
        if self._server is not None:
            self._served_bytes += self._sent_by(self._server)
        self._server, self._before_serving = server, self.worker.sent_bytes

    def count_bytes(self) -> None:
        """What crosses the network: a worker beside its server speaks over the machine's own loopback."""
        assert self.run is not None
        serving = self._sent_by(self._server) if self._server is not None else 0
        self.run.other_sent_bytes = self._served_bytes + serving + self.worker.sent_bytes

    def _sent_by(self, server: Server) -> int:
        near = self.worker.sent_bytes - self._before_serving
        return server.reception.sent_bytes(without=self.worker.name) - near
