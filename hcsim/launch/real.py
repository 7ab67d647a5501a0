"""This machine in a real cluster: as one of fixed ranks, as a member among machines that find each other, or as their
coordinator."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hcsim.cluster.conductor import Introduction
from hcsim.cluster.inquiry import Survey
from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.config import Cluster
from hcsim.errors import ConfigError
from hcsim.identity.handshake import Credentials
from hcsim.launch import DEFAULT_PORT
from hcsim.real.host import RealHost, RealOptions, check_loopback
from hcsim.real.interfaces import host_name, reachable_at
from hcsim.real.keys import beside_a_node, load_credentials
from hcsim.real.tls import ClusterTls, TlsFiles
from hcsim.runtime.address import parse, with_port
from hcsim.telemetry.trace import Sink, Trace
from hcsim.transport.admission import AdmittedHost
from hcsim.transport.callers import Once, Refusals
from hcsim.transport.hello import Membership, Wire

if TYPE_CHECKING:
    from hcsim.cluster.coordinator import Policy
    from hcsim.node import Plan
    from hcsim.training.run import Observer, Report

_ANSWER_S = 2.0


class RealNode(msgspec.Struct, frozen=True):
    """What a person decides about this machine's place in a real cluster."""

    home: Path
    """Where its key and its clusters' secrets are."""
    cluster: str = "home"
    """Which of them."""
    name: str = ""
    """What the others call this machine; empty: its host name."""
    hosts: tuple[str, ...] = ()
    """Addresses that the others reach it at, the best first; empty: those of its interfaces, fastest medium first."""
    device: str = "cpu"
    state: Path | None = None
    """A folder for what outlives a crash; None: nothing does."""
    metrics_at: str | None = None
    """Where Prometheus finds its figures (host:port); None: nowhere."""


async def train_in_cluster(
    node: RealNode,
    plan: Plan,
    *,
    observer: Observer | None = None,
    tell: Callable[[str], None] = lambda what: None,
    leaving: asyncio.Event | None = None,
    sink: Sink | None = None,
) -> Report:
    """Find the other machines of a cluster, and train with them until the end or until `leaving` is set.

    `sink` gets the events of this machine's trace."""
    from hcsim.node import train_as_member

    async with real_member(node, tell, sink) as (host, credentials):
        me = real_introduction(host, node, plan.cluster, credentials)
        tell(f"{me.name} is node {me.node[:8]}, at {me.address}")
        return await train_as_member(
            host,
            me,
            plan,
            credentials=credentials,
            observer=observer,
            tell=tell,
            leaving=leaving,
            durable=node.state is not None,
        )


async def ask_cluster(home: Path, cluster: str, peers: Sequence[str], look_s: float, forget: str = "") -> Survey:
    """Ask the nodes of a cluster that this machine has joined how they stand; tell them who is gone for good.

    Whoever is asked gets our trust list with the handshake, and we get theirs."""
    proved = beside_a_node(load_credentials(home, cluster, host_name()))
    secret = proved.secret
    async with RealHost(RealOptions("asker", seed=secrets.randbits(64), tls=ClusterTls(proved.key, secret))) as host:
        admitted = AdmittedHost(host, proved)
        survey = Survey(admitted, secret.namespace.hex(), _ANSWER_S, forget)
        await survey.run([with_port(peer, Cluster().discovery_port) for peer in peers], look_s)
        return survey


async def serve_coordinator(
    listen: str,
    policy: Policy,
    tell: Callable[[str], None],
    *,
    tls: TlsFiles | None = None,
    insecure: bool = False,
    state: Path | None = None,
    member: tuple[Path, str] | None = None,
) -> None:
    """Be the place where workers meet, until cancelled; `tell` hears what happens.

    With a `member` (the home of this machine's key, and a cluster) the workers are members of that cluster."""
    from hcsim.cluster.coordinator import Coordinator
    from hcsim.node import admitted

    proved = None if member is None else beside_a_node(load_credentials(*member, host_name()))
    secured = tls if proved is None else ClusterTls(proved.key, proved.secret)
    options = RealOptions("coordinator", seed=secrets.randbits(64), tls=secured, insecure=insecure, state=state)
    async with RealHost(options) as host:
        inside = host if proved is None else admitted(host, proved, tell)
        coordinator = Coordinator(inside, policy, note=tell)
        listener = await inside.listen(listen)
        tell(f"coordinator at {listener.address}: waiting for {policy.needed} workers")
        coordinator.open(listener)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await coordinator.close()
            await listener.close()


