"""Training that follows a conductor from view to view.

In every view: open a group, synchronise, and go on with the step that all have come to. A view ends

    when a member is lost       the conductor says that it is over, or a collective fails. What was not voted on by
                                all is abandoned, and the members of the next view try that step again.
    when members come or go     all leave it together, after the step that is under way.
    when training is done       all have confirmed that they hold the same model.

A member that leaves in an orderly way hands what its error feedback still owes to the first of those who stay. With
one that crashes, what it owed is lost: at most what one member had not sent. Nothing is ever sent twice. Whoever leaves
before the end saves what it holds: it may be the last.

When this returns, the member has trained to the end or left; it is for the caller to be in no further view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import msgspec

from hcsim.cluster.conductor import Conductor
from hcsim.cluster.view import View
from hcsim.collectives.group import Group, Options
from hcsim.config.training import Training
from hcsim.errors import CollectiveError, CompressionError, HcsimError, UsageError
from hcsim.runtime.host import Host
from hcsim.training.elastic.checkpoint import Checkpoints, load
from hcsim.training.elastic.pact import Ballot, Votes
from hcsim.training.elastic.parcel import Parcel, relay
from hcsim.training.elastic.recovery import Recovery
from hcsim.training.elastic.served import Served
from hcsim.training.elastic.survey import follow_links, survey
from hcsim.training.elastic.synchronise import synchronise
from hcsim.training.elastic.trainee import Trainee
from hcsim.training.run import Observer, Report, Run
from hcsim.training.strategies import ParameterServer, strategy
from hcsim.training.task import Task
from hcsim.transport.hello import Membership
from hcsim.transport.wire import Wire

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class Extras(msgspec.Struct, frozen=True):
    """What a training may have beside its settings."""

    observer: Observer | None = None
    what: Task | None = None
    """A task of one's own."""
    leaving: asyncio.Event | None = None
    """Once it is set, this member leaves after the step that is under way."""
    checkpoints: Checkpoints | None = None
    began: Callable[[View, int], None] = lambda view, step: None
    """Hears of each view in which all have come to hold the same, and how many steps had been taken by then."""
    by_links: bool = False
    """Whether the ring's order and `auto` follow what was measured of the links; the same for all."""


async def elastic_train(
    host: Host,
    conductor: Conductor,
    settings: Training,
    seed: int,
    extras: Extras,
    wire: Wire | None = None,
) -> Report:
    """Train with whoever is in the conductor's views, and say what came of it. All give the same settings and seed."""
    return await follow(host, conductor, prepare(host, conductor, settings, seed, extras), wire or Wire())


async def follow(host: Host, conductor: Conductor, part: Part, wire: Wire) -> Report:
    """Train what was prepared, from view to view, to the end."""
    # A newcomer calls while the others are still busy with their step.
    patience_s = max(wire.connect_timeout_s, part.settings.timeout_s)
    wire = msgspec.structs.replace(wire, connect_timeout_s=patience_s)
    epoch, patience = -1, _Patience(host, part)
    try:
        while (view := await next_view(host, conductor, epoch, part.leaving)) is not None:
            epoch = view.epoch
            conductor.over(epoch).add_done_callback(part.observer.failed)
            if await _follow(host, conductor, view, wire, part, patience):
                break
    finally:
        await part.close()
    if not part.has_begun:
        raise HcsimError("left before training began")
    part.observer.finished(part.run)
    report = part.run.report()
    if part.run.step < part.settings.steps:
        await part.save()
    return report


class Part(Protocol):
    """What a member does in a training, from view to view."""

    @property
    def settings(self) -> Training:
        """What is trained, and how."""

    @property
    def observer(self) -> Recovery:
        """Who looks on."""

    @property
    def leaving(self) -> asyncio.Event | None:
        """Set once this member is to leave."""

    @property
    def has_begun(self) -> bool:
        """Whether there is a run."""

    @property
    def run(self) -> Run:
        """From the first view on."""

    def options(self, view: View) -> Options:
        """How a view's group works."""

    async def train(self, group: Group, view: View) -> bool:
        """Train in this view for as long as it lasts; whether that was all."""

    async def close(self) -> None:
        """Nothing goes on after this."""

    async def save(self) -> None:
        """Save what we hold, if checkpoints are kept: we leave before the end."""


async def _follow(host: Host, conductor: Conductor, view: View, wire: Wire, part: Part, patience: _Patience) -> bool:
    """Take part in a view; whether that was all."""
    rank = view.rank(conductor.us)
    if rank is None:
        raise UsageError(f"the conductor gave {conductor.us.name} a view that it is not in: epoch {view.epoch}")
    addresses = tuple(member.address for member in view.members)
    identities = view.nodes if conductor.identified else ()
    membership = Membership(rank, addresses, view.lineage, view.epoch, wire, identities)
    group = await Group.open(host, membership, part.options(view))
    over = conductor.over(view.epoch)
    watching = host.spawn(_watch(group, over), name=f"watch over view {view.epoch}")
    host.trace("follows", view.epoch, rank, len(addresses))
    ways = conductor.ways
    try:
        if ways is not None:
            ways.in_use = lambda: {view.nodes[other]: ends for other, ends in group.ends.items()}
            await survey(group, view, ways, over)
        return await part.train(group, view)
    except CollectiveError as error:
        group.fail(str(error), error.peer)
        host.trace("view failed", view.epoch, str(error))
        if ways is not None and error.peer is not None:
            ways.forget(view.nodes[error.peer])
        await patience.hold_back(over)
        if not over.done():
            conductor.broken(view.epoch, error.peer, str(error))
        return False
    except HcsimError as error:
        group.fail(f"{conductor.us.name} ended: {error}", rank)
        raise
    finally:
        watching.cancel()
        await group.close()
        if ways is not None:
            ways.in_use = dict


