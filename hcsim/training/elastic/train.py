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
import re
from functools import partial

import msgspec

from hcsim.cluster.conductor import Conductor, next_view
from hcsim.cluster.diagnosis import Accusation, Failure
from hcsim.cluster.view import View
from hcsim.collectives.failure_domain import TOLD
from hcsim.collectives.group import Group
from hcsim.config.training import Training
from hcsim.errors import CollectiveError, CollectiveTimeout, HcsimError, RemoteProtocolError, UsageError
from hcsim.runtime.host import Host
from hcsim.training.elastic.pact import Contradiction
from hcsim.training.elastic.part import Extras, Part
from hcsim.training.elastic.recovery import NotAnswering, SlowSteps
from hcsim.training.elastic.served import Served
from hcsim.training.elastic.survey import survey
from hcsim.training.elastic.trainee import Trainee
from hcsim.training.elastic.voting import Voting
from hcsim.training.learner import digest
from hcsim.training.run import Report
from hcsim.training.strategies import ParameterServer, strategy
from hcsim.transport.hello import Membership
from hcsim.transport.reception import Reception, check_all
from hcsim.transport.wire import Wire

_NO_PARAMETERS = "shapes"
"""What a training of shapes alone comes to."""
_LAST_STEPS = 4
"""Steps whose work a member tells the others when a view fails."""


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
    epoch, progress = -1, _Progress(host, part)
    reception = Reception(host, await host.listen(conductor.us.address))
    conductor.check_with(partial(check_all, host))
    try:
        while (view := await next_view(host, conductor, epoch, part.leaving, _outcome(part))) is not None:
            epoch = view.epoch
            conductor.over(epoch).add_done_callback(part.observer.failed)
            if await _follow(conductor, view, wire, part, progress, reception):
                if part.is_complete:
                    conductor.finish(_outcome(part))
                break
        if part.is_complete:
            await part.complete()
    finally:
        conductor.check_with(None)
        await part.close()
        await reception.close()
    if not part.has_begun:
        raise HcsimError("left before training began")
    part.observer.finished(part.run)
    report = part.run.report()
    if part.run.step < part.settings.steps:
        await part.save()
    return report


def _outcome(part: Part) -> str:
    """What the whole training came to; empty before its end."""
    return (digest(part.run.learner.replica.parameters) or _NO_PARAMETERS) if part.is_complete else ""


async def _follow(
    conductor: Conductor, view: View, wire: Wire, part: Part, progress: _Progress, reception: Reception
) -> bool:
    """Take part in a view; whether that was all."""
    host, rank = reception.host, view.rank(conductor.us)
    if rank is None:
        raise UsageError(f"the conductor gave {conductor.us.name} a view that it is not in: epoch {view.epoch}")
    addresses = tuple(member.address for member in view.members)
    identities = view.nodes if conductor.identified else ()
    membership = Membership(rank, addresses, view.lineage, view.epoch, wire, identities)
    group = await Group.open(host, membership, part.options(view), reception=reception)
    over = conductor.over(view.epoch)
    watching = host.spawn(_watch(group, over), name=f"watch over view {view.epoch}")
    host.trace("follows", view.epoch, rank, len(addresses))
    ways = conductor.ways
    progress.begin()
    try:
        if ways is not None:
            ways.in_use = lambda: {view.nodes[other]: ends for other, ends in group.ends.items()}
            await survey(group, view, ways, over)
        if group.error is None and not over.done():
            conductor.surveyed(view.epoch)
        return await part.train(group, view)
    except CollectiveError as error:
        group.fail(error)
        host.trace("view failed", view.epoch, str(error))
        if ways is not None and error.peer is not None:
            ways.forget(view.nodes[error.peer])
        conductor.broken(view.epoch, progress.failure(view, group))
        return False
    except HcsimError as error:
        group.fail(f"{conductor.us.name} ended: {error}", rank)
        raise
    finally:
        watching.cancel()
        await group.close()
        if ways is not None:
            ways.in_use = dict


class _Progress:
    """Whether views come to anything."""

    def __init__(self, host: Host, part: Part) -> None:
        self._host = host
        self._part = part
        self._step = 0
        """Where we were when a view last failed: what was done since may have been done in views that others joined."""

    def begin(self) -> None:
        """A view begins."""
        self._part.observer.began()

    def failure(self, view: View, group: Group) -> Failure:
        """What there is to know of a view whose group failed."""
        error, waited_for, progress_s = group.error, group.waited_for, self._part.observer.progress_s
        peer = error.peer if isinstance(error, CollectiveError) and error.peer != group.rank else None
        seen_here = isinstance(error, CollectiveError) and error.phase != TOLD
        violation = seen_here and error is not None and isinstance(error.__cause__, RemoteProtocolError)
        wrong = error.wrong if isinstance(error, NotAnswering) else {}
        accusations = [Accusation(view.nodes[rank], why) for rank, why in wrong.items()]
        for witness, accused, why in error.doubts if isinstance(error, Contradiction) else ():
            accusations.append(Accusation(view.nodes[accused], named(why, view), view.nodes[witness]))
        reason, violator = named(str(error), view), view.nodes[peer] if violation and peer is not None else ""
        if not violator and group.skipped is not None and waited_for is not None:
            reason, violator = named(f"{error}; {group.skipped}", view), view.nodes[waited_for]
        slow, now = isinstance(error, SlowSteps), self._host.clock.elapsed()
        stalled_s = 0.0 if progress_s is None else now - progress_s
        before, self._step = self._step, self._part.run.step if self._part.has_begun else 0
        return Failure(
            reason,
            violator,
            isinstance(error, CollectiveTimeout),
            view.nodes[waited_for] if waited_for is not None and not slow else "",
            self._step != before,
            max(stalled_s, self._part.observer.step_timer.slow_s),
            slow,
            self._work_s(),
            tuple(accusations),
            self._part.votes_seen,
            group.standing_s,
        )

    def _work_s(self) -> float:
        """What this member itself computed and encoded for its last steps, in seconds a step."""
        points = self._part.run.points[-_LAST_STEPS:] if self._part.has_begun else []
        return sum(point.spent_s["compute"] + point.spent_s["encode"] for point in points) / max(1, len(points))


def named(text: str, view: View) -> str:
    """An error of a view's group, with the members' names and addresses in the place of their ranks and ids."""

    def name(match: re.Match[str]) -> str:
        rank = int(match[1])
        return f"{view.members[rank].name} ({view.members[rank].address})" if rank < len(view.members) else match[0]

    text = re.sub(r"\brank (\d+)\b", name, text)
    nodes = {member.node: f"{member.name} ({member.address})" for member in view.members}
    return re.sub(rf"\b({'|'.join(map(re.escape, nodes))})\b", lambda match: nodes[match[0]], text)


def prepare(host: Host, conductor: Conductor, settings: Training, seed: int, extras: Extras) -> Part:
    """Load the data and build the model, which may take seconds."""
    saved = extras.checkpoints.load() if extras.checkpoints is not None else None
    if isinstance(strategy(settings.strategy), ParameterServer):
        served = Served(host, settings, seed, conductor, extras)
        if saved is not None:
            served.reload(saved)
        return served
    member = Voting(Trainee(host, settings, seed, extras.what, by_links=extras.by_links), conductor, settings, extras)
    if saved is not None:
        member.trainee.checkpoint = saved
    return member


async def _watch(group: Group, over: asyncio.Future[str]) -> None:
    group.fail(await asyncio.shield(over))
