"""A member of a cluster with a parameter server. When the server is lost, the standby takes over with the same state.

Each worker lives from view to view, and only connects to another server. The server is on the first member's
machine. Before it answers any worker, it sends every update (the averaged gradients, the learning rate, and the
answer to each push) to the standby, which applies it to a replica of its own. So both know every answer that a
worker got. When the server is lost, the first member of the next view takes over from the member with the
newest state. Workers repeat unanswered requests: a push that had counted gets the same answer again, and one
that had not counts then. If both are lost at once, training goes on from the newest model that a worker has
pulled; later updates and the optimizer's state are lost. If a server gives up, or a worker cannot reach it,
only the view ends: the next view's server goes on with the same workers. If a server rejects a worker's
gradients again and again, one of the two is faulty and is excluded for a while.

In sync mode the batches of a view are dealt out among its members, by their speed if `batch` is "auto"; a push
in flight when the members change belongs to the old ones. In the other modes a step is as many updates as there
are members.

A worker that leaves in an orderly way pushes once more, uncompressed and with its whole residual; it leaves
when that push has counted. If a worker crashes, its residual is lost.

The server saves periodically, with the compressor state of the worker on its machine. After the loss of all
members, training goes on from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np

from hcsim.cluster.membership_source import LAST_CALL_PAUSE_S, LAST_CALL_S, MembershipSource
from hcsim.cluster.view import View
from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.compressors.base import CompressorStateDict
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
from hcsim.training.data import Batches
from hcsim.training.elastic import standby
from hcsim.training.elastic.checkpoint import fitting
from hcsim.training.elastic.member import ElasticMember, TrainingExtras
from hcsim.training.elastic.standby import ServerReplica
from hcsim.training.elastic.transfer import Contradiction, StateArrays, VoteConflict, gather_echoed
from hcsim.training.learner import fingerprint
from hcsim.training.parameter_server.gradients import GradientCodec, ReceivedPush
from hcsim.training.parameter_server.messages import TrainingDone
from hcsim.training.parameter_server.rounds import ServerPolicy, ServerRounds
from hcsim.training.parameter_server.server import Server, recall, records
from hcsim.training.parameter_server.strategy import (
    Participant,
    ViewStart,
    address_of,
    beside_server,
    listen,
    policy_of,
)
from hcsim.training.precision import compressor_of
from hcsim.training.strategies import optimizer, strategy
from hcsim.training.trainer import encoded

JOB = "elastic"
WORKER = "worker/"
"""In a checkpoint, the prefix of the compressor state of the worker beside the server."""
COMPARISONS = 4
"""Comparisons of the final model: a difference in all of them is a persistent fault."""
LOOK_S = 0.02
"""The polling interval for the end of the view."""
NEAR_S = 0.5
"""The connect timeout without a tunnel: a worker whose server is gone soon tries the next one. Behind a tunnel
the address stays the same and connecting takes several round trips of the internet, so the usual timeout
applies."""


class ServedMember(ElasticMember):
    """A worker, which also runs the server or its standby if it is among the first two members."""

    def __init__(
        self, host: Host, source: MembershipSource, settings: Training, seed: int, extras: TrainingExtras
    ) -> None:
        if isinstance(settings.batch, tuple):
            raise ConfigError(
                f'batch = {list(settings.batch)}: members of a parameter server change; give one figure or "auto"'
            )
        super().__init__(host, source, settings, seed, extras)
        self._balance = self.balance(None, 1)
        chosen = strategy(self.settings.strategy)
        assert isinstance(chosen, ServerPolicy)
        self._intent = encoded(self.intent())
        self._server_replica = ServerReplica(self.learner, optimizer(self.settings))
        drawer = zlib.crc32(source.us.node.encode())  # ranks change with the view, and one that rounds does not
        gradients = GradientCodec(self.learner.layout, compressor_of(settings, seed, drawer))
        self._us = Participant(beside_server(self.learner, seed), gradients, policy_of(chosen, self.settings))
        worker = self._us.hire(source.us.node, JOB)
        connect_s = NEAR_S if settings.server is None else CONNECT_TIMEOUT_S
        worker.connect_timeout_s = min(connect_s, self.settings.timeout_s)
        self._compared = 0
        """How often the members' final models differed."""
        self._remembered: CompressorStateDict = {}
        """This worker's compressor state in the checkpoint."""
        self._due = 0
        """The step after which to save."""

    def reload(self, checkpoint: StateArrays) -> None:
        with fitting():
            self._server_replica.adopt(checkpoint)
        self._server_replica.reloaded = True
        for name, array in checkpoint.arrays.items():
            if name.startswith(WORKER):
                assert not isinstance(array, Phantom)  # shapes alone are not saved
                self._remembered[name.removeprefix(WORKER)] = array

    @property
    def is_complete(self) -> bool:
        return self._us.done is not None

    def options(self, view: View) -> Options:
        return Options(timeout_s=self.settings.timeout_s, views_change=True)

    async def train(self, group: Group, view: View) -> bool:
        us = self._us
        try:
            finished = us.done is not None
            ready, current = await self._server_replica.synchronise(group, view, self._intent, us, finished)
            if finished and len(ready) == group.size:
                return await self._confirmed(group, view)
            if current and self._remembered:
                us.gradients.compressor.restore(self._remembered)
            self._remembered = {}
            await self._begin(group)
            self.began(view, us.start.step)
            if group.rank == standby.SERVER:
                return await self._serve(group, view, ready)
            return await self._stand_by(group, view)
        finally:
            await us.call("")

    async def complete(self) -> None:
        """Note the last step, which other members may have completed."""
        if (done := self._us.done) is not None:
            await self._us.note(done.version)

    async def close(self) -> None:
        """End the worker, which lives from view to view."""
        await self._us.close()

    async def save(self) -> None:
        """Save the server's state, if this member holds it. A worker that left in an orderly way has pushed its
        residual; other residuals are lost."""
        state = self._server_replica.state
        if self.checkpoints is not None and state is not None:
            start = self._after(state)
            await self.checkpoints.save_last(self.host, self._server_replica.saved(start, state.workers), start.step)

    # A view begins.

    async def _begin(self, group: Group) -> None:
        """Agree on where this view begins."""
        state, us, serves = self._server_replica.state, self._us, group.rank == standby.SERVER
        ours = self._after(state) if serves and state is not None else ViewStart()
        start = await standby.agreed_start(group, ours, self.settings.steps)
        if state is not None:
            state.begin(start)
        batches = Batches.of(self.task, await self._sizes(group), self.seed, (start.version, start.position))
        run = self.enter(group, batches, us.gradients.compressor)
        run.balance = self._balance
        run.observer = self.observer
        run.learner = self.learner if serves else us.learner
        us.begin(run, start)

    async def _sizes(self, group: Group) -> Sequence[int]:
        """Return the samples in a step, by rank: as many for each, or by what steps have cost the members so far."""
        sizes, balance = self.batch_sizes(group.size), self._balance
        if balance is None:
            return sizes
        told = await gather_echoed(group, balance.told().view(np.int64))
        balance.agree([each.view(np.float64) for each in told], group.rank)
        return balance.best(sizes).sizes

    def _after(self, state: standby.ServerState) -> ViewStart:
        return self._us.start_at(state.version, ViewStart(*state.since, state.step))

    async def _call(self, group: Group, port: int = 0, near: str = "") -> None:
        """Distribute the port of the server and connect the worker to it; the worker beside the server uses the
        address `near`."""
        agreed = await standby.agreed_port(group, port)
        await self._us.call(near or address_of(self.settings, group.addresses[0], agreed))

    # A view ends.

    async def _look(
        self, group: Group, view: View, duty: asyncio.Task[TrainingDone] | asyncio.Task[None] | None
    ) -> None:
        """Return when training is done or the members change. Raise if the group, the worker, or this member's
        server or standby has failed."""
        while not self._us.ended:
            if duty is not None and duty.done():
                duty.result()
            if group.error is not None:
                raise CollectiveError(f"the group failed: {group.error}", peer=getattr(group.error, "peer", None))
            if self.source.superseded(view.epoch):
                return
            self._us.worker.retiring = self.leaving is not None and self.leaving.is_set()
            await self.host.clock.sleep(LOOK_S)
        if (why := self._us.gave_up) is not None:
            failure = _failure(why, group.rank)
            group.fail(failure)  # whoever stands by would go on doing so
            raise failure

    async def _ended(self, group: Group, view: View) -> bool:
        """Return whether training is complete for this member or for all."""
        if not self._us.ended:
            return False
        if self._us.result() is None:  # it has retired, with nothing owed
            await self.source.leave()
            return True
        return await self._confirmed(group, view)

    async def _confirmed(self, group: Group, view: View) -> bool:
        """Confirm that all members have the final model; before that, a server might have to serve it again. Return
        whether this member may leave: no member knows of newcomers that wait to join."""
        source, clock = self.source, self.host.clock
        until_s = clock.elapsed() + LAST_CALL_S
        await self._compare(group, view)
        while True:
            waits = source.preparing(view.epoch) and clock.elapsed() < until_s
            over, waits = await self._told(group, superseded=source.superseded(view.epoch), waits=waits)
            if over or not waits:
                return not over
            await clock.sleep(LAST_CALL_PAUSE_S)

    async def _told(self, group: Group, *, superseded: bool, waits: bool) -> tuple[bool, bool]:
        """Return whether any member says that the view is superseded, and whether any says that it waits. Reject an
        answer that is neither 0 nor 1: members could draw different conclusions from it."""
        words = [each.tolist() for each in await gather_echoed(group, np.array([superseded, waits], np.int64))]
        for rank, each in enumerate(words):
            if not {*each} <= {0, 1}:
                text = f"rank {rank} says {each} when asked whether the view is over and whether it waits"
                raise CollectiveError(text, peer=rank) from RemoteProtocolError(text, str(rank))
        over, waiting = zip(*words, strict=True)
        return any(over), any(waiting)

    async def _compare(self, group: Group, view: View) -> None:
        """Compare the final models. A member whose model differs from that of the majority (in a tie, from that of
        the lowest rank) pulls it once more."""
        parameters = self._us.learner.replica.parameters
        await self.host.device.touch(parameters.nbytes)
        prints = [int(each[0]) for each in await gather_echoed(group, np.array([fingerprint(parameters)], np.int64))]
        usual = Counter(prints).most_common(1)[0][0]
        unlike = [rank for rank, each in enumerate(prints) if each != usual]
        if not unlike:
            return
        names = ", ".join(view.members[rank].name for rank in unlike)
        what = f"the final model is not the same on {names} as on the others"
        self._compared += 1
        if self._compared >= COMPARISONS:
            raise Diverged(
                f"{what}, however often it is pulled: memory or a network card failed there or on the server"
            )
        if group.rank in unlike:
            self._us.pull_again()
        await group.barrier()  # all have heard it before this view ends
        raise CollectiveError(f"{what}: it is pulled once more")

    # The server. Every update is with the standby before anybody is told of it.

    async def _serve(self, group: Group, view: View, ready: list[str]) -> bool:
        """Serve this view; the workers of the nodes in `ready` have the final model already."""
        state, us = self._server_replica.state, self._us
        assert state is not None
        if self.checkpoints is not None:
            self._due = self.checkpoints.after(us.start.step)
        server = us.open_server(self.learner, view.nodes, state.version, job=JOB)
        recall(state.workers, server.rounds, self.host.clock.elapsed())
        server.rounds.regroup([node for node in view.nodes if node not in ready])
        server.reception.guests = view.nodes
        server.reception.on_violations = partial(_violated, group, view)
        server.has_successor = True
        server.before_telling = partial(self._keep, group, server.rounds)
        listener, port = await listen(self.host, self.settings, group.addresses[0])
        serving = self.host.spawn(_run(server, listener), name="parameter server")
        try:
            await self._call(group, port, near=listener.address if self.settings.server is not None else "")
            await self._look(group, view, serving)
            while us.done and not serving.done() and group.error is None:
                await self.host.clock.sleep(LOOK_S)  # others may still want the final model
        finally:
            server.stop()
            outcome = (await asyncio.gather(serving, return_exceptions=True))[0]
            state.version, state.workers = server.rounds.version, records(server.rounds)
            us.close_server()
        us.count_bytes()
        if isinstance(outcome, BaseException):
            raise outcome
        if group.size > 1:
            await standby.tell_end(group)
        return await self._ended(group, view)

    async def _keep(self, group: Group, rounds: ServerRounds, received: list[ReceivedPush]) -> None:
        """Send the update to the standby, after which it counts, and save if a checkpoint is due."""
        us = self._us
        if group.size > 1:
            await standby.tell(group, self.learner, rounds.version, us.lr, records(rounds), received)
        step = us.step_of(rounds.version)
        if self.checkpoints is not None and step >= self._due:
            self._due = self.checkpoints.after(step)
            remembered = us.worker.state(rounds.members[us.worker.name].verdict)
            saved = self._server_replica.saved(us.start_at(rounds.version, us.start), records(rounds))
            beside = {WORKER + name: array for name, array in remembered.items()}
            await self.checkpoints.save(self.host, StateArrays(saved.about, {**saved.arrays, **beside}), step)

    # The standby, and those who only work.

    async def _stand_by(self, group: Group, view: View) -> bool:
        await self._call(group)
        following = None
        if group.rank == standby.STANDBY:
            follow = standby.follow(group, self._server_replica, self._us.gradients, self.settings.clip)
            following = self.host.spawn(follow, name="stand by")
        try:
            await self._look(group, view, following)
        finally:
            if following is not None:  # it ends when the server says so, or the group fails
                await asyncio.gather(following, return_exceptions=True)
        if following is not None:
            following.result()
        return await self._ended(group, view)


async def _run(server: Server, listener: Listener) -> TrainingDone:
    """Serve this view. If the server gives up, fail the view; the next view has another server."""
    try:
        return await server.run(listener)
    except CollectiveError:
        raise
    except DeadlineExceeded as error:
        raise CollectiveError(str(error)) from error


def _violated(group: Group, view: View, worker: str, error: RemoteProtocolError) -> None:
    """Fail the view because of a worker that breaks the protocol on every connection."""
    rank = view.nodes.index(worker)
    failure = CollectiveError(f"rank {rank} breaks the protocol of the parameter server: {error}", peer=rank)
    failure.__cause__ = error
    group.fail(failure)


def _failure(why: DeadlineExceeded | GradientsRefused, us: int) -> CollectiveError:
    """Return the error that ends a view in which this member's worker gave up."""
    if isinstance(why, GradientsRefused):
        return Contradiction(str(why), peer=standby.SERVER, doubts=(VoteConflict(standby.SERVER, us, str(why)),))
    failure = CollectiveError(str(why), peer=standby.SERVER)
    failure.__cause__ = why.__cause__
    return failure