@asynccontextmanager
async def real_member(
    node: RealNode, tell: Callable[[str], None] = lambda what: None, sink: Sink | None = None
) -> AsyncIterator[tuple[RealHost, Credentials]]:
    """This machine, with the TLS of a cluster that it has joined; `tell` hears who did not get through it."""
    name = node.name or host_name()
    proved = load_credentials(node.home, node.cluster, name)
    tls = ClusterTls(proved.key, proved.secret)
    options = RealOptions(name, seed=secrets.randbits(64), tls=tls, device=node.device, state=node.state)
    once = Once(tell)
    trace = None if sink is None else Trace(sink)
    here = RealHost(options, trace=trace, on_refused=lambda error: once(f"a call was not taken: {error}"))
    async with here as host, _serving(node.metrics_at, host):
        try:
            yield host, proved
        finally:
            if trace is not None:
                trace.digest()  # hands on the last events


def real_introduction(host: RealHost, node: RealNode, cluster: Cluster, proved: Credentials) -> Introduction:
    """This machine, as it introduces itself to the others."""
    from hcsim.node import introduced

    return introduced(host.name, node.hosts or reachable_at(host.interfaces()), cluster, proved)


@asynccontextmanager
async def real_group(
    rank: int,
    peers: Sequence[str],
    *,
    options: Options | None = None,
    wire: Wire | None = None,
    tls: TlsFiles | ClusterTls | None = None,
    insecure: bool = False,
    shared_memory: bool = True,
    device: str = "cpu",
    metrics_at: str | None = None,
    on_refused: Callable[[str], None] = lambda what: None,
) -> AsyncIterator[Group]:
    """Join a real group: `peers` are all ranks' addresses in order, ours included; the port may be left out.

    Ranks of one machine that are named by its loopback reach each other through shared memory, unless they want TCP
    there too. `device` is what a training run computes with, as torch calls it. At `metrics_at` (host:port) Prometheus
    finds our figures meanwhile. `on_refused` hears, once for each reason, of callers that were not let in.
    """
    addresses = tuple(with_port(peer, DEFAULT_PORT) for peer in peers)
    twice = next((address for address in addresses if addresses.count(address) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is there twice among the peers: each rank needs an address of its own")
    for address in addresses:
        if parse(address).port == 0 and len(addresses) > 1:  # one that nobody can ever call from is not waited for
            raise ConfigError(f"{address}: the others cannot know which port that is: give each rank one of its own")
    if len(addresses) > 1 and not insecure:
        _refuse_plaintext(addresses, has_tls=tls is not None)
    refusals = Refusals(Once(on_refused))
    us = Membership(rank, addresses, wire=wire or Wire(), refusals=refusals)
    async with AsyncExitStack() as stack:
        named = RealOptions(
            name=f"rank {rank}",
            seed=secrets.randbits(64),
            tls=tls,
            insecure=insecure,
            shared_memory=shared_memory,
            device=device,
        )
        host = await stack.enter_async_context(RealHost(named, on_refused=lambda error: refusals(str(error))))
        await stack.enter_async_context(_serving(metrics_at, host))
        yield await stack.enter_async_context(await Group.open(host, us, options))


def _refuse_plaintext(addresses: Sequence[str], *, has_tls: bool) -> None:
    """What the host refuses where it listens and dials, for all ranks at once: some of them only call us.

    What a name stands for the host finds out when it calls it."""
    for target in map(parse, addresses):
        for host in target.hosts if not target.encrypted(has_tls=has_tls) else ():
            with suppress(ValueError):  # a name
                check_loopback(host)


def _serving(address: str | None, host: RealHost) -> AbstractAsyncContextManager[object]:
    """A host's metrics are served there meanwhile, if anywhere."""
    if address is None:
        return nullcontext()
    from hcsim.real.http import serving_metrics

    return serving_metrics(host.metrics, address)
