"""A parameter server that may die: the second member of a view stands by with all that it knows.

Workers come and go as they do anyway; each stays what it is from view to view, and only calls another server. The
server is on the first member's machine. Before it answers anybody, it hands every update (the averaged gradients, the
learning rate, and which pushes are answered how) to the standby, which applies it to a replica of its own; so
whatever a worker was told is known to both. When the server is lost, the first member of the next view takes over from
whoever holds the newest state; workers ask again what was not answered, and a push that had counted is answered
as it was, while one that had not is counted then. With both lost at once, the newest model that a worker has pulled is
what is left: its later updates are lost, and what the optimizer remembered. A server that runs out of patience, or one
that a worker does not reach, costs the view and no more: the next one's server goes on, with the same workers. Where it
refuses a worker's gradients again and again, either of the two is not well, and is left out for a while.

In sync mode the batches of a view are dealt out among its members; a push that was under way when the members changed
is of the old ones. In the other modes a step is as many updates as there are members.

A worker that leaves in an orderly way pushes once more, uncompressed and with all that its error feedback owes; it
leaves when that has counted. With one that crashes, what it owed is lost.

The server saves now and then. When all have been lost, training goes on from the newest that was saved.

`keeper` has the server's state, `standby` how it is followed, `working` the worker.

The server of one view runs on the first member's machine, from the state that its keeper holds.

Every update is with the standby before anybody is told of it; now and then it is saved then, too, with what
the compressor of the worker beside the server remembers.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from copy import copy
from functools import partial

import msgspec
import numpy as np

from hcsim.cluster.conductor import LAST_CALL_PAUSE_S, LAST_CALL_S, Conductor
from hcsim.cluster.view import View
from hcsim.collectives.group import Group
from hcsim.collectives.options import Options
from hcsim.compressors.base import State
from hcsim.compressors.registry import make
from hcsim.config.training import Training
from hcsim.errors import (
    CollectiveError,
    ConfigError,
    DeadlineExceeded,
    Diverged,
    GradientsRefused,
    RemoteProtocolError,
)
from hcsim.runtime.channel import Listener, Phantom
from hcsim.runtime.host import CONNECT_TIMEOUT_S, Host
from hcsim.training.agreement import Intent
from hcsim.training.data import Batches
from hcsim.training.elastic import standby
from hcsim.training.elastic.checkpoint import Checkpoints, fitting
from hcsim.training.elastic.keeper import Keeper, Start
from hcsim.training.elastic.pact import ATTEMPTS, Contradiction, Doubt, gather_echoed
from hcsim.training.elastic.parcel import Parcel
from hcsim.training.elastic.part import Extras
from hcsim.training.elastic.recovery import Recovery
from hcsim.training.elastic.working import Working
from hcsim.training.learner import Learner, fingerprint
from hcsim.training.parameter_server.gradients import Gradients, Received
from hcsim.training.parameter_server.messages import Done
from hcsim.training.parameter_server.place import address_of, listen
from hcsim.training.parameter_server.rounds import Policy, Rounds
from hcsim.training.parameter_server.server import Server, recall, records
from hcsim.training.parameter_server.worker import Worker
from hcsim.training.run import Run
from hcsim.training.strategies import completed, optimizer, strategy
from hcsim.training.tasks import task

JOB = "elastic"
WORKER = "worker/"
"""In a checkpoint, before the names of what the compressor of the worker beside the server remembers."""


class Serving:
    """Opened for a view, and stopped when it ends."""

    def __init__(self, group: Group, run: Run, keeper: Keeper, working: Working) -> None:
        self._group = group
        self._run = run
        self._keeper = keeper
        self._working = working
        self._checkpoints: Checkpoints | None = None
        self._due = 0
        """The step after which to save."""
        self._lr = 0.0

    def save_to(self, checkpoints: Checkpoints) -> None:
        """From now on."""
        self._checkpoints, self._due = checkpoints, checkpoints.after(self._working.start.step)

    def opened(self, view: View, done: list[str]) -> Server:
        """The server; these nodes' workers have the final model already."""
        state, working, now = self._keeper.state, self._working, self._group.host.clock.elapsed()
        assert state is not None
        total = state.version + (self._run.settings.steps - working.start.step) * working.per_step
        rounds = Rounds(working.policy, total, awaited=view.nodes, now=now)
        recall(state.workers, rounds, now)
        rounds.regroup([node for node in view.nodes if node not in done])
        rounds.version = state.version
        server = Server(self._keeper.learner, working.worker.gradients, rounds, self._update, job=JOB)
        server.reception.guests = view.nodes
        server.reception.on_violations = partial(self._violated, view)
        server.has_successor = True
        server.before_telling = partial(self._keep, rounds)
        return server

    async def run(self, server: Server, listener: Listener) -> Done:
        """Serve this view. Should the server give up, it is the view that has failed, and the next one has another."""
        try:
            return await server.run(listener)
        except CollectiveError:
            raise
        except DeadlineExceeded as error:
            raise CollectiveError(str(error)) from error

    def ended(self, server: Server) -> None:
        """Remember what came of it."""
        state = self._keeper.state
        assert state is not None
        state.version, state.workers = server.rounds.version, records(server.rounds)

    def _violated(self, view: View, worker: str, error: RemoteProtocolError) -> None:
        """The view fails, by a worker that breaks the protocol on every connection: it would never be of any use."""
        rank = view.nodes.index(worker)
        failure = CollectiveError(f"rank {rank} breaks the protocol of the parameter server: {error}", peer=rank)
        failure.__cause__ = error
        self._group.fail(failure)

    async def _update(self, number: int, share: float) -> None:
        learner = self._keeper.learner
        await standby.clip_gradients(learner, self._run.settings.clip)
        self._lr = self._run.lr(self._working.step_of(number)) * share
        await learner.update(self._lr)

    async def _keep(self, rounds: Rounds, received: list[Received]) -> None:
        """The update counts once the standby has it; and perhaps it is time to save."""
        if self._group.size > 1:
            learner = self._keeper.learner
            await standby.tell(self._group, learner, rounds.version, self._lr, records(rounds), received)
        step = self._working.step_of(rounds.version)
        if self._checkpoints is not None and step >= self._due:
            self._due = self._checkpoints.after(step)
            await self._save(self._checkpoints, rounds, step)

    async def _save(self, checkpoints: Checkpoints, rounds: Rounds, step: int) -> None:
        worker = self._working.worker
        remembered = worker.state(rounds.members[worker.name].verdict)
        saved = self._keeper.saved(self._working.at(rounds.version), records(rounds))
        parcel = Parcel(saved.about, {**saved.arrays, **{WORKER + name: array for name, array in remembered.items()}})
        await checkpoints.save(self._group.host, parcel, step)


