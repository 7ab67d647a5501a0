"""A parameter server on a group of ranks: the server is on the first rank's machine, and every rank has a worker.

A `Participant` is one member of the group: its worker, the learner and run of the worker, and the server. If
the group's ranks are fixed, it starts from nothing and works to the end. The group then serves only to
distribute the server's address; afterwards ranks may be lost. If members come and go
(`hcsim.training.elastic.parameter_server`), it begins every view from the version that the last one reached, and its
worker only connects to another server. The rounds are the same.

In sync mode a round is a step, with the batches that data parallelism would use: the result is that of one
process with the joined batch. Otherwise a step is as many pushes as there are ranks, and each worker goes
through a shard of its own.

The worker beside the server connects over its machine's loopback. That crosses no network, so it is not counted
in the bytes sent.

By default, the server listens on a free port of its machine's address in the group. With `server` and `listen`
it may be behind a tunnel or a reverse proxy: workers connect to `server`, and the tunnel leads to `listen`. The
worker beside the server connects to it directly.

A tunnel accepts connections from any host. In a cluster, members authenticate on every channel. Fixed ranks get
the job's name over their group, with a secret number in it; the server rejects workers without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from copy import copy
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from hcsim.config.training import Training
from hcsim.errors import CollectiveError, ConfigError, DeadlineExceeded, GradientsRefused
from hcsim.runtime.address import Target, address_at, hosts_of, parse
from hcsim.runtime.channel import Listener
from hcsim.runtime.host import Host
from hcsim.training.learner import Learner
from hcsim.training.parameter_server.gradients import GradientCodec
from hcsim.training.parameter_server.messages import UNKNOWN, TrainingDone
from hcsim.training.parameter_server.rounds import ServerPolicy, ServerRounds
from hcsim.training.parameter_server.server import Server
from hcsim.training.parameter_server.worker import Worker
from hcsim.training.run import Run
from hcsim.training.task import Indices


class ViewStart(NamedTuple):
    """Where a view begins; fixed ranks begin with the defaults."""

    version: int = 0
    position: int = 0
    """The number of samples dealt out before this version; meaningless in modes where each worker has its own."""
    step: int = 0
    """The step of this version."""


def policy_of(chosen: ServerPolicy, settings: Training) -> ServerPolicy:
    """Return the chosen policy, with the time limit of the settings applied."""
    timeout_s = settings.timeout_s
    return replace(chosen, patience_s=timeout_s, deadline_s=min(chosen.deadline_s, timeout_s / 2))


def beside_server(learner: Learner, seed: int) -> Learner:
    """Return the learner of the worker on the server's machine: a replica of its own, as the server has `learner`."""
    beside = copy(learner)
    beside.replica = learner.task.replica(seed, learner.host.device.torch_name)
    return beside


