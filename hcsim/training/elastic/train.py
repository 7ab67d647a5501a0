"""Training that follows a cluster from view to view.

In every view a member opens a group, synchronises, and goes on with the agreed step. A view ends

    when a member is lost       the conductor says that it is over, or a collective fails. A step without all
                                votes is abandoned, and the members of the next view retry it.
    when members come or go     all leave it together, after the current step.
    when training is done       all have confirmed that they hold the same model.

A member that leaves in an orderly way hands its error-feedback residual to the first member that stays. If a
member crashes, its residual is lost: at most what one member had not sent. Nothing is sent twice. A member that
leaves before the end saves its state: it may be the last.

When `follow` returns, the member has trained to the end or left; the caller must join no further view.
"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from hcsim.cluster.membership_source import MembershipSource, next_view
from hcsim.cluster.view import View
from hcsim.collectives.group import Group
from hcsim.config.training import Training
from hcsim.errors import CollectiveError, HcsimError, UsageError
from hcsim.runtime.host import Host
from hcsim.training.elastic.member import ElasticMember, TrainingExtras
from hcsim.training.elastic.parameter_server import ServedMember
from hcsim.training.elastic.replicated import ReplicatedMember
from hcsim.training.elastic.sharded import ShardedMember
from hcsim.training.elastic.staged import StagedMember
from hcsim.training.elastic.synchronise import survey
from hcsim.training.pipeline.strategy import Pipeline
from hcsim.training.run import Report
from hcsim.training.strategies import ParameterServer, ZeroStage, strategy
from hcsim.transport.groups import GroupListener, GroupMembership, Wire, check_all

_NO_PARAMETERS = "shapes"
"""The outcome of a training of shapes alone."""

_MEMBERS: dict[type, type[ElasticMember]] = {
    ParameterServer: ServedMember,
    Pipeline: StagedMember,
    ZeroStage: ShardedMember,
}
"""The members of strategies in which not every member holds the same model."""


def prepare(
    host: Host, source: MembershipSource, settings: Training, seed: int, extras: TrainingExtras
) -> ElasticMember:
    """Load the data and build the model, which may take seconds. All members must give the same settings and seed."""
    saved = extras.checkpoints.load() if extras.checkpoints is not None else None
    chosen = strategy(settings.strategy)
    kind = next((member for of, member in _MEMBERS.items() if isinstance(chosen, of)), ReplicatedMember)
    member = kind(host, source, settings, seed, extras)
    if saved is not None:
        member.reload(saved)
    return member


async def follow(member: ElasticMember, wire: Wire) -> Report:
    """Train a prepared member in the conductor's views, to the end; return its report."""
    host, source = member.host, member.source
    # A newcomer calls while the others are still busy with their step.
    patience_s = max(wire.connect_timeout_s, member.settings.timeout_s)
    wire = msgspec.structs.replace(wire, connect_timeout_s=patience_s)
    epoch = -1
    reception = GroupListener(host, await host.listen(source.us.address))
    source.check_with(partial(check_all, host, is_busy=lambda: member.is_busy_as_usual))
    try:
        while (view := await next_view(host, source, epoch, member.leaving, _outcome(member))) is not None:
            epoch = view.epoch
            source.over(epoch).add_done_callback(member.observer.failed)
            if await _follow(member, view, wire, reception):
                if member.is_complete:
                    source.finish(_outcome(member))
                break
        if member.is_complete:
            await member.complete()
    finally:
        source.check_with(None)
        await member.close()
        await reception.close()
    if not member.has_begun:
        raise HcsimError("left before training began")
    member.observer.finished(member.run)
    report = member.run.report()
    if member.run.step < member.settings.steps:
        await member.save()
    return report


def _outcome(member: ElasticMember) -> str:
    return (member.run.sha256 or _NO_PARAMETERS) if member.is_complete else ""


async def _follow(member: ElasticMember, view: View, wire: Wire, reception: GroupListener) -> bool:
    """Take part in a view; return whether the member is done with the cluster: training is complete, or it left."""
    host, source = reception.host, member.source
    rank = view.rank(source.us)
    if rank is None:
        raise UsageError(f"the membership source gave {source.us.name} a view that it is not in: epoch {view.epoch}")
    addresses = tuple(each.address for each in view.members)
    identities = view.nodes if source.identified else ()
    membership = GroupMembership(rank, addresses, view.lineage, view.epoch, wire, identities)
    group = await Group.open(host, membership, member.options(view), reception=reception)
    over = source.over(view.epoch)
    watching = host.spawn(_watch(group, over), name=f"watch over view {view.epoch}")
    host.trace("follows", view.epoch, rank, len(addresses))
    ways = source.ways
    member.observer.began()
    try:
        if ways is not None:
            ways.in_use = lambda: {view.nodes[other]: ends for other, ends in group.ends.items()}
            await survey(group, view, ways, over)
        if group.error is None and not over.done():
            source.surveyed(view.epoch)
        return await member.train(group, view)
    except CollectiveError as error:
        group.fail(error)
        host.trace("view failed", view.epoch, str(error))
        if ways is not None and error.peer is not None:
            ways.forget(view.nodes[error.peer])
        source.broken(view.epoch, member.failure(view, group))
        return False
    except HcsimError as error:
        group.fail(f"{source.us.name} ended: {error}", rank)
        raise
    finally:
        watching.cancel()
        await group.close()
        if ways is not None:
            ways.in_use = dict


async def _watch(group: Group, over: asyncio.Future[str]) -> None:
    group.fail(await asyncio.shield(over))
