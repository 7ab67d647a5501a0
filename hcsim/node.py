"""One node of a cluster, on any host: its identity, its membership, and its training.

It runs on virtual and on real hosts. `launch` creates the host; this module uses only the `Host` interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from hcsim.cluster.coordinator import CoordinatedMembership, Coordinator, CoordinatorPolicy
from hcsim.cluster.membership_source import NodeInfo
from hcsim.cluster.node import ClusterNode, MeetingHandler
from hcsim.cluster.view import View
from hcsim.config.cluster import Cluster
from hcsim.config.training import Training
from hcsim.errors import HcsimError
from hcsim.identity.handshake import Credentials
from hcsim.runtime.address import address_at
from hcsim.runtime.host import Host
from hcsim.training.elastic.checkpoint import CheckpointOrigin, CheckpointWriter, in_store
from hcsim.training.elastic.member import TrainingExtras
from hcsim.training.elastic.train import follow, prepare
from hcsim.training.observers import HistoryObserver, recorded
from hcsim.training.run import Observer, Report
from hcsim.training.strategies import ParameterServer, strategy
from hcsim.training.task import Task
from hcsim.training.tasks import task
from hcsim.transport.admission import AdmissionOutcome, AdmittedHost
from hcsim.transport.admission_queue import LogDeduplicator, one_line
from hcsim.transport.groups import Wire


class ClusterJob(msgspec.Struct, frozen=True):
    """The work of a cluster, the same on all nodes."""

    cluster: Cluster
    training: Training
    seed: int
    wire: Wire = Wire()


def admitted(host: Host, credentials: Credentials, tell: Callable[[str], None]) -> Host:
    """Return the host with channels to members only. `tell` is called for rejected peers."""
    once = LogDeduplicator(tell)
    return AdmittedHost(host, credentials, lambda verdict: _report(verdict, once))


def introduced(name: str, hosts: Sequence[str], cluster: Cluster, proved: Credentials, home: str = "") -> NodeInfo:
    """Return the introduction to the other members of a machine that is reached at these hosts."""
    return NodeInfo(
        node=proved.key.node_id,
        boot=proved.boot,
        name=name,
        control=address_at(hosts, cluster.discovery_port),
        address=address_at(hosts, cluster.gradient_port),
        namespace=proved.secret.namespace.hex(),
        home=home,
    )


@asynccontextmanager
async def coordinating(
    host: Host, cluster: Cluster, most: int, credentials: Credentials, tell: Callable[[str], None]
) -> AsyncIterator[None]:
    """Where this host is to be the coordinator of at most so many members, it is, until the last of them has gone."""
    if host.name != cluster.coordinating_host or cluster.coordinator is None:
        yield
        return
    inside, beat = admitted(host, credentials, tell), cluster.beat
    policy = CoordinatorPolicy(
        workers=max(most, cluster.needed),
        begin=cluster.needed,
        heartbeat_s=float(beat.interval_s),
        silence_s=float(beat.timeout_s),
    )
    coordinator = Coordinator(inside, policy, note=lambda what: tell(f"coordinator: {what}"))
    listener = await inside.listen(cluster.coordinator)
    coordinator.open(listener)
    us = asyncio.current_task()
    try:
        try:
            yield
        finally:  # the others may go on without our part in their work
            if us is not None and not us.cancelling():
                await coordinator.deserted()
    finally:
        await coordinator.close()
        await listener.close()


@asynccontextmanager
async def running(node: ClusterNode | CoordinatedMembership) -> AsyncIterator[None]:
    """Let the node accept connections and look for other nodes inside this context."""
    await node.start()
    reason = "it ended with an error"
    try:
        yield
        reason = "it has finished or left"
    finally:
        await node.stop(reason)


async def train_as_member(
    host: Host,
    me: NodeInfo,
    plan: ClusterJob,
    *,
    credentials: Credentials | None = None,
    observer: Observer | None = None,
    tell: Callable[[str], None] = lambda what: None,
    leaving: asyncio.Event | None = None,
    what: Task | None = None,
    began: Callable[[View, int, int], None] = lambda view, rank, step: None,
    durable: bool = True,
    meeting: MeetingHandler | None = None,
) -> Report:
    """Find the others, train with them until the end or until `leaving` is set, and leave in order.

    `began` is called with each view whose members have synchronised, our rank in it, and the number of steps taken
    by then.
    `meeting` serves requests to measure the links of this host with other members.

    If the host's store is `durable`, checkpoints are kept there, and training resumes from an existing one."""
    history = recorded(host, plan.training)

    def say(text: str) -> None:
        history.say(host.clock.elapsed(), one_line(text))
        tell(text)

    inside = host if credentials is None else admitted(host, credentials, say)

    def in_view(view: View, step: int) -> None:
        began(view, view.rank(node.us) or 0, step)
        anew = ", as no member has a checkpoint" if durable and view.epoch > 1 else ""
        say(f"view {view.epoch}: {f'training goes on after step {step}' if step else f'training begins{anew}'}")

    trusted = None if credentials is None else credentials.trusted
    node: ClusterNode | CoordinatedMembership
    if plan.cluster.coordinator is None:
        node = ClusterNode(inside, me, plan.cluster, say, _terms(plan), trusted, history, meeting)
    else:
        announced = plan.cluster.discover is not False
        node = CoordinatedMembership(
            inside, me, plan.cluster.coordinator, say, _terms(plan), history=history, announced=announced
        )
    # It may take seconds to load data and to build a model: a node answers from its first moment, so they come before.
    saving = _checkpoints(inside, plan, what, say) if durable else None
    watched = HistoryObserver(history, host.clock, observer)
    extras = TrainingExtras(watched, what, leaving, saving, in_view, by_links=plan.cluster.measure == "order")
    member = prepare(inside, node, plan.training, plan.seed, extras)
    async with running(node):
        try:
            report = await follow(member, plan.wire)
        except HcsimError:
            await node.leave()
            raise
        await node.leave()
        return report


def _terms(plan: ClusterJob) -> dict[str, str]:
    """Return the settings that must be equal on all members; settings of the training are compared when it begins."""
    wire, usual = plan.wire, ClusterJob(Cluster(), plan.training, plan.seed)
    given = {
        "wire.segment": (f"{wire.segment_bytes} B", f"{usual.wire.segment_bytes} B"),
        "wire.stripes": (str(wire.stripes), str(usual.wire.stripes)),
        "quorum": (plan.cluster.quorum, usual.cluster.quorum),
    }
    return {name: ours for name, (ours, default) in given.items() if ours != default}


def _checkpoints(
    host: Host, plan: ClusterJob, what: Task | None, tell: Callable[[str], None]
) -> CheckpointWriter | None:
    """A phantom task has nothing to save. Checkpoints of a parameter server cannot be used by the other
    strategies."""
    trained = what or task(plan.training.task)
    if trained.phantom:
        return None
    name = "server_checkpoint" if isinstance(strategy(plan.training.strategy), ParameterServer) else "checkpoint"
    return CheckpointWriter(
        plan.cluster.checkpoint_every,
        in_store(host.store, name),
        tell,
        keep=plan.cluster.checkpoint_keep,
        origin=CheckpointOrigin(trained.name, trained.fingerprint),
    )


def _report(verdict: AdmissionOutcome, tell: Callable[[str], None]) -> None:
    if not verdict.node:
        tell(verdict.text)
