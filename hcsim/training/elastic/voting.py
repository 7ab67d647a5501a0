"""A member that holds a replica: it votes on every step, and saves now and then."""

from __future__ import annotations

from hcsim.cluster.conductor import Conductor
from hcsim.cluster.diagnosis import VotesSeen
from hcsim.cluster.view import View
from hcsim.collectives.group import Group
from hcsim.collectives.options import Options
from hcsim.config.training import Training
from hcsim.errors import CollectiveError, CompressionError
from hcsim.training.elastic.pact import Ballot, Votes
from hcsim.training.elastic.parcel import Parcel, relay
from hcsim.training.elastic.part import Extras
from hcsim.training.elastic.recovery import Recovery, watch_steps
from hcsim.training.elastic.survey import follow_links
from hcsim.training.elastic.synchronise import synchronise
from hcsim.training.elastic.trainee import Trainee
from hcsim.training.run import Run


class Voting:
    """Holds a replica, and votes."""

    def __init__(self, trainee: Trainee, conductor: Conductor, settings: Training, extras: Extras) -> None:
        self.trainee = trainee
        self.settings = settings
        self.observer = Recovery(trainee.host, extras.observer, settings.timeout_s)
        self.ballot = Ballot(trainee.learner.layout, lambda: trainee.method.alike, conductor)
        self.ballot.leaving = self.leaving = extras.leaving
        self._checkpoints = extras.checkpoints
        self._began = extras.began
        self._conductor = conductor
        self._by_links = extras.by_links
        self._due = 0
        """The step after which to save."""
        self._votes: Votes | None = None
        """In the view that we work in, once it has begun."""

    @property
    def has_begun(self) -> bool:
        """Whether there is a run."""
        return self.trainee.has_begun

    @property
    def run(self) -> Run:
        """From the first view on."""
        return self.trainee.run

    @property
    def is_complete(self) -> bool:
        """Every step is noted when it is done."""
        return self.has_begun and self.run.step >= self.settings.steps

    @property
    def votes_seen(self) -> VotesSeen | None:
        """See `Part.votes_seen`."""
        return self._votes.seen if self._votes is not None else None

    def options(self, view: View) -> Options:
        """How a view's group works."""
        return self.trainee.options(view)

    async def train(self, group: Group, view: View) -> bool:
        """Train in this view for as long as it lasts; whether that was all."""
        trainee, self._votes = self.trainee, None
        await synchronise(group, view, trainee)
        if self._by_links and self._conductor.ways is not None:
            await follow_links(group, view, self._conductor.ways)
        run = trainee.run
        self._began(view, run.step)
        if self._checkpoints is not None:
            self._due = self._checkpoints.after(run.step)
        votes = run.pact = self._votes = Votes(self.ballot, group, view, self._settled)
        run.observer = self.observer
        watching = trainee.host.spawn(
            watch_steps(group, view, self._conductor, self.observer), name=f"watch the steps of view {view.epoch}"
        )
        try:
            await trainee.method.train(run)
        except CompressionError as error:
            # The others wait for what we cannot send: all try this step once more.
            votes.cannot_send(run.step, error)
            raise CollectiveError(f"{self._conductor.us.name} cannot send: {error}", peer=group.rank) from error
        finally:
            watching.cancel()
        if run.step >= run.settings.steps:
            return await votes.confirmed(run.step)
        if not votes.leavers:
            return False
        try:
            await self._hand_over(group, votes.leavers)
        except CollectiveError:
            if group.rank not in votes.leavers:
                raise
            # Whether it arrived is not known: whoever stayed now might owe it twice.
        if group.rank not in votes.leavers:
            return False
        await self._conductor.leave()
        return True

    async def complete(self) -> None:
        """See `is_complete`."""

    async def close(self) -> None:
        """Nothing goes on between views."""

    async def _hand_over(self, group: Group, leavers: tuple[int, ...]) -> None:
        """What those who leave still owe is owed by the first who stays."""
        heirs = [rank for rank in range(group.size) if rank not in leavers]
        if not heirs:
            return
        routes = [(leaver, heirs[0]) for leaver in leavers]
        giving = {heirs[0]: Parcel(b"", self.trainee.owed())} if group.rank in leavers else {}
        if giving:
            self.trainee.forget_owed()
        for parcel in await relay(group, routes, giving):
            self.trainee.take_in(parcel.arrays)

    async def _settled(self) -> None:
        """A step is done: perhaps it is time to save."""
        run, checkpoints = self.trainee.run, self._checkpoints
        run.group.host.trace("applied", run.group.epoch, run.step)
        if checkpoints is not None and run.group.rank == 0 and run.step >= self._due:
            self._due = checkpoints.after(run.step)
            await checkpoints.save(run.group.host, self.trainee.saved(), run.step)
        if run.group.size > 1:  # nobody else can be what delays one that is alone
            self.observer.step_timer.settled(run.step, run.group.host.clock.elapsed())

    async def save(self) -> None:
        """Save what we hold. A step that is under way does not count: whoever completes it has a newer state. Nor do
        steps that we took alone since all last agreed: without a view there is nobody to tell of them."""
        if self._checkpoints is not None and not self.trainee.is_on_the_way:
            self.run.drop()
            await self._checkpoints.save_last(self.trainee.host, self.trainee.saved(), self.run.step)
