"""The server of one view: on the first member's machine, from the state that its keeper holds.

Every update is with the standby before anybody is told of it; now and then it is saved then, too, with what
the compressor of the worker beside the server remembers.
"""

from __future__ import annotations

from functools import partial

from hcsim.cluster.view import View
from hcsim.collectives.group import Group
from hcsim.compressors.base import State
from hcsim.errors import CollectiveError, DeadlineExceeded, RemoteProtocolError
from hcsim.runtime.channel import Listener, Phantom
from hcsim.training.elastic import standby
from hcsim.training.elastic.checkpoint import Checkpoints
from hcsim.training.elastic.keeper import Keeper
from hcsim.training.elastic.parcel import Parcel
from hcsim.training.elastic.working import Working
from hcsim.training.parameter_server.gradients import Received
from hcsim.training.parameter_server.messages import Done
from hcsim.training.parameter_server.rounds import Rounds
from hcsim.training.parameter_server.saved import recall, records
from hcsim.training.parameter_server.server import Server
from hcsim.training.run import Run

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
