"""A parameter server that may die: the second member of a view stands by with all that it knows.

Workers come and go as they do anyway; each stays what it is from view to view, and only calls another server. The
server is on the first member's machine. Before it answers anybody, it hands every update (the averaged gradients, the
learning rate, and which pushes are answered how) to the standby, which applies it to a replica of its own; so
whatever a worker was told is known to both. When the server is lost, the first member of the next view takes over from
whoever holds the newest state; workers ask again what was not answered, and a push that had counted is answered
as it was, while one that had not is counted then. With both lost at once, the newest model that a worker has pulled is
what is left: its later updates are lost, and what the optimizer remembered.

In sync mode the batches of a view are dealt out among its members; a push that was under way when the members changed
is of the old ones. In the other modes a step is as many updates as there are members.

What a worker's error feedback owes goes with it when it leaves, in an orderly way too.
"""

from __future__ import annotations

import asyncio
import hashlib
from copy import copy
from functools import partial

import msgspec
import numpy as np

from hcsim.cluster.conductor import Conductor
from hcsim.cluster.view import View
from hcsim.collectives.data import array_of
from hcsim.collectives.group import Group, Options
from hcsim.compressors.registry import make
from hcsim.config.training import Training
from hcsim.errors import CollectiveError, ConfigError, Diverged
from hcsim.runtime.address import join_address, split_address
from hcsim.runtime.channel import Phantom
from hcsim.runtime.device import Work
from hcsim.runtime.host import Host
from hcsim.training.agreement import Intent
from hcsim.training.data import Batches
from hcsim.training.elastic.fingerprint import fingerprint
from hcsim.training.elastic.method import Replicated
from hcsim.training.elastic.parcel import Parcel, relay
from hcsim.training.elastic.recovery import Recovery
from hcsim.training.elastic.standing import Era, Header
from hcsim.training.elastic.synchronise import same_intent
from hcsim.training.learner import Learner
from hcsim.training.optimizer import clip
from hcsim.training.parameter_server.gradients import Gradients
from hcsim.training.parameter_server.messages import Done
from hcsim.training.parameter_server.policy import Policy
from hcsim.training.parameter_server.rounds import Rounds
from hcsim.training.parameter_server.saved import Record, recall, records
from hcsim.training.parameter_server.server import Server
from hcsim.training.parameter_server.worker import Worker
from hcsim.training.run import Run
from hcsim.training.strategies import completed, one_level, optimizer, strategy
from hcsim.training.task import Indices, Task
from hcsim.training.tasks import task

LOOK_S = 0.02
"""How often a member looks whether its view is at an end."""
CONNECT_TIMEOUT_S = 0.5
"""A worker that calls a server which is no more tries the next one soon."""
PULLED = -1
"""The generation of what a worker has pulled: anything that a server or standby holds is better."""


class State(msgspec.Struct):
    """What a server knows beside the model."""

    era: Era = Era()
    version: int = 0
    workers: dict[str, Record] = {}
    since: tuple[int, int] = (0, 0)
    """The version that this view began with, and how many samples were dealt out before it."""
    step: int = 0
    """That version's."""


class _Update(msgspec.Struct, frozen=True):
    """What the standby is told, beside the gradients."""

    version: int
    lr: float
    workers: dict[str, Record]


