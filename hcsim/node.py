"""One node of a cluster, on any host: its identity, its place among the others, and what it trains.

The same in both worlds. `launch` makes the host; everything from here on is above the seam.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from hcsim.cluster.node import Node, Self
from hcsim.config.cluster import Cluster
from hcsim.config.training import Training
from hcsim.identity.handshake import Credentials
from hcsim.runtime.host import Host
from hcsim.training.elastic.train import elastic_train
from hcsim.training.run import Observer, Report
from hcsim.training.task import Task
from hcsim.transport.admission import AdmittedHost, Verdict
from hcsim.transport.mesh import Wire


class Plan(msgspec.Struct, frozen=True):
    """What a cluster is to do; the same on all nodes."""

    cluster: Cluster
    training: Training
    seed: int
    wire: Wire = Wire()


@asynccontextmanager
async def member(
    host: Host, me: Self, cluster: Cluster, tell: Callable[[str], None], credentials: Credentials | None = None
) -> AsyncIterator[tuple[Host, Node]]:
    """Be a node of a cluster: a host whose channels lead to members only, and the conductor of what they compute."""
    admitted: Host = host
    if credentials is not None:
        admitted = AdmittedHost(host, credentials, lambda verdict: _report(verdict, tell))
    node = Node(admitted, me, cluster, tell)
    await node.start()
    try:
        yield admitted, node
    finally:
        await node.stop("it has finished")


async def train_as_member(
    host: Host,
    me: Self,
    plan: Plan,
    *,
    credentials: Credentials | None = None,
    observer: Observer | None = None,
    tell: Callable[[str], None] = lambda what: None,
    leaving: asyncio.Event | None = None,
    what: Task | None = None,
) -> Report:
    """Find the others, train with them until the end or until `leaving` is set, and leave in an orderly way."""
    async with member(host, me, plan.cluster, tell, credentials) as (admitted, node):
        report = await elastic_train(
            admitted, node, plan.training, plan.seed, observer, wire=plan.wire, leaving=leaving, what=what
        )
        await node.leave()
        return report


def _report(verdict: Verdict, tell: Callable[[str], None]) -> None:
    if not verdict.node:
        tell(verdict.text)
