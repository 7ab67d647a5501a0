"""A parameter server and its workers on hosts of either world, learning the convex task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hcsim.compressors.registry import make
from hcsim.config import AnyFault
from hcsim.runtime.channel import Listener
from hcsim.runtime.host import Host
from hcsim.training.data import Batches
from hcsim.training.learner import Learner, digest
from hcsim.training.optimizer import Sgd
from hcsim.training.parameter_server.gradients import GradientCodec, ReceivedPush
from hcsim.training.parameter_server.messages import Push, TrainingDone
from hcsim.training.parameter_server.rounds import ServerPolicy, ServerRounds
from hcsim.training.parameter_server.server import Server, WorkerRecord, recall, records
from hcsim.training.parameter_server.worker import Worker
from hcsim.training.tasks import task
from hcsim.virtual.world import World
from tests.switches import on_switch

SEED = 5
SIZES = (16, 8, 4)
NAMES = ("a", "b", "c")
"""Of the workers, and of their hosts in the virtual world."""
BATCHES = Batches(1024, SIZES, SEED)
OPTIMIZER = Sgd(lr=0.05, momentum=0.9)
POLICY = ServerPolicy(quorum=1, deadline_s=2.0, grace_s=0.5, patience_s=20.0, linger_s=2.0)
JOB = "bench"


def world_with(*faults: AnyFault) -> World:
    """A host for the server, `s`, and three for workers on a slow switch: a round takes about 15 ms."""
    return World(on_switch(("s", *NAMES), faults, rate="10 Mb/s", latency="0.5 ms"))


def learner_on(host: Host) -> Learner:
    return Learner(host, task("convex"), OPTIMIZER, SEED)


class Saved(NamedTuple):
    """A server's state."""

    version: int
    workers: dict[str, WorkerRecord]
    parameters: np.ndarray
    optimizer: dict[str, np.ndarray]


class Bench:
    """A server on a host."""

    def __init__(
        self,
        host: Host,
        total: int,
        *,
        policy: ServerPolicy = POLICY,
        compressor: str = "none",
        saved: Saved | None = None,
        awaited: Sequence[str] = NAMES,
    ) -> None:
        self.learner = learner_on(host)
        self.host = host
        self.rounds = ServerRounds(policy, total, awaited=awaited, now=host.clock.elapsed())
        if saved is not None:
            np.copyto(self.learner.replica.parameters, saved.parameters)  # type: ignore[arg-type]
            self.learner.stepper.restore(saved.optimizer)
            self.rounds.version = saved.version
            recall(saved.workers, self.rounds, host.clock.elapsed())
        gradients = GradientCodec(self.learner.layout, make(compressor, seed=SEED, rank=0))
        self.server = Server(self.learner, gradients, self.rounds, self._update, job=JOB)
        self.serving: asyncio.Task[TrainingDone]
        self.listener: Listener

    async def _update(self, number: int, share: float) -> None:
        await self.learner.update(OPTIMIZER.lr * share)

    def save_to(self, keep: Callable[[Saved], Awaitable[None]]) -> None:
        """Give away the state after every update, before anybody is told of it."""

        async def updated(received: list[ReceivedPush]) -> None:
            parameters, stepper = self.learner.replica.parameters.copy(), self.learner.stepper  # type: ignore[union-attr]
            await keep(Saved(self.rounds.version, records(self.rounds), parameters, stepper.state()))

        self.server.before_telling = updated

    async def open(self, address: str) -> Listener:
        self.listener = await self.host.listen(address)
        self.serving = self.host.spawn(self.server.run(self.listener), name="server")
        return self.listener

    async def stop(self) -> None:
        """As if it were killed, except that its connections are closed."""
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        await self.listener.close()

    @property
    def digest(self) -> str | None:
        return digest(self.learner.replica.parameters)


class Recorder(GradientCodec):
    """Keeps what was packed, by version, and what that unpacks to."""

    packed: dict[int, tuple[np.ndarray, np.ndarray]]

    def pack(self, gradients: Any, samples: int, version: int) -> Any:
        sizes, data = super().pack(gradients, samples, version)
        self.packed[version] = gradients.copy(), self.unpack(Push(1, version, 1, self.compressor.spec, sizes), data)
        return sizes, data


def worker_on(host: Host, name: str, *, policy: ServerPolicy = POLICY, compressor: str = "none") -> Worker:
    learner = learner_on(host)
    gradients = Recorder(learner.layout, make(compressor, seed=SEED, rank=NAMES.index(name)))
    gradients.packed = {}
    return Worker(learner, gradients, policy, name=name, job=JOB)


def of_the_round(name: str) -> Callable[[int, int], Any]:
    """Its part of the batch that everybody shares in this version."""
    return lambda version, accepted: BATCHES.batch(version, NAMES.index(name))


def of_its_own(name: str) -> Callable[[int, int], Any]:
    return lambda version, accepted: BATCHES.own(NAMES.index(name), accepted)


class Job:
    """A whole job in the virtual world: what became of the server (`s`) and of each worker, and the books."""

    def __init__(self, world: World, bench: Bench | None = None, **options: Any) -> None:
        self.world = world
        self.policy: ServerPolicy = options.get("policy", POLICY)
        self.compressor: str = options.get("compressor", "none")
        self.bench = bench or Bench(world.host("s"), **options)
        self.batch: Callable[[str], Callable[[int, int], Any]] = (
            of_the_round if self.policy.mode == "sync" else of_its_own
        )
        self.counted: list[tuple[str, int]] = []
        """Worker and version of every push that counted, as the workers were told."""
        self.digests: dict[str, str | None] = {}
        self.workers: dict[str, Worker] = {}

    def run(self) -> dict[str, Any]:
        results = self.world.run_on_all(self.on_host)
        return {host.name: result for host, result in zip(self.world.hosts, results, strict=True)}

    async def on_host(self, host: Any) -> Any:
        if host.name == "s":
            await self.bench.open("s:7000")
            return await self.bench.serving
        worker = worker_on(host, host.name, policy=self.policy, compressor=self.compressor)
        self.workers[host.name] = worker

        async def counted(version: int, loss: float) -> None:
            self.counted.append((host.name, version))

        done = await worker.run("s:7000", self.batch(host.name), counted)
        self.digests[host.name] = digest(worker.learner.replica.parameters)
        return done


def alone(steps: int) -> np.ndarray:
    """The parameters after so many steps of one process with the joined batches."""
    replica = task("convex").replica(SEED)
    stepper = OPTIMIZER.open(replica.parameters)
    for step in range(steps):
        replica.gradients[:] = 0
        replica.forward(np.concatenate([BATCHES.batch(step, rank) for rank in range(len(SIZES))]))
        for block in reversed(range(len(replica.layout.blocks))):
            replica.backward(block)
        stepper.step(replica.gradients)
    return replica.parameters