class Served:
    """One member: a worker, and by turns the server or its standby."""

    def __init__(self, host: Host, settings: Training, seed: int, what: Task | None, conductor: Conductor) -> None:
        what = what or task(settings.task)
        chosen = strategy(settings.strategy)
        assert isinstance(chosen, Policy)
        if isinstance(settings.batch, tuple):
            raise ConfigError(f"batch = {list(settings.batch)}: members of a parameter server change; give one figure")
        self.settings = completed(settings, what, 1)
        timeout_s = self.settings.timeout_s
        self._policy = msgspec.structs.replace(
            chosen, patience_s=timeout_s, deadline_s=min(chosen.deadline_s, timeout_s / 2)
        )
        self._host = host
        self._seed = seed
        self._task = what
        self._conductor = conductor
        self.leaving: asyncio.Event | None = None
        self.observer = Recovery(host, None)
        self._intent = msgspec.json.encode(Intent(self.settings, seed, what.fingerprint), enc_hook=float)
        learner = Learner(host, what, optimizer(self.settings), seed)
        self._server = learner
        """Its model is the server's, where we are the server or stand by."""
        self._work = copy(learner)
        self._work.replica = what.replica(seed, host.device.torch_name)
        compressor = make(settings.compressor, seed=seed, rank=0)
        self._gradients = Gradients(learner.layout, compressor)
        self._worker = Worker(self._work, self._gradients, self._policy, name=conductor.us.node, job="elastic")
        self._worker.connect_timeout_s = min(CONNECT_TIMEOUT_S, timeout_s)
        self._working: asyncio.Task[Done] | None = None
        self._held: State | None = None
        """What we know as the server or its standby."""
        self._run: Run | None = None
        self._per_step = 1
        self._began = State()
        self._ready: list[str] = []
        """Members whose workers have the final model."""
        self._serving: Server | None = None
        self._served_bytes = 0
        """Sent by servers that we were, less what our worker sent to them."""
        self._before_serving = 0
        self._noted = 0
        self._loss = float("nan")
        self._lr = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether there is a run."""
        return self._run is not None

    @property
    def run(self) -> Run:
        """From the first view on."""
        assert self._run is not None
        return self._run

    def options(self, view: View) -> Options:
        """How a view's group works."""
        return Options(timeout_s=self.settings.timeout_s, conducted=True)

    async def train(self, group: Group, view: View) -> bool:
        """Work in this view for as long as it lasts; whether that was all."""
        try:
            await self._synchronise(group, view)
            if len(self._ready) == group.size:
                return True
            await self._start(group, view)
            if group.rank == 0:
                return await self._serve(group, view)
            return await self._stand_by(group, view)
        finally:
            await self._worker.redirect("")

    async def close(self) -> None:
        """End the worker, which lives from view to view."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)

    # Whoever knows most tells the first two.

    async def _synchronise(self, group: Group, view: View) -> None:
        held = self._held
        era = held.era if held is not None else Era(PULLED)
        digest = int.from_bytes(hashlib.sha256(self._intent).digest()[:8], "big") >> 1
        version = held.version if held is not None else self._worker.version
        ours = Header(era.generation, era.epoch, era.view, era.lineage, version, -1, digest)
        mark = fingerprint(self._server.replica.parameters)
        ready = self._working is not None and self._working.done()
        gathered = [array_of(each) for each in await group.all_gather(np.array([*ours, mark, ready], np.int64))]
        headers, marks = [Header.read(each[:-2]) for each in gathered], [int(each[-2]) for each in gathered]
        self._ready = [view.nodes[rank] for rank, each in enumerate(gathered) if each[-1]]
        right = max(range(group.size), key=lambda rank: (headers[rank].standing, -rank))
        await same_intent(group, self._intent, [header.intent for header in headers], right)
        if headers[right].generation == PULLED:
            if group.rank == right:
                self._inherit()
            headers[right] = headers[right]._replace(generation=0)
        keepers = range(min(2, group.size))
        for rank in keepers:
            if headers[rank].standing == headers[right].standing and marks[rank] != marks[right]:
                names = view.members[right].name, view.members[rank].name
                raise Diverged(f"the server's state is not the same on {names[0]} and {names[1]}: memory failed there")
        routes = [(right, r) for r in keepers if r != right and headers[r].standing != headers[right].standing]
        giving = {taker: self._parcel() for giver, taker in routes if giver == group.rank}
        for parcel in await relay(group, routes, giving) if routes else ():
            self._adopt(parcel)
        await group.barrier()
        if group.rank in keepers:
            assert self._held is not None
            self._held.era = self._held.era.next(view)
        else:
            self._held = None

    def _inherit(self) -> None:
        """Nobody knows more than we as a worker do: the model that we pulled, or the first one."""
        version = self._worker.version
        self._held = State()
        if version >= 0:
            self._held = State(version=version, since=self._began.since, step=self._began.step)
            found, place = self._work.replica.parameters, self._server.replica.parameters
            if not isinstance(found, Phantom) and not isinstance(place, Phantom):
                np.copyto(place, found)
            self._server.stepper = optimizer(self.settings).open(place)
            self._host.trace("parameter server", "went back to", version)

    def _parcel(self) -> Parcel:
        return Parcel(msgspec.msgpack.encode(self._held), self._model.shared())

    def _adopt(self, parcel: Parcel) -> None:
        self._held = msgspec.msgpack.decode(parcel.about, type=State)
        self._model.adopt(parcel.arrays, self._held.step)

    @property
    def _model(self) -> Replicated:
        return Replicated(self._server, one_level)

    # A view begins.

    async def _start(self, group: Group, view: View) -> None:
        """Agree on where this view begins, and let the worker call its server."""
        began = np.zeros(3, np.int64)
        if group.rank == 0:
            assert self._held is not None
            state = self._held
            began[:] = state.version, self._position(state), self._step_of(state.version, state)
        await group.broadcast(began)
        version, position, step = (int(number) for number in began)
        self._began = State(version=version, since=(version, position), step=step)
        if self._held is not None:
            self._held.since, self._held.step = (version, position), step
        self._per_step = 1 if self._policy.mode == "sync" else group.size
        assert isinstance(self.settings.batch, int)
        batches = Batches.of(self._task, [self.settings.batch] * group.size, self._seed, (version, position))
        if self._run is None:
            self._run = Run(group, self.settings, self._task, self._work, batches, self._gradients.compressor)
            self._run.observer = self.observer
        self._run.regroup(group, batches, self._gradients.compressor)
        self._run.learner = self._server if group.rank == 0 else self._work

    def _position(self, state: State) -> int:
        """How many samples were dealt out before this version; of no meaning in modes where each has its own."""
        version, position = state.since
        if state.version == version or self._run is None or self._policy.mode != "sync":
            return position
        return self._run.batches.position(state.version)

    def _step_of(self, version: int, began: State) -> int:
        return began.step + (version - began.since[0]) // self._per_step

    async def _call(self, group: Group, port: int) -> None:
        """Tell where the server listens; workers go on there."""
        told = np.array([port], np.int64)
        await group.broadcast(told)
        host, _ = split_address(group.addresses[0])
        address = join_address((host, int(told[0])))
        await self._worker.redirect(address)
        if self._working is None:
            work = self._worker.run(address, self._batch, self._counted)
            self._working = self._host.spawn(work, name="worker")

    def _batch(self, version: int, accepted: int) -> Indices | None:
        batches, rank = self.run.batches, self.run.group.rank
        if self._policy.mode == "sync":
            return batches.batch(max(version, self._began.version), rank)
        return batches.own(rank, accepted) if len(batches.shard(rank)) else None

    async def _counted(self, version: int, loss: float) -> None:
        self._loss = loss
        await self._note(version)

    async def _note(self, version: int) -> None:
        step = self._step_of(version, self._began)
        if step > self._noted:
            self._noted = self.run.step = step
            self._count_bytes()
            await self.run.note(step, self._loss)

    def _count_bytes(self) -> None:
        """What crosses the network: a worker beside its server speaks over the machine's own loopback."""
        server = self._serving
        near = self._worker.sent_bytes - self._before_serving if server is not None else 0
        sent = server.reception.sent_bytes(without=self._worker.name) if server is not None else 0
        self.run.other_sent_bytes = self._served_bytes + sent + self._worker.sent_bytes - near

    # A view ends.

    async def _look(self, group: Group, view: View, serving: asyncio.Task[Done] | None = None) -> None:
        """Return when there is a reason to: all is done, the members change, or somebody we need has failed."""
        assert self._working is not None
        while not self._working.done():
            if serving is not None and serving.done():
                serving.result()
            if group.error is not None:
                raise CollectiveError(f"the group failed: {group.error}", peer=getattr(group.error, "peer", None))
            if self._wants_to_leave or self._conductor.superseded(view.epoch):
                return
            await self._host.clock.sleep(LOOK_S)

    @property
    def _wants_to_leave(self) -> bool:
        return self.leaving is not None and self.leaving.is_set()

    async def _ended(self, group: Group) -> bool:
        """Whether that was all, for us or for all."""
        assert self._working is not None
        if self._working.done():
            done = self._working.result()
            await group.barrier()  # until all have the final model, somebody may have to serve it again
            await self._note(done.version)
            return True
        if self._wants_to_leave:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
            await self._conductor.leave()
            return True
        return False

    # The server.

    async def _serve(self, group: Group, view: View) -> bool:
        server = self._serving = self._opened(group, view)
        self._before_serving = self._worker.sent_bytes
        host, _ = split_address(group.addresses[0])
        listener = await self._host.listen(join_address((host, 0)))
        serving = self._host.spawn(server.run(listener), name="parameter server")
        try:
            await self._call(group, split_address(listener.address)[1])
            await self._look(group, view, serving)
            while self._working is not None and self._working.done() and not serving.done() and group.error is None:
                await self._host.clock.sleep(LOOK_S)  # others may still want the final model
        finally:
            server.stop()
            outcome = (await asyncio.gather(serving, return_exceptions=True))[0]
            assert self._held is not None
            self._held.version, self._held.workers = server.rounds.version, records(server.rounds)
            self._serving = None
            self._served_bytes += server.reception.sent_bytes(without=self._worker.name)
            self._served_bytes -= self._worker.sent_bytes - self._before_serving
        self._count_bytes()
        if isinstance(outcome, BaseException):
            raise outcome
        if group.size > 1:
            await group.send(np.zeros(1, np.int64), 1)
        return await self._ended(group)

    def _opened(self, group: Group, view: View) -> Server:
        state, now = self._held, self._host.clock.now()
        assert state is not None
        total = state.version + (self.settings.steps - self._began.step) * self._per_step
        rounds = Rounds(self._policy, total, awaited=view.nodes, now=now)
        recall(state.workers, rounds, now)
        for name, member in rounds.members.items():
            if name not in view.nodes or name in self._ready:
                member.contributes, member.awaited, member.gone = False, False, True
        rounds.version = state.version
        server = Server(self._server, self._gradients, rounds, self._update, job="elastic")
        server.reception.members_only = True
        if group.size > 1:
            server.before_telling = partial(self._tell_standby, group, rounds)
        return server

    async def _update(self, number: int, share: float) -> None:
        learner = self._server
        gradients = learner.replica.gradients
        if self.settings.clip is not None:
            work = Work(3.0 * gradients.nbytes / 4, 3.0 * gradients.nbytes)
            await learner.run(work, partial(clip, gradients, self.settings.clip))
        self._lr = self.run.lr(self._step_of(number, self._began)) * share
        await learner.update(self._lr)

    async def _tell_standby(self, group: Group, rounds: Rounds) -> None:
        """The update counts once the standby has it."""
        text = msgspec.msgpack.encode(_Update(rounds.version, self._lr, records(rounds)))
        gradients = self._server.replica.gradients
        sending = [
            group.send(np.array([len(text)], np.int64), 1),
            group.send(np.frombuffer(text, np.uint8), 1),
            group.send(gradients, 1),
        ]
        await asyncio.gather(*sending)
        await group.recv(np.zeros(1, np.int64), 1)

    # The standby, and those who only work.

    async def _stand_by(self, group: Group, view: View) -> bool:
        await self._call(group, 0)
        following = self._host.spawn(self._follow(group), name="stand by") if group.rank == 1 else None
        try:
            await self._look(group, view)
        finally:
            # It ends when the server says so, or the group fails.
            outcome = await asyncio.gather(*([following] if following is not None else []), return_exceptions=True)
        if outcome and isinstance(outcome[0], BaseException):
            raise outcome[0]
        return await self._ended(group)

    async def _follow(self, group: Group) -> None:
        """Do as the server does, until it says that it ends."""
        learner, length = self._server, np.zeros(1, np.int64)
        assert self._held is not None
        while True:
            await group.recv(length, 0)
            if not length[0]:
                return
            text = np.empty(int(length[0]), np.uint8)
            gradients = learner.replica.gradients
            await asyncio.gather(group.recv(text, 0), group.recv(gradients, 0))
            update = msgspec.msgpack.decode(text.tobytes(), type=_Update)
            await learner.update(update.lr)
            self._held.version, self._held.workers = update.version, update.workers
            await group.send(length, 0)