class Participant:
    """A member of the group: a worker and, if it is its turn, the server."""

    def __init__(self, learner: Learner, gradients: GradientCodec, policy: ServerPolicy) -> None:
        """`learner` is the worker's."""
        self.learner = learner
        self.gradients = gradients
        self.policy = policy
        self.run: Run | None = None
        """Set from the first view on."""
        self.start = ViewStart()
        """Where this view began."""
        self.lr = 0.0
        """The learning rate of the last update made by a server of this participant."""
        self._per_step = 1
        """Updates in a step."""
        self._worker: Worker | None = None
        self._task: asyncio.Task[TrainingDone | None] | None = None
        """The worker's task, which outlives a view."""
        self._noted = 0
        self._loss = float("nan")
        self._server: Server | None = None
        """This participant's server in this view, if any."""
        self._served_bytes = 0
        """Bytes sent by earlier servers of this participant, without those to its own worker."""
        self._before_serving = 0

    def hire(self, name: str, job: str) -> Worker:
        """Create the worker for all views."""
        self._worker = Worker(self.learner, self.gradients, self.policy, name=name, job=job)
        return self._worker

    @property
    def worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    def begin(self, run: Run, start: ViewStart) -> None:
        """Begin a view with its ranks; the address of its server follows later."""
        self.run, self.start = run, start
        self._per_step = 1 if self.policy.mode == "sync" else run.group.size

    def open_server(self, learner: Learner, names: Iterable[str], version: int, *, job: str) -> Server:
        """Create the server on this machine, with this learner's model. It goes on from `version`, with workers of
        these names."""
        assert self.run is not None
        total = version + (self.run.settings.steps - self.start.step) * self._per_step
        rounds = ServerRounds(self.policy, total, awaited=names, now=learner.host.clock.elapsed())
        rounds.version = version
        self._server, self._before_serving = None, self._sent_by_worker
        server = self._server = Server(learner, self.gradients, rounds, self._update, job=job)
        return server

    async def _update(self, number: int, share: float) -> None:
        assert self.run is not None
        step = self.step_of(number)
        self.lr = self.run.lr(step) * share
        await self.run.update(step, share)

    def close_server(self) -> None:
        """Forget the server, which this machine no longer has, and keep its count of bytes."""
        if self._server is not None:
            self._served_bytes += self._sent_by(self._server)
            self._server = None

    # The worker.

    async def work(self, address: str) -> TrainingDone | None:
        """Work to the end for the server at that address, or where the worker is redirected to."""
        return await self.worker.run(address, self._batch, self._counted)

    async def call(self, address: str) -> None:
        """Go on with the server at that address, in the background; an empty address means that there is none for
        now."""
        await self.worker.redirect(address)
        if address and (self._task is None or self.gave_up):
            self._task = self.learner.host.spawn(self.work(address), name="worker")

    @property
    def ended(self) -> bool:
        return self._task is not None and self._task.done()

    def result(self) -> TrainingDone | None:
        """Return how the worker ended; None if it has retired with no residual."""
        assert self._task is not None
        return self._task.result()

    @property
    def done(self) -> TrainingDone | None:
        """The end of training, once the worker has the final model; otherwise None."""
        task = self._task
        return task.result() if task is not None and task.done() and task.exception() is None else None

    @property
    def gave_up(self) -> DeadlineExceeded | GradientsRefused | None:
        """The error, if the worker could not reach its server or its gradients were rejected. The worker starts
        again with the next server."""
        error = self._task.exception() if self._task is not None and self._task.done() else None
        return error if isinstance(error, DeadlineExceeded | GradientsRefused) else None

    def pull_again(self) -> None:
        """Discard the final model, which differs from the server's. The worker starts again with the next server."""
        assert self.ended
        self._task = None
        self.worker.version, self.worker.done = UNKNOWN, None

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _batch(self, version: int, accepted: int) -> Indices | None:
        assert self.run is not None
        batches, rank = self.run.batches, self.run.group.rank
        if self.policy.mode == "sync":
            return batches.batch(max(version, self.start.version), rank)
        return batches.own(rank, accepted) if len(batches.shard(rank)) else None

    # Versions and steps.

    def step_of(self, version: int) -> int:
        """Return the number of steps that lead to this version."""
        return self.start.step + (version - self.start.version) // self._per_step

    def start_at(self, version: int, since: ViewStart) -> ViewStart:
        """Return where the next view begins, if it goes on from this version of a view that began `since`."""
        position = since.position
        if version != since.version and self.run is not None and self.policy.mode == "sync":
            position = self.run.batches.position(version)
        return ViewStart(version, position, since.step + (version - since.version) // self._per_step)

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

    def count_bytes(self) -> None:
        """Update the run's count of bytes sent over the network."""
        assert self.run is not None
        serving = self._sent_by(self._server) if self._server is not None else 0
        self.run.other_sent_bytes = self._served_bytes + serving + self._sent_by_worker

    def _sent_by(self, server: Server) -> int:
        near = self._sent_by_worker - self._before_serving
        return server.reception.sent_bytes(without=self.worker.name) - near

    @property
    def _sent_by_worker(self) -> int:
        return self._worker.sent_bytes if self._worker is not None else 0


_EVERYWHERE = ("0.0.0.0", "::")
_CARRIERS = {"wss": "ws"}
"""Schemes with and without TLS use the same carrier: the tunnel may terminate TLS."""


def check_place(settings: Training, *, has_server: bool) -> None:
    """Reject settings that place the server where it cannot be, or where no worker can connect."""
    server, listen = settings.server, settings.listen
    if server is None and listen is None:
        return
    if not has_server:
        name = "listen" if server is None else "server"
        raise ConfigError(f'{name} = "{server or listen}": {settings.strategy} has no server; a parameter_server has')
    if server is None:
        raise ConfigError(f'listen = "{listen}": give server too: where do workers call, to be led there?')
    if listen is None:
        raise ConfigError(
            f'server = "{server}": give listen too: where is what comes there led to? '
            'For a tunnel that begins on the same machine, listen = "ws://127.0.0.1:8080"'
        )
    there, here = _parsed("server", server), _parsed("listen", listen)
    if any(host in _EVERYWHERE for host in there.hosts):
        raise ConfigError(f'server = "{server}": that is every machine and none; give a name or an address to call')
    for name, target in (("server", there), ("listen", here)):
        if target.port == 0:
            raise ConfigError(f'{name} = "{target.text}": give the port; a tunnel has to know it')
    if _carrier(there) != _carrier(here):
        raise ConfigError(
            f'server = "{server}" and listen = "{listen}" are of unlike kinds: nothing leads from one to the other'
        )


def address_of(settings: Training, first: str, port: int) -> str:
    """Return where workers connect to a server on the first member's machine, which listens on that port."""
    return settings.server or address_at(hosts_of(first)[0], port)


async def listen(host: Host, settings: Training, first: str) -> tuple[Listener, int]:
    listener = await host.listen(settings.listen or address_at(hosts_of(first)[0], 0))
    return listener, parse(listener.address).port


def _parsed(name: str, text: str) -> Target:
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{name} = {error}") from None


def _carrier(target: Target) -> str:
    return _CARRIERS.get(target.scheme, target.scheme)


async def train(run: Run, policy: ServerPolicy) -> None:
    """Train with fixed ranks: none joins or leaves, and in the end all hold the server's model.

    In a cluster the members of a view compare and hand over their states before it begins, and check whether it
    has ended while they work (`hcsim.training.elastic.parameter_server`). Fixed ranks need neither."""
    group, settings, learner = run.group, run.settings, run.learner
    serves = group.rank == 0
    names = [f"{rank:05d}" for rank in range(group.size)]
    told = np.array([0, *(_drawn(run) if settings.server is not None and serves else (0, 0))], np.int64)
    gradients = GradientCodec(learner.layout, run.compressor)
    # The policy's time limits are those of the settings, as in a cluster.
    us = Participant(beside_server(learner, 0) if serves else learner, gradients, policy_of(policy, settings))
    us.begin(run, ViewStart())
    near = ""
    async with AsyncExitStack() as stack:
        if serves:
            server = us.open_server(learner, names, 0, job=_job(run, *told[1:].tolist()))
            server.reception.members_only = True
            listener, told[0] = await listen(group.host, settings, group.addresses[0])
            stack.push_async_callback(listener.close)
            stack.push_async_exit(_Serving(group.host.spawn(server.run(listener), name="parameter server")))
            near = listener.address
        await group.broadcast(told if settings.server is not None else told[:1])
        port, *secret = (int(number) for number in told)
        us.hire(names[group.rank], _job(run, *secret))
        address = near if settings.server is not None and near else address_of(settings, group.addresses[0], port)
        done = await us.work(address)
    assert done is not None  # nobody retires from a group of fixed ranks
    await us.note(done.version)
    us.count_bytes()


def _job(run: Run, *secret: int) -> str:
    name = f"epoch {run.group.epoch}"
    return f"{name} {'-'.join(f'{part:016x}' for part in secret)}" if any(secret) else name


def _drawn(run: Run) -> tuple[int, int]:
    """Draw numbers that only the group's ranks know."""
    draw = run.group.host.rng("parameter server", "secret", run.group.epoch)
    return draw.getrandbits(63), draw.getrandbits(63)


class _Serving:
    """Keeps a server running after its machine's worker has ended, for the other workers. Cancels it if the group
    fails or the task is cancelled."""

    def __init__(self, task: asyncio.Task[TrainingDone]) -> None:
        self._task = task

    async def __aenter__(self) -> _Serving:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, asyncio.CancelledError | CollectiveError):
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        else:
            await self._task