class _Patience:
    """Members that get nowhere would else ask for one view after the other, as fast as they can."""

    def __init__(self, host: Host, part: Part) -> None:
        self._host = host
        self._part = part
        self._step = -1
        self._in_vain = 0
        """Views in a row that failed at the same step."""

    async def hold_back(self, over: asyncio.Future[str]) -> None:
        """Wait before a failure is reported, unless somebody else has done so: longer each time."""
        step = self._part.run.step if self._part.has_begun else -1
        self._in_vain = self._in_vain + 1 if step == self._step else 1
        self._step = step
        if self._in_vain > 1:
            pause_s = min(_FIRST_PAUSE_S * 2 ** (self._in_vain - 2), _LONGEST_PAUSE_S)
            with suppress(TimeoutError):
                async with self._host.clock.timeout(pause_s):
                    await asyncio.shield(over)


def prepare(host: Host, conductor: Conductor, settings: Training, seed: int, extras: Extras) -> Part:
    """Load the data and build the model, which may take seconds."""
    saved = load(extras.checkpoints.vault) if extras.checkpoints is not None else None
    if isinstance(strategy(settings.strategy), ParameterServer):
        served = Served(host, settings, seed, extras.what, conductor)
        served.leaving, served.observer = extras.leaving, Recovery(host, extras.observer)
        served.checkpoints, served.began = extras.checkpoints, extras.began
        if saved is not None:
            served.reload(saved)
        return served
    member = _Member(Trainee(host, settings, seed, extras.what, by_links=extras.by_links), conductor, settings, extras)
    if saved is not None:
        member.trainee.checkpoint = saved
    return member


async def next_view(host: Host, conductor: Conductor, after: int, leaving: asyncio.Event | None) -> View | None:
    """The next view; None once this member wants to leave, while there is none."""
    if leaving is None:
        return await conductor.view(after=after)
    looking: asyncio.Task[View] = host.spawn(conductor.view(after=after), name="next view")
    giving_up = host.spawn(_cancel_once(leaving, looking), name="leave without a view")
    us = asyncio.current_task()
    assert us is not None
    try:
        return await looking
    except asyncio.CancelledError:
        if us.cancelling():  # it is we who are cancelled
            raise
        return None
    finally:
        looking.cancel()
        giving_up.cancel()


async def _cancel_once(event: asyncio.Event, task: asyncio.Task[View]) -> None:
    await event.wait()
    task.cancel()


class _Member:
    """Holds a replica, and votes."""

    def __init__(self, trainee: Trainee, conductor: Conductor, settings: Training, extras: Extras) -> None:
        self.trainee = trainee
        self.settings = settings
        self.observer = Recovery(trainee.host, extras.observer)
        self.ballot = Ballot(trainee.learner.layout, lambda: trainee.method.alike, conductor)
        self.ballot.leaving = self.leaving = extras.leaving
        self._checkpoints = extras.checkpoints
        self._began = extras.began
        self._conductor = conductor
        self._by_links = extras.by_links
        self._due = 0
        """The step after which to save."""

    @property
    def has_begun(self) -> bool:
        """Whether there is a run."""
        return self.trainee.has_begun

    @property
    def run(self) -> Run:
        """From the first view on."""
        return self.trainee.run

    def options(self, view: View) -> Options:
        """How a view's group works."""
        return self.trainee.options(view)

    async def train(self, group: Group, view: View) -> bool:
        """Train in this view for as long as it lasts; whether that was all."""
        trainee = self.trainee
        await synchronise(group, view, trainee)
        if self._by_links and self._conductor.ways is not None:
            await follow_links(group, view, self._conductor.ways)
        run = trainee.run
        self._began(view, run.step)
        if self._checkpoints is not None:
            self._due = self._checkpoints.after(run.step)
        votes = run.pact = Votes(self.ballot, group, view, self._settled)
        run.observer = self.observer
        try:
            await trainee.method.train(run)
        except CompressionError as error:
            # The others wait for what we cannot send: all try this step once more.
            votes.cannot_send(run.step, error)
            raise CollectiveError(f"{self._conductor.us.name} cannot send: {error}", peer=group.rank) from error
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
            await checkpoints.save(run.group.host, self.trainee.saved())

    async def save(self) -> None:
        """Save what we hold. A step that is under way does not count: whoever completes it has a newer state. Nor do
        steps that we took alone since all last agreed: without a view there is nobody to tell of them."""
        if self._checkpoints is not None and not self.trainee.is_on_the_way:
            self.run.drop()
            await self._checkpoints.save_last(self.trainee.host, self.trainee.saved(), self.run.step)


async def _watch(group: Group, over: asyncio.Future[str]) -> None:
    group.fail(await asyncio.shield(over))