def remembered(checkpoint: Parcel) -> State:
    """What the compressor of the worker beside the server remembered when that was saved."""
    state: State = {}
    for name, array in checkpoint.arrays.items():
        if name.startswith(WORKER):
            assert not isinstance(array, Phantom)  # shapes alone are not saved
            state[name.removeprefix(WORKER)] = array
    return state


LOOK_S = 0.02
"""How often a member looks whether its view is at an end."""
NEAR_S = 0.5
"""To connect: a worker that calls a server which is no more tries the next one soon. Behind a tunnel all are at one
address, and it takes several round trips of the internet to get there."""


class Served:
    """One member: a worker, and by turns the server or its standby."""

    def __init__(self, host: Host, settings: Training, seed: int, conductor: Conductor, extras: Extras) -> None:
        what = extras.what or task(settings.task)
        if isinstance(settings.batch, tuple):
            raise ConfigError(f"batch = {list(settings.batch)}: members of a parameter server change; give one figure")
        self.settings = completed(settings, what, 1)
        self._policy = _policy(self.settings)
        self._host = host
        self._seed = seed
        self._task = what
        self._conductor = conductor
        self.leaving = extras.leaving
        self.observer = Recovery(host, extras.observer, settings.timeout_s)
        self._checkpoints = extras.checkpoints
        self._began = extras.began
        self._intent = msgspec.json.encode(Intent(self.settings, seed, what.fingerprint), enc_hook=float)
        learner = Learner(host, what, optimizer(self.settings), seed)
        self._keeper = Keeper(learner, optimizer(self.settings))
        work = copy(learner)
        work.replica = what.replica(seed, host.device.torch_name)
        drawer = zlib.crc32(conductor.us.node.encode())  # ranks change with the view, and one that rounds does not
        self._gradients = Gradients(learner.layout, make(settings.compressor, seed=seed, rank=drawer))
        worker = Worker(work, self._gradients, self._policy, name=conductor.us.node, job=JOB)
        connect_s = NEAR_S if settings.server is None else CONNECT_TIMEOUT_S
        worker.connect_timeout_s = min(connect_s, self.settings.timeout_s)
        self._working = Working(host, worker, self._policy)
        self._compared = 0
        """How often the members' final models were not alike."""
        self._ready: list[str] = []
        """Members whose workers have the final model."""
        self._remembered: State = {}
        """What our compressor remembered when we saved."""

    def reload(self, checkpoint: Parcel) -> None:
        """Begin with what was saved, if nobody has anything newer."""
        with fitting():
            self._keeper.adopt(checkpoint)
        self._keeper.reloaded = True
        self._remembered = remembered(checkpoint)

    @property
    def has_begun(self) -> bool:
        """Whether there is a run."""
        return self._working.run is not None

    @property
    def run(self) -> Run:
        """From the first view on."""
        assert self._working.run is not None
        return self._working.run

    @property
    def is_complete(self) -> bool:
        """Whether our worker has the final model."""
        return self._working.done is not None

    @property
    def votes_seen(self) -> None:
        """Workers do not vote."""

    def options(self, view: View) -> Options:
        """How a view's group works."""
        return Options(timeout_s=self.settings.timeout_s, conducted=True)

    async def train(self, group: Group, view: View) -> bool:
        """Work in this view for as long as it lasts; whether that was all."""
        working = self._working
        try:
            done = working.done
            met = await self._keeper.synchronise(group, view, self._intent, working.pulled, done is not None)
            self._ready = met.done
            if done is not None and len(self._ready) == group.size:
                return await self._confirmed(group, view)
            if met.current and self._remembered:
                self._gradients.compressor.restore(self._remembered)
            self._remembered = {}
            await self._start(group)
            self._began(view, working.start.step)
            if group.rank == standby.SERVER:
                return await self._serve(group, view)
            return await self._stand_by(group, view)
        finally:
            await working.call("")

    async def complete(self) -> None:
        """The last step may have been others' alone."""
        if (done := self._working.done) is not None:
            await self._working.note(done.version)

    async def close(self) -> None:
        """End the worker, which lives from view to view."""
        await self._working.close()

    async def save(self) -> None:
        """Save the server's state, if we hold it. Who leaves a view has paid what it owed; without one that is lost."""
        state = self._keeper.state
        if self._checkpoints is not None and state is not None:
            start = self._working.after(state)
            await self._checkpoints.save_last(self._host, self._keeper.saved(start, state.workers), start.step)

    # A view begins.

    async def _start(self, group: Group) -> None:
        """Agree on where this view begins."""
        state, working, learner = self._keeper.state, self._working, self._keeper.learner
        ours = working.after(state) if group.rank == standby.SERVER and state is not None else Start()
        start = await standby.agreed_start(group, ours, self.settings.steps)
        if state is not None:
            state.begin(start)
        assert isinstance(self.settings.batch, int)
        sizes = [self.settings.batch] * group.size
        batches = Batches.of(self._task, sizes, self._seed, (start.version, start.position))
        run = working.run
        if run is None:
            work = working.worker.learner
            run = Run(group, self.settings, self._task, work, batches, self._gradients.compressor)
            run.observer = self.observer
        working.begin(group, run, batches, start)
        run.learner = learner if group.rank == standby.SERVER else working.worker.learner

    async def _call(self, group: Group, port: int = 0, near: str = "") -> None:
        """Tell where the server listens; workers go on there, and the one beside it at an address that is `near`."""
        agreed = await standby.agreed_port(group, port)
        await self._working.call(near or address_of(self.settings, group.addresses[0], agreed))

    # A view ends.

    async def _look(self, group: Group, view: View, duty: asyncio.Task[Done] | asyncio.Task[None] | None) -> None:
        """Return when there is a reason to: all is done, the members change, or somebody we need has failed. So may
        have what we do for the others as the server or its standby."""
        while not self._working.ended:
            if duty is not None and duty.done():
                duty.result()
            if group.error is not None:
                raise CollectiveError(f"the group failed: {group.error}", peer=getattr(group.error, "peer", None))
            if self._conductor.superseded(view.epoch):
                return
            self._working.worker.retiring = self.leaving is not None and self.leaving.is_set()
            await self._host.clock.sleep(LOOK_S)
        if (why := self._working.gave_up) is not None:
            failure = _failure(why, group.rank)
            group.fail(failure)  # whoever stands by would go on doing so
            raise failure

    async def _ended(self, group: Group, view: View) -> bool:
        """Whether that was all, for us or for all."""
        working = self._working
        assert working.task is not None
        if not working.ended:
            return False
        done = working.task.result()
        if done is None:  # it has retired, with nothing owed
            await self._conductor.leave()
            return True
        return await self._confirmed(group, view)

    async def _confirmed(self, group: Group, view: View) -> bool:
        """All have the final model: before, somebody might have to serve it again. Whether we may go: nobody knows of
        newcomers who want it."""
        conductor, clock = self._conductor, self._host.clock
        until_s = clock.elapsed() + LAST_CALL_S
        await self._compare(group, view)
        while True:
            waits = conductor.preparing(view.epoch) and clock.elapsed() < until_s
            over, waits = await self._told(group, superseded=conductor.superseded(view.epoch), waits=waits)
            if over or not waits:
                return not over
            await clock.sleep(LAST_CALL_PAUSE_S)

    async def _told(self, group: Group, *, superseded: bool, waits: bool) -> tuple[bool, bool]:
        """Whether any member says so. On a word that is neither yes nor no nobody can act: another view would never
        follow, say."""
        words = [each.tolist() for each in await gather_echoed(group, np.array([superseded, waits], np.int64))]
        for rank, each in enumerate(words):
            if not {*each} <= {0, 1}:
                text = f"rank {rank} says {each} when asked whether the view is over and whether it waits"
                raise CollectiveError(text, peer=rank) from RemoteProtocolError(text, str(rank))
        over, waiting = zip(*words, strict=True)
        return any(over), any(waiting)

    async def _compare(self, group: Group, view: View) -> None:
        """See that the final model arrived as it was sent. Whoever holds another than most do, or than the first in
        rank where as many hold one as another, pulls it once more."""
        parameters = self._working.worker.learner.replica.parameters
        await self._host.device.touch(parameters.nbytes)
        prints = [int(each[0]) for each in await gather_echoed(group, np.array([fingerprint(parameters)], np.int64))]
        usual = Counter(prints).most_common(1)[0][0]
        unlike = [rank for rank, each in enumerate(prints) if each != usual]
        if not unlike:
            return
        names = ", ".join(view.members[rank].name for rank in unlike)
        what = f"the final model is not the same on {names} as on the others"
        self._compared += 1
        if self._compared >= ATTEMPTS:
            raise Diverged(
                f"{what}, however often it is pulled: memory or a network card failed there or on the server"
            )
        if group.rank in unlike:
            self._working.pull_again()
        await group.barrier()  # all have heard it before this view ends
        raise CollectiveError(f"{what}: it is pulled once more")

    # The server.

    async def _serve(self, group: Group, view: View) -> bool:
        ours = Serving(group, self.run, self._keeper, self._working)
        if self._checkpoints is not None:
            ours.save_to(self._checkpoints)
        server = ours.opened(view, self._ready)
        self._working.serves(server)
        listener, port = await listen(self._host, self.settings, group.addresses[0])
        serving = self._host.spawn(ours.run(server, listener), name="parameter server")
        try:
            await self._call(group, port, near=listener.address if self.settings.server is not None else "")
            await self._look(group, view, serving)
            while self._working.done and not serving.done() and group.error is None:
                await self._host.clock.sleep(LOOK_S)  # others may still want the final model
        finally:
            server.stop()
            outcome = (await asyncio.gather(serving, return_exceptions=True))[0]
            ours.ended(server)
            self._working.serves(None)
        self._working.count_bytes()
        if isinstance(outcome, BaseException):
            raise outcome
        if group.size > 1:
            await standby.tell_end(group)
        return await self._ended(group, view)

    # The standby, and those who only work.

    async def _stand_by(self, group: Group, view: View) -> bool:
        await self._call(group)
        following = None
        if group.rank == standby.STANDBY:
            follow = standby.follow(group, self._keeper, self._gradients, self.settings.clip)
            following = self._host.spawn(follow, name="stand by")
        try:
            await self._look(group, view, following)
        finally:
            if following is not None:  # it ends when the server says so, or the group fails
                await asyncio.gather(following, return_exceptions=True)
        if following is not None:
            following.result()
        return await self._ended(group, view)


def _failure(why: DeadlineExceeded | GradientsRefused, us: int) -> CollectiveError:
    """What ends a view in which our worker gave up."""
    if isinstance(why, GradientsRefused):
        return Contradiction(str(why), peer=standby.SERVER, doubts=(Doubt(standby.SERVER, us, str(why)),))
    failure = CollectiveError(str(why), peer=standby.SERVER)
    failure.__cause__ = why.__cause__
    return failure


def _policy(settings: Training) -> Policy:
    chosen, timeout_s = strategy(settings.strategy), settings.timeout_s
    assert isinstance(chosen, Policy)
    return msgspec.structs.replace(chosen, patience_s=timeout_s, deadline_s=min(chosen.deadline_s, timeout_s / 2))
